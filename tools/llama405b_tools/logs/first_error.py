"""``llama405b logs --first-error``: where a run's failure began: host, rank, signal, and the rank's own traceback."""

import re
from collections.abc import Mapping

from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.run import judge
from llama405b_tools.run.judge import Described
from llama405b_tools.run.query import failures_of
from llama405b_tools.run.streams import Streams
from llama405b_tools.text.clean import clean

RANK = re.compile(r"\brank (\d+)\b")
ATTEMPT = re.compile(r"attempt \d+: \[")  # how the node runner begins torchrun's log
LAST = 20  # blocks shown where there is no traceback


def find(
    fleet: Fleet, run: str, seen: Mapping[str, Described | HostError | None], attempt: int = 0
) -> tuple[bool, list[str]]:
    """Whether a run failed, and where that began, as lines.

    ``attempt``: 0 is the newest that failed, where the guard may have brought the run back since.
    """
    failures, which = failures_of(dict(seen)), 0
    known = {host: found for host, found in seen.items() if isinstance(found, dict)}
    past = sorted({end["attempt"] for found in known.values() for end in found["ends"]}, reverse=True)
    if attempt or not failures:
        for which in [attempt] if attempt else past:
            if failures := _failures_in(known, which):
                break
    if not failures:
        return False, [f"run {run}: no failure on {len(seen)} hosts{f' in attempt {attempt}' if attempt else ''}"]
    worst = judge.first_failure(failures)
    lines = [f"run {run}{f', attempt {which}' if which else ''}: {worst.host}: {worst.what}"]
    if worst.host in known:
        rank = RANK.search(worst.what)
        local_rank = int(rank[1]) - known[worst.host]["first_rank"] if rank else -1
        texts = _stderr(fleet, run, worst.host, local_rank, which)
        tracebacks = [text for text in texts if "Traceback" in text]
        lines += [line for text in tracebacks[-1:] or texts[-LAST:] for line in clean(text).split("\n")]
    if others := sorted({failure.host for failure in failures} - {worst.host}):
        lines.append(f"and after it: {', '.join(others)}")
    return True, lines


def _failures_in(known: Mapping[str, Described], attempt: int) -> list[judge.Failure]:
    """The failures of an attempt, first those that ended first by their own host's clock."""
    ends = [
        (end["time"], host, end) for host, found in known.items() for end in found["ends"] if end["attempt"] == attempt
    ]
    described = [
        (host, {"alive": False, "leftovers": [], "status": end}) for _, host, end in sorted(ends, key=lambda e: e[0])
    ]
    return [failure for host, each in described if (failure := judge.failure_of(host, each))]


def _stderr(fleet: Fleet, run: str, host: str, local_rank: int, attempt: int) -> list[str]:
    """What a rank wrote to standard error in an attempt; torchrun's own log where no rank is known."""
    wants = {"follow": False, "attempt": attempt, "stderr": local_rank >= 0, "agent": local_rank < 0}
    streams = Streams(fleet, run, [host], wants)
    texts: list[str] = []
    try:
        while True:
            _, item = streams.news.get()
            if "unreachable" in item or "end" in item:
                return texts
            for _, file, text in item.get("entries", ()):
                if (local_rank < 0 or f"/{local_rank}/" in file) and not ATTEMPT.match(text):
                    texts.append(text)
    finally:
        streams.close()
