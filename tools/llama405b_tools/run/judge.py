"""Which run a verb means, and what the hosts know of it. Pure: takes the agents' answers, returns judgements."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from llama405b.contract.errors import UserError
from llama405b_tools.text.clean import clean

# What a rank says that lost its peer. gloo may also abort the process then, in a thread of its own.
EFFECTS = ("lost contact with another rank", "torchrun failed; see", "stopped with rank ")
UNSURE = ("killed by SIGABRT", "stopped by SIGTERM")  # its own fault, or how another's end reached it
VANISHED = "its processes are gone without a word; was the machine restarted?"
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
    if status["state"] == "stopped":
        return "stopped"
    if status["state"] == "exited":
        return f"exited {status.get('exit_code')}"
    return f"killed by signal {status.get('signal')}"


def failure_of(host: str, described: Described | None) -> Failure | None:
    """Why a host is not as it should be; None where it runs, or ended well."""
    state = state_of(described)
    if state in ("running", "starting", "exited 0", "stopped"):
        return None
    status = (described or {}).get("status") or {}
    reason = VANISHED if state == "vanished" else clean(status.get("reason", ""))
    return Failure(host, f"{state}{f': {reason}' if reason else ''}", origin_of(reason))


def origin_of(reason: str) -> int:
    """See ``Failure``."""
    return 0 if any(sign in reason for sign in EFFECTS) else 1 if any(sign in reason for sign in UNSURE) else 2


def step_of(checkpoint: str) -> int:
    """The step of a checkpoint's path, ``…/step-<8 digits>``."""
    return int(checkpoint.rpartition("step-")[2])


@dataclasses.dataclass(frozen=True, slots=True)
class Heard:
    """A host's heartbeats as they were last heard."""

    beats: Sequence[Described]
    now: float  # by the host's clock, as they were read
    at_s: float  # by the operator's monotonic clock, as they arrived


HEARD_WITHIN_S = 20.0  # a host not heard for longer is out of reach: of its ranks nothing is known
SLOW_PHASES = ("start", "data", "load", "resume", "checkpoint")
STATES = {"T": "it is stopped by a signal", "D": "it waits for a disk or driver that does not answer"}


Beats = Mapping[str, Sequence[tuple[Described, float]]]  # by host: heartbeats, and how old each is, seconds


def silent_rank(beats: Beats, step_limit_s: float, slow_limit_s: float) -> tuple[str, Described, float] | None:
    """The rank that the others most likely wait for, where ranks are silent for too long: host, heartbeat, age; else None.

    First one that cannot run, then the one furthest behind. A stopped process has no excuse in any phase.
    """
    silent = []
    for host, each in beats.items():
        for beat, age_s in each:
            before_first_step = beat["time"] == beat["phase_since"]  # which compiles and connects
            slow = (beat["phase"] in SLOW_PHASES or before_first_step) and beat["state"] != "T"
            if beat["phase"] not in ("done", "failed") and age_s > (slow_limit_s if slow else step_limit_s):
                silent.append(((beat["state"] not in STATES, beat["step"], -age_s), host, beat, age_s))
    return min(silent, key=lambda entry: entry[0])[1:] if silent else None


def hung(heard: Mapping[str, Heard], now_s: float, step_limit_s: float, slow_limit_s: float) -> Failure | None:
    """``silent_rank`` as a failure; a host's clock is compared with itself alone, so skew between hosts does not matter."""
    beats = {
        host: [(beat, hears.now - beat["time"] + now_s - hears.at_s) for beat in hears.beats]
        for host, hears in heard.items()
        if now_s - hears.at_s <= HEARD_WITHIN_S
    }
    found = silent_rank(beats, step_limit_s, slow_limit_s)
    if found is None:
        return None
    host, beat, age_s = found
    why = f"; {STATES[beat['state']]}" if beat["state"] in STATES else ""
    words = (
        f"hung: rank {beat['rank']} is silent for {age_s:.0f} s, in phase {beat['phase']} at step {beat['step']}{why}"
    )
    return Failure(host, words, origin=2)


def first_failure(failures: Sequence[Failure]) -> Failure:
    """The one to name: where the fault began, rather than a host that lost its peer; in order of arrival."""
    return max(failures, key=lambda failure: failure.origin)  # the first of equals
