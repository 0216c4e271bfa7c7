"""On any mesh each rank gets what it holds, in each way of loading: sent by rank 0, read from whole files, and from a pushed part."""

import mesh_rig
import pytest
import torch
from test_load import _part, _read

from ranks_rig import run_ranks
from tiny_models import write_llama

MESHES = [
    {"tp": 2},
    {"pp": 2},
    {"pp": 3, "pp_schedule": "interleaved"},
    {"tp": 2, "dp_replicate": 3},
    {"cp": 3, "pp": 2},
]
WORLD, PER_HOST = 6, 2


def _load(me, directory, place, vocab=0):
    """``vocab``: embeddings of the model here, if it has more than the files."""
    from llama405b.distributed.ranks import with_mesh
    from llama405b.model import llama
    from llama405b.model.llama import strip_wrappers
    from llama405b.parallel import load_weights
    from llama405b.parallel.split import shard_layout_of, split_model
    from llama405b.settings.schema import Parallel

    whole, faults = _read(directory), []
    for name in ("model.embed_tokens.weight", "lm_head.weight") if vocab else ():
        mean = whole[name].double().mean(0, keepdim=True).to(whole[name].dtype)
        whole[name] = torch.cat([whole[name], mean.expand(vocab - len(whole[name]), -1)])
    for number, settings in enumerate(MESHES):
        parallel = Parallel(numerics="fp32", **settings)
        here = with_mesh(me, parallel)
        part = place / f"{number}-host-{me.index // PER_HOST}"
        for how, source in (("rank0", directory), ("local", directory), ("local", part))[: 2 if vocab else 3]:
            config = llama.read_hf_config(directory)
            config.vocab_size = vocab or config.vocab_size
            model = llama.build_on_meta(config, "sdpa", torch.float32)
            holdings, model = shard_layout_of(model, parallel, here), split_model(model, parallel, here)
            said = load_weights.load(model, source, how, here, lambda *_: None, shard_layout=holdings, vocab=vocab)
            assert said == {"rank0": "rank 0 read the weights and sent each rank its part"}.get(
                how, "each rank read its own part"
            )
            for name, parameter in model.named_parameters():
                box = tuple(slice(*each) for each in holdings.slice_of(name, whole[name].shape, here.index))
                if not torch.equal(parameter.to_local(), whole[name][box]):
                    faults.append(f"{name} by {how} of {settings}")
            mine = {strip_wrappers(name) for name, _ in model.named_parameters()}
            assert mine == {name for name in whole if holdings.has_tensor(name, here.index)}
    return faults


@pytest.mark.parametrize("biases", [False, True])
def test_each_rank_gets_what_it_holds(tmp_path, biases):
    from llama405b.settings.axes import Axes
    from llama405b.settings.schema import Parallel

    shape = mesh_rig.SHAPE | {"attention_bias": biases, "mlp_bias": biases}
    model = write_llama(tmp_path / "model", layers=7, dtype=torch.bfloat16, **shape)
    for number, settings in enumerate(MESHES):
        parallel = Parallel(**settings)
        axes = Axes.from_parallel(parallel, WORLD, PER_HOST)
        for host in range(WORLD // PER_HOST):
            first = host * PER_HOST
            _part(model, tmp_path / f"{number}-host-{host}", first, first + PER_HOST - 1, axes, parallel.virtual_stages)
    assert run_ranks(WORLD, _load, model, tmp_path) == [[]] * WORLD


def test_new_embeddings_are_the_mean_of_the_others_on_any_mesh(tmp_path):
    model = write_llama(tmp_path / "model", layers=7, dtype=torch.bfloat16, **mesh_rig.SHAPE)
    assert run_ranks(WORLD, _load, model, tmp_path, 256) == [[]] * WORLD
