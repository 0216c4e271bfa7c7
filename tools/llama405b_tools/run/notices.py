"""What a guard tells its user with ``--notify``: events, what is wrong with a run that trains, and the command itself."""

import enum
import os
import subprocess
from collections.abc import Mapping, Sequence

from llama405b.capacity.room import nearly_full
from llama405b.contract.events import RunEvent
from llama405b.contract.phrases import given
from llama405b_tools.remote.messages.guard import Noted
from llama405b_tools.text.fold import fold_names

TIMEOUT_S = 60.0
SAVES_IN_A_ROW = 2  # that fail: one alone may be a disk that hesitated


class Notice(enum.StrEnum):
    """The events that run the ``--notify`` command."""

    INCIDENT = "incident"
    WAITING = "waiting"  # the run cannot be started again yet
    RECOVERY = "recovery"
    NOT_SAVED = "not saved"  # several times in a row; training goes on
    DISK_FULL = "disk full"
    STOPPED = "stopped"
    END = "end"
    GAVE_UP = "gave up"
    HEARTBEAT = "heartbeat"  # nothing has happened


def unsaved_words(failed: Sequence[RunEvent]) -> str:
    """Say why the last saves failed; '' unless several did in a row."""
    if len(failed) < SAVES_IN_A_ROW:
        return ""
    return f"the last {len(failed)} saves failed; step {failed[-1].step}: {failed[-1].detail}"


def disk_words(hosts: Mapping[str, Noted]) -> str:
    """Say which disks of the run are nearly full; '' if none is."""
    full: dict[str, list[str]] = {}
    for name, noted in hosts.items():
        for disk in noted.disks:
            if nearly_full(disk.free_bytes, disk.total_bytes):
                full.setdefault(f"{disk.free_bytes / (1 << 30):.1f} GiB left at {disk.path}", []).append(name)
    return given("{}; make room there", "; ".join(f"{fold_names(names)}: {left}" for left, names in full.items()))


def run_command(command: str, event: Notice, run: str, message: str) -> str:
    """Run the user's command; returns why that failed, or ''."""
    env = os.environ | {"LLAMA405B_EVENT": str(event), "LLAMA405B_RUN": run, "LLAMA405B_MESSAGE": message}
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
