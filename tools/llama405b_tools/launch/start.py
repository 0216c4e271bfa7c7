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
from llama405b.contract.checkpoints import NoRoomError, check_disk_space
from llama405b.contract.errors import RunError, UserError, fmt_if, pluralize
from llama405b.contract.files import write_atomic, write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.records import GuardState, describe_cause
from llama405b.contract.software import DOCS, code_version
from llama405b.predict.calibration import Calibration
from llama405b.predict.estimate import Cluster
from llama405b.predict.hardware import GIB, Gpu, match_gpu, read_gpus
from llama405b.predict.run_shape import PredictedRun, checkpoint_bytes
from llama405b.predict.search import Fit, Prediction, can_predict, resolve_auto
from llama405b.settings.axes import AXIS_NAMES, DP_AXES, idle_rank_note
from llama405b.settings.config import layout_flags, mesh_flags, with_global_batch
from llama405b.settings.schema import Config
from llama405b.spec.adapters import adapter_label
from llama405b.spec.plan import Expected, Plan
from llama405b.spec.rules import rounding_note
from llama405b_tools.agent import starting
from llama405b_tools.agent.launch_facts import CHECKPOINTS, LaunchFacts
from llama405b_tools.agent.messages import (
    COMMIT,
    FAULTS_BEFORE_START,
    START_REPLY_TIMEOUT_S,
    Committed,
    StartFault,
    StartReply,
    StartRequest,
)
from llama405b_tools.hosts.fleet import Fleet, JsonSession, command_to_type, hosts_argument
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import HostError, group_same_machine
from llama405b_tools.launch.placement import HostSpec
from llama405b_tools.launch.preflight import (
    Facts,
    build_launch_plan,
    check_training,
    fault_list,
    host_spec,
    known_bugs,
    nccl_lines,
    probe_hosts,
)
from llama405b_tools.launch.request import LaunchRequest, requested_guard
from llama405b_tools.parsers import training_ports
from llama405b_tools.plan import format_expectation
from llama405b_tools.run.backends import stop_launch
from llama405b_tools.run.judge import unstopped_hosts
from llama405b_tools.run.screen import show
from llama405b_tools.text.figures import format_columns
from llama405b_tools.text.words import fold_names

ROLL_BACK_S = 20.0
Faults = Mapping[str, StartReply | HostError]  # hosts that did not start, and why


class StartError(RunError):
    """A plan did not start on every host; processes may be left on a host that could not be queried."""

    def __init__(self, plan: Plan, message: str) -> None:
        super().__init__(message)
        self.plan = plan


def start_run(
    plan: Plan,
    secrets: Mapping[str, str],
    fleet: Fleet,
    stop_times: Mapping[str, float] | None = None,
    *,
    is_restart: bool = False,
    guard: GuardState | None = None,
) -> None:
    """Start the node runner on every host; if one does not start, stop them all.

    ``stop_times``: when each host was asked to stop an earlier launch, by its own clock; any other stop is for this one.
    ``is_restart``: a restart, refused if somebody has stopped the run meanwhile. ``guard``: the one that was asked for, to be
    recorded on the hosts.
    """
    requests = {
        node.name: StartRequest(
            node.name, plan, dict(secrets), tuple(node.ranks), is_restart, guard, (stop_times or {}).get(node.name, 0.0)
        )
        for node in plan.nodes
    }
    sessions: dict[str, JsonSession] = {}
    try:
        faults = _start_all(fleet, requests, sessions)
    except BaseException:  # Ctrl-C as well: all or nothing
        show("stopping what was started", error=True)
        _close_dialogues(sessions)
        stop_launch(plan, fleet)
        raise
    _close_dialogues(sessions)
    if faults:
        requested_hosts = [name for name in requests if name in sessions or name in faults]
        why = _roll_back(plan, faults, requested_hosts, fleet)
        taken_hosts = {
            name
            for name, outcome in faults.items()
            if isinstance(outcome, StartReply) and outcome.fault is StartFault.TAKEN
        }
        if not is_restart and taken_hosts == set(requested_hosts):  # another launch of that name came first
            raise UserError(why)
        raise StartError(plan, why)
    with contextlib.suppress(OSError):  # the hosts have theirs; this one is for the operator to read
        write_json(RunDir.from_name(plan.run).plan, plan)


def _start_all(fleet: Fleet, requests: Mapping[str, StartRequest], sessions: dict[str, JsonSession]) -> Faults:
    """Run both steps on every host; return faults by host."""

    def start_host(name: str) -> StartReply:
        sessions[name] = fleet.open_session(name, starting.start, requests[name])
        return sessions[name].receive(StartReply, START_REPLY_TIMEOUT_S)

    def commit_host(name: str) -> StartReply:
        sessions[name].send(COMMIT)
        by = sessions[name].receive(Committed, START_REPLY_TIMEOUT_S).stopped_by
        return StartReply(StartFault.STOPPED_SINCE, by) if by else StartReply()

    head, *others = requests
    # the head first, and alone: of two simultaneous launches exactly one gets past it
    for step, group in ((start_host, [head]), (start_host, others), (commit_host, [*requests])):
        outcomes = fleet.call_each(step, group)
        if faults := {
            name: outcome for name, outcome in outcomes.items() if isinstance(outcome, HostError) or outcome.fault
        }:
            return faults
    return {}


def fault_words(started: StartReply | HostError, run: str) -> str:
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
            return f"the node runner ended immediately: {describe_cause(started.cause)}"
        case StartFault.SLOW:
            return f"the node runner did not start torchrun within {started.detail} s"


def _close_dialogues(sessions: Mapping[str, JsonSession]) -> None:
    opened = list(sessions.values())  # after Ctrl-C others may still be added
    for dialogue in opened:
        dialogue.end_input()
    deadline = time.monotonic() + ROLL_BACK_S
    for dialogue in opened:
        dialogue.close(deadline - time.monotonic())


def _roll_back(plan: Plan, faults: Faults, requested_hosts: Sequence[str], fleet: Fleet) -> str:
    """Stop what was started on the requested hosts, print each host's outcome, and return it as a sentence."""
    reasons = {name: fault_words(outcome, plan.run) for name, outcome in faults.items()}
    foreign_hosts = [
        name
        for name, outcome in faults.items()
        if isinstance(outcome, StartReply) and outcome.fault in FAULTS_BEFORE_START
    ]
    if set(foreign_hosts) == set(requested_hosts):
        return fault_list(reasons, len(requested_hosts))
    own_plan = dataclasses.replace(
        plan, nodes=tuple(plan.node(name) for name in requested_hosts if name not in foreign_hosts)
    )
    outcomes = stop_launch(own_plan, fleet)
    states = dict.fromkeys(outcomes, "nothing is left") | dict.fromkeys(foreign_hosts, "not touched")
    states |= {name: f"NOT VERIFIED: {remains}" for name, remains in unstopped_hosts(outcomes).items()}
    rows = [(name, reasons.get(name, "started, then stopped"), states[name]) for name in requested_hosts]
    show(format_columns(("host", "what happened", "now"), rows))
    tail = "; nothing is left running"
    if unverified := unstopped_hosts(outcomes):
        tail = f"; run `{fleet.command_to_type('stop', plan.run)}` once {', '.join(unverified)} can be reached"
    return f"{fault_list(reasons, len(requested_hosts), '')}{tail}"


MIN_NOTED_BYTES = 10 * 10**9  # below, nobody waits for it


def save_calibration(hosts_file: Path, calibration: Calibration) -> None:
    """Write the calibration next to the hosts file."""
    write_atomic(_calibration_path(hosts_file), reader.dumps(calibration) + "\n")


def read_calibration(hosts_file: Path, hosts: Sequence[Host]) -> Calibration | None:
    """Read the calibration of a hosts file; None if missing, of another version or of other hosts."""
    try:
        calibration = reader.loads(
            Calibration, _calibration_path(hosts_file).read_text(encoding="utf-8"), "a calibration"
        )
    except (OSError, UnicodeDecodeError, reader.MalformedError):
        return None
    return calibration if {host.name for host in hosts} <= {*calibration.hosts} else None


def has_calibration(hosts_file: Path) -> bool:
    """Return whether a hosts file has a calibration."""
    return _calibration_path(hosts_file).exists()


def _calibration_path(hosts_file: Path) -> Path:
    return hosts_file.with_name(f"{hosts_file.name}.calibration.json")


def resolve_split(
    request: LaunchRequest, hosts: Sequence[Host], answers: Mapping[str, LaunchFacts], interfaces: Mapping[str, str]
) -> LaunchRequest:
    """Return a request with the settings left to the plan resolved; other requests unchanged."""
    config, llama = request.config, answers[hosts[0].name].llama
    if config is None or not config.auto_setting:
        return request
    if llama is None:
        raise UserError(f"{config.auto_setting}: it needs the model's config.json on the hosts; write another value")
    slots = [host.slots or max(1, answers[host.name].gpus) for host in hosts]
    gpu = None if request.on_cpu else _common_gpu(answers)
    cluster = (
        Cluster(gpu, min(_link_bytes_per_s(answers[host.name], interfaces[host.name]) for host in hosts))
        if gpu
        else Cluster()
    )
    ram_bytes = min(facts.memory_bytes for facts in answers.values()) if gpu else 0.0
    config = resolve_auto(config, llama, sum(slots), max(slots), cluster, ram_bytes)
    return dataclasses.replace(request, config=config, flags=(*request.flags, *layout_flags(config)))


def predict_launch(
    request: LaunchRequest, plan: Plan, answers: Mapping[str, LaunchFacts], calibration: Calibration | None
) -> Prediction | None:
    """Return a prediction of the run, with the ``calibration`` of its hosts; None if it cannot be predicted.

    Not predicted: CPUs without measurements, GPUs that differ or are in no table, other FSDP units than the predictor knows,
    evaluation without training, and other programs.
    """
    config, llama = request.config, answers[plan.nodes[0].name].llama
    if config is None or llama is None or request.evaluates or not can_predict(config):
        return None
    slots = max(node.slots for node in plan.nodes)
    ram_bytes = min(facts.memory_bytes for facts in answers.values())
    gpu = Gpu.for_cpu(ram_bytes / slots) if request.on_cpu else _common_gpu(answers)
    if gpu is None:
        return None
    axes = plan.axes(config.parallel)
    predicted_run = PredictedRun.from_config(llama, with_global_batch(config, axes), plan.world_size, slots, axes)
    cluster = Cluster(gpu, min(_link_bytes_per_s(answers[node.name], node.interface) for node in plan.nodes))
    outlook = Prediction.from_run(predicted_run, cluster, ram_bytes)
    outlook = outlook.with_calibration(calibration) if calibration else outlook
    return None if gpu.is_cpu and not outlook.calibration else outlook


def expected_of(outlook: Prediction) -> Expected:
    """Return what a prediction says of what a run measures; CUDA's and NCCL's own memory is not in that."""
    needs, time_range = outlook.needs, outlook.time_range
    allocated_bytes, reserved_bytes = float(needs.peak.total), float(sum(needs.reserved_by_pool.values()))
    if outlook.cluster.gpu.is_cpu:
        allocated_bytes, reserved_bytes = 0.0, needs.gpu_bytes
    return Expected(
        step_s=needs.step_s or 0.0,
        shortest=time_range.low,
        longest=time_range.high,
        allocated_bytes=allocated_bytes,
        peak_bytes=reserved_bytes,
        start_s=needs.loading.local_s + needs.pinning_s,
        save_s=needs.saving.write_s,
        save_wait_s=needs.saving.waits_s,
    )


def _common_gpu(answers: Mapping[str, LaunchFacts]) -> Gpu | None:
    """Return the GPU that all hosts have; None if they differ, or it is in no table."""
    kinds = {(facts.gpu, facts.gpu_bytes) for facts in answers.values()}
    name, n_bytes = next(iter(kinds))
    return match_gpu(name, n_bytes, read_gpus()) if n_bytes and len(kinds) == 1 else None


def refuse_misfit(outlook: Prediction) -> None:
    """Refuse a run that exceeds GPU memory as allocated, or host memory by more than the prediction's error."""
    needs = outlook.needs
    if outlook.gpu_fit is Fit.NO:
        has, takes = outlook.cluster.gpu.memory_bytes / GIB, needs.gpu_bytes / GIB
        why = f"a GPU has {has:,.1f} GiB, but a rank would allocate about {takes:,.1f} at {needs.peak.moment}"
    elif outlook.ram_fit is Fit.NO:
        has, takes = outlook.ram_bytes / GIB, outlook.host_bytes / GIB
        why = f"a host has {has:,.0f} GiB of memory, but the run would take about {takes:,.0f}"
    else:
        return
    raise UserError(f"{why}; `llama405b plan` shows what fits; --force-fit starts it anyway. Nothing was started")


def _link_bytes_per_s(answer: LaunchFacts, interface: str) -> float:
    """Return the maximum rate at which a host sends, in bytes/s; a default if its kernel does not say."""
    gbit = sum(port.gbit for port in training_ports(answer.rdma.ports))
    speeds = [
        int(address.mbit) / 1000
        for address in answer.own
        if address.interface == interface and address.mbit.isdecimal()
    ]
    return (gbit or max(speeds, default=0.0)) * 1e9 / 8 or Cluster().nic_bytes_per_s


def disk_room_faults(request: LaunchRequest, plan: Plan, answers: Mapping[str, LaunchFacts]) -> dict[str, str]:
    """Return hosts without disk space for checkpoints, and why; a shared directory is checked on the head.

    A resumed run is not checked: it already has checkpoints there, and the trainer, which knows them, checks as well.
    """
    head = plan.nodes[0]
    if not request.saves or request.resume != "no":
        return {}
    llama = answers[head.name].llama
    checkpoint = request.settings.checkpoint
    total_bytes = checkpoint_bytes(llama, request.settings) if llama else 0
    if checkpoint.storage == "shared":
        needed_bytes = {head.name: total_bytes}
    else:
        copies = checkpoint.copies * (len(plan.nodes) > 1)
        ring = zip(plan.nodes, (plan.nodes[-1], *plan.nodes), strict=False)  # each with the one before it
        needed_bytes = {
            node.name: total_bytes * (node.slots + copies * previous.slots) // plan.world_size
            for node, previous in ring
        }
    faults = {}
    best = checkpoint.keep_best
    for name, n_bytes in needed_bytes.items():
        place = answers[name].places.get(CHECKPOINTS, answers[name].run_place)
        try:
            check_disk_space(place.free_bytes, n_bytes, checkpoint.keep + best, keep_best=best)
        except NoRoomError as error:
            faults[name] = f"--checkpoint.dir: {place.path} {error}"
    return faults


def loading_note(request: LaunchRequest, plan: Plan, answers: Mapping[str, LaunchFacts]) -> str:
    """Return a note on how to load faster; '' if nothing would help much.

    If all hosts have the weights, each rank reads its own shard. Otherwise, and always with fsdp1, rank 0 sends every other host its
    shards, which takes at least their bytes over the rate of rank 0's link.
    """
    head, *others = plan.nodes
    mode, parallel = request.settings.model.load, request.settings.parallel
    full_bytes = answers[head.name].weights_bytes
    sent_bytes = full_bytes * (plan.world_size - head.slots) // plan.world_size
    loads_weights = request.resume == "no" or request.settings.adapter.is_enabled  # whose checkpoints have no weights
    if not loads_weights or sent_bytes < MIN_NOTED_BYTES or mode == "local" or parallel.is_fsdp1:
        return ""
    min_time = fmt_if(", at least {:.0f} s", _transfer_s(sent_bytes, answers[head.name], head.interface))
    hosts_without = [node.name for node in others if not answers[node.name].weights_bytes]
    if hosts_without:
        path, mesh = request.settings.model.path, "".join(f" {flag}" for flag in mesh_flags(parallel))
        return (
            f"note: {fold_names(hosts_without)} without the weights: rank 0 sends {sent_bytes / 1e9:,.0f} GB{min_time}; "
            f"`llama405b push --shards {head.name}:{path}{hosts_argument(request.hosts_file)}{mesh}` copies each host's shards once"
        )
    if mode == "rank0":
        return f"note: all hosts have the weights; --model.load auto avoids sending {sent_bytes / 1e9:,.0f} GB from rank 0{min_time}"
    return ""


def _transfer_s(n_bytes: int, head: LaunchFacts, interface: str) -> float:
    """Return the seconds that a host's link takes to send so many bytes; 0 if its rate is unknown."""
    speeds = [int(address.mbit) for address in head.own if address.interface == interface and address.mbit.isdigit()]
    return n_bytes * 8 / (speeds[0] * 1e6) if speeds and speeds[0] else 0.0


UNTESTED_NOTE = f"note: multi-GPU NCCL is untested in this release ({DOCS}/proof.md); try --rehearse first"


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedLaunch:
    """A launch that passed all checks."""

    request: LaunchRequest  # with the mesh, if that was left to the plan
    answers: Facts
    host_specs: Sequence[HostSpec]
    plan: Plan
    outlook: Prediction | None  # what to expect of it, if that can be predicted


def launch(
    request: LaunchRequest,
    hosts: Sequence[Host],
    fleet: Fleet,
    *,
    is_restart: bool = False,
    has_fewer_hosts: bool = False,
    on_line: Callable[[str], object] = show,
) -> Plan:
    """Check, plan and start; ``on_line`` gets the lines that describe the started run.

    ``is_restart``: a restart: any fault counts as a host's and may pass. ``has_fewer_hosts``: on fewer hosts than before, on which it may
    not fit.

    Raises:
        UserError: The request is wrong; nothing was started.
        RunError: A host is not fit, or did not start; nothing is left running, or the message says where something may be.
    """
    start_s = time.monotonic()
    checked = check_and_plan(request, hosts, fleet, is_restart=is_restart, has_fewer_hosts=has_fewer_hosts)
    guard = requested_guard(request) if request.restart and not is_restart else None
    stop_times = {name: facts.stopped_at for name, facts in checked.answers.items()}
    start_run(checked.plan, request.secrets, fleet, stop_times, is_restart=is_restart, guard=guard)
    for line in launch_summary(checked.request, hosts, checked, time.monotonic() - start_s):
        on_line(line)
    return checked.plan


def check_and_plan(
    request: LaunchRequest, hosts: Sequence[Host], fleet: Fleet, *, is_restart: bool, has_fewer_hosts: bool = False
) -> CheckedLaunch:
    """Probe every host, refuse what cannot work, and build the plan."""
    try:
        answers, rendezvous = probe_hosts(request, hosts, fleet, is_restart=is_restart)
        request = resolve_split(request, hosts, answers, rendezvous.interface)
        host_specs = [host_spec(host, answers[host.name], rendezvous) for host in hosts]
        plan = build_launch_plan(request, host_specs, answers, rendezvous, time.time())
    except UserError as error:
        if is_restart:
            raise RunError(str(error)) from None
        raise
    if request.config:
        plan = dataclasses.replace(plan, mesh=plan.axes(request.config.parallel))
    check_training(request, plan, answers)
    if faults := disk_room_faults(request, plan, answers):
        raise RunError(fault_list(faults, len(hosts)))
    outlook = predict_launch(request, plan, answers, read_calibration(request.hosts_file, hosts))
    if outlook:
        plan = dataclasses.replace(plan, expected=expected_of(outlook).sealed(plan.run))
        if not request.force_fit and (has_fewer_hosts or not is_restart):
            refuse_misfit(outlook)
    return CheckedLaunch(request, answers, host_specs, plan, outlook)


def launch_summary(
    request: LaunchRequest, hosts: Sequence[Host], checked: CheckedLaunch, elapsed_s: float
) -> Iterator[str]:
    """Yield the lines that describe the started run, and notes on it."""
    answers, plan = checked.answers, checked.plan
    yield from sharing_notes(hosts, answers)
    hosts_and_ranks = f"{pluralize(len(plan.nodes), 'host')}, {pluralize(plan.world_size, 'rank')}"
    yield f"{plan.run}: {hosts_and_ranks}, rendezvous at {plan.endpoint}, up in {elapsed_s:.1f} s"
    host_version, local_version = next(iter(answers.values())).versions.get("llama405b"), code_version()
    if host_version not in (None, local_version):
        setup = command_to_type("setup", request.hosts_file)
        yield f"note: the hosts run llama405b {host_version}, and this machine {local_version}; `{setup}` updates the hosts"
    for line in nccl_lines(request, checked.host_specs):
        yield f"  {line}"
    yield from training_notes(request, plan, answers)
    if checked.outlook:
        yield format_expectation(checked.outlook)
    if request.config and not request.on_cpu and any(facts.gpus for facts in answers.values()):
        yield UNTESTED_NOTE


def sharing_notes(hosts: Sequence[Host], answers: Facts) -> Iterator[str]:
    """Yield notes on hosts that are the same machine, and on other runs on the hosts."""
    for names in group_same_machine({host.name: answers[host.name].machine for host in hosts if not host.is_loopback}):
        yield f"note: {fold_names(names)} are the same machine; keep one of them in the hosts file"
    for name in sorted({run_name for facts in answers.values() for run_name in facts.others}):
        host_list = fold_names([host for host, facts in answers.items() if name in facts.others])
        yield f"note: run {name} is also alive on {host_list}; both share its GPUs and memory"


def mesh_notes(config: Config, plan: Plan) -> Iterator[str]:
    """Yield notes on settings that are untested on GPUs, and on an uneven split of the batch."""
    axes = plan.axes(config.parallel)
    if axes.label:
        inner = next(name for name in reversed(AXIS_NAMES) if axes.size([name]) > 1)
        fits_one_host = all(node.slots % axes.size([inner]) == 0 for node in plan.nodes)
        location = "on one host" if fits_one_host else "on several hosts"
        yield f"mesh: {axes}, ranks along {inner} are {location}; untested on GPUs ({DOCS}/parallel.md)"
    for name in ("prefetch", "reshard_after_forward"):
        if value := getattr(config.parallel, name):
            yield f"{name} {value}: untested on GPUs ({DOCS}/parallel.md)"
    if config.adapter.is_enabled:
        yield f"adapter: {adapter_label(config.adapter)}; untested on GPUs ({DOCS}/lora.md)"
    if note := idle_rank_note(config.training, axes.size(DP_AXES)):
        yield f"note: {note}"


def training_notes(request: LaunchRequest, plan: Plan, answers: Facts) -> Iterator[str]:
    """Yield notes on known bugs, the mesh, loading and rounding of a training run."""
    if request.config is None:
        return
    for symptom, bug in known_bugs(request.config, next(iter(answers.values())).versions).items():
        yield f"note: {symptom}; {bug.cure}"
    if not request.evaluates:
        yield from mesh_notes(request.config, plan)
    if note := loading_note(request, plan, answers):
        yield note
    if not request.evaluates and (note := rounding_note(request.config.parallel, request.config.optimizer)):
        yield f"note: {note}"


def resumed_launch(request: LaunchRequest, hosts: Sequence[Host], plan: Plan) -> tuple[LaunchRequest, list[Host]]:
    """Return the same launch with the same ranks on each host, resuming from the newest checkpoint that verifies."""
    slots_by_host = {node.name: node.slots for node in plan.nodes}
    same_hosts = [dataclasses.replace(host, slots=slots_by_host.get(host.name, host.slots)) for host in hosts]
    return dataclasses.replace(request, resume="auto"), same_hosts
