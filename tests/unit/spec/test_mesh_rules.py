"""Every row of docs/parallel.md's table of combinations is allowed, or refused with the words that it says."""

import re

import pytest

from conftest import ROOT
from llama405b.contract.errors import UserError
from llama405b.settings.axes import Axes
from llama405b.settings.rules import find_faults
from llama405b.settings.schema import Config, Data, Model, Parallel
from llama405b.spec.models import Llama
from llama405b.spec.rules import check_mesh

SMALL = Llama(
    layers=6, hidden=64, intermediate=64, heads=8, kv_heads=4, head_dim=8, vocab=128, tied=False, attention_bias=False, mlp_bias=False,
    max_positions=64,
)  # fmt: skip
PAGE = (ROOT / "docs/parallel.md").read_text()
ROWS = re.findall(r"^\| `([^`|]+)` \| (allowed|refused) \| (.+) \|$", PAGE, re.MULTILINE)


def refused(settings, llama=SMALL, world=8, per_host=8, seq_len=32):
    """Why settings are refused on some ranks; '' if they are not."""
    of_model = {name.removeprefix("model."): settings[name] for name in settings if name.startswith("model.")}
    parallel = Parallel(**{"numerics": "fp32", **{name: settings[name] for name in settings if "." not in name}})
    config = Config(model=Model(path="m", **of_model), data=Data(paths=("d",)), parallel=parallel)
    faults = [fault for _, fault in find_faults(config)]
    if faults:
        return faults[0]
    try:
        axes = Axes.from_parallel(parallel, world, per_host)
        check_mesh(axes, parallel, llama, seq_len, per_host)
    except UserError as error:
        return str(error)
    return ""


def test_the_page_has_its_table():
    assert len(ROWS) > 20


@pytest.mark.parametrize(("settings", "verdict", "why"), ROWS)
def test_each_row_is_as_it_says(settings, verdict, why):
    pairs = dict(pair.split("=") for pair in settings.split())
    said = refused({name: int(value) if value.isdigit() else value for name, value in pairs.items()})
    assert (verdict == "allowed") == (not said), said
    assert verdict == "allowed" or why in said


@pytest.mark.parametrize(
    ("settings", "more", "words"),
    [
        ({"pp": 2}, {"llama": SMALL.__class__(6, 64, 64, 8, 4, 8, 128, True, False, False, 64)}, "the embedding is also the head"),
        ({"tp": 4}, {"per_host": 2}, "tp 4 would span hosts of 2 ranks, so every layer would wait for the network; use tp 2"),
        ({"cp": 8, "tp": 1}, {"seq_len": 36}, "36 tokens of a sequence cannot be divided by 8; use cp 4"),
        ({"cp": 4, "tp": 4}, {"world": 16, "per_host": 16}, "2 attention heads on each of 4 ranks cannot be divided by 4; use cp 2"),
        ({"tp": 4}, {"seq_len": 30}, "30 tokens of a sequence cannot be divided by 4; use tp 2"),
        ({"pp": 8, "strategy": "ddp"}, {"world": 24}, "6 layers cannot be divided into 8 stages; use pp 6"),
        ({"pp": 8, "dp_replicate": 3}, {"world": 24}, "6 layers cannot be divided into 8 stages; use pp 4"),
        ({"tp": 6}, {"world": 12, "per_host": 12}, "8 attention heads cannot be divided by 6; use tp 4"),
        ({"tp": 6}, {"world": 12, "per_host": 6}, "8 attention heads cannot be divided by 6; use tp 2"),
        ({"dp_replicate": 3}, {}, "--parallel.dp_replicate: 8 ranks cannot be divided by dp_replicate 3; use dp_replicate 2"),
        ({"tp": 2, "pp": 3}, {}, "--parallel.tp: 8 ranks cannot be divided by pp 3 x tp 2; use sizes whose product divides"),
    ],
)  # fmt: skip
def test_what_else_does_not_suit_is_told_with_what_would(settings, more, words):
    assert words in refused(settings, **more)


def test_hosts_are_looked_at_before_the_model_is_known():
    assert "would span hosts of 2 ranks" in refused({"tp": 4}, llama=None, per_host=2)
    assert refused({"tp": 3}, llama=None, world=6, per_host=3) == ""


def test_a_host_is_no_limit_where_that_is_said():
    assert refused({"tp": 4, "tp_across_hosts": True}, per_host=2) == ""


@pytest.mark.parametrize(
    ("strategy", "axes"), [("ddp", Axes(1, dp_replicate=16)), ("hsdp", Axes(8, dp_replicate=2)), ("zero1", Axes(16))]
)
def test_a_name_says_how_many_copies(strategy, axes):
    assert Axes.from_parallel(Parallel(strategy=strategy), 16, 8) == axes
