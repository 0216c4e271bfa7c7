"""What this host knows about a run from its files: state, checkpoints, and requests to rank 0 with their answers.

Requests are written and answered on the head, because rank 0 polls for them there.
"""

import contextlib
import dataclasses
import itertools
import secrets
import time
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
from llama405b_tools.agent.sampled_run import SAVE_EVENTS, after_save_failure, median_save_s, overdue_save, save_failure

MAX_RUNS = 20
MAX_SAVE_EVENTS = 50
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
    checkpoint = None
    save_s, save_error, after_save_error = read_save_state(
        run, plan.attempt, next((beat for beat in beats if alive and beat.rank == 0), None)
    )
    with contextlib.suppress(OSError):  # another user's, perhaps: the host that can read them will say
        checkpoint = find_newest_complete(checkpoint_root(run, plan))
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
        save_s=save_s,
        unsaved=save_error,
        unsent=after_save_error,
        copied=(read_record(CopiedStep, run.copied(host)) or CopiedStep()) if run.ring(host).exists() else None,
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


def read_save_state(run: RunDir, attempt: int, beat: Heartbeat | None) -> tuple[float, str, str]:
    """Return how long saves usually take, why they fail, and why the user's command after them fails.

    A save that is late by rank 0's heartbeat counts as failing.
    """
    events = [dataclasses.asdict(event) for event in read_records(RunEvent, run.events("rank-0"), MAX_SAVE_EVENTS)]
    save_events = [event for event in events if event["kind"] in SAVE_EVENTS]
    overdue_text = overdue_save(save_events, time.time(), dataclasses.asdict(beat) if beat else {})  # type: ignore[no-untyped-call]
    save_error = save_failure(save_events, attempt) or overdue_text  # type: ignore[no-untyped-call]
    after_save_error = after_save_failure(events, attempt)  # type: ignore[no-untyped-call]
    return median_save_s(save_events).get("checkpoint", 0.0), save_error, after_save_error  # type: ignore[no-untyped-call]


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
