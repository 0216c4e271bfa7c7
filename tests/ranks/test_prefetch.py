"""Units that are gathered ahead, or kept by fewer ranks until the backward: the same bits, and gathers as they are said to be."""

import time

import mesh_rig
import pytest

from ranks_rig import run_ranks

SETTINGS = {
    "as it is": {},
    "one ahead": {"prefetch": 1},
    "all ahead": {"prefetch": 9},
    "kept by two": {"reshard_after_forward": 2},
    "both": {"prefetch": 2, "reshard_after_forward": 2},
}
OFFLOADED = {"as it is": {"offload": "all"}, "ahead": {"offload": "all", "prefetch": 2, "reshard_after_forward": 2}}


@pytest.mark.parametrize("settings", [SETTINGS, OFFLOADED], ids=["on the device", "offloaded"])
def test_they_train_to_the_same_bits(settings, tmp_path):
    directory = mesh_rig.write_model(tmp_path / "model")
    for found in run_ranks(4, _trained, directory, settings):
        assert [name for name in found if found[name] != found["as it is"]] == []


def _trained(me, directory, settings):
    import torch

    found = {}
    for name, more in settings.items():
        results, weights = mesh_rig.train(
            me, directory, steps=3, dtype=torch.float32, settings=more, before=_slow_updates
        )
        found[name] = results, {name: weight.double().sum().item() for name, weight in weights.items()}
    return found


def _slow_updates(model, passes, updater):
    """Updates that a forward would overtake if it did not wait for them."""
    update = getattr(updater, "_update_unit", None)
    if update:
        updater._update_unit = lambda *args: (time.sleep(0.02), update(*args))


def test_a_backward_gathers_from_those_that_keep_a_unit(tmp_path):
    directory = mesh_rig.write_model(tmp_path / "model", layers=3)
    for sizes, meshes in run_ranks(4, _gathered, directory):
        assert (
            sizes == [4] * 5 + [2] * 3
        )  # the embedding, three layers and the head; then the layers again, from two ranks
        assert meshes == 1


def _gathered(me, directory):
    import torch
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    from llama405b.parallel.fsdp_internals import param_groups

    sizes, gather = [], _fsdp_param_group.foreach_all_gather

    def seen(params, group, *args):
        sizes.append(group.size())
        return gather(params, group, *args)

    _fsdp_param_group.foreach_all_gather = seen
    meshes = set()

    def look(model, *_):
        groups = list(param_groups(model))
        meshes.update(id(g.post_forward_mesh_info) for g in groups if g.post_forward_mesh_info is not None)
        meshes.difference_update(id(g.mesh_info) for g in groups)

    settings = {"reshard_after_forward": 2}
    mesh_rig.train(me, directory, steps=1, micro=3, dtype=torch.float32, settings=settings, before=look)
    return sizes, len(meshes)
