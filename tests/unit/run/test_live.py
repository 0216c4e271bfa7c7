"""A followed run on a terminal: every tenth step above the line that changes, and whatever is no step."""

import io
import re

import pytest
from rich.console import Console

from llama405b_tools.run import screen

LINES = [
    "data: 3 documents",
    *(f"step {n}/200  loss {9 - n / 100:.4f}  grad 0.8  5,648 tokens/s  0.36 s" for n in range(1, 26)),
]


@pytest.fixture
def terminal(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(screen.time, "monotonic", lambda: float(next(clock)))
    file = io.StringIO()
    printer = screen.LivePrinter(Console(file=file, force_terminal=True, width=100, color_system=None))
    yield printer, lambda: re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    printer.close()


def test_every_tenth_step_stays_and_all_other_lines(terminal):
    printer, shown = terminal
    for line in [*LINES, "saved runs/x/checkpoints/step-00000025"]:
        assert printer.show([line])
    kept = [line for line in map(str.strip, re.split(r"[\r\n]+", shown())) if line in LINES]
    assert kept == [LINES[0], LINES[1], LINES[10], LINES[20]]
    assert "saved runs/x/checkpoints/step-00000025" in shown()


def test_the_last_line_has_the_newest_step_and_when_it_will_be_over(terminal):
    printer, shown = terminal
    for line in LINES:
        printer.show([line])
    assert re.search(r"━+.* 25/200  ETA 2:55  loss 8.7500  5,648 tokens/s\s*$", shown())  # a second a step


def test_the_time_left_is_counted_anew_where_a_run_was_resumed(terminal):
    printer, shown = terminal
    for line in [*LINES[20:26], *LINES[15:18]]:  # steps 20 to 25, then 15 to 17
        printer.show([line])
    assert re.search(r" 17/200  ETA 3:03 [^\n]*\s*$", shown())


def test_a_screen_that_is_gone_is_noticed(terminal):
    printer, _ = terminal
    printer.live.console.file.close()
    assert not printer.show(["a line"])
    printer.live.console.file = io.StringIO()


@pytest.mark.parametrize(("plain", "terminal", "term", "kind"), [
    (False, True, "xterm", screen.LivePrinter), (True, True, "xterm", screen.PlainPrinter),
    (False, False, "xterm", screen.PlainPrinter), (False, True, "dumb", screen.PlainPrinter),
    (False, True, "unknown", screen.PlainPrinter),
])  # fmt: skip
def test_only_a_terminal_has_such_a_line(monkeypatch, plain, terminal, term, kind):
    monkeypatch.setattr(screen.sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("TERM", term)
    made = screen.make_printer(plain=plain)
    made.close()
    assert type(made) is kind
