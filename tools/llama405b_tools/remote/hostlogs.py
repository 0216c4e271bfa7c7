"""The logs of one run on this host, as blocks in order of time. Runs on the host; standard library only.

Files appear as attempts start. A block's time comes from the line itself or from ``logs/<host>/times``, where the node
runner records when each part of each file arrived.
"""

import bisect
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

from llama405b.contract.paths import RunDir
from llama405b.contract.plan import read_plan
from llama405b_tools.remote.messages.stream import StreamMessage, StreamRequest
from llama405b_tools.remote.tail import Tail
from llama405b_tools.text.blocks import Block, Blocks, split_lines, time_of
from llama405b_tools.text.merge import Entry, Merge

ATTEMPT_DIR = re.compile(r".+-(\d+)-[0-9a-f]{8}_\w+")
ATTEMPT_LINE = b"\nattempt "
BATCH = 500  # entries in one message
AGENT_LOG = "torchrun.log"
LONG_POLL_S, SHORT_POLL_S = 1.0, 0.05  # at most, under a flood of lines: the host's state is news, too


class HostLogs:
    """What is new in the logs of a run."""

    def __init__(self, run: RunDir, host: str, request: StreamRequest) -> None:
        self.run = run
        self.host = host
        self.request = request
        self.root = run.logs(host)
        marked = [int(m[1]) for file in request.marks if (m := ATTEMPT_DIR.fullmatch(file.split("/")[0]))]
        newest = read_plan(run).attempt
        self.attempt = request.attempt or min([newest, *marked])  # a reader that returns continues where it was
        self.follow_attempts = request.attempt == 0
        self.tail = Tail(self.root, wants=self._wants, most_bytes=request.most_bytes)
        self.poll_s = SHORT_POLL_S if request.most_bytes else LONG_POLL_S
        self.times = Times(run.times(host))
        self.blocks: dict[str, Blocks] = {}
        self.idle: set[str] = set()
        self.merge = Merge()
        self.utc_offset_s = float(time.localtime().tm_gmtoff)
        self.marks: dict[str, tuple[int, int]] = {}
        for file, (inode, offset) in request.marks.items():
            self.marks[file] = (inode, offset)
            self.tail.begin_at(self.root / file, (inode, offset))

    def poll(self, *, final: bool) -> Iterator[StreamMessage]:
        """Yield messages until nothing is left, or for a while: entries, and the marks after them."""
        batch: list[Entry] = []
        until = math.inf if final else time.monotonic() + self.poll_s
        while self._read(final=final):
            for entry in self.merge.pop():
                batch.append(entry)
                if len(batch) == BATCH:
                    yield self._message(batch)
                    batch = []
            if time.monotonic() > until:
                break
        else:
            batch += self.merge.pop(math.inf)
        if batch:
            yield self._message(batch)

    def _message(self, batch: list[Entry]) -> StreamMessage:
        for entry in batch:
            self.marks[entry.file] = (self.tail.marks[self.root / entry.file][0], entry.end)
        marks = {entry.file: self.marks[entry.file] for entry in batch}
        entries = tuple((entry.time, entry.file, entry.text) for entry in batch)
        skipped, self.tail.n_skipped = self.tail.n_skipped, 0
        return StreamMessage(entries=entries, marks=marks, now=time.time(), skipped=skipped)

    def _read(self, *, final: bool) -> bool:
        """Read a piece of every file that has nothing waiting; returns whether there was anything."""
        self.times.read()
        found = False
        for path in self.tail.files():
            file = str(path.relative_to(self.root))
            if file not in self.blocks:
                self.blocks[file] = Blocks()
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
        """Read a piece of a file; returns whether there was anything."""
        chunk = next(iter(self.tail.new_of(path, final=final)), None)
        blocks: list[Block] = []
        if chunk:
            self.idle.discard(file)
            blocks = list(self.blocks[file].feed(chunk.begin, chunk.data))
        elif final or file in self.idle:
            blocks = list(self.blocks[file].flush())
        else:  # a block that may continue waits for one more pass
            self.idle.add(file)
        if not (chunk or blocks):
            return False
        self.merge.push(file, [self._entry(file, block.text, block.end) for block in blocks])
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
        """Set where to begin in a file that is seen for the first time."""
        if file in self.marks:
            return
        info, offset = path.stat(), 0
        if file == AGENT_LOG and self.attempt > 0:
            offset = max(0, path.read_bytes().rfind(ATTEMPT_LINE + f"{self.attempt}:".encode()) + 1)
        if self.request.since_s:
            offset = max(offset, self.times.begin_of(file, time.time() - self.request.since_s))
        if self.request.tail is not None:
            offset = max(offset, _start_of_last(path, self.request.tail))
        self.tail.begin_at(path, (info.st_ino, offset), whole_to=info.st_size)


class Times:
    """When the parts of the log files arrived: lines ``<seconds> <end in bytes> <file>``."""

    def __init__(self, path: Path) -> None:
        self.source = Tail(path)
        self.ends: dict[str, list[int]] = {}
        self.seconds: dict[str, list[float]] = {}

    def read(self) -> None:
        """Read what was added."""
        for piece in self.source.all():
            for line in piece.data.decode("utf-8", "replace").splitlines():
                words = line.split(" ", 2)
                if len(words) == 3:
                    self.ends.setdefault(words[2], []).append(int(words[1]))
                    self.seconds.setdefault(words[2], []).append(float(words[0]))

    def of(self, file: str, end: int) -> float | None:
        """When the byte before ``end`` arrived; None if that is not recorded yet."""
        index = bisect.bisect_left(self.ends.get(file, []), end)
        return next(iter(self.seconds.get(file, [])[index : index + 1]), None)

    def begin_of(self, file: str, since: float) -> int:
        """The position of the first part that arrived at ``since`` or later."""
        self.read()
        index = bisect.bisect_left(self.seconds.get(file, []), since)
        return [0, *self.ends.get(file, [])][index]


def _start_of_last(path: Path, lines: int) -> int:
    """Return where the last ``lines`` lines of a file begin."""
    end = path.stat().st_size
    with path.open("rb") as file:
        found, position = b"", end
        while position and found.count(b"\n") <= lines:
            step = min(1 << 16, position)
            position -= step
            file.seek(position)
            found = file.read(step) + found
    kept = split_lines(found)[-lines:] if lines else []
    return end - sum(map(len, kept))
