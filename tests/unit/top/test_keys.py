"""Each key: what it does to what is shown, and that nothing else moves."""

import dataclasses
import os
import re
import string
import subprocess
import types

import pytest
from shown import HOT, HUNG, played, text_of
from textual import events
from textual.geometry import Size

from llama405b_tools.text.figures import format_number
from llama405b_tools.top import app, keys, remembered
from llama405b_tools.top.draw import panels
from llama405b_tools.top.draw.panels import render_context, shown_logs
from llama405b_tools.top.draw.ui import COLUMNS, KEYS, LogLine, Ui, help_lines
from llama405b_tools.top.keys import press
from llama405b_tools.top.session import Session
from llama405b_tools.top.state.picture import ClusterEvent, GuardShown, RunPhase, Severity
from llama405b_tools.top.state.trends import Trends
from llama405b_tools.verbs import top

SIZE = (120, 40)
SIZE_OF = Size(*SIZE)


class Screen:
    """A screen on which keys are pressed."""

    def __init__(self, seconds=HUNG, n_hosts=8, logs=None, events=None):
        self.shown = played(n_hosts, seconds)
        if logs is not None:
            self.shown = dataclasses.replace(self.shown, logs=logs)
        if events is not None:
            self.shown = dataclasses.replace(self.shown, pic=dataclasses.replace(self.shown.pic, events=events))
        self.ui = Ui()

    def press(self, *keys, size=SIZE):
        said = ""
        for key in keys:
            of = render_context(self.shown.pic, self.shown.trends, self.ui, self.shown.logs)
            said = press(self.ui, key, of, *size)
        return said

    def text(self, size=SIZE):
        return text_of(self.shown.screen(*size, self.ui))


def lines(n, begin=1):
    return [
        LogLine(
            1e9 + i,
            f"gpu-{1 + i % 2} r{i % 16}",
            f"line {i} {'x' * 200}end",
            i % 10 == 0,
            frozenset({f"gpu-{1 + i % 2}"}),
            frozenset({i % 16}),
            i,
        )
        for i in range(begin, begin + n)
    ]


def test_enter_goes_from_host_to_rank_and_q_back_level_by_level():
    screen = Screen()
    screen.press("enter")
    assert (screen.ui.path, screen.ui.selected) == (["all", "host"], "gpu-3")  # the culprit is first
    assert "▶ rank   21" in screen.text()  # and its rank chosen
    screen.press("down", "enter")
    assert "── rank 22 on gpu-3: dp 22 " in screen.text()
    assert "power" in screen.text().split("over time")[1]
    screen.press("q")
    assert screen.ui.path == ["all", "host"]
    screen.press("?")
    assert "cluster-top: every host" in screen.text()
    screen.press("q", "escape")
    assert screen.ui.path == ["all"]


def test_enter_opens_the_host_that_the_verdict_is_about_until_another_is_chosen():
    screen = Screen()
    assert screen.shown.pic.about == "gpu-3"
    screen.ui.sort = "name"
    screen.press("enter")
    assert screen.ui.selected == "gpu-3"
    screen.press("escape", "home", "enter")
    assert screen.ui.selected == "gpu-1"


@pytest.mark.parametrize(
    ("key", "shows"),
    [
        ("1", "── EVENTS"), ("2", "every GPU over time"), ("3", "RANKS 64 of 64"), ("4", "HOSTS: RDMA"),
        ("5", "── LOG: without step lines"), ("6", "── EVENTS"),
    ],
)  # fmt: skip
def test_a_view_per_number(key, shows):
    screen = Screen()
    screen.press("5", key)
    assert shows in screen.text()
    assert len(screen.ui.path) == 1 + (key != "1")


def test_the_list_of_ranks_has_the_one_that_hangs_first_and_opens_it():
    screen = Screen()
    screen.press("3")
    assert screen.text().split("stands out first")[1].splitlines()[1].startswith("▶ rank   21  gpu-3")
    screen.press("down", "down", "enter")
    assert "── rank 1 on gpu-1: dp 1 " in screen.text()
    screen.press("q", "end")
    assert "▶ rank   63  gpu-8" in screen.text()


def test_the_selection_stays_on_the_screen():
    screen = Screen(seconds=4.0, n_hosts=64)
    screen.ui.sort = "name"
    for key, name in (("end", "gpu-64"), ("pageup", "gpu-46"), ("home", "gpu-01"), ("pagedown", "gpu-19")):
        screen.press(key, size=(80, 24))
        assert f"▶ {name} " in screen.text((80, 24))


def test_tab_chooses_what_the_arrows_move_in():
    screen = Screen(
        logs=lines(40), events=tuple(ClusterEvent(1e9 + i, "", Severity.NOTE, f"event {i}") for i in range(40))
    )
    screen.press("tab", "up", "up")
    assert screen.ui.last_event == screen.shown.pic.events[37]
    assert "2 newer, End" in screen.text((200, 60))
    screen.press("tab", "up")
    assert screen.ui.log.last_number == 39
    screen.press("shift+tab", "end")
    assert screen.ui.last_event is None
    assert screen.ui.log.last_number == 39
    screen.press("escape", "j")
    assert screen.ui.selected == "gpu-1"


def test_the_log_stands_still_while_it_is_read():
    screen = Screen(logs=lines(100))
    screen.press("5", "pageup")
    before = screen.text().split("newer, End")[1]
    screen.shown = dataclasses.replace(
        screen.shown, logs=[*lines(100)[7:], *lines(30, begin=101)]
    )  # the oldest are forgotten
    assert screen.text().split("newer, End")[1] == before
    screen.press("end")
    assert "line 130 " in screen.text()


def test_the_log_is_searched_filtered_wrapped_and_moved():
    screen = Screen(logs=[*lines(60), dataclasses.replace(lines(1)[0], text="step 7/9  loss 2.1  grad 1", number=61)])
    screen.press("5")
    assert "step 7/9" not in screen.text()
    screen.press("f")
    assert "step 7/9" in screen.text()
    screen.press("/", *"LINE", "space", *"12", "enter")
    assert screen.ui.log.last_number == 12
    screen.press("N")
    assert screen.ui.hint == "no later line has 'LINE 12'"
    screen.press("end", "/", *"line 2", "enter", "n")
    assert screen.ui.log.last_number == 28  # the one before 29
    styles = {str(span.style) for line in screen.shown.screen(*SIZE, screen.ui) for span in line.spans}
    assert "found" in styles
    screen.press("end", "L")
    assert {
        line.number
        for line in shown_logs(render_context(screen.shown.pic, screen.shown.trends, screen.ui, screen.shown.logs), 40)
    } == {10, 20, 30, 40, 50, 60}
    screen.press("L", "F")
    screen.ui.selected = "gpu-2"
    assert "gpu-1 r" not in screen.text()
    screen.press("F")
    screen.ui.selected, screen.ui.rank = "gpu-1", 4
    assert "gpu-1 r2 " not in screen.text()
    screen.press("F", "f", "right")
    assert " line " not in screen.text().split("LOG")[1]
    screen.press("left", "w")
    assert "xend" in screen.text()
    assert screen.press("y") == "copy"


def test_what_is_cut_says_so_and_is_read_whole():
    events = tuple(ClusterEvent(1e9 + i, "", Severity.NOTE, f"event {i} {'word ' * 14}end") for i in range(9))
    screen = Screen(logs=lines(40), events=events)
    cut = screen.text().split("── EVENTS")[1].splitlines()[1:-1]
    assert all(row[:59].endswith("…") and row.endswith("…") for row in cut)  # events at the left, the log at the right
    screen.press("tab")
    assert "w wrap" in screen.text().splitlines()[-1]
    screen.press("w")
    rows = [row[:59].strip() for row in screen.text().split("── EVENTS")[1].splitlines()[1:-1]]
    assert rows[-1].endswith("end")
    assert not any("…" in row for row in rows)
    screen.press("w", "6")
    assert "…" not in screen.text().split("── EVENTS")[1].split("\n", 1)[1].rsplit("\n", 2)[0]


def test_advice_that_is_cut_says_so():
    screen = Screen()
    pic = dataclasses.replace(screen.shown.pic, advice="word " * 60)
    screen.shown = dataclasses.replace(screen.shown, pic=pic)
    [first, second] = [row for row in screen.text((80, 24)).splitlines() if "word word" in row]
    assert first.startswith(" → word")
    assert second.endswith(" …")


def test_windows_and_quantities():
    screen = Screen(HOT)
    screen.press("+", "+", "+", "+")
    assert "the whole run" in screen.text().splitlines()[-1]
    screen.press("-", "-", "-", "-")
    assert "10 minutes" not in screen.text()
    names = []
    for _ in range(7):
        names.append(screen.text().split("worst first · ")[1].split(",")[0])
        screen.press("m")
    assert names == ["power", "utilization", "memory", "temperature", "clock", "net", "busy"]
    assert "worst first · power" in screen.text()
    assert screen.press("T") == "theme"


def test_columns_are_left_out_one_by_one():
    screen = Screen(HOT)
    assert " CPU% RAM% " in screen.text()
    screen.press("C")
    assert " CPU% " not in screen.text()
    screen.press(*["C"] * (len(COLUMNS) - 1))
    assert " AGE" not in screen.text().split("HOSTS")[1]
    screen.press("C")
    assert " CPU% RAM% " in screen.text()


def test_filtering_and_its_end():
    screen = Screen(HOT)
    screen.press("/", *"gpu-5")
    assert screen.text().splitlines()[-1].startswith("/gpu-5█")
    screen.press("backspace", "6", "enter")
    assert "▶ gpu-6 " in screen.text()
    assert "gpu-5 " not in screen.text().split("HOSTS")[1].split("every GPU")[0]
    screen.press("escape")
    assert screen.ui.filter == ""
    screen.press("/", "o", "escape")
    assert (screen.ui.filter, screen.ui.odd_only, screen.ui.typing) == ("", False, "")
    screen.press("o", "s")
    assert (screen.ui.odd_only, screen.ui.sort) == (True, "name")


def test_a_key_that_means_nothing_says_what_the_keys_are():
    screen = Screen()
    before = dataclasses.replace(screen.ui)
    screen.press("z")
    assert "[no such key: z; ? shows the keys]" in screen.text().splitlines()[-1]
    screen.press("space")
    assert "PAUSED: Space goes on" in screen.text().splitlines()[-1]
    screen.press("space")
    assert dataclasses.replace(screen.ui) == before


def test_nothing_is_done_before_the_user_agrees():
    screen = Screen()
    for key, question in (
        ("c", "save a checkpoint of llama-405b now"),
        ("S", "stop llama-405b on every host; it saves first"),
        ("!", "open a shell on gpu-3"),
    ):
        assert screen.press(key) == ""
        assert screen.text().splitlines()[-1].startswith(f" {question}? y yes, any other key no")
        assert screen.press("enter") == ""
        assert screen.ui.hint == "nothing was done"
        assert screen.press(key, "y") == f"do {key}"
    assert screen.ui.path == ["all"]
    assert screen.press("y") == "copy"  # asked nothing, it means something else


def test_every_command_has_a_limit_and_x_ends_it_while_it_is_shown():
    assert all(bool(action.limit_s) == bool(action.words) for action in keys.ACTIONS.values())
    screen = Screen()
    screen.ui.running_titles = {"llama405b autopsy"}
    assert screen.press("x") == ""
    assert "no such key" in screen.ui.hint
    screen.ui.show_text("llama405b autopsy", ["…"])
    assert "x ends it  Esc q leaves it" in screen.text().splitlines()[-1]
    assert screen.press("x") == "end"
    screen.press("escape")
    assert screen.ui.path == ["all"]
    screen.ui.show_text("HELP", ["…"])
    assert screen.press("x") == ""


def test_what_cannot_be_done_says_why():
    live, file = {"is_live": True, "read_only": False}, {"has_file": True, "in_job": False}
    assert keys.refusals(**live, **file) == {}
    assert {*keys.refusals(is_live=True, read_only=True, **file)} == {*keys.ACTIONS}
    assert keys.refusals(is_live=False, read_only=False, **file)["c"] == "actions are disabled in a replay"
    assert {*keys.refusals(**live, has_file=False, in_job=True)} == {"!"}
    assert {*keys.refusals(**live, has_file=False, in_job=False)} == {*keys.ACTIONS} - {"!"}
    screen = Screen()
    screen.ui.refusals = {"S": "not here"}
    screen.press("S")
    assert (screen.ui.pending_key, screen.ui.hint) == ("", "not here")
    screen.shown = dataclasses.replace(screen.shown, pic=dataclasses.replace(screen.shown.pic, training=None))
    screen.press("c")
    assert screen.ui.hint == "there is no run on these hosts"


@pytest.mark.parametrize(
    ("key", "change", "hint"),
    [
        ("R", {"guard": GuardShown.NONE}, "run llama-405b has no guard"),
        ("R", {"guard": GuardShown.GONE}, "run llama-405b has no guard"),
        ("R", {"guard": GuardShown.WATCHING, "phase": RunPhase.STOPPED}, "run llama-405b is not running: STOPPED"),
        ("c", {"phase": RunPhase.STOPPED}, "run llama-405b is not running: STOPPED"),
        ("p", {"phase": RunPhase.DONE}, "run llama-405b is not running: DONE"),
        ("M", {"phase": RunPhase.FAILED}, "run llama-405b is not running: FAILED"),
        ("R", {"guard": GuardShown.WATCHING}, ""),
        ("S", {"phase": RunPhase.FAILED}, ""),  # something may be left of it
        ("a", {"phase": RunPhase.FAILED}, ""),
    ],
)
def test_what_the_run_would_not_do_is_not_asked(key, change, hint):
    screen = Screen()
    run = dataclasses.replace(screen.shown.pic.training, **change)
    screen.shown = dataclasses.replace(screen.shown, pic=dataclasses.replace(screen.shown.pic, training=run))
    screen.press(key)
    assert screen.ui.hint.startswith(hint)
    assert bool(screen.ui.pending_key) is not bool(hint)


def test_actions_are_commands_that_can_be_typed():
    assert keys.action_command("c", "r", "my-hosts") == ["ask", "save", "--run", "r", "my-hosts"]
    assert keys.action_command("S", "r", "") == ["stop", "--run", "r"]


def test_a_shell_says_where_it_is_and_how_to_come_back(tmp_path):
    line = keys.shell_line("gpu-3", str(tmp_path))
    done = subprocess.run(
        ["sh", "-c", line], input="pwd\n", env=os.environ | {"SHELL": "sh"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["shell on gpu-3; exit returns to cluster-top", str(tmp_path)]


def test_the_diagnosis_is_whole_without_the_screen():
    shown = played(8, HUNG)
    text = "\n".join(
        keys.format_diagnosis(render_context(shown.pic, shown.trends, Ui(), shown.logs), ["llama405b status"])
    )
    assert text.startswith("HUNG: gpu-3: rank 21 is silent for 78 s at step 1200")
    assert "\ngpu-3: rank 21 at step 1200, heard 78 s ago: the others wait for it\n" in text
    assert "next: " in text
    assert "Watchdog: collective _ALLGATHER_BASE has run for 40 s" in text.split("log of gpu-3:")[1]
    assert text.endswith("more:\nllama405b status")


def test_the_diagnosis_is_of_what_is_known_in_figures_for_people():
    shown = played(8, HUNG)
    text = "\n".join(keys.format_diagnosis(render_context(shown.pic, shown.trends, Ui(), shown.logs), ()))
    assert not re.search(r"\d\.\d{5,}|None|more:", text)
    run = dataclasses.replace(shown.pic.training, loss=4.337370872497559, step_s=0.29056881, expected_step_s=None)
    bare = dataclasses.replace(shown.pic, training=run, events=())
    text = "\n".join(keys.format_diagnosis(render_context(bare, shown.trends, Ui(), []), ()))
    assert "loss 4.3374; 0.29 s a step; newest" in text
    assert "events:" not in text
    assert "log of" not in text


def test_a_rate_of_next_to_nothing_has_no_exponent():
    assert [format_number(value) for value in (1.473e-06, 0.0, 0.0123, 96.4321, 3071.6)] == [
        "0.00",
        "0",
        "0.0123",
        "96.43",
        "3,072",
    ]


def test_what_is_printed_or_served_does_not_depend_on_what_a_screen_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    chosen = remembered.SavedChoices("name", 1, 1, 1, "light")
    remembered.save_choices(chosen)
    shown = []
    monkeypatch.setattr(top, "handle_signals", lambda _: None)
    for place in ("llama405b_tools.verbs.top._print_views", "llama405b_tools.top.app.run_app"):
        monkeypatch.setattr(place, lambda *args: shown.append(next(each for each in args if isinstance(each, Session))))
    for words in (["--once"], ["--json"], ["--plain"], ["--watch", "1"]):
        top.main(["--replay", "demo", *words])
    monkeypatch.setenv("TEXTUAL_DRIVER", "textual.drivers.web_driver:WebDriver")  # as --serve sets it
    top.main(["--replay", "demo"])
    assert [remembered.current_choices(session.ui) for session in shown] == [remembered.SavedChoices()] * 5
    remembered.save_choices(remembered.SavedChoices())
    monkeypatch.delenv("TEXTUAL_DRIVER")
    assert remembered.load_choices() == chosen


def test_choices_are_remembered_and_a_file_of_another_version_is_not_believed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    ui = Ui()
    remembered.load_choices().apply(ui)
    assert ui == Ui()
    ui.sort, ui.window, ui.quantity, ui.hidden, ui.theme = "power", 2, 3, 1, "light"
    remembered.save_choices(remembered.current_choices(ui))
    again = Ui()
    remembered.load_choices().apply(again)
    assert again == ui
    for text in ("", "{", '{"sort": "size"}', '{"window": 9}', '{"quantity": -1}', '{"theme": "pink"}', "[]"):
        (tmp_path / "llama405b/top.json").write_text(text)
        assert remembered.load_choices() == remembered.SavedChoices(), text
    (tmp_path / "llama405b/top.json").unlink()
    (tmp_path / "llama405b").rmdir()
    (tmp_path / "llama405b").write_text("a file where the directory should be")
    remembered.save_choices(remembered.current_choices(ui))
    assert remembered.load_choices() == remembered.SavedChoices()


CANDIDATES = [*string.printable.strip(), " ", "space", "up", "down", "left", "right", "pageup", "pagedown", "home", "end",
              "enter", "escape", "tab", "shift+tab", "backspace", "delete", "f1"]  # fmt: skip


@pytest.mark.parametrize("pane", ["hosts", "log", "events"])
def test_the_help_page_lists_exactly_the_keys_that_do_something(pane):
    places = {"hosts": [""], "log": ["", "log"], "events": ["", "events"]}[pane]
    listed = {name for key in KEYS if key.where in places for name in key.names} - {"x"}  # which needs a command
    done = set()
    for name in CANDIDATES:
        screen = Screen(logs=lines(30))
        screen.ui.pane, screen.ui.log.search = pane, "line"
        screen.press(name)
        if not screen.ui.hint.startswith("no such key"):
            done.add(name)
    assert done == listed
    page = "\n".join(help_lines())
    assert all(key.shown in page and key.does in page for key in KEYS)


def test_a_key_draws_once(monkeypatch):
    drawn = []
    monkeypatch.setattr(panels, "draw_screen", lambda *_: drawn.append(1) or [])
    screen = types.SimpleNamespace(
        session=types.SimpleNamespace(trends=Trends()), ui=Ui(), shown_view=lambda: (app.EMPTY_VIEW, []), size=SIZE_OF,
        canvas=types.SimpleNamespace(show_lines=lambda *_: None), text_console=None, commands={},
        saved_choices=remembered.current_choices(Ui()),
    )  # fmt: skip
    contexts = []
    monkeypatch.setattr(panels, "render_context", lambda *_: contexts.append(1))
    screen.press_key = lambda _: None
    screen.draw_view = lambda: app.TopApp.draw_view(screen)
    app.TopApp.on_key(screen, events.Key("j", "j"))
    assert (len(drawn), len(contexts)) == (1, 1)
