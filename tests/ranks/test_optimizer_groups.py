"""Learning rates and decays of their own, on any mesh and in any place of the states, are those of one process."""

import mesh_rig
import pytest
import torch

from ranks_rig import run_ranks

GROUPS = (
    "model.embed_tokens.* lr_factor=0.25 weight_decay=0",
    "model.layers.1.* lr_factor=0",
    "*layernorm* weight_decay=0.5",
)
CASES = {
    "dp": (3, {}),
    "offload": (2, {"offload": "all"}),
    "tp": (2, {"tp": 2}),
    "pp": (2, {"pp": 2, "offload": "all"}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return mesh_rig.write_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def alone(model):
    [(results, weights)] = run_ranks(1, _train, model, {})
    return results, weights


def _train(me, directory, settings):
    return mesh_rig.train(me, directory, steps=4, settings=settings, groups=GROUPS)


@pytest.mark.parametrize("name", CASES)
def test_they_train_as_one_process_does(name, model, alone):
    from safetensors.torch import load_file

    world, settings = CASES[name]
    before = {key: value for file in model.glob("*.safetensors") for key, value in load_file(file).items()}
    right, whole = alone
    for results, weights in run_ranks(world, _train, model, settings):
        for (loss, norm), (expected, its) in zip(results, right, strict=True):
            assert (loss, norm) == (pytest.approx(expected, rel=1e-9), pytest.approx(its, rel=1e-9))
        for key, weight in weights.items():
            torch.testing.assert_close(weight, whole[key], rtol=1e-9, atol=1e-9)
            assert torch.equal(weight, before[key].to(weight.dtype)) == ("layers.1." in key), key
