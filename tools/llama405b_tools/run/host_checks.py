"""Judge the answers of hosts before a launch: what is wrong with the request, and which hosts are not fit. Pure."""

from collections.abc import Mapping, Sequence

from llama405b.contract.errors import UserError
from llama405b.contract.phrases import counted, given
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.printed_commands import command_to_type
from llama405b_tools.remote.messages.probe import LaunchFacts, PlaceFault, RunPlace
from llama405b_tools.run.request import LaunchRequest
from llama405b_tools.text.fold import fold_names

LEAST_FREE_BYTES, LEAST_FREE_FILES = 64 << 20, 1000  # for logs and heartbeats
Facts = Mapping[str, LaunchFacts]  # by host


class UnfitError(Exception):
    """A host cannot take part in a run; says why and what to do, as a clause that does not name the host."""


def check_request(request: LaunchRequest, answers: Facts, port: int, *, again: bool = False) -> None:
    """Refuse what is wrong with the request rather than with a host; ``again``: a restart, on some of its hosts perhaps."""
    if answers and not any(facts.has_program for facts in answers.values()):
        raise UserError(
            f"{_named(request.program)}: no host has it in its working directory; correct the name, or copy it there"
        )
    stopped_by = next((facts.stopped_by for facts in answers.values() if facts.stopped_by), "")
    for name, facts in answers.items():
        if facts.alive or (facts.alive_as and not again):
            _refuse_live(request, name, facts, stopped_by)
        if facts.run_exists:
            _check_existing(request, name, facts)
        if facts.port_fault:
            why = "in use" if facts.port_in_use else f"not available ({facts.port_fault})"
            raise UserError(f"--port: {port} is {why} on the head; omit --port to get a free one")
        if facts.input_fault:
            raise UserError(f"{name}: {facts.input_fault}")


def _refuse_live(request: LaunchRequest, name: str, facts: LaunchFacts, stopped_by: str) -> None:
    if stopped_by:
        raise UserError(
            f"--run: {request.run!r} is being stopped by {stopped_by} and still runs on {name}; once it has ended, "
            "continue it with --resume auto"
        )
    owner = given(", launched by {}", facts.owner)
    stop = command_to_type("stop", request.hosts_file, request.run)
    if not facts.alive:
        owner, stop = f" as {fold_names(facts.alive_as)}{owner}", command_to_type("stop", None, request.run)
    raise UserError(f"--run: {request.run!r} is running on {name}{owner}; `{stop}` ends it, or choose another name")


def _check_existing(request: LaunchRequest, name: str, facts: LaunchFacts) -> None:
    if facts.run_place.fault not in (None, PlaceFault.READ_ONLY):
        raise UserError(f"--run: {request.run!r} on {name}: {place_words(facts.run_place)}; choose another name")
    if request.resume == "no" or request.evaluates:
        raise UserError(f"--run: {request.run!r} exists on {name}; {other_name(request)}")


def other_name(request: LaunchRequest) -> str:
    """Say what to do when a run of that name exists."""
    return "choose another name" if request.evaluates else "choose another name, or continue it with --resume auto"


def unfit_hosts(request: LaunchRequest, hosts: Sequence[Host], answers: Facts) -> dict[str, str]:
    """Return the hosts that have answered, but cannot take part, each with the reason."""
    faults = user_faults(request, answers) | unshared(request, answers)
    for host in hosts:
        try:
            if host.name in answers:
                check_host(request, host, answers[host.name])
        except UnfitError as error:
            faults[host.name] = str(error)
    return faults


def check_host(request: LaunchRequest, host: Host, facts: LaunchFacts) -> None:
    """Check what a host has by itself."""
    _check_programs(request, facts)
    _check_places(facts)
    _check_disk(facts)
    fault = facts.gpu_fault if request.config else ""  # a program of the user's own may need no GPU
    if not request.on_cpu and (0 < facts.gpus < host.slots or (fault and not 0 < host.slots <= facts.gpus)):
        what = f"{counted(facts.gpus, 'GPU')}{given(' ({})', fault)}{given(', but slots={}', host.slots)}"
        hide = given(" and hide that GPU from CUDA: --setup-line 'export CUDA_VISIBLE_DEVICES=…'", fault)
        otherwise = f"set slots={facts.gpus}{hide}" if facts.gpus else "train on CPUs: --parallel.device cpu"
        raise UnfitError(f"it has {what}; check nvidia-smi, or {otherwise}")
    if facts.leftovers:
        left = counted(len(facts.leftovers), "process", "processes")
        stop = command_to_type("stop", request.hosts_file, request.run)
        raise UnfitError(f"{left} of an earlier attempt left; run `{stop}` first")


def _check_programs(request: LaunchRequest, facts: LaunchFacts) -> None:
    if missing := [name for name, version in facts.versions.items() if version == "missing"]:
        setup = command_to_type("setup", request.hosts_file)
        raise UnfitError(f"{', '.join(missing)} is not installed for its python; run `{setup}`, or install it there")
    if facts.lacks:
        names = " ".join(facts.lacks)
        raise UnfitError(
            f"{names} is not installed for its python, and the settings need it; run `pip install {names}` there"
        )
    if facts.extension_fault:
        raise UnfitError(f"{facts.extension_fault} (in {facts.workdir})")
    if not facts.has_program:
        raise UnfitError(f"{_named(request.program)} is not in {facts.workdir}; copy it there")
    if not facts.tmux:
        raise UnfitError("tmux is not installed; install it (apt-get update && apt-get install tmux)")
    if facts.tmux_fault:
        raise UnfitError(f"its tmux does not work (`tmux -V`: {facts.tmux_fault}); repair it")
    if not facts.ip:
        raise UnfitError("the `ip` program is not installed; install iproute2 there")


def _check_places(facts: LaunchFacts) -> None:
    if facts.run_place.fault:
        why = place_words(facts.run_place)
        raise UnfitError(f"{facts.run_place.path} cannot be written: {why}; fix that, or set workdir=")
    for key, place in facts.places.items():
        if place.fault:
            why = place_words(place)
            raise UnfitError(f"{key}={place.path} cannot be created or written: {why}; name a directory of your own")


def _check_disk(facts: LaunchFacts) -> None:
    if facts.free_bytes < LEAST_FREE_BYTES:
        free = f"{facts.free_bytes / (1 << 20):.0f} MiB free at {facts.workdir}"
        raise UnfitError(f"its disk is full ({free}); make room, or set workdir= on another disk")
    if facts.free_files is not None and facts.free_files < LEAST_FREE_FILES:
        left = f"{counted(facts.free_files, 'more file')} can be created at {facts.workdir}"
        raise UnfitError(f"its disk is out of inodes ({left}); delete files, or set workdir= on another disk")


def shared_directory(request: LaunchRequest) -> str:
    """The directory of checkpoints, if all hosts must see the same one; '' if not."""
    if not request.saves or request.settings.checkpoint.storage == "local":
        return ""
    return request.settings.checkpoint.dir or f"runs/{request.run}/checkpoints"


def unshared(request: LaunchRequest, answers: Facts) -> dict[str, str]:
    """Return hosts that do not see what the head writes where the checkpoints go."""
    head = next(iter(answers), "")
    why = (
        f"it does not see what {head} writes in {shared_directory(request)}, where the checkpoints go; name a directory that "
        "all hosts share in --checkpoint.dir, or use --checkpoint.storage local"
    )
    return {name: why for name, found in answers.items() if answers[head].shares and found.shares is False}


def user_faults(request: LaunchRequest, answers: Facts) -> dict[str, str]:
    """Return hosts where another user would have to use what the head's user writes: a run's files are private."""
    faults: dict[str, str] = {}
    for name, found in answers.items():
        head, first = next(iter(answers.items()))
        shared, remedy = f"{found.workdir}/runs", "give each a workdir= of its own"
        if found.runs != first.runs:
            if not (shared := shared_directory(request)):
                continue
            remedy = "save nothing with --checkpoint.every 0"
        if found.uid != first.uid:
            faults[name] = (
                f"the run would be {found.user}'s there (uid {found.uid}), but {first.user}'s on {head} (uid {first.uid}), "
                f"and neither can read what the other writes in {shared}; log in as one user everywhere, or {remedy}"
            )
    return faults


def _named(program: Sequence[str]) -> str:
    """A program without its own arguments: ``train.py``, ``-m mine``."""
    return " ".join(program[: 1 + program[0].startswith("-")])


def place_words(place: RunPlace) -> str:
    """Say what stands in the way of writing a directory."""
    match place.fault:
        case PlaceFault.DANGLING:
            return f"{place.at} is a link to nothing"
        case PlaceFault.DENIED:
            return f"{place.at} belongs to {place.owner}, and you cannot write it"
        case PlaceFault.READ_ONLY:
            return f"the filesystem of {place.at} is read-only (after an I/O error, dmesg says why)"
        case _:
            return f"{place.at} is not a directory"


def fault_list(faults: Mapping[str, str], n_hosts: int, end: str = ". Nothing was started") -> str:
    """Return one sentence about all hosts that are not fit."""
    alike: dict[str, list[str]] = {}
    for name, why in faults.items():
        alike.setdefault(why, []).append(name)
    clauses = "; ".join(f"{fold_names(names)}: {why}" for why, names in alike.items())
    return f"{clauses}{end}" if len(faults) == 1 else f"{len(faults)} of {n_hosts} hosts are not fit: {clauses}{end}"
