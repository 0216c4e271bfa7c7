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
from llama405b.contract.errors import GOOD, RunError, UserError, counted, seconds
from llama405b.contract.records import MOST_PROFILED_STEPS, Blame, Cause, CauseKind, RequestKind, RunEvent
from llama405b.settings.command import OneLineParser
from llama405b.spec.plan import Plan, check_run_name
from llama405b_tools.agent.messages import AnswerReply, AnswerRequest, AskReply, AskRequest, HostRun
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.transport import replies
from llama405b_tools.run import screen
from llama405b_tools.run.backends import Backend, backend_of
from llama405b_tools.run.judge import not_stopped
from llama405b_tools.run.query import (
    STATUS_TIMEOUT_S,
    ask_hosts,
    guard_of_hosts,
    head_of,
    heard_by,
    known_of,
    operator_name,
    planned,
    progress,
)
from llama405b_tools.text.figures import span
from llama405b_tools.verbs.arguments import add_hosts

LOOK_EVERY_S = 1.0
RESTART = "restart"  # not sent to the run: its attempt is ended, and its guard starts the next


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    parser = OneLineParser(prog="llama405b ask", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="name of the run")
    kinds = [*(kind.value for kind in RequestKind), RESTART]
    parser.add_argument("kind", metavar="WHAT", choices=kinds, help="save, profile, memory, stacks or restart")
    add_hosts(parser)
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="steps to profile, 100 at most [1]")
    parser.add_argument(
        "--wait",
        default="10m",
        metavar="TIME",
        help="how long to wait for the result, including the current step [10m]",
    )
    args = parser.parse(argv)
    wait_s = seconds(args.wait, "--wait")
    kind = RequestKind.SAVE if args.kind == RESTART else RequestKind(args.kind)
    if not 1 <= args.steps <= MOST_PROFILED_STEPS:
        raise UserError(f"--steps: {args.steps}; use 1 to {MOST_PROFILED_STEPS}")
    if args.steps != 1 and kind is not RequestKind.PROFILE:
        raise UserError(f"--steps: only a profile has steps; remove it, or ask for {RequestKind.PROFILE}")
    backend = backend_of(check_run_name(args.run), args.hosts)
    with Fleet(backend.hosts()) as fleet:
        head, plan, told = find_head(fleet, args.run)
        if args.kind == RESTART:
            check_guarded(fleet, plan.run, told)
            return restart(fleet, backend, head, plan, told, wait_s)
        answer = request(fleet, head, AskRequest(args.run, kind, operator_name(), args.steps), wait_s)
    print(words_of(kind, answer, head, plan.world, args.steps))
    return GOOD


def check_guarded(fleet: Fleet, run: str, told: Iterable[HostRun]) -> None:
    """Check that a run has a guard, from its hosts' reports."""
    guard = guard_of_hosts(run, heard_by(told), time.time())
    if guard is None or not guard.guards:
        raise UserError(
            f"run {run} has no guard to restart it; `{fleet.command_to_type('stop', run)}`, then repeat the "
            "launch with --resume auto"
        )


def restart(fleet: Fleet, backend: Backend, head: str, plan: Plan, told: Iterable[HostRun], wait_s: float) -> int:
    """Make a guarded run save and end its attempt, so that its guard starts the next; return the exit code.

    ``wait_s``: time for the save; 0: end at once.
    """
    known, no_save = list(told), "The run was not ended; --wait 0s ends it without saving"
    if wait_s and (why := next((run.unsaved for run in known if run.unsaved), "")):
        raise RunError(f"run {plan.run}: its last save failed ({why}). {no_save}")
    if wait_s and not any(
        run.checkpoint for run in known
    ):  # no checkpoint yet, so check that it can save before ending it
        try:
            request(fleet, head, AskRequest(plan.run, RequestKind.SAVE, operator_name()), wait_s)
        except RunError as error:
            raise RunError(f"{error}. {no_save}") from None
    if wait_s:
        screen.show(f"run {plan.run} saves after its current step and ends, within {span(wait_s)}", error=True)
    asked = Cause(CauseKind.STOPPED, head, by=operator_name())
    ends = backend.stop_launch(fleet, plan, Blame(plan.attempt, head, asked), wait_s)
    for name, why in not_stopped(ends).items():
        screen.show(f"{name}: {why}; its guard retries", error=True)
    print(f"attempt {plan.attempt} is ended{_where([end.node for end in replies(ends).values() if end.node])}")
    print("its guard starts the next attempt from the newest checkpoint")
    return GOOD


def _where(nodes: Sequence[HostRun]) -> str:
    """Describe after which step an attempt ended and how much of it is saved."""
    saved, last = progress(nodes)
    if last is None:
        return ""
    lost = last.step - step_of(Path(saved)) if saved else last.step
    if lost <= 0:
        return f" after step {last.step}, which is saved: {saved}"
    return f" after step {last.step}; {counted(lost, 'step')} since {saved or 'its beginning'} will be repeated"


def find_head(fleet: Fleet, run: str) -> tuple[str, Plan, Sequence[HostRun]]:
    """Return the host of a live run's rank 0, the run's plan, and its hosts' reports."""
    _, seen = ask_hosts(fleet, run)
    told, head = known_of(seen), head_of(seen)
    live = [name for name, found in told.items() if found.alive]
    if not live:
        raise UserError(f"run {run} is not running; `{fleet.command_to_type('status', run)}` says how it ended")
    plan = planned(fleet, live[0], run)
    if not plan.trains:
        raise UserError(f"run {run} runs your own program, which takes no requests")
    if not head:
        raise UserError(
            f"run {run} has its rank 0 on {plan.nodes[0].name}, which is not one of these hosts; name a hosts file that has it"
        )
    return head, plan, [*told.values()]


def request(fleet: Fleet, head: str, wanted: AskRequest, wait_s: float) -> RunEvent:
    """Send a request to a run and return the result."""
    asked = fleet.ask(head, "ask", wanted, AskReply, STATUS_TIMEOUT_S)
    if not asked.id:
        raise RunError(f"run {wanted.run} is not running on {head}, the host of its rank 0")
    screen.show(f"asked; run {wanted.run} answers after its current step", error=True)
    until = time.monotonic() + wait_s
    while time.monotonic() < until:
        found = fleet.ask(head, "answer", AnswerRequest(wanted.run, asked.id), AnswerReply, STATUS_TIMEOUT_S)
        if found.answer and found.answer.detail:
            raise RunError(f"run {wanted.run}: {found.answer.detail}")
        if found.answer:
            return found.answer
        if not found.alive:
            raise RunError(
                f"run {wanted.run} ended before it answered; `{fleet.command_to_type('status', wanted.run)}` says why"
            )
        time.sleep(LOOK_EVERY_S)
    raise RunError(
        f"run {wanted.run} has not answered for {span(wait_s)}: its step is longer than that, or it hangs; "
        f"`{fleet.command_to_type('status', wanted.run)}` shows which. A late answer still appears in the run's events"
    )


def words_of(kind: RequestKind, answer: RunEvent, head: str, world: int, steps: int) -> str:
    """Describe the result and where its files are."""
    if kind is RequestKind.SAVE:
        return f"saved step {answer.step}: {answer.path} on {head}"
    what = (
        f"a profile of {counted(steps, 'step')}" if kind is RequestKind.PROFILE else f"{kind} after step {answer.step}"
    )
    others = (
        f"; the files of the other {counted(world - 1, 'rank')} are in the same place on their hosts"
        if world > 1
        else ""
    )
    return f"{what}: {answer.path} on {head}{others}"
