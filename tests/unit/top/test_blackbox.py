"""The last ten minutes: bounded, written after an incident, and played back to the same picture."""

import dataclasses

import pytest
import simulate
from shown import HUNG, played, text_of

from llama405b.contract import reader
from llama405b_tools.top import event_sources, keys, session
from llama405b_tools.top.app import TopApp
from llama405b_tools.top.draw.panels import render_context
from llama405b_tools.top.draw.ui import VIEWS, Ui, make_theme
from llama405b_tools.top.event_sources import SourceEvent
from llama405b_tools.top.keys import press
from llama405b_tools.top.session import HISTORY_S, MAX_FILES, PICTURE_EVERY_S, BlackBox, Session
from llama405b_tools.top.state.picture import ClusterVerdict

N_HOSTS = 2


def source_of(events, names):
    return event_sources.ReplaySource(
        event_sources.RecordingHeader(1, tuple(names), 2.0), iter(events), "SIMULATED", 1.0
    )


@pytest.fixture(scope="module")
def filled():
    """A box after twenty minutes of a run that hangs at the end, and the last picture."""
    names = simulate.host_names(N_HOSTS)
    events = [
        reader.build_record(SourceEvent, each, "event") for each in simulate.simulate_incident(N_HOSTS, seconds=HUNG)
    ]
    begin = events[0].t
    young = [event for event in events if event.t < begin + 100]
    first = [dataclasses.replace(event, t=event.t - s) for s in range(900, 0, -100) for event in young]
    session = Session(source_of([], names), None, 60.0)
    box, pic = BlackBox(session.source), None
    for event in [*first, *events]:
        box.add_event(event)
        session.take(event)
        if event.host == names[-1]:
            session.cluster.advance(event.t)
            pic = session.cluster.make_view()
            box.add_view(pic)
    return box, pic


@pytest.mark.slow
def test_what_is_older_than_ten_minutes_is_forgotten(filled):
    box, pic = filled
    first, last = box.span
    assert last == pic.time
    assert HISTORY_S - 2 * PICTURE_EVERY_S <= last - first <= HISTORY_S
    assert box.n_bytes == sum(len(part) for _, part in box.parts)
    assert box.parts[0][0] >= pic.time - HISTORY_S - session.PART_S


def test_a_moment_is_seen_again(filled):
    box, pic = filled
    assert box.view_at(pic.time) == pic
    earlier = box.view_at(pic.time - 70.5)
    assert 70.5 <= pic.time - earlier.time < 70.5 + 2 * PICTURE_EVERY_S
    assert pic.verdict is ClusterVerdict.HUNG
    assert earlier.verdict is not ClusterVerdict.HUNG
    assert box.view_at(0.0).time == box.span[0]


def test_there_is_room_for_so_many_bytes_and_no_more(filled, monkeypatch):
    monkeypatch.setattr(session, "PART_BYTES", 30_000)
    names = simulate.host_names(N_HOSTS)
    box, pic = BlackBox(source_of([], names)), filled[1]
    for event in simulate.simulate_incident(N_HOSTS, seconds=200):
        box.add_event(reader.build_record(SourceEvent, event, "event"))
    for n in range(100):
        box.add_view(dataclasses.replace(pic, time=1000.0 + 2 * n))
    assert 10_000 < box.n_bytes <= 30_000
    assert 10_000 < box.n_view_bytes <= 30_000


def test_what_was_written_is_played_back_to_the_same_verdict(filled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    box, pic = filled
    path = tmp_path / "box.gz"
    path.write_bytes(box.recording())
    replay = event_sources.open_replay(str(path), 1.0)
    session = Session(replay, None, 60.0)
    for event in replay.remaining_events():
        session.take(event)
        session.judge(event)
    again = session.make_view(logs=False)
    assert "cut short" not in str(again.events[-1])
    assert (again.verdict, again.why) == (pic.verdict, pic.why)
    assert again.training.run == pic.training.run  # the plan was sent long before
    assert HISTORY_S - 20 < replay.last_time - replay.begin_time < HISTORY_S + 20


def test_an_incident_is_written_once_and_a_while_after_it(filled, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    box, bad = filled
    good = dataclasses.replace(bad, verdict=ClusterVerdict.HEALTHY)
    written = []

    def see(pic, *seconds):
        written.extend(box.write_incident(dataclasses.replace(pic, time=bad.time + second)) for second in seconds)

    see(good, 0)
    see(bad, 2, 10)
    assert not any(written)
    see(bad, 23, 30)
    assert len(list(filter(None, written))) == 1
    assert written[3].parent == tmp_path / f"state/llama405b/black-box/{bad.training.run}"
    assert written[3].parent.stat().st_mode & 0o777 == 0o700
    (tmp_path / "runs" / bad.training.run).mkdir(parents=True)
    for n in range(MAX_FILES + 2):
        see(good, 100 * n + 100)
        see(bad, 100 * n + 110, 100 * n + 140)
    assert len(list((tmp_path / "runs" / bad.training.run / "black-box").glob("*-hung.gz"))) == MAX_FILES


def test_an_incident_that_cannot_be_written_is_told(filled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    box, bad = filled
    box.incident_start = None
    (tmp_path / "runs" / bad.training.run).mkdir(parents=True)
    (tmp_path / "runs" / bad.training.run / "black-box").write_text("")
    session = Session(source_of([], simulate.host_names(N_HOSTS)), "a fleet", 60.0)
    for second in (0, 30, 40):
        session._write_incident(box, dataclasses.replace(bad, time=bad.time + 1000 + second))
    [told] = session.cluster.events
    assert "black-box" in told.text
    outside = dataclasses.replace(bad, training=dataclasses.replace(bad.training, run=".."))
    box.incident_start = None
    assert [box.write_incident(dataclasses.replace(outside, time=bad.time + second)) for second in (0, 30)] == [
        None,
        None,
    ]


def test_keys_go_back_and_forward_and_to_now():
    ui, shown = Ui(history_span=(1000.0, 1090.0)), played(8, HUNG)

    def key(name):
        return press(ui, name, render_context(shown.pic, shown.trends, ui, shown.logs), 120, 40)

    assert key("right") == "skip"
    key("left")
    assert ui.past_time == 1080.0
    key("[")
    assert ui.past_time == 1020.0
    key("[")
    assert ui.past_time == 1000.0
    assert ui.hint
    assert key("right") == ""
    assert ui.past_time == 1010.0
    key("]")
    key("]")
    assert ui.past_time is None
    key("left")
    key("end")
    assert ui.past_time is None
    key("5")
    key("left")  # the log moves sideways there
    assert ui.past_time is None
    assert (key("<"), key(">")) == ("slower", "faster")


def test_from_a_screen_that_stands_still_one_goes_back_from_what_it_shows():
    shown = played(8, HUNG)
    ui = Ui(is_paused=True, history_span=(shown.pic.time - 500, shown.pic.time + 90))
    press(ui, "left", render_context(shown.pic, shown.trends, ui, shown.logs), 120, 40)
    assert ui.past_time == shown.pic.time - 10


@pytest.mark.parametrize("back", ["end", "escape", "]"])
def test_end_after_the_past_moves_nothing_else(back):
    shown = played(8, HUNG)
    ui = Ui(past_time=1060.0, history_span=(1000.0, 1090.0))

    def key(name):
        press(ui, name, render_context(shown.pic, shown.trends, ui, shown.logs), 120, 40)

    key(back)
    assert ui.past_time is None
    key("end")
    assert ui.selected == ""
    assert ui.hint
    key("end")
    assert ui.selected == render_context(shown.pic, shown.trends, ui, shown.logs).rows[-1].name


def test_esc_leaves_what_was_opened_in_the_past_before_the_past():
    shown = played(8, HUNG)
    ui = Ui(past_time=1060.0, history_span=(1000.0, 1090.0), path=["all", "host"])
    press(ui, "escape", render_context(shown.pic, shown.trends, ui, shown.logs), 120, 40)
    assert (ui.past_time, ui.path) == (1060.0, ["all"])
    press(ui, "escape", render_context(shown.pic, shown.trends, ui, shown.logs), 120, 40)
    assert ui.past_time is None


@pytest.mark.parametrize("key", keys.ACTIONS)
def test_nothing_is_asked_of_a_run_by_what_it_was(key):
    shown = played(8, HUNG)
    ui = Ui(past_time=1060.0, history_span=(1000.0, 1090.0))
    assert press(ui, key, render_context(shown.pic, shown.trends, ui, shown.logs), 120, 40) == ""
    assert (ui.pending_key, ui.hint) == ("", keys.IN_PAST)


def test_the_oldest_moment_stands_still_while_it_is_looked_at(filled):
    pic = filled[1]
    app = TopApp(Session(source_of([], simulate.host_names(N_HOSTS)), None, 60.0), lambda: None)
    box = app.session.black_box
    for second in range(0, 600, 2):
        box.add_view(dataclasses.replace(pic, time=1000.0 + second))
    app.view, app.ui.past_time = pic, box.span[0]
    first, _ = app.shown_view()
    for second in range(600, 700, 2):
        box.add_view(dataclasses.replace(pic, time=1000.0 + second))
    assert app.shown_view()[0] is first
    assert (first.time, app.ui.history_span[0]) == (1000.0, 1098.0)
    app.ui.past_time = None
    assert app.shown_view()[0] is pic


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60)])
@pytest.mark.parametrize("view", VIEWS)
def test_nobody_takes_the_past_for_the_present(view, width, height):
    shown = played(8, 90.0, simulate.CALM)
    now, then = (
        Ui(path=["all", view]),
        Ui(path=["all", view], past_time=shown.pic.time, history_span=(0.0, shown.pic.time + 200)),
    )
    lines = shown.screen(width, height, then)
    assert [line.cell_len for line in lines] == [width] * height
    assert lines[0].plain.startswith("│ ◀ THE PAST: 3:20 ago, at ")
    assert lines[1].plain.startswith("│ ● was HEALTHY ")
    assert {line.plain[0] for line in lines[:-1]} == {"│"}  # an edge along the whole screen
    assert {str(line.spans[0].style) for line in lines[:-1]} == {"bar.past"}
    styles = {str(span.style) for line in lines for span in line.spans} | {str(line.style) for line in lines}
    assert not {"bar.ok", "keys"} & styles
    assert "─now" not in text_of(lines)  # nor do graphs end there
    assert "THE PAST" not in text_of(shown.screen(width, height, now))
    for n_colors in (0, 16, 256):
        look = make_theme("dark", n_colors).styles["bar.past"]
        assert look.reverse or look.bgcolor
    of = render_context(shown.pic, shown.trends, then, shown.logs)
    assert keys.format_diagnosis(of, ())[:2] == ["THE PAST: 3:20 ago", f"HEALTHY: {shown.pic.why}"]


def test_what_to_do_then_is_not_what_to_do_now():
    shown = played(8, HUNG)
    lines = shown.screen(200, 60, Ui(past_time=shown.pic.time, history_span=(0.0, shown.pic.time + 8)))
    assert lines[0].plain.startswith("│ ◀ THE PAST: 0:08 ago")
    [advice] = [line for line in lines if "→ then: a says why" in line.plain]
    assert "strong" not in {str(span.style) for span in advice.spans}


def test_a_recording_stands_still_skips_and_changes_its_speed(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(event_sources.time, "monotonic", lambda: clock[0])
    events = [SourceEvent(100.0 + n, "a", note="x") for n in range(1000)]
    replay = source_of(events, ["a"])
    clock[0] = 5.0
    assert replay.now() == 105.0
    replay.play(0.0)
    clock[0] = 50.0
    assert replay.now() == 105.0
    assert list(replay.events(105.0))[-1].t == 105.0  # and does not wait
    replay.play(4.0)
    clock[0] = 51.0
    assert replay.now() == 109.0
    replay.skip(10.0)
    assert replay.now() == 119.0
