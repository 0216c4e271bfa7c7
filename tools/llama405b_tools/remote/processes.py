"""Find and end the processes of a run on this machine, whoever their parents are now. Standard library, Linux.

``start_time`` also knows macOS, where an operator's guard may run.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from llama405b_tools.machine import program_output
from llama405b_tools.remote.torchrun import MARKER

PR_SET_CHILD_SUBREAPER = 36
PF_KTHREAD = 0x00200000  # among a process's flags: it is a thread of the kernel
EXEC_WITHIN_S = 5.0  # how long, on a busy machine, an exec may take


def become_subreaper() -> None:
    """Make orphans below this process its own children, so that none is lost."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot (macOS: in seconds); None if it is gone or a zombie."""
    if sys.platform == "darwin":
        ps = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
        done = subprocess.run(ps, env={"LC_ALL": "C", "PATH": os.defpath}, capture_output=True, text=True, check=False)
        return program_output.began_at(done.stdout)
    fields = _fields(pid)
    return int(fields[19]) if fields else None


def _fields(pid: int) -> list[str]:
    """What the kernel tells of a live process after its name: state, parent, …; [] if it is gone or a zombie."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1").rpartition(") ")[2].split()
        return [] if fields[0] in "ZX" else fields
    return []


def _living() -> Iterator[tuple[int, list[str]]]:
    """All live processes, each with its fields."""
    for entry in os.listdir("/proc"):  # noqa: PTH208
        if entry.isdigit() and (fields := _fields(int(entry))):
            yield int(entry), fields


def state(pid: int) -> str:
    """A process's state as the kernel writes it (R, S, D, T, Z, …); "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="latin-1").rpartition(") ")[2][:1]
    except OSError:
        return ""


def same_process(pid: int, began: int) -> bool:
    """Whether ``pid`` is still the process that started at ``began``."""
    return pid > 0 and start_time(pid) == began


def marked(value: str) -> list[int]:
    """Processes whose environment marks them as belonging to ``<run directory>:<host>``."""
    return all_marked().get(value, [])


def all_marked() -> dict[str, list[int]]:
    """Processes of every run here that this user may inspect, by the ``<run directory>:<host>`` they belong to."""
    needle = f"{MARKER}=".encode()
    found: dict[str, list[int]] = {}
    for pid, _ in _living():
        with contextlib.suppress(OSError):
            for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if variable.startswith(needle):
                    found.setdefault(os.fsdecode(variable.removeprefix(needle)), []).append(pid)
    return found


def variables(value: str, names: Sequence[str]) -> dict[str, str]:
    """Variables of the processes of ``<run directory>:<host>``, those of these names that are set."""
    found = {}
    for pid in marked(value) if names else ():
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                name, _, text = entry.decode("utf-8", "replace").partition("=")
                if name in names:
                    found[name] = text
    return found


def descendants(root: int) -> list[int]:
    """All live processes below ``root``."""
    children: dict[int, list[int]] = {}
    for pid, fields in _living():
        children.setdefault(int(fields[1]), []).append(pid)
    found: list[int] = []
    pending = [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def in_exec() -> list[int]:
    """Processes in the middle of an exec: they tell neither environment nor arguments, so nobody knows whose they are."""
    found = []
    for pid, fields in _living():
        with contextlib.suppress(OSError):
            told = Path(f"/proc/{pid}/environ").read_bytes() or Path(f"/proc/{pid}/cmdline").read_bytes()
            if not told and not int(fields[6]) & PF_KTHREAD:
                found.append(pid)
    return found


def sweep(value: str, *, below: int = 0, spare: tuple[int, ...] = (), seconds: float = 20.0) -> tuple[int, list[int]]:
    """SIGKILL every process of ``<run directory>:<host>`` until two looks find none.

    Late in its end, and in the middle of an exec, a process tells no environment: an exec is given some seconds.
    Returns how many were ended, and which could not be ended within ``seconds`` (for example in state D).
    """
    ended: dict[int, int | None] = {}
    began = time.monotonic()
    clean_looks = 0
    while True:
        left = set(marked(value)) | (set(descendants(below)) if below else set())
        left |= {pid for pid, born in ended.items() if born is not None and same_process(pid, born)}
        left -= {os.getpid(), *spare}
        passed_s = time.monotonic() - began
        clean_looks = 0 if left or (passed_s < EXEC_WITHIN_S and in_exec()) else clean_looks + 1
        if clean_looks == 2 or passed_s > seconds:
            return len(ended.keys() - left), sorted(left)
        for pid in left:
            if pid not in ended:
                ended[pid] = start_time(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(0.05)
