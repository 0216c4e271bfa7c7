"""What arrives from the agents of a run: why one ended, and no secret of the run."""

import dataclasses
import json

import pytest
from fakes import FakeFleet

from llama405b.contract import reader
from llama405b.contract.files import write_json
from llama405b.contract.paths import RunDir
from llama405b.spec.plan import Node, Plan
from llama405b_tools.agent.messages import StreamMessage, StreamRequest
from llama405b_tools.hosts.transport import read_message
from llama405b_tools.parsers import SmiAnswer
from llama405b_tools.run.query import Streams, Unreachable
from llama405b_tools.top import event_sources


@pytest.fixture
def arrives(monkeypatch, tmp_path):
    """The first message of host a, which says this."""
    monkeypatch.chdir(tmp_path)
    write_json(RunDir.from_name("r").plan, Plan("r", 1, 0.0, "r-1-x", "a:1", ("x",), ("MY_KEY", "OTHER"), ()))
    with FakeFleet(("a",)) as fleet:

        def first(said):
            fleet.fakes["a"].faults["stream"] = said
            streams = Streams(fleet, ["a"], StreamRequest("r", ""))
            try:
                return streams.arrivals.get(timeout=120).message
            finally:
                streams.close()

        yield first


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("/py: No module named llama405b_tools", "/py has no llama405b in /w; run `"),
        ("runs/r: Permission denied", "the agent failed (runs/r: Permission denied)"),
        ("", "the connection was lost or the program on the host ended"),
    ],
)
def test_the_last_words_of_an_agent_say_why_it_ended(arrives, said, why):
    news = arrives(said)
    assert isinstance(news, Unreachable)
    assert news.why.startswith(why)


def test_the_values_of_the_runs_secrets_are_hidden(arrives, monkeypatch):
    monkeypatch.setenv("MY_KEY", 'zürich "q"')
    monkeypatch.setenv("UNRELATED", "is told")
    news = arrives(json.dumps({"entries": [[1.0, "a/0/stdout.log", 'it is zürich "q", is told']]}))
    assert isinstance(news, StreamMessage)
    assert news.entries[0][2] == "it is …REDACTED, is told"


def test_what_a_host_sends_is_cleaned_as_it_arrives_but_for_line_breaks_and_what_is_compared_or_sent_back():
    odd, line, lines = "a\x1b]0;title\x07\r\n\tb\x9b", "a� b�", "a�\n\tb�"
    node = Node(odd, 1, 0, "/w", "/py", "", "", {"A": odd})
    plan = Plan("r", 1, 0.0, "x", odd, (odd,), (odd,), (node,), owner=odd, setup=odd)
    tidied = dataclasses.replace(node, name=line)
    tidied_plan = dataclasses.replace(plan, endpoint=line, secrets=(line,), nodes=(tidied,), owner=line)
    assert read_message(Plan, reader.dumps(plan)) == tidied_plan
    log = StreamMessage(entries=((0.0, odd, odd),), marks={odd: (1, 2)})  # whoever shows a log cleans it
    assert read_message(StreamMessage, reader.dumps(log)) == log
    smi = SmiAnswer("a, 1\nb, 2\n", apps="1\n2", nvlink="GPU 0\n\t Link")  # which are read line by line
    assert read_message(SmiAnswer, reader.dumps(smi)) == smi
    frame = json.dumps({"smi": {"text": odd}, "kernel": [odd, 1, None]})
    assert event_sources._parse_frame(frame) == {"smi": {"text": lines}, "kernel": [lines, 1, None]}
