"""Pieces that sentences for people are made of. Pure."""

from collections.abc import Sequence, Sized


def given(form: str, value: str | float | None) -> str:
    """``form`` with the value in its ``{}``; '' where there is none, or it is empty or 0."""
    return form.format(value) if value else ""


def counted(n: int, noun: str, plural: str = "") -> str:
    """Return ``1 host`` or ``2 hosts``; ``plural`` if it does not end in -s alone."""
    if n == 1:
        return f"1 {noun}"
    return f"{n} {plural or noun + 's'}"


def and_more(items: Sized, shown: int = 1) -> str:
    """`` and 3 more``, beside the ``shown`` first; '' where those are all."""
    return given(" and {} more", max(0, len(items) - shown))


def last_of(lines: Sequence[str], otherwise: str = "") -> str:
    """The last line; ``otherwise`` where there is none."""
    return [otherwise, *lines][-1]


def reason_of(error: Exception) -> str:
    """Why a file could not be read or written, without its path, which the sentence says already."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    return getattr(error, "strerror", None) or str(error)
