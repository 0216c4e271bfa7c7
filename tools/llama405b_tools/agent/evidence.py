"""What a run's ranks are doing on this host: stacks, system calls, memory, and the state of the host. Standard library; Linux.

Reads /proc and stacks without disturbing the processes. The signal that requests stacks goes only to a process that has a handler
for it and exposes the memory the stacks are written to, so a program of the user's own is never killed by it. py-spy inspects the
other processes by reading their memory. Native frames need the process to be paused for a moment, so they are requested only for a
rank that has been silent for a long time.
"""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import linecache
import os
import re
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from llama405b.contract.files import UNLIMITED, read_record, read_records
from llama405b.contract.paths import RunDir
from llama405b.contract.reader import LINES
from llama405b.contract.records import (
    MEMORY_FILE_NAME,
    METRICS_LINE,
    POSITION_BYTES,
    STACKS_SIGNAL,
    Heartbeat,
    Metrics,
    TrainingPosition,
    parse_position,
)
from llama405b.spec.plan import Node, Plan, read_plan
from llama405b_tools.agent import facts, processes
from llama405b_tools.agent.describe import checkpoint_root, is_run_alive, read_heartbeats, read_save_state
from llama405b_tools.agent.messages import RankHeartbeat
from llama405b_tools.agent.processes import resolve_run_dir
from llama405b_tools.agent.sampler import KernelLog
from llama405b_tools.parsers import Thread, parse_faulthandler, parse_py_spy, parse_syscall
from llama405b_tools.text.words import BlockSplitter


@dataclasses.dataclass(frozen=True, slots=True)
class StalledConnection:
    """A connection whose peer does not acknowledge sent data."""

    peer: str  # its address
    queued_bytes: int
    retries: int


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessActivity:
    """What a process did during the observation window."""

    cpu_s: float = 0.0  # of all its threads
    waited_s: float = 0.0  # for a core, of all its threads
    throttled_s: float = 0.0  # that its control group had used up its share of the cores
    moved_bytes: int = 0  # read and written, of files and pipes and connections
    major_faults: int = 0  # pages that it had to wait for: from swap, or a file


@dataclasses.dataclass(frozen=True, slots=True)
class RankEvidence:
    """What was observed of one rank of this host."""

    rank: int
    pid: int = 0  # 0: no process of it is left
    state: str = ""  # of its main thread, as the kernel writes it
    # the main thread's system call, with the file if it is of one; "": it runs, or that may not be seen
    waits_in: str = ""
    kernel_wait: str = ""  # the kernel's function that it waits in
    doing: ProcessActivity = dataclasses.field(default_factory=ProcessActivity)
    swapped_bytes: int = 0
    threads: tuple[Thread, ...] = ()  # the main thread first
    source: str = ""  # of the stacks: signal, py-spy, or ""
    no_stacks: str = ""  # why there are none
    place: TrainingPosition | None = None  # None: the program is not our trainer
    beat: RankHeartbeat | None = None
    unsent: tuple[StalledConnection, ...] = ()
    log: tuple[str, ...] = ()  # the last lines that it wrote
    moved: bool = False  # while it was looked at: its heartbeat is a newer one then


@dataclasses.dataclass(frozen=True, slots=True)
class DiskEvidence:
    """A filesystem that the run uses."""

    path: str
    answers: bool  # within a second
    free_bytes: int | None = None  # None: unknown, as of a directory that is not there


@dataclasses.dataclass(frozen=True, slots=True)
class RunProgress:
    """How far the run is, as its head knows; None: unknown."""

    usual_step_s: float | None = None  # in the median of this attempt's last steps
    usual_save_s: float | None = None
    unsaved: str = ""  # why the newest save failed, or that it is late
    load_s: float = 0.0  # the run's timeouts.load; 0: unknown


@dataclasses.dataclass(frozen=True, slots=True)
class HostConditions:
    """The state of the host around its ranks."""

    link_up: bool | None = None  # of the training network; None: unknown
    load: float = 0.0
    cores: int = 0
    available_bytes: int = 0  # of memory
    swap_used_bytes: int = 0
    disks: tuple[DiskEvidence, ...] = ()
    # what it said lately of GPUs, memory, disks, links; None: this user may not read it
    kernel: tuple[str, ...] | None = None
    nccl: str = dataclasses.field(default="", metadata=LINES)  # what NCCL's RAS says, if it is there
    flight_records: tuple[str, ...] = ()  # files that NCCL's flight recorder wrote in this attempt


@dataclasses.dataclass(frozen=True, slots=True)
class HostEvidence:
    """What one host knows about a run at one moment."""

    host: str
    now: float
    attempt: int = 0
    alive: bool = False  # its node runner
    address: str = ""  # on the training network
    interface: str = ""
    window_s: float = 0.0
    ranks: tuple[RankEvidence, ...] = ()
    progress: RunProgress = dataclasses.field(default_factory=RunProgress)
    around: HostConditions = dataclasses.field(default_factory=HostConditions)


STACKS_TIMEOUT_S = 1.0
DUMP_SETTLE_S = 0.08  # without more of it, a dump is whole
PY_SPY_TIMEOUT_S = 6.0
CODE_FRAMES = 8  # of each thread, whose lines are read
MAX_FRAMES = 60
MIN_RETRIES = 3  # of one segment, or of asking for room: more than a second without an answer
WINDOW_PROBE_TIMER = "04"  # the timer that runs in /proc/net/tcp: the peer had no room
STOPPED_STATES, GONE_STATES = ("T", "t"), ("", "Z", "X")
SOCKET_LINK = re.compile(r"socket:\[(\d+)\]")


def rank_processes(value: str) -> dict[int, int]:
    """Return the pid of each local rank of ``<run directory>:<host>``, without the ranks' children.

    torchrun orders hosts in its own way, so its ``RANK`` is not ours; ``LOCAL_RANK`` is.
    """
    env_values = {pid: _read_environment(pid).get("LOCAL_RANK", "") for pid in processes.find_marked(value)}
    ranks = {pid: int(number) for pid, number in env_values.items() if number.isdigit()}
    return {number: pid for pid, number in ranks.items() if int(_read_status(pid).get("PPid", "0")) not in ranks}


class RankMemoryReader:
    """Reads the memory that a rank exposes (``contract.records``)."""

    def __init__(self, pid: int, path: Path) -> None:
        self.pid, self.path = pid, path
        self.has_requested = False

    @classmethod
    def from_pid(cls, pid: int) -> "RankMemoryReader | None":
        """Return the reader for a process; None if it exposes no such memory, or this user may not read it."""
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(entry.readlink()).startswith(f"/memfd:{MEMORY_FILE_NAME} "):
                        return cls(pid, entry)
        return None

    def read_position(self) -> TrainingPosition:
        """Return where the rank is in its training."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            return parse_position(file.read(POSITION_BYTES))
        return TrainingPosition()

    def request_stacks(self) -> None:
        """Ask the rank to write its stacks, if it handles the signal and is able to act on it."""
        if processes.process_state(self.pid) in (*STOPPED_STATES, *GONE_STATES) or not handles_signal(
            self.pid, STACKS_SIGNAL
        ):
            return
        with contextlib.suppress(OSError):
            # Drop an earlier dump; the rank's position before it stays.
            os.truncate(self.path, POSITION_BYTES)
            os.kill(self.pid, STACKS_SIGNAL)
            self.has_requested = True

    def wait_for_stacks(self) -> tuple[Thread, ...]:
        """Wait up to a second for the complete stacks; return () if there are none."""
        if not self.has_requested:
            return ()
        size, start = POSITION_BYTES, time.monotonic()
        last_growth = start
        with contextlib.suppress(OSError):
            while (now := time.monotonic()) < start + STACKS_TIMEOUT_S:
                if (new_size := self.path.stat().st_size) != size:
                    size, last_growth = new_size, now
                elif size > POSITION_BYTES and now > last_growth + DUMP_SETTLE_S:
                    break
                time.sleep(0.01)
            with self.path.open("rb") as file:
                file.seek(POSITION_BYTES)
                return parse_faulthandler(file.read().decode("utf-8", "replace"))
        return ()


def handles_signal(pid: int, signal_number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    return bool(int(_read_status(pid).get("SigCgt", "0"), 16) >> (signal_number - 1) & 1)


@dataclasses.dataclass(frozen=True, slots=True)
class PySpyStacks:
    """The stacks that py-spy returned."""

    threads: tuple[Thread, ...] = ()
    failure: str = ""


def dump_with_py_spy(pid: int, *, native: bool) -> PySpyStacks:
    """Return the stacks of a process, from py-spy.

    ``native``: with native frames, unless the process is stopped or cannot be paused.
    """
    program = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        return PySpyStacks(failure="py-spy is not installed")
    state = processes.process_state(pid)
    if state in GONE_STATES:
        return PySpyStacks(failure="the process is gone")
    pauses = native and state not in (*STOPPED_STATES, "D")  # letting it go would wake one that is stopped
    argv = [program, "dump", "--json", "--native" if pauses else "--nonblocking", "--pid", str(pid)]
    try:
        result = subprocess.run(argv, capture_output=True, text=True, timeout=PY_SPY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        if pauses and processes.process_state(pid) in STOPPED_STATES:  # py-spy was killed while it had halted it
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)
        return PySpyStacks(failure=f"py-spy did not answer ({type(error).__name__})")
    threads = parse_py_spy(result.stdout)
    return PySpyStacks(threads, "" if threads else f"py-spy: {' '.join(result.stderr.split())[:200]}")


def add_source_lines(threads: Sequence[Thread]) -> tuple[Thread, ...]:
    """Return the threads with the source text of their innermost lines, as the files are now."""
    return tuple(
        dataclasses.replace(
            thread,
            frames=tuple(
                dataclasses.replace(frame, code=linecache.getline(frame.file, frame.line).strip()[:160])
                if n < CODE_FRAMES and frame.is_python
                else frame
                for n, frame in enumerate(thread.frames[:MAX_FRAMES])
            ),
        )
        for thread in threads
    )


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessCounters:
    """Counters of a process since it started."""

    cpu_s: float = 0.0
    waited_s: float = 0.0
    throttled_s: float = 0.0
    moved_bytes: int = 0
    major_faults: int = 0

    @classmethod
    def from_pid(cls, pid: int) -> "ProcessCounters":
        """Read the counters; zeros if the process is gone."""
        fields = facts.read_text(f"/proc/{pid}/stat").rpartition(") ")[2].split()
        if len(fields) < 13:
            return cls()
        io = dict(line.split(": ") for line in facts.read_text(f"/proc/{pid}/io").splitlines() if ": " in line)
        schedstats = [
            facts.read_text(f"/proc/{pid}/task/{task}/schedstat").split()
            for task in _list_directory(f"/proc/{pid}/task")
        ]
        return cls(
            (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
            sum(int(schedstat[1]) for schedstat in schedstats if len(schedstat) == 3) / 1e9,
            throttled_s(pid),
            int(io.get("rchar", 0))
            + int(io.get("wchar", 0))
            + int(io.get("read_bytes", 0))
            + int(io.get("write_bytes", 0)),
            int(fields[9]),
        )

    def activity_until(self, later: "ProcessCounters") -> ProcessActivity:
        """Return what the process did between these counters and later ones."""
        return ProcessActivity(
            max(0.0, later.cpu_s - self.cpu_s),
            max(0.0, later.waited_s - self.waited_s),
            max(0.0, later.throttled_s - self.throttled_s),
            max(0, later.moved_bytes - self.moved_bytes),
            max(0, later.major_faults - self.major_faults),
        )


def throttled_s(pid: int) -> float:
    """Return how long CPU limits have throttled the process so far: its control group's, or one above it."""
    longest_s = 0.0
    for line in facts.read_text(f"/proc/{pid}/cgroup").splitlines():
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
                stat = dict(
                    entry.split() for entry in facts.read_text(f"{root}{group}/cpu.stat").splitlines() if " " in entry
                )
                seconds = (int(stat.get("throttled_time", 0)) / 1e9, int(stat.get("throttled_usec", 0)) / 1e6)
                longest_s = max(longest_s, *seconds)
    return longest_s


def blocking_syscall(pid: int) -> str:
    """Return the system call that the main thread waits in, with its file; "" if none is visible.

    For example ``write to pipe (its standard output)``.
    """
    name, file = parse_syscall(facts.read_text(f"/proc/{pid}/syscall"), os.uname().machine)
    if file is None:
        return name
    stream = {0: " (its standard input)", 1: " (its standard output)", 2: " (its standard error)"}.get(file, "")
    try:
        target = str(Path(f"/proc/{pid}/fd/{file}").readlink())
    except OSError:
        target = f"file {file}"
    return f"{name} of {target.partition(':[')[0]}{stream}"


def kernel_wait(pid: int) -> str:
    """Return the kernel function that the main thread waits in; "" if it runs, or /proc is unreadable."""
    function = facts.read_text(f"/proc/{pid}/wchan").strip()
    return "" if function == "0" else function


def swapped_bytes(pid: int) -> int:
    """Return how much of a process is in swap."""
    return int(_read_status(pid).get("VmSwap", "0 kB").split()[0]) * 1024


def stalled_connections(pid: int) -> tuple[StalledConnection, ...]:
    """Return the process's connections whose peer has not acknowledged data after several retries."""
    inodes = set()
    for name in _list_directory(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if match := SOCKET_LINK.fullmatch(os.readlink(f"/proc/{pid}/fd/{name}")):  # noqa: PTH115
                inodes.add(match[1])
    connections = []
    for table in ("tcp", "tcp6"):
        for line in facts.read_text(f"/proc/{pid}/net/{table}").splitlines()[1:]:
            words = line.split()
            if len(words) < 10:  # the last of so many that not all are read
                continue
            queued_bytes, timer = int(words[4].split(":")[0], 16), words[5].split(":")[0]
            retries = int(words[8]) if timer == WINDOW_PROBE_TIMER else int(words[6], 16)
            if words[9] in inodes and queued_bytes and retries >= MIN_RETRIES:
                connections.append(StalledConnection(parse_proc_address(words[2].split(":")[0]), queued_bytes, retries))
    return tuple(connections)


def parse_proc_address(text: str) -> str:
    """Parse an address of ``/proc/net/tcp``, whose words are in host byte order, into its usual form."""
    raw = b"".join(struct.pack("=I", int(text[offset : offset + 8], 16)) for offset in range(0, len(text), 8))
    if len(raw) == 16 and raw[:12] == bytes(10) + b"\xff\xff":
        raw = raw[12:]
    if len(raw) == 4:
        return ".".join(map(str, raw))
    return ":".join(raw[offset : offset + 2].hex() for offset in range(0, 16, 2))


def _read_environment(pid: int) -> dict[str, str]:
    entries = (entry.decode("utf-8", "replace").partition("=") for entry in facts.environment(pid))
    return {name: value for name, _, value in entries}


def _read_status(pid: int) -> dict[str, str]:
    lines = (line.partition(":") for line in facts.read_text(f"/proc/{pid}/status").splitlines())
    return {name: value.strip() for name, _, value in lines}


def _list_directory(directory: str) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(directory)  # noqa: PTH208
    return []


SILENT_S = 15.0  # a rank that is silent for longer may be halted for an instant
DISK_TIMEOUT_S = 1.0
KERNEL_MAX_AGE_S = 900.0
KERNEL_PATTERN = re.compile(
    rb"NVRM: Xid|Out of memory: Killed|oom-kill|blocked for more than|I/O error|not responding|Link is Down|"
    rb"Remounting filesystem read-only|Hardware Error|mlx5_core.*(error|fatal)"
)
LAST_STEPS = 50
LAST_LINES, LAST_BYTES = 8, 1 << 14  # of each rank's output
FLIGHT_TIMEOUT_S = 4.0  # until NCCL's flight recorder has written
RAS_PORT, RAS_TIMEOUT_S, MAX_RAS_BYTES = 28028, 3.0, 1 << 18  # of NCCL's RAS, which a process of each host serves


def evidence(run: str, host: str, window_s: float = 1.5) -> HostEvidence:
    """Observe every rank of this host over a window of at least ``window_s``."""
    run_dir = resolve_run_dir(run)
    plan = read_plan(run_dir)
    node = plan.find_node(host)
    if node is None:
        return HostEvidence(host, time.time())
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        conditions = pool.submit(_read_conditions, run_dir, plan, node, pool)
        ranks, observed_s = _collect_ranks(run_dir, plan, node, window_s, pool)
        return HostEvidence(
            host,
            time.time(),
            plan.attempt,
            alive=is_run_alive(run_dir, plan, host),
            address=node.address,
            interface=node.interface,
            window_s=observed_s,
            ranks=ranks,
            progress=_read_progress(run_dir, plan) if node == plan.nodes[0] else RunProgress(),
            around=conditions.result(),
        )


def _collect_ranks(
    run: RunDir, plan: Plan, node: Node, min_window_s: float, pool: concurrent.futures.Executor
) -> tuple[tuple[RankEvidence, ...], float]:
    """Return the evidence of each rank, and the length of the window in seconds."""
    launch_time = (
        run.plan.stat().st_mtime
    )  # by this host's clock, as heartbeats are: older ones are of an earlier attempt
    beats = {beat.rank: beat for beat in read_heartbeats(run, node) if beat.time >= launch_time}
    start = time.monotonic()
    pids = rank_processes(f"{run.path}:{node.name}")
    observers = {node.first_rank + number: RankObserver(pid) for number, pid in pids.items()}
    for observer in observers.values():
        observer.read_stacks()
    time.sleep(max(0.0, start + min_window_s - time.monotonic()))
    window_s, now = time.monotonic() - start, time.time()
    for rank, observer in observers.items():
        observer.finish(pool, is_silent=rank in beats and now - beats[rank].time > SILENT_S)
    latest_times = {beat.rank: beat.time for beat in read_heartbeats(run, node)}
    moved_ranks = {rank for rank, beat in beats.items() if latest_times.get(rank, beat.time) > beat.time}
    logs = _last_lines(run, node.name, plan.attempt)
    results = []
    for rank in node.ranks:
        rank_evidence = observers[rank].evidence(rank) if rank in observers else RankEvidence(rank)
        log = logs.get(rank - node.first_rank, ())
        results.append(dataclasses.replace(rank_evidence, beat=beats.get(rank), log=log, moved=rank in moved_ranks))
    return tuple(results), window_s


class RankObserver:
    """Observes one rank's process twice; asks the rank for its stacks on creation."""

    def __init__(self, pid: int) -> None:
        self.pid, self.memory = pid, RankMemoryReader.from_pid(pid)
        self.counters, self.activity = ProcessCounters.from_pid(pid), ProcessActivity()
        self.waits: tuple[str, str] = "", ""  # in which system call, and where in the kernel
        self.signal_stacks: tuple[Thread, ...] = ()  # stacks, as the rank itself wrote them
        self.py_spy_job: concurrent.futures.Future[PySpyStacks] | None = None
        if self.memory:
            self.memory.request_stacks()

    def read_stacks(self) -> None:
        """Wait for the requested stacks."""
        self.signal_stacks = self.memory.wait_for_stacks() if self.memory else ()

    def finish(self, pool: concurrent.futures.Executor, *, is_silent: bool) -> None:
        """End the window; run py-spy on ranks that wrote no stacks or are silent."""
        self.activity = self.counters.activity_until(ProcessCounters.from_pid(self.pid))
        self.waits = blocking_syscall(self.pid), kernel_wait(self.pid)
        if is_silent or not self.signal_stacks:
            self.py_spy_job = pool.submit(dump_with_py_spy, self.pid, native=is_silent)

    def evidence(self, rank: int) -> RankEvidence:
        """Return what was observed."""
        py_spy = self.py_spy_job.result() if self.py_spy_job else PySpyStacks()
        source = "py-spy" if py_spy.threads else "signal"
        threads = py_spy.threads or self.signal_stacks
        return RankEvidence(
            rank,
            pid=self.pid,
            state=processes.process_state(self.pid),
            waits_in=self.waits[0],
            kernel_wait=self.waits[1],
            doing=self.activity,
            swapped_bytes=swapped_bytes(self.pid),
            threads=add_source_lines(threads),
            source=source if threads else "",
            no_stacks="" if threads else py_spy.failure,
            place=self.memory.read_position() if self.memory else None,
            unsent=stalled_connections(self.pid),
        )


def _read_conditions(run: RunDir, plan: Plan, node: Node, pool: concurrent.futures.Executor) -> HostConditions:
    """Return the state of the host around the ranks."""
    # it may take seconds, as NCCL's answer may
    flight_files = pool.submit(dump_flight_records, [run.flight(rank) for rank in node.ranks], plan.created)
    memory = facts.memory_sizes()
    return HostConditions(
        link_up=_is_link_up(node.interface),
        load=os.getloadavg()[0],
        cores=os.cpu_count() or 0,
        available_bytes=facts.memory()[1] or 0,
        swap_used_bytes=memory.get("SwapTotal", 0) - memory.get("SwapFree", 0),
        disks=_check_disks([run.path, checkpoint_root(run, plan)]),
        kernel=_read_kernel_lines(time.time()),
        nccl=_query_nccl_ras(),
        flight_records=flight_files.result(),
    )


def _read_progress(run: RunDir, plan: Plan) -> RunProgress:
    """Return how long this attempt's steps and saves usually take, and whether a save failed or is late."""
    lines = read_records(METRICS_LINE, run.metrics, UNLIMITED, LAST_STEPS * 1024)
    steps = [line for line in lines if isinstance(line, Metrics) and line.attempt == plan.attempt]
    saves = read_save_state(run, plan.attempt, read_record(Heartbeat, run.heartbeat(0)))
    if not steps:
        return RunProgress(usual_save_s=saves.usual_s or None, load_s=plan.load_s)
    intervals_s = [later.time - earlier.time for earlier, later in itertools.pairwise(steps)]
    usual_step_s = statistics.median([steps[-1].step_s, *intervals_s])
    return RunProgress(usual_step_s, saves.usual_s or None, saves.failure, plan.load_s)


def _last_lines(run: RunDir, host: str, attempt: int) -> dict[int, tuple[str, ...]]:
    """Return the last output lines of each rank in an attempt, by local rank.

    They come from the rank's most recently written file.
    """
    newest_by_rank: dict[int, tuple[float, tuple[str, ...]]] = {}
    for path in run.logs(host).glob(f"*-{attempt}-*/attempt_*/*/std*.log"):
        with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
            info = os.fstat(file.fileno())
            file.seek(max(0, info.st_size - LAST_BYTES))
            blocks = BlockSplitter()
            log_blocks = [*blocks.feed(0, file.read(LAST_BYTES)), *blocks.flush()]
            lines = [line for block in log_blocks for line in block.text.split("\n")]
            last_lines = tuple(line[:300] for line in lines if line.strip())[-LAST_LINES:]
            if last_lines:
                newest_by_rank[int(path.parent.name)] = max(
                    newest_by_rank.get(int(path.parent.name), (0.0, ())), (info.st_mtime, last_lines)
                )
    return {local_rank: last_lines for local_rank, (_, last_lines) in newest_by_rank.items()}


def _check_disks(paths: Sequence[Path]) -> tuple[DiskEvidence, ...]:
    """Return the free space of each filesystem.

    Each is queried by a child process, because a thread that queries a hung filesystem cannot be ended.
    """
    children = {
        str(path): subprocess.Popen(
            ["stat", "-f", "-c", "%a %S %b", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for path in dict.fromkeys(paths)
        if path.parent.exists()
    }
    disks, deadline = [], time.monotonic() + DISK_TIMEOUT_S
    for path, child in children.items():
        try:
            free = child.communicate(timeout=max(0.0, deadline - time.monotonic()))[0].split()
            is_known = len(free) == 3 and free[2] != "0"  # else it does not say how large it is
            disks.append(DiskEvidence(path, answers=True, free_bytes=int(free[0]) * int(free[1]) if is_known else None))
        except subprocess.TimeoutExpired:
            child.kill()
            disks.append(DiskEvidence(path, answers=False))
    return tuple(disks)


class LastKernelLines(KernelLog):
    """Kernel log lines about causes that can block a rank."""

    WORDS = KERNEL_PATTERN


def _read_kernel_lines(now: float) -> tuple[str, ...] | None:
    """Return the recent lines of the kernel log; None if this user may not read it."""
    lines = LastKernelLines().read_new()  # type: ignore[no-untyped-call]
    if lines is None:
        return None
    return tuple(
        f"{now - logged_at:.0f} s ago: {text}" for logged_at, text in lines if now - logged_at < KERNEL_MAX_AGE_S
    )


def _is_link_up(interface: str) -> bool | None:
    try:
        return Path(f"/sys/class/net/{interface}/operstate").read_text(encoding="ascii").strip() not in (
            "down",
            "lowerlayerdown",
        )
    except OSError:
        return None


def _query_nccl_ras() -> str:
    """Return NCCL RAS's status of all ranks, if it answers here; see NCCL's guide, "RAS"."""
    reply = b""
    with contextlib.suppress(OSError), socket.create_connection(("localhost", RAS_PORT), 0.3) as ras:
        ras.settimeout(RAS_TIMEOUT_S)
        ras.sendall(b"client protocol 2\ntimeout 2\nverbose status\n")
        while len(reply) < MAX_RAS_BYTES and (piece := ras.recv(1 << 16)):
            reply += piece
    return reply.decode("utf-8", "replace")


def dump_flight_records(records: Sequence[Path], start_time: float) -> tuple[str, ...]:
    """Make NCCL's flight recorder of each local rank dump; return this attempt's files.

    Includes the files that a timeout wrote. torch checks its pipe about once a second. If the pipe has no reader (the rank has ended,
    or NCCL is not in use), nothing waits.
    """
    requested_at, requested_records = time.time(), []
    for record in records:
        with contextlib.suppress(OSError):
            pipe = os.open(f"{record}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(pipe, b"1")
                requested_records.append(record)
            finally:
                os.close(pipe)
    deadline = time.monotonic() + FLIGHT_TIMEOUT_S
    while time.monotonic() < deadline and not all(_modified_at(record) >= requested_at for record in requested_records):
        time.sleep(0.1)
    return tuple(str(record) for record in records if _modified_at(record) >= start_time)


def _modified_at(record: Path) -> float:
    """Return when a file was last written; 0: never."""
    with contextlib.suppress(OSError):
        return record.stat().st_mtime
    return 0.0
