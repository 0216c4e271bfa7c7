"""Every way to split a model over ranks trains as one process does: in FP64 to 1e-9, losses, norms and weights."""

import functools
import itertools

import mesh_rig
import pytest
import torch

from ranks_rig import run_ranks

# name -> ranks, settings, sequences of a micro-batch, tied or not
CASES = {
    "dp5": (5, {}, 1, (False, True)),
    "zero2": (2, {"strategy": "zero2", "loss": "chunked"}, 2, (False,)),
    "zero1": (3, {"strategy": "zero1"}, 2, (True,)),
    "ddp": (2, {"strategy": "ddp"}, 2, (True,)),
    "hsdp": (4, {"dp_replicate": 2}, 1, (False,)),
    "tp2": (4, {"tp": 2, "offload": "all"}, 6, (True,)),
    "cp2": (4, {"cp": 2, "loss": "chunked"}, 2, (False, True)),
    "pp2": (4, {"pp": 2, "strategy": "zero2"}, 2, (False,)),
    "interleaved": (2, {"pp": 2, "pp_schedule": "interleaved", "loss": "chunked"}, 1, (False,)),
    "gpipe": (2, {"pp": 2, "pp_schedule": "gpipe"}, 4, (False,)),
    "3d": (8, {"pp": 2, "tp": 2}, 2, (False,)),
    "tp2, chunked": (2, {"tp": 2, "loss": "chunked"}, 2, (False, True)),
}
WITHIN = 1e-9
FP32_LR = 1e-3  # with higher ones AdamW makes much of the last digits


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {tied: mesh_rig.write_model(directory / f"tied-{tied}", tied=tied) for tied in (False, True)}


@pytest.fixture(scope="module")
def right(models):
    @functools.cache
    def of(tied, micro):
        found = mesh_rig.single(models[tied], micro=micro)
        clipped = [norm > mesh_rig.MAX_NORM for _, norm in found[0]]
        assert sum(clipped) >= len(clipped) / 2
        return found

    return of


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_one_process_does(name, models, right):
    world, settings, micro, kinds = CASES[name]
    for tied in kinds:
        found = run_ranks(world, functools.partial(mesh_rig.train, micro=micro, settings=settings), models[tied])
        weights = {name: tensor for _, own in found for name, tensor in own.items()}
        for results, _ in found:
            steps, whole = mesh_rig.difference((results, weights), right(tied, micro))
            assert steps < WITHIN
            assert whole < WITHIN


PAIRS = [
    {"strategy": strategy, **axes}
    for strategy, axes in itertools.product(
        ("zero3", "zero2", "zero1", "ddp", "hsdp"),
        ({"tp": 2}, {"cp": 2}, {"pp": 2}, {"pp": 2, "pp_schedule": "interleaved"}, {"tp": 2, "cp": 2}, {"pp": 2, "tp": 2},
         {"pp": 2, "cp": 2}),
    )
]  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("settings", PAIRS, ids=str)
@pytest.mark.parametrize("micro", [4, 12])
def test_every_pair_does(settings, micro, models, right):
    more = {"dp_replicate": 2} if settings["strategy"] == "hsdp" else {}
    for tied in (False, True) if "pp" not in settings else (False,):
        train = functools.partial(mesh_rig.train, micro=micro, settings=settings | more)
        found = run_ranks(8, train, models[tied])
        weights = {name: tensor for _, own in found for name, tensor in own.items()}
        assert max(max(mesh_rig.difference((each, weights), right(tied, micro))) for each, _ in found) < WITHIN


@pytest.mark.soak
@pytest.mark.parametrize("world", range(1, 9))
def test_any_number_of_ranks_takes_the_same_steps(world, models, right):
    found = run_ranks(world, functools.partial(mesh_rig.train, micro=1), models[False])
    assert max(max(mesh_rig.difference(each, right(False, 1))) for each in found) < WITHIN


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_in_fp32_twenty_steps_stay_near(name, models, right):
    world, settings, micro, _ = CASES[name]
    alone, _ = mesh_rig.single(models[False], micro=micro, steps=20, dtype=torch.float32, lr=FP32_LR)
    train = functools.partial(mesh_rig.train, micro=micro, settings=settings, steps=20, dtype=torch.float32, lr=FP32_LR)
    for results, _ in run_ranks(world, train, models[False]):
        for (loss, norm), (expected, its) in zip(results, alone, strict=True):
            assert loss == pytest.approx(expected, rel=1e-5)
            assert norm == pytest.approx(its, rel=1e-3)
