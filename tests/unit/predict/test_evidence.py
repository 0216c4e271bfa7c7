"""What is known of a time: by GPU, size and place of the states; and how the plan tells it."""

import dataclasses
import json
import re

import pytest

from llama405b.predict.calibration import MIN_PROGRAMS, RANGES_FILE, Evidence, find_time_range
from llama405b.predict.estimate import Cluster, training_setup
from llama405b.predict.hardware import read_gpus
from llama405b.predict.run_shape import PredictedRun
from llama405b.predict.search import Prediction
from llama405b.settings.config import PRESET_DIR
from llama405b.settings.schema import Adapter
from llama405b.spec.models import parse_llama
from llama405b_tools.plan import format_expectation
from llama405b_tools.verbs import predict

SHAPES = json.loads((PRESET_DIR / "architectures.json").read_text())
CASES = [
    ("llama3.1-405b", 128, "none", "h100-80", Evidence.LARGE),
    ("llama3.1-70b", 32, "none", "a100-80", Evidence.LARGE),
    ("llama3.1-70b", 1, "none", "h200-141", Evidence.MEDIUM),
    ("llama3.1-8b", 64, "none", "h100-80", Evidence.MEDIUM),
    ("llama3.2-1b", 64, "none", "h100-80", Evidence.SMALL),
    ("llama3.1-405b", 64, "all", "h100-80", Evidence.OFFLOAD),
    ("llama3.1-8b", 8, "optimizer", "h100-80", Evidence.OFFLOAD),
    ("llama3.1-405b", 64, "all", "b200-180", Evidence.OTHER_GPU),
    ("llama3.1-8b", 8, "none", "l40s-48", Evidence.OTHER_GPU),
]


def load(model, world, offload):
    return PredictedRun(parse_llama(SHAPES[model], model), "fp32-master", offload, world, global_batch=world)


@pytest.mark.parametrize(("model", "world", "offload", "gpu", "known"), CASES)
def test_what_is_known_of_a_setting(model, world, offload, gpu, known):
    outlook = Prediction.from_run(load(model, world, offload), Cluster(read_gpus()[gpu]))
    assert outlook.evidence is known
    assert ("; little is known" in format_expectation(outlook)) == (known is Evidence.OTHER_GPU)


def range_of(run):
    return find_time_range(training_setup(run, Cluster()))


def test_splitting_more_than_parameters_is_other_evidence():
    split = dataclasses.replace(load("llama3.1-405b", 64, "none"), tp=8)
    outlook = Prediction.from_run(split, Cluster())
    assert (outlook.evidence, outlook.time_range.programs) == (Evidence.MESH, 5)


def test_offload_is_wide_and_lopsided():
    with_it, without = (range_of(load("llama3.1-405b", 64, place)) for place in ("all", "none"))
    assert with_it.low == without.low
    assert with_it.high - 1 > 1.5 * (without.high - 1)
    assert (with_it.programs, without.programs) == (3, 6)


def test_the_range_of_several_techniques_contains_that_of_each_and_no_more():
    plain = load("llama3.1-70b", 64, "none")
    lora = dataclasses.replace(plain, adapter=Adapter(kind="lora"))
    split = dataclasses.replace(plain, tp=8)
    both = range_of(dataclasses.replace(lora, tp=8))
    each = [range_of(lora), range_of(split)]
    assert (both.low, both.high) == (min(one.low for one in each), max(one.high for one in each))
    assert (both.programs, both.runs) == (each[0].programs, each[0].runs)


def answer(capsys, *words):
    predict.main([*words, "--verbose"])
    return capsys.readouterr().out


def line(out, begins):
    return next(each for each in out.splitlines() if each.startswith(begins))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("--preset", "llama3.1-8b"), "medium"),
        (("--preset", "llama3.1-70b", "--nodes", "4", "--parallel.offload", "none"), "large"),
        (("--preset", "llama3.1-70b", "--nodes", "4", "--parallel.offload", "none", "--parallel.tp", "8"), "mesh"),
        (("--preset", "llama3.1-405b", "--nodes", "8"), "offload"),
        (("--preset", "llama3.1-8b", "--gpu", "b200"), "other GPU"),
        (("--preset", "llama3.1-8b", "--adapter.kind", "lora"), "adapters"),
    ],
)  # fmt: skip
def test_a_plan_says_what_its_range_is_of(capsys, words, kind):
    said = line(answer(capsys, *words), "range ")
    after = json.loads(RANGES_FILE.read_text())[kind]
    assert said.startswith("range        " + ("rough: " if after["programs"] < MIN_PROGRAMS else "90% likely: "))
    numbers = [float(word) for word in re.findall(r"\d+(?:\.\d+)?", said.partition(":")[2])]
    numbers = [numbers[0], numbers[1], *numbers[-2:]]
    assert numbers == [after["runs"], after["programs"], after["shortest"], after["longest"]]


def test_times_on_a_gpu_that_is_little_known_have_a_wide_range_and_say_so(capsys):
    words = ["--preset", "llama3.1-8b", "--tokens", "1e9", "--price", "2"]
    compared = answer(capsys, *words, "--what-if", "gpu=b200-180")
    assert re.search(
        r"\n  gpu=b200-180: 1 x 8, no offload.*\n  gpu=b200-180: little is known of times on this GPU\n", compared
    )
    record = json.loads(answer(capsys, *words, "--gpu", "b200-180", "--json"))
    assert record["evidence"] == "other GPU"
    assert record["time_range"]["high"] / record["time_range"]["low"] > 3


def test_json_has_the_range_and_the_parts_of_the_compute(capsys):
    record = json.loads(answer(capsys, "--preset", "llama3.1-8b", "--json"))
    assert (record["evidence"], record["time_range"]["programs"]) == ("medium", 9)
    assert record["time_range"]["low"] < 1 < record["time_range"]["high"]
    assert sum(record["time"]["compute_parts_s"].values()) == pytest.approx(record["time"]["compute_s"])
