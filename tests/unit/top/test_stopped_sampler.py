"""What runs on a host for the screen: an agent, or where none can run a sampler; one that is stopped is replaced."""

import os
import signal
import socket
import sys
import types

import pytest
from fakes import FakeFleet

from conftest import ROOT
from llama405b.contract import reader
from llama405b.contract.files import write_json
from llama405b.spec.plan import Node, Plan
from llama405b_tools.agent import processes
from llama405b_tools.hosts.fleet import Fleet, StreamEndedError
from llama405b_tools.hosts.inventory import Host, parse_hosts
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.top import event_sources
from llama405b_tools.top.event_sources import LiveSource
from llama405b_tools.top.state import thresholds
from llama405b_tools.top.state.frames import HostFrame
from ops_rig import Patience, wait_for


@pytest.mark.slow
def test_a_sampler_that_is_stopped_is_replaced(monkeypatch):
    for name, seconds in {"QUIET_S": 4.0, "QUIET_FRAMES": 0, "PING_S": 0.2}.items():
        monkeypatch.setattr(thresholds, name, seconds)
    monkeypatch.setattr(event_sources, "RETRY_S", 0.2)
    me = socket.gethostname()
    with Fleet(parse_hosts(f"{me} address=localhost\n", "hosts")) as fleet:
        live = LiveSource(fleet, None, 0.2)
        try:
            _until(live, lambda event: event.frame is not None)
            stopped = live.streams[me].child.pid
            os.kill(stopped, signal.SIGSTOP)
            link = _until(live, lambda event: event.link and event.link[0] == "TIMEOUT").link
            assert "reconnecting" in link[1]
            _until(live, lambda event: event.frame is not None)
            assert live.streams[me].child.pid != stopped
            wait_for(lambda: processes.start_time(stopped) is None)
        finally:
            live.close()


def _until(live, wanted):
    """Events, until one is as wanted."""
    patience = Patience()
    while patience.lasts():
        for event in live.events(live.now() + 1):
            if wanted(event):
                return event
    raise AssertionError("it did not come within a minute")


@pytest.mark.parametrize("python", ["missing", "silent"])
def test_a_host_without_our_environment_shows_its_hardware_until_it_has_one(tmp_path, monkeypatch, python):
    for name, seconds in {"QUIET_S": 3.0, "QUIET_FRAMES": 0, "PING_S": 0.2}.items():
        monkeypatch.setattr(thresholds, name, seconds)
    for name, seconds in {"RETRY_S": 0.2, "AGENT_RETRY_S": 8.0}.items():
        monkeypatch.setattr(event_sources, name, seconds)
    program = tmp_path / "python"
    if python == "silent":
        write_program(program, "exec sleep 600")
    (tmp_path / "runs/r").mkdir(parents=True)
    node = Node("a", 1, 0, str(tmp_path), str(program), "", "", {})
    write_json(tmp_path / "runs/r/plan.json", Plan("r", 1, 1.0, "r-1-x", "a:1", ("x",), (), (node,)))
    host = Host("a", f"{tmp_path}/hosts:1", address="localhost", python=str(program), workdir=str(tmp_path))
    with Fleet([host]) as fleet:
        live = LiveSource(fleet, None, 0.2)
        try:
            frame = _until(live, lambda event: event.frame is not None).frame
            assert reader.build_record(HostFrame, frame, "frame").cpu.total > 0
            assert (frame["run"], frame["cwd"]) == (None, str(tmp_path))
            assert frame["run_fault"].startswith(
                f"{program} cannot be run; run `" if python == "missing" else "its python printed nothing for "
            )
            write_program(program, f'PYTHONPATH={ROOT}:{ROOT}/tools exec {sys.executable} "$@"')
            seen = _until(
                live, lambda event: (event.frame and event.frame["run"]) or (event.link and event.link[0] == "DOWN")
            )
            assert seen.frame["run"]["name"] == "r"
        finally:
            live.close()


@pytest.mark.parametrize("first", [HostError("no route", "TIMEOUT"), StreamEndedError("the connection broke")])
def test_a_host_that_was_away_is_asked_for_its_run_first(monkeypatch, first):
    """Only an agent that said nothing gives way to the sampler."""
    monkeypatch.setattr(event_sources, "RETRY_S", 0.01)
    asked, answers = (
        [],
        [first, ['{"run": 1}'], [], ['{"run": 2}'], first, ["/py: not found"], ['{"run": 3}'], ['{"run": 4}']],
    )

    def answer(how):
        asked.append(how)
        if not answers:
            raise HostError("over")
        if isinstance(said := answers.pop(0), HostError):
            raise said
        return Said(said)

    with FakeFleet(("a",)) as fleet:
        monkeypatch.setattr(fleet, "stream", lambda *_: answer("agent"))
        connection = types.SimpleNamespace(stream=lambda *_: answer("sampler"))
        monkeypatch.setattr(fleet, "connection", lambda _: connection)
        live = LiveSource(fleet, None, 2.0)
        try:
            frames = [_until(live, lambda event: event.frame is not None).frame["run"] for _ in range(4)]
        finally:
            live.close()
    assert frames == [1, 2, 3, 4]
    assert asked[:8] == ["agent"] * 6 + ["sampler", "agent"]


def test_another_hosts_hardware_is_never_shown_for_this_machines(monkeypatch):
    """A Slurm node's files are here, but the node is not."""
    monkeypatch.setattr(event_sources, "RETRY_S", 0.01)
    with FakeFleet(("a",)) as fleet:
        monkeypatch.setattr(fleet, "stream", lambda *_: Said(["/py: not found"]))
        monkeypatch.setattr(fleet, "connection", lambda _: pytest.fail("no sampler is asked"))
        live = LiveSource(fleet, None, 2.0, files_are_local=True)
        try:
            links = [_until(live, lambda event: event.link and event.link[0] == "DOWN").link for _ in range(3)]
        finally:
            live.close()
    assert {why for _, why in links} == {"the agent failed (/py: not found)"}


class Said(list):
    """A stream of these lines."""

    def send(self, text):
        pass

    def close(self):
        pass


def write_program(path, line):
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
