"""What a run's time went into, from the files of its head. Standard library."""

import contextlib
import time
from collections.abc import Sequence

from llama405b.contract.accounting import Account, Attempt, StepTaken, account, is_failure
from llama405b.contract.causes import Cause, CauseKind
from llama405b.contract.events import EventKind, RunEvent
from llama405b.contract.files import EVERY, read_records
from llama405b.contract.paths import RunDir
from llama405b.contract.plan import read_plan
from llama405b.contract.records import METRICS_LINE, Blame, Metrics, NodeStatus
from llama405b_tools.remote.describe import lives
from llama405b_tools.remote.locks import run_of
from llama405b_tools.remote.messages.account_request import AccountReply, HeadRequest


def account_of(request: HeadRequest) -> AccountReply:
    """Return what the run's time went into."""
    run = run_of(request.run)
    plan = read_plan(run)
    steps = [line for line in read_records(METRICS_LINE, run.metrics, EVERY) if isinstance(line, Metrics)]
    attempts = attempts_of(run, request.host, plan.attempt, steps, alive=lives(run, plan, request.host))
    return AccountReply(account_of_attempts(run, request.host, attempts, steps, plan.world))


def account_of_attempts(
    run: RunDir, host: str, attempts: Sequence[Attempt], steps: Sequence[Metrics], world: int
) -> Account | None:
    """Return what the time of a run's attempts went into until now; None if it has taken no step."""
    began = _first_launched(run, host)
    taken = [StepTaken(step.attempt, step.time, step.step_s) for step in steps]
    return account(began, attempts, taken, world, time.time()) if began and taken else None


def _first_launched(run: RunDir, host: str) -> float:
    """When the first attempt began there; 0 if that is not known."""
    with contextlib.suppress(OSError):
        return run.lock(host).stat().st_mtime  # its node runner made it, and nothing is ever written into it
    return 0.0


def attempts_of(run: RunDir, host: str, newest: int, steps: Sequence[Metrics], *, alive: bool) -> list[Attempt]:
    """Return a run's launches, as a host knows them."""
    ends = {end.attempt: end for end in read_records(NodeStatus, run.ends(host), EVERY)}
    blames = {blame.attempt: blame for blame in read_records(Blame, run.blames(host), EVERY)}
    last = {step.attempt: step.time for step in steps}
    saves = dict.fromkeys(range(1, newest + 1), 0.0)
    for event in read_records(RunEvent, run.events("rank-0"), EVERY):
        if event.kind is EventKind.SAVED and event.attempt in saves:
            saves[event.attempt] += event.blocked_s
    found = []
    for number, saves_s in saves.items():
        end = ends.get(number)
        if number == newest and alive:
            found.append(Attempt(number, saves_s=saves_s))
            continue
        if end:
            cause, ended = (end.cause if is_failure(end.cause) else None), end.time
        else:  # the host died with it
            cause = Cause(CauseKind.VANISHED, host)
            ended = last.get(number) or (found[-1].ended if found else None) or _first_launched(run, host)
        if blame := blames.get(number):
            cause, ended = blame.cause, blame.time or ended
        found.append(Attempt(number, ended, cause, saves_s))
    return found
