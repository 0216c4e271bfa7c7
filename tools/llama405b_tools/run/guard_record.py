"""The record that a guard keeps of its run on the operator's machine, and whether the guard is running."""

import contextlib
import dataclasses
import enum
import os
import signal
import socket
import time
from pathlib import Path

from llama405b.contract.files import read_record
from llama405b.contract.paths import RunDir
from llama405b.contract.phrases import counted, given
from llama405b.contract.records import GUARDING, GuardState
from llama405b_tools.remote import processes
from llama405b_tools.text.clean import clean


class Life(enum.StrEnum):
    """Whether a guard's process is running."""

    LIVES = "lives"
    DIED = "died"
    ELSEWHERE = "elsewhere"  # on another machine, so it is unknown


@dataclasses.dataclass(frozen=True, slots=True)
class Guard:
    """A run's guard, according to its record."""

    state: GuardState
    life: Life

    @property
    def gone(self) -> bool:
        """Whether it died while the run still needed it."""
        return self.state.state in GUARDING and self.life is Life.DIED


def of_run(run: str) -> Guard | None:
    """The guard of a run on this machine; None if there never was one."""
    state = read_record(GuardState, RunDir.here(run).guard)
    if state is None:
        return None
    machine, here = state.machine.split(), machine_id().split()
    rebooted = machine != here and len(machine) == 3 and machine[:2] == here[:2]
    if machine != here and not rebooted:
        return Guard(state, Life.ELSEWHERE)
    if rebooted or not processes.same_process(state.pid, state.pid_start):
        return Guard(state, Life.DIED)
    return Guard(state, Life.LIVES)


def is_guarded(run: str) -> bool:
    """Whether a guard of this machine may bring the run back."""
    found = of_run(run)
    return found is not None and found.life is Life.LIVES


def machine_id() -> str:
    """Identify this boot of this machine: host name, machine ID and boot ID; two words if it has no machine ID."""
    files = (Path("/etc/machine-id"), Path("/proc/sys/kernel/random/boot_id"))
    return " ".join(
        [socket.gethostname(), *(path.read_text(encoding="ascii").strip() for path in files if path.exists())]
    )


def dismiss(run: str) -> None:
    """End the guard of a run on this machine, if there is one: a run stopped on purpose must not be resumed."""
    found = of_run(run)
    if found is None or found.life is not Life.LIVES:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(found.state.pid, signal.SIGTERM)
    deadline = time.monotonic() + 10
    while processes.start_time(found.state.pid) is not None and time.monotonic() < deadline:
        time.sleep(0.05)


def guard_line(run: str) -> str:
    """Describe what the guard of a run is doing; '' if there is none on this machine."""
    found = of_run(run)
    if found is None:
        return ""
    state = found.state
    if found.gone:
        died = f"process {state.pid} on this machine died while {state.state}"
        return f"guard: GONE ({died}); nobody restarts this run: repeat its launch command to guard it again"
    times = counted(state.restarts, "restart")
    where = f" on {state.machine.partition(' ')[0]}" if found.life is Life.ELSEWHERE else ""
    done = f"{times}, {state.in_vain} of {state.limit} allowed without progress"
    return clean(f"guard{where}: {state.state}, {done}{given('; {}', state.message)}")
