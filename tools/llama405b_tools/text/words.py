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

from llama405b.contract.errors import given

LEAST_SECRET, HIDDEN = 6, "…REDACTED"
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[PX^_][^\x1b]*\x1b\\|[ -/]*[0-~])")
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
LINE_CONTROLS = re.compile(f"[\t\n]|{CONTROLS.pattern}")
BREAKS = re.compile(r"[\t\n]+")
TOKENS = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[A-Z0-9]{16}"
    r"|xox[abp]-[A-Za-z0-9-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,})"
)
NAMED = re.compile(
    r"(\b[A-Z0-9_]{0,40}(?:TOKEN|SECRET|PASSWORD|API_?KEY|ACCESS_?KEY)[\"']?\s{0,3}[=:]\s{0,3}[\"']?|\bBearer\s)([^\s\"',;]{8,})",
    re.IGNORECASE,
)
PLAIN = str.maketrans("│─└┤┄▶◀●◐■▲▼✖·…—–→←↑↓⏎°×░▏▎▍▌▋▊▉▁▂▃▄▅▆▇█", "|-`+~><*o#^vx.~--><^v<ox....::::.:-=+*#@")


def clean(text: str) -> str:
    """Clean a log block: keep a progress bar's last state, drop control characters, redact tokens."""
    lines = [_last_written(line) for line in text.split("\n")]
    return redact(without_controls("\n".join(lines)).expandtabs())


def without_controls(text: str) -> str:
    """Remove escape sequences, and replace the other control characters, except line breaks and tabs."""
    return CONTROLS.sub("�", ESCAPES.sub("", text))


def printable(line: str) -> str:
    """Replace the control characters of a line, keeping its length."""
    return LINE_CONTROLS.sub("�", line)


def tidy(value: Any, *, lines: bool = False) -> Any:
    """Remove control characters from all text in a value; keep line breaks only where a field allows them."""
    if type(value) is str:
        text = without_controls(value)
        return text if lines else BREAKS.sub(" ", text)
    if type(value) in (tuple, list):
        return type(value)(tidy(each, lines=lines) for each in value)
    if isinstance(value, Mapping):
        return {tidy(key): tidy(each, lines=lines) for key, each in value.items()}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = [each for each in dataclasses.fields(value) if not each.metadata.get("as_written")]
    tidied = {each.name: tidy(getattr(value, each.name), lines="lines" in each.metadata) for each in fields}
    return dataclasses.replace(value, **tidied)


def redact(text: str) -> str:
    """Remove what looks like a token; keep its first letters to identify it."""
    text = TOKENS.sub(lambda match: f"{match[0][:4]}…REDACTED", text)
    return NAMED.sub(lambda match: match[0] if "REDACTED" in match[0] else f"{match[1]}…REDACTED", text)


def pieces_of(secrets: Iterable[str]) -> list[str]:
    """Return the lines of secret values to hide, longest first; very short lines are not hidden."""
    lines = {line.strip() for secret in secrets for line in secret.splitlines()}
    return sorted((line for line in lines if len(line) >= LEAST_SECRET), key=len, reverse=True)


def hide(text: str, pieces: Iterable[str]) -> str:
    """Replace the pieces of secret values in a text."""
    for piece in pieces:
        text = text.replace(piece, HIDDEN)
    return text


def hide_in_json(line: str, pieces: Iterable[str]) -> str:
    """Replace the pieces of secret values in a line of JSON, which has them escaped."""
    for piece in pieces:
        line = line.replace(json.dumps(piece)[1:-1], json.dumps(HIDDEN)[1:-1])
    return line


def _last_written(line: str) -> str:
    """Return a line as it looks after its carriage returns: the last non-blank piece."""
    return next((piece for piece in reversed(line.split("\r")) if piece.strip()), "")


def substitute(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that a stream cannot encode; a handler for ``codecs.register_error``."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    plain = error.object[error.start : error.end].translate(PLAIN)
    return "".join(char if char.isascii() else "?" for char in plain), error.end


MAX_BLOCK_LINES, MAX_BLOCK_BYTES = 500, 1 << 18
MAX_LINE_BYTES = 1 << 16  # of a line; the rest is dropped
BAR, UNENDED = (
    "\udc0d",
    "\udc0c",
)  # last character of a block's text (lone surrogates, so never from a file): a progress bar; an unfinished line
CUT = " … (line truncated; `llama405b logs -o raw` shows all of it)"
SIGNS = b"0123456789 .,:;%|/\\\\#=-+<>[](){}?*_~"
HOLE = re.compile(rb"\0{16,}")
RATE = re.compile(r"[kKMGT]?i?B\b|\b(?:it/s|s/it)\b|\b[dhms]\b")
CREDIBLE_S = 600.0  # most that a line's own time may differ from its arrival; beyond, it is another date
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
    """Splits a file's bytes into blocks as they arrive; holds back the last one because it may continue.

    A line overwritten by carriage returns (a progress bar) yields a block whenever its letters change; of states with the same
    letters, only the last becomes a block.
    """

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.begin = self.lines_end = 0  # offsets of the lines held back
        self.end = 0  # offset up to which data was fed
        self.open = False  # inside a traceback
        self.rest = b""  # an unfinished line
        self.bar: Block | None = None  # the newest state of a progress bar
        self.bar_signs, self.bar_words = b"", ""
        self.shown: Block | None = None  # the last state yielded by ``states``
        self.hole = 0  # NUL bytes at the start of the next line
        self.in_long = False  # inside a line whose first MAX_LINE_BYTES were yielded already

    def feed(self, begin: int, data: bytes) -> Iterator[Block]:
        """Take the bytes at offset ``begin`` (usually the next ones) and yield the blocks they complete."""
        # not the next bytes of the file: finish what was held back before the gap
        if begin != self.end:
            yield from self.flush()
            self.begin = self.end = begin
            self.in_long, self.hole = False, 0
        at = self.end - len(self.rest)
        self.end += len(data)
        data, self.rest = self.rest + data, b""
        for line in data.splitlines(keepends=True):  # at carriage returns, too
            first, at = at, at + len(line)
            ended, in_long = line.endswith((b"\r", b"\n")), self.in_long
            if line[0] == 0 and not in_long and not line.strip(b"\0"):  # all NUL so far: a hole in the file
                self.hole += len(line)
                continue
            if self.hole:
                tail = line.lstrip(b"\0")
                line, self.hole = _hole(self.hole + len(line) - len(tail)) + tail, 0
            self.in_long = not ended and (in_long or len(line) >= MAX_LINE_BYTES)
            if in_long:
                continue
            if not ended and not self.in_long:
                self.rest = line
            elif line.endswith(b"\r"):
                yield from self._take_state(first, at, line)
            else:
                yield from self._take_line(first, at, line)

    def _take_state(self, begin: int, end: int, line: bytes) -> Iterator[Block]:
        """Take a state of a progress bar; yield the previous one if its letters differ."""
        yield from self.flush_lines()
        text, signs = _text_of([line]), line.translate(None, SIGNS)
        if not text.strip():
            return
        words = self.bar_words if signs == self.bar_signs else words_of(text)
        if self.bar and words != self.bar_words:
            yield self.bar
        self.bar, self.bar_signs, self.bar_words = Block(begin, end, text), signs, words

    def _take_line(self, begin: int, end: int, line: bytes) -> Iterator[Block]:
        """Take a line, or the start of a long one."""
        if self.bar:
            if words_of(_text_of([line])) != self.bar_words:
                yield self.bar
            self.bar = None
        indented = bool(INDENTED.match(PREFIX.sub(b"", line, count=1)))
        starts = bool(IN_TRACEBACK.search(line))
        goes_on = self.lines and (indented or (self.open and not starts))
        if not goes_on or len(self.lines) >= MAX_BLOCK_LINES or self.lines_end - self.begin >= MAX_BLOCK_BYTES:
            yield from self.flush_lines()
            self.begin = begin
        self.lines.append(line)
        self.lines_end = end
        self.open = starts or (self.open and indented)  # the unindented "ValueError: …" ends a traceback

    def flush_lines(self) -> Iterator[Block]:
        """Yield the lines held back."""
        if self.lines:
            yield Block(self.begin, self.lines_end, _text_of(self.lines))
            self.lines = []
            self.open = False

    def flush(self) -> Iterator[Block]:
        """Yield everything held back."""
        if self.rest:
            line, self.rest = self.rest, b""
            yield from self._take_line(self.end - len(line), self.end, line)
        yield from self.flush_lines()
        if self.bar:
            yield self.bar
            self.bar = None

    def states(self, *, still: bool) -> Iterator[Block]:
        """Yield the newest state of a progress bar, or (``still``) an unfinished line; each becomes a block later.

        Its end offset is its begin offset, so a reader that resumes there gets the whole block.
        """
        state = None
        if still and self.rest:
            yield from self.flush_lines()  # these precede it
            text, begin = _text_of([self.rest]), self.end - len(self.rest)
            goes_on = self.bar and words_of(text) == self.bar_words
            state = Block(begin, begin, text + (BAR if goes_on else UNENDED))
        elif self.bar:
            state = Block(self.bar.begin, self.bar.begin, self.bar.text + BAR)
        if state and state != self.shown:
            self.shown = state
            yield state


class Pieces:
    """Yields every byte of a file as it arrives, line by line; the raw counterpart of ``Blocks``."""

    def feed(self, begin: int, data: bytes) -> Iterator[Block]:
        """Yield each line or piece."""
        for line in split_lines(data):
            text = line.decode("utf-8", "replace")
            yield Block(begin, begin + len(line), text[:-1] if line.endswith(b"\n") else text + UNENDED)
            begin += len(line)

    def flush_lines(self) -> Iterator[Block]:
        """Nothing is held back."""
        yield from ()

    def flush(self) -> Iterator[Block]:
        """Nothing is held back."""
        yield from ()

    def states(self, *, still: bool) -> Iterator[Block]:  # noqa: ARG002
        """Yield nothing: every piece has been yielded."""
        yield from ()


def _text_of(lines: Sequence[bytes]) -> str:
    """Decode lines without the final line end; truncate long lines and replace holes by their size."""
    whole = b"".join(lines)
    if len(whole) <= MAX_LINE_BYTES and b"\0" not in whole:
        return whole.decode("utf-8", "replace").rstrip("\r\n")
    found = list[str]()
    for line in lines:
        plain = line.rstrip(b"\r\n")
        if b"\0" in plain:
            plain = HOLE.sub(lambda hole: _hole(len(hole[0])), plain)
        cut = CUT if len(plain) > MAX_LINE_BYTES else ""
        found.append(plain[:MAX_LINE_BYTES].decode("utf-8", "replace") + cut)
    return "\n".join(found)


def _hole(size: int) -> bytes:
    return f"[{size:,} NUL bytes]".encode()


def words_of(text: str) -> str:
    """Return a progress bar's letters without units: states that differ only in numbers have the same."""
    return "".join(filter(str.isalpha, RATE.sub("", ESCAPES.sub("", text))))


def without_end(text: str) -> tuple[str, str]:
    """Split a block's text from its trailing mark: ``BAR``, ``UNENDED`` or ""."""
    end = text[-1:] if text.endswith((BAR, UNENDED)) else ""
    return text.removesuffix(end), end


def split_lines(data: bytes) -> list[bytes]:
    """Split into lines, keeping their ends."""
    return io.BytesIO(data).readlines()


def time_of(text: str, arrived: float, utc_offset_s: float) -> float:
    """Return when a block was written, in seconds since the epoch by its host's clock.

    ``arrived``: when it was read; ``utc_offset_s``: offset of the host's local time, assumed for a time without a zone.
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


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One block of one log."""

    time: float  # seconds since the epoch: host's clock on a host, operator's clock on the operator's machine
    host: str
    file: str  # relative to the host's log directory
    text: str
    end: int = 0  # offset in the file, in bytes
    rank: int = -1  # -1: torchrun's own log
    stream: str = ""  # out | err; "" for torchrun's own
    how: str = ""  # BAR or UNENDED if its line is not complete, else ""

    def at(self, time: float) -> "Entry":
        """Return a copy with another time."""
        return dataclasses.replace(self, time=time)


class Merge:
    """Merges entries from several sources by time, as far as their order is certain."""

    def __init__(self, most: int = 0) -> None:
        """``most``: entries to keep per source; older ones are dropped and counted (0: no limit)."""
        self.waiting: dict[str, collections.deque[Entry]] = {}
        self.last: dict[str, float] = {}
        self.open: set[str] = set()
        self.most = most
        self.dropped: dict[str, int] = {}

    def begin(self, source: str) -> None:
        """Mark a source as open: later entries of other sources wait for it."""
        self.open.add(source)
        self.waiting.setdefault(source, collections.deque(maxlen=self.most or None))

    def end(self, source: str) -> None:
        """Mark a source as closed: other sources no longer wait for it."""
        self.open.discard(source)

    def push(self, source: str, entries: Sequence[Entry]) -> None:
        """Add a source's entries; their times are raised so that they never decrease."""
        self.begin(source)
        over = self.size(source) + len(entries) - self.most
        if self.most and over > 0:
            self.drop(source, over)
        for entry in entries:
            last = max(entry.time, self.last.get(source, entry.time))
            self.last[source] = last
            self.waiting[source].append(entry if entry.time == last else entry.at(last))

    def drop(self, source: str, count: int) -> None:
        """Count dropped entries of a source."""
        self.dropped[source] = self.dropped.get(source, 0) + count

    def size(self, source: str) -> int:
        """Return how many entries of a source are waiting."""
        return len(self.waiting.get(source, ()))

    def pop(self, until: float = float("-inf")) -> Iterator[Entry]:
        """Yield in order the entries that no older one can follow; up to ``until`` even if one could."""
        heap = [(entries[0].time, source) for source, entries in self.waiting.items() if entries]
        heapq.heapify(heap)
        lacking = {source for source in self.open if not self.waiting[source]}
        while heap and not (lacking and heap[0][0] > until):
            source = heap[0][1]
            entries = self.waiting[source]
            entry = entries.popleft()
            if entries:
                heapq.heapreplace(heap, (entries[0].time, source))
            else:
                heapq.heappop(heap)
                lacking |= {source} & self.open
            yield entry


NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:[eE][+-]?\d+)?(?!\w*\d)")
ERROR = re.compile(r"error|exception|traceback|fatal|fail|killed|abort|segfault|nan\b|timed? ?out|xid", re.IGNORECASE)
TAIL_DIGITS = re.compile(r"(.*?)(\d+)(\D*)")  # the last number in a name


def is_error(entry: Entry) -> bool:
    """Return whether a block may report a failure; such blocks are never folded."""
    return bool(ERROR.search(entry.text)) or "\n" in entry.text


@dataclasses.dataclass(slots=True)
class _Kind:
    """The groups of one kind of line that are still open."""

    groups: collections.deque[list[Entry]] = dataclasses.field(default_factory=collections.deque)
    n_out: int = 0  # number of groups of this kind yielded so far
    # host and rank -> its next group, counted from the first
    next_of: dict[tuple[str, int], int] = dataclasses.field(default_factory=dict)


class Fold:
    """Collects entries for ``window_s``. A rank's second line of one kind goes to the next group of that kind."""

    def __init__(self, window_s: float = 2.0) -> None:
        self.window_s = window_s
        self.groups: collections.deque[tuple[tuple[str, str], list[Entry]]] = collections.deque()  # oldest first
        self.kinds: dict[tuple[str, str], _Kind] = {}

    def push(self, entry: Entry) -> Iterator[Sequence[Entry]]:
        """Add an entry; yield the groups that it completes, oldest first."""
        yield from self.older_than(entry.time - self.window_s)
        if is_error(entry):
            yield from self.flush()
            yield [entry]
            return
        key = (entry.stream + entry.how, NUMBER.sub("\0", entry.text))
        kind, who = self.kinds.setdefault(key, _Kind()), (entry.host, entry.rank)
        place = max(kind.next_of.get(who, 0), kind.n_out)
        kind.next_of[who] = place + 1
        if place - kind.n_out == len(kind.groups):
            kind.groups.append([])
            self.groups.append((key, kind.groups[-1]))
        kind.groups[place - kind.n_out].append(entry)

    def older_than(self, time: float) -> Iterator[Sequence[Entry]]:
        """Yield the groups that began before ``time``."""
        while self.groups and self.groups[0][1][0].time < time:
            key, group = self.groups.popleft()
            kind = self.kinds[key]
            kind.groups.popleft()
            kind.n_out += 1
            if not kind.groups:
                del self.kinds[key]
            yield group

    def flush(self) -> Iterator[Sequence[Entry]]:
        """Yield all groups."""
        yield from self.older_than(float("inf"))


class OneByOne(Fold):
    """Yields every entry as a group of one."""

    def push(self, entry: Entry) -> Iterator[Sequence[Entry]]:
        """Yield the entry."""
        yield [entry]


def group_text(group: Sequence[Entry]) -> str:
    """Return the common text of a group; differing numbers become ``lowest–highest``."""
    if len(group) == 1:
        return group[0].text
    columns = list(zip(*(NUMBER.findall(entry.text) for entry in group), strict=True))
    pieces = NUMBER.split(group[0].text)
    out = [pieces[0]]
    for column, piece in zip(columns, pieces[1:], strict=True):
        least, most = min(column, key=_value), max(column, key=_value)
        out += [least if _value(least) == _value(most) else f"{least}–{most}", piece]
    return "".join(out)


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def where_of(group: Sequence[Entry]) -> str:
    """Return a group's hosts and ranks, folded: ``gpu-[01-08] r0-63``."""
    ranks = sorted({entry.rank for entry in group if entry.rank >= 0})
    hosts = fold_names(sorted({entry.host for entry in group}))
    return f"{hosts} {given('r{}', fold_numbers(ranks)) or 'torchrun'}"


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
