"""The report of a run: its curves, its page and its lines, from what the run's head says."""

import dataclasses
import html
import html.parser
import json
import re
import statistics
import time

import pytest

from llama405b.contract import reader
from llama405b.contract.accounting import Attempt, CountedStep, account_time
from llama405b.contract.files import append_line, write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.records import (
    Cause,
    CauseKind,
    DocumentPreview,
    EvaluationMetrics,
    EventKind,
    FailureRecord,
    Metrics,
    NodeState,
    NodeStatus,
    PromptSample,
    RunEvent,
    SequencePreview,
    TextPart,
)
from llama405b.spec.plan import Expected
from llama405b_tools.agent.reports import MAX_POINTS, ReportReply, iterate_evaluations, iterate_points, list_attempts
from llama405b_tools.report.page import format_report, render_page
from llama405b_tools.report.summary import Summary, list_events
from llama405b_tools.text.figures import plot, round_ticks, round_time_ticks

KILLED = Cause(CauseKind.RANK_EXIT, "gpu-2", 9, exit_code=-9, detail="<b>gone</b>")
ALIVE = (Attempt(1),)
H100 = "NVIDIA H100 80GB HBM3"


def steps_of(n, attempt=1, first=1, begin=100.0, step_s=10.0):
    return [
        Metrics(
            first + i, begin + step_s * (i + 1), 8.0 - 0.1 * i, 1.0, 1e-4, 4096 * (first + i), 409.6, step_s, 1.0, 2.0, 5.0, 1.5,
            step_tokens=4096, flops_per_token=2 * 10**12, attempt=attempt, peak_bytes=70 << 30, peak_allocated_bytes=60 << 30,
        )
        for i in range(n)
    ]  # fmt: skip


def reply_of(steps, attempts=ALIVE, now=1000.0, **more):
    taken = [CountedStep(step.attempt, step.time, step.step_s) for step in steps]
    found = {
        "now": now, "created": 0.0, "owner": "ann@desk", "attempt": len(attempts), "hosts": (("gpu-1", 8), ("gpu-2", 8)), "mesh": None,
        "expected": Expected(step_s=8.0), "alive": attempts[-1].ended is None, "attempts": tuple(attempts),
        "account": account_time(50.0, attempts, taken, 16, now), "points": tuple(iterate_points(steps)), "last": steps[-1],
        "evaluations": (), "events": (),
        "samples": (), "sequences": (), "settings": "[training]\nmax_steps = 20\n",
        "gpu": H100, "checkpoint": "", "versions": {}, "learns": None,
    }  # fmt: skip
    return ReportReply(**(found | more))


def failed_and_resumed():
    steps = [*steps_of(5), *steps_of(5, attempt=2, first=6, begin=400.0)]
    saved = RunEvent(151.0, "rank-0", EventKind.SAVED, 1, 5, "c/step-00000005", took_s=9.0, blocked_s=1.0)
    events = (saved, RunEvent(399.0, "rank-0", EventKind.RESUMED, 2, 5, "c/step-00000005"))
    return reply_of(steps, [Attempt(1, 200.0, KILLED), Attempt(2, 460.0)], events=events)


class Well(html.parser.HTMLParser):
    """Whether every element that is opened is closed, in order."""

    EMPTY = ("meta",)

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_a_page_is_whole_and_loads_nothing():
    found = Well(render_page(Summary("r", failed_and_resumed(), 2.5)))
    assert not [attrs for _, attrs in found.tags if {"src", "href"} & set(attrs)]
    said = " ".join(found.words)
    for words in (
        "gpu-2: rank 9 exited with -9: <b>gone</b>",
        "ended after step 10 of 20",
        "saved step-00000005",
        "gpu-[1-2]",
    ):
        assert words in said, words
    tiles = [attrs for _, attrs in found.tags if attrs.get("class") == "tile"]
    assert len([tag for tag, _ in found.tags if tag == "b"]) == len(tiles)  # what the cause says is text


def test_hours_by_cause_sum_to_the_time_of_all_ranks():
    reply = failed_and_resumed()
    found = Well(render_page(Summary("r", reply, 2.5)))
    cells = [words for words in found.words if re.fullmatch(r"[\d,]+\.\d\d", words)]
    hours = (sum(reply.account.seconds.values())) * 16 / 3600
    assert f"{hours:,.2f}" in cells
    assert f"{2.5 * hours:,.2f}" in cells
    assert sum(reply.account.seconds.values()) == pytest.approx(410.0)  # from the launch to the end


def test_values_at_the_pointer_are_those_of_the_steps():
    text = render_page(Summary("r", reply_of(steps_of(5)), 0.0))
    rows = json.loads(re.search(r'id="rows">(.*?)</script>', text)[1])
    assert [(row[0], row[1]) for row in rows] == [(60 + 10 * i, 1 + i) for i in range(5)]
    assert rows[0][2].startswith("step 1  60s  loss 8.0000  grad 1.000")


def lines_in(text, title):
    """The places of each line of a chart, by its classes; x in seconds or steps."""
    chart = re.search(rf"<figcaption>{title}.*?</figure>", text)[0]
    begin, end = (float(re.search(rf'data-{name}="([^"]+)"', chart)[1]) for name in ("begin", "end"))
    found = {}
    for style, line in re.findall(r'<path class="line ([^"]+)" d="M([^"]+)"', chart):
        places = [tuple(map(float, place.split())) for place in line.split("L")]
        piece = [(begin + (x - 64) / 886 * (end - begin), y) for x, y in places]
        found.setdefault(style, []).append(piece)
    return found


def test_a_step_that_hung_has_a_row_a_band_and_a_level_as_long_as_it_took():
    steps = [*steps_of(5), *steps_of(1, first=6, begin=150.0, step_s=300.0), *steps_of(4, first=7, begin=450.0)]
    steps[5] = dataclasses.replace(steps[5], tokens_per_s=13.7)
    text = render_page(Summary("r", reply_of(steps), 0.0))
    assert "step 6 took 5m, usually 10s" in text.partition("What happened")[2]
    pieces = lines_in(text, "tokens per second")["a"]
    assert [len(piece) for piece in pieces] == [5, 2, 4]
    (began, low), (ended, level) = pieces[1]
    assert (began, ended) == (pytest.approx(100.0, abs=2), pytest.approx(400.0, abs=2))
    assert low == level > pieces[0][-1][1] == pieces[2][0][1]  # y grows downwards
    assert len(re.findall('class="band warn"', text)) == len(re.findall('data-axis="time"', text))
    assert "took" not in render_page(Summary("r", reply_of(steps_of(9)), 0.0))


def test_the_smoothed_loss_is_smooth_after_a_resume_and_called_so_only_if_it_is():
    steps = [*steps_of(80), *steps_of(10, attempt=2, first=81, begin=2000.0)]
    steps = [dataclasses.replace(step, loss=2.0 + step.step % 2) for step in steps]
    text = render_page(Summary("r", reply_of(steps, [Attempt(1, 900.0, KILLED), Attempt(2)], now=2200.0), 0.0))
    lines = lines_in(text, "nats per target token")
    spread = {style: max(y for _, y in pieces[1]) - min(y for _, y in pieces[1]) for style, pieces in lines.items()}
    assert spread["a"] < spread["a thin"] / 2
    few = render_page(Summary("r", failed_and_resumed(), 0.0))
    assert ("smoothed" in text, "smoothed" in few, set(lines_in(few, "nats per target token"))) == (True, False, {"a"})


def test_every_chart_can_be_chosen_and_read_by_keyboard():
    text = render_page(Summary("r", failed_and_resumed(), 0.0))
    charts = [attrs for tag, attrs in Well(text).tags if tag == "svg"]
    assert charts
    assert {attrs["tabindex"] for attrs in charts} == {"0"}
    assert all(key in text.partition('"keydown"')[2] for key in ("ArrowLeft", "ArrowRight", "Home", "End"))


def test_what_was_planned_is_beside_what_is():
    summary = Summary("r", reply_of(steps_of(12)), 0.0)
    assert summary.planned_tokens_per_s == 512
    assert summary.mfu(409.6) == pytest.approx(100 * 409.6 * 2e12 / (989e12 * 16))
    assert "planned 512" in render_page(summary)
    unplanned = Summary("r", reply_of(steps_of(12), expected=Expected(), gpu=""), 0.0)
    assert (unplanned.planned_tokens_per_s, unplanned.mfu(409.6), unplanned.hour_unit) == (None, None, "rank-h")
    assert "model FLOPs" not in render_page(unplanned)


def test_a_long_run_keeps_its_range_and_its_pauses():
    steps = [*steps_of(4000), *steps_of(3000, attempt=2, first=4001, begin=90_000.0)]
    steps[1700] = dataclasses.replace(steps[1700], loss=900.0)
    points = list(iterate_points(steps))
    assert len(points) <= MAX_POINTS + 1
    assert sum(point.steps for point in points) == len(steps)
    assert max(point.loss_high for point in points) == 900.0
    assert {point.attempt for point in points if point.step <= 4000} == {1}
    assert sum(point.loss * point.steps for point in points) == pytest.approx(sum(step.loss for step in steps))


def test_an_evaluation_alone_is_a_report():
    lines = [EvaluationMetrics(0, 120.0, 2.5, 1), EvaluationMetrics(5, 130.0, None, 1)]
    reply = reply_of(steps_of(1), points=(), last=None, account=None, evaluations=tuple(iterate_evaluations(lines)))
    assert reply.evaluations == ((0, 120.0, 2.5),)
    summary = Summary("r", reply, 0.0)
    Well(render_page(summary))
    assert any("evaluation 2.5000 -> 2.5000" in line for line in format_report(summary, 80, 6, plain=False))


def test_the_terminal_has_the_curve_first_then_the_time_and_the_failure():
    lines = list(format_report(Summary("r", failed_and_resumed(), 2.0), 80, 8, plain=False))
    assert lines[0].startswith("run r: ended after step 10 of 20")
    assert max(map(len, lines[2:11])) <= 80
    said = "\n".join(lines[11:])
    for words in (
        "loss 8.0000 -> 7.8000 (mean of the last 10 steps)",
        "goodput 24.4% of 6m",
        "cost 3.64 at 2 a GPU-h",
        "attempt 1: gpu-2",
    ):
        assert words in said, words
    assert "16 GPUs, they have been idle for 2.4 GPU-h, 4.80" in said


def test_the_end_of_a_long_run_is_so_many_steps_not_points():
    found = Summary("r", reply_of(steps_of(6000)), 0.0)
    assert found.n_last_steps == 12  # of points of four
    assert found.mean_of_last("loss") == pytest.approx(statistics.mean(step.loss for step in steps_of(6000)[-12:]))
    assert [Summary("r", reply_of(steps_of(n)), 0.0).n_last_steps for n in (1, 12)] == [1, 10]


def test_what_a_module_adds_now_and_then_is_the_mean_of_what_it_added():
    steps = [dataclasses.replace(step, own={"lag": 3.0} if step.step % 2 else {}) for step in steps_of(4)]
    assert [point.own for point in iterate_points(steps, 1)] == [{"lag": 3.0}]


def test_what_happened_is_told_in_order():
    assert [each.time for each in list_events(Summary("r", failed_and_resumed(), 0.0))] == [151.0, 200.0, 399.0]


@pytest.mark.parametrize(("blamed_at", "failed"), [(150.0, 150.0), (0.0, 170.0)])
def test_a_failure_has_the_time_that_was_decided_on(tmp_path, blamed_at, failed):
    run, cause = RunDir(tmp_path), dataclasses.replace(KILLED, gpu="1")
    append_line(run.ends("a"), reader.dumps(NodeStatus("a", NodeState.EXITED, 1, 1, 1, cause=KILLED, time=170.0)))
    append_line(run.blames("a"), reader.dumps(FailureRecord(1, "gpu-2", cause, blamed_at)))
    attempts = list_attempts(run, "a", 1, steps_of(3), alive=False)
    assert (attempts[0].ended, attempts[0].cause) == (failed, cause)
    summary = Summary("r", reply_of(steps_of(3), attempts), 0.0, "llama405b logs hosts --run r")
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failed))
    text = render_page(summary)
    assert text.count(f"<td>{at}</td>") == 2  # of the failures, and what happened
    lines = list(format_report(summary, 80, 8, plain=True))
    assert [line.split("  attempt")[0] for line in lines if "attempt 1" in line] == [f"  {at}"]
    said = "failed after step 3 of 20: rank 9 (GPU 1) exited with -9: <b>gone</b>; `llama405b logs hosts --run r --rank 9` shows its log"
    assert lines[0] == f"run r: {said}"
    assert html.escape(said, quote=False) in text


def test_an_end_for_which_the_disk_had_no_room_is_known_by_the_status(tmp_path):
    run = RunDir(tmp_path)
    append_line(run.ends("a"), reader.dumps(NodeStatus("a", NodeState.EXITED, 1, 1, 1, cause=KILLED, time=170.0)))
    write_json(run.status("a"), NodeStatus("a", NodeState.EXITED, 2, 1, 1, exit_code=0, time=190.0))
    attempts = list_attempts(run, "a", 2, steps_of(3), alive=False)
    assert [(attempt.ended, attempt.cause) for attempt in attempts] == [(170.0, KILLED), (190.0, None)]


def test_a_host_that_died_before_a_step_ended_when_it_was_heard_last(tmp_path):
    run = RunDir(tmp_path)
    (tmp_path / "status").mkdir()
    run.lock("a").touch()
    ends = [attempt.ended for attempt in list_attempts(run, "a", 2, steps_of(3), alive=False)]
    assert ends == [130.0, 130.0]
    assert [attempt.ended for attempt in list_attempts(run, "a", 1, [], alive=False)] == [run.lock("a").stat().st_mtime]


def test_a_run_that_goes_on_says_nothing_of_idle_gpus():
    assert not any(
        "idle" in line
        for line in format_report(Summary("r", reply_of(steps_of(3), now=140.0), 2.0), 80, 8, plain=False)
    )


def test_a_tracker_that_kept_the_first_values_is_named():
    settings = '[tracking]\nto = ["wandb"]\n'
    reply = dataclasses.replace(failed_and_resumed(), settings=settings)
    assert "wandb has the first values" in render_page(Summary("r", reply, 0.0))
    assert "first values" not in render_page(Summary("r", reply_of(steps_of(3), settings=settings), 0.0))


def test_prompts_stand_with_what_the_weights_made_of_them():
    samples = tuple(PromptSample(step, 100.0, "Once <b>", f"upon {step}") for step in (0, 4, 8))
    said = " ".join(Well(render_page(Summary("r", reply_of(steps_of(8), samples=samples), 0.0))).words)
    assert said.index("upon 8") < said.index("all 3") < said.index("upon 0")
    assert "Once <b>" in said


def test_the_first_sequences_show_what_is_trained_on():
    parts = (TextPart("Say <b>\n", is_trained=False), TextPart("yes & no", is_trained=True))
    documents = (DocumentPreview(parts, is_continued=True),)
    sequence = SequencePreview(
        index=4, n_tokens=64, n_targets=9, n_documents=2, names=("a.jsonl 7-8",), documents=documents
    )
    page = render_page(Summary("r", reply_of(steps_of(8), sequences=(sequence,)), 0.0))
    assert '<pre class="text">… Say &lt;b&gt;\n<mark>yes &amp; no</mark></pre>' in page
    assert "sequence 5: 2 documents, 64 tokens, 9 targets (a.jsonl 7-8)" in " ".join(Well(page).words)
    assert "First sequences" not in render_page(Summary("r", reply_of(steps_of(8)), 0.0))


def test_the_newest_checkpoint_and_the_sum_of_all_times_are_there():
    page = render_page(Summary("r", reply_of(steps_of(8), checkpoint="c/step-00000008"), 0.0))
    assert "newest checkpoint: c/step-00000008" in page
    assert "newest checkpoint" not in render_page(Summary("r", reply_of(steps_of(8)), 0.0))
    words = list(Well(page).words)
    assert words.index("since the first launch, excluding the time it was stopped") > words.index("all")


def test_a_plot_has_its_ends_where_they_are():
    lines = plot([(0.0, 0.0), (10.0, 1.0)], [(10.0, 1.0)], 28, 4, "{:.1f}".format)
    assert [line[:8] for line in lines[:4]] == ["   1.0 ┤", "       │", "   0.5 ┤", "   0.0 ┤"]
    assert lines[0].endswith("o")
    assert lines[3][8] != " "
    assert set("".join(plot([(0, 0), (1, 1)], [], 28, 4, str, plain=True)[:4])) <= set(" *┤│.0123456789")


@pytest.mark.parametrize(("low", "high", "n"), [(0, 1, 4), (3.3, 7.7, 4), (0, 1e9, 5), (-2, 2, 4), (1e-6, 3e-6, 3)])
def test_ticks_are_round_inside_and_about_as_many(low, high, n):
    found = round_ticks(low, high, n)
    assert n / 3 <= len(found) <= 2 * n + 1
    assert all(low - 1e-9 <= tick <= high + 1e-9 * abs(high) for tick in found)


def test_ticks_of_time_are_those_of_a_clock():
    assert round_time_ticks(7200, 8) == [0, 900, 1800, 2700, 3600, 4500, 5400, 6300, 7200]
    assert round_time_ticks(0.0, 8) == [0]
    assert len(round_time_ticks(40 * 86400, 8)) <= 9


EXPECTED = Expected(
    step_s=8.0, shortest=0.8, longest=1.3, allocated_bytes=50 << 30, peak_bytes=56 << 30, start_s=30.0, save_s=6.0, save_wait_s=0.5
)  # fmt: skip


def scored(**more):
    started = RunEvent(100.0, "rank-0", EventKind.STARTED, 1, 0)
    saved = [
        RunEvent(150.0 + i, "rank-0", EventKind.SAVED, 1, i, took_s=t, blocked_s=t / 10)
        for i, t in enumerate((3.0, 9.0, 12.0))
    ]
    steps = [dataclasses.replace(step, step_s=20.0 if step.step == 1 else 10.0) for step in steps_of(6)]
    return Summary("r", reply_of(steps, events=(started, *saved), **({"expected": EXPECTED.sealed("r")} | more)), 0.0)


def test_what_was_predicted_is_scored():
    found = {score.name: (score.predicted, score.measured) for score in scored().scores}
    assert found == {
        "a step": (8.0, 10.0), "the first step": (8.0, 20.0), "until training began": (30.0, 50.0), "a save": (6.0, 9.0),
        "of a save, training waited": (0.5, 0.9), "allocated": (50 << 30, 60 << 30), "peak memory": (56 << 30, 70 << 30),
    }  # fmt: skip
    assert scored(expected=Expected()).scores == ()
    only_step = scored(expected=Expected(step_s=8.0))
    assert [score.name for score in only_step.scores] == ["a step", "the first step"]


def test_a_score_says_whether_it_is_likely_and_whether_the_prediction_is_that_of_the_launch():
    lines = list(format_report(scored(), 80, 5, plain=True))
    [first] = [line for line in lines if line.startswith("prediction")]
    assert first == "prediction a step 10s, predicted 8.0s (1.25); as likely, 0.80 to 1.30"
    slow = dataclasses.replace(EXPECTED, longest=1.2).sealed("r")
    assert "; not as likely, 0.80 to 1.20" in "\n".join(format_report(scored(expected=slow), 80, 5, plain=True))
    for changed in (dataclasses.replace(EXPECTED.sealed("r"), step_s=10.0), EXPECTED.sealed("another"), EXPECTED):
        assert "CHANGED AFTER THE LAUNCH" in "\n".join(format_report(scored(expected=changed), 80, 5, plain=True))
    page = render_page(scored())
    assert Well(page).open == []
    assert "Predicted and measured" in page
    assert "60.00 GiB, predicted 50.00 GiB (1.20)" in page
