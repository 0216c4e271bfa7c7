"""Doctor's findings on the hosts' facts: what is wrong, how bad it is, and what to do. Pure."""

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from llama405b.contract.errors import and_more, counted
from llama405b.predict.search import MEMORY_SPREAD, Fit
from llama405b.settings.schema import Config
from llama405b_tools import parsers
from llama405b_tools.hosts.inventory import LOOPBACK
from llama405b_tools.hosts.transport import disagreement, one_machine
from llama405b_tools.launch.host_facts import NO_DISKS, NOBODY, ConnectAttempt, Filesystem, HostFacts, PeerReach
from llama405b_tools.launch.preflight import known_bugs
from llama405b_tools.parsers import is_private
from llama405b_tools.text.words import fold_names

BAD, WARN, NOTE = "bad", "warning", "note"
Remarks: TypeAlias = Iterator[tuple[str, str, str]]  # level, what, remedy
GIB = 1 << 30
MIN_FILES, MIN_FREE_FILES = 4096, 1000
MIN_SHM = 1 * GIB
LEAST = {"python": (3, 11), "torch": (2, 11), "transformers": (5, 17)}
MIN_DRIVER = {"12": 525, "13": 580}  # CUDA's major version: the driver branch it needs (CUDA release notes)
SWITCHED = ("H100", "H200", "B200", "A100-SXM")  # eight in a host are behind an NVSwitch, unless they are PCIe cards
NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "wekafs", "ceph")
EXPANDABLE = "expandable_segments:True"
ROOMIER = 4  # times the working directory's free space: worth a remark
PREDICTED = {
    Fit.NO: (BAD, f"beyond the prediction's error ({100 * MEMORY_SPREAD:.0f}%)"),
    Fit.MAYBE: (WARN, f"too close: the prediction may be off by {100 * MEMORY_SPREAD:.0f}%"),
}
REPLACE = "reset that GPU or reboot; if the error returns, replace the GPU"


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    """What the run would need on a host; 0: unknown."""

    ram_bytes: int = 0  # of weights, gradients and moments
    gpu_bytes: int = 0
    ram_peak_bytes: int = 0  # estimated: with what pinning and activations add
    gpu_peak_bytes: int = 0  # allocated
    gpu_reserved_bytes: int = 0  # what PyTorch keeps
    weights: str = ""  # rank 0's directory
    cuda: bool = True  # whether GPUs matter
    # the directory of checkpoints that all hosts must see; "": each has its own, or nothing is saved
    shared: str = "runs"
    hash_weights: bool = False  # compare their content with the SHA-256 that download and push recorded
    settings: Config | None = None  # None: unknown
    mesh: str = ""  # of all ranks, if it has more than shards
    program: str = "llama405b"  # as it is typed here
    hosts: str = ""  # the argument that names these hosts

    def command_to_type(self, verb: str) -> str:
        """Return a command about these hosts, to be typed by the user."""
        return f"`{self.program} {verb}{self.hosts}`"


def of_host(facts: HostFacts, needs: Needs, *, is_head: bool) -> Remarks:
    """Yield all remarks on a host."""
    for part, why in facts.failed.items():
        yield WARN, f"{part} unknown: {why}", "check it by hand"
    yield from _programs(facts, needs)
    yield from _disks(facts)
    yield from _mounts(facts)
    yield from _leftovers(facts, needs)
    yield from _packages(facts, needs)
    if needs.cuda:
        yield from _cuda_build(facts, needs)
        yield from _allocator(facts)
        yield from _gpus(facts, needs)
        yield from _fabric(facts)
    yield from _memory(facts, needs)
    yield from _tmux(facts)
    if is_head:
        yield from _weights(facts)
        yield from _exposure(facts)


def _programs(facts: HostFacts, needs: Needs) -> Remarks:
    who, place, setup = facts.identity or NOBODY, facts.environment, needs.command_to_type("setup")
    for program, package in (("tmux", "tmux"), ("ip", "iproute2")):
        if not who.tools.get(program, True):
            remedy = f"apt-get update && apt-get install {package} on it, or run {setup} as root"
            yield BAD, f"there is no {program}", remedy
    if place and not place.workdir_exists:
        yield BAD, f"there is no {place.workdir}", f"{setup} puts the project there; or set workdir="
    if facts.kill_user_processes and who.user != "root":
        what = "logind kills your processes, and the run, when you log out (KillUserProcesses=yes)"
        yield BAD, what, "run there: loginctl enable-linger"
    if who.upgraded_by and facts.devices and needs.cuda:
        what = f"{who.upgraded_by} installs upgrades by itself, and may replace the driver during a run"
        yield WARN, what, f"systemctl disable --now {who.upgraded_by}, or exclude NVIDIA's packages from it"
    if who.must_reboot:
        yield WARN, "a reboot is pending to load upgrades", "reboot it before the run"


def _packages(facts: HostFacts, needs: Needs) -> Remarks:
    if facts.environment is None:
        return
    packages, setup = facts.environment.packages, needs.command_to_type("setup")
    if packages is None:
        yield BAD, "its python cannot be run", f"{setup} installs one; or set python= in the hosts file"
        return
    missing = [name for name in ("torch", "transformers", "llama405b") if packages.get(name, "missing") == "missing"]
    if missing:
        yield BAD, f"{', '.join(missing)} is not installed", f"{setup} installs it"
    for name, least in LEAST.items():
        version = _version(packages.get(name, ""))
        if version and version < least:
            remedy = f"at least {'.'.join(map(str, least))} is needed; {setup} installs it"
            yield BAD, f"{name} is {packages[name]}", remedy
    for what, bug in known_bugs(needs.settings, packages).items():
        yield {"warn": WARN, "refuse": BAD}[bug.level], what, bug.cure


def _allocator(facts: HostFacts) -> Remarks:
    """Check that the user's setting of PyTorch's allocator keeps expandable segments, which we set otherwise."""
    words = facts.environment.allocator if facts.environment else ""
    if words and EXPANDABLE not in words.replace(" ", ""):
        what = f"its environment sets PyTorch's allocator to {words!r}, without {EXPANDABLE}"
        yield (
            WARN,
            what,
            f"unset it, or add {EXPANDABLE}: without it, PyTorch reserves 9 to 15 GiB more of a GPU at 405B",
        )


def _cuda_build(facts: HostFacts, needs: Needs) -> Remarks:
    """Check that the driver supports torch's CUDA version."""
    cuda = facts.packages.get("cuda", "")
    branch = MIN_DRIVER.get(cuda.partition(".")[0], 0)
    drivers = {gpu.driver for gpu in facts.devices}
    for driver in drivers:
        version = _version(driver)
        if version and version[0] < branch:
            remedy = f"install driver {branch} or newer, or a torch build for an older CUDA"
            yield BAD, f"driver {driver} is too old for torch's CUDA {cuda}", remedy
    if drivers and cuda == "none":
        remedy = f"{needs.command_to_type('setup')} installs the build that fits the driver"
        yield BAD, "it has GPUs, but its torch was built without CUDA", remedy


def _gpus(facts: HostFacts, needs: Needs) -> Remarks:
    probe = facts.gpus
    if not probe:
        return
    found, fault = parsers.read_smi(probe.smi, probe.fields)
    if fault:
        reset = "reboot it, or reset that GPU; if the error returns, replace the GPU"
        loads = "reboot it, to load the driver that was installed"
        yield BAD, f"nvidia-smi: {fault}", loads if parsers.MISMATCH.search(fault) else reset
    elif probe.smi is not None and len(found) < facts.slots:
        yield BAD, f"it has {counted(len(found), 'GPU')}, but slots={facts.slots}", "check nvidia-smi, or lower slots="
    for warning in parsers.warnings(probe.smi):
        yield WARN, f"nvidia-smi: {warning}", "it can train; have the GPU checked"
    for gpu in found:
        if gpu.mig and facts.slots != 1:
            yield (
                BAD,
                f"GPU {gpu.index}: {parsers.MIG_ON[0]}",
                f"{parsers.MIG_ON[1]}, or set slots=1 to use one device of it",
            )
        yield from _gpu(gpu, needs)
    for pid, name in parsers.foreign(probe.apps):
        yield WARN, f"process {pid} ({name}) holds GPU memory", "end it, or find its owner"
    for address, number, meaning in parsers.xids(probe.xid):
        level = BAD if number in parsers.FATAL_XIDS else WARN
        yield level, f"Xid {number} at {address}: {meaning}", REPLACE
    if found and not probe.dmesg_readable:
        yield NOTE, "the kernel's log cannot be read, so Xid errors are unknown", "read it as root: dmesg | grep Xid"
    yield from _nvlink(probe, found)


def _nvlink(probe: parsers.SmiAnswer, found: Sequence[parsers.GpuReport]) -> Remarks:
    for link in parsers.nvlinks_down(probe.nvlink):
        yield BAD, f"NVLink is down: {link}", "reset the GPUs, or reboot"
    if len(found) < 8 or probe.fabric_manager not in ("inactive", "failed"):
        return
    model, state = found[0].name, probe.fabric_manager
    if "PCIe" not in model and any(name in model for name in SWITCHED):
        what = f"nvidia-fabricmanager is {state}: GPUs behind an NVSwitch cannot start without it"
        yield BAD, what, "systemctl enable --now nvidia-fabricmanager"


def _gpu(gpu: parsers.GpuReport, needs: Needs) -> Remarks:
    where = f"GPU {gpu.index}"
    if gpu.fault:
        yield BAD, f"{where}: {gpu.fault}", "reset it (nvidia-smi -r) or reboot; if the error returns, replace it"
    if gpu.ecc_errors:
        what = f"{where}: {gpu.ecc_errors} uncorrected ECC errors since the driver was loaded"
        yield BAD, what, "reset it; if they return, replace it"
    if gpu.pages_pending:
        yield WARN, f"{where}: memory rows are waiting to be remapped", "reset it (nvidia-smi -r) before the run"
    if gpu.slowed:
        what = f"{where}: slowed down: {', '.join(gpu.slowed)}"
        yield WARN, what, "check its cooling and power; all other GPUs would wait for it"
    if gpu.is_capped:
        what = f"{where}: power limit {gpu.power_limit_w:.0f} of {gpu.power_max_w:.0f} W"
        yield WARN, what, f"nvidia-smi -i {gpu.index} -pl {gpu.power_max_w:.0f}"
    if gpu.is_narrow:
        what = f"{where}: PCIe x{gpu.pcie_width} of x{gpu.pcie_width_max}"
        yield WARN, what, "reseat it, or replace the machine"
    yield from _gpu_memory(gpu, needs)


def _gpu_memory(gpu: parsers.GpuReport, needs: Needs) -> Remarks:
    where, room = f"GPU {gpu.index}", (gpu.memory_mib or 0) << 20
    if room and room < needs.gpu_bytes:
        what = f"{where}: {room / GIB:.0f} GiB, but each rank's state takes {needs.gpu_bytes / GIB:.0f}"
        yield BAD, what, "use more ranks, --parallel.offload all, or pure-bf16"
        return
    fit = Fit.on_gpu(needs.gpu_peak_bytes, room, lambda: needs.gpu_reserved_bytes or None)
    if room and fit is Fit.NO:
        what = f"{where}: {room / GIB:.0f} GiB, but a rank allocates about {needs.gpu_peak_bytes / GIB:.0f} at its peak"
        yield BAD, what, "`llama405b plan` shows what fits"
    elif room and fit is Fit.RETRIES:
        takes = f"reserves about {(needs.gpu_reserved_bytes or needs.gpu_peak_bytes) / GIB:.0f}"
        what = f"{where}: {room / GIB:.0f} GiB, but PyTorch {takes}"
        yield WARN, what, "it runs slower, with allocator retries; `llama405b plan` shows what helps"


def _fabric(facts: HostFacts) -> Remarks:
    for port in facts.rdma_ports:
        if not port.up:
            what = f"{port.device} port {port.port} is not active"
            yield WARN, what, "check its cable, or the subnet manager; NCCL uses the others"
    use = parsers.training_ports(facts.rdma_ports)
    if not use:
        return
    if use[0].roce and len({port.gid_index for port in use}) > 1:
        what = "its RoCE ports have their IPv4 RoCE v2 address at different GID indices"
        yield WARN, what, "set NCCL_IB_GID_INDEX with --env"
    if facts.rdma and not facts.rdma.peermem:
        remedy = "GPUDirect RDMA then needs dmabuf (kernel >= 5.12 and the open driver); else: modprobe nvidia_peermem"
        yield NOTE, "nvidia_peermem is not loaded", remedy


def _memory(facts: HostFacts, needs: Needs) -> Remarks:
    memory, less = facts.memory, "--parallel.moments bf16, or --parallel.offload none"
    if memory and needs.ram_bytes > memory.total:
        what = f"{memory.total / GIB:.0f} GiB of RAM, but the run needs {needs.ram_bytes / GIB:.0f}"
        yield BAD, what, f"use more hosts, {less}"
    elif memory and (fit := Fit.of(needs.ram_peak_bytes, memory.total)) is not Fit.YES:
        what = f"{memory.total / GIB:.0f} GiB of RAM, but the run takes about {needs.ram_peak_bytes / GIB:.0f} with pinning"
        level, remedy = PREDICTED[fit]
        yield level, what, f"{remedy}; use more hosts, {less}"
    if memory and memory.shm_free < MIN_SHM:
        what = f"/dev/shm has {memory.shm_free / GIB:.1f} GiB free"
        yield WARN, what, "mount -o remount,size=16G /dev/shm (docker: --shm-size)"


def _tmux(facts: HostFacts) -> Remarks:
    inside = facts.tmux
    if inside is None:
        return
    if inside.failed:
        yield BAD, f"tmux does not start: {inside.failed}", "run `tmux new -d true` on it"
        return
    if inside.open_files.isdigit() and int(inside.open_files) < MIN_FILES:
        what = f"only {inside.open_files} open files are allowed inside tmux"
        yield WARN, what, "raise nofile in /etc/security/limits.conf, then: tmux kill-server"
    if inside.memlock_kib != "unlimited" and parsers.has_rdma(facts.rdma_ports):
        what = f"only {inside.memlock_kib} KiB may be locked inside tmux, and RDMA locks its buffers"
        yield BAD, what, "set memlock unlimited in /etc/security/limits.conf, then: tmux kill-server"


def _disks(facts: HostFacts) -> Remarks:
    for entry in facts.filesystems:
        if entry.path:
            yield from _disk(entry)
    for disk in (facts.disks or NO_DISKS).unmounted_nvme:
        what = f"{disk.device} ({disk.size / 1e12:.1f} TB) is not mounted"
        yield NOTE, what, "mount it, and point cache= and scratch= at it"


def _disk(entry: Filesystem) -> Remarks:
    """Check the filesystem of a directory that a run writes to."""
    if entry.free is not None and entry.free < GIB:
        yield BAD, f"{entry.path} has {entry.free / GIB:.2f} GiB free", "make room, or set workdir= on another disk"
    if entry.free_files is not None and entry.free_files < MIN_FREE_FILES:
        what = f"{entry.path} is out of inodes ({counted(entry.free_files, 'more file')} can be created)"
        yield BAD, what, "delete files, or set workdir= on another disk"
    if entry.read_only:
        remedy = "after an I/O error, dmesg says why: remount or replace the disk, or choose another"
        yield BAD, f"{entry.path} is on a filesystem that is read-only", remedy
    elif not entry.writable:
        yield BAD, f"{entry.path} cannot be written", "choose a directory of your own, or change its owner"
    elif entry.refuses:
        yield BAD, f"in {entry.path} a run cannot {entry.refuses}", "choose a directory on another disk"


def _mounts(facts: HostFacts) -> Remarks:
    """Point out filesystems with more room for weights and checkpoints."""
    work, mounts = facts.working_disk, [entry for entry in facts.filesystems if entry.mount]
    local = [entry for entry in mounts if entry.type not in NETWORK and entry.mount not in ("/", "/boot")]
    roomy = max(local, key=lambda entry: entry.free or 0, default=None)
    if work and work.free is not None and roomy and roomy.free and roomy.free > ROOMIER * work.free:
        what = f"{roomy.mount} ({roomy.type}) has {roomy.free / 1e9:,.0f} GB free, the working directory "
        yield NOTE, f"{what}{work.free / 1e9:,.0f} GB", f"point cache= and scratch= below {roomy.mount}"
    for entry in mounts:
        if entry.type in NETWORK:
            what = f"{entry.mount} is a network filesystem ({entry.type})"
            yield NOTE, what, f"if all hosts mount it, checkpoints belong there: --checkpoint.dir {entry.mount}/…"


def _leftovers(facts: HostFacts, needs: Needs) -> Remarks:
    for value, pids in (facts.leftovers or {}).items():
        what = f"{counted(len(pids), 'process', 'processes')} left of {value.rpartition(':')[0]} without a node runner"
        remedy = f"{needs.command_to_type('stop --orphans')} lists them, and ends them with --end"
        yield WARN, what, remedy


def _weights(facts: HostFacts) -> Remarks:
    found = facts.weights
    if not found:
        return
    if not found.present:
        yield BAD, f"{found.path} does not hold a model", "run llama405b download on it, or llama405b push"
    elif found.faults:
        what = f"{found.path}: {found.faults[0]}{and_more(found.faults)}"
        yield BAD, what, "delete these files, then llama405b download or push again"
    elif found.unhashed:
        what = f"{found.path}: no SHA-256 is known for {found.unhashed} of {found.files} files"
        yield NOTE, what, "download and push record one; the sizes are right"


def _exposure(facts: HostFacts) -> Remarks:
    for entry in facts.addresses:
        if is_private(entry.address):
            continue
        where = f"{entry.address} ({entry.interface}), a public address"
        remedy = f"while a run is up: iptables -A INPUT -i {entry.interface} -p tcp --dport 20000:65535 -j DROP"
        yield WARN, f"the rendezvous store has no password and will also listen on {where}", remedy


def _version(text: str) -> tuple[int, ...]:
    """Major and minor version; () if the text does not begin with them."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return tuple(map(int, match.groups())) if match else ()


LEVELS = (BAD, WARN, NOTE)
MAX_SKEW_S = 2.0
SLOW_NAME_S = 1.0
PACKAGES = ("torch", "transformers", "flash-attn", "nccl", "cuda", "llama405b")
SAME = dict.fromkeys(("python", *PACKAGES, "the project's commit"), BAD) | {
    "the driver": WARN,
    "GPU model": WARN,
    "number of GPUs": BAD,
    "number of RDMA ports that are up": WARN,
    "kernel": NOTE,
    "system": NOTE,
}
NO_WAY = PeerReach(None, {})


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know about some hosts."""

    level: str  # bad: a run would fail or lose work; warning: it might; note
    hosts: tuple[str, ...]
    what: str
    remedy: str


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

    def way(self, name: str, host: str) -> PeerReach:
        """Return how one host reaches another, as far as known."""
        return self.reach[name].get(host, NO_WAY)

    def all_reach(self, host: str, address: str, others: Sequence[str]) -> bool:
        """Return whether these hosts reach another at this address, on both ports."""
        places = [f"{address}:{port}" for port in self.ports[host]]
        ways = [self.way(name, host).reached.get(place) for name in others for place in places]
        return all(way and not way.fault for way in ways)

    def in_order(self, host: str) -> list[str]:
        """Return a host's candidate addresses, private ones first."""
        return sorted(self.candidates.get(host, ()), key=lambda address: not is_private(address))

    def training_address(self, host: str) -> str:
        """Return the first candidate that every other host reaches on both ports; '' if there is none."""
        others = self.others(host)
        wanted = filter(None, [self.chosen[host], *self.in_order(host)])
        return next((address for address in wanted if self.all_reach(host, address, others)), "")


NO_IPV4 = "no IPv4 address", "hosts meet over IPv4; give it an address that all of them reach"


def diagnose(
    facts: Mapping[str, HostFacts], lost: Mapping[str, str], skew_s: Mapping[str, float], peers: Peers, needs: Needs
) -> list[Finding]:
    """Return all findings, problems first; equal findings of several hosts are merged."""
    found = [Finding(BAD, (host,), "cannot be reached", why) for host, why in _alike(lost).items()]
    for i, (host, each) in enumerate(facts.items()):
        remarks = of_host(each, needs, is_head=i == 0)
        found += [Finding(level, (host,), what, remedy) for level, what, remedy in remarks]
        found += _clock(host, skew_s.get(host, 0.0))
    found += _sameness(facts, needs)
    found += _one_machine(facts, peers)
    if peers.unshared:
        found.append(_sharing(facts, peers.unshared, needs))
    known = {host: each.addresses for host, each in facts.items() if len(facts) > 1 and each.network}
    alone = [host for host, addresses in known.items() if not addresses and not _only_loopback(host, peers)]
    found += [Finding(BAD, (host,), *NO_IPV4) for host in alone]
    for host in peers.candidates:
        if (others := peers.others(host)) and host not in alone:
            found += [*_address(host, others, peers), *_lookups(host, others, peers)]
    return sorted(_merged(found), key=lambda finding: LEVELS.index(finding.level))


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Return equal findings of several hosts as one."""
    hosts_of: dict[tuple[str, str, str], list[str]] = {}
    for finding in findings:
        hosts_of.setdefault((finding.level, finding.what, finding.remedy), []).extend(finding.hosts)
    return [Finding(level, tuple(dict.fromkeys(hosts)), what, how) for (level, what, how), hosts in hosts_of.items()]


def _alike(faults: Mapping[str, str]) -> dict[str, str]:
    """Replace a host's own name and address in its fault, if the fault then equals another host's."""
    own = {host: rf"(?<![\w.-])({re.escape(host)}|\d+(\.\d+){{3}})(?![\w-])" for host in faults}
    forms = {host: re.sub(own[host], "HOST", fault) for host, fault in faults.items()}
    counts = collections.Counter(forms.values())
    return {host: forms[host] if counts[forms[host]] > 1 else fault for host, fault in faults.items()}


def _clock(host: str, skew_s: float) -> Iterator[Finding]:
    if abs(skew_s) > MAX_SKEW_S:
        what = f"its clock is {abs(skew_s):.0f} s {'ahead' if skew_s > 0 else 'behind'}"
        yield Finding(WARN, (host,), what, "start chrony or systemd-timesyncd on it")


def _one_machine(facts: Mapping[str, HostFacts], peers: Peers) -> Iterator[Finding]:
    machines = {host: each.identity.machine for host, each in facts.items() if each.identity}
    networked = {host: machine for host, machine in machines.items() if not _only_loopback(host, peers)}
    for same in one_machine(networked):
        yield Finding(WARN, same, "are the same machine under several names", "keep one of them in the hosts file")


def _sharing(facts: Mapping[str, HostFacts], unshared: Sequence[str], needs: Needs) -> Finding:
    """Report hosts that do not share the first host's checkpoint directory; bad if the run saves there."""
    head, its = next(iter(facts.items()))
    what = f"cannot see what {head} writes in {its.marked}, the checkpoint directory"
    remedy = "name a directory that all hosts share in --checkpoint.dir, or use --checkpoint.storage local"
    return Finding(BAD if needs.settings else NOTE, tuple(unshared), what, remedy)


def _only_loopback(host: str, peers: Peers) -> bool:
    """Return whether a host stands for this machine, as all hosts of the demo do."""
    candidates = peers.candidates.get(host, ())
    return bool(candidates) and all(LOOPBACK.fullmatch(address) for address in candidates)


def _told(facts: HostFacts) -> dict[str, str | int]:
    """Return the values that should be equal on all hosts, as far as this one reports them."""
    told: dict[str, str | int] = {name: facts.packages[name] for name in PACKAGES if name in facts.packages}
    if python := facts.packages.get("python", "").rpartition(".")[0]:  # hosts may differ in its patch release
        told["python"] = python
    if facts.environment:
        told["the project's commit"] = facts.environment.code
    if facts.gpus:
        told["number of GPUs"] = len(facts.devices)
    for gpu in facts.devices[:1]:
        told |= {"the driver": gpu.driver, "GPU model": gpu.name}
    if facts.rdma:
        told["number of RDMA ports that are up"] = sum(port.up for port in facts.rdma_ports)
    if facts.identity:
        told |= {"kernel": facts.identity.kernel, "system": facts.identity.os}
    return told


def _sameness(facts: Mapping[str, HostFacts], needs: Needs) -> Iterator[Finding]:
    told = {host: _told(each) for host, each in facts.items()}
    for name, level in SAME.items():
        clause, odd = disagreement(name, {host: str(each[name]) for host, each in told.items() if name in each})
        remedy = "make them equal"
        if level == BAD:
            remedy = f"make them equal: {needs.command_to_type('setup')}"
        if odd:
            yield Finding(level, odd, clause, remedy)


def _address(host: str, others: Sequence[str], peers: Peers) -> Iterator[Finding]:
    """Check that the others reach a host, at its configured or first address."""
    address, wanted = peers.training_address(host), peers.chosen[host]
    if not address:
        lacking, place, found = _who_cannot(host, others, peers)
        what = f"{fold_names(lacking)} cannot reach it on the training network ({place}{found.fault})"
        remedy = "open TCP ports 20000-65535 between the hosts, or set address= to one they all reach"
        if found.unresolved:
            remedy = "put the name into /etc/hosts on all hosts, or set address= to an IP address"
        yield Finding(BAD, (host,), what, remedy)
    elif wanted and address != wanted:
        yield Finding(BAD, (host,), f"not all hosts reach it at address={wanted}", f"set address={address}")
    elif not wanted and address != peers.in_order(host)[0]:
        what = f"the others reach it at {address}, not at {peers.in_order(host)[0]}"
        yield Finding(WARN, (host,), what, f"set address={address} in the hosts file")


def _lookups(host: str, others: Sequence[str], peers: Peers) -> Iterator[Finding]:
    """Check that looking up a host's name is fast enough."""
    took_s = {name: (peers.way(name, host).resolves or ("", 0.0))[1] for name in others}
    slow = tuple(name for name in others if took_s[name] > SLOW_NAME_S)
    if slow:
        what = f"looking up {host} takes over {SLOW_NAME_S:.0f} s"
        yield Finding(WARN, slow, what, "fix its DNS server (/etc/resolv.conf): it delays every start")


def _who_cannot(host: str, others: Sequence[str], peers: Peers) -> tuple[Sequence[str], str, ConnectAttempt]:
    """Return who reaches none of a host's addresses (all, if each reaches a different one), where and why."""
    addresses = peers.candidates[host]
    lacking = [name for name in others if not any(peers.all_reach(host, each, [name]) for each in addresses)] or others
    for name in lacking:
        for place, found in peers.way(name, host).reached.items():
            if found.fault:
                return lacking, f"{place}: ", found
    return lacking, "", ConnectAttempt("not tried in time")
