"""Clean text for a terminal, split logs into blocks, merge them by time and fold them over ranks. Pure.

A block is a line or a whole traceback. Its time is the timestamp at the start of its first line if credible, else the time at which the
line arrived. Each source (a file; on the operator's machine, a host) keeps its own order.
"""

import collections
import dataclasses
import datetime
import heapq
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from llama405b.contract.errors import fmt_if
from llama405b.contract.records import QUOTE_PREFIX

MIN_SECRET_CHARS, REDACTED = 6, "…REDACTED"
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[PX^_][^\x1b]*\x1b\\|[ -/]*[0-~])")
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
LINE_CONTROLS = re.compile(f"[\t\n]|{CONTROLS.pattern}")
BREAKS = re.compile(r"[\t\n]+")
TOKENS = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[A-Z0-9]{16}"
    r"|xox[abp]-[A-Za-z0-9-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,})"
)
NAMED_SECRETS = re.compile(
    r"(\b[A-Z0-9_]{0,40}(?:TOKEN|SECRET|PASSWORD|API_?KEY|ACCESS_?KEY)[\"']?\s{0,3}[=:]\s{0,3}[\"']?|\bBearer\s)([^\s\"',;]{8,})",
    re.IGNORECASE,
)
ASCII_SUBSTITUTES = str.maketrans(
    "│─└┤┄▶◀●◐■▲▼✖·…—–→←↑↓⏎°×░▏▎▍▌▋▊▉▁▂▃▄▅▆▇█", "|-`+~><*o#^vx.~--><^v<ox....::::.:-=+*#@"
)


def clean(text: str) -> str:
    """Clean a log block: keep a progress bar's last state, drop control characters, redact tokens."""
    lines = [_last_state(line) for line in text.split("\n")]
    return redact_tokens(strip_controls("\n".join(lines)).expandtabs())


def strip_controls(text: str) -> str:
    """Remove escape sequences, and replace the other control characters, except line breaks and tabs."""
    return CONTROLS.sub("�", ESCAPES.sub("", text))


def mask_controls(line: str) -> str:
    """Replace the control characters of a line, keeping its length."""
    return LINE_CONTROLS.sub("�", line)


def clean_value(value: Any, *, lines: bool = False) -> Any:
    """Remove control characters from all text in a value; keep line breaks only where a field allows them."""
    if type(value) is str:
        text = strip_controls(value)
        return text if lines else BREAKS.sub(" ", text)
    if type(value) in (tuple, list):
        return type(value)(clean_value(item, lines=lines) for item in value)
    if isinstance(value, Mapping):
        return {clean_value(key): clean_value(item, lines=lines) for key, item in value.items()}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = [field for field in dataclasses.fields(value) if not field.metadata.get("as_written")]
    cleaned = {field.name: clean_value(getattr(value, field.name), lines="lines" in field.metadata) for field in fields}
    return dataclasses.replace(value, **cleaned)


def redact_tokens(text: str) -> str:
    """Remove what looks like a token; keep its first letters to identify it."""
    text = TOKENS.sub(lambda match: f"{match[0][:4]}…REDACTED", text)
    return NAMED_SECRETS.sub(lambda match: match[0] if "REDACTED" in match[0] else f"{match[1]}…REDACTED", text)


def secret_lines(secrets: Iterable[str]) -> list[str]:
    """Return the lines of secret values to hide, longest first; very short lines are not hidden."""
    lines = {line.strip() for secret in secrets for line in secret.splitlines()}
    return sorted((line for line in lines if len(line) >= MIN_SECRET_CHARS), key=len, reverse=True)


def hide_secrets(text: str, pieces: Iterable[str]) -> str:
    """Replace the pieces of secret values in a text."""
    for piece in pieces:
        text = text.replace(piece, REDACTED)
    return text


def hide_secrets_in_json(line: str, pieces: Iterable[str]) -> str:
    """Replace the pieces of secret values in a line of JSON, which has them escaped."""
    for piece in pieces:
        line = line.replace(json.dumps(piece)[1:-1], json.dumps(REDACTED)[1:-1])
    return line


def _last_state(line: str) -> str:
    """Return a line as it looks after its carriage returns: the last non-blank piece."""
    return next((piece for piece in reversed(line.split("\r")) if piece.strip()), "")


def replace_unencodable(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that a stream cannot encode; a handler for ``codecs.register_error``."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    plain = error.object[error.start : error.end].translate(ASCII_SUBSTITUTES)
    return "".join(char if char.isascii() else "?" for char in plain), error.end


MAX_BLOCK_LINES, MAX_BLOCK_BYTES = 500, 1 << 18
MAX_LINE_BYTES = 1 << 16  # of a line; the rest is dropped
BAR_MARK, UNENDED_MARK = (
    "\udc0d",
    "\udc0c",
)  # last character of a block's text (lone surrogates, so never from a file): a progress bar; an unfinished line
CUT_NOTE = " … (line truncated; `llama405b logs -o raw` shows all of it)"
BAR_SIGNS = b"0123456789 .,:;%|/\\\\#=-+<>[](){}?*_~"
HOLE = re.compile(rb"\0{16,}")
UNIT = re.compile(r"[kKMGT]?i?B\b|\b(?:it/s|s/it)\b|\b[dhms]\b")
MAX_CLOCK_DIFF_S = 600.0  # most that a line's own time may differ from its arrival; beyond, it is another date
INDENTED = re.compile(rb"\s+\S|\s*$")
IN_TRACEBACK = re.compile(
    b"^(?!"
    + re.escape(QUOTE_PREFIX.encode())
    + rb")(?:.*Traceback \(most recent call last\)|\s*(?:\[rank\d+\]:\s*)?Traceback)"
)
PREFIX = re.compile(rb"(\[rank\d+\]:\s?|E\d{4} [\d:.]+ \d+ [\w./]+:\d+\] ?)")
GLOG = re.compile(r"[IWEFD](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{3,6})")
ISO = re.compile(r"\[?(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?(Z|[+-]\d\d:?\d\d)?")


@dataclasses.dataclass(frozen=True, slots=True)
class LogBlock:
    """Lines of one file that belong together."""

    begin: int  # offset in the file, in bytes
    end: int
    text: str  # without the final line break


class BlockSplitter:
    """Splits a file's bytes into blocks as they arrive; holds back the last one because it may continue.

    A line overwritten by carriage returns (a progress bar) yields a block whenever its letters change; of states with the same
    letters, only the last becomes a block.
    """

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.lines_begin = self.lines_end = 0  # offsets of the lines held back
        self.end = 0  # offset up to which data was fed
        self.in_traceback = False  # inside a traceback
        self.partial_line = b""  # an unfinished line
        self.bar: LogBlock | None = None  # the newest state of a progress bar
        self.bar_signs, self.bar_words = b"", ""
        self.last_state: LogBlock | None = None  # the last state yielded by ``states``
        self.n_nul_bytes = 0  # NUL bytes at the start of the next line
        self.in_long_line = False  # inside a line whose first MAX_LINE_BYTES were yielded already

    def feed(self, begin: int, data: bytes) -> Iterator[LogBlock]:
        """Take the bytes at offset ``lines_begin`` (usually the next ones) and yield the blocks they complete."""
        # not the next bytes of the file: finish what was held back before the gap
        if begin != self.end:
            yield from self.flush()
            self.lines_begin = self.end = begin
            self.in_long_line, self.n_nul_bytes = False, 0
        offset = self.end - len(self.partial_line)
        self.end += len(data)
        data, self.partial_line = self.partial_line + data, b""
        for line in data.splitlines(keepends=True):  # at carriage returns, too
            line_begin, offset = offset, offset + len(line)
            is_complete, was_in_long_line = line.endswith((b"\r", b"\n")), self.in_long_line
            if line[0] == 0 and not was_in_long_line and not line.strip(b"\0"):  # all NUL so far: a hole in the file
                self.n_nul_bytes += len(line)
                continue
            if self.n_nul_bytes:
                tail = line.lstrip(b"\0")
                line, self.n_nul_bytes = _hole_text(self.n_nul_bytes + len(line) - len(tail)) + tail, 0
            self.in_long_line = not is_complete and (was_in_long_line or len(line) >= MAX_LINE_BYTES)
            if was_in_long_line:
                continue
            if not is_complete and not self.in_long_line:
                self.partial_line = line
            elif line.endswith(b"\r"):
                yield from self._take_state(line_begin, offset, line)
            else:
                yield from self._take_line(line_begin, offset, line)

    def _take_state(self, begin: int, end: int, line: bytes) -> Iterator[LogBlock]:
        """Take a state of a progress bar; yield the previous one if its letters differ."""
        yield from self.flush_lines()
        text, signs = _decode_lines([line]), line.translate(None, BAR_SIGNS)
        if not text.strip():
            return
        words = self.bar_words if signs == self.bar_signs else state_letters(text)
        if self.bar and words != self.bar_words:
            yield self.bar
        self.bar, self.bar_signs, self.bar_words = LogBlock(begin, end, text), signs, words

    def _take_line(self, begin: int, end: int, line: bytes) -> Iterator[LogBlock]:
        """Take a line, or the start of a long one."""
        if self.bar:
            if state_letters(_decode_lines([line])) != self.bar_words:
                yield self.bar
            self.bar = None
        indented = bool(INDENTED.match(PREFIX.sub(b"", line, count=1)))
        starts_traceback = bool(IN_TRACEBACK.search(line))
        continues_block = self.lines and (indented or (self.in_traceback and not starts_traceback))
        if (
            not continues_block
            or len(self.lines) >= MAX_BLOCK_LINES
            or self.lines_end - self.lines_begin >= MAX_BLOCK_BYTES
        ):
            yield from self.flush_lines()
            self.lines_begin = begin
        self.lines.append(line)
        self.lines_end = end
        self.in_traceback = starts_traceback or (
            self.in_traceback and indented
        )  # the unindented "ValueError: …" ends a traceback

    def flush_lines(self) -> Iterator[LogBlock]:
        """Yield the lines held back."""
        if self.lines:
            yield LogBlock(self.lines_begin, self.lines_end, _decode_lines(self.lines))
            self.lines = []
            self.in_traceback = False

    def flush(self) -> Iterator[LogBlock]:
        """Yield everything held back."""
        if self.partial_line:
            line, self.partial_line = self.partial_line, b""
            yield from self._take_line(self.end - len(line), self.end, line)
        yield from self.flush_lines()
        if self.bar:
            yield self.bar
            self.bar = None

    def states(self, *, is_idle: bool) -> Iterator[LogBlock]:
        """Yield the newest state of a progress bar, or (``is_idle``) an unfinished line; each becomes a block later.

        Its end offset is its begin offset, so a reader that resumes there gets the whole block.
        """
        state = None
        if is_idle and self.partial_line:
            yield from self.flush_lines()  # these precede it
            text, begin = _decode_lines([self.partial_line]), self.end - len(self.partial_line)
            continues_bar = self.bar and state_letters(text) == self.bar_words
            state = LogBlock(begin, begin, text + (BAR_MARK if continues_bar else UNENDED_MARK))
        elif self.bar:
            state = LogBlock(self.bar.begin, self.bar.begin, self.bar.text + BAR_MARK)
        if state and state != self.last_state:
            self.last_state = state
            yield state


class RawSplitter:
    """Yields every byte of a file as it arrives, line by line; the raw counterpart of ``BlockSplitter``."""

    def feed(self, begin: int, data: bytes) -> Iterator[LogBlock]:
        """Yield each line or piece."""
        for line in split_lines(data):
            text = line.decode("utf-8", "replace")
            yield LogBlock(begin, begin + len(line), text[:-1] if line.endswith(b"\n") else text + UNENDED_MARK)
            begin += len(line)

    def flush_lines(self) -> Iterator[LogBlock]:
        """Nothing is held back."""
        yield from ()

    def flush(self) -> Iterator[LogBlock]:
        """Nothing is held back."""
        yield from ()

    def states(self, *, is_idle: bool) -> Iterator[LogBlock]:  # noqa: ARG002
        """Yield nothing: every piece has been yielded."""
        yield from ()


def _decode_lines(lines: Sequence[bytes]) -> str:
    """Decode lines without the final line end; truncate long lines and replace holes by their size."""
    data = b"".join(lines)
    if len(data) <= MAX_LINE_BYTES and b"\0" not in data:
        return data.decode("utf-8", "replace").rstrip("\r\n")
    texts = list[str]()
    for line in lines:
        plain = line.rstrip(b"\r\n")
        if b"\0" in plain:
            plain = HOLE.sub(lambda hole: _hole_text(len(hole[0])), plain)
        suffix = CUT_NOTE if len(plain) > MAX_LINE_BYTES else ""
        texts.append(plain[:MAX_LINE_BYTES].decode("utf-8", "replace") + suffix)
    return "\n".join(texts)


def _hole_text(size: int) -> bytes:
    return f"[{size:,} NUL bytes]".encode()


def state_letters(text: str) -> str:
    """Return a progress bar's letters without units: states that differ only in numbers have the same."""
    return "".join(filter(str.isalpha, UNIT.sub("", ESCAPES.sub("", text))))


def split_mark(text: str) -> tuple[str, str]:
    """Split a block's text from its trailing mark: ``BAR_MARK``, ``UNENDED_MARK`` or ""."""
    end = text[-1:] if text.endswith((BAR_MARK, UNENDED_MARK)) else ""
    return text.removesuffix(end), end


def split_lines(data: bytes) -> list[bytes]:
    """Split into lines, keeping their ends."""
    return io.BytesIO(data).readlines()


def parse_log_time(text: str, arrival: float, utc_offset_s: float) -> float:
    """Return when a block was written, in seconds since the epoch by its host's clock.

    ``arrival``: when it was read; ``utc_offset_s``: offset of the host's local time, assumed for a time without a zone.
    """
    written = _parse_timestamp(text, arrival, datetime.timezone(datetime.timedelta(seconds=utc_offset_s)))
    if written is None or abs(written - arrival) >= MAX_CLOCK_DIFF_S or written > arrival + 1:
        return arrival
    return written


def _parse_timestamp(text: str, arrival: float, zone: datetime.tzinfo | None) -> float | None:
    try:
        if match := ISO.match(text):
            *parts, fraction, text_zone = match.groups()
            if text_zone:
                zone = datetime.datetime.fromisoformat(f"2000-01-01T00:00{text_zone}").tzinfo
        elif match := GLOG.match(text):
            *parts, fraction = match.groups()
            parts = [datetime.datetime.fromtimestamp(arrival, zone).year, *parts]
        else:
            return None
        micro = int((fraction or "0").ljust(6, "0"))
        return datetime.datetime(*map(int, parts), micro, tzinfo=zone).timestamp()  # type: ignore[misc,arg-type]
    except ValueError:
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class LogEntry:
    """One block of one log."""

    time: float  # seconds since the epoch: host's clock on a host, operator's clock on the operator's machine
    host: str
    file: str  # relative to the host's log directory
    text: str
    end: int = 0  # offset in the file, in bytes
    rank: int = -1  # -1: torchrun's own log
    stream: str = ""  # out | err; "" for torchrun's own
    mark: str = ""  # BAR or UNENDED if its line is not complete, else ""

    def with_time(self, time: float) -> "LogEntry":
        """Return a copy with another time."""
        return dataclasses.replace(self, time=time)


class LogMerger:
    """Merges entries from several sources by time, as far as their order is certain."""

    def __init__(self, max_waiting: int = 0) -> None:
        """``max_waiting``: entries to keep per source; older ones are dropped and counted (0: no limit)."""
        self.waiting: dict[str, collections.deque[LogEntry]] = {}
        self.last_times: dict[str, float] = {}
        self.open_sources: set[str] = set()
        self.max_waiting = max_waiting
        self.dropped: dict[str, int] = {}

    def begin(self, source: str) -> None:
        """Mark a source as open: later entries of other sources wait for it."""
        self.open_sources.add(source)
        self.waiting.setdefault(source, collections.deque(maxlen=self.max_waiting or None))

    def end(self, source: str) -> None:
        """Mark a source as closed: other sources no longer wait for it."""
        self.open_sources.discard(source)

    def push(self, source: str, entries: Sequence[LogEntry]) -> None:
        """Add a source's entries; their times are raised so that they never decrease."""
        self.begin(source)
        excess = self.size(source) + len(entries) - self.max_waiting
        if self.max_waiting and excess > 0:
            self.drop(source, excess)
        for entry in entries:
            last = max(entry.time, self.last_times.get(source, entry.time))
            self.last_times[source] = last
            self.waiting[source].append(entry if entry.time == last else entry.with_time(last))

    def drop(self, source: str, count: int) -> None:
        """Count dropped entries of a source."""
        self.dropped[source] = self.dropped.get(source, 0) + count

    def size(self, source: str) -> int:
        """Return how many entries of a source are waiting."""
        return len(self.waiting.get(source, ()))

    def pop(self, until: float = float("-inf")) -> Iterator[LogEntry]:
        """Yield in order the entries that no older one can follow; up to ``until`` even if one could."""
        heap = [(entries[0].time, source) for source, entries in self.waiting.items() if entries]
        heapq.heapify(heap)
        pending = {source for source in self.open_sources if not self.waiting[source]}
        while heap and not (pending and heap[0][0] > until):
            source = heap[0][1]
            entries = self.waiting[source]
            entry = entries.popleft()
            if entries:
                heapq.heapreplace(heap, (entries[0].time, source))
            else:
                heapq.heappop(heap)
                pending |= {source} & self.open_sources
            yield entry


NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:[eE][+-]?\d+)?(?!\w*\d)")
ERROR = re.compile(r"error|exception|traceback|fatal|fail|killed|abort|segfault|nan\b|timed? ?out|xid", re.IGNORECASE)
TAIL_DIGITS = re.compile(r"(.*?)(\d+)(\D*)")  # the last number in a name


def is_error(entry: LogEntry) -> bool:
    """Return whether a block may report a failure; such blocks are never folded."""
    return bool(ERROR.search(entry.text)) or "\n" in entry.text


@dataclasses.dataclass(slots=True)
class _LineKind:
    """The groups of one kind of line that are still open."""

    groups: collections.deque[list[LogEntry]] = dataclasses.field(default_factory=collections.deque)
    n_complete: int = 0  # number of groups of this kind yielded so far
    # host and rank -> its next group, counted from the first
    next_index: dict[tuple[str, int], int] = dataclasses.field(default_factory=dict)


class LogFolder:
    """Collects entries for ``window_s``. A rank's second line of one kind goes to the next group of that kind."""

    def __init__(self, window_s: float = 2.0) -> None:
        self.window_s = window_s
        self.groups: collections.deque[tuple[tuple[str, str], list[LogEntry]]] = collections.deque()  # oldest first
        self.kinds: dict[tuple[str, str], _LineKind] = {}

    def push(self, entry: LogEntry) -> Iterator[Sequence[LogEntry]]:
        """Add an entry; yield the groups that it completes, oldest first."""
        yield from self.pop_older_than(entry.time - self.window_s)
        if is_error(entry):
            yield from self.flush()
            yield [entry]
            return
        key = (entry.stream + entry.mark, NUMBER.sub("\0", entry.text))
        kind, source = self.kinds.setdefault(key, _LineKind()), (entry.host, entry.rank)
        index = max(kind.next_index.get(source, 0), kind.n_complete)
        kind.next_index[source] = index + 1
        if index - kind.n_complete == len(kind.groups):
            kind.groups.append([])
            self.groups.append((key, kind.groups[-1]))
        kind.groups[index - kind.n_complete].append(entry)

    def pop_older_than(self, time: float) -> Iterator[Sequence[LogEntry]]:
        """Yield the groups that began before ``time``."""
        while self.groups and self.groups[0][1][0].time < time:
            key, group = self.groups.popleft()
            kind = self.kinds[key]
            kind.groups.popleft()
            kind.n_complete += 1
            if not kind.groups:
                del self.kinds[key]
            yield group

    def flush(self) -> Iterator[Sequence[LogEntry]]:
        """Yield all groups."""
        yield from self.pop_older_than(float("inf"))


class Unfolded(LogFolder):
    """Yields every entry as a group of one."""

    def push(self, entry: LogEntry) -> Iterator[Sequence[LogEntry]]:
        """Yield the entry."""
        yield [entry]


def common_text(group: Sequence[LogEntry]) -> str:
    """Return the common text of a group; differing numbers become ``lowest–highest``."""
    if len(group) == 1:
        return group[0].text
    columns = list(zip(*(NUMBER.findall(entry.text) for entry in group), strict=True))
    pieces = NUMBER.split(group[0].text)
    parts = [pieces[0]]
    for column, piece in zip(columns, pieces[1:], strict=True):
        lowest, highest = min(column, key=_value), max(column, key=_value)
        parts += [lowest if _value(lowest) == _value(highest) else f"{lowest}–{highest}", piece]
    return "".join(parts)


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def format_hosts_and_ranks(group: Sequence[LogEntry]) -> str:
    """Return a group's hosts and ranks, folded: ``gpu-[01-08] r0-63``."""
    ranks = sorted({entry.rank for entry in group if entry.rank >= 0})
    hosts = fold_names(sorted({entry.host for entry in group}))
    return f"{hosts} {fmt_if('r{}', fold_numbers(ranks)) or 'torchrun'}"


def fold_numbers(numbers: Sequence[int]) -> str:
    """Fold sorted integers: ``0-3,7``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def fold_ranks(ranks: Sequence[int]) -> str:
    """Name sorted ranks: ``rank 3``, ``ranks 0-3,7``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {fold_numbers(ranks)}"


def fold_names(names: Iterable[str]) -> str:
    """Fold host names that differ in one number: ``gpu-[01-08]``."""
    families: dict[tuple[str, str], list[str]] = {}
    folded: list[str] = []
    for name in names:
        if match := TAIL_DIGITS.fullmatch(name):
            families.setdefault((match[1], match[3]), []).append(match[2])
        else:
            folded.append(name)
    for (before, after), digits in families.items():
        folded += _fold_digits(before, digits, after)
    return ",".join(folded)


def _fold_digits(before: str, digits: Sequence[str], after: str) -> list[str]:
    widths = {len(number) for number in digits}
    padded = any(number.startswith("0") and len(number) > 1 for number in digits)
    if len(digits) == 1 or (padded and len(widths) > 1):
        return [f"{before}{number}{after}" for number in digits]
    spans = fold_numbers(sorted(map(int, digits)))
    inner = re.sub(r"\d+", lambda number: number[0].zfill(min(widths)), spans)
    return [f"{before}[{inner}]{after}"]
