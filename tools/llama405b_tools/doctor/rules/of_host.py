"""What doctor makes of one host's own facts: what is wrong, what it means, what to do. Pure."""

import dataclasses
import re
from collections.abc import Iterator

from llama405b_tools.doctor.facts import HostFacts
from llama405b_tools.machine import fabric, gpus
from llama405b_tools.machine.addresses import is_private
from llama405b_tools.machine.fabric import Rdma

BAD, WARN, NOTE = "bad", "warning", "note"
GIB = 1 << 30
MIN_FILES = 4096
MIN_SHM = 1 * GIB
MIN_TORCH, MIN_TRANSFORMERS, MIN_PYTHON = (2, 11), (5, 17), (3, 11)
MIN_DRIVER = {"12": 525, "13": 580}  # CUDA's major version: the driver branch it needs (CUDA release notes)
NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "wekafs", "ceph")
ROOMIER = 4  # times the room of the working directory: worth a word


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    """What the run would take on a host; 0: not known."""

    ram_bytes: int = 0
    gpu_bytes: int = 0
    weights: str = ""  # rank 0's directory
    cuda: bool = True  # whether GPUs matter
    hash_weights: bool = False  # compare their content with the SHA-256 that download and push noted


def of_host(facts: HostFacts, needs: Needs, *, is_head: bool) -> Iterator[tuple[str, str, str]]:
    """Level, what and remedy of everything worth saying of a host."""
    for part, why in facts.failed.items():
        yield WARN, f"{part} cannot be told: {why}", "look there by hand"
    for rule in (_programs, _disks, _leftovers):
        yield from rule(facts)
    for rule_of_run in (_packages, _gpus, _fabric, _room):
        yield from rule_of_run(facts, needs)
    if is_head:
        yield from _weights(facts)
        yield from _exposure(facts)


def _programs(facts: HostFacts) -> Iterator[tuple[str, str, str]]:
    identity = facts.identity
    tools = identity.tools if identity else {}
    for program, package in (("tmux", "tmux"), ("ip", "iproute2")):
        if not tools.get(program, True):
            yield BAD, f"there is no {program}", f"apt-get install {package} there, or llama405b setup as root"
    place = facts.environment
    if place and not place.workdir_exists:
        yield BAD, f"there is no {place.workdir}", "llama405b setup puts the project there; or set workdir="
    elif place and not place.writable:
        yield BAD, f"{place.workdir} cannot be written", "set workdir= to a directory of your own"
    if facts.kill_user_processes and (identity is None or identity.user != "root"):
        yield (
            BAD,
            "logind ends your processes when you log out (KillUserProcesses=yes), and with them the run",
            "type there: loginctl enable-linger",
        )


def _packages(facts: HostFacts, needs: Needs) -> Iterator[tuple[str, str, str]]:
    place = facts.environment
    if place is None:
        return
    packages = place.packages
    if packages is None:
        yield BAD, "its python cannot be run", "llama405b setup makes one; or set python= in the hosts file"
        return
    missing = [name for name in ("torch", "transformers", "llama405b") if packages.get(name, "missing") == "missing"]
    if missing:
        yield BAD, f"{', '.join(missing)} is not installed", "llama405b setup installs it"
    for name, least in (("python", MIN_PYTHON), ("torch", MIN_TORCH), ("transformers", MIN_TRANSFORMERS)):
        version = _version(packages.get(name, ""))
        if version and version < least:
            yield (
                BAD,
                f"{name} is {packages[name]}",
                f"at least {'.'.join(map(str, least))} is needed; llama405b setup installs it",
            )
    drivers = {gpu.driver for gpu in facts.devices}
    branch = MIN_DRIVER.get(packages.get("cuda", "missing").partition(".")[0])
    for driver in drivers if branch and needs.cuda else ():
        version = _version(driver)
        if branch and version and version[0] < branch:
            yield (
                BAD,
                f"driver {driver} is too old for torch's CUDA {packages.get('cuda')}",
                f"install driver {branch} or newer, or a torch for an older CUDA",
            )
    if drivers and needs.cuda and packages.get("cuda", "missing") == "none":
        yield (
            BAD,
            "it has GPUs, but torch is a build without CUDA",
            "llama405b setup picks the build that fits the driver",
        )


def _gpus(facts: HostFacts, needs: Needs) -> Iterator[tuple[str, str, str]]:
    probe = facts.gpus
    if not probe or not needs.cuda:
        return
    found, fault = gpus.read(probe.smi, probe.fields)
    if fault:
        yield BAD, f"nvidia-smi: {fault}", "reboot it, or reset that GPU; if it comes back, have it replaced"
    for gpu in found:
        yield from _gpu(gpu, needs)
    for pid, name in gpus.foreign(probe.apps):
        yield WARN, f"process {pid} ({name}) holds GPU memory", "end it, or find out whose it is"
    for address, number, meaning in gpus.xids(probe.xid):
        level = BAD if number in gpus.FATAL_XIDS else WARN
        yield (
            level,
            f"Xid {number} at {address}: {meaning}",
            "reset that GPU or reboot; if it comes back, have it replaced",
        )
    if found and not probe.dmesg_readable:
        yield NOTE, "the kernel's log cannot be read, so Xid errors are unknown", "read it as root: dmesg | grep Xid"
    for link in gpus.nvlinks_down(probe.nvlink):
        yield BAD, f"NVLink is down: {link}", "reset the GPUs, or reboot"
    switched = any(name in found[0].name for name in ("H100", "H200", "B200", "A100-SXM")) if found else False
    if len(found) >= 8 and switched and "PCIe" not in found[0].name and probe.fabric_manager in ("inactive", "failed"):
        yield (
            BAD,
            f"nvidia-fabricmanager is {probe.fabric_manager}: GPUs behind an NVSwitch cannot start without it",
            "systemctl enable --now nvidia-fabricmanager",
        )


def _gpu(gpu: gpus.Gpu, needs: Needs) -> Iterator[tuple[str, str, str]]:
    where = f"GPU {gpu.index}"
    if gpu.fault:
        yield BAD, f"{where}: {gpu.fault}", "reset it (nvidia-smi -r) or reboot; if it comes back, have it replaced"
    if gpu.ecc_errors:
        yield (
            BAD,
            f"{where}: {gpu.ecc_errors} uncorrected ECC errors since the driver was loaded",
            "reset it, and have it replaced if they come back",
        )
    if gpu.pages_pending:
        yield WARN, f"{where}: memory rows wait to be remapped", "reset it (nvidia-smi -r) before the run"
    if gpu.slowed:
        yield (
            WARN,
            f"{where}: slowed down: {', '.join(gpu.slowed)}",
            "look at its cooling and power; all others would wait for it",
        )
    if gpu.power_limit_w and gpu.power_max_w and gpu.power_limit_w < 0.95 * gpu.power_max_w:
        yield (
            WARN,
            f"{where}: power limit {gpu.power_limit_w:.0f} of {gpu.power_max_w:.0f} W",
            f"nvidia-smi -i {gpu.index} -pl {gpu.power_max_w:.0f}",
        )
    if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
        yield (
            WARN,
            f"{where}: PCIe x{gpu.pcie_width} of x{gpu.pcie_width_max}",
            "reseat it, or have the machine replaced",
        )
    if needs.gpu_bytes and gpu.memory_mib and gpu.memory_mib << 20 < needs.gpu_bytes:
        yield (
            BAD,
            f"{where}: {gpu.memory_mib / 1024:.0f} GiB, but each rank's state takes {needs.gpu_bytes / GIB:.0f}",
            "more ranks, --parallel.cpu_offload, or pure-bf16",
        )


def _fabric(facts: HostFacts, needs: Needs) -> Iterator[tuple[str, str, str]]:
    probe = facts.rdma
    if not probe or not needs.cuda:
        return
    ports = fabric.read(probe)
    for port in ports:
        if not port.up:
            yield (
                WARN,
                f"{port.device} port {port.port} is not active",
                "look at its cable, or at the subnet manager; NCCL uses the others",
            )
    use = fabric.chosen(ports)
    if use and use[0].roce and len({port.gid_index for port in use}) > 1:
        yield (
            WARN,
            "its RoCE ports have their IPv4 RoCE v2 address at different GID indices",
            "set NCCL_IB_GID_INDEX with --env",
        )
    if use and not probe.peermem:
        yield (
            NOTE,
            "nvidia_peermem is not loaded",
            "GPUDirect RDMA then needs dmabuf (kernel >= 5.12 and the open driver); else: modprobe nvidia_peermem",
        )


def _room(facts: HostFacts, needs: Needs) -> Iterator[tuple[str, str, str]]:
    memory, inside = facts.memory, facts.tmux
    if memory and needs.ram_bytes > memory.total:
        yield (
            BAD,
            f"{memory.total / GIB:.0f} GiB of RAM, but the run keeps {needs.ram_bytes / GIB:.0f} there",
            "more hosts, or --parallel.cpu_offload off",
        )
    if memory and memory.shm_free < MIN_SHM:
        yield (
            WARN,
            f"/dev/shm has {memory.shm_free / GIB:.1f} GiB free",
            "mount -o remount,size=16G /dev/shm (docker: --shm-size)",
        )
    if inside and inside.failed:
        yield BAD, f"tmux does not start: {inside.failed}", "try `tmux new -d true` there"
    elif inside:
        if inside.open_files.isdigit() and int(inside.open_files) < MIN_FILES:
            yield (
                WARN,
                f"{inside.open_files} open files are allowed inside tmux",
                "raise nofile in /etc/security/limits.conf, then: tmux kill-server",
            )
        rdma = fabric.has_rdma(fabric.read(facts.rdma or Rdma()))
        if inside.memlock_kib != "unlimited" and rdma:
            yield (
                BAD,
                f"only {inside.memlock_kib} KiB may be locked inside tmux, and RDMA locks its buffers",
                "set memlock unlimited in /etc/security/limits.conf, then: tmux kill-server",
            )


def _disks(facts: HostFacts) -> Iterator[tuple[str, str, str]]:
    found = facts.disks
    if found is None:
        return
    for entry in found.filesystems:
        if entry.path and entry.free < GIB:
            yield (
                BAD,
                f"{entry.path} has {entry.free / GIB:.2f} GiB free",
                "make room, or set workdir= on another disk",
            )
        if entry.path and not entry.writable:
            yield BAD, f"{entry.path} cannot be written", "choose another, or change its owner"
    for device in found.unmounted_nvme:
        yield (
            NOTE,
            f"{device.device} ({device.size / 1e12:.1f} TB) is not mounted",
            "mount it, and point cache= and scratch= there",
        )
    work = next((entry for entry in found.filesystems if entry.path), None)
    mounts = [entry for entry in found.filesystems if entry.mount]
    local = [entry for entry in mounts if entry.type not in NETWORK and entry.mount not in ("/", "/boot")]
    roomy = max(local, key=lambda entry: entry.free, default=None)
    if work and roomy and roomy.free > ROOMIER * work.free:
        yield (
            NOTE,
            f"{roomy.mount} ({roomy.type}) has {roomy.free / 1e9:,.0f} GB free, the working directory "
            f"{work.free / 1e9:,.0f} GB",
            f"point cache= and scratch= below {roomy.mount}",
        )
    for entry in mounts:
        if entry.type in NETWORK:
            yield (
                NOTE,
                f"{entry.mount} is a network filesystem ({entry.type})",
                f"if all hosts mount it, checkpoints belong there: --checkpoint.dir {entry.mount}/…",
            )


def _leftovers(facts: HostFacts) -> Iterator[tuple[str, str, str]]:
    for value, pids in (facts.leftovers or {}).items():
        yield (
            WARN,
            f"{len(pids)} processes of {value.rpartition(':')[0]} are running",
            "llama405b status says what they are; llama405b stop --orphans ends what nobody owns",
        )


def _weights(facts: HostFacts) -> Iterator[tuple[str, str, str]]:
    found = facts.weights
    if not found:
        return
    if not found.present:
        yield BAD, f"{found.path} does not hold a model", "llama405b download there, or llama405b push it"
    elif found.faults:
        more = f" and {len(found.faults) - 1} more" if len(found.faults) > 1 else ""
        yield (
            BAD,
            f"{found.path}: {found.faults[0]}{more}",
            "fetch these files again: llama405b download, or push",
        )
    elif found.unhashed:
        yield (
            NOTE,
            f"{found.path}: of {found.unhashed} of {found.files} files no SHA-256 is known here",
            "download and push note one; the sizes are right",
        )


def _exposure(facts: HostFacts) -> Iterator[tuple[str, str, str]]:
    public = [entry for entry in facts.addresses if not is_private(entry.address)]
    for entry in public:
        yield (
            WARN,
            f"the rendezvous store has no password and will also listen on {entry.address} ({entry.interface}), a public address",
            f"while a run is up: iptables -A INPUT -i {entry.interface} -p tcp --dport 20000:65535 -j DROP",
        )


def _version(text: str) -> tuple[int, ...] | None:
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None
