"""Stop a run: let the trainer save, end its processes on every host, and verify that none is left."""

import sys
from collections.abc import Sequence
from pathlib import Path

from llama405b.contract.checkpoints import step_of
from llama405b.contract.errors import GOOD, UserError, code_for, counted, given, seconds
from llama405b.contract.paths import RunDir
from llama405b.contract.records import Metrics, Phase
from llama405b.spec.plan import check_run_name
from llama405b_tools.agent.messages import ANSWER_S, HostRun, Orphan, OrphansReply, OrphansRequest, StopReply
from llama405b_tools.agent.processes import dismiss_guard
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.transport import HostError, replies, unanswered
from llama405b_tools.run.backends import Backend, backend_of
from llama405b_tools.run.judge import not_stopped
from llama405b_tools.run.query import ask_run, members_of, operator_name, progress, seconds_to_save
from llama405b_tools.text.figures import format_table
from llama405b_tools.verbs.arguments import hosts_of, verb_parser


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    parser = verb_parser("stop", __doc__)
    parser.add_argument(
        "--grace",
        metavar="TIME",
        help="time for the trainer to save first; 0: do not wait [30s plus twice the time of its last save]",
    )
    parser.add_argument("--orphans", action="store_true", help="list processes left by runs whose node runner is gone")
    parser.add_argument("--end", action="store_true", help="with --orphans: end these processes")
    args = parser.parse(argv)
    grace_s = None if args.grace is None else seconds(args.grace, "--grace")
    if args.end and not args.orphans:
        raise UserError("--end needs --orphans; plain `stop` already ends the run")
    if args.orphans and args.run:
        raise UserError("--run cannot be used with --orphans, which checks every run")
    if args.orphans:
        with Fleet(hosts_of(args.hosts)) as fleet:
            return print_orphans(fleet, end=args.end)
    return end_run(backend_of(args.run, args.hosts), grace_s)


def end_run(backend: Backend, grace_s: float | None) -> int:
    """Stop the run, print each host's state before and after, and return the exit code.

    ``grace_s``: time for the trainer to save; None: derived from its last saves.
    """
    if backend.waiting():
        gone = backend.cancel()
        if after := backend.waiting():
            print(after.words)
        return code_for(not gone)
    with Fleet(backend.hosts()) as fleet:
        run, seen = ask_run(fleet, backend.run and check_run_name(backend.run), elsewhere=backend.elsewhere)
        dismiss_guard(RunDir.here(run))
        if grace_s is None:
            grace_s = seconds_to_save(seen)
            print(
                f"the trainer has up to {grace_s:.0f} s to save; --grace 0 does not wait", file=sys.stderr, flush=True
            )
        ends = backend.stop(fleet, run, operator_name(), grace_s)
    members, told = members_of(seen), replies(ends)
    print(f"run {run}")
    rows = [_row(name, end, is_member=name in members) for name, end in ends.items()]
    print(format_table(("host", "before", "now"), rows), flush=True)
    print_saved(list(told.values()), grace_s)
    left = not_stopped(ends)
    for name, why in list(left.items())[:1]:
        print(f"{name}: {why}; run the same command again when it can be reached")
    return code_for(left)


def print_saved(ends: Sequence[StopReply], grace_s: float) -> None:
    """Print the checkpoint to resume from, how many steps a resume repeats, and whether a save was cut off."""
    nodes = [end.node for end in ends if end.known and end.node]
    saved, metrics = progress(nodes)
    if not isinstance(metrics, Metrics):
        return
    lost = metrics.step - step_of(Path(saved)) if saved else 0
    hint = given(" ({} earlier)", counted(lost, "step") if lost else "")
    if all(end.was_alive for end in ends if end.known) and _was_saving(nodes):
        hint += f"; it was still saving: --grace {max(60, 4 * int(grace_s))}s would have given it more time"
    print(f"last step: {metrics.step}; newest checkpoint: {saved or 'none'}{hint}")


def _was_saving(nodes: Sequence[HostRun]) -> bool:
    """Return whether a save was cut off that more time would have completed."""
    if any(node.unsaved for node in nodes):
        return False
    return any(beat.phase is Phase.CHECKPOINT for node in nodes for beat in node.heartbeats)


def print_orphans(fleet: Fleet, *, end: bool) -> int:
    """Print the processes of runs whose node runner is gone; with ``end``, end them."""
    requests = {name: OrphansRequest(end) for name in fleet.hosts}
    outcomes = fleet.ask_all("orphans", requests, OrphansReply, ANSWER_S)
    rows = [(name, "—", "—", f"UNREACHABLE: {why}") for name, why in unanswered(outcomes).items()]
    left = len(rows)
    for name, found in replies(outcomes).items():
        for orphan in found.orphans:
            rows.append((name, orphan.value.rpartition(":")[0], _processes(orphan), _now(orphan, end=end)))
            left += len(orphan.left)
    if not rows:
        print(f"no leftovers on {counted(len(outcomes), 'host')}")
        return GOOD
    print(format_table(("host", "run", "processes", "now"), rows), flush=True)
    if left and not end:
        print("run the same command with --end to end them")
    return code_for(left > 0)


def _processes(orphan: Orphan) -> str:
    pids = ", ".join(map(str, orphan.pids[:5])) + (", …" if len(orphan.pids) > 5 else "")
    return f"{pids}: {orphan.what[:60]}"


def _now(orphan: Orphan, *, end: bool) -> str:
    if not orphan.left:
        return "ended"
    return f"NOT ENDED: {list(orphan.left)}" if end else "still running"


def _row(name: str, end: StopReply | HostError, *, is_member: bool) -> tuple[str, str, str]:
    if isinstance(end, HostError):
        return name, "—", f"NOT VERIFIED: {end}"
    if not (end.known or is_member):
        return name, "—", "not a host of this run"
    before = "not running"
    if end.was_alive:
        before = "running"
    elif end.swept:
        before = counted(end.swept, "leftover process", "leftover processes")
    return name, before, given("NOT ENDED: {}", end.remains) or "no process left"
