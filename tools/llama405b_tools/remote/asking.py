"""Pass a request to a training run, and look for its answer; on the head, whose rank 0 looks for requests."""

import secrets
import time

from llama405b.contract.events import RunEvent
from llama405b.contract.files import read_records, write_json
from llama405b.contract.plan import read_plan
from llama405b.contract.records import RunRequest
from llama405b_tools.remote.describe import lives
from llama405b_tools.remote.locks import run_of
from llama405b_tools.remote.messages.ask_request import AnswerReply, AnswerRequest, AskReply, AskRequest

NEWEST = 100  # events among which an answer is looked for


def ask(request: AskRequest) -> AskReply:
    """Write a request for the trainer."""
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
