"""What doctor makes of the hosts' facts: what is wrong, what it means, what to do. Pure."""

import contextlib
import dataclasses
import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llama405b_tools import fabric, gpus
from llama405b_tools.commands import disagreements
from llama405b_tools.fold import fold_names

BAD, WARN, NOTE = "bad", "warning", "note"
GIB = 1 << 30
MAX_SKEW_S = 2.0
SLOW_NAME_S = 1.0
MIN_FILES = 4096
MIN_SHM = 1 * GIB
MIN_TORCH, MIN_TRANSFORMERS, MIN_PYTHON = (2, 11), (5, 17), (3, 11)
MIN_DRIVER = {"12": 525, "13": 580}  # CUDA's major version: the driver branch it needs (CUDA release notes)
Facts = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know about some hosts."""

    level: str  # bad: a run would fail or lose; warning: it may; note
    hosts: tuple[str, ...]
    what: str
    remedy: str


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    """What the run would take on a host; 0: not known."""

    ram_bytes: int = 0
    gpu_bytes: int = 0
    weights: str = ""  # rank 0's directory
    cuda: bool = True  # whether GPUs matter


@dataclasses.dataclass(frozen=True, slots=True)
class Peers:
    """How the hosts reach each other."""

    reach: Mapping[
        str, Mapping[str, Any]
    ]  # from -> to -> {"resolves": [address, s], "reached": {"address:port": {...}}}
    candidates: Mapping[str, Sequence[str]]  # host -> addresses that others tried
    ports: Mapping[str, Sequence[int]]  # host -> rendezvous port, ephemeral port
    chosen: Mapping[str, str]  # host -> address= in the hosts file, or ""


def diagnose(
    facts: Mapping[str, Facts], lost: Mapping[str, str], skew_s: Mapping[str, float], peers: Peers, needs: Needs
) -> list[Finding]:
    """Everything worth saying, problems first; equal findings of several hosts are one."""
    found = [Finding(BAD, (host,), "cannot be reached", why) for host, why in lost.items()]
    for i, (host, each) in enumerate(facts.items()):
        for level, what, remedy in _host(each, needs, is_head=i == 0):
            found.append(Finding(level, (host,), what, remedy))
        if abs(skew_s.get(host, 0.0)) > MAX_SKEW_S:
            what = f"its clock is {abs(skew_s[host]):.0f} s {'ahead' if skew_s[host] > 0 else 'behind'}"
            found.append(Finding(WARN, (host,), what, "start chrony or systemd-timesyncd there"))
    found += list(_sameness(facts))
    found += list(_reach(peers))
    order = (BAD, WARN, NOTE)
    merged: dict[tuple[str, str, str], list[str]] = {}
    for finding in found:
        merged.setdefault((finding.level, finding.what, finding.remedy), []).extend(finding.hosts)
    return sorted(
        (Finding(level, tuple(dict.fromkeys(hosts)), what, remedy) for (level, what, remedy), hosts in merged.items()),
        key=lambda finding: order.index(finding.level),
    )


def _host(facts: Facts, needs: Needs, *, is_head: bool) -> Iterator[tuple[str, str, str]]:
    for part, value in facts.items():
        if isinstance(value, dict) and "probe_failed" in value:
            yield WARN, f"{part} cannot be told: {value['probe_failed']}", "look there by hand"
    sound = {k: v if not (isinstance(v, dict) and "probe_failed" in v) else None for k, v in facts.items()}
    for rule in (_programs, _disks, _leftovers):
        yield from rule(sound)
    for rule_of_run in (_packages, _gpus, _fabric, _room):
        yield from rule_of_run(sound, needs)
    if is_head:
        yield from _weights(sound)
        yield from _exposure(sound)


def _programs(facts: Facts) -> Iterator[tuple[str, str, str]]:
    tools = (facts["identity"] or {}).get("tools", {})
    for program, package in (("tmux", "tmux"), ("ip", "iproute2")):
        if tools and not tools[program]:
            yield BAD, f"there is no {program}", f"apt-get install {package} there, or llama405b setup as root"
    place = facts["environment"]
    if place and not place["workdir_exists"]:
        yield BAD, f"there is no {place['workdir']}", "llama405b setup puts the project there; or set workdir="
    elif place and not place["writable"]:
        yield BAD, f"{place['workdir']} cannot be written", "set workdir= to a directory of your own"
    if facts["kill_user_processes"] is True and (facts["identity"] or {}).get("user") != "root":
        yield (
            BAD,
            "logind ends your processes when you log out (KillUserProcesses=yes), and with them the run",
            "type there: loginctl enable-linger",
        )


def _packages(facts: Facts, needs: Needs) -> Iterator[tuple[str, str, str]]:
    place = facts["environment"]
    if place is None:
        return
    packages = place["packages"]
    if packages is None:
        yield BAD, "its python cannot be run", "llama405b setup makes one; or set python= in the hosts file"
        return
    missing = [name for name in ("torch", "transformers", "llama405b") if packages[name] == "missing"]
    if missing:
        yield BAD, f"{', '.join(missing)} is not installed", "llama405b setup installs it"
    for name, least in (("python", MIN_PYTHON), ("torch", MIN_TORCH), ("transformers", MIN_TRANSFORMERS)):
        version = _version(packages[name])
        if version and version < least:
            yield (
                BAD,
                f"{name} is {packages[name]}",
                f"at least {'.'.join(map(str, least))} is needed; llama405b setup installs it",
            )
    drivers = {gpu.driver for gpu in gpus.read(facts["gpus"] or {})[0]}
    branch = MIN_DRIVER.get(packages["cuda"].partition(".")[0])
    for driver in drivers if branch and needs.cuda else ():
        version = _version(driver)
        if branch and version and version[0] < branch:
            yield (
                BAD,
                f"driver {driver} is too old for torch's CUDA {packages['cuda']}",
                f"install driver {branch} or newer, or a torch for an older CUDA",
            )
    if drivers and needs.cuda and packages["cuda"] == "none":
        yield (
            BAD,
            "it has GPUs, but torch is a build without CUDA",
            "llama405b setup picks the build that fits the driver",
        )


def _gpus(facts: Facts, needs: Needs) -> Iterator[tuple[str, str, str]]:
    probe = facts["gpus"]
    if not probe or not needs.cuda:
        return
    found, fault = gpus.read(probe)
    if fault:
        yield BAD, f"nvidia-smi: {fault}", "reboot it, or reset that GPU; if it comes back, have it replaced"
    for gpu in found:
        yield from _gpu(gpu, needs)
    for pid, name in gpus.foreign(probe.get("apps")):
        yield WARN, f"process {pid} ({name}) holds GPU memory", "end it, or find out whose it is"
    for address, number, meaning in gpus.xids(probe.get("xid", ())):
        level = BAD if number in gpus.FATAL_XIDS else WARN
        yield (
            level,
            f"Xid {number} at {address}: {meaning}",
            "reset that GPU or reboot; if it comes back, have it replaced",
        )
    if found and not probe.get("dmesg_readable", True):
        yield NOTE, "the kernel's log cannot be read, so Xid errors are unknown", "read it as root: dmesg | grep Xid"
    for link in gpus.nvlinks_down(probe.get("nvlink")):
        yield BAD, f"NVLink is down: {link}", "reset the GPUs, or reboot"
    switched = any(name in found[0].name for name in ("H100", "H200", "B200", "A100-SXM")) if found else False
    if (
        len(found) >= 8
        and switched
        and "PCIe" not in found[0].name
        and probe.get("fabric_manager") in ("inactive", "failed")
    ):
        yield (
            BAD,
            f"nvidia-fabricmanager is {probe['fabric_manager']}: GPUs behind an NVSwitch cannot start without it",
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


def _fabric(facts: Facts, needs: Needs) -> Iterator[tuple[str, str, str]]:
    probe = facts["rdma"]
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
    if use and not probe["peermem"]:
        yield (
            NOTE,
            "nvidia_peermem is not loaded",
            "GPUDirect RDMA then needs dmabuf (kernel >= 5.12 and the open driver); else: modprobe nvidia_peermem",
        )


def _room(facts: Facts, needs: Needs) -> Iterator[tuple[str, str, str]]:
    memory, inside = facts["memory"], facts["tmux"]
    if memory and needs.ram_bytes > memory["total"]:
        yield (
            BAD,
            f"{memory['total'] / GIB:.0f} GiB of RAM, but the run keeps {needs.ram_bytes / GIB:.0f} there",
            "more hosts, or --parallel.cpu_offload off",
        )
    if memory and memory["shm_free"] < MIN_SHM:
        yield (
            WARN,
            f"/dev/shm has {memory['shm_free'] / GIB:.1f} GiB free",
            "mount -o remount,size=16G /dev/shm (docker: --shm-size)",
        )
    if inside and "failed" in inside:
        yield BAD, f"tmux does not start: {inside['failed']}", "try `tmux new -d true` there"
    elif inside:
        if inside["open_files"].isdigit() and int(inside["open_files"]) < MIN_FILES:
            yield (
                WARN,
                f"{inside['open_files']} open files are allowed inside tmux",
                "raise nofile in /etc/security/limits.conf, then: tmux kill-server",
            )
        rdma = fabric.has_rdma(fabric.read(facts["rdma"] or {}))
        if inside["memlock_kib"] != "unlimited" and rdma:
            yield (
                BAD,
                f"only {inside['memlock_kib']} KiB may be locked inside tmux, and RDMA locks its buffers",
                "set memlock unlimited in /etc/security/limits.conf, then: tmux kill-server",
            )


def _disks(facts: Facts) -> Iterator[tuple[str, str, str]]:
    found = facts["disks"]
    for entry in found["filesystems"] if found else ():
        if "path" in entry and entry["free"] < GIB:
            yield (
                BAD,
                f"{entry['path']} has {entry['free'] / GIB:.2f} GiB free",
                "make room, or set workdir= on another disk",
            )
        if "path" in entry and not entry["writable"]:
            yield BAD, f"{entry['path']} cannot be written", "choose another, or change its owner"
    for device in found["unmounted_nvme"] if found else ():
        yield (
            NOTE,
            f"{device['device']} ({device['size'] / 1e12:.1f} TB) is not mounted",
            "mount it, and point cache= and scratch= there",
        )


def _leftovers(facts: Facts) -> Iterator[tuple[str, str, str]]:
    for value, pids in (facts["leftovers"] or {}).items():
        yield (
            WARN,
            f"{len(pids)} processes of {value.rpartition(':')[0]} are running",
            "llama405b status says what they are; llama405b stop --orphans ends what nobody owns",
        )


def _weights(facts: Facts) -> Iterator[tuple[str, str, str]]:
    found = facts["weights"]
    if not found:
        return
    if not found["present"]:
        yield BAD, f"{found['path']} does not hold a model", "llama405b download there, or llama405b push it"
    elif found["faults"]:
        more = f" and {len(found['faults']) - 1} more" if len(found["faults"]) > 1 else ""
        yield (
            BAD,
            f"{found['path']}: {found['faults'][0]}{more}",
            "fetch these files again: llama405b download, or push",
        )


def _exposure(facts: Facts) -> Iterator[tuple[str, str, str]]:
    public = [entry for entry in (facts["network"] or {}).get("addresses", ()) if not is_private(entry["address"])]
    for entry in public:
        yield (
            WARN,
            f"the rendezvous store has no password and will also listen on {entry['address']} ({entry['interface']}), a public address",
            f"while a run is up: iptables -A INPUT -i {entry['interface']} -p tcp --dport 20000:65535 -j DROP",
        )


def is_private(address: str) -> bool:
    """Whether an address is of no public network; a name is taken to be somebody's own choice."""
    try:
        return not ipaddress.ip_address(address).is_global
    except ValueError:
        return True


def _package(name: str) -> Callable[[Facts], Any]:
    return lambda facts: facts["environment"]["packages"][name]


SAME: dict[str, tuple[str, Callable[[Facts], Any]]] = {
    "python": (BAD, lambda facts: facts["environment"]["packages"]["python"].rpartition(".")[0]),  # not patch releases
    **{name: (BAD, _package(name)) for name in ("torch", "transformers", "flash-attn", "nccl", "cuda", "llama405b")},
    "the project's commit": (BAD, lambda facts: facts["environment"]["code"]),
    "the driver": (WARN, lambda facts: gpus.read(facts["gpus"])[0][0].driver),
    "GPU model": (WARN, lambda facts: gpus.read(facts["gpus"])[0][0].name),
    "number of GPUs": (BAD, lambda facts: len(gpus.read(facts["gpus"])[0])),
    "number of RDMA ports that are up": (WARN, lambda facts: sum(port.up for port in fabric.read(facts["rdma"]))),
    "kernel": (NOTE, lambda facts: facts["identity"]["kernel"]),
    "system": (NOTE, lambda facts: facts["identity"]["os"]),
}


def _sameness(facts: Mapping[str, Facts]) -> Iterator[Finding]:
    for name, (level, get) in SAME.items():
        values: dict[str, str] = {}
        for host, each in facts.items():
            with contextlib.suppress(KeyError, TypeError, AttributeError, IndexError):  # a host that cannot tell
                values[host] = str(get(each))
        for clause in disagreements({host: {name: value} for host, value in values.items()}):
            majority = max(list(values.values()), key=list(values.values()).count)
            odd = tuple(host for host, value in values.items() if value != majority)
            yield Finding(level, odd, clause, "make them equal: llama405b setup" if level == BAD else "make them equal")


def _reach(peers: Peers) -> Iterator[Finding]:
    for host, candidates in peers.candidates.items():
        others = [name for name in peers.reach if name != host]
        address = training_address(host, peers)
        if not others:
            continue
        if not address:
            lacking, fault = _who_cannot(host, others, peers)
            what = f"{fold_names(lacking)} cannot reach it on the training network ({fault})"
            yield Finding(
                BAD,
                (host,),
                what,
                "open TCP ports 20000-65535 between the hosts, or set address= to one they all reach",
            )
        elif peers.chosen[host] and address != peers.chosen[host]:
            yield Finding(BAD, (host,), f"address={peers.chosen[host]} is not reached by all", f"set address={address}")
        elif not peers.chosen[host] and not _all_reach(host, _in_order(candidates)[0], others, peers):
            what = f"the others reach it at {address}, not at {_in_order(candidates)[0]}"
            yield Finding(WARN, (host,), what, f"set address={address} in the hosts file")
        slow = [
            name for name in others if (peers.reach[name].get(host, {}).get("resolves") or ["", 0])[1] > SLOW_NAME_S
        ]
        if slow:
            what = f"looking up {host} takes over {SLOW_NAME_S:.0f} s"
            yield Finding(WARN, tuple(slow), what, "mend its DNS server (/etc/resolv.conf): it delays every start")


def _who_cannot(host: str, others: Sequence[str], peers: Peers) -> tuple[list[str], str]:
    """The hosts that reach another at none of its addresses (or all, where each reaches a different one), and why."""
    lacking = [
        name
        for name in others
        if not any(_all_reach(host, address, [name], peers) for address in peers.candidates[host])
    ]
    for name in lacking or others:
        for place, found in peers.reach[name].get(host, {}).get("reached", {}).items():
            if found["fault"]:
                return lacking or list(others), f"{place}: {found['fault']}"
    return lacking or list(others), "it was not tried in time"


def _all_reach(host: str, address: str, others: Sequence[str], peers: Peers) -> bool:
    """Whether these hosts reach another at this address, on both ports."""
    for name in others:
        reached = peers.reach[name].get(host, {}).get("reached", {})
        if any(reached.get(f"{address}:{port}", {"fault": "?"})["fault"] for port in peers.ports[host]):
            return False
    return True


def _in_order(candidates: Sequence[str]) -> list[str]:
    return sorted(candidates, key=lambda address: not is_private(address))


def training_address(host: str, peers: Peers) -> str:
    """The first candidate that every other host reaches on both ports, private ones before public; '' where none is."""
    others = [name for name in peers.reach if name != host]
    wanted = [peers.chosen[host]] if peers.chosen[host] else []
    for address in [*wanted, *_in_order(peers.candidates.get(host, ()))]:
        if _all_reach(host, address, others, peers):
            return address
    return ""


def _version(text: str) -> tuple[int, ...] | None:
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None
