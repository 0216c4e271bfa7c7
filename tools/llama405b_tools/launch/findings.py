"""What can be wrong with a host, once for doctor and launch: the rule, its words, and what to do. Pure.

doctor lists every finding; launch refuses a host for the first bad one.
"""

import dataclasses
from collections.abc import Iterator, Mapping

from llama405b.contract.checkpoints import is_nearly_full
from llama405b.contract.errors import fmt_if, pluralize
from llama405b_tools.agent.machine import DirectoryCheck, DirectoryFault

BAD, WARN, NOTE = "bad", "warning", "note"
MIN_FREE_BYTES, MIN_FREE_FILES = 64 << 20, 1000  # for logs and heartbeats
PROGRAMS = {"tmux": "tmux", "ip": "iproute2"}  # that a run needs, and the packages that have them


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know about hosts."""

    level: str  # bad: a run would fail or lose work; warning: it might; note
    what: str
    remedy: str
    hosts: tuple[str, ...] = ()  # (): the one that was checked

    def __str__(self) -> str:
        """Return it as a clause that names no host."""
        return "; ".join(filter(None, (self.what, self.remedy)))


def missing_programs(is_installed: Mapping[str, bool], setup: str) -> Iterator[Finding]:
    """Yield a finding for each program that is not there. ``setup``: the command to type."""
    for program, package in PROGRAMS.items():
        if not is_installed.get(program, True):
            name = program if program == package else f"{program} ({package})"
            remedy = f"install it (apt-get update && apt-get install {package}), or run {setup}, which needs root there"
            yield Finding(BAD, f"{name} is not installed", remedy)


def broken_tmux(fault: str) -> Finding:
    """Return the finding of a tmux that does not work."""
    return Finding(BAD, f"its tmux does not work ({fault})", "run `tmux new -d true` there to see why")


def missing_packages(versions: Mapping[str, str], setup: str) -> Iterator[Finding]:
    """Yield a finding if a Python package has the version "missing"."""
    if names := [name for name, version in versions.items() if version == "missing"]:
        yield Finding(BAD, f"{', '.join(names)} is not installed for its python", f"run {setup}, or install it there")


def missing_gpus(n_gpus: int, slots: int, fault: str = "") -> Finding:
    """Return the finding of a host with fewer GPUs than ranks. ``fault``: why it may have more than it lists."""
    hide = fmt_if(" and hide that GPU from CUDA: --setup-line 'export CUDA_VISIBLE_DEVICES=…'", fault)
    other = f"set slots={n_gpus}{hide}" if n_gpus else "train on CPUs: --parallel.device cpu"
    what = f"it has {pluralize(n_gpus, 'GPU')}{fmt_if(' ({})', fault)}{fmt_if(', but slots={}', slots)}"
    return Finding(BAD, what, f"check nvidia-smi, or {other}")


def full_disk(
    path: str,
    free_bytes: int | None,
    free_files: int | None,
    elsewhere: str = "set workdir= on another disk",
    total_bytes: int = 0,
) -> Iterator[Finding]:
    """Yield findings on the disk of a directory that a run writes to. None: unknown, or no limit; 0 in total: unknown."""
    if free_bytes is not None and free_bytes < MIN_FREE_BYTES:
        free = f"{free_bytes / (1 << 20):.0f} MiB free at {path}"
        yield Finding(BAD, f"its disk is full ({free})", f"make room, or {elsewhere}")
    elif free_bytes is not None and is_nearly_full(free_bytes, total_bytes):
        free = f"{free_bytes / (1 << 30):.2f} GiB free at {path}"
        yield Finding(WARN, f"its disk is nearly full ({free})", f"make room, or {elsewhere}")
    if free_files is not None and free_files < MIN_FREE_FILES:
        free = f"{pluralize(free_files, 'more file')} can be created at {path}"
        yield Finding(BAD, f"its disk is out of inodes ({free})", f"delete files, or {elsewhere}")


def unwritable(place: DirectoryCheck, remedy: str, name: str = "") -> Iterator[Finding]:
    """Yield a finding if a directory cannot be written or created. ``name``: of the setting that names it."""
    if place.fault:
        what = f"{name}={place.path} cannot be created or written" if name else f"{place.path} cannot be written"
        yield Finding(BAD, f"{what}: {place_words(place)}", remedy)


def place_words(place: DirectoryCheck) -> str:
    """Return why a directory cannot be written."""
    match place.fault:
        case DirectoryFault.DANGLING:
            return f"{place.at} is a link to nothing"
        case DirectoryFault.DENIED if not place.owner:
            return "permission denied"
        case DirectoryFault.DENIED:
            return f"{place.at} belongs to {place.owner}, and you cannot write it"
        case DirectoryFault.REFUSES:
            return f"in {place.at} a run cannot {place.why}"
        case DirectoryFault.READ_ONLY:
            return f"the filesystem of {place.at} is read-only (after an I/O error, dmesg says why)"
        case _:
            return f"{place.at} is not a directory"


def not_sharing(head: str, directory: str) -> Finding:
    """Return the finding of a host that does not share the head's checkpoint directory."""
    remedy = "name a directory that all hosts share in --checkpoint.dir, or use --checkpoint.storage local"
    return Finding(BAD, f"it does not see what {head} writes in {directory}, the checkpoint directory", remedy)


NO_IPV4 = Finding(BAD, "has no IPv4 address, but hosts meet over IPv4", "give it an address that all of them reach")


def reach_remedy(host: str, *, unresolved: bool) -> str:
    """Return what to do if others do not reach a host. ``unresolved``: its name has no address there."""
    if unresolved:
        return f"put the name into /etc/hosts on all hosts, or give {host} an IP address in address="
    return f"open TCP ports 20000-65535 between the hosts, or give {host} an address= that all of them reach"
