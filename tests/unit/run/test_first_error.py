"""The first error in a log of any size."""

import queue

import pytest

from llama405b_tools.agent.messages import StreamMessage
from llama405b_tools.run import log_reader
from llama405b_tools.run.query import HostMessage

TRACEBACK = "Traceback (most recent call last):\n  x\nValueError: no"


class Endless:
    """A host's stream that sends one more message for each that was handled."""

    def __init__(self, fleet, hosts, request, records_of="", max_waiting=0):
        assert max_waiting, "nothing bounds what is read ahead"
        self.arrivals, self.texts = queue.Queue(), iter(TEXTS)
        for _ in range(max_waiting):
            self.release(hosts[0])

    def release(self, host):
        entries = tuple(
            (0.0, f"a/{rank}/err.log", text) for text in [next(self.texts, None)] for rank in (0, 1) if text
        )
        self.arrivals.put(HostMessage(host, StreamMessage(entries=entries, end=not entries), 0.0))

    def close(self):
        pass


@pytest.mark.parametrize("trace_at", [None, 10])
def test_a_log_is_read_piece_by_piece_and_only_the_end_is_kept(monkeypatch, trace_at):
    texts = [f"line {i}" for i in range(1000)]
    if trace_at:
        texts[trace_at] = TRACEBACK
    monkeypatch.setitem(globals(), "TEXTS", texts)
    monkeypatch.setattr(log_reader, "Streams", Endless)
    found = list(log_reader._read_stderr(None, "r", "a", 0, 1))  # of rank 0 alone
    assert found == ([TRACEBACK] if trace_at else texts[-log_reader.MAX_LAST_BLOCKS :])


TEXTS = []
