"""Log text as blocks that belong together: a line, or a whole traceback. Pure.

A block's time is the one that its first line begins with, where that is credible, else when the line was seen to
arrive; a line without a time follows its predecessor.
"""

import dataclasses
import datetime
import io
import re
from collections.abc import Iterator

MAX_BLOCK_LINES = 500
CREDIBLE_S = 600.0  # between the time a line says and the time it arrived; else the line means something else
INDENTED = re.compile(rb"\s+\S|\s*$")
IN_TRACEBACK = re.compile(rb"Traceback \(most recent call last\)|^\s*(\[rank\d+\]:\s*)?Traceback")
PREFIX = re.compile(rb"(\[rank\d+\]:\s?|E\d{4} [\d:.]+ \d+ [\w./]+:\d+\] ?)")
GLOG = re.compile(r"[IWEFD](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{3,6})")
ISO = re.compile(r"\[?(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?(Z|[+-]\d\d:?\d\d)?")


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Lines of one file that belong together."""

    begin: int  # bytes into the file
    end: int
    text: str  # without the last line break


class Blocks:
    """Cuts a file's bytes into blocks as they come; the last one is kept back while it may go on."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.begin = 0
        self.open = False  # within a traceback

    def feed(self, begin: int, data: bytes) -> Iterator[Block]:
        """Take what follows (or, where ``begin`` says so, what stands elsewhere), and yield what is complete."""
        if begin != self.begin + sum(map(len, self.lines)):
            yield from self.flush()
            self.begin = begin
        for line in split_lines(data):
            indented = bool(INDENTED.match(PREFIX.sub(b"", line, count=1)))
            starts = bool(IN_TRACEBACK.search(line))
            goes_on = self.lines and (indented or (self.open and not starts))
            if not goes_on or len(self.lines) >= MAX_BLOCK_LINES:
                yield from self.flush()
            self.lines.append(line)
            self.open = starts or (self.open and indented)  # "ValueError: …" ends it

    def flush(self) -> Iterator[Block]:
        """Yield what was kept back."""
        if self.lines:
            data = b"".join(self.lines)
            end = self.begin + len(data)
            yield Block(self.begin, end, data.decode("utf-8", "replace").rstrip("\r\n"))
            self.begin, self.lines, self.open = end, [], False


def split_lines(data: bytes) -> list[bytes]:
    """Lines with their ends; a carriage return ends none: a progress bar writes many."""
    return io.BytesIO(data).readlines()


def time_of(text: str, arrived: float, utc_offset_s: float) -> float:
    """When a block was written, in seconds since the epoch of its host's clock.

    ``arrived``: when it was seen; ``utc_offset_s``: of the host's local time, which a time without a zone is in.
    """
    said = _said(text, arrived, datetime.timezone(datetime.timedelta(seconds=utc_offset_s)))
    if said is None or abs(said - arrived) >= CREDIBLE_S or said > arrived + 1:
        return arrived
    return said


def _said(text: str, arrived: float, zone: datetime.tzinfo | None) -> float | None:
    try:
        if match := ISO.match(text):
            *parts, fraction, own_zone = match.groups()
            if own_zone:
                zone = datetime.datetime.fromisoformat(f"2000-01-01T00:00{own_zone}").tzinfo
        elif match := GLOG.match(text):
            *parts, fraction = match.groups()
            parts = [datetime.datetime.fromtimestamp(arrived, zone).year, *parts]
        else:
            return None
        micro = int((fraction or "0").ljust(6, "0"))
        return datetime.datetime(*map(int, parts), micro, tzinfo=zone).timestamp()  # type: ignore[misc,arg-type]
    except ValueError:
        return None
