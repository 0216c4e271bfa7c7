"""Programs that travel to a host: one file each, which imports nothing of ours, for any Python that the host has."""

import functools
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOADER = "import sys; n = int(sys.stdin.readline()); exec(compile(sys.stdin.read(n), 'llama405b', 'exec'))"
COMMAND = (
    f"exec python3 -c {shlex.quote(LOADER)} 2>&1"  # what a host's shell is told; the program comes by standard input
)


@functools.cache
def source(name: str) -> str:
    """The text of ``sampler`` or ``hostprobe``."""
    return (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")


def standard_input(name: str, request: Mapping[str, Any]) -> str:
    """What ``COMMAND`` reads: the program, and the line of JSON that tells it what to do."""
    return f"{len(source(name))}\n{source(name)}{json.dumps(request)}\n"
