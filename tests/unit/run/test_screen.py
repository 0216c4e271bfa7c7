"""What is printed where nobody reads, where there is no room, and where a standard stream is closed."""

import os
import subprocess
import sys

import pytest
from fakes import FakeFleet, over

from conftest import ROOT
from llama405b_tools.agent.messages import StreamMessage
from llama405b_tools.launch.request import parse_launch
from llama405b_tools.launch.start import launch
from llama405b_tools.run import screen
from llama405b_tools.run.follow import EndKind, follow, watch_run


@pytest.fixture
def nobody():
    """A stream that leads to a pipe that nobody reads."""
    theirs, ours = os.pipe()
    os.close(theirs)
    with os.fdopen(ours, "w") as stream:
        yield stream


@pytest.fixture
def python(tmp_path):
    """Run python in a shell, with redirections, buffered as it usually is or not."""

    def run(words, unbuffered=""):
        env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tools", "PYTHONUNBUFFERED": unbuffered}
        shell = ["bash", "-c", f"{sys.executable} {words}"]
        return subprocess.run(shell, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)

    return run


FRONT = "-m llama405b_tools.cli"


def test_a_stream_that_broke_stays_broken(nobody, monkeypatch):
    monkeypatch.setattr(sys, "stdout", nobody)
    assert [screen.show("x") for _ in range(4)] == [False] * 4
    assert screen.flush_output() == ""  # which is no fault


def test_what_one_message_says_is_printed_at_once(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    shown = []
    with FakeFleet(("a", "b")) as fleet:
        plan = launch(parse_launch(["--run", "r", "--", "-m", "mine"], 0.0), list(fleet.hosts.values()), fleet)
        said = StreamMessage(entries=((0.0, "a/0/stdout.log", "1\n2"), (0.0, "a/0/stdout.log", "3")))
        fleet.fakes["a"].lives, fleet.fakes["b"].lives = [[said, over("a")]], [[over("b")]]
        monkeypatch.setattr("llama405b_tools.run.screen.show", lambda text, **_: shown.append(text) or True)
        watch_run(fleet, plan)
    assert shown == ["1\n2\n3\n"]


def test_following_ends_if_nobody_reads_even_if_what_came_before_was_lost(nobody, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdout", nobody)
    with FakeFleet(("a", "b")) as fleet:
        plan = launch(parse_launch(["--run", "r", "--", "-m", "mine"], 0.0), list(fleet.hosts.values()), fleet)
        said = StreamMessage(entries=((0.0, "a/0/stdout.log", "step 1"),))
        fleet.fakes["a"].lives, fleet.fakes["b"].lives = [[said, over("a")]], [[over("b")]]
        assert follow(fleet, plan).kind is EndKind.LEFT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [
        ("launch --dry-run few -- -m mine", ""),
        ("launch --dry-run many -- -m mine", ""),  # more than a buffer holds
        ("launch --dry-run few -- -m mine", "1"),
        ("launch --help", ""),
        ("--help", ""),
    ],
)
def test_output_that_has_no_room_is_one_sentence_for_every_verb(python, tmp_path, words, unbuffered):
    for name, n_hosts in (("few", 2), ("many", 300)):
        (tmp_path / name).write_text("".join(f"gpu-{i} slots=1\n" for i in range(n_hosts)))
    done = python(f"{FRONT} {words} >/dev/full", unbuffered)
    said = "llama405b: cannot write to standard output (No space left on device)\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_stream_that_is_closed_is_like_one_that_nobody_reads(python, tmp_path):
    (tmp_path / "hosts").write_text("localhost\n")
    done = python(f"{FRONT} logs --run none >&-")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    done = python(f"{FRONT} lunch 2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
    (tmp_path / "shows.py").write_text(
        "from llama405b_tools import cli\nfrom llama405b_tools.run.screen import show\n"
        "cli.main(['--version'])\nexit(show('x') or show('x', error=True))\n"
    )
    done = python("shows.py >&- 2>&-")
    assert done.returncode == 0
