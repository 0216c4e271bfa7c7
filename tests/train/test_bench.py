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
