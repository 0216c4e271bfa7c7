"""What a run's time went into, from the files of its head. Standard library."""

import contextlib
import time
from collections.abc import Sequence

from llama405b.contract.accounting import Attempt, StepTaken, account, is_failure
from llama405b.contract.causes import Cause, CauseKind
from llama405b.contract.events import EventKind, RunEvent
from llama405b.contract.files import read_records
from llama405b.contract.paths import RunDir
from llama405b.contract.plan import read_plan
from llama405b.contract.reader import MalformedError, loads
from llama405b.contract.records import METRICS_LINE, Blame, Metrics, NodeStatus
from llama405b_tools.remote.describe import lives
from llama405b_tools.remote.locks import run_of
from llama405b_tools.remote.messages.account_request import AccountReply, AccountRequest

EVERY = 1 << 30  # of a file's records


def account_of(request: AccountRequest) -> AccountReply:
    """Return what the run's time went into."""
    run, plan = run_of(request.run), read_plan(run_of(request.run))
    steps = list(_steps(run))
    try:
        began = run.lock(request.host).stat().st_mtime  # its node runner made it, and nothing is ever written into it
    except OSError:
        return AccountReply(None)
    if not steps:
        return AccountReply(None)
    attempts = _attempts(run, request.host, plan.attempt, steps, alive=lives(run, plan, request.host))
    return AccountReply(account(began, attempts, steps, sum(node.slots for node in plan.nodes), time.time()))


def _steps(run: RunDir) -> Sequence[StepTaken]:
    found = []
    with contextlib.suppress(OSError):
        for line in run.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(MalformedError):
                each = loads(METRICS_LINE, line, "metrics")
                if isinstance(each, Metrics):
                    found.append(StepTaken(each.attempt, each.time, each.step_s))
    return found


def _attempts(run: RunDir, host: str, newest: int, steps: Sequence[StepTaken], *, alive: bool) -> Sequence[Attempt]:
    ends = {end.attempt: end for end in read_records(NodeStatus, run.ends(host), EVERY)}
    blames = {blame.attempt: blame.cause for blame in read_records(Blame, run.blames(host), EVERY)}
    last = {step.attempt: step.time for step in steps}
    saves = dict.fromkeys(range(1, newest + 1), 0.0)
    for event in read_records(RunEvent, run.events("rank-0"), EVERY):
        if event.kind is EventKind.SAVED and event.attempt in saves:
            saves[event.attempt] += event.blocked_s
    found = []
    for number, saves_s in saves.items():
        if number == newest and alive:
            found.append(Attempt(number, saves_s=saves_s))
        elif end := ends.get(number):
            cause = blames.get(number) or (end.cause if is_failure(end.cause) else None)
            found.append(Attempt(number, end.time, cause, saves_s))
        else:  # the host died with it
            cause = blames.get(number, Cause(CauseKind.VANISHED, host))
            found.append(Attempt(number, last.get(number, 0.0), cause, saves_s))
    return found
