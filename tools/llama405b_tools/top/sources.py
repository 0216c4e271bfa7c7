"""Where cluster-top's events come from: samplers on live hosts, a recording, or the simulated incident.

A recording is a header and then an event per line, as JSON; with a name that ends in ``.gz`` it is compressed.
"""

import contextlib
import dataclasses
import gzip
import itertools
import json
import math
import queue
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Literal

from llama405b.contract import reader
from llama405b.contract.errors import UserError
from llama405b.contract.reader import Json
from llama405b_tools.hosts.fleet import MAX_AT_ONCE, Fleet
from llama405b_tools.hosts.transport import HostError, Stream
from llama405b_tools.remote import carried
from llama405b_tools.text.clean import CONTROLS, clean
from llama405b_tools.top.state import simulate
from llama405b_tools.top.state.picture import HostState

RETRY_S = 5.0
PING_S = 10.0
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.2, 60.0
MAX_LINE = 1 << 24
END_OF_TIME = 1e11  # seconds since the epoch; what calendars can write
GZIP = b"\x1f\x8b"  # how such a file begins (RFC 1952)
LAST_LINE = '{"end": true}'  # of a recording that is whole


@dataclasses.dataclass(frozen=True, slots=True)
class SourceEvent:
    """One thing that arrived, or happened here."""

    t: float  # operator's clock, seconds since the epoch
    host: str
    frame: Json = None  # from the sampler, as JSON has it: the cluster reads it
    link: tuple[str, str] | None = None  # state and why
    entries: tuple[tuple[float, str, str], ...] = ()  # log blocks: operator's clock, file, text
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """What a recording begins with."""

    llama405b_recording: int
    hosts: tuple[str, ...]
    interval_s: float
    badge: str = ""

    def __post_init__(self) -> None:
        """Refuse what no recording begins with.

        Raises:
            ValueError: It is such.
        """
        if not self.hosts or any(CONTROLS.search(word) for word in (*self.hosts, self.badge)):
            raise ValueError
        if not MIN_INTERVAL_S <= self.interval_s <= MAX_INTERVAL_S:
            raise ValueError


class Live:
    """A sampler on every host, over a kept connection; one that breaks is made again."""

    def __init__(self, fleet: Fleet, run: str | None, interval_s: float, *, elsewhere: bool = False) -> None:
        """``elsewhere``: the hosts' files are on this machine, but the hosts are others."""
        self.fleet, self.interval_s, self.badge = fleet, interval_s, ""
        self.request = {"run": run, "stay": "", "interval_s": interval_s, "elsewhere": elsewhere}
        self.hosts: Sequence[str] = list(fleet.hosts)
        self.arrived: queue.SimpleQueue[SourceEvent] = queue.SimpleQueue()
        self.open: dict[str, Stream] = {}
        self.closing, self.news = threading.Event(), threading.Event()
        self.connecting = threading.BoundedSemaphore(MAX_AT_ONCE)
        for name in self.hosts:
            threading.Thread(target=self._pump, args=(name,), daemon=True).start()
        threading.Thread(target=self._ping, daemon=True).start()

    def now(self) -> float:
        """The moment on this source's clock."""
        return time.time()

    def done(self) -> bool:
        """Whether nothing more will come."""
        return False

    def events(self, until: float) -> Iterator[SourceEvent]:
        """What happened up to a moment of this source's clock; waits for the first until then."""
        with contextlib.suppress(queue.Empty):
            yield self.arrived.get(timeout=max(0.0, until - time.time()))
            while True:
                yield self.arrived.get_nowait()

    def stay(self, run: str) -> None:
        """Have every host that knows a run tell of it, whatever else lives there; '': of the newest that lives."""
        if run != self.request["stay"]:
            self.request["stay"] = run
            self.news.set()

    def close(self) -> None:
        """Let go of everything: a sampler ends with its standard input, and nothing stays on the hosts."""
        self.closing.set()
        self.news.set()
        for stream in list(self.open.values()):
            stream.close()

    def _pump(self, name: str) -> None:
        while not self.closing.is_set():
            try:
                said = self._listen(name)
                kind, why = HostState.DOWN, f"the sampler ended: {said or 'it said nothing'}"
                self.fleet.forget(name, unless_open=True)
            except HostError as error:
                kind, why = HostState(error.kind), str(error)
                self.fleet.forget(name)
            except Exception as error:  # noqa: BLE001 - said on screen, which goes on
                kind, why = HostState.DOWN, str(error) or type(error).__name__
            if self.closing.is_set():
                return
            self.arrived.put(SourceEvent(time.time(), name, link=(kind, why)))
            self.closing.wait(RETRY_S)

    def _listen(self, name: str) -> str:
        """Take frames until they end; the last line that was none says why."""
        request = {"workdir": self.fleet.workdir(name), "host": name} | self.request
        stdin = carried.standard_input("sampler", request)
        with self.connecting:  # not all at once: a handshake that waits for its turn too long fails
            connection = self.fleet.connection(name)
            stream = self.open[name] = connection.stream(carried.command("sampler"), stdin)
        last = ""
        if self.closing.is_set():  # meanwhile
            stream.close()
        self.arrived.put(SourceEvent(time.time(), name, link=(HostState.OK, "")))
        for line in stream:
            try:
                frame = json.loads(line)
            except ValueError:
                last = clean(line)[:200]
                continue
            self.arrived.put(SourceEvent(time.time(), name, frame=frame))
        return last

    def _ping(self) -> None:
        """Say what is new, and that somebody is there: a sampler that hears nothing for a minute ends."""
        while not self.closing.is_set():
            self.news.wait(PING_S)
            self.news.clear()
            line = json.dumps({"stay": self.request["stay"]})
            for stream in list(self.open.values()):
                with contextlib.suppress(HostError):
                    stream.send(f"{line}\n")


class Replay:
    """Events of a recording, as fast as they came (times ``speed``)."""

    def __init__(self, header: Header, events: Iterator[SourceEvent], badge: str, speed: float = 1.0) -> None:
        self.hosts: Sequence[str] = header.hosts
        self.interval_s, self.badge, self.speed = header.interval_s, badge, speed
        self.rest = events
        self.next: SourceEvent | None = next(events, None)
        self.begin = self.next.t if self.next else 0.0
        self.last = self.begin  # of what was yielded
        self.began = time.monotonic()

    def now(self) -> float:
        """The moment on this source's clock: the recording's."""
        return self.last if self.next is None else self.begin + (time.monotonic() - self.began) * self.speed

    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.next is None

    def events(self, until: float) -> Iterator[SourceEvent]:
        """What happened up to a moment of this source's clock; waits until then."""
        yield from self._up_to(until)
        time.sleep(max(0.0, (until - self.now()) / self.speed))

    def to_the_end(self) -> Iterator[SourceEvent]:
        """All that is left, at once; the clock stands at the last of it."""
        return self._up_to(math.inf)

    def _up_to(self, until: float) -> Iterator[SourceEvent]:
        while self.next and self.next.t <= until:
            event, self.next = self.next, next(self.rest, None)
            self.last = event.t
            yield event

    def close(self) -> None:
        """Nothing is open."""


EventSource = Live | Replay


def replay(name: str, speed: float, demo_hosts: int = 8) -> Replay:
    """Open a recording, or the simulated incident (``demo``).

    Raises:
        UserError: The file cannot be read, or is no recording.
    """
    if name == "demo":
        names = simulate.names(demo_hosts)
        end = SourceEvent(simulate.BEGIN + simulate.LENGTH_S, names[-1], note="the incident ends")
        incident = (reader.read(SourceEvent, each, "event") for each in simulate.incident(demo_hosts))
        return Replay(Header(1, tuple(names), 2.0), itertools.chain(incident, [end]), "SIMULATED", speed)
    path = Path(name)
    try:
        lines = _lines(path)
        header = reader.loads(Header, next(lines, ""), "header")
    except (ValueError, gzip.BadGzipFile, zlib.error):
        raise UserError(f"--replay: {path} is not a recording of cluster-top; make one with --record") from None
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or "it is cut short"
        raise UserError(f"--replay: {path} cannot be read ({reason}); name a recording, or demo") from None
    return Replay(header, _parsed(lines, set(header.hosts)), header.badge or "RECORDED", speed)


def _lines(path: Path) -> Iterator[str]:
    with path.open("rb") as raw:
        zipped = raw.read(2) == GZIP
    with _opened(path, "rt", zipped=zipped) as file:
        while line := file.readline(MAX_LINE):
            yield line


def _parsed(lines: Iterator[str], hosts: set[str]) -> Iterator[SourceEvent]:
    """The events, up to where the file ends or stops making sense: a recording may end with its machine."""
    last, whole = 0.0, False
    with contextlib.suppress(ValueError, OSError, EOFError, RecursionError, zlib.error):
        for line in lines:
            whole = line.strip() == LAST_LINE
            value = json.loads(line)
            with contextlib.suppress(reader.MalformedError):
                event = reader.read(SourceEvent, value, "event")
                if event.host in hosts and 0 <= event.t < END_OF_TIME:
                    last = event.t
                    yield event
    words = "the recording ends" if whole else "the recording is cut short here; what came after is not known"
    yield SourceEvent(last, max(hosts), note=words)


def _opened(path: Path, mode: Literal["rt", "xt"], *, zipped: bool) -> IO[str]:
    if zipped:
        return gzip.open(path, mode, encoding="utf-8")
    return path.open(mode, encoding="utf-8")


class Recorder:
    """Writes what a source yields to a file."""

    def __init__(self, path: Path, source: EventSource) -> None:
        """Begin a recording.

        Raises:
            UserError: The file exists or cannot be written.
        """
        try:
            self.file = _opened(path, "xt", zipped=path.suffix == ".gz")
        except FileExistsError:
            raise UserError(f"--record: {path} exists; take another name") from None
        except OSError as error:
            raise UserError(f"--record: {path} cannot be written ({error.strerror}); name another") from None
        self._write(reader.dumps(Header(1, tuple(source.hosts), source.interval_s, source.badge)))

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
