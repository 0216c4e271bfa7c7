"""A checkpoint goes from one mesh to another: the losses go on, and the weights are the same, bit for bit."""

import gc
from pathlib import Path

import mesh_rig
import pytest
import torch

from ranks_rig import run_ranks

ON_4 = [
    {}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"tp": 4}, {"strategy": "ddp"}, {"pp": 2, "pp_schedule": "interleaved"}, {"tp": 2, "pp": 2},
    {"strategy": "hsdp", "dp_replicate": 2}, {"pp": 4}, {"strategy": "zero1", "tp": 2}, {"cp": 2, "pp": 2}, {"offload": "all", "tp": 2},
]  # fmt: skip
ON_6 = [{"tp": 2}, {}, {"pp": 2}, {"tp": 2, "strategy": "zero2"}, {"cp": 2}]  # three shards, which are not of one size


def _through(me, directory, root, meshes):
    """Take a step on each mesh, from the checkpoint of the mesh before; returns the losses, and where weights changed on the way."""
    from llama405b.checkpoint.export import SavedWeights
    from llama405b.checkpoint.store import Store
    from llama405b.contract.paths import RunDir
    from llama405b.distributed.ranks import with_mesh
    from llama405b.optim.step import train_step
    from llama405b.settings.schema import Optimizer, Parallel
    from update_rig import restore, save

    alone, found, changed, number = me, [], [], 0

    def keep(updater):
        nonlocal number
        number += 1
        store = Store(Path(root), 100, alone, run=RunDir(Path(root).parent / "run"))
        store.acquire()
        save(store, number, updater)
        store.close()
        return Path(root) / f"step-{number:08d}"

    last = None
    for step, settings in enumerate(meshes):
        parallel = Parallel(numerics="fp32", **settings)
        me = with_mesh(alone, parallel)
        model, passes, updater = mesh_rig.build(me, directory, parallel, Optimizer(lr=1e-2), torch.float64)
        if last:
            restore(last, model, updater, me)
            again = keep(updater)
            if me.is_rank0:
                one, other = SavedWeights(last), SavedWeights(again)
                changed += [
                    f"{name} through {settings}"
                    for name in one.shapes.keys() | other.shapes.keys()
                    if not torch.equal(one.read(name), other.read(name))
                ]
        with mesh_rig.in_dtype():
            result = train_step(passes, updater, mesh_rig.micro_batches(step, me, 2), max_norm=mesh_rig.MAX_NORM)
        found.append((result.loss, result.grad_norm))
        last = keep(updater)
        updater.wait()
        del model, passes, updater
        gc.collect()
    return found, changed


@pytest.mark.parametrize(
    ("world", "meshes"),
    [(4, ON_4[::2]), *(pytest.param(*case, marks=pytest.mark.soak) for case in [(6, ON_6), (4, ON_4)])],
)
def test_losses_go_on_from_mesh_to_mesh(world, meshes, tmp_path):
    model = mesh_rig.write_model(tmp_path / "model")
    right, _ = mesh_rig.single(model, micro=2, steps=len(meshes))
    for found, changed in run_ranks(world, _through, model, tmp_path / "checkpoints", meshes, timeout_s=280):
        assert changed == []
        for results, expected, mesh in zip(found, right, meshes, strict=True):
            assert max(abs(a / b - 1) for a, b in zip(results, expected, strict=True)) < 1e-9, mesh
