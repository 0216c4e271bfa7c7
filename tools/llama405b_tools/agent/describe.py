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
    OF,
    Copied,
    Manifest,
    committed,
    newest_complete,
    read_manifest,
    step_of,
)
from llama405b.contract.files import EVERY, read_record, read_records, write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.reader import MalformedError
from llama405b.contract.records import (
    METRICS_LINE,
    Blame,
    Heartbeat,
    NodeState,
    NodeStatus,
    RunEvent,
    RunRequest,
    StopMark,
)
from llama405b.spec.plan import Node, Plan, read_plan
from llama405b_tools.agent import processes
from llama405b_tools.agent.messages import (
    AnswerReply,
    AnswerRequest,
    AskReply,
    AskRequest,
    Beat,
    CheckpointPart,
    HostRun,
    PartsReply,
    PartsRequest,
    PlanRequest,
    StatusReply,
    StatusRequest,
)
from llama405b_tools.agent.processes import heard_guard, is_alive, is_held, run_of, runs_here, tmux_socket
from llama405b_tools.agent.sampled_run import SAVES, overdue, unsaved, unsent, usual_s

NEWEST_RUNS = 20
NEWEST_EVENTS = 50
LAST_BYTES = 4096  # of the metrics file, enough for its last line
NO_STOP = StopMark("")


def status(request: StatusRequest) -> StatusReply:
    """Return the state of every run of this host, newest first.

    State, heartbeats of its ranks, last step and checkpoint.
    """
    found, strangers = [], list[str]()
    for name in [path.name for path in Path("runs").glob("*") if request.run in (None, path.name)]:
        plan = read_plan(run_of(name))
        if plan.find(request.host):
            found.append((name, plan))
        elif request.run:
            strangers = [node.name for node in plan.nodes]
    found.sort(key=lambda entry: entry[1].created, reverse=True)
    described = tuple(describe(run_of(name), plan, request.host) for name, plan in found[:NEWEST_RUNS])
    return StatusReply(described, tuple(strangers))


def planned(request: PlanRequest) -> Plan:
    """Return the plan of a run's newest attempt."""
    return read_plan(run_of(request.run))


def ends_of(run: RunDir, host: str) -> tuple[NodeStatus, ...]:
    """Return how attempts ended on a host.

    If the disk had no room for the last end's line, it is taken from the status file.
    """
    ends = tuple(read_records(NodeStatus, run.ends(host), EVERY))
    last = read_record(NodeStatus, run.status(host))
    has_ended = last is not None and last.state not in (NodeState.STARTING, NodeState.RUNNING)
    return (*ends, last) if last and has_ended and last.attempt not in {end.attempt for end in ends} else ends


def describe(run: RunDir, plan: Plan, host: str) -> HostRun:
    """Return one run's state from its files and processes here."""
    node, alive = plan.find(host), lives(run, plan, host)
    beats = beats_of(run, node)
    saved = None
    save_s, why, fails = saves(run, plan.attempt, next((beat for beat in beats if alive and beat.rank == 0), None))
    with contextlib.suppress(OSError):  # another user's, perhaps: the host that can read them will say
        saved = newest_complete(checkpoints_of(run, plan))
    return HostRun(
        run=run.name,
        created=plan.created,
        attempt=plan.attempt,
        owner=plan.owner,
        first_rank=node.first_rank if node else 0,
        alive=alive,
        leftovers=() if is_alive(run, host) or plan.slurm_job else tuple(processes.marked(f"{run.path}:{host}")),
        status=read_record(NodeStatus, run.status(host)),
        heartbeats=beats,
        ends=ends_of(run, host)[-NEWEST_RUNS:],
        stopped_by=stopped_by(run, host),
        metrics=next(iter(read_records(METRICS_LINE, run.metrics, 1, LAST_BYTES)), None),
        checkpoint=str(saved) if saved else None,
        now=time.time(),
        hosts=tuple(node.name for node in plan.nodes),
        guard=heard_guard(run, host),
        blames=tuple(read_records(Blame, run.blames(host), NEWEST_RUNS)),
        world=plan.world,
        save_s=save_s,
        unsaved=why,
        unsent=fails,
        copied=(read_record(Copied, run.copied(host)) or Copied()) if run.ring(host).exists() else None,
        tmux=tmux_socket(run),
        mesh=plan.mesh,
        launching=is_held(run.start_lock(host)),
    )


def lives(run: RunDir, plan: Plan, host: str) -> bool:
    """Return whether a node runner runs the plan, here or in a Slurm job.

    A Slurm job's files may be on this machine while its node is another.
    """
    if not plan.slurm_job:
        return runs_here(run, host)
    status = read_record(NodeStatus, run.status(host))
    if status and status.attempt == plan.attempt and status.state not in (NodeState.STARTING, NodeState.RUNNING):
        return False
    return processes.job_alive(plan.slurm_job)


def beats_of(run: RunDir, node: Node | None) -> tuple[Beat, ...]:
    """Return the heartbeats of a node's ranks, by rank, each with the state of its process."""
    if node is None:
        return ()
    beats = [read_record(Beat, run.heartbeat(rank)) for rank in node.ranks]
    return tuple(beat.with_state(processes.state(beat.pid)) for beat in beats if beat)


def stopped_by(run: RunDir, host: str) -> str:
    """Return who stopped the run here; "" if nobody did."""
    return stop_mark(run, host).by


def stop_mark(run: RunDir, host: str) -> StopMark:
    """Return who stopped the run here, and the grace period for saving."""
    return read_record(StopMark, run.stop(host)) or NO_STOP


def checkpoints_of(run: RunDir, plan: Plan) -> Path:
    """Return the directory of a run's checkpoints."""
    return Path(plan.checkpoint_dir or run.checkpoints)


def saves(run: RunDir, attempt: int, beat: Heartbeat | None) -> tuple[float, str, str]:
    """Return how long saves usually take, why they fail, and why the user's command after them fails.

    A save that is late by rank 0's heartbeat counts as failing.
    """
    told = [dataclasses.asdict(event) for event in read_records(RunEvent, run.events("rank-0"), NEWEST_EVENTS)]
    of_saves = [event for event in told if event["kind"] in SAVES]
    late = overdue(of_saves, time.time(), dataclasses.asdict(beat) if beat else {})  # type: ignore[no-untyped-call]
    why, fails = unsaved(of_saves, attempt) or late, unsent(told, attempt)  # type: ignore[no-untyped-call]
    return usual_s(of_saves).get("checkpoint", 0.0), why, fails  # type: ignore[no-untyped-call]


def parts(request: PartsRequest) -> PartsReply:
    """List this host's checkpoint files: its own part of each checkpoint, and copies of other parts."""
    run = run_of(request.run)
    root = checkpoints_of(run, read_plan(run)).absolute()
    if not root.is_dir():
        return PartsReply("")
    paths = itertools.chain(committed(root), *(committed(copies) for copies in sorted(root.glob(f"{OF}*"))))
    candidates = [_part_at(path, request.run) for path in paths]
    return PartsReply(str(root), tuple(part for part in candidates if part))


def manifest_of(checkpoint: Path) -> Manifest | None:
    """Return a checkpoint's manifest; None if it is missing or unreadable."""
    try:
        return read_manifest((checkpoint / MANIFEST).read_bytes())[0]
    except (OSError, MalformedError):
        return None


def _part_at(path: Path, run: str) -> CheckpointPart | None:
    try:
        manifest, digest = read_manifest((path / MANIFEST).read_bytes())
    except (OSError, MalformedError):
        return None
    if manifest.run not in ("", run):
        return None
    needed = {name: seal.bytes for name, seal in manifest.files.items() if seal.weights}
    here = [name for name, size in needed.items() if (path / name).is_file() and (path / name).stat().st_size == size]
    return CheckpointPart(step_of(path), digest, str(path), (*here, MANIFEST), (*needed, MANIFEST))


NEWEST = 100  # events among which an answer is looked for


def ask(request: AskRequest) -> AskReply:
    """Write a request for the trainer to read."""
    run = run_of(request.run)
    if not _lives(request.run):
        return AskReply("")
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
    record = RunRequest(name, request.kind, request.by, time.time(), request.steps)
    write_json(run.requests / f"{name}.json", record)
    return AskReply(name)


def answer(request: AnswerRequest) -> AnswerReply:
    """Return the answer to a request, if rank 0 has written it."""
    alive = _lives(request.run)  # looked at first: a run that ends now may have answered before
    events = read_records(RunEvent, run_of(request.run).events("rank-0"), NEWEST)
    found = next((event for event in reversed(events) if event.request == request.id), None)
    return AnswerReply(found, alive)


def _lives(name: str) -> bool:
    run = run_of(name)
    plan = read_plan(run)
    return bool(plan.nodes) and lives(run, plan, plan.nodes[0].name)
