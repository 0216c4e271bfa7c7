"""Every run that the hosts know, newest first."""

import time
from collections.abc import Mapping

from llama405b_tools.hosts.outcomes import Outcomes, replies
from llama405b_tools.remote.messages.status import HostRun, StatusReply
from llama405b_tools.run import judge
from llama405b_tools.run.endings import state_words
from llama405b_tools.run.query import names_of
from llama405b_tools.text.fold import fold_names

HEADINGS = ("run", "launched", "hosts", "state", "step")


def by_run(outcomes: Outcomes[StatusReply]) -> dict[str, dict[str, HostRun]]:
    """Return what each host knows about each run."""
    told = replies(outcomes)
    return {
        name: {host: run for host, reply in told.items() for run in reply.runs if run.run == name}
        for name in names_of(outcomes)
    }


def row(name: str, known: Mapping[str, HostRun]) -> tuple[str, ...]:
    """Return a run as a row of a table."""
    states: dict[str, list[str]] = {}
    for host, run in known.items():
        states.setdefault(state_words(judge.state_of_run(run)), []).append(host)
    state = "; ".join(f"{words} on {fold_names(hosts)}" for words, hosts in states.items())
    if len(states) == 1:
        state = next(iter(states))
    step = max((run.metrics.step for run in known.values() if run.metrics), default=None)
    created = max(run.created for run in known.values())
    launched = time.strftime("%Y-%m-%d %H:%M", time.localtime(created))
    return name, launched, fold_names(known), state, "—" if step is None else str(step)
