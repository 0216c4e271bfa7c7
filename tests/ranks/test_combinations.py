"""Pairs of a run's features are refused, or train as plain FSDP does (scripts/combinations.py trains all of them)."""

import itertools
import os
import random
from pathlib import Path

import combinations
import offered
import pytest

from llama405b.settings.schema import SETTING_TYPES

SEED, COUNT = 5, 7
ALWAYS = [
    ("compile", "tp"),
    ("compile", "cp"),
    ("compile", "packing"),
    ("fused", "tp"),
    ("compile", "lora", "tp", "packing"),
]
PAIRS = [names for names in itertools.combinations(combinations.FEATURES, 2) if not combinations.contradict(names)]


def test_a_pair_is_refused_by_the_name_of_a_setting():
    for names in PAIRS:
        key, _, sentence = combinations.refusal(names).partition(": ")
        assert not key or (key in SETTING_TYPES and sentence), names


def test_the_page_has_what_is_refused():
    page = (Path(__file__).parents[2] / "docs/parallel.md").read_text()
    refusals = combinations.pair_refusals()
    assert combinations.refusal_table(refusals) in page
    assert f"of {len(refusals)} pairs that" in page


def test_pairs_train_as_plain_fsdp_does(tmp_path):
    possible = [names for names in PAIRS if not combinations.refusal(names) and names not in ALWAYS]
    assert _faults(tmp_path, [*ALWAYS, *random.Random(SEED).sample(possible, COUNT)]) == {}


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_every_pair_does(tmp_path):
    assert _faults(tmp_path, [names for names in PAIRS if not combinations.refusal(names)]) == {}


def _faults(root, chosen):
    if not offered.TORCHAO.exists():
        why = f"NOT RUN: pip install --no-deps --target {offered.TORCHAO} torchao"
        pytest.fail(why) if os.environ.get("LLAMA405B_NOTHING_SKIPPED") else pytest.skip(why)
    return combinations.check_all(root, chosen, 20, print)
