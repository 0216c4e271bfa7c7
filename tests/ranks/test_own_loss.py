"""A loss of the user's own: the same as the one it computes, on any number of ranks."""

import mesh_rig
import pytest

from ranks_rig import run_ranks

MODULE = """
import torch.nn.functional as F

def loss(logits_TV, targets_T):
    return F.cross_entropy(logits_TV, targets_T, ignore_index=-100, reduction="sum"{more})
"""


def _train(me, directory, module, settings):
    from llama405b import extend

    results = [mesh_rig.train(me, directory, steps=2, settings=settings)[0]]
    extend.use(str(module))
    return [*results, mesh_rig.train(me, directory, steps=2, settings=settings)[0]]


def _both(tmp_path, world, settings, more=""):
    directory, module = mesh_rig.write_model(tmp_path / "model"), tmp_path / "own.py"
    module.write_text(MODULE.format(more=more))
    return run_ranks(world, _train, directory, module, settings)


@pytest.mark.parametrize(("world", "settings"), [(3, {}), (2, {"pp": 2}), (2, {"cp": 2})], ids=["three", "pp", "cp"])
def test_cross_entropy_of_ones_own_is_cross_entropy(tmp_path, world, settings):
    for theirs, own in _both(tmp_path, world, settings):
        assert own == theirs


def test_another_loss_is_another(tmp_path):
    one, two = (_both(tmp_path / str(world), world, {}, ", label_smoothing=0.1") for world in (1, 2))
    assert two[0][1] == [pytest.approx(step, rel=1e-9) for step in one[0][1]]
    assert two[0][1] != two[0][0]


@pytest.mark.parametrize("settings", [{"tp": 2}, {"loss": "chunked"}])
def test_it_is_refused_where_no_rank_has_all_logits(tmp_path, settings):
    with pytest.raises(AssertionError, match=r"--extend: loss\(\) needs all logits, but no rank has them"):
        _both(tmp_path, 2, settings)
