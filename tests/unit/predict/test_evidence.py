"""What is known of a time: by GPU, size and place of the states; and how the plan tells it."""

import dataclasses
import json

import pytest

from llama405b.predict.calibration import Evidence, find_time_range
from llama405b.predict.estimate import Cluster, training_setup
from llama405b.predict.hardware import read_gpus
from llama405b.predict.run_shape import PredictedRun
from llama405b.predict.search import Prediction
from llama405b.settings.config import PRESET_DIR
from llama405b.spec.models import parse_llama
from llama405b_tools.plan import format_expectation
from llama405b_tools.verbs import predict

SHAPES = json.loads((PRESET_DIR / "architectures.json").read_text())
CASES = [
    ("llama3.1-405b", 128, "none", "h100-80", Evidence.LARGE),
    ("llama3.1-70b", 32, "none", "a100-80", Evidence.LARGE),
    ("llama3.1-70b", 1, "none", "h200-141", Evidence.SMALL),
    ("llama3.1-8b", 64, "none", "h100-80", Evidence.SMALL),
    ("llama3.1-405b", 64, "all", "h100-80", Evidence.OFFLOAD),
    ("llama3.1-8b", 8, "optimizer", "h100-80", Evidence.OFFLOAD),
    ("llama3.1-405b", 64, "all", "b200-180", Evidence.NOTHING),
    ("llama3.1-8b", 8, "none", "l40s-48", Evidence.NOTHING),
]


def load(model, world, offload):
    return PredictedRun(parse_llama(SHAPES[model], model), "fp32-master", offload, world, global_batch=world)


@pytest.mark.parametrize(("model", "world", "offload", "gpu", "known"), CASES)
def test_what_is_known_of_a_setting(model, world, offload, gpu, known):
    outlook = Prediction.from_run(load(model, world, offload), Cluster(read_gpus()[gpu]))
    assert outlook.evidence is known
    assert (outlook.time_range is None) == (known is Evidence.NOTHING)
    assert ("; never measured on this GPU" in format_expectation(outlook)) == (known is Evidence.NOTHING)


def test_splitting_more_than_parameters_is_other_evidence():
    split = dataclasses.replace(load("llama3.1-405b", 64, "none"), tp=8)
    outlook = Prediction.from_run(split, Cluster())
    assert (outlook.evidence, outlook.time_range.programs) == (Evidence.MESH, 3)


def test_offload_is_wide_and_lopsided():
    with_it, without = (
        find_time_range(training_setup(load("llama3.1-405b", 64, place), Cluster())) for place in ("all", "none")
    )
    assert with_it.low == without.low
    assert with_it.high - 1 > 1.5 * (without.high - 1)
    assert (with_it.programs, without.programs) == (1, 6)


def answer(capsys, *words):
    predict.main(words)
    return capsys.readouterr().out


def line(out, begins):
    return next(each for each in out.splitlines() if each.startswith(begins))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--preset", "llama3.1-8b"), "covers 90% of published times of 7 other programs, with models below 10 B parameters or one GPU"),
        (
            ("--preset", "llama3.1-70b", "--nodes", "4", "--parallel.offload", "none"),
            "covers 90% of published times of 6 other programs, with models of 10 B parameters or more",
        ),
        (
            ("--preset", "llama3.1-70b", "--nodes", "4", "--parallel.offload", "none", "--parallel.tp", "8"),
            "covers 90% of published times of 3 other programs, with tp, cp or pp",
        ),
        (
            ("--preset", "llama3.1-405b", "--nodes", "8"),
            "rough: 1 other program with offload published a time; a range needs 3",
        ),
        (
            ("--preset", "llama3.1-8b", "--gpu", "b200"),
            "never measured on this GPU (b200-180); `plan HOSTS --calibrate` measures it on its hosts",
        ),
    ],
)  # fmt: skip
def test_a_plan_says_what_its_range_is_of(capsys, words, said):
    assert line(answer(capsys, *words), "range ") == f"range        {said}"


def test_times_on_a_gpu_that_was_never_measured_have_no_range(capsys):
    words = ["--preset", "llama3.1-8b", "--tokens", "1e9", "--price", "2"]
    out = answer(capsys, *words, "--gpu", "b200-180")
    assert " (" not in line(out, "step ").partition(" s:")[0]
    assert " (" not in line(out, "1,000,000,000 tokens").partition(" at ")[0]
    compared = answer(capsys, *words, "--what-if", "gpu=b200-180")
    assert "\n  gpu=b200-180: never measured on this GPU\n" in compared
    record = json.loads(answer(capsys, *words, "--gpu", "b200-180", "--json"))
    assert (record["evidence"], record["time_range"]) == ("nothing", None)


def test_json_has_the_range_and_the_parts_of_the_compute(capsys):
    record = json.loads(answer(capsys, "--preset", "llama3.1-8b", "--json"))
    assert (record["evidence"], record["time_range"]["programs"]) == ("small", 7)
    assert record["time_range"]["low"] < 1 < record["time_range"]["high"]
    assert sum(record["time"]["compute_parts_s"].values()) == pytest.approx(record["time"]["compute_s"])
