"""Updates that are rounded stochastically: the same bits for any split, in whatever place, and however often a run began anew."""

import mesh_rig
import pytest

from ranks_rig import run_ranks

CASES = {
    "dp 3": (3, {}),
    "offload": (2, {"offload": "all"}),
    "in turn": (2, {"offload": "all", "overlap": False}),
    "tp 2": (4, {"tp": 2}),
    "pp 2": (2, {"pp": 2}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return mesh_rig.write_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def alone(model):
    [found] = run_ranks(1, _updated, model, {}, "bf16-stochastic")
    return found


@pytest.mark.parametrize("name", CASES)
def test_gradients_that_are_alike_make_weights_that_are_alike(name, model, alone):
    world, settings = CASES[name]
    for found in run_ranks(world, _updated, model, settings, "bf16-stochastic"):
        assert [key for key in found if found[key] != alone[key]] == []


def test_it_keeps_what_rounding_to_the_nearest_loses(model, alone):
    [nearest] = run_ranks(1, _updated, model, {}, "pure-bf16")
    key = "model.layers.1.mlp.up_proj.weight"
    assert nearest[key][1] < 0.2 < alone[key][1]


def _updated(me, directory, settings, numerics):
    """Three updates by gradients that depend on names and places alone: each weight's bits, and the share that changed."""
    import zlib

    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor

    from llama405b.distributed.ranks import with_mesh
    from llama405b.model.llama import strip_wrappers
    from llama405b.optim.updater import local_tensor
    from llama405b.settings.schema import Optimizer, Parallel

    parallel = Parallel(numerics=numerics, **settings)
    me = with_mesh(me, parallel)
    _, _, updater = mesh_rig.build(me, directory, parallel, Optimizer(lr=1e-5, weight_decay=0.0), torch.bfloat16)
    before = mesh_rig.whole_weights(updater.master)
    for step in range(3):
        for name, parameter in updater.master.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{strip_wrappers(name)} {step}".encode()))
            whole = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            parameter.grad = whole
        for part in getattr(updater, "unit_states", ()):
            part.sums = [[local_tensor(p.grad) for p in members] for _, members in part.groups]
        updater.update()
        updater.wait()
    found = mesh_rig.whole_weights(updater.master)
    return {
        name: (zlib.crc32(p.float().numpy().tobytes()), (p != before[name]).float().mean().item())
        for name, p in found.items()
    }
