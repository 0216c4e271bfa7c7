"""Printing for whoever is looking. Nothing else depends on whether anybody is."""

import os
import sys
from typing import TextIO

from llama405b.contract.phrases import reason_of

_lost: dict[TextIO, str] = {}  # standard streams that could not be written, and why; '': nobody reads them


class NobodyReadsError(Exception):
    """Standard output is closed, broken or full, and printing was all that was left to do."""


def show(text: str, *, end: str = "\n", error: bool = False) -> bool:
    """Print to standard output (or standard error); returns whether it is there to be read."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(text, end=end, file=stream, flush=True)
    except BrokenPipeError:
        _lost[stream] = ""
        _discard(stream)
    except (OSError, ValueError) as fault:
        _lost[stream] = reason_of(fault)
        return False
    return _lost.get(stream) != ""


def nowhere(number: int) -> TextIO:
    """Return a file for a standard stream that was closed at the start (``>&-``)."""
    stream = os.fdopen(number, "w", closefd=False)
    _lost[stream] = ""
    return stream


def settle() -> str:
    """Let go of what could not be printed, which the interpreter would try again at exit, and fail.

    Returns why output is lost; '' if none is, or nobody reads it.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as fault:
            if not isinstance(fault, BrokenPipeError):
                _lost[stream] = reason_of(fault)
            _discard(stream)
    return _lost.get(sys.stdout) or _lost.get(sys.stderr, "")


def _discard(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
