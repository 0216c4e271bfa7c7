"""The benchmark runs, and the memory it reports is within the bound that loading promises."""

import json

import pytest


@pytest.mark.slow
def test_streaming_needs_less_than_two_units_above_the_shards(tmp_path, cli):
    done = cli(tmp_path, "bench", "load", "--json", timeout=280)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["checkpoint_bytes"] >= 1e9
    streamed, baseline = report["forms"]["streamed"], report["forms"]["baseline"]
    assert streamed["peak_above_shards_bytes"] <= 2 * report["largest_unit_bytes"]
    assert streamed["peak_above_shards_bytes"] < baseline["peak_above_shards_bytes"] / 4
    assert streamed["shard_bytes"] == baseline["shard_bytes"]


def test_the_gpu_benchmark_says_that_it_needs_one(tmp_path, cli):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = cli(tmp_path, "bench", "layers")
    assert done.returncode == 2
    assert "torch sees no GPU" in done.stderr


def test_an_update_delays_no_unit_before_it(tmp_path, cli):
    done = cli(tmp_path, "bench", "overlap", "--unit-ms", "2", "--steps", "1", "--trace", "t.json", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [(case["backward"], case["update"]) for case in report["cases"][-1:]] == [(3.0, 2.0)]
    assert all(case["step_ratio"] > 0 for case in report["cases"])
    spans = {kind: [[] for _ in range(report["units"])] for kind in ("forward", "backward", "update")}
    for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]:
        spans[event["cat"]][event["args"]["unit"]].append((event["ts"], event["ts"] + event["dur"]))
    updated = [updates[0][1] for updates in spans["update"]]  # when each unit's first update had ended
    began = [forwards[1][0] for forwards in spans["forward"]]  # when its forward in the next step began
    assert all(update <= forward for update, forward in zip(updated, began, strict=True))
    before_the_next = sum(forward < later for forward, later in zip(began, updated[1:], strict=False))
    assert before_the_next > len(began) / 2  # a busy machine may be late; who waits for later updates always is


@pytest.mark.parametrize(
    ("what", "ratio"), [(["step"], "ours / by hand"), (["optimizer", "--elements", "65536"], "update / triad")]
)
def test_a_step_and_the_optimizer_are_measured_beside_their_baselines(tmp_path, cli, what, ratio):
    done = cli(tmp_path, "bench", *what, "--pairs", "1", timeout=120)
    assert done.returncode == 0, done.stderr
    assert ratio in done.stdout


@pytest.mark.parametrize(
    "args",
    [["overlap", "--unit-ms", "0"], ["optimizer", "--pairs", "0"], ["step", "--pairs", "-1"]],
)
def test_a_number_out_of_range_is_refused(tmp_path, cli, args):
    done = cli(tmp_path, "bench", *args)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert args[1] in done.stderr


def test_the_interval_of_a_median_is_of_order_statistics():
    from llama405b.commands.pairs import ratio_of

    found = ratio_of([float(i) for i in range(1, 21)], [1.0] * 20)
    assert (found.median, found.low, found.high) == (10.5, 6, 15)
