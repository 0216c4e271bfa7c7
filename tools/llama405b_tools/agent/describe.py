"""What this host knows about a run from its files: state, checkpoints, and requests to rank 0 with their answers.

Requests are written and answered on the head, because rank 0 polls for them there.
"""

import contextlib
import dataclasses
import itertools
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from llama405b.contract.checkpoints import (
    MANIFEST,
    REPLICA_PREFIX,
    CopiedStep,
    Manifest,
    find_newest_complete,
    list_committed,
    read_manifest,
    step_of,
)
from llama405b.contract.files import UNLIMITED, read_record, read_records, write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.reader import MalformedError
from llama405b.contract.records import (
    METRICS_LINE,
    EventKind,
    FailureRecord,
    Heartbeat,
    NodeState,
    NodeStatus,
    RequestKind,
    RunEvent,
    RunRequest,
    StopMark,
)
from llama405b.spec.plan import Node, Plan, read_plan
from llama405b_tools.agent import processes
from llama405b_tools.agent.messages import (
    AnswerReply,
    CheckpointPart,
    HostRun,
    PartsReply,
    RankHeartbeat,
    StatusReply,
)
from llama405b_tools.agent.processes import (
    is_alive,
    is_locked,
    is_run_active,
    read_guard_note,
    resolve_run_dir,
    tmux_socket,
)

MAX_RUNS = 20
LAST_EVENTS_BYTES = 64 << 10  # in which saves are looked for
LAST_INTERVALS = 5  # between saves, of which the longest is usual
MIN_INTERVAL_S = 10.0  # of a save, and between saves: those that are faster are not missed
MAX_SAVE_S = 1e9  # longer ones are not believed
MAX_DETAIL_CHARS = 300  # of an event
LAST_BYTES = 4096  # of the metrics file, enough for its last line
NO_STOP = StopMark("")


def status(host: str, run: str | None = None) -> StatusReply:
    """Return the state of this run on the host, or of every run there, newest first.

    State, heartbeats of its ranks, last step and checkpoint.
    """
    plans, other_hosts = [], list[str]()
    for name in [path.name for path in Path("runs").glob("*") if run in (None, path.name)]:
        plan = read_plan(resolve_run_dir(name))
        if plan.find_node(host):
            plans.append((name, plan))
        elif run:
            other_hosts = [node.name for node in plan.nodes]
    plans.sort(key=lambda entry: entry[1].created, reverse=True)
    runs = tuple(describe_run(resolve_run_dir(name), plan, host) for name, plan in plans[:MAX_RUNS])
    return StatusReply(runs, tuple(other_hosts))


def planned(run: str) -> Plan:
    """Return the plan of a run's newest attempt."""
    return read_plan(resolve_run_dir(run))


def list_ends(run: RunDir, host: str) -> tuple[NodeStatus, ...]:
    """Return how attempts ended on a host.

    If the disk had no room for the last end's line, it is taken from the status file.
    """
    ends = tuple(read_records(NodeStatus, run.ends(host), UNLIMITED))
    latest = read_record(NodeStatus, run.status(host))
    has_ended = latest is not None and latest.state not in (NodeState.STARTING, NodeState.RUNNING)
    return (*ends, latest) if latest and has_ended and latest.attempt not in {end.attempt for end in ends} else ends


def describe_run(run: RunDir, plan: Plan, host: str) -> HostRun:
    """Return one run's state from its files and processes here."""
    node, alive = plan.find_node(host), is_run_alive(run, plan, host)
    beats = read_heartbeats(run, node)
    checkpoint = newest_checkpoint(run, plan)
    save_state = read_save_state(run, plan.attempt, next((beat for beat in beats if alive and beat.rank == 0), None))
    return HostRun(
        run=run.name,
        created=plan.created,
        attempt=plan.attempt,
        owner=plan.owner,
        first_rank=node.first_rank if node else 0,
        alive=alive,
        leftovers=() if is_alive(run, host) or plan.slurm_job else tuple(processes.find_marked(f"{run.path}:{host}")),
        status=read_record(NodeStatus, run.status(host)),
        heartbeats=beats,
        ends=list_ends(run, host)[-MAX_RUNS:],
        stopped_by=stopped_by(run, host),
        metrics=next(iter(read_records(METRICS_LINE, run.metrics, 1, LAST_BYTES)), None),
        checkpoint=str(checkpoint) if checkpoint else None,
        now=time.time(),
        hosts=tuple(node.name for node in plan.nodes),
        guard=read_guard_note(run, host),
        blames=tuple(read_records(FailureRecord, run.blames(host), MAX_RUNS)),
        world=plan.world_size,
        save_s=save_state.usual_s,
        unsaved=save_state.failure,
        unsent=save_state.after_save_failure,
        copied=read_copied(run, host),
        tmux=tmux_socket(run),
        mesh=plan.mesh,
        launching=is_locked(run.start_lock(host)),
    )


def is_run_alive(run: RunDir, plan: Plan, host: str) -> bool:
    """Return whether a node runner runs the plan, here or in a Slurm job.

    A Slurm job's files may be on this machine while its node is another.
    """
    if not plan.slurm_job:
        return is_run_active(run, host)
    status = read_record(NodeStatus, run.status(host))
    if status and status.attempt == plan.attempt and status.state not in (NodeState.STARTING, NodeState.RUNNING):
        return False
    return processes.is_job_alive(plan.slurm_job)


def read_heartbeats(run: RunDir, node: Node | None) -> tuple[RankHeartbeat, ...]:
    """Return the heartbeats of a node's ranks, by rank, each with the state of its process."""
    if node is None:
        return ()
    beats = [read_record(RankHeartbeat, run.heartbeat(rank)) for rank in node.ranks]
    return tuple(beat.with_state(processes.process_state(beat.pid)) for beat in beats if beat)


def stopped_by(run: RunDir, host: str) -> str:
    """Return who stopped the run here; "" if nobody did."""
    return read_stop_mark(run, host).by


def read_stop_mark(run: RunDir, host: str) -> StopMark:
    """Return who stopped the run here, and the grace period for saving."""
    return read_record(StopMark, run.stop(host)) or NO_STOP


def checkpoint_root(run: RunDir, plan: Plan) -> Path:
    """Return the directory of a run's checkpoints."""
    return Path(plan.checkpoint_dir or run.checkpoints)


def first_launch_time(run: RunDir, host: str) -> float:
    """Return when the first attempt began there; 0 if it never did."""
    with contextlib.suppress(OSError):
        return run.lock(host).stat().st_mtime  # its node runner made it, and nothing is ever written into it
    return 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class SaveState:
    """How a run's saves go."""

    usual_s: float = 0.0  # how long one usually takes; 0: unknown
    failure: str = ""  # why the newest failed, or for how long it is overdue
    after_save_failure: str = ""  # where the user's command after a save fails, and why


def read_copied(run: RunDir, host: str) -> CopiedStep | None:
    """Return what the next host has of this one's checkpoints; None: nothing is copied."""
    return (read_record(CopiedStep, run.copied(host)) or CopiedStep()) if run.ring(host).exists() else None


def newest_checkpoint(run: RunDir, plan: Plan) -> Path | None:
    """Return the newest complete checkpoint; None if there is none here, or this user cannot read them."""
    with contextlib.suppress(OSError):  # the host that can read them will say
        return find_newest_complete(checkpoint_root(run, plan))
    return None


def read_save_state(run: RunDir, attempt: int, beat: Heartbeat | None) -> SaveState:
    """Return how a run's saves go. ``beat``: rank 0's heartbeat if it is alive, by which a save may be overdue."""
    events = read_records(RunEvent, run.events("rank-0"), UNLIMITED, LAST_EVENTS_BYTES)
    saves = [event for event in events if event.kind in (EventKind.SAVED, EventKind.NOT_SAVED)]
    after_saves = [
        event
        for event in events
        if event.kind in (EventKind.AFTER_SAVE, EventKind.AFTER_SAVE_FAILED) and event.attempt == attempt
    ]
    failure = after_save_failure = ""
    if saves and saves[-1].kind is EventKind.NOT_SAVED and saves[-1].attempt == attempt:
        failure = f"step {saves[-1].step}: {saves[-1].detail[:MAX_DETAIL_CHARS]}"
    if after_saves and after_saves[-1].kind is EventKind.AFTER_SAVE_FAILED:
        after_save_failure = after_saves[-1].detail[:MAX_DETAIL_CHARS]
    return SaveState(_usual_save_s(saves), failure or overdue_save(saves, time.time(), beat), after_save_failure)


def _usual_save_s(saves: Sequence[RunEvent]) -> float:
    """Return the median seconds of past saves, of two the upper one; 0 if there were none."""
    took_s = sorted(event.took_s for event in saves if event.kind is EventKind.SAVED and 0 < event.took_s < MAX_SAVE_S)
    return took_s[len(took_s) // 2] if took_s else 0.0


def overdue_save(saves: Sequence[RunEvent], now: float, beat: Heartbeat | None) -> str:
    """Return a clause if a save or the next checkpoint is overdue; "" if neither is.

    A save is overdue after three times its usual time, a checkpoint when it is late by two intervals.
    """
    if beat is None or beat.save_since is None:
        return ""
    saved = [event for event in saves if event.kind is EventKind.SAVED]
    intervals_s = [
        later.time - earlier.time for earlier, later in itertools.pairwise(saved) if earlier.attempt == later.attempt
    ]
    interval_s = max([beat.save_every_s or 0.0, *intervals_s[-LAST_INTERVALS:]])  # configured, or asked for
    usual_s, late_s = _usual_save_s(saves), now - beat.save_since
    if usual_s and late_s > 3 * max(MIN_INTERVAL_S, usual_s):
        return f"for {late_s:.0f} s, in a save that usually takes {usual_s:.1f} s"
    if interval_s and late_s > 2 * max(MIN_INTERVAL_S, interval_s):
        return f"for {late_s:.0f} s, usually every {interval_s:.0f} s"
    return ""


def parts(run: str) -> PartsReply:
    """List this host's checkpoint files: its own part of each checkpoint, and copies of other parts."""
    run_dir = resolve_run_dir(run)
    root = checkpoint_root(run_dir, read_plan(run_dir)).absolute()
    if not root.is_dir():
        return PartsReply("")
    paths = itertools.chain(
        list_committed(root), *(list_committed(copies) for copies in sorted(root.glob(f"{REPLICA_PREFIX}*")))
    )
    candidates = [_read_part(path, run) for path in paths]
    return PartsReply(str(root), tuple(part for part in candidates if part))


def load_manifest(checkpoint: Path) -> Manifest | None:
    """Return a checkpoint's manifest; None if it is missing or unreadable."""
    try:
        return read_manifest((checkpoint / MANIFEST).read_bytes())[0]
    except (OSError, MalformedError):
        return None


def _read_part(path: Path, run: str) -> CheckpointPart | None:
    try:
        manifest, digest = read_manifest((path / MANIFEST).read_bytes())
    except (OSError, MalformedError):
        return None
    if manifest.run not in ("", run):
        return None
    weight_sizes = {name: seal.bytes for name, seal in manifest.files.items() if seal.weights}
    complete_names = [
        name for name, size in weight_sizes.items() if (path / name).is_file() and (path / name).stat().st_size == size
    ]
    return CheckpointPart(step_of(path), digest, str(path), (*complete_names, MANIFEST), (*weight_sizes, MANIFEST))


MAX_ANSWER_EVENTS = 100  # events among which an answer is looked for


def ask(run: str, kind: RequestKind, by: str, steps: int = 1) -> str:
    """Write a request for the trainer to read; return its ID, "" if the run is not alive here."""
    if not _is_head_alive(run):
        return ""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
    record = RunRequest(name, kind, by, time.time(), steps)
    write_json(resolve_run_dir(run).requests / f"{name}.json", record)
    return name


def answer(run: str, request: str) -> AnswerReply:
    """Return the answer to the request with this ID, if rank 0 has written it."""
    alive = _is_head_alive(run)  # looked at first: a run that ends now may have answered before
    events = read_records(RunEvent, resolve_run_dir(run).events("rank-0"), MAX_ANSWER_EVENTS)
    result_event = next((event for event in reversed(events) if event.request == request), None)
    return AnswerReply(result_event, alive)


def _is_head_alive(name: str) -> bool:
    run = resolve_run_dir(name)
    plan = read_plan(run)
    return bool(plan.nodes) and is_run_alive(run, plan, plan.nodes[0].name)
