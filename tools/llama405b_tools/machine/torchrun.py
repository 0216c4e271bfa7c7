"""Parse what torchrun writes when it fails. Pure; ``tests/data/foreign/torchrun`` has a recording of each form."""

import re

ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):.*?rank\s*: \d+ \(local_rank: (\d+)\).*?exitcode\s*: (-?\d+)", re.DOTALL
)
SIGNALED = re.compile(r"SignalException: Process \d+ got signal: (\d+)")


def root_cause(text: str) -> tuple[int, int] | None:
    """Return the local rank that torchrun saw fail first on its host, and its exit code (negative: signal), or None."""
    match = ROOT_CAUSE.search(text)
    return (int(match[1]), int(match[2])) if match else None


def ended_by(text: str) -> int | None:
    """Return the signal that torchrun itself was ended with, and that it passed on to its ranks; None if there was none."""
    match = SIGNALED.search(text)
    return int(match[1]) if match else None
