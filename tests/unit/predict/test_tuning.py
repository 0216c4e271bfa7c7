"""Which settings are tried on real hosts, and in which order: on tables of what all of them took (scripts/tuned.py)."""

import dataclasses
import json
from pathlib import Path

import pytest

from llama405b.contract import reader
from llama405b.predict.calibration import MeasuredStep
from llama405b.predict.estimate import Cluster
from llama405b.predict.hardware import Gpu, read_gpus
from llama405b.predict.run_shape import PredictedRun
from llama405b.predict.search import Fit, Prediction, is_legal
from llama405b.predict.tuning import (
    MAX_CANDIDATES,
    MAX_LAYERS,
    Candidate,
    Trials,
    common_layers,
    find_candidates,
    layers_to_try,
    outliers,
    traits_of,
)
from llama405b.settings.axes import Recompute
from llama405b.spec.models import Llama

TABLES = sorted((Path(__file__).parents[2] / "data/tuned").glob("*.json"))
L405B = Llama(126, 16384, 53248, 128, 8, 128, 128256, False, False, False, 131072)
SMALL = Llama(6, 256, 704, 4, 2, 64, 2048, False, False, False, 1024)


def search(candidates, table, at_most):
    """Try what the search chooses; returns the seconds by label."""
    trials = Trials((), candidates, 6, at_most=at_most)
    while candidate := trials.next():
        trials = trials.with_result(candidate.label, table[candidate.label])
    return trials.seconds


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_ten_trials_of_24_find_what_is_within_3_percent_of_the_fastest(path):
    recorded = json.loads(path.read_text())
    candidates = tuple(reader.build_record(Candidate, each, "a candidate") for each in recorded["candidates"])
    assert len(candidates) == len(recorded["seconds"]) == 24
    found = search(candidates, recorded["seconds"], 10)
    assert len(found) <= 10
    assert next(iter(found)) == "as set"
    fastest = min(filter(None, recorded["seconds"].values()))
    assert min(filter(None, found.values())) <= 1.03 * fastest


def test_several_tables_were_recorded():
    assert len(TABLES) >= 3


def made_up(n=24, **traits):
    values = [(micro, offload, split) for micro in (1, 2, 4) for offload in ("none", "all") for split in "abcd"]
    return tuple(
        Candidate(
            f"{micro} {offload} {split}", (), {"micro_batch": micro, "offload": offload, "split": split}, 10.0, (1, 3)
        )
        for micro, offload, split in values[:n]
    )


def test_what_is_slow_or_fails_in_common_is_left_alone():
    """All with offload take twice as long, all of split b fail: few of either are tried."""
    candidates = made_up()
    table = {
        each.label: 0.0
        if each.traits["split"] == "b"
        else (30 - each.traits["micro_batch"]) * (1 + (each.traits["offload"] == "all"))
        for each in candidates
    }
    found = search(candidates, table, 12)
    assert min(filter(None, found.values())) == 26
    assert sum(" all " in label for label in found) <= 4
    assert sum(not seconds for seconds in found.values()) <= 3


def test_the_search_ends_where_nothing_is_likely_to_be_faster():
    candidates = tuple(
        dataclasses.replace(each, predicted_s=10.0 if number < 2 else 100.0) for number, each in enumerate(made_up())
    )
    found = search(candidates, {each.label: each.predicted_s for each in candidates}, 24)
    assert len(found) < 6


def test_without_predictions_all_are_tried_in_their_order():
    candidates = tuple(dataclasses.replace(each, predicted_s=0.0) for each in made_up(5))
    assert [*search(candidates, {each.label: 1.0 for each in candidates}, 24)] == [each.label for each in candidates]


def test_steps_with_all_layers_follow_from_those_with_few():
    few, more = (MeasuredStep(layers, 1, 8, 0.0, s, s, 0.1, 1) for layers, s in ((1, 1.0), (3, 2.0)))
    assert Trials((), (), 9).step_s([few, more]) == pytest.approx(2 * (2.0 + 3.0) + 0.1)
    assert Trials((), (), 1).step_s([few]) == few.step_s


H100 = Cluster(read_gpus()["h100-80"])


@pytest.mark.parametrize("change", [{}, {"recompute": Recompute("none"), "micro_batch": 2}])
def test_candidates_train_the_same_steps_and_may_fit(change):
    run = dataclasses.replace(PredictedRun(L405B, "fp32-master", "all", 64, 8192, 1, 64), **change)
    asked = Prediction.from_run(run, H100, 2 << 40)
    found = find_candidates(asked, H100)
    assert 12 < len({each.run for each in found}) == len(found) <= MAX_CANDIDATES
    assert (found[0].run == run) == (asked.fit is not Fit.NO)
    assert [each.needs.step_s for each in found[1:]] == sorted(each.needs.step_s for each in found[1:])
    for each in found:
        assert is_legal(each.run)
        assert each.fit is Fit.YES or each.run == run or not each.knows_kept_bytes
        assert (each.run.global_batch, each.run.seq_len, each.run.numerics) == (64, 8192, "fp32-master")
        assert set(traits_of(each.run)) == set(traits_of(run))
    common = common_layers(each.run for each in found)
    assert common <= MAX_LAYERS
    for each in found:
        few, more = layers_to_try(each.run, common)
        assert common in (few, more)
        assert not few % each.run.pp


def test_cpus_are_asked_for_nothing_that_they_cannot_do():
    run = PredictedRun(SMALL, "fp32", "none", 4, 128, 1, 16, ranks_per_host=1)
    asked = Prediction.from_run(dataclasses.replace(run, numerics="fp32-master"), Cluster())
    found = find_candidates(asked, Cluster(Gpu.for_cpu(1e10)))
    assert len(found) > 12
    assert {each.run.offload for each in found} == {"none"}
    assert not any(each.run.compiled or each.run.activations == "host" for each in found)


def test_models_of_few_layers_are_tried_whole():
    run = PredictedRun(dataclasses.replace(SMALL, layers=2), "fp32", "none", 4)
    assert layers_to_try(run, 3) == (1, 2)
    assert layers_to_try(dataclasses.replace(run, llama=SMALL, pp=2), 4) == (2, 4)
    assert layers_to_try(dataclasses.replace(run, llama=SMALL, pp=4), 4) == (4, 6)


@pytest.mark.parametrize(
    ("other", "is_out"),
    [
        ((7.67, 7.60, 3.2, 2.9), False),
        ((7.68, 7.61, 3.22, 2.93), False),  # rounded otherwise
        ((7.67, 7.60, 1.6, 2.9), True),  # half of the gradient
        ((7.67, 7.67, 3.2, 2.9), True),  # no update
        ((8.44, 8.36, 3.2, 2.9), True),
        ((float("nan"), 7.60, 3.2, 2.9), True),
    ],
)
def test_what_computes_something_else_is_named(other, is_out):
    steps = (7.67, 7.60, 3.2, 2.9)
    assert outliers({"as set": steps, "other": other, "same": other}, "as set") == ["other", "same"] * is_out
    assert outliers({"x": steps, "y": steps, "other": other}, "as set") == ["other"] * is_out
    assert outliers({"x": other, "y": steps, "z": steps}, "as set") == ["x"] * is_out
