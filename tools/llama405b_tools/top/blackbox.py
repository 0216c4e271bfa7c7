"""The last ten minutes of cluster-top, compressed and bounded: the screen goes back in them, and an incident has them written to a file."""

import bisect
import collections
import dataclasses
import gzip
import math
import pickle
import time
import zlib
from pathlib import Path

from llama405b.contract import reader
from llama405b.contract.files import write_atomic
from llama405b.contract.paths import RunDir
from llama405b.contract.plan import RUN_NAME
from llama405b_tools.hosts.hosts_file import state_directory
from llama405b_tools.top.event_sources import LAST_LINE, EventSource, Header
from llama405b_tools.top.intake import SourceEvent
from llama405b_tools.top.state.picture import Picture

KEPT_S, PART_S = 600.0, 10.0
MOST_BYTES = 24 << 20  # of events; as many of pictures
PICTURE_EVERY_S = 2.0
AFTER_S = 20.0  # an incident's file has what followed, too
MOST_FILES = 10  # of a run; then the oldest is deleted


class BlackBox:
    """Takes every event and picture; forgets those that are older than ten minutes, or more than there is room for."""

    def __init__(self, source: EventSource) -> None:
        self.header = _packed(reader.dumps(Header(1, tuple(source.hosts), source.interval_s, source.badge)))
        self.parts = collections.deque[tuple[float, bytes]]()  # when each ends, and its events
        self.lines: list[str] = []  # of the part that is being filled
        self.begun = 0.0
        self.plans: dict[str, SourceEvent] = {}  # by host, the last event that tells the run's plan: it is sent once
        self.pictures = collections.deque[tuple[float, bytes]]()
        self.n_bytes = self.n_picture_bytes = 0
        self.bad_at: float | None = None  # when the incident began that is to be written

    def take(self, event: SourceEvent) -> None:
        """Keep an event."""
        self.lines.append(reader.dumps(event))
        self.begun = self.begun or event.t
        if isinstance(event.frame, dict) and isinstance(run := event.frame.get("run"), dict) and run.get("nodes"):
            self.plans[event.host] = event
        if event.t > self.begun + PART_S:
            self._end_part(event.t)

    def _end_part(self, now: float) -> None:
        part = _packed("\n".join(self.lines))
        self.parts.append((now, part))
        self.n_bytes += len(part)
        self.lines, self.begun = [], 0.0
        while self.parts and (self.parts[0][0] < now - KEPT_S or self.n_bytes > MOST_BYTES):
            self.n_bytes -= len(self.parts.popleft()[1])

    def see(self, pic: Picture) -> None:
        """Keep a picture, unless the last one is as good as new."""
        if self.pictures and 0 <= pic.time - self.pictures[-1][0] < PICTURE_EVERY_S:
            return
        found = zlib.compress(pickle.dumps(pic, pickle.HIGHEST_PROTOCOL), 1)
        self.pictures.append((pic.time, found))
        self.n_picture_bytes += len(found)
        while self.pictures[0][0] < pic.time - KEPT_S or self.n_picture_bytes > MOST_BYTES:
            self.n_picture_bytes -= len(self.pictures.popleft()[1])

    @property
    def span(self) -> tuple[float, float]:
        """From when until when there are pictures."""
        return (self.pictures[0][0], self.pictures[-1][0]) if self.pictures else (0.0, 0.0)

    def at(self, moment: float) -> Picture | None:
        """Return the picture of a moment, or the one before it; None if there is none."""
        index = bisect.bisect_right(self.pictures, moment, key=lambda entry: entry[0])
        if not self.pictures:
            return None
        found: Picture = pickle.loads(zlib.decompress(self.pictures[max(0, index - 1)][1]))
        return found

    def incident(self, pic: Picture) -> Path | None:
        """Write what is kept to a file a while after a run went wrong, once for each time; returns the file.

        Raises:
            OSError: It cannot be written.
        """
        if pic.verdict.exit_code < 3 or pic.training is None or not RUN_NAME.fullmatch(pic.training.run):
            self.bad_at = None
            return None
        if self.bad_at is None:
            self.bad_at = pic.time
        if not self.bad_at <= pic.time - AFTER_S:
            return None
        self.bad_at = math.inf  # it is written only once
        place = _place(pic.training.run)
        path = place / f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(pic.time))}-{pic.verdict.lower()}.gz"
        place.mkdir(parents=True, exist_ok=True, mode=0o700)  # it has lines of logs
        write_atomic(path, self.recording())
        for old in sorted(place.glob("*.gz"))[:-MOST_FILES]:
            old.unlink()
        return path

    def recording(self) -> bytes:
        """Return what is kept as a recording; each part of it is compressed by itself, as gzip allows."""
        first = self.parts[0][0] - PART_S if self.parts else self.begun
        plans = [dataclasses.replace(event, t=first) for event in self.plans.values() if event.t < first]
        known = [_packed("\n".join(map(reader.dumps, plans)))] if plans else []
        rest = [_packed("\n".join(self.lines))] if self.lines else []
        return b"".join([self.header, *known, *(part for _, part in self.parts), *rest, _packed(LAST_LINE)])


def _packed(text: str) -> bytes:
    return gzip.compress(text.encode() + b"\n", 1)


def _place(run: str) -> Path:
    """Where a run's files are: beside its others if it was launched from here, else among what this user's programs keep."""
    here = RunDir.here(run)
    if here.path.is_dir():
        return here.black_box
    return state_directory() / "black-box" / run
