"""An export says one thing to every reader: transformers, the files alone, llama.cpp's converter, and peft."""

import os

import loaders
import pytest

from conftest import ROOT
from ranks_rig import run_ranks

APART = {"gguf": ROOT / ".venv/gguf", "peft": ROOT / ".venv/peft"}


@pytest.fixture(autouse=True)
def _packages():
    for name, place in APART.items():
        if not place.exists():
            why = f"NOT RUN: pip install --no-deps --target {place} {name}"
            pytest.fail(why) if os.environ.get("LLAMA405B_NOTHING_SKIPPED") else pytest.skip(why)


def reading(name, directory):
    [found] = run_ranks(1, loaders.read, name, directory, APART.get(name))
    return found


@pytest.mark.parametrize("family", loaders.FAMILIES)
def test_all_read_the_same_of_each_family(tmp_path, family):
    adapter = family in ("Llama", "Gemma 3", "Phi-3")
    right, exported = loaders.trained(family, tmp_path, adapter=adapter)
    whole = exported["whole"]
    right.logits = reading("safetensors", whole).logits
    looked = {"transformers": 5, "safetensors": 3, "gguf": 2}
    for name, n_fields in looked.items():
        fields, wrong = loaders.compared(right, reading(name, whole))
        assert (wrong, len(fields)) == ([], n_fields), name
    assert (whole / "LICENSE").read_text() == "terms"
    if adapter:
        merged = reading("transformers", exported["merged"])
        assert loaders.compared(right, merged)[1][0].startswith("logits: ")  # it has learnt something else
        right.logits = merged.logits
        assert loaders.compared(right, reading("peft", exported["adapter"])) == (["ids", "chat", "logits"], [])
