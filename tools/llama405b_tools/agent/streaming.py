"""A run's logs and records on this host, as they grow. Runs on the host; standard library only.

Follows growing files, and merges the logs of one run into blocks in order of time. Log files appear as attempts start. A block's
time comes from the line itself or from ``logs/<host>/times``, where the node runner records when each part of each file arrived.
"""

import bisect
import dataclasses
import itertools
import math
import os
import re
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

from llama405b.contract import reader
from llama405b.contract.files import read_record, read_records
from llama405b.contract.paths import RunDir
from llama405b.contract.records import METRICS_LINE, Blame, NodeStatus, RunEvent
from llama405b.spec.plan import Plan, read_plan
from llama405b_tools.agent import processes
from llama405b_tools.agent.describe import beats_of, lives, stopped_by
from llama405b_tools.agent.messages import BEATS_EVERY_S, NodeUpdate, StreamMessage, StreamRequest
from llama405b_tools.agent.processes import run_of
from llama405b_tools.text.words import (
    MAX_LINE_BYTES,
    Block,
    Blocks,
    Entry,
    Merge,
    Pieces,
    hide_in_json,
    pieces_of,
    split_lines,
    time_of,
)

MAX_READ_BYTES = 1 << 20  # of one file at a time, so that a flood in one does not silence the others
Mark = tuple[int, int]  # inode and position: a file may be replaced by a longer one


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Whole lines added to a file."""

    path: Path
    begin: int  # of ``data`` in the file
    data: bytes


def whole_characters(data: bytes) -> int:
    """Return how many bytes come before an incomplete last UTF-8 character."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            return len(data) - back if back < 2 + (byte >= 0xE0) + (byte >= 0xF0) else len(data)
        if byte < 0x80:
            break
    return len(data)


class Tail:
    """Follows a file, or every ``*.log`` file below a directory, including files created later."""

    def __init__(
        self,
        root: Path,
        *,
        wants: Callable[[Path], bool] = lambda _: True,
        from_end: bool = False,
        most_bytes: int = 0,
        states: bool = False,
    ) -> None:
        """Begin at the files' present ends, or at their beginnings.

        ``wants`` selects files; ``most_bytes``: only this much of the end of new data is read (0: all of it), after
        the part that ``begin_at`` exempts. ``states``: a carriage return ends a piece, too. A line longer than MAX_LINE_BYTES comes in
        pieces.
        """
        self.states = states
        self.root = root
        self.wants = wants
        self.most_bytes = most_bytes
        self.n_skipped = 0  # lines
        self.rewritten = set[Path]()  # of which an unread end may be lost
        self.marks: dict[Path, Mark] = {}
        self.whole_to: dict[Path, int] = {}  # up to there nothing is skipped
        if from_end:
            self.marks = {path: (path.stat().st_ino, path.stat().st_size) for path in self.files()}

    def files(self) -> list[Path]:
        """Return the files that exist now."""
        found = [self.root] if self.root.is_file() else sorted(self.root.rglob("*.log"))
        return [path for path in found if self.wants(path) and path.is_file()]

    def begin_at(self, path: Path, mark: Mark, whole_to: int = 0) -> None:
        """Continue where an earlier reader stopped; nothing before ``whole_to`` is skipped."""
        self.marks[path], self.whole_to[path] = mark, whole_to

    def new(self, *, final: bool = False) -> Iterator[Chunk]:
        """Yield what was added, at most one chunk per file; ``final``: include a last line without a newline."""
        for path in self.files():
            yield from self.new_of(path, final=final)

    def new_of(self, path: Path, *, final: bool = False) -> Iterator[Chunk]:
        """Yield what was added to one file, at most one chunk."""
        try:
            with path.open("rb") as file:
                inode, begin = self._begin_of(path, file)
                file.seek(begin)
                block = file.read(MAX_READ_BYTES)
        except OSError:
            return
        end = block.rfind(b"\n") + 1
        if self.states:
            end = max(end, block.rfind(b"\r", 0, -1) + 1)  # the last byte may be half of a line's end
        too_long = not end and len(block) >= MAX_LINE_BYTES
        if final and len(block) < MAX_READ_BYTES:
            end = len(block)
        elif too_long:
            end = whole_characters(block)
        self.marks[path] = (inode, begin + end)
        if end:
            yield Chunk(path, begin, block[:end])

    def _begin_of(self, path: Path, file: BinaryIO) -> Mark:
        """Return a file's inode and the offset to read from."""
        inode, offset = self.marks.get(path, (0, 0))
        now = os.fstat(file.fileno())
        if now.st_ino != inode or now.st_size < offset:  # truncated, or another file
            if offset:
                self.rewritten.add(path)
            offset = 0
        is_whole = offset < self.whole_to.get(path, 0)
        if self.most_bytes and not is_whole and now.st_size - offset > self.most_bytes:
            offset = self._skip(file, offset, now.st_size - self.most_bytes)
        return now.st_ino, offset

    def _skip(self, file: BinaryIO, begin: int, end: int) -> int:
        """Count the lines up to about ``end``, and return where the next one begins."""
        file.seek(begin)
        while block := file.read(min(MAX_READ_BYTES, end - file.tell())):
            self.n_skipped += block.count(b"\n")
        rest = file.readline(MAX_LINE_BYTES)
        state = rest.find(b"\r") + 1 if self.states else 0
        self.n_skipped += not state and rest.endswith(b"\n")
        return file.tell() - (len(rest) - state if state else 0)

    def all(self, *, final: bool = False) -> Iterator[Chunk]:
        """Yield chunks until nothing is left."""
        while found := list(self.new(final=final)):
            yield from found


ATTEMPT_DIR = re.compile(r".+-(\d+)-[0-9a-f]{8}_\w+")
ATTEMPT_LINE = b"\nattempt "
BATCH, BATCH_CHARS = 500, 1 << 19  # entries in one message, and their text: as JSON, up to twelve times as many bytes
RECORDS = 1000  # in one message
REWRITTEN = "[this log was truncated or replaced; lines that had not been read are lost]"
STATE_EVERY_S = 2.0  # a bar's
STILL_S = 2.0  # after which a line that has not ended is told
LAST_BYTES, LINE_BYTES = 1 << 22, 1 << 12  # in which the last lines are looked for, and more for many: for each so much
AGENT_LOG = "torchrun.log"
LONG_POLL_S, SHORT_POLL_S = 1.0, 0.05  # at most, under a flood of lines: the host's state is news, too


class HostLogs:
    """Reads new entries of a run's logs."""

    def __init__(self, run: RunDir, host: str, request: StreamRequest) -> None:
        self.run = run
        self.host = host
        self.request = request
        self.root = run.logs(host)
        marked = [int(m[1]) for file in request.marks if (m := ATTEMPT_DIR.fullmatch(file.split("/")[0]))]
        newest = read_plan(run).attempt
        self.attempt = request.attempt or min([newest, *marked])  # a reader that returns continues where it was
        self.follow_attempts = request.attempt == 0
        self.tail = Tail(self.root, wants=self._wants, most_bytes=request.most_bytes, states=not request.whole)
        self.poll_s = SHORT_POLL_S if request.most_bytes else LONG_POLL_S
        self.times = Times(run.times(host))
        self.blocks: dict[str, Blocks | Pieces] = {}
        self.idle: set[str] = set()
        self.still = dict[str, float]()  # since when a file is as it is
        self.told = dict[str, float]()  # when a bar's state was told
        self.merge = Merge()
        self.utc_offset_s = float(time.localtime().tm_gmtoff)
        self.marks: dict[str, tuple[int, int]] = {}
        for file, (inode, offset) in request.marks.items():
            self.marks[file] = (inode, offset)
            self.tail.begin_at(self.root / file, (inode, offset))

    def poll(self, *, final: bool) -> Iterator[StreamMessage]:
        """Yield messages until nothing is left, or for a while: entries, and the offsets after them."""
        batch: list[Entry] = []
        until = math.inf if final else time.monotonic() + self.poll_s
        while self._read(final=final):
            *full, batch = _parts([*batch, *self.merge.pop()])
            yield from map(self._message, full)
            if time.monotonic() > until:
                break
        else:
            batch += self.merge.pop(math.inf)
        yield from map(self._message, filter(None, _parts(batch)))

    def _message(self, batch: list[Entry]) -> StreamMessage:
        for entry in batch:
            self.marks[entry.file] = (self.tail.marks[self.root / entry.file][0], entry.end)
        marks = {entry.file: self.marks[entry.file] for entry in batch}
        entries = tuple((entry.time, entry.file, entry.text) for entry in batch)
        skipped, self.tail.n_skipped = self.tail.n_skipped, 0
        return StreamMessage(entries=entries, marks=marks, now=time.time(), skipped=skipped)

    def _read(self, *, final: bool) -> bool:
        """Read a chunk of every file that has no entries waiting; return whether there was anything."""
        self.times.read()
        found = False
        for path in self.tail.files():
            file = str(path.relative_to(self.root))
            if file not in self.blocks:
                self.blocks[file] = Pieces() if self.request.whole else Blocks()
                self._set_begin(path, file)
            if self.merge.size(file):
                found = True
                continue
            if self._read_file(path, file, final=final):
                found = True
            else:
                self.merge.end(file)
        return found

    def _read_file(self, path: Path, file: str, *, final: bool) -> bool:
        """Read a chunk of a file; return whether there was anything."""
        now, blocks = time.monotonic(), self.blocks[file]
        is_still = self.request.follow and now > self.still.setdefault(file, now) + STILL_S
        chunk = next(iter(self.tail.new_of(path, final=final or is_still)), None)
        found: list[Block] = []
        if path in self.tail.rewritten:
            self.tail.rewritten.discard(path)
            found += [*blocks.flush(), Block(0, 0, REWRITTEN)]
        if chunk:
            self.still[file] = now
            self.idle.discard(file)
            found += blocks.feed(chunk.begin, chunk.data)
        elif final:
            found += blocks.flush()
        elif file in self.idle:
            found += blocks.flush_lines()
        else:  # a block that may continue waits for one more pass
            self.idle.add(file)
        if self.request.follow and now > self.told.get(file, 0.0) + STATE_EVERY_S:
            found += (states := list(blocks.states(still=is_still)))
            self.told[file] = now if states else 0.0
        if not (chunk or found):
            return False
        self.merge.push(file, [self._entry(file, block.text, block.end) for block in found])
        return True

    def _entry(self, file: str, text: str, end: int) -> Entry:
        arrived = self.times.of(file, end) or (self.root / file).stat().st_mtime
        return Entry(time_of(text, arrived, self.utc_offset_s), self.host, file, text, end)

    def _wants(self, path: Path) -> bool:
        parts = path.relative_to(self.root).parts
        if parts == (AGENT_LOG,):
            return self.request.agent
        match = ATTEMPT_DIR.fullmatch(parts[0])
        if not match or (self.request.stderr and parts[-1] != "stderr.log"):
            return False
        attempt = int(match[1])
        return self.attempt < 0 or attempt == self.attempt or (self.follow_attempts and attempt > self.attempt)

    def _set_begin(self, path: Path, file: str) -> None:
        """Set where to begin in a file that appears for the first time."""
        if file in self.marks:
            return
        info, offset = path.stat(), 0
        if file == AGENT_LOG and self.attempt > 0:
            offset = max(0, path.read_bytes().rfind(ATTEMPT_LINE + f"{self.attempt}:".encode()) + 1)
        if self.request.since_s:
            offset = max(offset, self.times.begin_of(file, time.time() - self.request.since_s))
        if self.request.tail is not None:
            offset = max(offset, _start_of_last(path, self.request.tail))
        self.tail.begin_at(path, (info.st_ino, offset), whole_to=info.st_size if self.request.follow else 0)


class Times:
    """Arrival times of the parts of the log files: lines ``<seconds> <end in bytes> <file>``."""

    def __init__(self, path: Path) -> None:
        self.source = Tail(path)
        self.ends: dict[str, list[int]] = {}
        self.seconds: dict[str, list[float]] = {}

    def read(self) -> None:
        """Read new lines."""
        for piece in self.source.all():
            for line in piece.data.decode("utf-8", "replace").splitlines():
                words = line.split(" ", 2)
                if len(words) == 3:
                    self.ends.setdefault(words[2], []).append(int(words[1]))
                    self.seconds.setdefault(words[2], []).append(float(words[0]))

    def of(self, file: str, end: int) -> float | None:
        """Return when the byte before ``end`` arrived; None if that is not recorded yet."""
        index = bisect.bisect_left(self.ends.get(file, []), end)
        return next(iter(self.seconds.get(file, [])[index : index + 1]), None)

    def begin_of(self, file: str, since: float) -> int:
        """Return the offset of the first part that arrived at ``since`` or later."""
        self.read()
        index = bisect.bisect_left(self.seconds.get(file, []), since)
        return [0, *self.ends.get(file, [])][index]


def _parts(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Split entries into batches of one message each; more entries may be added to the last one."""
    parts, chars = [list[Entry]()], 0
    for entry in entries:
        if len(parts[-1]) == BATCH or chars > BATCH_CHARS:
            parts.append([])
            chars = 0
        parts[-1].append(entry)
        chars += len(entry.text)
    return parts


def _start_of_last(path: Path, lines: int) -> int:
    """Return where the last ``lines`` lines of a file begin, or of what is read to find them."""
    end = position = path.stat().st_size
    read, n_ends = list[bytes](), 0
    with path.open("rb") as file:
        while position and n_ends <= lines and end - position < max(LAST_BYTES, lines * LINE_BYTES):
            step = min(1 << 16, position)
            position -= step
            file.seek(position)
            read.append(file.read(step))
            n_ends += read[-1].count(b"\n")
    kept = split_lines(b"".join(reversed(read)))[-lines:] if lines else []
    return end - sum(map(len, kept))


T = TypeVar("T")
STREAM_EVERY_S = 0.3


def stream(request: StreamRequest) -> None:
    """Print messages until standard input closes or the run is over."""
    run, host = run_of(request.run), request.host
    logs = HostLogs(run, host, request)
    records = _Records(run)
    state = _State(run, request)
    secrets = _Secrets(run, host)
    while True:
        plan = read_plan(run)
        alive = lives(run, plan, host)  # checked before lines are read: a run that has ended has written its last
        pieces = secrets.pieces(plan, alive=alive)
        last_pass = not request.follow or not (alive or request.forever)
        for news in logs.poll(final=last_pass):
            _say(news, pieces)
        if request.records:
            for news in records.new():
                _say(news, pieces)
        for news in state.new(plan, alive=alive, final=last_pass):
            _say(news, pieces)
        if last_pass:
            _say(StreamMessage(end=True), pieces)
            return
        if select.select([sys.stdin], [], [], STREAM_EVERY_S)[0] and not os.read(sys.stdin.fileno(), 4096):
            return


class _State:
    """Reports changes of the host's state, and its ranks' heartbeats at intervals."""

    def __init__(self, run: RunDir, request: StreamRequest) -> None:
        self.run, self.request = run, request
        self.last: NodeUpdate | None = None
        self.beats_at = 0.0

    def new(self, plan: Plan, *, alive: bool, final: bool) -> Iterator[StreamMessage]:
        """Yield the updates that are due."""
        host = self.request.host
        blames = read_records(Blame, self.run.blames(host), 1)
        state = NodeUpdate(
            alive, read_record(NodeStatus, self.run.status(host)), stopped_by(self.run, host), next(iter(blames), None)
        )
        if state != self.last:
            self.last = state
            yield StreamMessage(node=state)
        if self.request.beats and (final or time.monotonic() > self.beats_at + BEATS_EVERY_S):
            self.beats_at = time.monotonic()
            yield StreamMessage(beats=beats_of(self.run, plan.find(host)), now=time.time())


class _Records:
    """Rank 0's metrics and events, as they are added."""

    def __init__(self, run: RunDir) -> None:
        self.metrics, self.events = Tail(run.metrics), Tail(run.events("rank-0"))

    def new(self) -> Iterator[StreamMessage]:
        """Yield what was added since the last call."""
        metrics, events = _added(METRICS_LINE, self.metrics), _added(RunEvent, self.events)
        while part := tuple(itertools.islice(metrics, RECORDS)):
            yield StreamMessage(metrics=part)
        while told := tuple(itertools.islice(events, RECORDS)):
            yield StreamMessage(events=told)


class _Secrets:
    """The values of the run's secrets while a process of the run has them; they are in no file."""

    def __init__(self, run: RunDir, host: str) -> None:
        self.run, self.host = run, host
        self.known: dict[str, str] = {}
        self.attempt = 0

    def pieces(self, plan: Plan, *, alive: bool) -> list[str]:
        """Return the strings to hide now."""
        if alive and (self.attempt != plan.attempt or self.known.keys() < set(plan.secrets)):
            self.known |= processes.variables(f"{self.run.path}:{self.host}", plan.secrets)
            self.attempt = plan.attempt
        return pieces_of(self.known.values())


def _added(kind: type[T], tail: Tail) -> Iterator[T]:
    for piece in tail.all():
        for line in piece.data.splitlines():
            try:
                yield reader.loads(kind, line, "a record")
            except reader.MalformedError:
                continue


def _say(news: StreamMessage, pieces: Sequence[str]) -> None:
    print(hide_in_json(reader.dumps(news), pieces), flush=True)
