"""What a search offers: meshes that suit and fit, the setting without one first, and settings that a run can be started with."""

import dataclasses
import json
import re
import tomllib

import pytest

from llama405b.contract.errors import EXIT_OK, EXIT_UNFIT
from llama405b.predict import search
from llama405b.predict.estimate import Cluster
from llama405b.predict.hardware import read_gpus
from llama405b.predict.run_shape import PredictedRun
from llama405b.predict.search import (
    Fit,
    Prediction,
    fastest_meshes,
    format_split,
    is_runnable,
    keep_most_activations,
    rank_variants,
    untested_features,
    variants,
)
from llama405b.settings.axes import FULL_RECOMPUTE, Axes, Recompute
from llama405b.settings.config import PRESET_DIR
from llama405b.settings.schema import Config
from llama405b.spec.models import parse_llama
from llama405b.spec.rules import check_mesh
from llama405b_tools.verbs import predict

SHAPES = json.loads((PRESET_DIR / "architectures.json").read_text())
LARGE, SMALL = (parse_llama(SHAPES[name], name) for name in ("llama3.1-405b", "llama3.1-8b"))
LONG = [
    "--preset",
    "llama3.1-405b",
    "--nodes",
    "16",
    "--ram",
    "2000GiB",
    "--data.seq_len",
    "32768",
    "--training.global_batch_size",
    "32",
]


def outlook(llama, world, seq_len, batch, offload="none", gpu="h100-80"):
    return Prediction.from_run(
        PredictedRun(llama, "fp32-master", offload, world, seq_len, 1, batch), Cluster(read_gpus()[gpu]), 2e12
    )


def test_a_run_that_may_have_tp_across_hosts_is_still_one():
    run = dataclasses.replace(outlook(SMALL, 16, 4096, 64).run, ranks_per_host=4, tp=8)
    assert is_runnable(run, Cluster())
    assert not is_runnable(dataclasses.replace(run, tp=16), Cluster())  # there are eight key heads


@pytest.mark.slow
def test_what_fits_is_shown_first_and_then_what_lacks_least(capsys):
    words = ("--preset", "llama3.1-405b", "--gpu", "a100-40", "--nodes", "12", "--slots", "4", "--search")
    assert predict.main([*words, "--data.seq_len", "8192", "--training.global_batch_size", "96"]) == EXIT_OK
    rows = [line for line in capsys.readouterr().out.splitlines() if re.match(r"  (all|optimizer|none) ", line)]
    verdicts = [re.search(r"fits|RUNS SLOWER|DOES NOT FIT", row)[0] for row in rows]
    order = ["fits", "RUNS SLOWER", "DOES NOT FIT"]
    assert verdicts == sorted(verdicts, key=order.index)
    assert (verdicts[0], verdicts.count("DOES NOT FIT")) == ("fits", 8)
    lacking = [int(row.split()[4]) for row in rows if "DOES NOT FIT" in row]
    assert lacking == sorted(lacking)
    assert predict.main([*words[:5], "1", "--search"]) == EXIT_UNFIT
    assert "within" not in capsys.readouterr().out.rpartition("tokens/s\n")[2]


@pytest.mark.parametrize(
    "asked", [outlook(LARGE, 64, 4096, 64, "all"), outlook(LARGE, 128, 32768, 32), outlook(SMALL, 8, 4096, 64)]
)
def test_meshes_suit_the_run_and_fit(asked):
    found = fastest_meshes(asked)
    assert 0 < len(found) == len({format_split(each.run) for each in found})
    for each in found:
        assert each.fit is Fit.YES
        assert untested_features(each.run)
        assert each.step_tokens == asked.step_tokens
        parallel = each.run.apply_to(Config()).parallel
        axes = Axes.from_parallel(parallel, each.run.world, 8)
        assert axes == each.run.axes
        check_mesh(axes, parallel, each.run.llama, each.run.seq_len, 8)
    assert [each.needs.step_s for each in found] == sorted(each.needs.step_s for each in found)


@pytest.mark.slow
def test_what_needs_no_mesh_comes_first_where_it_fits():
    first = rank_variants(outlook(SMALL, 8, 4096, 64))[0]
    assert (first.fit, untested_features(first.run)) == (Fit.YES, "")
    first = rank_variants(outlook(LARGE, 128, 32768, 32))[0]
    assert (first.fit, first.run.cp > 1) == (Fit.YES, True)  # sequences are too long for one GPU


def test_where_logits_do_not_fit_their_loss_is_computed_in_parts():
    first = rank_variants(outlook(SMALL, 4, 65536, 4))[0]
    assert (first.fit, first.run.loss, untested_features(first.run)) == (Fit.YES, "chunked", "--model.loss chunked")
    assert first.with_run(dataclasses.replace(first.run, loss="full")).fit is not Fit.YES


def test_a_search_offers_no_units_that_the_trainer_does_not_gather_ahead():
    asked = outlook(SMALL, 8, 4096, 64)
    ahead = asked.with_run(dataclasses.replace(asked.run, prefetch=1))
    assert {each.run.has_sublayer_units for each in variants(asked)} == {True, False}
    assert {each.run.has_sublayer_units for each in variants(ahead)} == {False}


@pytest.mark.slow
def test_a_slow_network_makes_tensor_parallelism_the_fastest():
    slow = Cluster(read_gpus()["h100-80"], nic_bytes_per_s=25e9)
    asked = Prediction.from_run(PredictedRun(LARGE, "pure-bf16", "none", 64, 4096, 1, 64), slow)
    found = fastest_meshes(asked)
    assert found[0].run.tp * found[0].run.pp > 1
    assert found[0].tokens_per_s > 1.3 * max(
        each.tokens_per_s for each in rank_variants(asked) if not untested_features(each.run)
    )


def test_a_search_of_405b_takes_no_longer_than_one_waits(monkeypatch):
    timed, real = [], search.seconds_per_step
    monkeypatch.setattr(search, "seconds_per_step", lambda *args: (timed.append(1), real(*args))[1])
    rank_variants(outlook(LARGE, 64, 4096, 64, "all"), ("fp32", "bf16"))
    assert 300 < len(timed) < 3000  # 600 take 2 s on an idle core


@pytest.mark.slow
def test_settings_that_are_written_are_those_that_were_predicted(tmp_path, capsys):
    words = [*LONG, "--search", "--write", str(tmp_path / "best.toml"), "--json"]
    assert predict.main(words) == 0
    first = json.loads(capsys.readouterr().out)["search"][0]
    written = tomllib.loads((tmp_path / "best.toml").read_text())
    assert written["parallel"]["cp"] == first["mesh"]["cp"] > 1
    predict.main([*LONG[:6], "--config", str(tmp_path / "best.toml"), "--json"])
    assert json.loads(capsys.readouterr().out)["time"] == first["time"]


def test_a_loss_of_parts_is_written_too(tmp_path, capsys):
    words = [
        "--preset",
        "llama3.1-8b",
        "--nodes",
        "1",
        "--slots",
        "4",
        "--data.seq_len",
        "65536",
        "--training.global_batch_size",
        "4",
    ]
    predict.main([*words, "--search", "--write", str(tmp_path / "best.toml"), "--json"])
    first = json.loads(capsys.readouterr().out)["search"][0]
    assert tomllib.loads((tmp_path / "best.toml").read_text())["model"]["loss"] == "chunked"
    predict.main([*words[:6], "--config", str(tmp_path / "best.toml"), "--json"])
    assert json.loads(capsys.readouterr().out)["time"] == first["time"]


@pytest.mark.slow
def test_a_plan_says_whether_what_no_gpu_has_run_is_faster(capsys):
    predict.main([*LONG, "--search"])
    assert re.search(r"\n  the first needs .*cp \d.*, tested on one GPU at most", capsys.readouterr().out)
    predict.main(["--preset", "llama3.1-405b", "--nodes", "8", "--search"])
    out = capsys.readouterr().out
    assert "  nothing tested on one GPU at most is predicted to be faster\n" in out
    assert re.search(r"fits, with --model.activation_checkpointing operators:\d+\n", out)
    predict.main(["--preset", "llama3.1-405b", "--nodes", "8", "--search", "--nic", "200Gb/s"])
    assert re.search(
        r"fastest is .*tp \d.*; tested on one GPU at most so far \(docs/proof.md\), so it ranks lower\n",
        capsys.readouterr().out,
    )


@pytest.mark.parametrize(
    "asked",
    [
        outlook(LARGE, 64, 4096, 64, "all"),
        outlook(SMALL, 8, 4096, 64),
        outlook(LARGE, 128, 32768, 32),
        (base := outlook(LARGE, 64, 4096, 64, "all")).with_run(dataclasses.replace(base.run, activations="host")),
    ],
)
def test_as_many_layers_keep_their_activations_as_fit_with_room_to_spare(asked):
    most = keep_most_activations(asked)
    if most.run.recompute.last:
        more = dataclasses.replace(most.run.recompute, last=most.run.recompute.last + 1)
        reserved = [
            most.with_run(dataclasses.replace(most.run, recompute=how)).needs.gpu_reserved_bytes
            for how in (most.run.recompute, more)
        ]
        assert reserved[0] <= 0.98 * most.cluster.gpu.memory_bytes < reserved[1]
        assert most.cluster.gpu.memory_bytes < 80 << 30  # what torch sees
        assert most.needs.step_s < asked.needs.step_s
    elif most.run.recompute == FULL_RECOMPUTE:
        assert (
            asked.with_run(dataclasses.replace(asked.run, recompute=Recompute("operators", last=1))).gpu_fit
            is not Fit.YES
        )
    else:
        assert (most.run.recompute.kind, most.gpu_fit) == ("none", Fit.YES)
