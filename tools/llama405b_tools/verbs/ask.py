"""Send a request to a live run, which handles it between two steps, and wait for the result.

save: save a checkpoint now. profile: trace the next steps of each rank, for Perfetto. memory: record what each rank's memory holds.
stacks: record the stack of every thread of each rank. A hung run takes no steps and cannot answer; use autopsy.
restart: save after the current step and end the attempt, so that the run's guard starts the next; --wait 0s: do not save.
Exits with 1 if the run ended, did not answer in time, or could not do it.
"""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from llama405b.contract.checkpoints import step_of
from llama405b.contract.errors import EXIT_OK, RunError, UserError, parse_seconds, pluralize
from llama405b.contract.records import MAX_PROFILED_STEPS, Cause, CauseKind, FailureRecord, RequestKind, RunEvent
from llama405b.spec.plan import Plan
from llama405b_tools.agent import describe
from llama405b_tools.agent.messages import HostRun
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.transport import replies
from llama405b_tools.run import screen
from llama405b_tools.run.backends import Backend, backend_of
from llama405b_tools.run.judge import unstopped_hosts
from llama405b_tools.run.query import (
    STATUS_TIMEOUT_S,
    ask_hosts,
    guard_of_hosts,
    guard_reports,
    operator_name,
    run_progress,
)
from llama405b_tools.text.figures import format_duration
from llama405b_tools.verbs.arguments import verb_parser

POLL_S = 1.0
RESTART = "restart"  # not sent to the run: its attempt is ended, and its guard starts the next


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    kinds = [*(kind.value for kind in RequestKind), RESTART]
    what = {"metavar": "WHAT", "choices": kinds, "help": "save, profile, memory, stacks or restart"}
    parser = verb_parser("ask", __doc__, {"kind": what})
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="steps to profile, 100 at most [1]")
    parser.add_argument(
        "--wait",
        default="10m",
        metavar="TIME",
        help="how long to wait for the result, including the current step [10m]",
    )
    args = parser.parse(argv)
    wait_s = parse_seconds(args.wait, "--wait")
    kind = RequestKind.SAVE if args.kind == RESTART else RequestKind(args.kind)
    if not 1 <= args.steps <= MAX_PROFILED_STEPS:
        raise UserError(f"--steps: {args.steps}; use 1 to {MAX_PROFILED_STEPS}")
    if args.steps != 1 and kind is not RequestKind.PROFILE:
        raise UserError(f"--steps: only a profile has steps; remove it, or ask for {RequestKind.PROFILE}")
    backend = backend_of(args.run, args.hosts)
    with Fleet(backend.hosts()) as fleet:
        head, plan, host_runs = find_head(fleet, backend.run)
        if args.kind == RESTART:
            check_guarded(fleet, plan.run, host_runs)
            return restart(fleet, backend, head, plan, host_runs, wait_s)
        answer = send_request(fleet, head, plan.run, kind, wait_s, args.steps)
    print(describe_result(kind, answer, head, plan.world_size, args.steps))
    return EXIT_OK


def check_guarded(fleet: Fleet, run: str, host_runs: Iterable[HostRun]) -> None:
    """Check that a run has a guard, from its hosts' reports."""
    guard = guard_of_hosts(run, guard_reports(host_runs), time.time())
    if guard is None or not guard.is_guarding:
        raise UserError(
            f"run {run} has no guard to restart it; `{fleet.command_to_type('stop', run)}`, then repeat the "
            "launch with --resume auto"
        )


def restart(fleet: Fleet, backend: Backend, head: str, plan: Plan, host_runs: Iterable[HostRun], wait_s: float) -> int:
    """Make a guarded run save and end its attempt, so that its guard starts the next; return the exit code.

    ``wait_s``: time for the save; 0: end at once.
    """
    runs, no_save = list(host_runs), "The run was not ended; --wait 0s ends it without saving"
    if wait_s and (why := next((run.unsaved for run in runs if run.unsaved), "")):
        raise RunError(f"run {plan.run}: its last save failed ({why}). {no_save}")
    if wait_s and not any(
        run.checkpoint for run in runs
    ):  # no checkpoint yet, so check that it can save before ending it
        try:
            send_request(fleet, head, plan.run, RequestKind.SAVE, wait_s)
        except RunError as error:
            raise RunError(f"{error}. {no_save}") from None
    if wait_s:
        screen.show(
            f"run {plan.run} saves after its current step and ends, within {format_duration(wait_s)}", error=True
        )
    cause = Cause(CauseKind.STOPPED, head, by=operator_name())
    stop_replies = backend.stop_launch(fleet, plan, FailureRecord(plan.attempt, head, cause), wait_s)
    for name, why in unstopped_hosts(stop_replies).items():
        screen.show(f"{name}: {why}; its guard retries", error=True)
    print(
        f"attempt {plan.attempt} is ended{_describe_end([end.node for end in replies(stop_replies).values() if end.node])}"
    )
    print("its guard starts the next attempt from the newest checkpoint")
    return EXIT_OK


def _describe_end(nodes: Sequence[HostRun]) -> str:
    """Describe after which step an attempt ended and how much of it is saved."""
    saved, last_metrics = run_progress(nodes)
    if last_metrics is None:
        return ""
    lost_steps = last_metrics.step - step_of(Path(saved)) if saved else last_metrics.step
    if lost_steps <= 0:
        return f" after step {last_metrics.step}, which is saved: {saved}"
    return f" after step {last_metrics.step}; {pluralize(lost_steps, 'step')} since {saved or 'its beginning'} will be repeated"


def find_head(fleet: Fleet, requested_run: str | None) -> tuple[str, Plan, Sequence[HostRun]]:
    """Return the host of a live run's rank 0, the run's plan, and its hosts' reports."""
    handle = ask_hosts(fleet, requested_run)
    run, head = handle.run, handle.head
    if not handle.live_hosts:
        raise UserError(f"run {run} is not running; `{handle.command('status')}` says how it ended")
    plan = handle.fetch_plan()
    if not plan.trains:
        raise UserError(f"run {run} runs your own program, which takes no requests")
    if not head:
        raise UserError(
            f"run {run} has its rank 0 on {plan.nodes[0].name}, which is not one of these hosts; name a hosts file that has it"
        )
    return head, plan, [*handle.host_runs.values()]


def send_request(fleet: Fleet, head: str, run: str, kind: RequestKind, wait_s: float, steps: int = 1) -> RunEvent:
    """Send a request to a run and return the result."""
    request = fleet.call(head, describe.ask, STATUS_TIMEOUT_S, run, kind, operator_name(), steps)
    if not request:
        raise RunError(f"run {run} is not running on {head}, the host of its rank 0")
    screen.show(f"asked; run {run} answers after its current step", error=True)
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        result = fleet.call(head, describe.answer, STATUS_TIMEOUT_S, run, request)
        if result.answer and result.answer.detail:
            raise RunError(f"run {run}: {result.answer.detail}")
        if result.answer:
            return result.answer
        if not result.alive:
            raise RunError(f"run {run} ended before it answered; `{fleet.command_to_type('status', run)}` says why")
        time.sleep(POLL_S)
    raise RunError(
        f"run {run} has not answered for {format_duration(wait_s)}: its step is longer than that, or it hangs; "
        f"`{fleet.command_to_type('status', run)}` shows which. A late answer still appears in the run's events"
    )


def describe_result(kind: RequestKind, answer: RunEvent, head: str, world: int, steps: int) -> str:
    """Describe the result and where its files are."""
    if kind is RequestKind.SAVE:
        return f"saved step {answer.step}: {answer.path} on {head}"
    subject = (
        f"a profile of {pluralize(steps, 'step')}"
        if kind is RequestKind.PROFILE
        else f"{kind} after step {answer.step}"
    )
    others_note = (
        f"; the files of the other {pluralize(world - 1, 'rank')} are in the same place on their hosts"
        if world > 1
        else ""
    )
    return f"{subject}: {answer.path} on {head}{others_note}"
