"""One host, from its frames: whether they are fresh, its rates, its row of the picture. Pure.

Knows nothing about other hosts; deviations from them, and the state of the run, are passed in.
"""

import collections
import dataclasses
import functools
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from llama405b_tools.machine import gpus
from llama405b_tools.machine.gpus import GpuReport
from llama405b_tools.remote.messages.host_run import Beat
from llama405b_tools.text.clean import clean
from llama405b_tools.text.figures import share
from llama405b_tools.text.fold import fold_numbers
from llama405b_tools.top.state import thresholds, verdicts
from llama405b_tools.top.state.frames import NO_FRAME, Frame, Processes, RunFrame, SmiFrame
from llama405b_tools.top.state.picture import LINK_STATES, GpuCell, HostRow, HostState, ProcessRow, RankRow, known
from llama405b_tools.top.state.verdicts import Note

HISTORY = 120
_clean_command = functools.lru_cache(4096)(clean)  # commands repeat across hosts and frames
WHOLE = re.compile(r"\d{1,9}", re.ASCII)
SLACK = 1.1  # times all cores: the kernel's counters are not exact
TICKS = 100  # per second, as Linux reports CPU time to user space
Odd = Mapping[tuple[str, int], Note]  # by host and index of a GPU or rank, why it stands out
NOT_ODD = Note("", "")


class Judged(NamedTuple):
    """What is judged about a host at one moment."""

    state: HostState
    why: str
    notes: Sequence[Note]  # what stands out on it, worst first
    gpus: Odd
    ranks: Odd


@dataclasses.dataclass(slots=True)
class HostView:
    """What is known about a host."""

    name: str
    link: HostState = HostState.CONNECTING  # or OK, AUTH, REFUSED, TIMEOUT, DOWN
    why: str = ""
    linked_at: float = math.inf  # time of the last news of its connection
    heard_at: float = 0.0
    frame: Frame = NO_FRAME
    before: Frame = NO_FRAME  # the frame before
    earlier: collections.deque[tuple[float, Frame]] = dataclasses.field(default_factory=collections.deque)  # minutes
    active_ports: set[str] = dataclasses.field(default_factory=set)  # ports that were ever active
    gpus: list[GpuReport] = dataclasses.field(default_factory=list)
    gpus_before: list[GpuReport] = dataclasses.field(default_factory=list)  # in the frame before
    smi_fault: str = ""
    apps: Sequence[tuple[int, str, int | None]] = ()  # processes on its GPUs: pid, the GPU's uuid, MiB
    expected: frozenset[str] = frozenset()  # UUIDs of the GPUs that it has had since it was started
    xids: list[str] = dataclasses.field(default_factory=list)
    procs: Processes = ()
    procs_at: float = 0.0  # host's clock
    cpu_of: dict[int, float] = dataclasses.field(default_factory=dict)  # percent of a core by pid
    processes: tuple[ProcessRow, ...] = ()
    plans: dict[str, RunFrame] = dataclasses.field(default_factory=dict)  # by run, the frame that had its nodes
    history: collections.deque[float] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=HISTORY))

    def take(self, frame: Frame, now: float) -> list[str]:
        """Take a frame; return the GPU errors that are new in the kernel log."""
        self.before = self.frame
        self.frame = frame
        self.heard_at = now
        self.link, self.why = HostState.OK, ""
        self._keep(frame, now)
        self._take_smi(frame.smi)
        if (run := frame.run) and run.nodes is not None:
            self.plans[run.name] = run
        self._expect()
        new = [f"Xid {number} at {bus}: {words}" for bus, number, words in gpus.xids(frame.kernel or ())]
        self.xids = [*self.xids, *new][-3:]
        if frame.procs is not None:
            self._take_processes(frame.procs, frame.now)
        self.processes = self._processes()
        self.history.extend(known([self._level()]))
        return new

    def _keep(self, frame: Frame, now: float) -> None:
        """Keep a frame, for what is counted over minutes."""
        if not self.earlier or now - self.earlier[-1][0] > thresholds.COUNTERS_S / 10:
            self.earlier.append((now, frame))
        while len(self.earlier) > 1 and now - self.earlier[0][0] > thresholds.COUNTERS_S:
            self.earlier.popleft()
        self.active_ports |= {port.name for port in frame.ib if "ACTIVE" in port.state}

    def _take_smi(self, smi: SmiFrame) -> None:
        """Take nvidia-smi's answer; while it is slow the last one holds, and when it hangs nothing is known."""
        self.gpus_before = self.gpus
        if smi.hung_s > thresholds.SMI_HUNG_S:
            self.gpus = [_unknown(gpu) for gpu in self.gpus]
        elif smi.text is not None or not smi.hung_s:
            self.gpus, fault = gpus.read_smi(smi.text, smi.fields)
            self.apps = list(_apps(smi.apps or ""))
            self.smi_fault = clean(fault)[:200]

    def _expect(self) -> None:
        """Expect the GPUs that two answers in a row agree on, and miss those lost since the machine was started."""
        before, found = _uuids(self.gpus_before), _uuids(self.gpus)
        if self.frame.machine != self.before.machine:
            self.expected = frozenset()
        elif found == before and not found <= self.expected and len(found) <= (self.frame.pci_gpus or math.inf):
            self.expected = found

    @property
    def expected_gpus(self) -> int:
        """How many GPUs it should have: as many as it had, or as the kernel sees."""
        return max(len(self.expected), len(self.gpus), self.frame.pci_gpus or 0)

    def _take_processes(self, procs: Processes, host_now: float) -> None:
        before = {pid: ticks for pid, _, ticks, *_ in self.procs}
        seconds, cores = max(0.1, host_now - self.procs_at), self.frame.cpu.cores or math.inf
        cores_of = {pid: (ticks - before[pid]) / TICKS / seconds for pid, _, ticks, *_ in procs if pid in before}
        self.cpu_of = {pid: 100 * used for pid, used in cores_of.items() if 0 <= used <= SLACK * cores}
        self.procs, self.procs_at = procs, host_now

    def run(self, name: str) -> RunFrame | None:
        """Return what it reports about a run; None if it does not know it."""
        run = self.frame.run
        return run if run and run.name == name else None

    @property
    def is_heard(self) -> bool:
        """Whether a frame ever came."""
        return self.frame is not NO_FRAME

    @property
    def is_settled(self) -> bool:
        """Whether it has sent two frames, which rates need, or cannot be reached."""
        return self.before is not NO_FRAME or self.link in LINK_STATES

    def is_fresh(self, now: float, interval_s: float) -> bool:
        """Whether frames arrive."""
        return self.is_heard and now - self.heard_at <= thresholds.STALE_FRAMES * interval_s

    def clock(self, now: float) -> float:
        """Convert a moment of the operator's clock to the host's clock."""
        return self.frame.now + now - self.heard_at

    def state(self, trouble: tuple[HostState, str] | None, now: float, interval_s: float) -> tuple[HostState, str]:
        """Return its state and why; ``trouble``: the run's on this host, which counts if the host reports."""
        if self.link in LINK_STATES:
            return self.link, self.why
        if not self.is_fresh(now, interval_s):
            return self._silence(now, interval_s)
        return trouble or self._smi_trouble() or (HostState.OK, "")

    def _silence(self, now: float, interval_s: float) -> tuple[HostState, str]:
        if self.is_heard:
            return HostState.STALE, f"no frame for {now - self.heard_at:.0f} s"
        waits_s = now - self.linked_at
        if waits_s > max(thresholds.FIRST_FRAME_S, thresholds.STALE_FRAMES * interval_s):
            return HostState.STALE, f"no frame since it was reached {waits_s:.0f} s ago"
        return HostState.CONNECTING, "no frame yet"

    def _smi_trouble(self) -> tuple[HostState, str] | None:
        smi, n_devices = self.frame.smi, self.frame.pci_gpus
        if smi.hung_s > thresholds.SMI_HUNG_S:
            return HostState.SMI_HUNG, f"nvidia-smi has not answered for {smi.hung_s:.0f} s; a GPU or the driver hangs"
        if not self.gpus and (self.smi_fault or (n_devices and not smi.hung_s)):
            return HostState.NO_DRIVER, self.smi_fault or f"{n_devices} NVIDIA devices, but no nvidia-smi"
        return None

    def row(self, run_name: str, judged: Judged, now: float) -> HostRow:
        """Return its row of the picture."""
        frame, run = self.frame, self.run(run_name)
        odd_ranks = [judged.ranks.get((self.name, beat.rank), NOT_ODD) for beat in (run.beats if run else ())]
        ranks = tuple(map(functools.partial(_rank, self.clock(now)), run.beats if run else (), odd_ranks))
        fields = {field for note in judged.notes for field in note.fields}
        if any(rank.odd for rank in ranks):
            fields |= {*verdicts.STEP_AND_AGE}
        return HostRow(
            name=self.name,
            state=judged.state,
            why=judged.why,
            age_s=now - self.heard_at if self.is_heard else None,
            gpus=self._cells(ranks, judged.gpus),
            has_gpu=None if frame.pci_gpus is None else bool(self.expected_gpus),
            ranks=ranks,
            processes=self.processes,
            cpu_pct=self._cpu_pct(),
            cores=frame.cpu.cores,
            ram_bytes=frame.memory.total,
            ram_used_bytes=frame.memory.used,
            disk_free_bytes=min((free for _, free, _ in frame.disks), default=None),
            net_bytes_per_s=self._rate(_net),
            ib_bytes_per_s=self._rate(_ib),
            notes=tuple(note.words for note in judged.notes),
            odd_in=tuple(sorted(fields)),
            history=tuple(self.history),
        )

    def notes(self, odd: Odd) -> list[Note]:
        """Return what stands out on it, worst first; GPUs with the same note share one."""
        if not self.is_heard:
            return []
        notes = []
        if self.smi_fault and self.gpus:
            notes.append(Note("smi", f"nvidia-smi: {self.smi_fault}"))
        lost = self.expected_gpus - len(self.gpus)
        if self.gpus and lost > 0:
            notes.append(Note("lost", f"{lost} of {self.expected_gpus} GPUs are lost"))
        alike: dict[Note, list[int]] = {}
        for gpu in self.gpus:
            if note := odd.get((self.name, gpu.index)):
                alike.setdefault(note, []).append(gpu.index)
        for note, indices in alike.items():
            notes.append(Note(f"{note.key} {indices}", f"gpu {fold_numbers(indices)}: {note.words}", note.fields))
        notes += [Note(words, words) for words in self.xids]
        return [*notes, *verdicts.host_notes(self.frame, self.earlier[0][1], self.active_ports)]

    def _cells(self, ranks: Sequence[RankRow], odd: Odd) -> tuple[GpuCell, ...]:
        by_pid = {rank.pid: rank for rank in ranks}
        rank_of = {uuid: by_pid[pid] for pid, uuid, _ in self.apps if pid in by_pid}
        return tuple(
            self._cell(gpu, rank_of.get(gpu.uuid), odd.get((self.name, gpu.index), NOT_ODD)) for gpu in self.gpus
        )

    @staticmethod
    def _cell(gpu: GpuReport, rank: RankRow | None, note: Note) -> GpuCell:
        odd = note.words
        if rank and rank.odd and not odd:
            odd = f"rank {rank.rank}: {rank.odd}"
        return GpuCell(
            index=gpu.index,
            name=gpu.name,
            utilization=gpu.utilization,
            power_w=gpu.power_w,
            power_limit_w=gpu.power_limit_w,
            temperature_c=gpu.temperature_c,
            clock_mhz=gpu.clock_mhz,
            used_mib=gpu.used_mib,
            memory_mib=gpu.memory_mib,
            rank=rank.rank if rank else None,
            odd=odd,
            odd_in=note.fields,
        )

    def _processes(self) -> tuple[ProcessRow, ...]:
        on = {pid: (uuid, mib) for pid, uuid, mib in self.apps}
        index_of = {gpu.uuid: gpu.index for gpu in self.gpus}
        rows = []
        for pid, state, _, rss, rank, command in self.procs:
            uuid, mib = on.get(pid, ("", None))
            cpu = self.cpu_of.get(pid)
            gpu = index_of.get(uuid)
            words = _clean_command(command)
            rows.append(ProcessRow(pid, state, cpu, rss, _whole(rank), gpu, mib, words))
        return tuple(rows)

    def _level(self) -> float | None:
        """Return its GPUs' mean power (else utilization) in percent; its CPU's utilization if it has none."""
        powers = known(share(gpu.power_w, gpu.power_limit_w) for gpu in self.gpus)
        if found := powers or known(gpu.utilization for gpu in self.gpus):
            return float(statistics.mean(found))
        return None if self.gpus else self._cpu_pct()

    def _cpu_pct(self) -> float | None:
        new, old = self.frame.cpu, self.before.cpu
        ticks = new.total - old.total
        if self.before is NO_FRAME or ticks <= 0:
            return None
        busy = 1 - (new.idle - old.idle) / ticks
        return 100 * min(1.0, max(0.0, busy)) if 1 - SLACK <= busy <= SLACK else None

    def _rate(self, bytes_of: Callable[[Frame], dict[str, int]]) -> float | None:
        """Return bytes per second between the last two frames, of the busiest entry."""
        new = bytes_of(self.frame)
        old = bytes_of(self.before)
        seconds = self.frame.now - self.before.now
        flowed = [new[key] - old[key] for key in new if key in old]
        if seconds <= 0 or min(flowed, default=-1) < 0:  # counters that were reset tell nothing
            return None
        return max(flowed) / seconds


def _unknown(gpu: GpuReport) -> GpuReport:
    """Return the GPU with its readings unknown."""
    return dataclasses.replace(gpu, utilization=None, power_w=None, temperature_c=None, clock_mhz=None, used_mib=None)


def _uuids(found: Sequence[GpuReport]) -> frozenset[str]:
    return frozenset(gpu.uuid or str(gpu.index) for gpu in found)


def _apps(answer: str) -> Iterator[tuple[int, str, int | None]]:
    """Parse nvidia-smi's list of processes on GPUs."""
    for line in answer[: gpus.MOST_TEXT].splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 3 and (pid := _whole(words[0])) is not None:
            yield pid, words[1], _whole(words[2])


def _whole(text: str) -> int | None:
    return int(text) if WHOLE.fullmatch(text) else None


def _net(frame: Frame) -> dict[str, int]:
    return {name: sum(counts) for name, counts in frame.net.items()}


def _ib(frame: Frame) -> dict[str, int]:
    """Sum over all ports; InfiniBand counts four-byte words (IBA, PortCounters)."""
    counts = [port.counters for port in frame.ib]
    both = [count for count in counts if {"port_rcv_data", "port_xmit_data"} <= set(count)]
    return {"all": 4 * sum(count["port_rcv_data"] + count["port_xmit_data"] for count in both)} if both else {}


def _rank(host_now: float, beat: Beat, odd: Note) -> RankRow:
    return RankRow(
        beat.rank,
        beat.pid,
        beat.phase,
        beat.step,
        max(0.0, host_now - beat.time),
        beat.state,
        beat.done_bytes,
        beat.total_bytes,
        beat.data_s,
        beat.optimizer_s,
        odd.words,
        odd.fields,
    )
