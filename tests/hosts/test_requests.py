"""Operators' requests to a training run: all ranks carry them out between two steps, and an event answers them."""

import json
import os
import re
import sys

import pytest

from conftest import ONE_HOST, ROOT
from llama405b.contract import reader
from llama405b.contract.records import EventKind, RequestKind, RunEvent
from llama405b_tools.agent import describe
from llama405b_tools.hosts.fleet import Fleet, read_hosts
from ops_rig import PACED, Terminal, heartbeat, settings, wait_for


@pytest.fixture
def ask(work, monkeypatch):
    """Ask a run, as a verb would, and wait for the answer."""
    monkeypatch.chdir(work)

    def events(run):
        path = work / "runs" / run / "events/rank-0.jsonl"
        return (
            [reader.loads(RunEvent, line, "event") for line in path.read_text().splitlines()] if path.exists() else []
        )

    def request(run, kind, steps=1):
        with Fleet(read_hosts(work / "hosts")) as fleet:
            asked = fleet.call("node-a", describe.ask, 30.0, run, kind, "me@here", steps)
        if not asked:
            return None
        return wait_for(lambda: next((event for event in events(run) if event.request == asked), None), 90)

    request.events = events
    return request


def test_save_profile_memory_and_stacks(work, cli, demo, corpus, ask):
    flags = [*settings(demo, corpus, steps=100_000), *PACED]
    assert cli(work, "launch", "--run", "asked", *flags, "--checkpoint.every", 90_000).returncode == 0
    wait_for(lambda: heartbeat(work, "asked", 0)["step"] > 2)

    typed = cli(work, "ask", "save", "--run", "asked")
    step, path = re.fullmatch(r"saved step (\d+): (\S+) on node-a\n", typed.stdout).groups()
    assert (work / path / "manifest.json").exists()
    assert path.endswith(f"step-{int(step):08d}")

    typed = cli(work, "ask", "profile", "--run", "asked", "--steps", 2)
    others = "the files of the other 1 rank are in the same place on their hosts"
    assert re.fullmatch(rf"a profile of 2 steps: \S+/profile-rank-0\S+ on node-a; {others}\n", typed.stdout), typed
    profile = next(event for event in reversed(ask.events("asked")) if event.kind is EventKind.ANSWERED)
    traces = sorted((work / "runs/asked/diagnosis").glob("profile-rank-*"))
    assert [path.name.split("-step-")[0] for path in traces] == ["profile-rank-0", "profile-rank-1"]
    names = {each.get("name") for each in json.loads((work / profile.path).read_text())["traceEvents"]}
    assert any("gloo" in str(name) or "aten::mm" in str(name) for name in names)

    memory = json.loads((work / ask("asked", RequestKind.MEMORY).path).read_text())
    assert memory["VmRSS"] > 50 << 20

    stacks = (work / ask("asked", RequestKind.STACKS).path).read_text()
    assert "run_steps" in stacks

    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}", "PATH": os.environ["PATH"]}
    top = Terminal([sys.executable, "-m", "llama405b_tools.cli", "top"], work, env)
    try:
        top.shows(r"asked (TRAINING|SAVING)", 60)
        top.keys("c", "y")
        shown = top.shows(r"saved step \d+: \S+ on node-a(.|\n)*exit code 0", 60)
    finally:
        top.close()
    assert (work / re.search(r"saved step \d+: (\S+) on", shown)[1] / "manifest.json").exists()

    assert cli(work, "stop", "--run", "asked").returncode == 0
    kinds = [event.kind for event in ask.events("asked")]
    assert kinds[0] is EventKind.STARTED
    assert kinds[-1] is EventKind.STOPPED
    assert ask("asked", RequestKind.SAVE) is None  # it no longer lives
    late = cli(work, "ask", "save", "--run", "asked")
    assert (late.returncode, "run asked is not running" in late.stderr) == (2, True)


def test_what_was_asked_before_an_attempt_is_not_asked_of_it(work, cli, demo, corpus, ask):
    (work / "hosts").write_text(ONE_HOST)
    flags = [*settings(demo, corpus, steps=100_000), *PACED, "--checkpoint.every", 0]
    assert cli(work, "launch", "--run", "none", *flags).returncode == 0
    wait_for(lambda: heartbeat(work, "none", 0)["step"] > 1)
    refused = ask("none", RequestKind.SAVE)
    assert (refused.path, refused.detail) == ("", "checkpoint.every is 0: this run saves no checkpoints")
    typed = cli(work, "ask", "save", "--run", "none")
    assert typed.returncode == 1
    assert "run none: checkpoint.every is 0: this run saves no checkpoints" in typed.stderr
    (work / "runs/none/diagnosis").write_text("in the way")
    for kind in (RequestKind.MEMORY, RequestKind.STACKS, RequestKind.PROFILE):
        lost = ask("none", kind)
        assert (lost.path, "could not be written" in lost.detail) == ("", True), kind
    before = heartbeat(work, "none", 0)["step"]
    wait_for(lambda: heartbeat(work, "none", 0)["step"] > before)  # the run is none the worse for it
    (work / "runs/none/requests/odd.json").write_text("{")
    assert cli(work, "stop", "--run", "none", "--grace", 0).returncode == 0
    answered = [event for event in ask.events("none") if event.kind is EventKind.ANSWERED]
    assert cli(work, "launch", "--run", "none", "--resume", "auto", *flags).returncode == 0
    wait_for(lambda: heartbeat(work, "none", 0)["step"] > 3)
    assert [event for event in ask.events("none") if event.kind is EventKind.ANSWERED] == answered
    assert cli(work, "stop", "--run", "none", "--grace", 0).returncode == 0
