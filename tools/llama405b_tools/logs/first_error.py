"""Find where a run's failure began: host, rank, signal, and the rank's traceback."""

import collections
import re
from collections.abc import Mapping, Sequence

from llama405b.contract.phrases import counted, given
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.remote.messages.host_run import HostRun
from llama405b_tools.remote.messages.stream import StreamRequest
from llama405b_tools.run import judge
from llama405b_tools.run.judge import Failure, failure_words
from llama405b_tools.run.query import Seen, failures_of, known_of
from llama405b_tools.run.streams import Streams, Unreachable
from llama405b_tools.text.clean import clean

ATTEMPT = re.compile(r"attempt \d+: \[")  # how the node runner begins torchrun's log
LAST = 20  # blocks shown if there is no traceback
MESSAGES = 40  # read ahead


def find(fleet: Fleet, run: str, seen: Seen, attempt: int = 0) -> tuple[bool, list[str]]:
    """Return whether a run failed, and where the failure began, as lines.

    ``attempt``: 0 is the newest that failed, even if the guard has restarted the run since.
    """
    known = known_of(seen)
    failures, which = failures_of(seen), 0
    if attempt or not failures:
        failures, which = _in_the_past(known, attempt)
    if not failures:
        return False, [f"run {run}: no failure on {counted(len(seen), 'host')}{given(' in attempt {}', attempt)}"]
    worst = judge.first_failure(failures)
    lines = [f"run {run}{given(', attempt {}', which)}: {worst.host}: {failure_words(worst)}"]
    if worst.host in known:
        lines += _words_of(fleet, run, worst, known[worst.host], which)
    if others := sorted({failure.host for failure in failures} - {worst.host}):
        lines.append(f"and after it: {', '.join(others)}")
    return True, lines


def _words_of(fleet: Fleet, run: str, worst: Failure, known: HostRun, attempt: int) -> list[str]:
    """The failed rank's traceback, or its last output; torchrun's own output if no rank is known."""
    rank = worst.cause.rank
    local_rank = rank - known.first_rank if rank is not None else -1
    texts = _stderr(fleet, run, worst.host, local_rank, attempt)
    return [line for text in texts for line in clean(text).split("\n")]


def _in_the_past(known: Mapping[str, HostRun], attempt: int) -> tuple[list[Failure], int]:
    """The failures of an attempt (0: the newest that has any), and its number."""
    recorded = [blame for found in known.values() for blame in found.blames]
    past = {end.attempt for found in known.values() for end in found.ends} | {blame.attempt for blame in recorded}
    for which in sorted(past, reverse=True):
        blame = judge.blame_of(which, recorded)
        if attempt in (0, which) and (failures := judge.with_blame(_failures_in(known, which), blame)):
            return failures, which
    return [], attempt


def _failures_in(known: Mapping[str, HostRun], attempt: int) -> list[Failure]:
    """The failures of an attempt, in order of time: as long ago as each host's own clock says."""
    ends = [
        (end.time - found.now, host, end)
        for host, found in known.items()
        for end in found.ends
        if end.attempt == attempt
    ]
    ends.sort(key=lambda entry: entry[0])
    found = [judge.failure_of(host, judge.state_of(end, alive=False)) for _, host, end in ends]
    return [failure for failure in found if failure]


def _stderr(fleet: Fleet, run: str, host: str, local_rank: int, attempt: int) -> Sequence[str]:
    """The last traceback that a rank wrote in an attempt, else its last blocks; torchrun's own log if no rank is known.

    Keeps no more than that: the log may be large.
    """
    request = StreamRequest(run, host, attempt=attempt, stderr=local_rank >= 0, agent=local_rank < 0)
    streams = Streams(fleet, [host], request, most=MESSAGES)
    last = collections.deque[str](maxlen=LAST)
    traceback: tuple[str, ...] = ()
    try:
        while True:
            news = streams.arrivals.get().news
            if isinstance(news, Unreachable) or news.end:
                return traceback or last
            streams.done(host)
            for _, file, text in news.entries:
                if (local_rank < 0 or f"/{local_rank}/" in file) and not ATTEMPT.match(text):
                    last.append(text)
                    traceback = (text,) if "Traceback" in text else traceback
    finally:
        streams.close()
