"""How quantities are kept over minutes, hours and a whole run: bounded, and true."""

import array
import dataclasses
import random

import pytest
import simulate
from shown import HOT, played

from llama405b_tools.top.draw.charts import TimeAxis, draw_chart, scale_around, scale_from_zero
from llama405b_tools.top.draw.hosts import split_map_rows
from llama405b_tools.top.state.picture import POWER
from llama405b_tools.top.state.trends import N_BUCKETS, N_COLUMNS, UNKNOWN, WINDOWS_S, Series, TrendGrid, Trends

DAY = 86_400


def test_days_are_kept_in_bounded_room_and_their_mean_is_right():
    series, values = Series(), []
    draw = random.Random(1)
    for i in range(3 * DAY // 20):
        values.append(draw.uniform(0, 10))
        series.add(1e9 + 20 * i, values[-1])
    assert all(len(ring) <= 2 * N_BUCKETS for ring in series.rings)
    whole = series.columns(len(WINDOWS_S) - 1, 1e9, 1e9 + 3 * DAY, 60)
    assert sum(bucket.total for bucket in whole) / sum(bucket.n for bucket in whole) == pytest.approx(
        sum(values) / len(values)
    )
    last_hour = [bucket for bucket in series.columns(1, 1e9 + 3 * DAY - 3600, 1e9 + 3 * DAY, 60) if bucket]
    assert min(bucket.low for bucket in last_hour) == pytest.approx(min(values[-180:]))
    assert max(bucket.high for bucket in last_hour) == pytest.approx(max(values[-180:]))


def test_a_value_lasts_until_the_next_and_a_gap_stays_a_gap():
    series = Series()
    for t in (*range(0, 120, 12), *range(240, 300, 12)):
        series.add(1e9 + t, 1.0)
    known = [bucket is not None for bucket in series.columns(0, 1e9, 1e9 + 300, 100)]
    assert all(known[:44])
    assert not any(known[50:80])
    assert all(known[81:])


def test_what_is_unknown_or_older_is_not_added():
    series = Series()
    series.add(10.0, 1.0)
    series.add(9.0, 5.0)
    series.add(11.0, None)
    assert [*series.rings[0].values()] == [(1, 1.0, 1.0, 1.0)]


def test_a_grid_keeps_means_of_what_is_known():
    grid = TrendGrid()
    for t, values in ((0, [1, UNKNOWN]), (1, [3, 4]), (2, [UNKNOWN, UNKNOWN]), (400, [9, 9])):
        grid.add(1e9 + t, array.array("f", values))
    assert next(iter(grid.columns[0].values())).tolist() == [2.0, 4.0]
    for t in range(2, 4 * N_COLUMNS):
        grid.add(1e9 + 600 * t, array.array("f", [1, 1]))
    assert len(grid.columns[0]) <= N_COLUMNS
    assert N_COLUMNS <= len(grid.columns[-1]) <= 2 * N_COLUMNS


def test_a_host_that_shows_its_gpus_later_keeps_the_others_in_place():
    shown = played(8, HOT)
    late = dataclasses.replace(
        shown.pic,
        hosts=tuple(
            dataclasses.replace(row, gpus=(), ranks=()) if row.name == "gpu-2" else row for row in shown.pic.hosts
        ),
    )
    trends = Trends()
    trends.take(late, ())
    assert dict(trends.layout)["gpu-2"] == 0
    trends.take(dataclasses.replace(shown.pic, time=late.time + 2), ())
    (column,) = trends.heat(POWER, 0, late.time, late.time + 2, 1)
    assert len(column) == 64
    assert column[8:16].tolist().count(UNKNOWN) == 0  # by now
    assert column[19] == pytest.approx(shown.pic.hosts[2].gpus[3].power_pct)
    means = dict(trends.host_heat(POWER, 0, late.time, late.time + 2, 1))
    assert means["gpu-3"][0] == pytest.approx(sum(gpu.power_pct for gpu in shown.pic.hosts[2].gpus) / 8)


def test_steps_of_before_are_taken_and_another_run_begins_anew():
    shown = played(8, HOT)
    trends = shown.trends
    first = min(trends.steps["loss"].rings[0]) * 2.5
    assert first < simulate.BEGIN - 500  # its head told of steps before cluster-top was opened
    assert "loss" not in Trends().steps
    other = dataclasses.replace(shown.pic, training=dataclasses.replace(shown.pic.training, run="other"))
    again = Trends(run="llama-405b", attempt=3)
    again.steps["loss"].add(1.0, 1.0)
    again.take(other, ())
    assert (again.run, again.attempt, [*again.steps]) == ("other", 0, ["steps"])


def test_marks_of_saves_evaluations_and_restarts():
    kinds = [mark.kind for mark in played(8, simulate.RELOADED + 20).trends.marks]
    assert kinds.count("r") == 1
    assert kinds.count("s") == 2


@pytest.mark.parametrize(
    ("n_lines", "name"), [(64, "gpu-1 0"), (32, "gpu-1 0-1"), (24, "gpu-1 0-2"), (8, "gpu-1"), (3, "gpu-1…gpu-3")]
)
def test_rows_of_the_map(n_lines, name):
    layout = tuple((f"gpu-{i}", 8) for i in range(1, 9))
    rows = split_map_rows(layout, n_lines)
    assert (len(rows), rows[0].name) == (n_lines, name)
    assert [rows[0].begin, *(row.end for row in rows)] == sorted({0, *(row.begin for row in rows), 64})
    assert split_map_rows((), 5) == []


@pytest.mark.parametrize("most", [1e-9, 0.3, 1, 7.01, 9024, 44.8, 3e12])
def test_scales_are_round_and_hold_every_value(most):
    scale = scale_from_zero([0, most], str)
    assert most * 0.998 <= scale.high <= 2 * most
    assert scale.level(most, 5) > 0.45 * 40
    assert scale.level(0, 5) == 0
    low = scale_around([most, 2 * most], str)
    assert low.low < most < 2 * most == low.high


def test_a_graph_of_nothing_and_of_one_value():
    axis = TimeAxis(0.0, 60.0)
    empty = [line.plain for line in draw_chart("x", "y", [None] * 30, scale_from_zero([], "{:.0f}".format), axis, 6)]
    assert [line[7:].strip() for line in empty[1:-1]] == [""] * 4
    series = Series()
    series.add(30.0, 5.0)
    flat = [
        line.plain for line in draw_chart("x", "", series.columns(0, 0.0, 60.0, 30), scale_around([5.0], str), axis, 6)
    ]
    assert any("█" in line for line in flat)
