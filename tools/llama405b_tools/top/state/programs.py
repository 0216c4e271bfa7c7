"""Which programs run on one host and use its GPUs: the run's ranks, and others. Pure."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from llama405b_tools.machine import gpus
from llama405b_tools.machine.gpus import GpuReport
from llama405b_tools.remote.messages.host_run import Beat
from llama405b_tools.text.clean import clean
from llama405b_tools.top.state import thresholds
from llama405b_tools.top.state.frames import Frame, Processes
from llama405b_tools.top.state.picture import ProcessRow
from llama405b_tools.top.state.verdicts import Note

_clean_command = functools.lru_cache(4096)(clean)  # commands repeat across hosts and frames
WHOLE = re.compile(r"\d{1,9}", re.ASCII)
TICKS = 100  # per second, as Linux reports CPU time to user space


@dataclasses.dataclass(slots=True)
class Programs:
    """The programs of one host, from its frames."""

    apps: Sequence[tuple[int, str, int | None]] = ()  # on its GPUs, as nvidia-smi lists them: pid, the GPU's uuid, MiB
    procs: Processes = ()  # of the run
    procs_at: float = 0.0  # host's clock
    cpu_of: Mapping[int, float] = dataclasses.field(default_factory=dict)  # percent of a core by pid
    # not of the run: user and command by pid
    foreign: Mapping[int, tuple[str, str]] = dataclasses.field(default_factory=dict)
    io: Mapping[int, int] = dataclasses.field(default_factory=dict)  # bytes read and written by pid
    moved_at: float = -math.inf  # when the run's were last seen to read or write much; operator's clock
    rows: tuple[ProcessRow, ...] = ()

    def take_apps(self, answer: str) -> None:
        """Take nvidia-smi's list of processes on GPUs."""
        self.apps = list(_apps(answer))

    def take(self, frame: Frame, on: Sequence[GpuReport], now: float) -> None:
        """Take a frame, in which these GPUs are."""
        if frame.foreign is not None:
            self.foreign = {pid: (user, command) for pid, user, command in frame.foreign}
        if frame.io is not None:
            self._take_io(dict(frame.io), now)
        if frame.procs is not None:
            self._take_processes(frame.procs, frame.now, frame.cpu.cores or math.inf)
        self.rows = self._rows(on)

    def rank_of(self, beats: Sequence[Beat], on: Sequence[GpuReport]) -> dict[int, int]:
        """Return the rank on each GPU, by the GPU's index, as far as nvidia-smi lists the ranks' processes."""
        ranks = {beat.pid: beat.rank for beat in beats}
        index_of = {gpu.uuid: gpu.index for gpu in on}
        return {index_of[uuid]: ranks[pid] for pid, uuid, _ in self.apps if pid in ranks and uuid in index_of}

    def foreign_notes(self, on: Sequence[GpuReport]) -> Iterator[Note]:
        """Yield the processes on these GPUs that are not of the run.

        In a container, pids of the machine may mean nothing, not even those of the run: then unknown ones are left out.
        """
        index_of = {gpu.uuid: gpu.index for gpu in on}
        told = {pid for pid, *_ in self.procs} & {pid for pid, *_ in self.apps}
        for pid, uuid, mib in self.apps:
            user, command = self.foreign.get(pid, ("", ""))
            if pid in self.foreign and (user or told) and (mib is None or mib >= thresholds.FOREIGN_MIB):
                size = "" if mib is None else f"{mib / 1024:.1f} GiB of "
                who = _clean_command(f"{user}: {command}" if user else f"process {pid}")
                words = f"gpu {index_of.get(uuid, '?')}: {size}another program, {who}"
                yield Note(f"foreign {pid} {uuid}", words, ("used_mib",))

    def _take_io(self, io: Mapping[int, int], now: float) -> None:
        grown = [count - self.io[pid] for pid, count in io.items() if pid in self.io]
        if max(grown, default=0) >= thresholds.MOVED_BYTES:
            self.moved_at = now
        self.io = io

    def _take_processes(self, procs: Processes, host_now: float, cores: float) -> None:
        before = {pid: ticks for pid, _, ticks, *_ in self.procs}
        seconds = max(0.1, host_now - self.procs_at)
        cores_of = {pid: (ticks - before[pid]) / TICKS / seconds for pid, _, ticks, *_ in procs if pid in before}
        self.cpu_of = {pid: 100 * used for pid, used in cores_of.items() if 0 <= used <= thresholds.SLACK * cores}
        self.procs, self.procs_at = procs, host_now

    def _rows(self, on: Sequence[GpuReport]) -> tuple[ProcessRow, ...]:
        place = {pid: (uuid, mib) for pid, uuid, mib in self.apps}
        index_of = {gpu.uuid: gpu.index for gpu in on}
        rows = []
        for pid, state, _, rss, rank, command in self.procs:
            uuid, mib = place.get(pid, ("", None))
            words = _clean_command(command)
            rows.append(ProcessRow(pid, state, self.cpu_of.get(pid), rss, _whole(rank), index_of.get(uuid), mib, words))
        return tuple(rows)


def _apps(answer: str) -> Iterator[tuple[int, str, int | None]]:
    for line in answer[: gpus.MOST_TEXT].splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 3 and (pid := _whole(words[0])) is not None:
            yield pid, words[1], _whole(words[2])


def _whole(text: str) -> int | None:
    return int(text) if WHOLE.fullmatch(text) else None
