"""Compiled layers: the losses of those that are not, one graph for all of them, and none after the first step."""

import mesh_rig
import pytest

from ranks_rig import run_ranks


def test_one_graph_serves_all_layers_and_steps(tmp_path):
    directory = mesh_rig.write_model(tmp_path / "model")
    for found in run_ranks(2, _trained, directory):
        usual, compiled = found["losses"]
        assert compiled == pytest.approx(usual, rel=1e-3)
        assert compiled != usual  # it rounds otherwise, or nothing was compiled
        assert found["graphs"] == [1, 1, 1]
        assert found["names"][0] == found["names"][1]


def _trained(me, directory):
    import torch._dynamo
    from torch._dynamo.utils import counters

    from llama405b.distributed.ranks import with_mesh
    from llama405b.optim.step import train_step
    from llama405b.settings.schema import Optimizer, Parallel

    losses, names = [], []
    for compiles in (False, True):
        parallel = Parallel()
        me = with_mesh(me, parallel)
        _, passes, updater = mesh_rig.build(
            me, directory, parallel, Optimizer(lr=1e-3), torch.float32, recompute="every:2", compiles=compiles
        )
        of_steps, graphs = [], []
        for step in range(3):
            of_steps.append(train_step(passes, updater, mesh_rig.micro_batches(step, me, 3), max_norm=1.0).loss)
            graphs.append(counters["stats"]["unique_graphs"])
        losses.append(of_steps)
        names.append(sorted(mesh_rig.whole_weights(updater.master)))
    return {"losses": losses, "graphs": graphs, "names": names}
