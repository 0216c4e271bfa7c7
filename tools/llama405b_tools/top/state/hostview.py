"""The state of one host, from its frames: freshness, processes, GPUs, rates, and its row of the view. Pure.

Knows nothing about other hosts; deviations from them and the state of the run are passed in.
"""

import collections
import dataclasses
import functools
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from llama405b_tools import parsers
from llama405b_tools.agent.messages import RankHeartbeat, RunFrame
from llama405b_tools.parsers import GpuReport
from llama405b_tools.text.figures import percent_of
from llama405b_tools.text.words import clean, fold_numbers
from llama405b_tools.top.state import thresholds, verdicts
from llama405b_tools.top.state.frames import NO_FRAME, HostFrame, Processes, SmiFrame
from llama405b_tools.top.state.picture import LINK_STATES, GpuCell, HostRow, HostState, ProcessRow, RankRow, not_none
from llama405b_tools.top.state.verdicts import Note

_clean_command = functools.lru_cache(4096)(clean)  # commands repeat across hosts and frames
INTEGER = re.compile(r"\d{1,9}", re.ASCII)
TICKS = 100  # per second, as Linux reports CPU time to user space


@dataclasses.dataclass(slots=True)
class HostPrograms:
    """The processes of one host: the run's ranks and other users of its GPUs."""

    apps: Sequence[tuple[int, str, int | None]] = ()  # on its GPUs, as nvidia-smi lists them: pid, the GPU's uuid, MiB
    procs: Processes = ()  # of the run
    procs_at: float = 0.0  # host's clock
    cpu_percents: Mapping[int, float] = dataclasses.field(default_factory=dict)  # percent of a core by pid
    # not of the run: user and command by pid
    foreign: Mapping[int, tuple[str, str]] = dataclasses.field(default_factory=dict)
    io_bytes: Mapping[int, int] = dataclasses.field(default_factory=dict)  # bytes read and written by pid
    last_io_at: float = -math.inf  # when the run's processes last read or wrote much; operator's clock
    rows: tuple[ProcessRow, ...] = ()

    def take_apps(self, answer: str) -> None:
        """Take nvidia-smi's list of processes on GPUs."""
        self.apps = list(_parse_apps(answer))

    def take(self, frame: HostFrame, gpus: Sequence[GpuReport], now: float) -> None:
        """Take a frame, in which these GPUs are."""
        if frame.foreign is not None:
            self.foreign = {pid: (user, command) for pid, user, command in frame.foreign}
        if frame.io is not None:
            self._take_io(dict(frame.io), now)
        if frame.procs is not None:
            self._take_processes(frame.procs, frame.now, frame.cpu.cores or math.inf)
        self.rows = self._rows(gpus)

    def rank_by_gpu(self, beats: Sequence[RankHeartbeat], gpus: Sequence[GpuReport]) -> dict[int, int]:
        """Return ranks by GPU index, for the processes that nvidia-smi lists."""
        ranks = {beat.pid: beat.rank for beat in beats}
        index_of = {gpu.uuid: gpu.index for gpu in gpus}
        return {index_of[uuid]: ranks[pid] for pid, uuid, _ in self.apps if pid in ranks and uuid in index_of}

    def foreign_notes(self, gpus: Sequence[GpuReport]) -> Iterator[Note]:
        """Yield notes on processes on these GPUs that do not belong to the run.

        In a container, nvidia-smi's pids may be of another namespace; then unknown processes are not reported.
        """
        index_of = {gpu.uuid: gpu.index for gpu in gpus}
        visible_pids = {pid for pid, *_ in self.procs} & {pid for pid, *_ in self.apps}
        for pid, uuid, mib in self.apps:
            user, command = self.foreign.get(pid, ("", ""))
            if pid in self.foreign and (user or visible_pids) and (mib is None or mib >= thresholds.FOREIGN_MIB):
                size = "" if mib is None else f"{mib / 1024:.1f} GiB of "
                owner = _clean_command(f"{user}: {command}" if user else f"process {pid}")
                words = f"gpu {index_of.get(uuid, '?')}: {size}another program, {owner}"
                yield Note(f"foreign {pid} {uuid}", words, ("used_mib",))

    def _take_io(self, io_bytes: Mapping[int, int], now: float) -> None:
        growth = [count - self.io_bytes[pid] for pid, count in io_bytes.items() if pid in self.io_bytes]
        if max(growth, default=0) >= thresholds.MOVED_BYTES:
            self.last_io_at = now
        self.io_bytes = io_bytes

    def _take_processes(self, procs: Processes, host_now: float, cores: float) -> None:
        previous_ticks = {pid: ticks for pid, _, ticks, *_ in self.procs}
        seconds = max(0.1, host_now - self.procs_at)
        cores_by_pid = {
            pid: (ticks - previous_ticks[pid]) / TICKS / seconds for pid, _, ticks, *_ in procs if pid in previous_ticks
        }
        self.cpu_percents = {
            pid: 100 * n_cores for pid, n_cores in cores_by_pid.items() if 0 <= n_cores <= thresholds.CPU_SLACK * cores
        }
        self.procs, self.procs_at = procs, host_now

    def _rows(self, gpus: Sequence[GpuReport]) -> tuple[ProcessRow, ...]:
        gpu_of = {pid: (uuid, mib) for pid, uuid, mib in self.apps}
        index_of = {gpu.uuid: gpu.index for gpu in gpus}
        rows = []
        for pid, state, _, rss, rank, command in self.procs:
            uuid, mib = gpu_of.get(pid, ("", None))
            words = _clean_command(command)
            rows.append(
                ProcessRow(
                    pid, state, self.cpu_percents.get(pid), rss, _parse_int(rank), index_of.get(uuid), mib, words
                )
            )
        return tuple(rows)


def _parse_apps(answer: str) -> Iterator[tuple[int, str, int | None]]:
    for line in answer[: parsers.MAX_TEXT_CHARS].splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 3 and (pid := _parse_int(words[0])) is not None:
            yield pid, words[1], _parse_int(words[2])


def _parse_int(text: str) -> int | None:
    return int(text) if INTEGER.fullmatch(text) else None


HISTORY_SAMPLES = 120
MAX_XIDS = 20
BUSY_STEPS, MIN_BUSY_STEPS = 5, 3  # steps kept per rank, and needed to judge one
OddUnits = Mapping[tuple[str, int], Note]  # by host and index of a GPU or rank, why it stands out
NOT_ODD = Note("", "")
COOL_POWER_SHARE = 0.8  # share of its power limit to suggest for a hot GPU


class Xid(NamedTuple):
    """An error of a GPU in the kernel's log."""

    time: float  # host's clock
    bus: str  # PCI address of the GPU
    words: str


class HostJudgment(NamedTuple):
    """The judgment of a host at one moment."""

    state: HostState
    why: str
    is_culprit: bool
    notes: Sequence[Note]  # worst first
    gpus: OddUnits
    ranks: OddUnits


@dataclasses.dataclass(slots=True)
class HostView:
    """The state of a host, updated by frames."""

    name: str
    link: HostState = HostState.CONNECTING  # or OK, AUTH, REFUSED, TIMEOUT, DOWN
    why: str = ""
    linked_at: float = math.inf  # time of the last news of its connection
    last_frame_at: float = 0.0
    frame: HostFrame = NO_FRAME
    previous_frame: HostFrame = NO_FRAME  # the frame before
    older_frames: collections.deque[tuple[float, HostFrame]] = dataclasses.field(
        default_factory=collections.deque
    )  # minutes
    best_rates: dict[str, float] = dataclasses.field(
        default_factory=dict
    )  # best rate of each port that was ever active, in Gb/s
    gpus: list[GpuReport] = dataclasses.field(default_factory=list)
    previous_gpus: list[GpuReport] = dataclasses.field(default_factory=list)  # in the frame before
    smi_fault: str = ""
    expected_uuids: frozenset[str] = frozenset()  # UUIDs of the GPUs seen since the machine booted
    programs: HostPrograms = dataclasses.field(default_factory=HostPrograms)
    xids: collections.deque[Xid] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=MAX_XIDS))
    # by rank: step, seconds
    busy_samples: dict[int, collections.deque[tuple[int, float]]] = dataclasses.field(default_factory=dict)
    plans: dict[str, RunFrame] = dataclasses.field(default_factory=dict)  # by run, the report that had its nodes
    load_history: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=HISTORY_SAMPLES)
    )

    def take(self, frame: HostFrame, now: float) -> None:
        """Process a frame."""
        self.previous_frame = self.frame
        self.frame = frame
        self.last_frame_at = now
        self.link, self.why = HostState.OK, ""
        self._keep_frame(frame, now)
        self._take_smi(frame.smi)
        if (run := frame.run) and run.nodes is not None:
            self.plans[run.name] = run
        self._update_expected()
        self._take_busy(frame.run)
        self.xids.extend(self._new_xids(frame))
        self.programs.take(frame, self.gpus, now)
        self.load_history.extend(not_none([self._load_percent()]))

    def _new_xids(self, frame: HostFrame) -> Iterator[Xid]:
        lines = frame.kernel or ()
        times = frame.kernel_times or [frame.now] * len(lines)
        for line, moment in zip(lines, times, strict=True):
            for bus, number, words in parsers.parse_xids([line]):
                yield Xid(moment, bus, f"Xid {number}: {words}")

    def _take_busy(self, run: RunFrame | None) -> None:
        previous = self.previous_frame.run
        if not (run and previous and (run.name, run.attempt) == (previous.name, previous.attempt)):
            self.busy_samples.clear()
        for beat in run.beats if run else ():
            samples = self.busy_samples.setdefault(beat.rank, collections.deque(maxlen=BUSY_STEPS))
            if beat.busy_s is not None and (not samples or samples[-1][0] != beat.step):
                samples.append((beat.step, beat.busy_s))

    def median_busy_s(self, rank: int) -> float | None:
        """Return a rank's median compute seconds per step, over the last few; None if there are too few."""
        step_times = [took_s for _, took_s in self.busy_samples.get(rank, ())]
        return statistics.median(step_times) if len(step_times) >= MIN_BUSY_STEPS else None

    def _keep_frame(self, frame: HostFrame, now: float) -> None:
        """Keep frames of the last minutes, for counters."""
        if not self.older_frames or now - self.older_frames[-1][0] > thresholds.COUNTERS_S / 10:
            self.older_frames.append((now, frame))
        while len(self.older_frames) > 1 and now - self.older_frames[0][0] > thresholds.COUNTERS_S:
            self.older_frames.popleft()
        for port in frame.ib:
            if "ACTIVE" in port.state:
                self.best_rates[port.name] = max(self.best_rates.get(port.name, 0.0), port.gbit_per_s)

    def _take_smi(self, smi: SmiFrame) -> None:
        """Process nvidia-smi's output; while it is slow the last one is kept, and if it hangs readings are unknown."""
        self.previous_gpus = self.gpus
        if smi.hung_s > thresholds.SMI_HUNG_S:
            self.gpus = [_without_readings(gpu) for gpu in self.gpus]
        elif smi.text is not None or not smi.hung_s:
            self.gpus, fault = parsers.parse_smi(smi.text, smi.fields)
            self.programs.take_apps(smi.apps or "")
            self.smi_fault = clean("; ".join([*filter(None, [fault]), *parsers.smi_warnings(smi.text)]))[:200]

    def _update_expected(self) -> None:
        """Update the expected GPUs: those that two outputs in a row agree on, since the machine booted."""
        previous, current = _uuids(self.previous_gpus), _uuids(self.gpus)
        if self.frame.machine != self.previous_frame.machine:
            self.expected_uuids = frozenset()
        elif (
            current == previous
            and not current <= self.expected_uuids
            and len(current) <= (self.frame.pci_gpus or math.inf)
        ):
            self.expected_uuids = current

    @property
    def n_expected_gpus(self) -> int:
        """The number of GPUs it should have: as seen before, by the kernel, or by ``slots=`` if it has any."""
        n_gpus = max(len(self.expected_uuids), len(self.gpus), self.frame.pci_gpus or 0)
        return max(n_gpus, self.frame.slots) if n_gpus or self.frame.smi.text is not None else 0

    def run_report(self, name: str) -> RunFrame | None:
        """Return its report on a run; None if it does not know the run."""
        run = self.frame.run
        return run if run and run.name == name else None

    @property
    def is_heard(self) -> bool:
        """Whether it has ever sent a frame."""
        return self.frame is not NO_FRAME

    @property
    def is_settled(self) -> bool:
        """Whether it has sent two frames, which rates need, or cannot be reached."""
        return self.previous_frame is not NO_FRAME or self.link in LINK_STATES

    def is_fresh(self, now: float, interval_s: float) -> bool:
        """Return whether its last frame is recent."""
        return self.is_heard and now - self.last_frame_at <= thresholds.STALE_FRAMES * interval_s

    def clock(self, now: float) -> float:
        """Convert a moment of the operator's clock to the host's clock."""
        return self.frame.now + now - self.last_frame_at

    def state(self, trouble: tuple[HostState, str] | None, now: float, interval_s: float) -> tuple[HostState, str]:
        """Return its state and the reason; ``trouble``: the run's problem on it, used if the host reports."""
        if self.link in LINK_STATES:
            return self.link, self.why
        if not self.is_fresh(now, interval_s):
            return self._silence(now, interval_s)
        return trouble or self._smi_trouble() or (HostState.OK, "")

    def _silence(self, now: float, interval_s: float) -> tuple[HostState, str]:
        if self.is_heard:
            return HostState.STALE, f"no frame for {now - self.last_frame_at:.0f} s"
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

    def make_row(self, run_name: str, judged: HostJudgment, now: float) -> HostRow:
        """Return its row of the view."""
        frame, run = self.frame, self.run_report(run_name)
        odd_ranks = [judged.ranks.get((self.name, beat.rank), NOT_ODD) for beat in (run.beats if run else ())]
        ranks = tuple(map(functools.partial(_rank_row, self.clock(now)), run.beats if run else (), odd_ranks))
        fields = {field for note in judged.notes for field in note.fields}
        if any(rank.odd for rank in ranks):
            fields |= {*verdicts.STEP_AND_AGE}
        return HostRow(
            name=self.name,
            state=judged.state,
            why=judged.why,
            age_s=now - self.last_frame_at if self.is_heard else None,
            gpus=self._gpu_cells(ranks, judged.gpus),
            has_gpu=None if frame.pci_gpus is None else bool(self.n_expected_gpus),
            ranks=ranks,
            processes=self.programs.rows,
            cpu_pct=self._cpu_pct(),
            cores=frame.cpu.cores,
            ram_bytes=frame.memory.total,
            ram_used_bytes=frame.memory.used,
            disk_free_bytes=min((free for _, free, _ in frame.disks), default=None),
            net_bytes_per_s=self._rate(lambda frame: {name: sum(counts) for name, counts in frame.net.items()}),
            ib_bytes_per_s=self.ib_rate,
            is_culprit=judged.is_culprit,
            notes=tuple(note.words for note in judged.notes),
            odd_in=tuple(sorted(fields)),
            history=tuple(self.load_history),
        )

    @property
    def ib_rate(self) -> float | None:
        """Bytes per second sent and received over RDMA."""
        return self._rate(_ib_bytes)

    def recent_xids(self, run_name: str) -> list[Xid]:
        """Return the Xids since the run's attempt began; without a run, those of the last minutes."""
        run = self.run_report(run_name)
        since = run.created if run else self.frame.now - thresholds.COUNTERS_S
        return [xid for xid in self.xids if xid.time >= since]

    def gpu_index_of(self, xid: Xid) -> int | None:
        """Return the index of an Xid's GPU; None if nvidia-smi does not list that GPU."""
        address = parsers.parse_pci_address(xid.bus)
        return next((gpu.index for gpu in self.gpus if address and parsers.parse_pci_address(gpu.bus) == address), None)

    def gpus_of_rank(self, run_name: str, beat: RankHeartbeat) -> list[GpuReport]:
        """Return the GPU of a rank; all of the host's GPUs if it is unknown."""
        run = self.run_report(run_name)
        indices = [i for i, rank in self.rank_by_gpu(run).items() if rank == beat.rank] if run else []
        return [gpu for gpu in self.gpus if gpu.index in indices] or self.gpus

    def rank_by_gpu(self, run: RunFrame) -> dict[int, int]:
        """Return ranks by GPU index: from nvidia-smi's processes, else (in a container) by order."""
        by_pid = self.programs.rank_by_gpu(run.beats, self.gpus)
        plan = self.plans.get(run.name)
        node = next((node for node in (plan.nodes or () if plan else ()) if node[0] == self.name), None)
        if by_pid or node is None:
            return by_pid
        _, first, n_ranks = node
        return {gpu.index: first + i for i, gpu in enumerate(self.gpus[:n_ranks])}

    def notes(self, run_name: str, odd: OddUnits) -> list[Note]:
        """Return its notes, worst first; GPUs with equal notes share one."""
        if not self.is_heard:
            return []
        notes = []
        if self.smi_fault and self.gpus:
            notes.append(Note("smi", f"nvidia-smi: {self.smi_fault}"))
        n_lost = self.n_expected_gpus - len(self.gpus)
        if self.gpus and n_lost > 0:
            notes.append(Note("lost", f"{n_lost} of {self.n_expected_gpus} GPUs are lost"))
        by_note: dict[Note, list[int]] = {}
        for gpu in self.gpus:
            if note := odd.get((self.name, gpu.index)):
                by_note.setdefault(note, []).append(gpu.index)
        hot_gpus = [
            gpu
            for note, indices in by_note.items()
            for gpu in self.gpus
            if gpu.index in indices and verdicts.is_heat(gpu, note)
        ]
        for note, indices in by_note.items():
            remedy = self._cooling_remedy(hot_gpus) if {gpu.index for gpu in hot_gpus} & {*indices} else ""
            notes.append(
                Note(f"{note.key} {indices}", f"gpu {fold_numbers(indices)}: {note.words}", note.fields, remedy)
            )
        unplaced = [
            f"{xid.words} (at {xid.bus})" for xid in self.recent_xids(run_name) if self.gpu_index_of(xid) is None
        ]
        notes += [Note(words, words) for words in unplaced]
        notes += self.programs.foreign_notes(self.gpus)
        states = {row.state for row in self.programs.rows if row.rank is not None}
        if (
            (run := self.run_report(run_name)) and run.alive and not run.beats and states == {"T"}
        ):  # with heartbeats, each stopped rank has its own note
            notes.append(Note("stopped", "all processes of the run on this host are stopped by a signal"))
        return [*notes, *verdicts.list_host_notes(self.frame, self.older_frames[0][1], self.best_rates)]

    def _cooling_remedy(self, hot_gpus: Sequence[GpuReport]) -> str:
        """Return what to do about hot GPUs; ``hot_gpus``: of this host, in order of their index."""
        words = "check the fans and the inlet air of {host}"
        if limits_w := not_none(gpu.power_limit_w for gpu in hot_gpus):
            gpu_flag = "" if len(hot_gpus) == len(self.gpus) else f" -i {','.join(str(gpu.index) for gpu in hot_gpus)}"
            command = f"sudo nvidia-smi{gpu_flag} -pl {COOL_POWER_SHARE * min(limits_w):.0f}"
            words += f"; until then, `{command}` there makes less heat (the limit is {min(limits_w):.0f} W)"
        return words

    def _gpu_cells(self, ranks: Sequence[RankRow], odd: OddUnits) -> tuple[GpuCell, ...]:
        rank_rows = {rank.rank: rank for rank in ranks}
        rank_by_gpu = self.rank_by_gpu(self.frame.run) if ranks and self.frame.run else {}
        return tuple(
            self._gpu_cell(gpu, rank_rows.get(rank_by_gpu.get(gpu.index, -1)), odd.get((self.name, gpu.index), NOT_ODD))
            for gpu in self.gpus
        )

    @staticmethod
    def _gpu_cell(gpu: GpuReport, rank: RankRow | None, note: Note) -> GpuCell:
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

    def _load_percent(self) -> float | None:
        """Return the GPUs' mean power (or utilization) in percent; without GPUs, the CPU's utilization."""
        powers = not_none(percent_of(gpu.power_w, gpu.power_limit_w) for gpu in self.gpus)
        if values := powers or not_none(gpu.utilization for gpu in self.gpus):
            return float(statistics.mean(values))
        return None if self.gpus else self._cpu_pct()

    def _cpu_pct(self) -> float | None:
        cpu, old_cpu = self.frame.cpu, self.previous_frame.cpu
        ticks = cpu.total - old_cpu.total
        if self.previous_frame is NO_FRAME or ticks <= 0:
            return None
        busy = 1 - (cpu.idle - old_cpu.idle) / ticks
        return 100 * min(1.0, max(0.0, busy)) if 1 - thresholds.CPU_SLACK <= busy <= thresholds.CPU_SLACK else None

    def _rate(self, bytes_of: Callable[[HostFrame], dict[str, int]]) -> float | None:
        """Return bytes per second between the last two frames, of the busiest entry."""
        counts = bytes_of(self.frame)
        old_counts = bytes_of(self.previous_frame)
        seconds = self.frame.now - self.previous_frame.now
        deltas = [counts[key] - old_counts[key] for key in counts if key in old_counts]
        if seconds <= 0 or min(deltas, default=-1) < 0:  # counters were reset
            return None
        return max(deltas) / seconds


def _without_readings(gpu: GpuReport) -> GpuReport:
    """Return the GPU with all readings set to unknown."""
    return dataclasses.replace(gpu, utilization=None, power_w=None, temperature_c=None, clock_mhz=None, used_mib=None)


def _uuids(gpus: Sequence[GpuReport]) -> frozenset[str]:
    return frozenset(gpu.uuid or str(gpu.index) for gpu in gpus)


def _ib_bytes(frame: HostFrame) -> dict[str, int]:
    """Sum over all ports; InfiniBand counts four-byte words (IBA, PortCounters)."""
    counts = [port.counters for port in frame.ib]
    complete = [count for count in counts if {"port_rcv_data", "port_xmit_data"} <= set(count)]
    return {"all": 4 * sum(count["port_rcv_data"] + count["port_xmit_data"] for count in complete)} if complete else {}


def _rank_row(host_now: float, beat: RankHeartbeat, odd: Note) -> RankRow:
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
        beat.busy_s,
        beat.optimizer_s,
        odd.words,
        odd.fields,
    )
