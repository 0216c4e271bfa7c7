"""cluster-top and the terminal it was given: closed streams, other character sets, the mouse, and a prompt end."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
import simulate

from conftest import ROOT
from ops_rig import Terminal, wait_for

TOP = [sys.executable, "-m", "llama405b_tools.cli", "top"]
ENV = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}", "PATH": os.environ["PATH"]}
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


@pytest.fixture
def terminal(tmp_path):
    (tmp_path / "hosts").write_text("node-a address=localhost\n")
    opened = []

    def start(*args, env=ENV, before=(), program=TOP, **more):
        opened.append(Terminal([*before, *program, *args], tmp_path, env, **more))
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
    assert "-- EVENTS" in shown
    top.shows(r"[a-z]~(\s|$)", 30)  # where a line is cut
    assert shown.isascii()


def test_symbols_are_replaced_wherever_we_print(tmp_path):
    argv = [*TOP, "--replay", "demo", "--once"]
    done = subprocess.run(argv, cwd=tmp_path, env=ENV | ASCII, capture_output=True, text=True, timeout=60, check=False)
    assert "* HEALTHY" in done.stdout
    assert "?" not in done.stdout
    usage = subprocess.run(TOP[:-1], env=ENV | ASCII, capture_output=True, text=True, timeout=60, check=False)
    assert "usage: llama405b VERB ~, like " in usage.stdout


def test_the_mouse_stays_with_the_terminal_and_so_do_ctrl_z_and_ctrl_c(terminal):
    def flags():
        return top.run("display", "-p", "-t", "t", "#{alternate_on} #{mouse_any_flag}").strip()

    job = shlex.join([*TOP, "--replay", "demo", "--speed", "20"])
    top = terminal(program=["bash", "--norc", "-i"])
    top.keys(job, "Enter")
    top.shows(r"hosts 8/8", 30)
    assert flags() == "1 0"
    top.keys("C-z")
    top.shows(r"Stopped", 10)
    top.keys("echo typed $((6 * 7))", "Enter")
    top.shows(r"^typed 42$", 10)
    assert flags() == "0 0"
    top.keys("clear; fg", "Enter")
    top.shows(r"hosts 8/8(.|\n)*── EVENTS", 10)
    assert flags() == "1 0"
    top.keys("C-c")
    wait_for(lambda: flags() == "0 0", 10)
    top.keys("echo code $?", "Enter")
    top.shows(r"^code [013]$", 10)


def test_where_no_shell_could_continue_it_ctrl_z_does_nothing(terminal):
    top = terminal("--replay", "demo", "--speed", "20")
    top.shows(r"hosts 8/8", 30)
    top.keys("C-z", "?")
    top.shows(r"Ctrl-C Ctrl-Z +quit", 10)
    top.keys("C-c")  # from any page
    top.shows(r"^rc=[013]$", 10)


def test_q_leaves_one_level_and_the_selection_stays_on_the_screen(terminal, tmp_path):
    recording = tmp_path / "many.jsonl"
    names = simulate.host_names(128)
    frames = [event for event in simulate.simulate_incident(128, seconds=3.0) if "frame" in event]
    header = {"llama405b_recording": 1, "hosts": names, "interval_s": 2.0}
    recording.write_text("".join(json.dumps(line) + "\n" for line in (header, *frames)))
    top = terminal("--replay", str(recording), "--sort", "name", size=(80, 24))
    top.shows(r"page 1 of", 30)
    top.keys(*["j"] * 50)
    top.shows(r"▶ gpu-051", 10)
    top.keys("Enter")
    top.shows(r"── gpu-051 ", 10)
    assert "PROCESSES" not in top.screen()
    top.keys("NPage")
    top.shows(r"── PROCESSES", 10)  # which 24 lines have no room for
    top.keys("q")
    top.shows(r"▶ gpu-051", 10)
    top.keys("q")
    top.shows(r"^rc=0$", 10)


@pytest.mark.parametrize("agent", [f'sleep 1; exec {sys.executable} "$@"', "exec sleep 600"])
def test_leaving_while_the_first_error_is_looked_for(terminal, tmp_path, agent):
    slow = tmp_path / "slow"
    watches = f'case "$*" in *" watch") exec {sys.executable} "$@" ;; esac'
    slow.write_text(f"#!/bin/sh\n{watches}\necho $$ >pid\n{agent}\n")
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


def colors_of(top):
    """The numbers of the colors that the screen uses: of 256, and of 16."""
    shown = top.run("capture-pane", "-p", "-e", "-t", "t")
    return {*re.findall(r"[34]8;5;(\d+)", shown)}, {*re.findall(r"\x1b\[(?:\d+;)*([349][0-7]|10[0-7])(?=[;m])", shown)}


def test_colors_of_any_terminal_and_its_own_background(terminal, tmp_path):
    play, env = ("--replay", "demo", "--speed", "20"), ENV | {"XDG_STATE_HOME": str(tmp_path / "state")}
    full = terminal(*play, env=env, before=["env", "TERM=screen-256color"])
    full.shows(r"hosts 8/8", 30)
    wait_for(lambda: {"108", "73"} <= colors_of(full)[0], 30)  # the bar of HEALTHY, and a GPU at work
    assert "\x1b[48;2" not in full.run("capture-pane", "-p", "-e", "-t", "t")
    full.keys("T")
    wait_for(lambda: "28" in colors_of(full)[0], 10)  # for a light background
    few = terminal(*play, env=env, before=["env", "TERM=xterm"])
    few.shows(r"hosts 8/8", 30)
    assert colors_of(few)[0] == set()
    assert {"41", "42", "43", "46"} & colors_of(few)[1]  # the verdict's bar
    none = terminal(*play, env=env, before=["env", "TERM=screen-256color", "NO_COLOR=1"])
    none.shows(r"hosts 8/8", 30)
    assert colors_of(none) == (set(), set())


def test_the_screen_stands_still_and_goes_on(terminal):
    top = terminal("--replay", "demo", "--speed", "4")
    top.shows(r"step 118\d/", 30)
    top.keys("Space")
    before = top.shows(r"PAUSED: Space goes on", 10)
    time.sleep(3)
    assert top.screen() == before
    top.keys("Space")
    wait_for(lambda: "PAUSED" not in top.screen() and top.screen() != before, 10)


def test_choices_last_until_the_next_time(terminal, tmp_path):
    own = ENV | {"XDG_STATE_HOME": str(tmp_path / "state")}
    top = terminal("--replay", "demo", "--speed", "20", env=own)
    top.shows(r"worst first · power", 30)
    top.keys("s", "m", "x")
    top.shows(r"no such key: x; \? shows the keys", 10)
    top.keys("q")
    top.shows(r"^rc=0$", 10)
    again = terminal("--replay", "demo", "--speed", "20", env=own)
    again.shows(r"by name · utilization", 30)
    other = terminal("--replay", "demo", "--speed", "20", "--sort", "worst", env=own)
    other.shows(r"worst first · utilization", 30)


def watching(directory):
    """The agents that watch a host in this directory."""
    listed = subprocess.run(["pgrep", "-f", "agent watch"], capture_output=True, text=True, check=False).stdout.split()
    return [pid for pid in listed if os.path.realpath(f"/proc/{pid}/cwd") == str(directory)]


def test_a_hosts_file_that_changes_is_noticed_and_read_again(terminal, tmp_path):
    top = terminal("hosts", size=(160, 45))
    top.shows(r"hosts 1/1", 30)
    assert len(watching(tmp_path)) == 1
    (tmp_path / "hosts").write_text("node-a address=localhost\nnode-b address=localhost\n")
    top.shows(r"▲ hosts has changed: r reads it again", 10)
    top.keys("r")
    top.shows(r"hosts 2/2", 30)
    top.keys("q")
    top.shows(r"^rc=0$", 10)
    assert not watching(tmp_path)


def test_the_log_is_read_and_copied_while_lines_come(terminal, tmp_path):
    top = terminal("--replay", "demo", "--speed", "8", size=(120, 40))
    top.run("set", "-s", "set-clipboard", "on")
    top.shows(r"saved /shared", 60)
    top.keys("5", "f")
    top.shows(r"LOG: all lines", 10)
    wait_for(lambda: top.screen().count(" r0 step ") > 20, 30)
    top.keys("Up")
    head = top.shows(r"newer, End", 10).splitlines()[15:39]
    time.sleep(4)
    assert top.screen().splitlines()[15:39] == head
    top.keys("y")
    top.shows(r"copied \d+ lines", 10)
    copied = wait_for(lambda: top.run("show-buffer"), 10)
    assert re.search(r"^step \d+/5000  loss ", copied, re.MULTILINE)
    assert "│" not in copied


def test_the_window_has_the_verdict_and_gets_its_title_back(terminal, tmp_path):
    log = tmp_path / "told"
    top = terminal("--replay", "demo", "--speed", "12", "--on-change", f'echo "$LLAMA405B_EVENT" >>{log}')
    wait_for(lambda: re.search(r"HEALTHY llama-405b 1\d{3}", top.run("display", "-p", "-t", "t", "#{pane_title}")), 30)
    wait_for(lambda: log.exists() and "HUNG" in log.read_text(), 30)
    assert "DEGRADED" in log.read_text().split("HUNG")[0]
    wait_for(lambda: "HUNG" not in top.run("display", "-p", "-t", "t", "#{pane_title}"), 30)
    top.keys("q")
    top.shows(r"^rc=", 10)


@pytest.mark.parametrize(
    ("args", "why"),
    [((), "actions are disabled in a replay"), (("--read-only",), "cluster-top was started with --read-only")],
)
def test_what_cannot_be_acted_on_says_so(terminal, args, why):
    top = terminal("--replay", "demo", "--speed", "20", *args)
    top.shows(r"hosts 8/8", 30)
    top.keys("S")
    top.shows(re.escape(f"[{why}]"), 10)


def test_the_whole_screen_goes_back_in_time_and_to_now(terminal):
    top = terminal("--replay", "demo", "--speed", "8", size=(140, 40))
    top.shows(r"step 1,19\d", 60)
    top.keys("Space")
    top.shows("PAUSED", 5)
    newest = int(re.search(r"step ([\d,]+)", top.screen())[1].replace(",", ""))
    top.keys("[")
    past = top.shows(r"THE PAST: \d+:\d\d ago, at \d\d:\d\d:\d\d", 5)
    assert newest > int(re.search(r"step ([\d,]+)|STARTING|LOADING", past)[1] or 0)
    top.keys("Right")
    top.shows(r"the past: → goes on, Esc or End now", 5)
    top.keys("End")
    now = wait_for(lambda: "THE PAST" not in (screen := top.screen()) and screen, 5)
    assert "PAUSED" in now
    assert f"step {newest}" in now.replace(",", "")
    top.keys(">")
    top.shows(r"speed 16", 5)
    top.keys("Space", "Right")
    wait_for(lambda: "PAUSED" not in top.screen(), 5)
