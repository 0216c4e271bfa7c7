"""What plan, auto and would help name is what the trainer takes: a sample, built and stepped (scripts/offered.py has all)."""

import itertools
import os
import random

import offered
import pytest

from ranks_rig import run_ranks

COUNT, SOURCES, SEED = 40, 24, 3


def test_what_is_offered_can_be_trained(tmp_path):
    if not offered.TORCHAO.exists():
        why = f"NOT RUN: pip install --no-deps --target {offered.TORCHAO} torchao"
        pytest.fail(why) if os.environ.get("LLAMA405B_NOTHING_SKIPPED") else pytest.skip(why)
    asked = [*itertools.product(offered.MODELS, offered.CLUSTERS, offered.ASKED)]
    kinds = set()
    for model, (world, gpu), settings in random.Random(SEED).sample(asked, SOURCES):
        for config, llama in offered.offered(model, world, gpu, settings):
            assert offered.faults(config, llama, world) == [], (model, world, settings)
            kinds.add(offered.kind_of(model, config))
    chosen = offered.sample(kinds, COUNT, SEED)
    assert len(chosen) == COUNT
    for model in offered.MODELS:
        offered.small_model(model, tmp_path / model)
    for world in sorted({kind.world for kind in chosen}):
        found = run_ranks(world, offered.step_all, tmp_path, [kind for kind in chosen if kind.world == world])
        assert found == [{}] * world
