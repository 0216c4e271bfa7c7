"""Programs that travel to a host: one file each, which imports nothing of ours, for any Python that the host has."""

import functools
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def command(name: str) -> str:
    """What a host's shell is told; the program itself comes by standard input."""
    loader = f"import sys; n = int(sys.stdin.readline()); exec(compile(sys.stdin.read(n), {name!r}, 'exec'))"
    return f"exec python3 -c {shlex.quote(loader)} 2>&1"


@functools.cache
def program_text(name: str) -> str:
    """The text of ``sampler`` or ``hostprobe``."""
    return (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")


def standard_input(name: str, request: Mapping[str, Any]) -> str:
    """What ``command`` reads: the program, and the line of JSON that tells it what to do."""
    return f"{len(program_text(name))}\n{program_text(name)}{json.dumps(request)}\n"
