"""Stop a run: let the trainer save, end its processes on every host, and verify that none is left."""

import sys
from collections.abc import Sequence
from pathlib import Path

from llama405b.contract.checkpoints import step_of
from llama405b.contract.errors import EXIT_OK, UserError, exit_code_for, fmt_if, parse_seconds, pluralize
from llama405b.contract.paths import RunDir
from llama405b.contract.records import Metrics, Phase
from llama405b.spec.plan import check_run_name
from llama405b_tools.agent import starting
from llama405b_tools.agent.messages import STOP_TIMEOUT_S, HostRun, Orphan, StopReply
from llama405b_tools.agent.processes import dismiss_guard
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.transport import HostError, failure_texts, replies
from llama405b_tools.run.backends import Backend, backend_of
from llama405b_tools.run.judge import unstopped_hosts
from llama405b_tools.run.query import ask_run, operator_name, run_progress
from llama405b_tools.text.figures import format_columns
from llama405b_tools.verbs.arguments import resolve_hosts, verb_parser


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
    grace_s = None if args.grace is None else parse_seconds(args.grace, "--grace")
    if args.end and not args.orphans:
        raise UserError("--end needs --orphans; plain `stop` already ends the run")
    if args.orphans and args.run:
        raise UserError("--run cannot be used with --orphans, which checks every run")
    if args.orphans:
        with Fleet(resolve_hosts(args.hosts)) as fleet:
            return print_orphans(fleet, end=args.end)
    return end_run(backend_of(args.run, args.hosts), grace_s)


def end_run(backend: Backend, grace_s: float | None) -> int:
    """Stop the run, print each host's state before and after, and return the exit code.

    ``grace_s``: time for the trainer to save; None: derived from its last saves.
    """
    if backend.waiting():
        is_cancelled = backend.cancel()
        if still_waiting := backend.waiting():
            print(still_waiting.description)
        return exit_code_for(not is_cancelled)
    with Fleet(backend.hosts()) as fleet:
        handle = ask_run(fleet, backend.run and check_run_name(backend.run), has_local_files=backend.has_local_files)
        dismiss_guard(RunDir.from_name(handle.run))
        if grace_s is None:
            grace_s = handle.seconds_to_save()
            print(
                f"the trainer has up to {grace_s:.0f} s to save; --grace 0 does not wait", file=sys.stderr, flush=True
            )
        outcomes = backend.stop(fleet, handle.run, operator_name(), grace_s)
    members, stop_replies = handle.members, replies(outcomes)
    print(f"run {handle.run}")
    rows = [_row(name, outcome, is_member=name in members) for name, outcome in outcomes.items()]
    print(format_columns(("host", "before", "now"), rows), flush=True)
    print_saved(list(stop_replies.values()), grace_s)
    failures = unstopped_hosts(outcomes)
    for name, why in list(failures.items())[:1]:
        print(f"{name}: {why}; run the same command again when it can be reached")
    return exit_code_for(failures)


def print_saved(stop_replies: Sequence[StopReply], grace_s: float) -> None:
    """Print the checkpoint to resume from, how many steps a resume repeats, and whether a save was cut off."""
    nodes = [stop_reply.node for stop_reply in stop_replies if stop_reply.known and stop_reply.node]
    saved, metrics = run_progress(nodes)
    if not isinstance(metrics, Metrics):
        return
    lost_steps = metrics.step - step_of(Path(saved)) if saved else 0
    hint = fmt_if(" ({} earlier)", pluralize(lost_steps, "step") if lost_steps else "")
    if all(stop_reply.was_alive for stop_reply in stop_replies if stop_reply.known) and _was_saving(nodes):
        hint += f"; it was still saving: --grace {max(60, 4 * int(grace_s))}s would have given it more time"
    print(f"last step: {metrics.step}; newest checkpoint: {saved or 'none'}{hint}")


def _was_saving(nodes: Sequence[HostRun]) -> bool:
    """Return whether a save was cut off that more time would have completed."""
    if any(node.unsaved for node in nodes):
        return False
    return any(beat.phase is Phase.CHECKPOINT for node in nodes for beat in node.heartbeats)


def print_orphans(fleet: Fleet, *, end: bool) -> int:
    """Print the processes of runs whose node runner is gone; with ``end``, end them."""
    outcomes = fleet.call_all(starting.orphans, STOP_TIMEOUT_S, end=end)
    rows = [(name, "—", "—", f"UNREACHABLE: {why}") for name, why in failure_texts(outcomes).items()]
    n_left = len(rows)
    for name, orphans in replies(outcomes).items():
        for orphan in orphans:
            rows.append((name, orphan.value.rpartition(":")[0], _processes(orphan), _now(orphan, end=end)))
            n_left += len(orphan.left)
    if not rows:
        print(f"no leftovers on {pluralize(len(outcomes), 'host')}")
        return EXIT_OK
    print(format_columns(("host", "run", "processes", "now"), rows), flush=True)
    if n_left and not end:
        print("run the same command with --end to end them")
    return exit_code_for(n_left > 0)


def _processes(orphan: Orphan) -> str:
    pids = ", ".join(map(str, orphan.pids[:5])) + (", …" if len(orphan.pids) > 5 else "")
    return f"{pids}: {orphan.what[:60]}"


def _now(orphan: Orphan, *, end: bool) -> str:
    if not orphan.left:
        return "ended"
    return f"NOT ENDED: {list(orphan.left)}" if end else "still running"


def _row(name: str, outcome: StopReply | HostError, *, is_member: bool) -> tuple[str, str, str]:
    if isinstance(outcome, HostError):
        return name, "—", f"NOT VERIFIED: {outcome}"
    if not (outcome.known or is_member):
        return name, "—", "not a host of this run"
    before = "not running"
    if outcome.was_alive:
        before = "running"
    elif outcome.swept:
        before = pluralize(outcome.swept, "leftover process", "leftover processes")
    return name, before, fmt_if("NOT ENDED: {}", outcome.survivors) or "no process left"
