"""What is known about a run's guard, and what it reports with ``--notify``.

Whether it is running: from its record here, and from what its hosts heard last.
"""

import dataclasses
import enum
import os
import shlex
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from llama405b.capacity.disk import nearly_full
from llama405b.contract.events import RunEvent
from llama405b.contract.files import read_record
from llama405b.contract.paths import RunDir
from llama405b.contract.phrases import counted, given
from llama405b.contract.records import GUARDING, GuardStage, GuardState
from llama405b_tools.hosts.printed_commands import program_name
from llama405b_tools.remote import guarding
from llama405b_tools.remote.messages.guard_notes import NoteReply
from llama405b_tools.remote.messages.host_run import HostRun
from llama405b_tools.run.request import LaunchRequest
from llama405b_tools.text.clean import clean
from llama405b_tools.text.fold import fold_names

BEAT_S = 20.0  # how often a guard tells the hosts of its run that it lives
SILENT_AFTER_S = 120.0
BEGINS_WITHIN_S = 30.0  # after it was asked for


GuardReports = Sequence[tuple[float, GuardState]]  # how many seconds ago a host heard it, and what
TIMEOUT_S = 60.0
SAVES_IN_A_ROW = 2  # that fail: one alone may be a disk that hesitated


class Life(enum.StrEnum):
    """Whether a guard's process is running."""

    LIVES = "lives"
    DIED = "died"
    ELSEWHERE = "elsewhere"  # on another machine, which its hosts have heard lately, if they were asked
    SILENT = "silent"  # on another machine, or not begun, and its hosts have heard nothing for too long


@dataclasses.dataclass(frozen=True, slots=True)
class GuardStatus:
    """A run's guard, according to its record."""

    state: GuardState
    life: Life
    heard_at: float  # last, by this machine's clock

    @property
    def gone(self) -> bool:
        """Whether it died while the run still needed it."""
        return self.state.state in GUARDING and self.life in (Life.DIED, Life.SILENT)

    @property
    def finishes(self) -> bool:
        """Whether the run has ended well, and what was to follow has not."""
        return self.state.state is GuardStage.FINISHING

    @property
    def guards(self) -> bool:
        """Whether it may bring the run back, or finish what is to follow it."""
        return self.state.state in GUARDING and self.state.pid > 0 and not self.gone


def asked_for(request: LaunchRequest) -> GuardState:
    """Return the record of a guard that does not run yet, on this machine."""
    return GuardState(
        request.run,
        0,
        0,
        request.guard_on or guarding.machine_id(),
        request.restart,
        command=request.again,
        directory=request.typed_in,
        hang_after_s=request.hang_after_s,
    )


def heard_by(told: Iterable[HostRun]) -> GuardReports:
    """Return what the hosts heard from a guard."""
    return [(host.now - host.guard.time, host.guard) for host in told if host.guard]


def of_hosts(run: str, heard: GuardReports, now: float) -> GuardStatus | None:
    """The guard of a run, by what its hosts heard last; by its record here if it lives here, or has died here since.

    A host that it ran on knows at once that it died.
    """
    age_s, state = min(heard, key=lambda entry: entry[0], default=(0.0, None))
    heard_at = now - age_s
    here = of_run(run)
    if state is None or (here and here.life is Life.LIVES):
        return here
    if here and here.life is Life.DIED and _same_guard(here.state, state):
        return GuardStatus(here.state, Life.DIED, max(heard_at, here.heard_at))
    if any(other.died and _same_guard(other, state) for _, other in heard):
        return GuardStatus(state, Life.DIED, heard_at)
    if now - heard_at < (SILENT_AFTER_S if state.pid else BEGINS_WITHIN_S):
        return GuardStatus(state, Life.ELSEWHERE, heard_at)
    return GuardStatus(state, Life.SILENT, heard_at)


def _same_guard(one: GuardState, other: GuardState) -> bool:
    return (one.machine, one.pid, one.pid_start) == (other.machine, other.pid, other.pid_start)


def of_run(run: str) -> GuardStatus | None:
    """The guard of a run, by its record on this machine; None if there never was one."""
    state = read_record(GuardState, RunDir.here(run).guard)
    if state is None:
        return None
    if not guarding.is_of_this_machine(state):
        return GuardStatus(state, Life.ELSEWHERE, state.time)
    return GuardStatus(state, Life.LIVES if guarding.lives_here(state) else Life.DIED, state.time)


def is_guarded(run: str) -> bool:
    """Whether a guard of this machine may bring the run back."""
    found = of_run(run)
    return found is not None and found.life is Life.LIVES


def guard_line(found: GuardStatus) -> str:
    """Describe what a run's guard is doing, or how to replace it."""
    state, machine = found.state, found.state.machine.partition(" ")[0]
    if found.gone:
        last = "last heard" if state.pid else "asked for"  # when it died, nobody knows
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.heard_at))
        died = (
            f"process {state.pid} on {machine} died while {state.state}"
            if state.pid
            else f"it never began on {machine}"
        )
        place = given(" in {}", shlex.quote(state.directory)) if state.directory != str(Path.cwd()) else ""
        again = (
            given(f"`{program_name()} launch {{}}`{place}", state.command)
            or "the same launch command, with --resume auto,"
        )
        what = "finish what follows the run" if found.finishes else "guard the run again"
        return clean(f"guard: GONE, {last} at {at} ({died}); to {what}, use {again}")
    times = counted(state.restarts, "restart")
    where = f" on {machine}" if found.life is Life.ELSEWHERE else ""
    if not state.pid:
        return f"guard{where}: starting"
    done = f"{times}, {state.in_vain} of {state.limit} allowed without progress"
    return clean(f"guard{where}: {state.state}, {done}{given('; {}', state.message)}")


class Notice(enum.StrEnum):
    """The events that run the ``--notify`` command."""

    INCIDENT = "incident"
    WAITING = "waiting"  # the run cannot be started again yet
    RECOVERY = "recovery"
    NOT_SAVED = "not saved"  # several times in a row; training goes on
    AFTER_SAVE = "after save failed"  # the user's command for a checkpoint; it is tried again
    BUDGET = "budget"  # most of it is spent
    DISK_FULL = "disk full"
    STOPPED = "stopped"
    END = "end"
    WHEN_DONE = "when done failed"  # the run ended well, but what was to follow did not succeed
    GAVE_UP = "gave up"
    HEARTBEAT = "heartbeat"  # nothing has happened


def unsaved_words(failed: Sequence[RunEvent]) -> str:
    """Say why the last saves failed; '' unless several did in a row."""
    if len(failed) < SAVES_IN_A_ROW:
        return ""
    return f"the last {len(failed)} saves failed; step {failed[-1].step}: {failed[-1].detail}"


def disk_words(hosts: Mapping[str, NoteReply]) -> str:
    """Say which disks of the run are nearly full; '' if none is."""
    full: dict[str, list[str]] = {}
    for name, noted in hosts.items():
        for disk in noted.disks:
            if nearly_full(disk.free_bytes, disk.total_bytes):
                full.setdefault(f"{disk.free_bytes / (1 << 30):.1f} GiB left at {disk.path}", []).append(name)
    return given("{}; make room there", "; ".join(f"{fold_names(names)}: {left}" for left, names in full.items()))


def run_command(command: str, event: str, run: str, message: str) -> str:
    """Run the user's command; returns why that failed, or ''."""
    env = os.environ | {"LLAMA405B_EVENT": event, "LLAMA405B_RUN": run, "LLAMA405B_MESSAGE": message}
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            env=env,
            input=f"{run}: {event}: {message}\n",
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return given("exit code {}", done.returncode)
