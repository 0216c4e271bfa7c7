"""Building blocks of messages for people. Pure."""

import difflib
import errno
from collections.abc import Iterable, Sequence, Sized

_GONE = "it was removed, or its filesystem is not mounted"
REMEDIES = {
    errno.ENOSPC: "free up space there",
    errno.EDQUOT: "free up space there: this user's quota is used up",
    errno.EACCES: "give this user the right",
    errno.EPERM: "give this user the right",
    errno.EROFS: "its filesystem is read-only: mount it writable again, or see dmesg there if a disk failed",
    errno.EIO: "its disk fails: see dmesg there",
    errno.ENOENT: _GONE,
    errno.ENOTDIR: _GONE,
    errno.ESTALE: _GONE,
    errno.ENODEV: "mount it again",
}


def given(form: str, value: str | float | None) -> str:
    """Format ``form`` with the value; '' if the value is None, empty or 0."""
    return form.format(value) if value else ""


def counted(n: int, noun: str, plural: str = "", *, grouped: bool = False) -> str:
    """Return ``1 host`` or ``2 hosts``; ``plural`` if it does not end in -s alone; ``grouped``: ``2,000 hosts``."""
    if n == 1:
        return f"1 {noun}"
    return f"{f'{n:,}' if grouped else n} {plural or noun + 's'}"


def and_more(items: Sized, shown: int = 1) -> str:
    """Write `` and 3 more`` after the first ``shown``; '' if there are no more."""
    return given(" and {} more", max(0, len(items) - shown))


def last_of(lines: Sequence[str], otherwise: str = "") -> str:
    """Return the last line; ``otherwise`` if there is none."""
    return [otherwise, *lines][-1]


def short(text: str, most: int = 80) -> str:
    """Cut a text that somebody else wrote to a length that fits in a message."""
    return text if len(text) <= most else f"{text[:most]}…"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'status'?)`` for a word that is close to a known one, else ''."""
    return given(" (did you mean {!r}?)", "".join(difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)))


def reason_of(error: Exception) -> str:
    """Say why a file could not be read or written, without its path, which the message already names."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    return getattr(error, "strerror", None) or str(error)


def remedy_of(error: BaseException) -> str:
    """Return ``; free up space there``, or what else helps where a file cannot be read or written; '' if that is unknown."""
    return given("; {}", REMEDIES.get(error.errno or 0, "") if isinstance(error, OSError) else "")
