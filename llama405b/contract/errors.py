"""Errors that end a program with one sentence, exit codes that all programs share, and helpers to format messages. Pure.

UserError            bad input: nothing was changed         exit 2
└── RunError         a host or the run is at fault          exit 1
"""

import difflib
import errno
import re
from collections.abc import Callable, Iterable, Sequence, Sized

EXIT_OK, EXIT_FAILED, EXIT_REFUSED, EXIT_UNFIT, EXIT_DETACHED = 0, 1, 2, 3, 130


class UserError(Exception):
    """One sentence for the person at the terminal: where, what, and what to do."""

    exit_code = EXIT_REFUSED

    def __reduce__(
        self,
    ) -> tuple[Callable[..., Exception], tuple[type[Exception], tuple[object, ...], dict[str, object]]]:
        """Pickle the error with all its attributes: it may come from another process."""
        return _rebuild_error, (type(self), self.args, vars(self))


def _rebuild_error(kind: type[Exception], args: tuple[object, ...], state: dict[str, object]) -> Exception:
    error = kind.__new__(kind, *args)
    vars(error).update(state)
    return error


class RunError(UserError):
    """The input was valid; a host, a rank or the run failed."""

    exit_code = EXIT_FAILED


def exit_code_for(faults: Sized | bool) -> int:
    """Return the exit code of a check: failed if there are any faults."""
    return EXIT_FAILED if faults else EXIT_OK


_MISSING_REMEDY = "it was removed, or its filesystem is not mounted"
REMEDIES = {
    errno.ENOSPC: "free up space there",
    errno.EDQUOT: "free up space there: this user's quota is used up",
    errno.EACCES: "give this user permission",
    errno.EPERM: "give this user permission",
    errno.EROFS: "its filesystem is read-only: mount it writable again, or see dmesg there if a disk failed",
    errno.EIO: "its disk is failing: see dmesg there",
    errno.ENOENT: _MISSING_REMEDY,
    errno.ENOTDIR: _MISSING_REMEDY,
    errno.ESTALE: _MISSING_REMEDY,
    errno.ENODEV: "mount it again",
}


def fmt_if(template: str, value: str | float | None) -> str:
    """Format ``template`` with the value; '' if the value is None, empty or 0."""
    return template.format(value) if value else ""


def pluralize(n: int, noun: str, plural: str = "", *, thousands: bool = False) -> str:
    """Return ``1 host`` or ``2 hosts``; ``plural`` if it does not end in -s alone; ``thousands``: ``2,000 hosts``."""
    if n == 1:
        return f"1 {noun}"
    return f"{f'{n:,}' if thousands else n} {plural or noun + 's'}"


def and_more(items: Sized, n_shown: int = 1) -> str:
    """Write `` and 3 more`` after the first ``n_shown``; '' if there are no more."""
    return fmt_if(" and {} more", max(0, len(items) - n_shown))


def last_or(lines: Sequence[str], default: str = "") -> str:
    """Return the last line; ``default`` if there is none."""
    return [default, *lines][-1]


def shorten(text: str, max_chars: int = 80) -> str:
    """Shorten a text from elsewhere so that it fits in a message."""
    return text if len(text) <= max_chars else f"{text[:max_chars]}…"


def printable_name(name: str) -> str:
    """Return a file name for display; invalid UTF-8 and control characters are escaped."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return `` (did you mean 'status'?)`` for a word that is close to a known one, else ''."""
    return fmt_if(" (did you mean {!r}?)", "".join(difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.7)))


def reason_of(error: Exception) -> str:
    """Return why a file could not be read or written, without its path."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def remedy_of(error: BaseException) -> str:
    """Return a remedy for a file error, as ``; free up space there``; '' if none is known."""
    return fmt_if("; {}", REMEDIES.get(error.errno or 0, "") if isinstance(error, OSError) else "")


DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)?")
SIZE = re.compile(r"(\d{1,9}(?:\.\d+)?)(MB|GB|TB)?")
STAGING_SHARE = 0.8  # of the free memory, for staging copies of a save
UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, None: 1}


def parse_seconds(text: str, source: str) -> float:
    """Parse ``30s``, ``10m``, ``1h`` or plain seconds.

    Raises:
        UserError: The text is not a valid time.
    """
    match = DURATION.fullmatch(text)
    if not match or len(match[1]) > 9:
        raise UserError(f"{source}: {text!r} is not a valid time; write 30s, 10m or 1h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, None: 1}[match[2]]


def parse_bytes(text: str, source: str) -> int:
    """Parse ``500MB``, ``40GB``, ``1.5TB`` or plain bytes."""
    match = SIZE.fullmatch(text)
    if not match:
        raise UserError(f"{source}: {text!r} is not a valid size; write 500MB, 40GB or 1.5TB")
    return int(float(match[1]) * UNITS[match[2]])


def parse_staging_bytes(text: str) -> int | None:
    """Parse ``checkpoint.staging``: a size, or auto (None).

    Raises:
        UserError: It is neither.
    """
    return None if text == "auto" else parse_bytes(text, "checkpoint.staging")


def format_size(n_bytes: float) -> str:
    """Format bytes as ``1.50 GB``, or ``1.50 MB`` below 1 GB."""
    return f"{n_bytes / 1e9:,.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:,.2f} MB"
