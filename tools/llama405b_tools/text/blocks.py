"""Log text split into blocks that belong together: a line, or a whole traceback. Pure.

A block's time is the one at the beginning of its first line, if credible, else the time at which the line arrived;
a line without a time follows its predecessor.
"""

import dataclasses
import datetime
import io
import re
from collections.abc import Iterator

MAX_BLOCK_LINES = 500
CREDIBLE_S = 600.0  # between a line's own time and its arrival; beyond that, it means something else
INDENTED = re.compile(rb"\s+\S|\s*$")
IN_TRACEBACK = re.compile(rb"Traceback \(most recent call last\)|^\s*(\[rank\d+\]:\s*)?Traceback")
PREFIX = re.compile(rb"(\[rank\d+\]:\s?|E\d{4} [\d:.]+ \d+ [\w./]+:\d+\] ?)")
GLOG = re.compile(r"[IWEFD](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{3,6})")
ISO = re.compile(r"\[?(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?(Z|[+-]\d\d:?\d\d)?")


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Lines of one file that belong together."""

    begin: int  # offset in the file, in bytes
    end: int
    text: str  # without the final line break


class Blocks:
    """Splits a file's bytes into blocks as they arrive; holds back the last one, which may continue."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.begin = 0
        self.open = False  # inside a traceback

    def feed(self, begin: int, data: bytes) -> Iterator[Block]:
        """Take the next bytes (or bytes from elsewhere, according to ``begin``), and yield the complete blocks."""
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
        """Yield the block that was held back."""
        if self.lines:
            data = b"".join(self.lines)
            end = self.begin + len(data)
            yield Block(self.begin, end, data.decode("utf-8", "replace").rstrip("\r\n"))
            self.begin = end
            self.lines = []
            self.open = False


def split_lines(data: bytes) -> list[bytes]:
    """Split into lines, keeping their ends; a carriage return does not end one: progress bars write many."""
    return io.BytesIO(data).readlines()


def time_of(text: str, arrived: float, utc_offset_s: float) -> float:
    """Return when a block was written, in seconds since the epoch by its host's clock.

    ``arrived``: when it was seen; ``utc_offset_s``: of the host's local time, assumed for a time without a zone.
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
