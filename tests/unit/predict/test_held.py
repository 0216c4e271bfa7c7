"""What each rank of a mesh keeps, counted by the plan, is what torch's modules have: the 405B shape, on the meta device."""

import json

import pytest
import torch
import torch.distributed as dist

from llama405b.predict.run_shape import StageSpec, rank_elements, shard_elements
from llama405b.settings.axes import Axes
from llama405b.settings.config import PRESET_DIR
from llama405b.settings.schema import Parallel
from llama405b.spec.models import parse_llama

pytestmark = pytest.mark.slow
RECORD = json.loads((PRESET_DIR / "architectures.json").read_text())["llama3.1-405b"]
LARGE = parse_llama(RECORD, "405B")


def of_modules(rank, world, parallel):
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import LlamaConfig

    from llama405b.distributed.ranks import Rank
    from llama405b.model.llama import build_on_meta
    from llama405b.parallel.split import split_model

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        me = Rank(rank, world, 0, "", torch.device("cpu"), mesh=Axes.from_parallel(parallel, world, 8))
        model = split_model(build_on_meta(LlamaConfig(**RECORD), "sdpa", torch.bfloat16), parallel, me)
        return sum(p.to_local().numel() for p in model.parameters())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        (Parallel(tp=8, pp=4), (0, 9, 31, 63)),
        (Parallel(tp=8, pp=2, pp_schedule="interleaved"), (0, 40)),
        (Parallel(dp_replicate=2, cp=4), (0, 63)),
    ],
)
def test_it_is_what_the_modules_have(parallel, ranks):
    axes = Axes.from_parallel(parallel, 64, 8)
    for rank in ranks:
        assert rank_elements(LARGE, axes, rank, parallel.virtual_stages) == of_modules(rank, 64, parallel)


def test_all_ranks_of_a_copy_have_the_model_and_the_norms_of_each_tp_rank():
    axes = Axes(2, pp=4, tp=8)
    norms = (2 * LARGE.layers + 1) * LARGE.hidden
    assert sum(rank_elements(LARGE, axes, rank) for rank in range(64)) == LARGE.parameters + (axes.tp - 1) * norms
    assert rank_elements(LARGE, Axes(64), 0) == shard_elements(StageSpec(LARGE), 64)
