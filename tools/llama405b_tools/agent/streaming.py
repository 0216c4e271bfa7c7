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
from llama405b.contract.records import METRICS_LINE, FailureRecord, NodeStatus, RunEvent
from llama405b.spec.plan import Plan, read_plan
from llama405b_tools.agent import processes
from llama405b_tools.agent.describe import is_run_alive, read_heartbeats, stopped_by
from llama405b_tools.agent.messages import HEARTBEAT_INTERVAL_S, NodeUpdate, StreamMessage, StreamRequest
from llama405b_tools.agent.processes import resolve_run_dir
from llama405b_tools.text.words import (
    MAX_LINE_BYTES,
    BlockSplitter,
    LogBlock,
    LogEntry,
    LogMerger,
    RawSplitter,
    hide_secrets_in_json,
    parse_log_time,
    secret_lines,
    split_lines,
)

MAX_READ_BYTES = 1 << 20  # of one file at a time, so that a flood in one does not silence the others
FilePosition = tuple[int, int]  # inode and position: a file may be replaced by a longer one


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Whole lines added to a file."""

    path: Path
    offset: int  # of ``data`` in the file
    data: bytes


def n_complete_bytes(data: bytes) -> int:
    """Return how many bytes come before an incomplete last UTF-8 character."""
    for distance in range(1, min(4, len(data)) + 1):
        byte = data[-distance]
        if byte >= 0xC0:
            return len(data) - distance if distance < 2 + (byte >= 0xE0) + (byte >= 0xF0) else len(data)
        if byte < 0x80:
            break
    return len(data)


class FileFollower:
    """Follows a file, or every ``*.log`` file below a directory, including files created later."""

    def __init__(
        self,
        root: Path,
        *,
        accepts: Callable[[Path], bool] = lambda _: True,
        from_end: bool = False,
        max_bytes: int = 0,
        split_at_cr: bool = False,
    ) -> None:
        """Begin at the files' present ends, or at their beginnings.

        ``accepts`` selects files; ``max_bytes``: only this much of the end of new data is read (0: all of it), after
        the part that ``set_position`` exempts. ``split_at_cr``: a carriage return ends a piece, too. A line longer than MAX_LINE_BYTES
        comes in pieces.
        """
        self.split_at_cr = split_at_cr
        self.root = root
        self.accepts = accepts
        self.max_bytes = max_bytes
        self.n_skipped = 0  # lines
        self.rewritten_paths = set[Path]()  # of which an unread end may be lost
        self.positions: dict[Path, FilePosition] = {}
        self.keep_all_until: dict[Path, int] = {}  # up to there nothing is skipped
        if from_end:
            self.positions = {path: (path.stat().st_ino, path.stat().st_size) for path in self.files()}

    def files(self) -> list[Path]:
        """Return the files that exist now."""
        paths = [self.root] if self.root.is_file() else sorted(self.root.rglob("*.log"))
        return [path for path in paths if self.accepts(path) and path.is_file()]

    def set_position(self, path: Path, position: FilePosition, keep_all_until: int = 0) -> None:
        """Continue where an earlier reader stopped; nothing before ``keep_all_until`` is skipped."""
        self.positions[path], self.keep_all_until[path] = position, keep_all_until

    def read_new(self, *, final: bool = False) -> Iterator[Chunk]:
        """Yield what was added, at most one chunk per file; ``final``: include a last line without a newline."""
        for path in self.files():
            yield from self.read_file(path, final=final)

    def read_file(self, path: Path, *, final: bool = False) -> Iterator[Chunk]:
        """Yield what was added to one file, at most one chunk."""
        try:
            with path.open("rb") as file:
                inode, start = self._find_start(path, file)
                file.seek(start)
                block = file.read(MAX_READ_BYTES)
        except OSError:
            return
        end = block.rfind(b"\n") + 1
        if self.split_at_cr:
            end = max(end, block.rfind(b"\r", 0, -1) + 1)  # the last byte may be half of a line's end
        is_too_long = not end and len(block) >= MAX_LINE_BYTES
        if final and len(block) < MAX_READ_BYTES:
            end = len(block)
        elif is_too_long:
            end = n_complete_bytes(block)
        self.positions[path] = (inode, start + end)
        if end:
            yield Chunk(path, start, block[:end])

    def _find_start(self, path: Path, file: BinaryIO) -> FilePosition:
        """Return a file's inode and the offset to read from."""
        inode, offset = self.positions.get(path, (0, 0))
        info = os.fstat(file.fileno())
        if info.st_ino != inode or info.st_size < offset:  # truncated, or another file
            if offset:
                self.rewritten_paths.add(path)
            offset = 0
        keeps_all = offset < self.keep_all_until.get(path, 0)
        if self.max_bytes and not keeps_all and info.st_size - offset > self.max_bytes:
            offset = self._skip(file, offset, info.st_size - self.max_bytes)
        return info.st_ino, offset

    def _skip(self, file: BinaryIO, start: int, end: int) -> int:
        """Count the lines up to about ``end``, and return where the next one begins."""
        file.seek(start)
        while block := file.read(min(MAX_READ_BYTES, end - file.tell())):
            self.n_skipped += block.count(b"\n")
        final_line = file.readline(MAX_LINE_BYTES)
        cr_end = final_line.find(b"\r") + 1 if self.split_at_cr else 0
        self.n_skipped += not cr_end and final_line.endswith(b"\n")
        return file.tell() - (len(final_line) - cr_end if cr_end else 0)

    def read_all(self, *, final: bool = False) -> Iterator[Chunk]:
        """Yield chunks until nothing is left."""
        while chunks := list(self.read_new(final=final)):
            yield from chunks


ATTEMPT_DIR = re.compile(r".+-(\d+)-[0-9a-f]{8}_\w+")
ATTEMPT_LINE = b"\nattempt "
MAX_BATCH_ENTRIES, MAX_BATCH_CHARS = (
    500,
    1 << 19,
)  # entries in one message, and their text: as JSON, up to twelve times as many bytes
MAX_RECORDS = 1000  # in one message
REWRITTEN_NOTICE = "[this log was truncated or replaced; lines that had not been read are lost]"
BAR_INTERVAL_S = 2.0  # a bar's
STALE_LINE_S = 2.0  # after which a line that has not ended is told
TAIL_BYTES, TAIL_LINE_BYTES = (
    1 << 22,
    1 << 12,
)  # in which the last lines are looked for, and more for many: for each so much
AGENT_LOG = "torchrun.log"
LONG_POLL_S, SHORT_POLL_S = 1.0, 0.05  # at most, under a flood of lines: the host's state is news, too


class HostLogs:
    """Reads new entries of a run's logs."""

    def __init__(self, run: RunDir, host: str, request: StreamRequest) -> None:
        self.run = run
        self.host = host
        self.request = request
        self.root = run.logs(host)
        attempts = [int(match[1]) for file in request.marks if (match := ATTEMPT_DIR.fullmatch(file.split("/")[0]))]
        newest_attempt = read_plan(run).attempt
        self.attempt = request.attempt or min(
            [newest_attempt, *attempts]
        )  # a reader that returns continues where it was
        self.follow_attempts = request.attempt == 0
        self.tail = FileFollower(
            self.root, accepts=self._accepts, max_bytes=request.most_bytes, split_at_cr=not request.whole
        )
        self.poll_s = SHORT_POLL_S if request.most_bytes else LONG_POLL_S
        self.times = LogTimes(run.times(host))
        self.blocks: dict[str, BlockSplitter | RawSplitter] = {}
        self.idle_files: set[str] = set()
        self.unchanged_since = dict[str, float]()  # since when a file is as it is
        self.state_sent_at = dict[str, float]()  # when a bar's state was told
        self.merge = LogMerger()
        self.utc_offset_s = float(time.localtime().tm_gmtoff)
        self.offsets: dict[str, tuple[int, int]] = {}
        for file, (inode, offset) in request.marks.items():
            self.offsets[file] = (inode, offset)
            self.tail.set_position(self.root / file, (inode, offset))

    def poll(self, *, final: bool) -> Iterator[StreamMessage]:
        """Yield messages until nothing is left, or for a while: entries, and the offsets after them."""
        batch: list[LogEntry] = []
        deadline = math.inf if final else time.monotonic() + self.poll_s
        while self._read_files(final=final):
            *full_batches, batch = _split_batches([*batch, *self.merge.pop()])
            yield from map(self._build_message, full_batches)
            if time.monotonic() > deadline:
                break
        else:
            batch += self.merge.pop(math.inf)
        yield from map(self._build_message, filter(None, _split_batches(batch)))

    def _build_message(self, batch: list[LogEntry]) -> StreamMessage:
        for entry in batch:
            self.offsets[entry.file] = (self.tail.positions[self.root / entry.file][0], entry.end)
        offsets = {entry.file: self.offsets[entry.file] for entry in batch}
        entries = tuple((entry.time, entry.file, entry.text) for entry in batch)
        n_skipped, self.tail.n_skipped = self.tail.n_skipped, 0
        return StreamMessage(entries=entries, marks=offsets, now=time.time(), skipped=n_skipped)

    def _read_files(self, *, final: bool) -> bool:
        """Read a chunk of every file that has no entries waiting; return whether there was anything."""
        self.times.read()
        has_data = False
        for path in self.tail.files():
            file = str(path.relative_to(self.root))
            if file not in self.blocks:
                self.blocks[file] = RawSplitter() if self.request.whole else BlockSplitter()
                self._set_start(path, file)
            if self.merge.size(file):
                has_data = True
                continue
            if self._read_file(path, file, final=final):
                has_data = True
            else:
                self.merge.end(file)
        return has_data

    def _read_file(self, path: Path, file: str, *, final: bool) -> bool:
        """Read a chunk of a file; return whether there was anything."""
        now, blocks = time.monotonic(), self.blocks[file]
        is_unchanged = self.request.follow and now > self.unchanged_since.setdefault(file, now) + STALE_LINE_S
        chunk = next(iter(self.tail.read_file(path, final=final or is_unchanged)), None)
        new_blocks: list[LogBlock] = []
        if path in self.tail.rewritten_paths:
            self.tail.rewritten_paths.discard(path)
            new_blocks += [*blocks.flush(), LogBlock(0, 0, REWRITTEN_NOTICE)]
        if chunk:
            self.unchanged_since[file] = now
            self.idle_files.discard(file)
            new_blocks += blocks.feed(chunk.offset, chunk.data)
        elif final:
            new_blocks += blocks.flush()
        elif file in self.idle_files:
            new_blocks += blocks.flush_lines()
        else:  # a block that may continue waits for one more pass
            self.idle_files.add(file)
        if self.request.follow and now > self.state_sent_at.get(file, 0.0) + BAR_INTERVAL_S:
            new_blocks += (bar_states := list(blocks.states(is_idle=is_unchanged)))
            self.state_sent_at[file] = now if bar_states else 0.0
        if not (chunk or new_blocks):
            return False
        self.merge.push(file, [self._build_entry(file, block.text, block.end) for block in new_blocks])
        return True

    def _build_entry(self, file: str, text: str, end: int) -> LogEntry:
        arrived_at = self.times.arrival_time(file, end) or (self.root / file).stat().st_mtime
        return LogEntry(parse_log_time(text, arrived_at, self.utc_offset_s), self.host, file, text, end)

    def _accepts(self, path: Path) -> bool:
        parts = path.relative_to(self.root).parts
        if parts == (AGENT_LOG,):
            return self.request.agent
        match = ATTEMPT_DIR.fullmatch(parts[0])
        if not match or (self.request.stderr and parts[-1] != "stderr.log"):
            return False
        attempt = int(match[1])
        return self.attempt < 0 or attempt == self.attempt or (self.follow_attempts and attempt > self.attempt)

    def _set_start(self, path: Path, file: str) -> None:
        """Set where to begin in a file that appears for the first time."""
        if file in self.offsets:
            return
        info, offset = path.stat(), 0
        if file == AGENT_LOG and self.attempt > 0:
            offset = max(0, path.read_bytes().rfind(ATTEMPT_LINE + f"{self.attempt}:".encode()) + 1)
        if self.request.since_s:
            offset = max(offset, self.times.find_offset(file, time.time() - self.request.since_s))
        if self.request.tail is not None:
            offset = max(offset, _find_last_lines(path, self.request.tail))
        self.tail.set_position(path, (info.st_ino, offset), keep_all_until=info.st_size if self.request.follow else 0)


class LogTimes:
    """Arrival times of the parts of the log files: lines ``<seconds> <end in bytes> <file>``."""

    def __init__(self, path: Path) -> None:
        self.source = FileFollower(path)
        self.ends: dict[str, list[int]] = {}
        self.seconds: dict[str, list[float]] = {}

    def read(self) -> None:
        """Read new lines."""
        for piece in self.source.read_all():
            for line in piece.data.decode("utf-8", "replace").splitlines():
                words = line.split(" ", 2)
                if len(words) == 3:
                    self.ends.setdefault(words[2], []).append(int(words[1]))
                    self.seconds.setdefault(words[2], []).append(float(words[0]))

    def arrival_time(self, file: str, end: int) -> float | None:
        """Return when the byte before ``end`` arrived; None if that is not recorded yet."""
        index = bisect.bisect_left(self.ends.get(file, []), end)
        return next(iter(self.seconds.get(file, [])[index : index + 1]), None)

    def find_offset(self, file: str, start_time: float) -> int:
        """Return the offset of the first part that arrived at ``start_time`` or later."""
        self.read()
        index = bisect.bisect_left(self.seconds.get(file, []), start_time)
        return [0, *self.ends.get(file, [])][index]


def _split_batches(entries: Sequence[LogEntry]) -> list[list[LogEntry]]:
    """Split entries into batches of one message each; more entries may be added to the last one."""
    batches, chars = [list[LogEntry]()], 0
    for entry in entries:
        if len(batches[-1]) == MAX_BATCH_ENTRIES or chars > MAX_BATCH_CHARS:
            batches.append([])
            chars = 0
        batches[-1].append(entry)
        chars += len(entry.text)
    return batches


def _find_last_lines(path: Path, n_lines: int) -> int:
    """Return where the last ``n_lines`` lines of a file begin, or of what is read to find them."""
    end = position = path.stat().st_size
    blocks, n_newlines = list[bytes](), 0
    with path.open("rb") as file:
        while position and n_newlines <= n_lines and end - position < max(TAIL_BYTES, n_lines * TAIL_LINE_BYTES):
            step = min(1 << 16, position)
            position -= step
            file.seek(position)
            blocks.append(file.read(step))
            n_newlines += blocks[-1].count(b"\n")
    last_lines = split_lines(b"".join(reversed(blocks)))[-n_lines:] if n_lines else []
    return end - sum(map(len, last_lines))


T = TypeVar("T")
STREAM_INTERVAL_S = 0.3


def stream(request: StreamRequest) -> None:
    """Print messages until standard input closes or the run is over."""
    run, host = resolve_run_dir(request.run), request.host
    logs = HostLogs(run, host, request)
    records = _RecordStream(run)
    state = _HostStateStream(run, request)
    secrets = _SecretValues(run, host)
    while True:
        plan = read_plan(run)
        alive = is_run_alive(
            run, plan, host
        )  # checked before lines are read: a run that has ended has written its last
        pieces = secrets.pieces(plan, alive=alive)
        is_last_pass = not request.follow or not (alive or request.forever)
        for message in logs.poll(final=is_last_pass):
            _print_message(message, pieces)
        if request.records:
            for message in records.read_new():
                _print_message(message, pieces)
        for message in state.read_new(plan, alive=alive, final=is_last_pass):
            _print_message(message, pieces)
        if is_last_pass:
            _print_message(StreamMessage(end=True), pieces)
            return
        if select.select([sys.stdin], [], [], STREAM_INTERVAL_S)[0] and not os.read(sys.stdin.fileno(), 4096):
            return


class _HostStateStream:
    """Reports changes of the host's state, and its ranks' heartbeats at intervals."""

    def __init__(self, run: RunDir, request: StreamRequest) -> None:
        self.run, self.request = run, request
        self.last_update: NodeUpdate | None = None
        self.heartbeats_sent_at = 0.0

    def read_new(self, plan: Plan, *, alive: bool, final: bool) -> Iterator[StreamMessage]:
        """Yield the updates that are due."""
        host = self.request.host
        blames = read_records(FailureRecord, self.run.blames(host), 1)
        update = NodeUpdate(
            alive, read_record(NodeStatus, self.run.status(host)), stopped_by(self.run, host), next(iter(blames), None)
        )
        if update != self.last_update:
            self.last_update = update
            yield StreamMessage(node=update)
        if self.request.beats and (final or time.monotonic() > self.heartbeats_sent_at + HEARTBEAT_INTERVAL_S):
            self.heartbeats_sent_at = time.monotonic()
            yield StreamMessage(beats=read_heartbeats(self.run, plan.find_node(host)), now=time.time())


class _RecordStream:
    """Rank 0's metrics and events, as they are added."""

    def __init__(self, run: RunDir) -> None:
        self.metrics, self.events = FileFollower(run.metrics), FileFollower(run.events("rank-0"))

    def read_new(self) -> Iterator[StreamMessage]:
        """Yield what was added since the last call."""
        metrics, events = parse_new_lines(METRICS_LINE, self.metrics), parse_new_lines(RunEvent, self.events)
        while metrics_batch := tuple(itertools.islice(metrics, MAX_RECORDS)):
            yield StreamMessage(metrics=metrics_batch)
        while event_batch := tuple(itertools.islice(events, MAX_RECORDS)):
            yield StreamMessage(events=event_batch)


class _SecretValues:
    """The values of the run's secrets while a process of the run has them; they are in no file."""

    def __init__(self, run: RunDir, host: str) -> None:
        self.run, self.host = run, host
        self.values: dict[str, str] = {}
        self.attempt = 0

    def pieces(self, plan: Plan, *, alive: bool) -> list[str]:
        """Return the strings to hide now."""
        if alive and (self.attempt != plan.attempt or self.values.keys() < set(plan.secrets)):
            self.values |= processes.read_variables(f"{self.run.path}:{self.host}", plan.secrets)
            self.attempt = plan.attempt
        return secret_lines(self.values.values())


def parse_new_lines(record_type: type[T], tail: FileFollower) -> Iterator[T]:
    """Yield the records that were added to a file; malformed lines are left out."""
    for piece in tail.read_all():
        for line in piece.data.splitlines():
            try:
                yield reader.loads(record_type, line, "a record")
            except reader.MalformedError:
                continue


def _print_message(message: StreamMessage, pieces: Sequence[str]) -> None:
    print(hide_secrets_in_json(reader.dumps(message), pieces), flush=True)
