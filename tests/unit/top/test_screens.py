"""What cluster-top looks like: text snapshots at several sizes and fleets, and the README's screenshot.

``LLAMA405B_UPDATE_SCREENS=1`` rewrites them: check the diff before you commit it.
"""

import dataclasses
import functools
import io
import os
import re

import pytest
from rich.console import Console, Group

from conftest import ROOT
from llama405b_tools.top.draw import panels
from llama405b_tools.top.draw.lines import event_line
from llama405b_tools.top.logpane import LogPane
from llama405b_tools.top.state import simulate
from llama405b_tools.top.state.cluster import ClusterState
from llama405b_tools.top.state.picture import HostState, Level

SCREENS = ROOT / "tests/data/screens"
UPDATE = bool(os.environ.get("LLAMA405B_UPDATE_SCREENS"))
SLOW = pytest.mark.slow
HOT, HUNG = 84.0, simulate.HUNG + 80


@pytest.fixture(autouse=True)
def utc(monkeypatch):
    import time

    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@functools.cache
def played(n_hosts, seconds):
    names = simulate.names(n_hosts)
    cluster, logs = ClusterState(names, 2.0, badge="SIMULATED"), LogPane()
    judged = 0.0
    for event in simulate.incident(n_hosts, seconds=seconds):
        if "frame" in event:
            cluster.take(event["host"], event["frame"], event["t"])
        else:
            logs.take(event["host"], event["entries"], cluster.first_rank(event["host"]))
        if event["host"] == names[-1] and event["t"] - judged > 9:
            judged = event["t"]
            cluster.advance(judged)
    logs.settle(event["t"])
    cluster.advance(event["t"])
    return cluster.picture(), list(logs.lines)


def text_of(lines, width):
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, legacy_windows=False)
    for line in lines:
        console.print(line, no_wrap=True, crop=True)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def same(path, found):
    if UPDATE:
        path.write_text(found)
    assert path.read_text() == found, f"{path.name} looks different; see this module's docstring"


@pytest.mark.parametrize(
    ("n_hosts", "seconds"), [(8, HOT), pytest.param(64, HUNG, marks=SLOW), pytest.param(256, HUNG, marks=SLOW)]
)
@pytest.mark.parametrize(("width", "height"), [(120, 40), (80, 24), (200, 60)])
def test_a_screen(n_hosts, seconds, width, height):
    pic, logs = played(n_hosts, seconds)
    lines = panels.screen(pic, panels.Ui(), logs, width, height)
    assert len(lines) == height
    assert all(line.cell_len == width for line in lines)
    text = text_of(lines, width)
    same(SCREENS / f"{n_hosts}-{width}x{height}.txt", text)
    if n_hosts <= 64 and width >= 120:  # the promise: all of them on one screen
        assert all(name in text for name in simulate.names(n_hosts))


@pytest.mark.parametrize("mode", ["host", "logs", "text"])
@pytest.mark.parametrize(("width", "height"), [(120, 40), (80, 24)])
def test_other_views(mode, width, height):
    pic, logs = played(8, HUNG)
    ui = panels.Ui(mode=mode, selected="gpu-3", title="HELP", lines=panels.HELP.split("\n"))
    lines = panels.screen(pic, ui, logs, width, height)
    assert [line.cell_len for line in lines] == [width] * height
    same(SCREENS / f"{mode}-{width}x{height}.txt", text_of(lines, width))


@pytest.mark.parametrize("size", [(20, 5), (1, 1), (40, 8), (300, 100)])
@pytest.mark.parametrize("mode", ["cluster", "host", "logs", "text"])
def test_any_size_is_drawn(size, mode):
    pic, logs = played(8, 70.0)
    lines = panels.screen(pic, panels.Ui(mode=mode), logs, *size)
    assert len(lines) == size[1]
    assert all(line.cell_len == size[0] for line in lines)


@pytest.mark.slow
def test_sorting_filtering_and_pages():
    pic, _ = played(8, HOT)
    names = lambda **more: [row.name for row in panels.ordered(pic, panels.Ui(**more))]  # noqa: E731
    assert names()[0] == names(sort="power")[0] == names(sort="temperature")[0] == "gpu-3"
    assert names(sort="name") == simulate.names(8)
    assert names(odd_only=True) == ["gpu-3"]
    assert names(filter="THERMAL") == ["gpu-3"]
    assert names(filter="gpu-5") == ["gpu-5"]
    assert names(filter="nobody") == []
    many, logs = played(256, 4.0)
    ui = panels.Ui(sort="name")
    pages = panels.n_pages(many, ui, 120, 40)
    shown = []
    for ui.page in range(pages):
        text = text_of(panels.screen(many, ui, logs, 120, 40), 120)
        shown += [name for name in simulate.names(256) if name in text]
    assert shown == simulate.names(256)  # each once


def test_colour_is_never_the_only_sign():
    pic, logs = played(8, HOT)
    text = text_of(panels.screen(pic, panels.Ui(), logs, 120, 40), 120)
    assert "▲ DEGRADED" in text
    assert "! slowed by" in text
    assert "!" in text.split("▶ gpu-3")[1].split("\n")[0]


@pytest.mark.parametrize("mode", ["cluster", "host", "logs", "events"])
def test_a_style_is_of_a_piece_or_of_a_line_in_one_style(mode):
    pic, logs = played(8, HUNG)
    lines = panels.screen(pic, panels.Ui(mode=mode, selected="gpu-3"), logs, 120, 40)
    assert [line.plain for line in lines if line.style and line.spans] == []
    bad = next(event_line(event) for event in pic.events if event.level is Level.BAD)
    assert {str(span.style): bad.plain[span.start : span.end] for span in bad.spans}["dim"] == bad.plain[:9]


def pieces(pic, name, width=120, **more):
    """The pieces of a host's line that have a style, and their style."""
    lines = panels.screen(pic, panels.Ui(sort="name", **more), [], width, 40)
    line = next(line for line in lines if re.match(rf"[▶ ][✖ ]{name} ", line.plain))
    found = [(line.plain[span.start : span.end].strip(), str(span.style).strip()) for span in line.spans]
    return [(text, style) for text, style in found if text not in ("", "▶", "✖")]


def without_gpus(pic):
    hosts = [dataclasses.replace(row, gpus=(), has_gpu=False) for row in pic.hosts]
    return dataclasses.replace(pic, hosts=tuple(hosts))


def test_the_culprit_is_marked_with_its_gpu_and_its_numbers():
    pic, _ = played(8, HUNG)
    state, numbers = ("HUNG", "bold red"), [("1200", "bold red"), ("78s", "bold red")]
    assert pieces(pic, "gpu-3")[:-1] == [("gpu-3", "bold red"), state, ("18!", "bold red"), *numbers]
    assert pieces(without_gpus(pic), "gpu-3")[:-1] == [("gpu-3", "bold red"), state, *numbers]
    assert pieces(pic, "gpu-3", 80) == [
        ("gpu-3", "bold red"),
        ("▂", "bold red"),
        ("H", "bold red"),
        ("1200", "bold red"),
    ]
    assert pieces(pic, "gpu-4") == pieces(pic, "gpu-4", 80) == []
    hot, _ = played(8, HOT)
    assert pieces(hot, "gpu-3")[:3] == [("gpu-3", "bold yellow"), ("56!", "bold yellow"), ("86", "bold yellow")]
    detail = panels.screen(hot, panels.Ui(mode="host", selected="gpu-3"), [], 120, 40)
    gpu = next(line for line in detail if line.plain.startswith("  gpu 3"))
    marked = {gpu.plain[span.start : span.end].strip() for span in gpu.spans if str(span.style) == "bold yellow"}
    assert {text.split()[-1] for text in marked} >= {"W", "°C", "MHz"}


def test_where_a_run_failed_is_first_and_marked_and_the_others_are_dim():
    pic, _ = played(8, HOT)
    failed = [
        dataclasses.replace(row, state=HostState.FAILED, why="why", is_culprit=row.name == "gpu-6") for row in pic.hosts
    ]
    pic = dataclasses.replace(pic, hosts=tuple(failed))
    for width in (120, 80):
        lines = [line.plain for line in panels.screen(pic, panels.Ui(), [], width, 40)]
        hosts = [line for line in lines if re.match(r"[▶ ][✖ ]gpu-\d ", line)]
        assert hosts[0].startswith("▶✖gpu-6 ")
        assert "✖" not in "".join(hosts[1:])
    assert "bold red" in {style for _, style in pieces(pic, "gpu-6")}
    assert {style for _, style in pieces(pic, "gpu-2")} == {"dim"}


def test_the_selected_host_is_on_the_page():
    many, logs = played(64, 4.0)
    ui = panels.Ui(sort="name", selected="gpu-50")
    ui.page = panels.page_of(many, ui, 80, 24)
    assert any(
        line.plain.startswith("▶ gpu-50") or "  ▶ gpu-50" in line.plain
        for line in panels.screen(many, ui, logs, 80, 24)
    )


@pytest.mark.parametrize("state", [HostState.STALE, HostState.TIMEOUT, HostState.CONNECTING])
@pytest.mark.parametrize("edit", [lambda pic: pic, without_gpus])
def test_what_is_no_longer_heard_is_dim(state, edit):
    pic = edit(played(8, HOT)[0])
    rows = [dataclasses.replace(row, state=state) if row.name == "gpu-3" else row for row in pic.hosts]
    pic = dataclasses.replace(pic, hosts=tuple(rows))
    for width in (120, 80):
        bright = [text for text, style in pieces(pic, "gpu-3", width) if style != "dim"]
        assert all(state in text or text in rows[2].notes[0] or text.endswith("…") for text in bright), bright
        assert ("gpu-3", "dim") in pieces(pic, "gpu-3", width)
    lines = panels.screen(pic, panels.Ui(mode="host", selected="gpu-3"), [], 120, 60)
    values = [line for line in lines if re.match(r" +(gpu|rank|last frame|\d)", line.plain)]
    assert len(values) >= 17 - len(rows[2].gpus)
    assert {str(span.style) for line in values for span in line.spans} == {"dim"}


def test_the_numbers_of_the_training_that_stand_out_are_marked():
    pic, logs = played(8, HOT)
    training = dataclasses.replace(pic.training, odd_in=("loss", "step_s"))
    line = panels.screen(dataclasses.replace(pic, training=training), panels.Ui(), logs, 120, 40)[1]
    marked = [line.plain[span.start : span.end] for span in line.spans if str(span.style) == "bold yellow"]
    assert marked == [f"loss {training.loss:.4f}", "6.00 s/step"]


def test_updates_on_the_cpu_show_their_speed_and_what_crosses():
    pic, logs = played(8, HOT)
    moved = {"update_bytes": 177.6e9, "down_bytes": 25.4e9, "up_bytes": 12.7e9}
    training = dataclasses.replace(pic.training, update_s=3.8, exposed_s=0.52, **moved)
    line = panels.screen(dataclasses.replace(pic, training=training), panels.Ui(), logs, 240, 40)[1].plain
    assert "update 3.80 of which waited 0.52" in line
    assert line.rstrip().endswith("host memory 46.7GB/s  25.4GB down 12.7GB up")
    narrow = panels.screen(dataclasses.replace(pic, training=training), panels.Ui(), logs, 120, 40)[1].plain
    assert "GB down" not in narrow


def test_what_was_predicted_is_beside_what_is_measured():
    pic, logs = played(8, HOT)
    predicted = dataclasses.replace(pic, training=dataclasses.replace(pic.training, expected_step_s=5.52))
    assert " 6.00 s/step  (plan 5.5)  " in panels.screen(predicted, panels.Ui(), logs, 240, 40)[1].plain
    unknown = dataclasses.replace(pic, training=dataclasses.replace(pic.training, expected_step_s=None))
    assert "plan" not in panels.screen(unknown, panels.Ui(), logs, 240, 40)[1].plain


def test_the_screenshot_of_the_readme():
    pic, logs = played(8, HUNG)
    console = Console(
        file=io.StringIO(), width=120, record=True, force_terminal=True, color_system="truecolor", legacy_windows=False
    )
    console.print(Group(*panels.screen(pic, panels.Ui(), logs, 120, 34)), no_wrap=True)
    same(ROOT / "docs/cluster-top.svg", console.export_svg(title="cluster-top --replay demo", unique_id="cluster-top"))
    assert "docs/cluster-top.svg" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "—"), (0.84, "0.8s"), (9.96, "10s"), (119, "119s"), (120, "2m"), (18_120, "5h02m"), (111_600, "1d7h")],
)
def test_spans(value, words):
    assert panels.span(value) == words
