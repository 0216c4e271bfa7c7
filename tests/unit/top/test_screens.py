"""What cluster-top looks like: text snapshots in each state at three sizes, and the README's screenshot.

``LLAMA405B_UPDATE_SCREENS=1`` rewrites them: look at each as a picture before you commit it.
"""

import dataclasses
import io
import os
import re

import pytest
import simulate
from rich.console import Console, Group
from shown import HOT, HUNG, LOADING, blank_share, in_situation, played, text_of

from conftest import ROOT
from llama405b_tools.top.draw import hosts
from llama405b_tools.top.draw.hosts import heat_scale
from llama405b_tools.top.draw.panels import draw_listing, render_context
from llama405b_tools.top.draw.ui import (
    PLAIN,
    THEMES,
    VIEWS,
    Ui,
    detect_background,
    draw_event,
    help_lines,
    make_theme,
    styled_segments,
)
from llama405b_tools.top.state.picture import MIN_GBIT, NETWORK, QUANTITIES, HostState, Severity
from llama405b_tools.top.state.trends import Trends

SCREENS = ROOT / "tests/data/screens"
UPDATE = bool(os.environ.get("LLAMA405B_UPDATE_SCREENS"))
SIZES = [(80, 24), (120, 40), (200, 60)]
STATES = {
    "loading": lambda: played(8, LOADING),
    "healthy": lambda: played(8, 90.0, simulate.CALM),
    "slow": lambda: in_situation("steps take twice as long"),
    "hung": lambda: played(8, HUNG),
    "dead-host": lambda: in_situation("a host is not heard, and the others wait"),
    "straggler": lambda: in_situation("a rank is 0.9 s behind"),
    "failed": lambda: in_situation("a rank is killed"),
    "stopped": lambda: in_situation("a stop whose last save fails"),
    "64x8": lambda: played(64, HUNG),
}
HOST_LINE = r"[▶ ][✖! ]gpu-\d "


@pytest.fixture(autouse=True)
def utc(monkeypatch):
    import time

    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def same(path, found):
    if UPDATE:
        path.write_text(found)
    assert path.read_text() == found, f"{path.name} looks different; see this module's docstring"


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_screen(state, width, height):
    lines = STATES[state]().screen(width, height)
    assert [line.cell_len for line in lines] == [width] * height
    text = text_of(lines)
    same(SCREENS / f"{state}-{width}x{height}.txt", text)
    if state == "64x8" and width >= 120:  # the promise: all of them on one screen
        assert all(name in text for name in simulate.host_names(64))


@pytest.mark.slow
@pytest.mark.parametrize("n_hosts", [8, 64])
@pytest.mark.parametrize(("width", "height"), SIZES[1:])
def test_at_most_a_quarter_is_blank_after_a_minute_of_training(n_hosts, width, height):
    lines = played(n_hosts, simulate.LOADED + 60, simulate.CALM).screen(width, height)
    assert blank_share(lines) <= 0.25


@pytest.mark.parametrize("view", [*VIEWS[1:], "host", "rank", "text"])
@pytest.mark.parametrize(("width", "height"), SIZES[:2])
def test_other_views(view, width, height):
    ui = Ui(path=["all", view], selected="gpu-3", title="HELP", lines=help_lines())
    lines = played(8, HUNG).screen(width, height, ui)
    assert [line.cell_len for line in lines] == [width] * height
    same(SCREENS / f"{view}-{width}x{height}.txt", text_of(lines))


@pytest.mark.parametrize("size", [(20, 5), (1, 1), (40, 8), (300, 100), (100, 12), (160, 14), (200, 20)])
@pytest.mark.parametrize("view", [*VIEWS, "host", "rank", "text"])
def test_any_size_is_drawn(size, view):
    for n_hosts in (1, 8):
        lines = played(n_hosts, 70.0).screen(*size, Ui(path=["all", view]))
        assert [line.cell_len for line in lines] == [size[0]] * size[1]


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_every_host_of_many_is_on_a_page(width, height):
    shown = played(256, 4.0)
    names = simulate.host_names(256)
    seen = set()
    for name in names[::7] + names[-1:]:
        text = text_of(shown.screen(width, height, Ui(sort="name", selected=name)))
        assert re.search(rf"▶.{name}", text)
        seen |= {each for each in names if each in text}
    assert seen == set(names)


@pytest.mark.slow
def test_sorting_and_filtering():
    pic = played(8, HOT).pic
    names = lambda **more: [row.name for row in hosts.shown_hosts(pic, Ui(**more))]  # noqa: E731
    assert names()[0] == names(sort="power")[0] == names(sort="temperature")[0] == "gpu-3"
    assert names(sort="name") == simulate.host_names(8)
    assert names(odd_only=True) == ["gpu-3"]
    assert names(filter="THERMAL") == ["gpu-3"]
    assert names(filter="gpu-5") == ["gpu-5"]
    assert names(filter="nobody") == []
    assert "no host matches 'nobody'; Esc shows all" in text_of(played(8, HOT).screen(120, 40, Ui(filter="nobody")))


def test_colour_is_never_the_only_sign():
    text = text_of(played(8, HOT).screen(120, 40))
    assert text.startswith(" ▲ DEGRADED")
    assert "! slowed by" in text
    assert "▶!gpu-3 " in text
    assert "56!" in text.split("▶!gpu-3")[1].split("\n")[0]


@pytest.mark.parametrize("view", [*VIEWS, "host", "rank"])
def test_a_style_is_of_a_piece_or_of_a_line_in_one_style(view):
    shown = played(8, HUNG)
    lines = shown.screen(120, 40, Ui(path=["all", view], selected="gpu-3"))
    assert [line.plain for line in lines if line.style and line.spans] == []
    bad = next(draw_event(event) for event in shown.pic.events if event.level is Severity.BAD)
    assert {str(span.style): bad.plain[span.start : span.end] for span in bad.spans}["old"] == bad.plain[:9]


@pytest.mark.parametrize("name", THEMES)
@pytest.mark.parametrize("n_colors", [0, 16, pytest.param(256, marks=pytest.mark.slow)])
def test_every_style_is_in_every_theme(name, n_colors):
    known = {*make_theme(name, n_colors).styles}
    assert {*PLAIN} <= known
    for state in STATES.values() if n_colors == 256 else [STATES["hung"]]:
        for size in SIZES:
            for line in state().screen(*size):
                assert {str(span.style) for span in line.spans} | {str(line.style)} <= known | {""}


def test_without_colors_nothing_is_colored():
    look = Console(file=io.StringIO(), theme=make_theme("dark", 0), color_system="256", legacy_windows=False)
    styles = [part.style for line in played(8, HUNG).screen(120, 40) for part in styled_segments(line, look)]
    assert not any(style and (style.color or style.bgcolor) for style in styles)
    assert any(style and style.reverse and style.bold for style in styles)


def test_the_background_that_a_terminal_tells():
    assert (detect_background("15;0"), detect_background("0;15"), detect_background("0;default;7")) == (
        "dark",
        "light",
        "light",
    )
    assert detect_background("") == detect_background("x") == "dark"


def without_gpus(pic):
    rows = [dataclasses.replace(row, gpus=(), has_gpu=False) for row in pic.hosts]
    return dataclasses.replace(pic, hosts=tuple(rows))


def marked(line):
    return {
        line.plain[span.start : span.end].strip()
        for span in line.spans
        if str(span.style) in ("bad", "odd", "heat.bad")
    }


def test_the_culprit_is_marked_with_its_gpu_and_its_numbers():
    shown = played(8, HUNG)
    lines = shown.screen(120, 40, Ui(sort="name"))
    line = next(line for line in lines if line.plain.startswith("▶✖gpu-3"))
    assert {"✖", "gpu-3", "HUNG", "1200", "78s"} <= marked(line)
    assert any(re.fullmatch(r"\d+!", text) for text in marked(line))
    other = next(line for line in lines if line.plain.startswith("  gpu-4"))
    assert marked(other) <= {""}
    compact = next(line for line in shown.screen(80, 24) if "✖gpu-3" in line.plain)
    assert {"✖", "gpu-3", "!", "H"} <= marked(compact)
    hot = played(8, HOT).screen(120, 40, Ui(path=["all", "host"], selected="gpu-3"))
    gpu = next(line for line in hot if line.plain.startswith("  gpu 3"))
    assert {text.split()[-1] for text in marked(gpu)} >= {"W", "°C", "MHz"}


def test_where_a_run_failed_is_first_and_marked_and_the_others_are_dim():
    shown = played(8, HOT)
    failed = [
        dataclasses.replace(row, state=HostState.FAILED, why="why", is_culprit=row.name == "gpu-6", notes=())
        for row in shown.pic.hosts
    ]
    for width in (120, 80):
        lines = shown.screen(width, 40, hosts=tuple(failed), about="gpu-6")
        at = [line for line in lines if re.match(HOST_LINE, line.plain)]
        assert at[0].plain.startswith("▶✖gpu-6 ")
        assert "✖" not in "".join(line.plain for line in at[1:])
        assert "gpu-6" in marked(at[0])
        victim = next(line for line in at if "gpu-2 " in line.plain)
        name = next(span for span in victim.spans if victim.plain[span.start : span.end].strip() == "gpu-2")
        assert str(name.style) == "old"


@pytest.mark.parametrize("state", [HostState.STALE, HostState.TIMEOUT, HostState.CONNECTING])
@pytest.mark.parametrize("edit", [lambda pic: pic, without_gpus])
def test_what_is_no_longer_heard_is_dim(state, edit):
    shown = played(8, HOT)
    rows = [dataclasses.replace(row, state=state) if row.name == "gpu-3" else row for row in edit(shown.pic).hosts]
    for width in (120, 80):
        lines = shown.screen(width, 40, Ui(sort="name"), hosts=tuple(rows))
        line = next(line for line in lines if re.match(r"[▶ ][✖! ]gpu-3 ", line.plain))
        styles = {line.plain[span.start : span.end].strip(): str(span.style) for span in line.spans}
        assert styles["gpu-3"] == "old"
        assert not {"odd", "heat.odd"} & {style for text, style in styles.items() if text}
    ui = Ui(path=["all", "host"], selected="gpu-3")
    lines = shown.screen(120, 60, ui, hosts=tuple(rows))
    values = [line for line in lines if re.match(r"[ ▶]+(gpu|rank|last frame|\d)", line.plain)]
    assert len(values) >= 17 - len(rows[2].gpus)
    assert {str(span.style) for line in values for span in line.spans} <= {"old", "focus"}


def test_the_numbers_of_the_training_that_stand_out_are_marked():
    shown = played(8, HOT)
    training = dataclasses.replace(shown.pic.training, odd_in=("loss", "step_s"))
    line = next(line for line in shown.screen(160, 40, training=training) if line.plain.startswith(" step "))
    found = [line.plain[span.start : span.end] for span in line.spans if str(span.style) == "odd"]
    assert found == [f"loss {training.loss:.4f}", "6.00 s/step"]


def progress(shown, width=240, **new):
    training = dataclasses.replace(shown.pic.training, **new)
    return next(line.plain for line in shown.screen(width, 40, training=training) if line.plain.startswith(" step "))


def test_updates_on_the_cpu_show_their_speed_and_what_crosses():
    moved = {"update_bytes": 177.6e9, "down_bytes": 25.4e9, "up_bytes": 12.7e9, "update_s": 3.8, "exposed_s": 0.52}
    line = progress(played(8, HOT), **moved)
    assert "update 3.80 of which waited 0.52" in line
    assert line.rstrip().endswith("host memory 46.7GB/s  25.4GB down 12.7GB up")
    assert "GB down" not in progress(played(8, HOT), 120, **moved)


def test_what_was_predicted_is_beside_what_is_measured():
    shown = played(8, HOT)
    assert " 6.00 s/step (plan 5.5)  " in progress(shown, expected_step_s=5.52)
    assert "plan" not in progress(shown, expected_step_s=None)


def test_the_graphs_have_axes_marks_and_the_plan():
    shown = played(8, 150.0, simulate.CALM)
    text = text_of(shown.screen(200, 60))
    assert "── tokens/s 9,024 " in text
    assert "plan 9,335 ┄  MFU 35%\n" in text
    assert re.search(r"└-10m─+-5m─+s?─*s", text)  # two saves
    rates = shown.trends.steps["rate"].columns(0, shown.pic.time - 60, shown.pic.time, 30)
    assert {round(bucket.mean) for bucket in rates if bucket} == {9024}
    hour = text_of(shown.screen(200, 60, Ui(window=1)))
    assert re.search(r"└-1[0-9]m─", hour)  # no further than is known
    assert "1 hour" in hour.splitlines()[-1]


def test_there_is_no_graph_of_what_nobody_knows():
    shown = played(8, HOT)
    trends = Trends()
    for i in range(3):
        trends.take(dataclasses.replace(without_gpus(shown.pic), time=shown.pic.time + 2 * i), ())
    pic = dataclasses.replace(without_gpus(shown.pic), time=shown.pic.time + 4, training=None)
    text = text_of(dataclasses.replace(shown, pic=pic, trends=trends).screen(200, 60))
    assert " kW" not in text
    assert "GPU memory" not in text
    assert "CPU, all hosts 9%" in text


def test_a_sick_gpu_is_a_line_and_a_fall_of_all_a_block():
    shown = played(8, HUNG)
    of = render_context(shown.pic, shown.trends, Ui(), shown.logs)
    lines = [line.plain for line in of.draw_heat_map(100, 66)]  # a line for each GPU
    sick = next(line for line in lines if "gpu-3 3 " in line)
    well = next(line for line in lines if "gpu-3 4 " in line)
    assert re.search(r"█+[▄▅]+█+▂+$", sick.rstrip())
    assert re.search(r"█+▂+$", well.rstrip())
    assert not re.search(r"[▄▅]", well.split("█", 1)[1])
    links = [line.plain for line in of.draw_heat_map(100, 10, NETWORK)]
    assert re.search(r"█+▁+$", links[1].rstrip())  # by what they carried before, not by the nothing of now
    assert [line[:7] for line in links if line[0] == "✖"] == ["✖gpu-3 "]


def test_only_the_line_of_the_gpu_that_stands_out_is_marked():
    shown = played(8, HOT)
    of = render_context(shown.pic, shown.trends, Ui(), shown.logs)
    assert [line.plain[:9] for line in of.draw_heat_map(100, 26) if line.plain[0] != " "] == ["── every ", "!gpu-3 3-"]


def test_what_to_do_next_is_one_line():
    lines = {
        state: [line.plain for line in STATES[state]().screen(200, 60)]
        for state in ("healthy", "hung", "failed", "stopped")
    }
    said = {state: [line.strip() for line in each if line.startswith(" → ")] for state, each in lines.items()}
    assert said["healthy"] == []
    stop = "a says why; `llama405b stop --run llama-405b` ends it"
    again = "launch it again with `--resume auto`, from step 1,200"
    assert said["hung"] == [f"→ {stop}; check gpu-3 (`llama405b doctor`), then {again}"]
    assert "e shows the first error" in said["failed"][0]
    assert said["stopped"][0].startswith("→ make room where the checkpoints go; launch it again with `--resume auto`")


def test_as_text_every_host_is_listed():
    text = "".join(f"{line.plain}\n" for line in draw_listing(played(8, HOT).pic, Ui(), 120))
    assert all(re.search(rf"[ !]{name} ", text) for name in simulate.host_names(8))
    assert "! gpu-3: gpu 3: slowed by" in text
    assert text.splitlines()[0].startswith("▲ DEGRADED  gpu-3: gpu 3: slowed by")


def test_the_screenshot_of_the_readme():
    console = Console(
        file=io.StringIO(), width=120, record=True, force_terminal=True, color_system="truecolor", legacy_windows=False,
        theme=make_theme("dark", 256),
    )  # fmt: skip
    console.print(Group(*played(8, HUNG).screen(120, 40)), no_wrap=True)
    same(ROOT / "docs/cluster-top.svg", console.export_svg(title="cluster-top --replay demo", unique_id="cluster-top"))
    assert "docs/cluster-top.svg" in (ROOT / "README.md").read_text()


def test_next_to_nothing_is_low_and_not_hot():
    shown = played(8, HOT)
    idle = tuple(
        dataclasses.replace(row, net_bytes_per_s=12.5 * i, ib_bytes_per_s=None) for i, row in enumerate(shown.pic.hosts)
    )
    by = heat_scale(NETWORK, idle)
    assert (by.low, by.high, {by.level(by.quantity.value_of(row, 0)) for row in idle}) == (0.0, MIN_GBIT, {0})
    assert QUANTITIES[NETWORK].scale([0.0, 2.0]) == (0.0, 2.0)
