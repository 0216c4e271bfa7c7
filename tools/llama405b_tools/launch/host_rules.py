"""Doctor's findings on the hosts' facts: what is wrong, how bad it is, and what to do. Pure."""

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from llama405b.contract.errors import and_more, pluralize
from llama405b.predict.hardware import GIB, match_gpu, read_gpus
from llama405b.predict.search import MEMORY_SPREAD, RESERVED_BOUND, Fit
from llama405b.settings.schema import Config
from llama405b_tools import parsers
from llama405b_tools.agent.machine import DirectoryCheck, DirectoryFault
from llama405b_tools.hosts.fleet import missing_workdir
from llama405b_tools.hosts.inventory import LOOPBACK
from llama405b_tools.hosts.transport import find_disagreement, group_same_machine
from llama405b_tools.launch.findings import (
    BAD,
    NO_IPV4,
    NOTE,
    WARN,
    Finding,
    broken_tmux,
    full_disk,
    missing_gpus,
    missing_packages,
    missing_programs,
    not_sharing,
    reach_remedy,
    unwritable,
)
from llama405b_tools.launch.host_facts import (
    NO_DISKS,
    UNKNOWN_IDENTITY,
    ConnectAttempt,
    Filesystem,
    HostFacts,
    PeerReach,
)
from llama405b_tools.launch.preflight import known_bugs
from llama405b_tools.parsers import is_private
from llama405b_tools.text.words import fold_names

Findings: TypeAlias = Iterator[Finding]
MIN_FILES = 4096
MIN_SHM = 1 * GIB
MIN_VERSIONS = {"python": (3, 11), "torch": (2, 11), "transformers": (5, 17)}
MIN_DRIVER = {"12": 525, "13": 580}  # CUDA's major version: the driver branch it needs (CUDA release notes)
NVSWITCH_GPUS = (
    "H100",
    "H200",
    "B200",
    "A100-SXM",
)  # eight in a host are behind an NVSwitch, unless they are PCIe cards
NETWORK_FILESYSTEMS = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "wekafs", "ceph")
EXPANDABLE_SEGMENTS = "expandable_segments:True"
ROOMIER_FACTOR = 4  # times the working directory's free space: worth a note
MISFITS = {
    Fit.NO: (BAD, f"beyond the prediction's error ({100 * MEMORY_SPREAD:.0f}%)"),
    Fit.MAYBE: (WARN, f"too close: the prediction may be off by {100 * MEMORY_SPREAD:.0f}%"),
}
REPLACE_GPU = "reset that GPU or reboot; if the error returns, replace the GPU"


@dataclasses.dataclass(frozen=True, slots=True)
class Requirements:
    """What the run would need on a host; 0: unknown."""

    ram_bytes: int = 0  # of weights, gradients and moments
    gpu_bytes: int = 0
    ram_peak_bytes: int = 0  # estimated: with what pinning and activations add
    gpu_peak_bytes: int = 0  # allocated
    gpu_reserved_bytes: int = 0  # what PyTorch keeps
    weights: str = ""  # rank 0's directory
    uses_gpus: bool = True  # whether GPUs matter
    # the directory of checkpoints that all hosts must see; "": each has its own, or nothing is saved
    shared_directory: str = "runs"
    hash_weights: bool = False  # compare their content with the SHA-256 that download and push recorded
    settings: Config | None = None  # None: unknown
    mesh: str = ""  # of all ranks, if it has more than shards
    command_format: str = "llama405b {}"  # of a command about these hosts, for the user to type; ``{}``: its verb

    def command_to_type(self, verb: str) -> str:
        """Return a command about these hosts, to be typed by the user."""
        return f"`{self.command_format.replace('{}', verb, 1)}`"


def host_findings(facts: HostFacts, needs: Requirements, *, is_head: bool) -> Findings:
    """Yield all findings of a host."""
    for part, why in facts.failed.items():
        yield Finding(WARN, f"{part} unknown: {why}", "check it by hand")
    yield from _check_programs(facts, needs)
    yield from _check_disks(facts)
    yield from _check_mounts(facts)
    yield from _check_leftovers(facts, needs)
    yield from _check_packages(facts, needs)
    if needs.uses_gpus:
        yield from _check_cuda_build(facts, needs)
        yield from _check_allocator(facts)
        yield from _check_max_connections(facts)
        yield from _check_nodes(facts, needs)
        yield from _check_gpus(facts, needs)
        yield from _check_fabric(facts)
    yield from _check_memory(facts, needs)
    yield from _check_tmux(facts)
    if is_head:
        yield from _check_weights(facts)
        yield from _check_exposure(facts)


def _check_programs(facts: HostFacts, needs: Requirements) -> Findings:
    identity, place, setup = facts.identity or UNKNOWN_IDENTITY, facts.environment, needs.command_to_type("setup")
    yield from missing_programs(identity.tools, setup)
    if place and not place.workdir_exists:
        yield Finding(BAD, *missing_workdir(place.workdir, setup))
    if facts.kill_user_processes and identity.user != "root":
        problem = "logind kills your processes, and the run, when you log out (KillUserProcesses=yes)"
        yield Finding(BAD, problem, "run there: loginctl enable-linger")
    if identity.upgraded_by and facts.devices and needs.uses_gpus:
        problem = f"{identity.upgraded_by} installs upgrades by itself, and may replace the driver during a run"
        yield Finding(
            WARN, problem, f"systemctl disable --now {identity.upgraded_by}, or exclude NVIDIA's packages from it"
        )
    if identity.must_reboot:
        yield Finding(WARN, "a reboot is pending to load upgrades", "reboot it before the run")


def _check_packages(facts: HostFacts, needs: Requirements) -> Findings:
    if facts.environment is None:
        return
    packages, setup = facts.environment.packages, needs.command_to_type("setup")
    if packages is None:
        yield Finding(BAD, "its python cannot be run", f"{setup} installs one; or set python= in the hosts file")
        return
    needed = ("torch", "transformers", "llama405b")
    yield from missing_packages({name: packages.get(name, "missing") for name in needed}, setup)
    for name, minimum in MIN_VERSIONS.items():
        version = _parse_version(packages.get(name, ""))
        if version and version < minimum:
            remedy = f"at least {'.'.join(map(str, minimum))} is needed; {setup} installs it"
            yield Finding(BAD, f"{name} is {packages[name]}", remedy)
    for problem, bug in known_bugs(needs.settings, packages).items():
        yield Finding({"warn": WARN, "refuse": BAD}[bug.level], problem, bug.cure)


def _check_allocator(facts: HostFacts) -> Findings:
    """Check that the user's setting of PyTorch's allocator keeps expandable segments, which we set otherwise."""
    setting = facts.environment.allocator if facts.environment else ""
    if setting and EXPANDABLE_SEGMENTS not in setting.replace(" ", ""):
        problem = f"its environment sets PyTorch's allocator to {setting!r}, without {EXPANDABLE_SEGMENTS}"
        yield Finding(
            WARN,
            problem,
            f"unset it, or add {EXPANDABLE_SEGMENTS}: without it, PyTorch reserves 9 to 15 GiB more of a GPU at 405B",
        )


def _check_max_connections(facts: HostFacts) -> Findings:
    """Check that copies and collectives can run beside computation."""
    if facts.environment and facts.environment.max_connections == "1":
        problem = (
            "its environment sets CUDA_DEVICE_MAX_CONNECTIONS to 1, so collectives and copies wait for computation"
        )
        yield Finding(WARN, problem, "unset it (Megatron-LM needs it, FSDP does not)")


def _check_cuda_build(facts: HostFacts, needs: Requirements) -> Findings:
    """Check that the driver supports torch's CUDA version."""
    cuda = facts.packages.get("cuda", "")
    branch = MIN_DRIVER.get(cuda.partition(".")[0], 0)
    drivers = {gpu.driver for gpu in facts.devices}
    for driver in drivers:
        version = _parse_version(driver)
        if version and version[0] < branch:
            remedy = f"install driver {branch} or newer, or a torch build for an older CUDA"
            yield Finding(BAD, f"driver {driver} is too old for torch's CUDA {cuda}", remedy)
    if drivers and cuda == "none":
        remedy = f"{needs.command_to_type('setup')} installs the build that fits the driver"
        yield Finding(BAD, "it has GPUs, but its torch was built without CUDA", remedy)


def _check_gpus(facts: HostFacts, needs: Requirements) -> Findings:
    probe = facts.gpus
    if not probe:
        return
    gpus, fault = parsers.parse_smi(probe.smi, probe.fields)
    if fault:
        reset = "reboot it, or reset that GPU; if the error returns, replace the GPU"
        loads = "reboot it, to load the driver that was installed"
        yield Finding(BAD, f"nvidia-smi: {fault}", loads if parsers.MISMATCH.search(fault) else reset)
    elif probe.smi is not None and len(facts.devices) < facts.slots:
        first_fault = next((f"GPU {gpu.index}: {gpu.fault}" for gpu in gpus if gpu.fault), "")
        yield missing_gpus(len(facts.devices), facts.slots, first_fault)
    for warning in parsers.smi_warnings(probe.smi):
        yield Finding(WARN, f"nvidia-smi: {warning}", "it can train; have the GPU checked")
    for gpu in gpus:
        if gpu.mig and facts.slots != 1:
            yield Finding(
                BAD,
                f"GPU {gpu.index}: {parsers.MIG_ON[0]}",
                f"{parsers.MIG_ON[1]}, or set slots=1 to use one device of it",
            )
        yield from _check_gpu(gpu, needs)
    for pid, name in parsers.parse_gpu_processes(probe.apps):
        yield Finding(WARN, f"process {pid} ({name}) holds GPU memory", "end it, or find its owner")
    for address, number, meaning in parsers.parse_xids(probe.xid):
        level = BAD if number in parsers.FATAL_XIDS else WARN
        yield Finding(level, f"Xid {number} at {address}: {meaning}", REPLACE_GPU)
    if gpus and not probe.dmesg_readable:
        yield Finding(
            NOTE, "the kernel's log cannot be read, so Xid errors are unknown", "read it as root: dmesg | grep Xid"
        )
    yield from _check_nvlink(probe, gpus)


def _check_nvlink(probe: parsers.SmiAnswer, gpus: Sequence[parsers.GpuReport]) -> Findings:
    for link in parsers.nvlinks_down(probe.nvlink):
        yield Finding(BAD, f"NVLink is down: {link}", "reset the GPUs, or reboot")
    if len(gpus) < 8 or probe.fabric_manager not in ("inactive", "failed"):
        return
    model, state = gpus[0].name, probe.fabric_manager
    if "PCIe" not in model and any(name in model for name in NVSWITCH_GPUS):
        problem = f"nvidia-fabricmanager is {state}: GPUs behind an NVSwitch cannot start without it"
        yield Finding(BAD, problem, "systemctl enable --now nvidia-fabricmanager")


def _check_gpu(gpu: parsers.GpuReport, needs: Requirements) -> Findings:
    label = f"GPU {gpu.index}"
    if gpu.fault:
        yield Finding(
            BAD, f"{label}: {gpu.fault}", "reset it (nvidia-smi -r) or reboot; if the error returns, replace it"
        )
    if gpu.ecc_errors:
        problem = f"{label}: {gpu.ecc_errors} uncorrected ECC errors since the driver was loaded"
        yield Finding(BAD, problem, "reset it; if they return, replace it")
    if gpu.pages_pending:
        yield Finding(
            WARN, f"{label}: memory rows are waiting to be remapped", "reset it (nvidia-smi -r) before the run"
        )
    if gpu.slowdowns:
        problem = f"{label}: slowed down: {', '.join(gpu.slowdowns)}"
        yield Finding(WARN, problem, "check its cooling and power; all other GPUs would wait for it")
    if gpu.is_capped:
        problem = f"{label}: power limit {gpu.power_limit_w:.0f} of {gpu.power_max_w:.0f} W"
        yield Finding(WARN, problem, f"nvidia-smi -i {gpu.index} -pl {gpu.power_max_w:.0f}")
    if gpu.is_narrow:
        problem = f"{label}: PCIe x{gpu.pcie_width} of x{gpu.pcie_width_max}"
        yield Finding(WARN, problem, "reseat it, or replace the machine")
    yield from _check_gpu_memory(gpu, needs)


def _check_gpu_memory(gpu: parsers.GpuReport, needs: Requirements) -> Findings:
    label, room = f"GPU {gpu.index}", (gpu.memory_mib or 0) << 20
    if room and (known := match_gpu(gpu.name, room, read_gpus())):
        room = int(known.memory_bytes)
    if room and room < needs.gpu_bytes:
        problem = f"{label}: {room / GIB:.0f} GiB, but each rank's state takes {needs.gpu_bytes / GIB:.0f}"
        yield Finding(BAD, problem, "use more ranks, --parallel.offload all, or pure-bf16")
        return
    fit = Fit.from_gpu_bytes(needs.gpu_peak_bytes, room, lambda: needs.gpu_reserved_bytes or None)
    if room and fit is Fit.NO:
        problem = (
            f"{label}: {room / GIB:.0f} GiB, but a rank allocates about {needs.gpu_peak_bytes / GIB:.0f} at its peak"
        )
        yield Finding(BAD, problem, "`llama405b plan` shows what fits")
    elif room and fit is Fit.RETRIES:
        reserved_bytes = needs.gpu_reserved_bytes or needs.gpu_peak_bytes * RESERVED_BOUND
        takes = f"{'reserves about' if needs.gpu_reserved_bytes else 'may reserve'} {reserved_bytes / GIB:.0f}"
        problem = f"{label}: {room / GIB:.0f} GiB, but PyTorch {takes}"
        runs = f"it {'runs' if needs.gpu_reserved_bytes else 'may run'} slower"
        yield Finding(WARN, problem, f"{runs}, with allocator retries; `llama405b plan` shows what helps")


def _check_fabric(facts: HostFacts) -> Findings:
    for port in facts.rdma_ports:
        if not port.is_up:
            problem = f"{port.device} port {port.port} is not active"
            yield Finding(WARN, problem, "check its cable, or the subnet manager; NCCL uses the others")
    use = parsers.training_ports(facts.rdma_ports)
    if not use:
        return
    if use[0].is_roce and len({port.gid_index for port in use}) > 1:
        problem = "its RoCE ports have their IPv4 RoCE v2 address at different GID indices"
        yield Finding(WARN, problem, "set NCCL_IB_GID_INDEX with --env")
    if facts.rdma and not facts.rdma.peermem:
        remedy = "GPUDirect RDMA then needs dmabuf (kernel >= 5.12 and the open driver); else: modprobe nvidia_peermem"
        yield Finding(NOTE, "nvidia_peermem is not loaded", remedy)


def _check_memory(facts: HostFacts, needs: Requirements) -> Findings:
    memory, less = facts.memory, "--parallel.moments bf16, or --parallel.offload none"
    if memory and needs.ram_bytes > memory.total:
        problem = f"{memory.total / GIB:.0f} GiB of RAM, but the run needs {needs.ram_bytes / GIB:.0f}"
        yield Finding(BAD, problem, f"use more hosts, {less}")
    elif memory and (fit := Fit.from_sizes(needs.ram_peak_bytes, memory.total)) is not Fit.YES:
        problem = f"{memory.total / GIB:.0f} GiB of RAM, but the run takes about {needs.ram_peak_bytes / GIB:.0f} with pinning"
        level, remedy = MISFITS[fit]
        yield Finding(level, problem, f"{remedy}; use more hosts, {less}")
    if memory and memory.shm_free < MIN_SHM:
        problem = f"/dev/shm has {memory.shm_free / GIB:.1f} GiB free"
        yield Finding(WARN, problem, "mount -o remount,size=16G /dev/shm (docker: --shm-size)")


def _check_nodes(facts: HostFacts, needs: Requirements) -> Findings:
    """Check that the page cache leaves each NUMA node room for what the run pins there, as Linux would rather take the other node's."""
    memory = facts.memory
    if not memory or len(memory.nodes) < 2 or memory.zone_reclaim or not needs.ram_bytes:
        return
    for node in memory.nodes:
        if node.total - node.cached < needs.ram_bytes / len(memory.nodes) <= node.total:
            problem = f"NUMA node {node.number} has {node.cached / GIB:.0f} of its {node.total / GIB:.0f} GiB in the page cache"
            remedy = "as root: echo 1 > /proc/sys/vm/drop_caches; else updates use the other node's memory, at half the speed"
            yield Finding(WARN, problem, remedy)


def _check_tmux(facts: HostFacts) -> Findings:
    limits = facts.tmux
    if limits is None:
        return
    if limits.failed:
        yield broken_tmux(limits.failed)
        return
    if limits.open_files.isdigit() and int(limits.open_files) < MIN_FILES:
        problem = f"only {limits.open_files} open files are allowed inside tmux"
        yield Finding(WARN, problem, "raise nofile in /etc/security/limits.conf, then: tmux kill-server")
    if limits.memlock_kib != "unlimited" and parsers.has_rdma(facts.rdma_ports):
        problem = f"only {limits.memlock_kib} KiB may be locked inside tmux, and RDMA locks its buffers"
        yield Finding(BAD, problem, "set memlock unlimited in /etc/security/limits.conf, then: tmux kill-server")


def _check_disks(facts: HostFacts) -> Findings:
    for entry in facts.filesystems:
        if entry.path:
            is_workdir = entry is facts.working_disk
            yield from _check_disk(entry, f"{'set workdir=' if is_workdir else 'choose a directory'} on another disk")
    for disk in (facts.disks or NO_DISKS).unmounted_nvme:
        problem = f"{disk.device} ({disk.size / 1e12:.1f} TB) is not mounted"
        yield Finding(NOTE, problem, "mount it, and point cache= and scratch= at it")


def _check_disk(entry: Filesystem, elsewhere: str) -> Findings:
    """Check the filesystem of a directory that a run writes to. ``elsewhere``: what to do instead of mending it."""
    yield from full_disk(entry.path, entry.free, entry.free_files, elsewhere, entry.size)
    fault = None
    if entry.read_only:
        fault = DirectoryFault.READ_ONLY
    elif not entry.writable:
        fault = DirectoryFault.DENIED
    elif entry.refuses:
        fault = DirectoryFault.REFUSES
    place = DirectoryCheck(entry.path, fault, entry.path, why=entry.refuses)
    is_denied = fault is DirectoryFault.DENIED
    yield from unwritable(
        place, "change its owner, or choose another directory" if is_denied else f"mend it, or {elsewhere}"
    )


def _check_mounts(facts: HostFacts) -> Findings:
    """Point out filesystems with more room for weights and checkpoints."""
    work, mounts = facts.working_disk, [entry for entry in facts.filesystems if entry.mount]
    local = [entry for entry in mounts if entry.type not in NETWORK_FILESYSTEMS and entry.mount not in ("/", "/boot")]
    roomy = max(local, key=lambda entry: entry.free or 0, default=None)
    if work and work.free is not None and roomy and roomy.free and roomy.free > ROOMIER_FACTOR * work.free:
        problem = f"{roomy.mount} ({roomy.type}) has {roomy.free / 1e9:,.0f} GB free, the working directory "
        yield Finding(NOTE, f"{problem}{work.free / 1e9:,.0f} GB", f"point cache= and scratch= below {roomy.mount}")
    for entry in mounts:
        if entry.type in NETWORK_FILESYSTEMS:
            problem = f"{entry.mount} is a network filesystem ({entry.type})"
            yield Finding(
                NOTE, problem, f"if all hosts mount it, checkpoints belong there: --checkpoint.dir {entry.mount}/…"
            )


def _check_leftovers(facts: HostFacts, needs: Requirements) -> Findings:
    for value, pids in (facts.leftovers or {}).items():
        problem = (
            f"{pluralize(len(pids), 'process', 'processes')} left of {value.rpartition(':')[0]} without a node runner"
        )
        remedy = f"{needs.command_to_type('stop --orphans')} lists them, and ends them with --end"
        yield Finding(WARN, problem, remedy)


def _check_weights(facts: HostFacts) -> Findings:
    weights = facts.weights
    if not weights:
        return
    if not weights.present:
        yield Finding(BAD, f"{weights.path} does not hold a model", "run llama405b download on it, or llama405b push")
    elif weights.faults:
        problem = f"{weights.path}: {weights.faults[0]}{and_more(weights.faults)}"
        yield Finding(BAD, problem, "delete these files, then llama405b download or push again")
    elif weights.unhashed:
        problem = f"{weights.path}: no SHA-256 is known for {weights.unhashed} of {weights.files} files"
        yield Finding(NOTE, problem, "download and push record one; the sizes are right")


def _check_exposure(facts: HostFacts) -> Findings:
    for entry in facts.addresses:
        if is_private(entry.address):
            continue
        location = f"{entry.address} ({entry.interface}), a public address"
        remedy = f"while a run is up: iptables -A INPUT -i {entry.interface} -p tcp --dport 20000:65535 -j DROP"
        yield Finding(WARN, f"the rendezvous store has no password and will also listen on {location}", remedy)


def _parse_version(text: str) -> tuple[int, ...]:
    """Major and minor version; () if the text does not begin with them."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return tuple(map(int, match.groups())) if match else ()


LEVELS = (BAD, WARN, NOTE)
MAX_SKEW_S = 2.0
SLOW_NAME_S = 1.0
PACKAGES = ("torch", "transformers", "flash-attn", "nccl", "cuda", "llama405b")
MISMATCH_LEVELS = dict.fromkeys(("python", *PACKAGES, "the project's commit"), BAD) | {
    "the driver": WARN,
    "GPU model": WARN,
    "number of GPUs": BAD,
    "number of RDMA ports that are up": WARN,
    "kernel": NOTE,
    "system": NOTE,
}
UNKNOWN_REACH = PeerReach(None, {})


@dataclasses.dataclass(frozen=True, slots=True)
class Peers:
    """How the hosts reach each other."""

    reach: Mapping[str, Mapping[str, PeerReach]]  # from -> to
    candidates: Mapping[str, Sequence[str]]  # host -> addresses that others tried
    ports: Mapping[str, Sequence[int]]  # host -> rendezvous port, ephemeral port
    chosen: Mapping[str, str]  # host -> address= in the hosts file, or ""
    unshared: Sequence[str] = ()  # hosts that do not see what the first one wrote where the checkpoints go

    def others(self, host: str) -> list[str]:
        """Return the other hosts that reported which hosts they reach."""
        return [name for name in self.reach if name != host]

    def reach_from(self, name: str, host: str) -> PeerReach:
        """Return how one host reaches another, as far as known."""
        return self.reach[name].get(host, UNKNOWN_REACH)

    def all_reach_at(self, host: str, address: str, others: Sequence[str]) -> bool:
        """Return whether these hosts reach another at this address, on both ports."""
        endpoints = [f"{address}:{port}" for port in self.ports[host]]
        attempts = [self.reach_from(name, host).reached.get(place) for name in others for place in endpoints]
        return all(attempt and not attempt.fault for attempt in attempts)

    def sorted_candidates(self, host: str) -> list[str]:
        """Return a host's candidate addresses, private ones first."""
        return sorted(self.candidates.get(host, ()), key=lambda address: not is_private(address))

    def training_address(self, host: str) -> str:
        """Return the first candidate that every other host reaches on both ports; '' if there is none."""
        others = self.others(host)
        candidates = filter(None, [self.chosen[host], *self.sorted_candidates(host)])
        return next((address for address in candidates if self.all_reach_at(host, address, others)), "")


def list_findings(
    facts: Mapping[str, HostFacts],
    unreachable: Mapping[str, str],
    skew_s: Mapping[str, float],
    peers: Peers,
    needs: Requirements,
) -> list[Finding]:
    """Return all findings, problems first; equal findings of several hosts are merged."""
    findings = [
        Finding(BAD, "cannot be reached", why, hosts=(host,)) for host, why in _generalize_faults(unreachable).items()
    ]
    for i, (host, host_facts) in enumerate(facts.items()):
        of_host = host_findings(host_facts, needs, is_head=i == 0)
        findings += [dataclasses.replace(finding, hosts=(host,)) for finding in of_host]
        findings += _check_clock(host, skew_s.get(host, 0.0))
    findings += _check_same(facts, needs)
    findings += _check_one_machine(facts, peers)
    if peers.unshared:
        findings.append(_unshared_finding(facts, peers.unshared, needs))
    addresses_by_host = {
        host: host_facts.addresses for host, host_facts in facts.items() if len(facts) > 1 and host_facts.network
    }
    hosts_without_ipv4 = [
        host for host, addresses in addresses_by_host.items() if not addresses and not _only_loopback(host, peers)
    ]
    findings += [dataclasses.replace(NO_IPV4, hosts=(host,)) for host in hosts_without_ipv4]
    for host in peers.candidates:
        if (others := peers.others(host)) and host not in hosts_without_ipv4:
            findings += [*_check_address(host, others, peers), *_check_lookups(host, others, peers)]
    return sorted(_merge_findings(findings), key=lambda finding: LEVELS.index(finding.level))


def _merge_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Return equal findings of several hosts as one."""
    hosts_of: dict[tuple[str, str, str], list[str]] = {}
    for finding in findings:
        hosts_of.setdefault((finding.level, finding.what, finding.remedy), []).extend(finding.hosts)
    return [
        Finding(level, problem, remedy, hosts=tuple(dict.fromkeys(hosts)))
        for (level, problem, remedy), hosts in hosts_of.items()
    ]


def _generalize_faults(faults: Mapping[str, str]) -> dict[str, str]:
    """Replace a host's own name and address in its fault, if the fault then equals another host's."""
    patterns = {host: rf"(?<![\w.-])({re.escape(host)}|\d+(\.\d+){{3}})(?![\w-])" for host in faults}
    forms = {host: re.sub(patterns[host], "HOST", fault) for host, fault in faults.items()}
    counts = collections.Counter(forms.values())
    return {host: forms[host] if counts[forms[host]] > 1 else fault for host, fault in faults.items()}


def _check_clock(host: str, skew_s: float) -> Iterator[Finding]:
    if abs(skew_s) > MAX_SKEW_S:
        problem = f"its clock is {abs(skew_s):.0f} s {'ahead' if skew_s > 0 else 'behind'}"
        yield Finding(WARN, problem, "start chrony or systemd-timesyncd on it", hosts=(host,))


def _check_one_machine(facts: Mapping[str, HostFacts], peers: Peers) -> Iterator[Finding]:
    machines = {host: host_facts.identity.machine for host, host_facts in facts.items() if host_facts.identity}
    networked = {host: machine for host, machine in machines.items() if not _only_loopback(host, peers)}
    for hosts in group_same_machine(networked):
        yield Finding(
            WARN, "are the same machine under several names", "keep one of them in the hosts file", hosts=hosts
        )


def _unshared_finding(facts: Mapping[str, HostFacts], unshared: Sequence[str], needs: Requirements) -> Finding:
    """Report hosts that do not share the first host's checkpoint directory; bad if the run saves there."""
    head, head_facts = next(iter(facts.items()))
    finding = not_sharing(head, head_facts.marked)
    return dataclasses.replace(finding, level=BAD if needs.settings else NOTE, hosts=tuple(unshared))


def _only_loopback(host: str, peers: Peers) -> bool:
    """Return whether a host stands for this machine, as all hosts of the demo do."""
    candidates = peers.candidates.get(host, ())
    return bool(candidates) and all(LOOPBACK.fullmatch(address) for address in candidates)


def _comparable_values(facts: HostFacts) -> dict[str, str | int]:
    """Return the values that should be equal on all hosts, as far as this one reports them."""
    values: dict[str, str | int] = {name: facts.packages[name] for name in PACKAGES if name in facts.packages}
    if python := facts.packages.get("python", "").rpartition(".")[0]:  # hosts may differ in its patch release
        values["python"] = python
    if facts.environment:
        values["the project's commit"] = facts.environment.code
    if facts.gpus:
        values["number of GPUs"] = len(facts.devices)
    for gpu in facts.devices[:1]:
        values |= {"the driver": gpu.driver, "GPU model": gpu.name}
    if facts.rdma:
        values["number of RDMA ports that are up"] = sum(port.is_up for port in facts.rdma_ports)
    if facts.identity:
        values |= {"kernel": facts.identity.kernel, "system": facts.identity.os}
    return values


def _check_same(facts: Mapping[str, HostFacts], needs: Requirements) -> Iterator[Finding]:
    values_by_host = {host: _comparable_values(host_facts) for host, host_facts in facts.items()}
    for name, level in MISMATCH_LEVELS.items():
        clause, odd_hosts = find_disagreement(
            name, {host: str(host_values[name]) for host, host_values in values_by_host.items() if name in host_values}
        )
        remedy = "make them equal"
        if level == BAD:
            remedy = f"make them equal: {needs.command_to_type('setup')}"
        if odd_hosts:
            yield Finding(level, clause, remedy, hosts=odd_hosts)


def _check_address(host: str, others: Sequence[str], peers: Peers) -> Iterator[Finding]:
    """Check that the others reach a host, at its configured or first address."""
    address, configured = peers.training_address(host), peers.chosen[host]
    if not address:
        hosts_cut_off, place, attempt = _find_failed_reach(host, others, peers)
        problem = f"{fold_names(hosts_cut_off)} cannot reach it on the training network ({place}{attempt.fault})"
        yield Finding(BAD, problem, reach_remedy(host, unresolved=attempt.unresolved), hosts=(host,))
    elif configured and address != configured:
        yield Finding(BAD, f"not all hosts reach it at address={configured}", f"set address={address}", hosts=(host,))
    elif not configured and address != peers.sorted_candidates(host)[0]:
        problem = f"the others reach it at {address}, not at {peers.sorted_candidates(host)[0]}"
        yield Finding(WARN, problem, f"set address={address} in the hosts file", hosts=(host,))


def _check_lookups(host: str, others: Sequence[str], peers: Peers) -> Iterator[Finding]:
    """Check that looking up a host's name is fast enough."""
    lookup_s = {name: (peers.reach_from(name, host).resolves or ("", 0.0))[1] for name in others}
    slow = tuple(name for name in others if lookup_s[name] > SLOW_NAME_S)
    if slow:
        problem = f"looking up {host} takes over {SLOW_NAME_S:.0f} s"
        yield Finding(WARN, problem, "fix its DNS server (/etc/resolv.conf): it delays every start", hosts=slow)


def _find_failed_reach(host: str, others: Sequence[str], peers: Peers) -> tuple[Sequence[str], str, ConnectAttempt]:
    """Return who reaches none of a host's addresses (all, if each reaches a different one), where and why."""
    addresses = peers.candidates[host]
    hosts_cut_off = [
        name for name in others if not any(peers.all_reach_at(host, address, [name]) for address in addresses)
    ] or others
    for name in hosts_cut_off:
        for place, attempt in peers.reach_from(name, host).reached.items():
            if attempt.fault:
                return hosts_cut_off, f"{place}: ", attempt
    return hosts_cut_off, "", ConnectAttempt("not tried in time")
