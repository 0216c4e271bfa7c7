"""What a run's time went into: asked of its head, and in words."""

from collections.abc import Sequence

from llama405b.contract.accounting import Account, Incident, Use
from llama405b.contract.phrases import counted, given
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.remote.messages.account_request import AccountReply, HeadRequest
from llama405b_tools.run.judge import Failure, failure_words
from llama405b_tools.run.query import STATUS_TIMEOUT_S, Seen, head_of
from llama405b_tools.text.clean import clean
from llama405b_tools.text.figures import local_time, span

LEAST = 0.0005  # of the time: what is told
MOST_XIDS = 3  # in the line of an incident


def account_of_run(fleet: Fleet, run: str, seen: Seen) -> Account | None:
    """Ask the host of rank 0, if it is among those that answered."""
    head = head_of(seen)
    return account_of_head(fleet, run, head) if head in fleet.hosts else None


def account_of_head(fleet: Fleet, run: str, head: str) -> Account | None:
    """Ask the host of rank 0; None if it cannot be asked, or knows nothing yet."""
    try:
        return fleet.ask(head, "account_of", HeadRequest(run, head), AccountReply, STATUS_TIMEOUT_S).account
    except HostError:  # the table of hosts says what is wrong with it
        return None


def account_line(found: Account, unit: str) -> str:
    """Write the goodput, and where the rest of the time went: ``goodput 97.1% of 7h51m: …``. ``unit``: GPU-h or rank-h."""
    total_s = sum(found.seconds.values())
    spent = found.seconds
    parts = [f"{found.rank_hours(spent[Use.TRAINING]):,.1f} {unit} trained"]
    failures = counted(len(found.incidents), "failure")
    what = {
        Use.FAILURES: f"lost to {failures}",
        Use.SLOW: "lost to slow or hung steps",
        Use.RESTARTS: "lost to a restart asked for",
        Use.STARTING: "starting",
        Use.SAVING: "saving",
        Use.PAUSES: "other pauses",
        Use.WAITING: "since the last step",
    }
    parts += [
        f"{found.rank_hours(spent[use]):,.1f} {said}" for use, said in what.items() if spent[use] > LEAST * total_s
    ]
    return f"goodput {100 * (found.goodput or 0.0):.1f}% of {span(total_s)}: {', '.join(parts)}"


def incident_words(incident: Incident) -> str:
    """Say why an attempt failed, and where."""
    host = incident.cause.host
    return given("{}: ", host) + clean(failure_words(Failure(host, incident.cause)))


def started_words(incident: Incident) -> str:
    """Say whether a failure has been followed by another attempt, as no step has."""
    return "restarted, no step yet" if incident.restarted else "not restarted"


def incident_line(found: Account, incident: Incident, unit: str, xids: Sequence[str] = ()) -> str:
    """Write a failure in one line: when, what, how long until the next step, and what that cost.

    ``xids``: errors of GPUs that hosts reported meanwhile, in words: they came first.
    """
    failed = local_time(incident.failed, "%Y-%m-%d %H:%M:%S")
    until = incident.failed if incident.resumed is None else incident.resumed
    cost = found.rank_hours(until - incident.began)
    then = f"next step after {span(until - incident.began)}" if incident.resumed else started_words(incident)
    first = "".join(f"{xid} → " for xid in xids[:MOST_XIDS]) + given("and {} more → ", max(0, len(xids) - MOST_XIDS))
    return f"{failed}  attempt {incident.attempt}: {first}{incident_words(incident)}; {then}, {cost:,.1f} {unit}"
