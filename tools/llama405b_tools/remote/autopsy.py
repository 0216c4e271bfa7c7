"""What a run's ranks are doing on this host, and what stands around them. Standard library; Linux."""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import re
import socket
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from llama405b.contract.files import EVERY, read_record, read_records
from llama405b.contract.paths import RunDir
from llama405b.contract.plan import Node, Plan, read_plan
from llama405b.contract.records import METRICS_LINE, Heartbeat, Metrics
from llama405b_tools.machine.stacks import Thread
from llama405b_tools.remote import processes
from llama405b_tools.remote.describe import beats_of, checkpoints_of, lives, saves
from llama405b_tools.remote.locks import run_of
from llama405b_tools.remote.messages.autopsy import (
    DiskEvidence,
    Doing,
    EvidenceRequest,
    HostEvidence,
    Progress,
    RankEvidence,
    Surroundings,
)
from llama405b_tools.remote.rank_evidence import (
    Counts,
    Looked,
    RankMemoryReader,
    kernel_wait,
    look_with_py_spy,
    rank_processes,
    swapped_bytes,
    unsent,
    waits_in,
    with_code,
)
from llama405b_tools.remote.sampler import KernelLog

SILENT_S = 15.0  # a rank that is silent for longer may be halted for an instant
DISK_S = 1.0
KERNEL_S = 900.0
KERNEL_WORDS = re.compile(
    rb"NVRM: Xid|Out of memory: Killed|oom-kill|blocked for more than|I/O error|not responding|Link is Down|"
    rb"Remounting filesystem read-only|Hardware Error|mlx5_core.*(error|fatal)"
)
LAST_STEPS = 50
LAST_LINES, LAST_BYTES = 8, 1 << 14  # of each rank's output
FLIGHT_S = 4.0  # until NCCL's flight recorder has written
RAS_PORT, RAS_S, RAS_BYTES = 28028, 3.0, 1 << 18  # of NCCL's RAS, which a process of each host serves


def evidence(request: EvidenceRequest) -> HostEvidence:
    """Look at every rank of this host, over a short window."""
    run, host = run_of(request.run), request.host
    plan = read_plan(run)
    node = plan.find(host)
    if node is None:
        return HostEvidence(host, time.time())
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        around = pool.submit(_around, run, plan, node, pool)
        ranks, window_s = _ranks(run, plan, node, request.window_s, pool)
        return HostEvidence(
            host,
            time.time(),
            plan.attempt,
            alive=lives(run, plan, host),
            address=node.address,
            interface=node.interface,
            window_s=window_s,
            ranks=ranks,
            progress=_progress(run, plan) if node == plan.nodes[0] else Progress(),
            around=around.result(),
        )


def _ranks(
    run: RunDir, plan: Plan, node: Node, least_s: float, pool: concurrent.futures.Executor
) -> tuple[tuple[RankEvidence, ...], float]:
    """Return what each rank does, and the length of the window in seconds."""
    launched = run.plan.stat().st_mtime  # by this host's clock, as heartbeats are: older ones are of an earlier attempt
    beats = {beat.rank: beat for beat in beats_of(run, node) if beat.time >= launched}
    began = time.monotonic()
    local = rank_processes(f"{run.path}:{node.name}")
    looks = {node.first_rank + number: RankLook(pid) for number, pid in local.items()}
    for look in looks.values():
        look.read_stacks()
    time.sleep(max(0.0, began + least_s - time.monotonic()))
    window_s, now = time.monotonic() - began, time.time()
    for rank, look in looks.items():
        look.end(pool, is_silent=rank in beats and now - beats[rank].time > SILENT_S)
    last = {beat.rank: beat.time for beat in beats_of(run, node)}
    moved = {rank for rank, beat in beats.items() if last.get(rank, beat.time) > beat.time}
    logs = _last_lines(run, node.name, plan.attempt)
    found = []
    for rank in node.ranks:
        seen = looks[rank].evidence(rank) if rank in looks else RankEvidence(rank)
        log = logs.get(rank - node.first_rank, ())
        found.append(dataclasses.replace(seen, beat=beats.get(rank), log=log, moved=rank in moved))
    return tuple(found), window_s


class RankLook:
    """One rank's process, looked at twice; the rank is asked for its stacks at once."""

    def __init__(self, pid: int) -> None:
        self.pid, self.memory = pid, RankMemoryReader.of(pid)
        self.before, self.doing = Counts.of(pid), Doing()
        self.waits: tuple[str, str] = "", ""  # in which system call, and where in the kernel
        self.own: tuple[Thread, ...] = ()  # stacks, as the rank itself wrote them
        self.look: concurrent.futures.Future[Looked] | None = None
        if self.memory:
            self.memory.ask()

    def read_stacks(self) -> None:
        """Wait for the stacks that the rank was asked for."""
        self.own = self.memory.stacks() if self.memory else ()

    def end(self, pool: concurrent.futures.Executor, *, is_silent: bool) -> None:
        """End the window; py-spy looks where there are no stacks, and into what is silent."""
        self.doing = self.before.until(Counts.of(self.pid))
        self.waits = waits_in(self.pid), kernel_wait(self.pid)
        if is_silent or not self.own:
            self.look = pool.submit(look_with_py_spy, self.pid, native=is_silent)

    def evidence(self, rank: int) -> RankEvidence:
        """Return what was seen."""
        looked = self.look.result() if self.look else Looked()
        source = "py-spy" if looked.threads else "signal"
        threads = looked.threads or self.own
        return RankEvidence(
            rank,
            pid=self.pid,
            state=processes.state(self.pid),
            waits_in=self.waits[0],
            kernel_wait=self.waits[1],
            doing=self.doing,
            swapped_bytes=swapped_bytes(self.pid),
            threads=with_code(threads),
            source=source if threads else "",
            no_stacks="" if threads else looked.why_not,
            place=self.memory.place() if self.memory else None,
            unsent=unsent(self.pid),
        )


def _around(run: RunDir, plan: Plan, node: Node, pool: concurrent.futures.Executor) -> Surroundings:
    """Return what stands around the ranks."""
    # it may take seconds, as NCCL's answer may
    flights = pool.submit(flight_records, [run.flight(rank) for rank in node.ranks], plan.created)
    memory = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE))
    return Surroundings(
        link_up=_link_up(node.interface),
        load=os.getloadavg()[0],
        cores=os.cpu_count() or 0,
        available_bytes=int(memory.get("MemAvailable", 0)) * 1024,
        swap_used_bytes=(int(memory.get("SwapTotal", 0)) - int(memory.get("SwapFree", 0))) * 1024,
        disks=_disks([run.path, checkpoints_of(run, plan)]),
        kernel=_kernel(time.time()),
        nccl=_nccl_ras(),
        flight_records=flights.result(),
    )


def _progress(run: RunDir, plan: Plan) -> Progress:
    """Return the last step of this attempt, and how long steps and saves take."""
    lines = read_records(METRICS_LINE, run.metrics, EVERY, LAST_STEPS * 1024)
    taken = [line for line in lines if isinstance(line, Metrics) and line.attempt == plan.attempt]
    usual_save_s, unsaved, _ = saves(run, plan.attempt, read_record(Heartbeat, run.heartbeat(0)))
    if not taken:
        return Progress(usual_save_s=usual_save_s or None, load_s=plan.load_s)
    between = [later.time - earlier.time for earlier, later in itertools.pairwise(taken)]
    usual_step_s = statistics.median([taken[-1].step_s, *between])
    age_s = time.time() - taken[-1].time
    return Progress(taken[-1].step, age_s, usual_step_s, usual_save_s or None, unsaved, plan.load_s)


def _last_lines(run: RunDir, host: str, attempt: int) -> dict[int, tuple[str, ...]]:
    """Return the last lines of each rank's output in an attempt, by local rank, of the file that was written last."""
    newest: dict[int, tuple[float, tuple[str, ...]]] = {}
    for path in run.logs(host).glob(f"*-{attempt}-*/attempt_*/*/std*.log"):
        with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
            info = os.fstat(file.fileno())
            file.seek(max(0, info.st_size - LAST_BYTES))
            lines = file.read().decode("utf-8", "replace").split("\n")
            said = tuple(line[:300] for line in lines if line.strip())[-LAST_LINES:]
            if said:
                newest[int(path.parent.name)] = max(newest.get(int(path.parent.name), (0.0, ())), (info.st_mtime, said))
    return {local_rank: said for local_rank, (_, said) in newest.items()}


def _disks(paths: Sequence[Path]) -> tuple[DiskEvidence, ...]:
    """Ask each filesystem for its free space; in processes of their own, since who asks one that hangs cannot be ended."""
    asked = {
        str(path): subprocess.Popen(
            ["stat", "-f", "-c", "%a %S", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for path in dict.fromkeys(paths)
        if path.parent.exists()
    }
    found, until = [], time.monotonic() + DISK_S
    for path, child in asked.items():
        try:
            free = child.communicate(timeout=max(0.0, until - time.monotonic()))[0].split()
            found.append(DiskEvidence(path, answers=True, free_bytes=int(free[0]) * int(free[1]) if free else None))
        except subprocess.TimeoutExpired:
            child.kill()
            found.append(DiskEvidence(path, answers=False))
    return tuple(found)


class LastKernelLines(KernelLog):
    """What the kernel logged about what may hold up a rank."""

    WORDS = KERNEL_WORDS


def _kernel(now: float) -> tuple[str, ...] | None:
    """Return what the kernel said lately; None if this user may not read it."""
    lines = LastKernelLines().new()  # type: ignore[no-untyped-call]
    if lines is None:
        return None
    return tuple(f"{now - at:.0f} s ago: {text}" for at, text in lines if now - at < KERNEL_S)


def _link_up(interface: str) -> bool | None:
    try:
        return Path(f"/sys/class/net/{interface}/operstate").read_text(encoding="ascii").strip() not in (
            "down",
            "lowerlayerdown",
        )
    except OSError:
        return None


def _nccl_ras() -> str:
    """Return what NCCL's RAS says of all ranks, if it answers here; see NCCL's guide, "RAS"."""
    said = b""
    with contextlib.suppress(OSError), socket.create_connection(("localhost", RAS_PORT), 0.3) as ras:
        ras.settimeout(RAS_S)
        ras.sendall(b"client protocol 2\ntimeout 2\nverbose status\n")
        while len(said) < RAS_BYTES and (piece := ras.recv(1 << 16)):
            said += piece
    return said.decode("utf-8", "replace")


def flight_records(records: Sequence[Path], since: float) -> tuple[str, ...]:
    """Have NCCL's flight recorder of each rank here write what it has; returns the files of this attempt, of timeouts as well.

    torch looks at its pipe about every second. Without a reader, where the rank has ended or NCCL is not there, nothing is waited for.
    """
    asked_at, asked = time.time(), []
    for record in records:
        with contextlib.suppress(OSError):
            pipe = os.open(f"{record}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(pipe, b"1")
                asked.append(record)
            finally:
                os.close(pipe)
    until = time.monotonic() + FLIGHT_S
    while time.monotonic() < until and not all(_written(record) >= asked_at for record in asked):
        time.sleep(0.1)
    return tuple(str(record) for record in records if _written(record) >= since)


def _written(record: Path) -> float:
    """Return when a file was written; 0: never."""
    with contextlib.suppress(OSError):
        return record.stat().st_mtime
    return 0.0
