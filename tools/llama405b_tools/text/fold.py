"""Fold the same line of many ranks into one: ranks in front, numbers as ranges. Errors are never folded. Pure."""

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence

from llama405b.contract.phrases import given
from llama405b_tools.text.merge import Entry

NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:[eE][+-]?\d+)?(?!\w*\d)")
ERROR = re.compile(r"error|exception|traceback|fatal|fail|killed|abort|segfault|nan\b|timed? ?out|xid", re.IGNORECASE)
TAIL_DIGITS = re.compile(r"(.*?)(\d+)(\D*)")  # the last number in a name


def is_error(entry: Entry) -> bool:
    """Whether a block may report a failure; such blocks are shown one by one."""
    return bool(ERROR.search(entry.text)) or "\n" in entry.text


@dataclasses.dataclass(slots=True)
class _Kind:
    """The groups of one kind of line that are still open."""

    groups: collections.deque[list[Entry]] = dataclasses.field(default_factory=collections.deque)
    n_out: int = 0  # groups of this kind that are complete
    # host and rank -> its next group, counted from the first
    next_of: dict[tuple[str, int], int] = dataclasses.field(default_factory=dict)


class Fold:
    """Collects entries for ``window_s``. A rank's second line of one kind goes to the next group of that kind."""

    def __init__(self, window_s: float = 2.0) -> None:
        self.window_s = window_s
        self.groups: collections.deque[tuple[tuple[str, str], list[Entry]]] = collections.deque()  # oldest first
        self.kinds: dict[tuple[str, str], _Kind] = {}

    def push(self, entry: Entry) -> Iterator[Sequence[Entry]]:
        """Take an entry; yield the groups that it completes, oldest first."""
        yield from self.older_than(entry.time - self.window_s)
        if is_error(entry):
            yield from self.flush()
            yield [entry]
            return
        key = (entry.stream, NUMBER.sub("\0", entry.text))
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
    """Yields every entry by itself."""

    def push(self, entry: Entry) -> Iterator[Sequence[Entry]]:
        """Yield the entry."""
        yield [entry]


def group_text(group: Sequence[Entry]) -> str:
    """Return the common text of a group, with differing numbers as ``least–most``."""
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
