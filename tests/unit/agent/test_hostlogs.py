"""The logs of a host, as a stream reads them."""

import types

import pytest

from llama405b.contract.paths import RunDir
from llama405b_tools.agent import streaming
from llama405b_tools.agent.messages import StreamRequest
from llama405b_tools.agent.streaming import HostLogs
from llama405b_tools.text.words import LogEntry


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("most_bytes", [0, 1 << 16])
def test_a_flood_does_not_keep_the_rest_of_the_news_waiting(tmp_path, monkeypatch, most_bytes):
    monkeypatch.setattr(streaming, "read_plan", lambda _: types.SimpleNamespace(attempt=1))
    logs = HostLogs(RunDir(tmp_path), "a", StreamRequest("r", "a", follow=True, most_bytes=most_bytes))
    logs.tail.positions[logs.root / "f.log"] = (1, 0)

    def more(**_):
        logs.merge.push("f.log", [LogEntry(0.0, "a", "f.log", "x")])
        return True

    monkeypatch.setattr(logs, "_read_files", more)
    entries = [entry for news in logs.poll(final=False) for entry in news.entries]
    assert set(entries) == {(0.0, "f.log", "x")}
