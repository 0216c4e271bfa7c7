"""What one process is doing, from /proc and its stacks, without disturbing it. Standard library; Linux.

The signal for stacks goes only to a process that catches it and shows the memory that its stacks go to: a program of the user's own
lives on. py-spy looks at the others; it reads their memory, and only of a rank that has been silent for long it asks for native
frames, for which it halts the process for an instant.
"""

import contextlib
import dataclasses
import linecache
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from llama405b.contract.rank_memory import NAME, PLACE_BYTES, SIGNAL, Place, read_place
from llama405b_tools.machine.stacks import Thread, read_faulthandler, read_py_spy
from llama405b_tools.machine.syscalls import syscall_of
from llama405b_tools.remote import processes
from llama405b_tools.remote.messages.autopsy import Doing, Unsent

STACKS_WITHIN_S = 1.0
SETTLED_S = 0.08  # without more of it, a dump is whole
PY_SPY_S = 6.0
CODE_FRAMES = 8  # of each thread, whose lines are read
MOST_FRAMES = 60
RETRIES = 3  # of one segment, or of asking for room: more than a second without an answer
PROBES = "04"  # the timer that runs in /proc/net/tcp: the peer had no room
STOPPED, GONE = ("T", "t"), ("", "Z", "X")
SOCKET = re.compile(r"socket:\[(\d+)\]")


def rank_processes(value: str) -> dict[int, int]:
    """Return the process of each local rank of ``<run directory>:<host>``, not those that it started itself.

    torchrun counts hosts in an order of its own: what it calls ``RANK`` is not ours.
    """
    local = {pid: _environment(pid).get("LOCAL_RANK", "") for pid in processes.marked(value)}
    ranks = {pid: int(number) for pid, number in local.items() if number.isdigit()}
    return {number: pid for pid, number in ranks.items() if int(_status(pid).get("PPid", "0")) not in ranks}


class RankMemoryReader:
    """The memory that a rank shows (``contract.rank_memory``)."""

    def __init__(self, pid: int, path: Path) -> None:
        self.pid, self.path = pid, path
        self.asked = False

    @classmethod
    def of(cls, pid: int) -> "RankMemoryReader | None":
        """Return that of a process; None if it shows none, or may not be looked at."""
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(entry.readlink()).startswith(f"/memfd:{NAME} "):
                        return cls(pid, entry)
        return None

    def place(self) -> Place:
        """Where the rank is."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            return read_place(file.read(PLACE_BYTES))
        return Place()

    def ask(self) -> None:
        """Have the rank write its stacks, if it catches the signal and can act on it."""
        if processes.state(self.pid) in (*STOPPED, *GONE) or not catches(self.pid, SIGNAL):
            return
        with contextlib.suppress(OSError):
            os.truncate(self.path, PLACE_BYTES)
            os.kill(self.pid, SIGNAL)
            self.asked = True

    def stacks(self) -> tuple[Thread, ...]:
        """Wait for its stacks until they are whole, or for a second; () if there are none."""
        if not self.asked:
            return ()
        size, began = PLACE_BYTES, time.monotonic()
        grown = began
        with contextlib.suppress(OSError):
            while (now := time.monotonic()) < began + STACKS_WITHIN_S:
                if (found := self.path.stat().st_size) != size:
                    size, grown = found, now
                elif size > PLACE_BYTES and now > grown + SETTLED_S:
                    break
                time.sleep(0.01)
            with self.path.open("rb") as file:
                file.seek(PLACE_BYTES)
                return read_faulthandler(file.read().decode("utf-8", "replace"))
        return ()


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    return bool(int(_status(pid).get("SigCgt", "0"), 16) >> (number - 1) & 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Looked:
    """What py-spy found."""

    threads: tuple[Thread, ...] = ()
    why_not: str = ""


def look_with_py_spy(pid: int, *, native: bool) -> Looked:
    """Return the stacks of a process; ``native``: with native frames, unless it is stopped or cannot be halted."""
    program = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        return Looked(why_not="py-spy is not installed")
    state = processes.state(pid)
    if state in GONE:
        return Looked(why_not="the process is gone")
    halts = native and state not in (*STOPPED, "D")  # letting it go would wake one that is stopped
    argv = [program, "dump", "--json", "--native" if halts else "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PY_SPY_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        if halts and processes.state(pid) in STOPPED:  # py-spy was killed while it had halted it
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)
        return Looked(why_not=f"py-spy gave no answer ({type(error).__name__})")
    threads = read_py_spy(done.stdout)
    return Looked(threads, "" if threads else f"py-spy: {' '.join(done.stderr.split())[:200]}")


def with_code(threads: Sequence[Thread]) -> tuple[Thread, ...]:
    """Return them with the text of the innermost lines, as the files are now."""
    return tuple(
        dataclasses.replace(
            thread,
            frames=tuple(
                dataclasses.replace(frame, code=linecache.getline(frame.file, frame.line).strip()[:160])
                if n < CODE_FRAMES and frame.is_python
                else frame
                for n, frame in enumerate(thread.frames[:MOST_FRAMES])
            ),
        )
        for thread in threads
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """What a process has done so far."""

    cpu_s: float = 0.0
    waited_s: float = 0.0
    throttled_s: float = 0.0
    moved_bytes: int = 0
    major_faults: int = 0

    @classmethod
    def of(cls, pid: int) -> "Counts":
        """Read them; zeros if the process is gone."""
        fields = _read(f"/proc/{pid}/stat").rpartition(") ")[2].split()
        if len(fields) < 13:
            return cls()
        io = dict(line.split(": ") for line in _read(f"/proc/{pid}/io").splitlines() if ": " in line)
        waits = [_read(f"/proc/{pid}/task/{task}/schedstat").split() for task in _listed(f"/proc/{pid}/task")]
        return cls(
            (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
            sum(int(each[1]) for each in waits if len(each) == 3) / 1e9,
            throttled_s(pid),
            int(io.get("rchar", 0))
            + int(io.get("wchar", 0))
            + int(io.get("read_bytes", 0))
            + int(io.get("write_bytes", 0)),
            int(fields[9]),
        )

    def until(self, later: "Counts") -> Doing:
        """Return what it did in between."""
        return Doing(
            max(0.0, later.cpu_s - self.cpu_s),
            max(0.0, later.waited_s - self.waited_s),
            max(0.0, later.throttled_s - self.throttled_s),
            max(0, later.moved_bytes - self.moved_bytes),
            max(0, later.major_faults - self.major_faults),
        )


def throttled_s(pid: int) -> float:
    """Return how long the process's control group, or one above it, has been without its share of the cores so far."""
    found = 0.0
    for line in _read(f"/proc/{pid}/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        roots = (
            ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct")
            if controllers
            else ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
        )
        for group in (Path(path), *Path(path).parents):
            for root in roots:
                stat = dict(each.split() for each in _read(f"{root}{group}/cpu.stat").splitlines() if " " in each)
                seconds = (int(stat.get("throttled_time", 0)) / 1e9, int(stat.get("throttled_usec", 0)) / 1e6)
                found = max(found, *seconds)
    return found


def waits_in(pid: int) -> str:
    """Return the system call that the main thread waits in, with its file: ``write to pipe (its standard output)``; "" if none is seen."""
    name, file = syscall_of(_read(f"/proc/{pid}/syscall"), os.uname().machine)
    if file is None:
        return name
    stream = {0: " (its standard input)", 1: " (its standard output)", 2: " (its standard error)"}.get(file, "")
    try:
        target = str(Path(f"/proc/{pid}/fd/{file}").readlink())
    except OSError:
        target = f"file {file}"
    return f"{name} of {target.partition(':[')[0]}{stream}"


def kernel_wait(pid: int) -> str:
    """Return the kernel's function that the main thread waits in; "" if it runs, or that may not be seen."""
    found = _read(f"/proc/{pid}/wchan").strip()
    return "" if found == "0" else found


def swapped_bytes(pid: int) -> int:
    """Return how much of a process is in swap."""
    return int(_status(pid).get("VmSwap", "0 kB").split()[0]) * 1024


def unsent(pid: int) -> tuple[Unsent, ...]:
    """Return the process's connections whose peer has not confirmed what was sent several times."""
    own = set()
    for name in _listed(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if match := SOCKET.fullmatch(os.readlink(f"/proc/{pid}/fd/{name}")):  # noqa: PTH115
                own.add(match[1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in _read(f"/proc/{pid}/net/{table}").splitlines()[1:]:
            words = line.split()
            queued, timer = int(words[4].split(":")[0], 16), words[5].split(":")[0]
            retries = int(words[8]) if timer == PROBES else int(words[6], 16)
            if words[9] in own and queued and retries >= RETRIES:
                found.append(Unsent(address_of(words[2].split(":")[0]), queued, retries))
    return tuple(found)


def address_of(text: str) -> str:
    """Return an address of ``/proc/net/tcp``, whose words are in the machine's order, as people write it."""
    raw = b"".join(struct.pack("=I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8))
    if len(raw) == 16 and raw[:12] == bytes(10) + b"\xff\xff":
        raw = raw[12:]
    if len(raw) == 4:
        return ".".join(map(str, raw))
    return ":".join(raw[at : at + 2].hex() for at in range(0, 16, 2))


def _environment(pid: int) -> dict[str, str]:
    entries = (entry.partition("=") for entry in _read(f"/proc/{pid}/environ").split("\0"))
    return {name: value for name, _, value in entries}


def _status(pid: int) -> dict[str, str]:
    lines = (line.partition(":") for line in _read(f"/proc/{pid}/status").splitlines())
    return {name: value.strip() for name, _, value in lines}


def _listed(directory: str) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(directory)  # noqa: PTH208
    return []


def _read(path: str) -> str:
    """Return a file of /proc; '' if the process is gone, or this user may not look."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
