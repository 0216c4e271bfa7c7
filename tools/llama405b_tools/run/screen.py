"""Printing for whoever is looking. Nothing else depends on whether anybody is."""

import os
import sys


class NobodyReadsError(Exception):
    """Standard output is closed, broken or full, and printing was all that was left to do."""


def show(text: str, *, end: str = "\n", error: bool = False) -> bool:
    """Print to standard output (or standard error); returns whether that was possible."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(text, end=end, file=stream, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # or the interpreter tries again at exit
        return False
    except (OSError, ValueError):
        return False
    return True
