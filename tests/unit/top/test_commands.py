"""Our own commands beside the screen: they end by themselves, by the user, or by their limit, and nothing holds the screen up."""

import asyncio
import os
import sys
import threading
from pathlib import Path

import pytest

from llama405b_tools.top import app, event_sources
from llama405b_tools.top.app import Canvas, ChildProcess
from llama405b_tools.top.session import Session
from ops_rig import Patience, wait_for

STUBBORN = (
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True); time.sleep(600)"
)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(app, "KILL_AFTER_S", 0.3)


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_a_command_that_ends_by_itself_tells_its_lines_as_they_come():
    told = []
    command = ChildProcess([sys.executable, "-c", "print('a', flush=True); print('b'); exit(3)"], 60.0)
    assert command.follow(told.append) == "exit code 3"
    assert told[-1] == command.lines == ["a", "b"]
    assert told[0] == ["a"]


@pytest.mark.slow
def test_after_its_limit_all_of_it_is_ended_and_it_says_so():
    command = ChildProcess([sys.executable, "-c", STUBBORN], 1.5)
    ends = command.process.wait
    command.process.wait = lambda limit_s=None: (wait_for(lambda: command.lines), ends(limit_s))[1]
    assert command.follow(lambda lines: None) == (
        "it took longer than 1.5s and was ended; the request may still be carried out"
    )
    assert command.process.returncode == -9
    wait_for(lambda: is_gone(int(command.lines[0])))


def test_the_user_ends_it_and_nobody_waits_for_that(monkeypatch):
    monkeypatch.setattr(app, "KILL_AFTER_S", 600.0)
    command, said = ChildProcess([sys.executable, "-c", STUBBORN], 600.0), []
    follower = threading.Thread(target=lambda: said.append(command.follow(lambda lines: None)))
    follower.start()
    wait_for(lambda: command.lines)
    command.terminate("you ended it")
    command.terminate("and again")
    assert command.process.poll() is None  # it has time to end by itself
    os.killpg(command.process.pid, 9)
    follower.join()
    assert said == ["you ended it"]
    wait_for(lambda: is_gone(int(command.lines[0])))


@pytest.mark.slow
def test_a_process_outside_that_keeps_the_pipe_open_holds_nothing_up():
    away = "import subprocess; print(subprocess.Popen(['sh', '-c', 'sleep 3; echo late; exec sleep 600'], start_new_session=True).pid)"
    command, told = ChildProcess([sys.executable, "-c", away], 60.0), []
    assert command.follow(told.append) == "exit code 0"
    assert not is_gone(int(command.lines[0]))
    wait_for(lambda: command.process.stdout.closed)  # at its next line, which nobody is told of
    assert len(told) == len(command.lines) == 1
    os.kill(int(command.lines[0]), 9)


def test_the_end_of_the_screen_ends_it_at_once():
    command = ChildProcess([sys.executable, "-c", STUBBORN], 600.0)
    threading.Thread(target=command.follow, args=(lambda lines: None,), daemon=True).start()
    wait_for(lambda: command.lines)
    command.terminate_now()
    wait_for(lambda: is_gone(command.process.pid) and is_gone(int(command.lines[0])))


class Screen:
    """cluster-top on a simulated incident, without a terminal, whose commands are programs of this test."""

    def __init__(self, monkeypatch, program):
        def command(argv, limit_s):
            made = ChildProcess([sys.executable, "-c", program], limit_s)
            ends = made.process.wait
            made.process.wait = lambda limit_s=None: (self.may_end.wait(), ends(limit_s))[1]
            return made

        self.may_end = threading.Event()
        self.may_end.set()
        monkeypatch.setattr(app, "ChildProcess", command)
        monkeypatch.setattr(app, "handle_signals", lambda *_: None)
        monkeypatch.setattr(app.remembered, "save_choices", lambda _: None)
        self.top = app.TopApp(Session(event_sources.open_replay("demo", 1.0), None, 60.0), lambda: None)

    def run(self, acts):
        async def within():
            async with self.top.run_test(size=(120, 40)) as pilot:
                await acts(self, pilot)

        asyncio.run(within())

    async def until(self, condition, pilot):
        patience = Patience()
        while not condition():
            assert patience.lasts()
            await pilot.pause(0.05)

    @property
    def text(self):
        return list(self.top.ui.lines)

    @property
    def said(self):
        return [event.text for event in self.top.session.cluster.events]


@pytest.mark.slow
def test_on_the_screen_a_command_is_ended_by_its_limit_by_x_or_left(monkeypatch):
    async def acts(screen, pilot):
        top = screen.top
        top._start_command("llama405b autopsy", ["autopsy"], 1.0)
        top._show_text("llama405b autopsy", ["…"])
        await screen.until(lambda: "it took longer than 1.0s" in screen.text[-1], pilot)
        top._start_command("llama405b ask save --run r", ["ask", "save", "--run", "r"], 600.0)
        top._show_text("llama405b ask save --run r", ["…"])
        await pilot.press("x")
        await screen.until(lambda: "you ended it" in screen.text[-1], pilot)
        assert not any("you ended it" in text for text in screen.said)
        screen.may_end.clear()
        top._start_command("llama405b ask memory --run r", ["ask", "memory", "--run", "r"], 1.0)
        top._show_text("llama405b ask memory --run r", ["…"])
        await pilot.press("escape")
        assert top.ui.path == ["all"]
        screen.may_end.set()
        await screen.until(
            lambda: any(text.startswith("`llama405b ask memory --run r`: it took") for text in screen.said), pilot
        )
        assert not top.commands
        assert not top.ui.running_titles

    Screen(monkeypatch, STUBBORN).run(acts)


def test_a_tick_as_the_screen_is_taken_down_draws_on(monkeypatch):
    async def acts(screen, pilot):
        await screen.top.canvas.remove()  # as textual does at the end
        screen.top.draw_at = 0.0
        screen.top.tick()

    Screen(monkeypatch, STUBBORN).run(acts)


def test_q_never_hangs_on_a_command(monkeypatch):
    screen = Screen(monkeypatch, STUBBORN)

    async def acts(screen, pilot):
        screen.top._start_command("llama405b stop --run r", ["stop", "--run", "r"], 600.0)
        await screen.until(lambda: screen.top.commands["llama405b stop --run r"].lines, pilot)
        screen.command = screen.top.commands["llama405b stop --run r"]
        await pilot.press("q")
        assert "press q again to kill it and quit" in screen.top.ui.hint
        assert any("press q again" in line.plain for line in screen.top.query_one(Canvas).lines)  # at once
        assert screen.top._exit is False
        await pilot.press("j", "q")
        assert screen.top._exit is False  # another key came between
        await pilot.press("q")

    screen.run(acts)
    assert screen.top._exit is True
    wait_for(lambda: is_gone(screen.command.process.pid))  # long before its 600 s
