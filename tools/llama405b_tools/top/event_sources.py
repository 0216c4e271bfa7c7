"""The sources of cluster-top's events: samplers on live hosts, or a recording.

Events wait in a queue that is bounded per host, so that a host that sends a lot does not delay the others. A recording is a header
followed by one event per line, as JSON; it is compressed if its name ends in ``.gz``.
"""

import collections
import contextlib
import dataclasses
import gzip
import itertools
import json
import lzma
import math
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Literal

from llama405b.contract import reader
from llama405b.contract.errors import UserError
from llama405b.contract.reader import Json
from llama405b_tools.agent import watching
from llama405b_tools.agent.messages import WatchRequest
from llama405b_tools.hosts import transport
from llama405b_tools.hosts.fleet import Fleet, StreamEndedError
from llama405b_tools.hosts.transport import MAX_LINE, NEEDS_CLEANING, HostError, Stream
from llama405b_tools.text.words import CONTROLS, LogEntry, LogMerger, clean, clean_value
from llama405b_tools.top.state import thresholds
from llama405b_tools.top.state.picture import HostState

DEMO_RECORDING = Path(__file__).with_name("demo.jsonl.xz")  # tests/rigs/simulate.py wrote it
MAX_WAITING_NEWS = 4  # queued frames and links per host; beyond that, the host has to wait
MAX_WAITING_BLOCKS = 2000  # queued log blocks per host; beyond that, the oldest are dropped and counted
MAX_BLOCKS_TAKEN = 4000  # log blocks taken at once from all hosts: about 0.1 s of work


@dataclasses.dataclass(frozen=True, slots=True)
class SourceEvent:
    """Data that arrived from a host, or an event on this machine."""

    t: float  # operator's clock, seconds since the epoch
    host: str
    frame: Json = None  # JSON from the sampler; the cluster parses it
    link: tuple[str, str] | None = None  # state and why
    entries: tuple[tuple[float, str, str], ...] = ()  # log blocks: operator's clock, file, text
    dropped: int = 0  # log lines of the host that were dropped because they came too fast
    note: str = ""


class EventQueue:
    """A bounded queue filled by many threads and emptied by one."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.news: dict[str, collections.deque[SourceEvent]] = collections.defaultdict(collections.deque)
        self.blocks = LogMerger(MAX_WAITING_BLOCKS)
        self.closed = False

    def put(self, event: SourceEvent) -> None:
        """Add an event; wait while the host's queue is full."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or len(self.news[event.host]) < MAX_WAITING_NEWS)
            self.news[event.host].append(event)
            self.changed.notify_all()

    def put_block(self, entry: LogEntry) -> None:
        """Add a log block without waiting."""
        with self.changed:
            self.blocks.push(entry.host, [entry])
            self.changed.notify_all()

    def drop(self, host: str, lines: int) -> None:
        """Count log lines that were dropped before they got here."""
        with self.changed:
            self.blocks.drop(host, lines)
            self.changed.notify_all()

    def take(self, timeout_s: float) -> list[SourceEvent]:
        """Wait for events; return a bounded number of them, oldest first."""
        with self.changed:
            self.changed.wait_for(self._has_any, timeout_s)
            news = sorted(itertools.chain.from_iterable(self.news.values()), key=lambda event: event.t)
            self.news.clear()
            blocks = list(itertools.islice(self.blocks.pop(math.inf), MAX_BLOCKS_TAKEN))
            dropped, self.blocks.dropped = self.blocks.dropped, {}
            self.changed.notify_all()
        now = time.time()
        news += [SourceEvent(now, entry.host, entries=((entry.time, entry.file, entry.text),)) for entry in blocks]
        return news + [SourceEvent(now, host, dropped=lines) for host, lines in dropped.items()]

    def close(self) -> None:
        """Close the queue and wake all waiting threads."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def _has_any(self) -> bool:
        return bool(self.blocks.dropped or any(self.news.values()) or any(self.blocks.waiting.values()))


RETRY_S = 5.0
AGENT_RETRY_S = 300.0  # on a host where no agent could run
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.2, 60.0
MAX_FRAME = 4 << 20  # characters; frames of a host with many processes have a tenth of this
MAX_OTHER_LINES = 1000  # lines that are no frames, such as output of a shell's start-up files
END_OF_TIME = 1e11  # seconds since the epoch; the latest that datetime can format
GZIP = b"\x1f\x8b"  # how a gzip file begins (RFC 1952)
XZ = b"\xfd7"
LAST_LINE = '{"end": true}'  # of a complete recording


@dataclasses.dataclass(frozen=True, slots=True)
class RecordingHeader:
    """The first line of a recording."""

    llama405b_recording: int
    hosts: tuple[str, ...]
    interval_s: float
    badge: str = ""

    def __post_init__(self) -> None:
        """Refuse an invalid header."""
        if not self.hosts or any(CONTROLS.search(word) for word in (*self.hosts, self.badge)):
            raise ValueError
        if not MIN_INTERVAL_S <= self.interval_s <= MAX_INTERVAL_S:
            raise ValueError


class _SilenceWatch:
    """Watches how long a host's stream has been silent, and decides when to reconnect."""

    def __init__(self, interval_s: float) -> None:
        self.min_limit_s = max(thresholds.QUIET_S, thresholds.QUIET_FRAMES * interval_s)
        self.limit_s = self.min_limit_s
        self.since = 0.0
        self.gave_up_after_s = 0.0

    def on_open(self, now: float) -> None:
        self.since, self.gave_up_after_s = now, 0.0

    def on_frame(self, now: float, *, of_agent: bool) -> None:
        """Note a frame; after one of an agent, the next silence may be as short as any."""
        self.since = now
        if of_agent:
            self.limit_s = self.min_limit_s

    def gives_up(self, now: float) -> bool:
        """Return True once when the silence exceeds the limit, which then doubles."""
        silent_s = now - self.since
        if self.gave_up_after_s or silent_s <= self.limit_s:
            return False
        self.gave_up_after_s, self.limit_s = silent_s, min(2 * self.limit_s, thresholds.MAX_QUIET_S)
        return True


class LiveSource:
    """An agent or a sampler on every host, over connections that are reopened when they break."""

    def __init__(self, fleet: Fleet, run: str | None, interval_s: float, *, files_are_local: bool = False) -> None:
        """``files_are_local``: the hosts' files are on this machine, but the hosts are other machines."""
        self.fleet = fleet
        self.interval_s = interval_s
        self.badge = ""
        self.request = WatchRequest(
            "", run, "", interval_s, thresholds.DEAF_S, thresholds.SMI_RETRY_S, elsewhere=files_are_local
        )
        self.hosts: Sequence[str] = list(fleet.hosts)
        self.intake = EventQueue()
        self.streams: dict[str, Stream] = {}
        self.hardware_until: dict[str, float] = {}  # by host where no agent runs: when to try again
        self.run_faults: dict[str, str] = {}  # and why
        self.silence = {name: _SilenceWatch(interval_s) for name in self.hosts}
        self.closing, self.outgoing = threading.Event(), threading.Event()
        for name in self.hosts:
            fleet.keep_listening(name, self._listen, self._report_break, self.closing, RETRY_S)
        threading.Thread(target=self._ping, daemon=True).start()

    def now(self) -> float:
        """The moment on this source's clock."""
        return time.time()

    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return False

    def events(self, until: float) -> Iterator[SourceEvent]:
        """Yield the events up to a moment of this source's clock; wait at most until then for the first."""
        yield from self.intake.take(until - time.time())

    def follow_run(self, run: str) -> None:
        """Make all hosts that know the run report it; '': the newest live run."""
        if run != self.request.stay:
            self.request = dataclasses.replace(self.request, stay=run)
            self.outgoing.set()

    def close(self) -> None:
        """Close all streams; a sampler exits when its stdin closes, so nothing stays on the hosts."""
        self.closing.set()
        self.outgoing.set()
        self.intake.close()
        for stream in list(self.streams.values()):
            stream.close()

    def _report_break(self, name: str, why: HostError) -> None:
        self.intake.put(SourceEvent(time.time(), name, link=(HostState(why.kind), str(why))))

    def _listen(self, name: str) -> None:
        """Queue the frames of a host until they end.

        They come from an agent, or, where none can run, from the sampler alone, which knows of no run; the agent is then tried
        again later.
        """
        while not self.closing.is_set():
            request = dataclasses.replace(self.request, host=name, slots=self.fleet.expected_gpus(name))
            if name in self.hardware_until:
                try:
                    last_line = self._read_sampler(name, request)
                finally:  # whatever ended it, the agent is next
                    is_due = self.hardware_until.pop(name, None) is None
                if not is_due:
                    raise StreamEndedError(f"the sampler ended: {last_line or 'it printed nothing'}")
                continue
            n_frames, last_line = self._read_frames(name, self.fleet.stream(name, watching.watch, request))
            if n_frames or self.closing.is_set():
                self.run_faults.pop(name, None)
                raise StreamEndedError(f"the agent ended: {last_line or 'it printed nothing'}")
            why, is_known = str(self.fleet.explain_fault(name, last_line)), bool(last_line or name in self.run_faults)
            self.run_faults[name] = why
            # This machine's hardware is not that of a host elsewhere; what ends without a word may be the connection.
            if request.elsewhere or not is_known:
                raise StreamEndedError(why)
            self.hardware_until[name] = time.time() + AGENT_RETRY_S

    def _read_sampler(self, name: str, request: WatchRequest) -> str:
        """Queue the frames of a sampler alone."""
        options = dataclasses.asdict(request) | {"workdir": self.fleet.workdir(name)}
        stdin = transport.standalone_input("sampler", options)
        stream = self.fleet.connection(name).stream(transport.standalone_command("sampler"), stdin)
        return self._read_frames(name, stream, self.run_faults[name])[1]

    def _read_frames(self, name: str, stream: Stream, run_fault: str = "") -> tuple[int, str]:
        """Queue frames until the stream ends; return how many came, and the last line that is none.

        ``run_fault``: why they know of no run.
        """
        silence, self.streams[name] = self.silence[name], stream
        silence.on_open(time.time())
        last_line, n_frames, n_others = "", 0, 0
        if self.closing.is_set():  # closed since the caller's check
            stream.close()
        self.intake.put(SourceEvent(time.time(), name, link=(HostState.OK, "")))
        for line in stream:
            try:
                frame = _parse_frame(line)
            except ValueError:
                last_line, n_others = clean(line[:200]), n_others + 1
                if n_others > MAX_OTHER_LINES:
                    stream.close()
                    raise HostError(f"sends lines that are not frames, such as {last_line!r}") from None
                continue
            if silence.gave_up_after_s:  # what a closed stream still had comes too late
                continue
            silence.on_frame(time.time(), of_agent=not run_fault)
            n_frames += 1
            if run_fault and isinstance(frame, dict):
                frame["run_fault"] = run_fault
            self.intake.put(SourceEvent(time.time(), name, frame=frame))
        if silence.gave_up_after_s:
            # Its Python may hang; the next connection tells, or it is the host.
            if not n_frames and name not in self.hardware_until and not self.request.elsewhere:
                self.hardware_until[name] = time.time() + AGENT_RETRY_S
                self.run_faults[name] = f"its python printed nothing for {silence.gave_up_after_s:.0f} s"
            raise HostError(f"sent nothing for {silence.gave_up_after_s:.0f} s; reconnecting", "TIMEOUT")
        return n_frames, last_line

    def _ping(self) -> None:
        """Send requests and keep-alives: a sampler exits if it receives nothing for a minute.

        Silent streams are closed: a socket does not show that a host, its sshd or a sampler is frozen.
        """
        while not self.closing.is_set():
            self.outgoing.wait(thresholds.PING_S)
            self.outgoing.clear()
            line = json.dumps({"stay": self.request.stay})
            for name, stream in list(self.streams.items()):
                is_due = self.hardware_until.get(name, math.inf) < time.time()
                if is_due:
                    self.hardware_until.pop(name, None)
                if is_due or self.silence[name].gives_up(time.time()):
                    stream.close()
                with contextlib.suppress(HostError):
                    stream.send(f"{line}\n")


def _parse_frame(line: str) -> Json:
    """Parse a frame."""
    if len(line) > MAX_FRAME:
        raise HostError(f"its sampler sends more than {MAX_FRAME >> 20} MiB at once")
    frame: Json = json.loads(line)
    return clean_value(frame, lines=True) if NEEDS_CLEANING.search(line) else frame


class ReplaySource:
    """Plays the events of a recording at ``speed`` times their original speed."""

    def __init__(self, header: RecordingHeader, events: Iterator[SourceEvent], badge: str, speed: float = 1.0) -> None:
        self.hosts: Sequence[str] = header.hosts
        self.interval_s = header.interval_s
        self.badge = badge
        self.speed = speed
        self.remaining = events
        self.next_event: SourceEvent | None = next(events, None)
        self.begin_time = self.next_event.t if self.next_event else 0.0
        self.last_time = self.begin_time  # time of the last event yielded
        self.began_at = time.monotonic()

    def now(self) -> float:
        """Return the current time on this source's clock, which is the recording's."""
        return (
            self.last_time
            if self.next_event is None
            else self.begin_time + (time.monotonic() - self.began_at) * self.speed
        )

    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return self.next_event is None

    def events(self, until: float) -> Iterator[SourceEvent]:
        """Yield the events up to a moment of this source's clock; wait until then."""
        yield from self._up_to(until)
        time.sleep(max(0.0, (until - self.now()) / self.speed) if self.speed else 0.0)

    def skip(self, seconds: float) -> None:
        """Skip forward by this many seconds."""
        self.begin_time += seconds

    def play(self, speed: float) -> None:
        """Set the speed, in seconds of the recording per second; 0 pauses."""
        self.begin_time, self.began_at, self.speed = self.now(), time.monotonic(), speed

    def remaining_events(self) -> Iterator[SourceEvent]:
        """Yield all remaining events without waiting; the clock then stays at the last event."""
        return self._up_to(math.inf)

    def _up_to(self, until: float) -> Iterator[SourceEvent]:
        while self.next_event and self.next_event.t <= until:
            event, self.next_event = self.next_event, next(self.remaining, None)
            self.last_time = event.t
            yield event

    def close(self) -> None:
        """Do nothing: no stream is open."""


EventSource = LiveSource | ReplaySource


def open_replay(name: str, speed: float) -> ReplaySource:
    """Open a recording, or the one of a simulated incident that ships with the program (``demo``).

    Raises:
        UserError: The file cannot be read, or is not a recording.
    """
    path = DEMO_RECORDING if name == "demo" else Path(name)
    try:
        lines = _read_lines(path)
        header = reader.loads(RecordingHeader, next(lines, ""), "header")
    except (ValueError, gzip.BadGzipFile, zlib.error, lzma.LZMAError):
        raise UserError(f"--replay: {path} is not a recording of cluster-top; make one with --record") from None
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or "it is truncated"
        raise UserError(f"--replay: {path} cannot be read ({reason}); name a recording, or demo") from None
    return ReplaySource(header, _parse_events(lines, set(header.hosts)), header.badge or "RECORDED", speed)


def _read_lines(path: Path) -> Iterator[str]:
    with path.open("rb") as raw:
        first_bytes = raw.read(2)
    with _open_file(path, "rt", {GZIP: ".gz", XZ: ".xz"}.get(first_bytes, "")) as file:
        while line := file.readline(MAX_LINE):
            yield line


def _parse_events(lines: Iterator[str], hosts: set[str]) -> Iterator[SourceEvent]:
    """Yield the events up to the end or the first invalid line: the machine may have died while recording."""
    last_time, is_complete = 0.0, False
    with contextlib.suppress(ValueError, OSError, EOFError, RecursionError, zlib.error, lzma.LZMAError):
        for line in lines:
            is_complete = line.strip() == LAST_LINE
            value = json.loads(line)
            with contextlib.suppress(reader.MalformedError):
                event = reader.build_record(SourceEvent, value, "event")
                if event.host in hosts and 0 <= event.t < END_OF_TIME:
                    last_time = event.t
                    yield event
    words = "the recording ends" if is_complete else "the recording is truncated here"
    yield SourceEvent(last_time, max(hosts), note=words)


def _open_file(path: Path, mode: Literal["rt", "xt"], suffix: str) -> IO[str]:
    if suffix == ".gz":
        return gzip.open(path, mode, encoding="utf-8")
    if suffix == ".xz":
        return lzma.open(path, mode, encoding="utf-8")
    return path.open(mode, encoding="utf-8")


class Recorder:
    """Writes a source's events to a file."""

    def __init__(self, path: Path, source: EventSource) -> None:
        """Begin a recording.

        Raises:
            UserError: The file exists or cannot be written.
        """
        try:
            self.file = _open_file(path, "xt", path.suffix)
        except FileExistsError:
            raise UserError(f"--record: {path} exists; use another name") from None
        except OSError as error:
            raise UserError(f"--record: {path} cannot be written ({error.strerror}); use another file") from None
        self._write(reader.dumps(RecordingHeader(1, tuple(source.hosts), source.interval_s, source.badge)))

    def write(self, event: SourceEvent) -> None:
        """Add an event.

        Raises:
            OSError: The disk is full.
        """
        self._write(reader.dumps(event))

    def close(self) -> None:
        """Finish the file."""
        with contextlib.suppress(OSError):
            self._write(LAST_LINE)
        with contextlib.suppress(OSError):
            self.file.close()

    def _write(self, line: str) -> None:
        self.file.write(line + "\n")
