"""Check every host, plan and predict the run, and start torchrun on all hosts or on none.

Starting takes two steps: every host starts its node runner and answers; only after all have answered, each gets the message to keep it.
A host that gets no further message (the operator's terminal died, the link broke) ends what it started.

A launch also predicts memory, time, disk space and loading on the hosts that answered, and reads what was measured on them.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from llama405b.contract import reader
from llama405b.contract.checkpoints import NoRoomError, check_room
from llama405b.contract.errors import RunError, UserError, counted, given
from llama405b.contract.files import write_atomic, write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.records import GuardState, words
from llama405b.contract.software import code_version
from llama405b.predict.calibration import Calibration
from llama405b.predict.estimate import Cluster
from llama405b.predict.hardware import GIB, Gpu, gpu_like, read_gpus
from llama405b.predict.run_shape import RunShape
from llama405b.predict.search import Fit, Outlook, chosen, is_predicted
from llama405b.settings.axes import DP, NAMES, waste_note
from llama405b.settings.config import mesh_flags, on_ranks, split_flags_of
from llama405b.settings.schema import Config
from llama405b.spec.models import describe
from llama405b.spec.plan import Plan
from llama405b.spec.rules import rounding_note
from llama405b_tools.agent.launch_facts import CHECKPOINTS, LaunchFacts
from llama405b_tools.agent.messages import (
    ANSWER_WITHIN_S,
    KEEP,
    NOT_OURS,
    Kept,
    Started,
    StartFault,
    StartRequest,
)
from llama405b_tools.hosts.fleet import Dialogue, Fleet, command_to_type, hosts_argument, program_name
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import HostError, one_machine
from llama405b_tools.launch.placement import HostSpec
from llama405b_tools.launch.preflight import (
    Facts,
    check_training,
    fault_list,
    host_spec,
    known_bugs,
    nccl_lines,
    plan_of,
    probe_hosts,
)
from llama405b_tools.launch.request import LaunchRequest, asked_for
from llama405b_tools.parsers import training_ports
from llama405b_tools.plan import expectation
from llama405b_tools.run.backends import stop_launch
from llama405b_tools.run.judge import not_stopped
from llama405b_tools.run.screen import show
from llama405b_tools.text.figures import format_table
from llama405b_tools.text.words import fold_names

ROLL_BACK_S = 20.0
Faults = Mapping[str, Started | HostError]  # hosts that did not start, and why


class StartError(RunError):
    """A plan did not start on every host; processes may be left on a host that could not be queried."""

    def __init__(self, plan: Plan, words: str) -> None:
        super().__init__(words)
        self.plan = plan


def start_run(
    plan: Plan,
    secrets: Mapping[str, str],
    fleet: Fleet,
    stops: Mapping[str, float] | None = None,
    *,
    again: bool = False,
    guard: GuardState | None = None,
    hosts: str = "",
) -> None:
    """Start the node runner on every host; if one does not start, stop them all.

    ``stops``: when each host was asked to stop an earlier launch, by its own clock; any other stop is for this one.
    ``again``: a restart, refused if somebody has stopped the run meanwhile. ``guard``: the one that was asked for, to be
    recorded on the hosts. ``hosts``: the hosts argument of the printed commands.
    """
    requests = {
        node.name: StartRequest(
            node.name, plan, dict(secrets), tuple(node.ranks), again, guard, (stops or {}).get(node.name, 0.0)
        )
        for node in plan.nodes
    }
    starting: dict[str, Dialogue] = {}
    try:
        faults = _start_all(fleet, requests, starting)
    except BaseException:  # Ctrl-C as well: all or nothing
        show("stopping what was started", error=True)
        _hang_up(starting)
        stop_launch(plan, fleet)
        raise
    _hang_up(starting)
    if faults:
        asked = [name for name in requests if name in starting or name in faults]
        why = _undo(plan, faults, asked, fleet, hosts)
        taken = {
            name for name, found in faults.items() if isinstance(found, Started) and found.fault is StartFault.TAKEN
        }
        if not again and taken == set(asked):  # another launch of that name came first
            raise UserError(why)
        raise StartError(plan, why)
    with contextlib.suppress(OSError):  # the hosts have theirs; this one is for the operator to read
        write_json(RunDir.here(plan.run).plan, plan)


def _start_all(fleet: Fleet, requests: Mapping[str, StartRequest], starting: dict[str, Dialogue]) -> Faults:
    """Run both steps on every host; return faults by host."""

    def first(name: str) -> Started:
        starting[name] = fleet.dialogue(name, "start", requests[name])
        return starting[name].answer(Started, ANSWER_WITHIN_S)

    def second(name: str) -> Started:
        starting[name].say(KEEP)
        by = starting[name].answer(Kept, ANSWER_WITHIN_S).stopped_by
        return Started(StartFault.STOPPED_SINCE, by) if by else Started()

    head, *others = requests
    # the head first, and alone: of two simultaneous launches exactly one gets past it
    for step, group in ((first, [head]), (first, others), (second, [*requests])):
        outcomes = fleet.each(step, group)
        if faults := {name: found for name, found in outcomes.items() if isinstance(found, HostError) or found.fault}:
            return faults
    return {}


def fault_words(started: Started | HostError, run: str) -> str:
    """Return why a host did not start, as a clause; '' if it did."""
    if isinstance(started, HostError):
        return str(started)
    match started.fault:
        case None:
            return ""
        case StartFault.TAKEN:
            return f"run {run} was just started by {started.by or 'somebody else'}"
        case StartFault.STOPPED | StartFault.STOPPED_SINCE:
            return f"run {run} was stopped by {started.by}"
        case StartFault.TMUX:
            return f"tmux could not start a session ({started.detail})"
        case StartFault.ENDED:
            return f"the node runner ended immediately: {words(started.cause)}"
        case StartFault.SLOW:
            return f"the node runner did not start torchrun within {started.detail} s"


def _hang_up(starting: Mapping[str, Dialogue]) -> None:
    opened = list(starting.values())  # after Ctrl-C others may still be added
    for dialogue in opened:
        dialogue.end_input()
    deadline = time.monotonic() + ROLL_BACK_S
    for dialogue in opened:
        dialogue.close(deadline - time.monotonic())


def _undo(plan: Plan, faults: Faults, asked: Sequence[str], fleet: Fleet, hosts: str) -> str:
    """Stop what was started on the requested hosts, print each host's outcome, and return it as a sentence."""
    why = {name: fault_words(found, plan.run) for name, found in faults.items()}
    theirs = [name for name, found in faults.items() if isinstance(found, Started) and found.fault in NOT_OURS]
    if set(theirs) == set(asked):
        return fault_list(why, len(asked))
    ours = dataclasses.replace(plan, nodes=tuple(plan.node(name) for name in asked if name not in theirs))
    ends = stop_launch(ours, fleet)
    now = dict.fromkeys(ends, "nothing is left") | dict.fromkeys(theirs, "not touched")
    now |= {name: f"NOT VERIFIED: {remains}" for name, remains in not_stopped(ends).items()}
    rows = [(name, why.get(name, "started, then stopped"), now[name]) for name in asked]
    show(format_table(("host", "what happened", "now"), rows))
    tail = "; nothing is left running"
    if unverified := not_stopped(ends):
        tail = f"; run `{program_name()} stop{hosts} --run {plan.run}` once {', '.join(unverified)} can be reached"
    return f"{fault_list(why, len(asked), '')}{tail}"


WORTH_BYTES = 10 * 10**9  # below, nobody waits for it


def save_calibration(hosts_file: Path, calibration: Calibration) -> None:
    """Write the calibration next to the hosts file."""
    write_atomic(_file_of(hosts_file), reader.dumps(calibration) + "\n")


def read_calibration(hosts_file: Path, hosts: Sequence[Host]) -> Calibration | None:
    """Read the calibration of a hosts file; None if missing, of another version or of other hosts."""
    try:
        calibration = reader.loads(Calibration, _file_of(hosts_file).read_text(encoding="utf-8"), "a calibration")
    except (OSError, UnicodeDecodeError, reader.MalformedError):
        return None
    return calibration if {host.name for host in hosts} <= {*calibration.hosts} else None


def has_calibration(hosts_file: Path) -> bool:
    """Return whether a hosts file has a calibration."""
    return _file_of(hosts_file).exists()


def _file_of(hosts_file: Path) -> Path:
    return hosts_file.with_name(f"{hosts_file.name}.calibration.json")


def with_split(
    request: LaunchRequest, hosts: Sequence[Host], answers: Mapping[str, LaunchFacts], interfaces: Mapping[str, str]
) -> LaunchRequest:
    """Return a request with the settings left to the plan resolved; other requests unchanged."""
    config, llama = request.config, answers[hosts[0].name].llama
    if config is None or not config.left_to_plan:
        return request
    if llama is None:
        raise UserError(f"{config.left_to_plan}: it needs the model's config.json on the hosts; write another value")
    slots = [host.slots or max(1, answers[host.name].gpus) for host in hosts]
    gpu = None if request.on_cpu else _gpu_of(answers)
    cluster = (
        Cluster(gpu, min(_link(answers[host.name], interfaces[host.name]) for host in hosts)) if gpu else Cluster()
    )
    ram_bytes = min(facts.memory_bytes for facts in answers.values()) if gpu else 0.0
    config = chosen(config, llama, sum(slots), max(slots), cluster, ram_bytes)
    return dataclasses.replace(request, config=config, flags=(*request.flags, *split_flags_of(config)))


def expected(
    request: LaunchRequest, plan: Plan, answers: Mapping[str, LaunchFacts], measured: Calibration | None
) -> Outlook | None:
    """Return a prediction of the run, with the ``measured`` of its hosts; None if it cannot be predicted.

    Not predicted: CPUs without measurements, GPUs that differ or are in no table, other FSDP units than the predictor knows,
    evaluation without training, and other programs.
    """
    config, llama = request.config, answers[plan.nodes[0].name].llama
    if config is None or llama is None or request.evaluates or not is_predicted(config):
        return None
    slots = max(node.slots for node in plan.nodes)
    ram_bytes = min(facts.memory_bytes for facts in answers.values())
    gpu = Gpu.of_cpu(ram_bytes / slots) if request.on_cpu else _gpu_of(answers)
    if gpu is None:
        return None
    axes = plan.axes(config.parallel)
    load = dataclasses.replace(RunShape.of(llama, on_ranks(config, axes), plan.world, axes), ranks_per_host=slots)
    cluster = Cluster(gpu, min(_link(answers[node.name], node.interface) for node in plan.nodes))
    outlook = Outlook.of(load, cluster, ram_bytes)
    outlook = outlook.calibrated(measured) if measured else outlook
    return None if gpu.is_cpu and not outlook.calibration else outlook


def _gpu_of(answers: Mapping[str, LaunchFacts]) -> Gpu | None:
    """Return the GPU that all hosts have; None if they differ, or it is in no table."""
    kinds = {(facts.gpu, facts.gpu_bytes) for facts in answers.values()}
    name, n_bytes = next(iter(kinds))
    return gpu_like(name, n_bytes, read_gpus()) if n_bytes and len(kinds) == 1 else None


def refuse_misfit(outlook: Outlook) -> None:
    """Refuse a run that exceeds GPU memory as allocated, or host memory by more than the prediction's error."""
    needs = outlook.needs
    if outlook.gpu is Fit.NO:
        has, takes = outlook.cluster.gpu.memory_bytes / GIB, needs.gpu_bytes / GIB
        why = f"a GPU has {has:,.1f} GiB, but a rank would allocate about {takes:,.1f} at {needs.peak.moment}"
    elif outlook.ram is Fit.NO:
        has, takes = outlook.ram_bytes / GIB, outlook.host_bytes / GIB
        why = f"a host has {has:,.0f} GiB of memory, but the run would take about {takes:,.0f}"
    else:
        return
    raise UserError(f"{why}; `llama405b plan` shows what fits; --allow-misfit starts it anyway. Nothing was started")


def _link(answer: LaunchFacts, interface: str) -> float:
    """Return the maximum rate at which a host sends, in bytes/s; a default if its kernel does not say."""
    gbit = sum(port.gbit for port in training_ports(answer.rdma.ports))
    speeds = [int(each.mbit) / 1000 for each in answer.own if each.interface == interface and each.mbit.isdecimal()]
    return (gbit or max(speeds, default=0.0)) * 1e9 / 8 or Cluster().nic_bytes_per_s


def room_faults(request: LaunchRequest, plan: Plan, answers: Mapping[str, LaunchFacts]) -> dict[str, str]:
    """Return hosts without disk space for checkpoints, and why; a shared directory is checked on the head.

    A resumed run is not checked: it already has checkpoints there, and the trainer, which knows them, checks as well.
    """
    head = plan.nodes[0]
    if not request.saves or request.resume != "no":
        return {}
    llama = answers[head.name].llama
    checkpoint = request.settings.checkpoint
    each_bytes = RunShape.of(llama, request.settings, plan.world).checkpoint_bytes if llama else 0
    if checkpoint.storage == "shared":
        takes = {head.name: each_bytes}
    else:
        copies = checkpoint.copies * (len(plan.nodes) > 1)
        ring = zip(plan.nodes, (plan.nodes[-1], *plan.nodes), strict=False)  # each with the one before it
        takes = {node.name: each_bytes * (node.slots + copies * before.slots) // plan.world for node, before in ring}
    faults = {}
    best = checkpoint.keep_best
    for name, n_bytes in takes.items():
        place = answers[name].places.get(CHECKPOINTS, answers[name].run_place)
        try:
            check_room(place.free_bytes, n_bytes, checkpoint.keep + best, best=best)
        except NoRoomError as error:
            faults[name] = f"--checkpoint.dir: {place.path} {error}"
    return faults


def loading_note(request: LaunchRequest, plan: Plan, answers: Mapping[str, LaunchFacts]) -> str:
    """Return a note on how to load faster; '' if nothing would help much.

    If all hosts have the weights, each rank reads its own shard. Otherwise, and always with fsdp1, rank 0 sends every other host its
    shards, which takes at least their bytes over the rate of rank 0's link.
    """
    head, *others = plan.nodes
    how, parallel = request.settings.model.load, request.settings.parallel
    whole = answers[head.name].weights_bytes
    sent = whole * (plan.world - head.slots) // plan.world
    loads = request.resume == "no" or request.settings.adapter.trains  # whose checkpoints have no weights
    if not loads or sent < WORTH_BYTES or how == "local" or parallel.by_fsdp1:
        return ""
    least = given(", at least {:.0f} s", _seconds(sent, answers[head.name], head.interface))
    lacking = [node.name for node in others if not answers[node.name].weights_bytes]
    if lacking:
        path, mesh = request.settings.model.path, "".join(f" {flag}" for flag in mesh_flags(parallel))
        return (
            f"note: {fold_names(lacking)} without the weights: rank 0 sends {sent / 1e9:,.0f} GB{least}; "
            f"`llama405b push --shards {head.name}:{path}{hosts_argument(request.hosts_file)}{mesh}` copies each host's shards once"
        )
    if how == "rank0":
        return f"note: all hosts have the weights; --model.load auto avoids sending {sent / 1e9:,.0f} GB from rank 0{least}"
    return ""


def _seconds(n_bytes: int, head: LaunchFacts, interface: str) -> float:
    """Return the seconds that a host's link takes to send so many bytes; 0 if its rate is unknown."""
    speeds = [int(each.mbit) for each in head.own if each.interface == interface and each.mbit.isdigit()]
    return n_bytes * 8 / (speeds[0] * 1e6) if speeds and speeds[0] else 0.0


UNPROVED = "note: multi-GPU NCCL is untested in this release (docs/proof.md); try --rehearse first"


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedLaunch:
    """A launch that passed all checks."""

    request: LaunchRequest  # with the mesh, if that was left to the plan
    answers: Facts
    parts: Sequence[HostSpec]
    plan: Plan
    outlook: Outlook | None  # what to expect of it, if that can be predicted


def launch(
    request: LaunchRequest,
    hosts: Sequence[Host],
    fleet: Fleet,
    *,
    again: bool = False,
    fewer: bool = False,
    say: Callable[[str], object] = show,
) -> Plan:
    """Check, plan and start; ``say`` gets the lines that describe the started run.

    ``again``: a restart: any fault counts as a host's and may pass. ``fewer``: on fewer hosts than before, on which it may
    not fit.

    Raises:
        UserError: The request is wrong; nothing was started.
        RunError: A host is not fit, or did not start; nothing is left running, or the message says where something may be.
    """
    began = time.monotonic()
    checked = check_and_plan(request, hosts, fleet, again=again, fewer=fewer)
    guard = asked_for(request) if request.restart and not again else None
    stops = {name: facts.stopped_at for name, facts in checked.answers.items()}
    where = hosts_argument(request.hosts_file)
    start_run(checked.plan, request.secrets, fleet, stops, again=again, guard=guard, hosts=where)
    for line in launched_lines(checked.request, hosts, checked, time.monotonic() - began):
        say(line)
    return checked.plan


def check_and_plan(
    request: LaunchRequest, hosts: Sequence[Host], fleet: Fleet, *, again: bool, fewer: bool = False
) -> CheckedLaunch:
    """Probe every host, refuse what cannot work, and build the plan."""
    try:
        answers, meeting = probe_hosts(request, hosts, fleet, again=again)
        request = with_split(request, hosts, answers, meeting.interface)
        parts = [host_spec(host, answers[host.name], meeting) for host in hosts]
        plan = plan_of(request, parts, answers, meeting, time.time())
    except UserError as error:
        if again:
            raise RunError(str(error)) from None
        raise
    if request.config:
        plan = dataclasses.replace(plan, mesh=plan.axes(request.config.parallel))
    check_training(request, plan, answers)
    if faults := room_faults(request, plan, answers):
        raise RunError(fault_list(faults, len(hosts)))
    outlook = expected(request, plan, answers, read_calibration(request.hosts_file, hosts))
    if outlook:
        plan = dataclasses.replace(plan, expected_step_s=outlook.needs.step_s or 0.0)
        if not request.allow_misfit and (fewer or not again):
            refuse_misfit(outlook)
    return CheckedLaunch(request, answers, parts, plan, outlook)


def launched_lines(
    request: LaunchRequest, hosts: Sequence[Host], checked: CheckedLaunch, took_s: float
) -> Iterator[str]:
    """Yield the lines that describe the started run, and notes on it."""
    answers, plan = checked.answers, checked.plan
    yield from sharing_notes(hosts, answers)
    hosts_and_ranks = f"{counted(len(plan.nodes), 'host')}, {counted(plan.world, 'rank')}"
    yield f"{plan.run}: {hosts_and_ranks}, rendezvous at {plan.endpoint}, up in {took_s:.1f} s"
    theirs, mine = next(iter(answers.values())).versions.get("llama405b"), code_version()
    if theirs not in (None, mine):
        setup = command_to_type("setup", request.hosts_file)
        yield f"note: the hosts run llama405b {theirs}, and this machine {mine}; `{setup}` updates the hosts"
    for line in nccl_lines(request, checked.parts):
        yield f"  {line}"
    yield from training_notes(request, plan, answers)
    if checked.outlook:
        yield expectation(checked.outlook)
    if request.config and not request.on_cpu and any(facts.gpus for facts in answers.values()):
        yield UNPROVED


def sharing_notes(hosts: Sequence[Host], answers: Facts) -> Iterator[str]:
    """Yield notes on hosts that are the same machine, and on other runs on the hosts."""
    for same in one_machine({host.name: answers[host.name].machine for host in hosts if not host.loopback}):
        yield f"note: {fold_names(same)} are the same machine; keep one of them in the hosts file"
    for name in sorted({other for facts in answers.values() for other in facts.others}):
        where = fold_names([host for host, facts in answers.items() if name in facts.others])
        yield f"note: run {name} is also alive on {where}; both share its GPUs and memory"


def mesh_notes(config: Config, plan: Plan) -> Iterator[str]:
    """Yield notes on settings that are untested on GPUs, and on an uneven split of the batch."""
    axes = plan.axes(config.parallel)
    if axes.told:
        inner = next(name for name in reversed(NAMES) if axes.size([name]) > 1)
        shares = all(node.slots % axes.size([inner]) == 0 for node in plan.nodes)
        where = "on one host" if shares else "on several hosts"
        yield f"mesh: {axes}, ranks along {inner} are {where}; untested on GPUs (docs/parallel.md)"
    for name in ("prefetch", "reshard_after_forward"):
        if value := getattr(config.parallel, name):
            yield f"{name} {value}: untested on GPUs (docs/parallel.md)"
    if config.adapter.trains:
        yield f"adapter: {describe(config.adapter)}; untested on GPUs (docs/training.md)"
    if note := waste_note(config.training, axes.size(DP)):
        yield f"note: {note}"


def training_notes(request: LaunchRequest, plan: Plan, answers: Facts) -> Iterator[str]:
    """Yield notes on known bugs, the mesh, loading and rounding of a training run."""
    if request.config is None:
        return
    for what, bug in known_bugs(request.config, next(iter(answers.values())).versions).items():
        yield f"note: {what}; {bug.cure}"
    if not request.evaluates:
        yield from mesh_notes(request.config, plan)
    if note := loading_note(request, plan, answers):
        yield note
    if not request.evaluates and (note := rounding_note(request.config.parallel, request.config.optimizer)):
        yield f"note: {note}"


def resumed(request: LaunchRequest, hosts: Sequence[Host], plan: Plan) -> tuple[LaunchRequest, list[Host]]:
    """Return the same launch with the same ranks on each host, resuming from the newest checkpoint that verifies."""
    known = {node.name: node.slots for node in plan.nodes}
    same = [dataclasses.replace(host, slots=known.get(host.name, host.slots)) for host in hosts]
    return dataclasses.replace(request, resume="auto"), same
