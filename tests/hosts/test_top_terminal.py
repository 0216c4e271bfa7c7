"""cluster-top and the terminal it was given: closed streams, other character sets, the mouse, and a prompt end."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

from conftest import ROOT
from llama405b_tools.top.state import simulate
from ops_rig import Terminal, wait_for

TOP = [sys.executable, "-m", "llama405b_tools.cli", "top"]
ENV = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}", "PATH": os.environ["PATH"]}
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


@pytest.fixture
def terminal(tmp_path):
    (tmp_path / "hosts").write_text("node-a address=localhost\n")
    opened = []

    def start(*args, env=ENV, before=(), **more):
        opened.append(Terminal([*before, *TOP, *args], tmp_path, env, **more))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_closed_standard_streams(tmp_path, closed):
    line = f'exec "$@" {closed}'
    argv = ["sh", "-c", line, "sh", *TOP, "--replay", "demo", "--once"]
    done = subprocess.run(argv, cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_screen_needs_all_three_streams(terminal, tmp_path):
    terminal("--replay", "demo", before=["sh", "-c", 'exec "$@" 2>words', "sh"]).shows(r"^rc=0$", 30)
    assert (tmp_path / "words").read_text() == ""


def test_a_character_set_without_our_symbols(terminal):
    top = terminal("--replay", "demo", "--speed", "20", env=ENV | ASCII)
    shown = top.shows(r"TRAINING \S+ \| hosts 8/8 \|", 30)
    assert "\\u" not in shown
    assert "-- EVENTS ---" in shown


def test_symbols_are_replaced_wherever_we_print(tmp_path):
    argv = [*TOP, "--replay", "demo", "--once"]
    done = subprocess.run(argv, cwd=tmp_path, env=ENV | ASCII, capture_output=True, text=True, timeout=60, check=False)
    assert "* HEALTHY" in done.stdout
    assert "?" not in done.stdout
    usage = subprocess.run(TOP[:-1], env=ENV | ASCII, capture_output=True, text=True, timeout=60, check=False)
    assert "usage: llama405b VERB .  " in usage.stdout


def test_the_mouse_stays_with_the_terminal(terminal):
    top = terminal("--replay", "demo", "--speed", "20")
    top.shows(r"hosts 8/8", 30)
    assert top.run("display", "-p", "-t", "t", "#{alternate_on} #{mouse_any_flag}").strip() == "1 0"


def test_q_leaves_one_level_and_the_selection_stays_on_the_screen(terminal, tmp_path):
    recording = tmp_path / "many.jsonl"
    names = simulate.names(64)
    frames = [event for event in simulate.incident(64, seconds=3.0) if "frame" in event]
    header = {"llama405b_recording": 1, "hosts": names, "interval_s": 2.0}
    recording.write_text("".join(json.dumps(line) + "\n" for line in (header, *frames)))
    top = terminal("--replay", str(recording), "--sort", "name", size=(80, 24))
    top.shows(r"page 1 of", 30)
    top.keys(*["j"] * 50)
    top.shows(r"▶ gpu-51", 10)
    top.keys("Enter")
    top.shows(r"── gpu-51 ", 10)
    assert "PROCESSES" not in top.screen()
    top.keys("NPage")
    top.shows(r"── PROCESSES", 10)  # which 24 lines have no room for
    top.keys("q")
    top.shows(r"▶ gpu-51", 10)
    top.keys("q")
    top.shows(r"^rc=0$", 10)


@pytest.mark.parametrize("agent", [f'sleep 1; exec {sys.executable} "$@"', "exec sleep 600"])
def test_leaving_while_the_first_error_is_looked_for(terminal, tmp_path, agent):
    slow = tmp_path / "slow"
    slow.write_text(f"#!/bin/sh\necho $$ >pid\n{agent}\n")
    slow.chmod(0o755)
    (tmp_path / "hosts").write_text(f"node-a address=localhost python={slow}\n")
    top = terminal()
    top.shows(r"hosts 1/1", 30)
    top.keys("e")
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), 30)
    top.keys("q", "q")  # back, then out
    try:
        shown = top.shows(r"^rc=0$", 30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert "Traceback" not in shown


def test_a_recording_is_whole_after_a_signal(tmp_path):
    (tmp_path / "hosts").write_text("node-a address=localhost\n")
    argv = [*TOP, "--json", "--watch", "0.5", "--record", "r.jsonl"]
    child = subprocess.Popen(argv, cwd=tmp_path, env=ENV, stdout=subprocess.PIPE, text=True)
    pictures = [json.loads(child.stdout.readline()) for _ in range(3)]
    child.send_signal(signal.SIGTERM)
    wait_for(lambda: child.poll() is not None, 10)
    child.stdout.close()
    assert child.returncode == 128 + signal.SIGTERM
    *lines, last = (tmp_path / "r.jsonl").read_text().splitlines()
    assert json.loads(last) == {"end": True}
    assert len(lines) > len(pictures)
