"""Which run a verb means, and what the hosts know of it. Pure: takes the agents' answers, returns judgements."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from llama405b.errors import UserError

# What a rank says that lost its peer. gloo may also abort the process then, in a thread of its own.
EFFECTS = ("lost contact with another rank", "torchrun failed; see", "stopped with rank ")
Described = dict[str, Any]  # one run as one host's agent describes it


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Why a host is not as it should be."""

    host: str
    what: str
    origin: int  # how surely the fault began there: 2 surely, 1 perhaps, 0 it followed from another


def choose(answers: Mapping[str, Sequence[Described]], asked: str | None) -> str:
    """The run that is meant: the one named, else the only live one, else the newest.

    Raises:
        UserError: There is none, or several are alive.
    """
    runs = [run for found in answers.values() for run in found]
    names = {run["run"] for run in runs}
    if asked:
        if asked not in names:
            raise UserError(f"--run: no host knows a run {asked!r}; `llama405b status` shows the newest")
        return asked
    if not runs:
        raise UserError("no run on these hosts yet; `llama405b launch` starts one")
    live = sorted({run["run"] for run in runs if run["alive"]})
    if len(live) > 1:
        raise UserError(f"--run: {len(live)} runs are alive; say which: {', '.join(live)}")
    return live[0] if live else str(max(runs, key=lambda run: float(run["created"]))["run"])


def state_of(described: Described | None) -> str:
    """One word (or a few) for the table."""
    if described is None:
        return "no such run"
    status = described["status"]
    if described["alive"]:
        return str(status["state"]) if status else "starting"
    if described["leftovers"]:
        return f"LEFTOVERS ({len(described['leftovers'])} processes)"
    if status is None:
        return "never started"
    if status["state"] in ("starting", "running"):
        return "vanished"
    if status["state"] == "exited":
        return f"exited {status['exit_code']}"
    return f"killed by signal {status['signal']}"


def failure_of(host: str, described: Described | None) -> Failure | None:
    """Why a host is not as it should be; None where it runs, or ended well."""
    state = state_of(described)
    if state in ("running", "starting", "exited 0"):
        return None
    status = (described or {}).get("status") or {}
    reason = status.get("reason", "")
    origin = 0 if any(sign in reason for sign in EFFECTS) else 1 if "killed by SIGABRT" in reason else 2
    return Failure(host, f"{state}{f': {reason}' if reason else ''}", origin)


def first_failure(failures: Sequence[Failure]) -> Failure:
    """The one to name: where the fault began, rather than a host that lost its peer; in order of arrival."""
    return max(failures, key=lambda failure: failure.origin)  # the first of equals
