"""``llama405b logs --first-error``: where a run's failure began: host, rank, signal, and the rank's own traceback."""

import re
from collections.abc import Mapping

from llama405b.errors import FAILED, GOOD
from llama405b_tools import runs
from llama405b_tools.clean import clean
from llama405b_tools.fleet import Fleet
from llama405b_tools.runs import Described
from llama405b_tools.status import failures_of
from llama405b_tools.streams import Streams
from llama405b_tools.transport import HostError

RANK = re.compile(r"\brank (\d+)\b")
LAST = 20  # blocks shown where there is no traceback


def show(fleet: Fleet, run: str, seen: Mapping[str, Described | HostError | None]) -> int:
    """Print it; returns 1 where there is one, 0 where nothing failed."""
    failures = failures_of(dict(seen))
    if not failures:
        print(f"run {run}: no failure on {len(seen)} hosts")
        return GOOD
    worst = runs.first_failure(failures)
    print(f"run {run}: {worst.host}: {clean(worst.what)}")
    found = seen[worst.host]
    if isinstance(found, dict):
        rank = RANK.search(worst.what)
        texts = _stderr(fleet, run, worst.host, int(rank[1]) - found["first_rank"] if rank else -1)
        tracebacks = [text for text in texts if "Traceback" in text]
        for text in tracebacks[-1:] or texts[-LAST:]:
            print(clean(text))
    others = sorted({failure.host for failure in failures} - {worst.host})
    if others:
        print(f"and after it: {', '.join(others)}")
    return FAILED


def _stderr(fleet: Fleet, run: str, host: str, local_rank: int) -> list[str]:
    """What a rank wrote to standard error in the newest attempt; torchrun's own log where no rank is known."""
    streams = Streams(fleet, run, [host], {"follow": False, "stderr": local_rank >= 0, "agent": local_rank < 0})
    texts: list[str] = []
    try:
        while True:
            _, item = streams.news.get()
            if "unreachable" in item or "end" in item:
                return texts
            for _, file, text in item.get("entries", ()):
                if local_rank < 0 or f"/{local_rank}/" in file:
                    texts.append(text)
    finally:
        streams.close()
