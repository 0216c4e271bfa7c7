"""Programs that are sent to a host: one file each, which imports nothing of ours, for any Python that the host has."""

import functools
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def command(name: str) -> str:
    """Return the shell command for a host; the program itself follows on standard input."""
    loader = f"import sys; f = sys.stdin.buffer; exec(compile(f.read(int(f.readline())), {name!r}, 'exec'))"
    return f"exec python3 -I -c {shlex.quote(loader)} 2>&1"


@functools.cache
def program_text(name: str) -> str:
    """Return the source of ``sampler`` or ``hostprobe``."""
    return (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")


def standard_input(name: str, request: Mapping[str, Any]) -> str:
    """Return what ``command`` reads: the program, and its request as a line of JSON."""
    return f"{len(program_text(name).encode())}\n{program_text(name)}{json.dumps(request)}\n"
