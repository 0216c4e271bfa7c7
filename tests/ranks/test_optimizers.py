"""Lion and Muon: what plain PyTorch makes of them in one process, on any mesh and in any place that they may have."""

import contextlib
import functools
from unittest import mock

import mesh_rig
import pytest
import torch

from ranks_rig import run_ranks
from update_rig import bits, build, dcp_save, same, slow, take

LR = 1e-3
MESHES = [
    ("lion", 1, {}),
    ("lion", 3, {}),
    ("lion", 2, {"tp": 2}),
    ("lion", 2, {"offload": "all"}),
    ("muon", 3, {}),
    ("muon", 2, {"strategy": "ddp"}),
    ("muon", 2, {"cp": 2}),
    pytest.param("lion", 2, {"pp": 2}, marks=pytest.mark.soak),
    pytest.param("lion", 2, {"strategy": "zero1"}, marks=pytest.mark.soak),
    pytest.param("muon", 2, {"pp": 2}, marks=pytest.mark.soak),
    pytest.param("muon", 4, {"strategy": "hsdp", "dp_replicate": 2}, marks=pytest.mark.soak),
]


class PlainLion(torch.optim.Optimizer):
    """As its paper has it."""

    def __init__(self, groups, lr, betas):
        super().__init__(groups, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                update = torch.sign(beta1 * m + (1 - beta1) * p.grad)
                p.sub_(lr * (update + group["weight_decay"] * p))
                m.copy_(beta2 * m + (1 - beta2) * p.grad)


def lion(named, lr):
    vectors = [p for p in named.values() if p.ndim == 1]
    matrices = [p for p in named.values() if p.ndim > 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return [PlainLion(groups, lr, (0.9, 0.95))]


def muon(named, lr):
    of_layers = [p for name, p in named.items() if p.ndim == 2 and ".layers." in name]
    others = [
        {"params": [p], "weight_decay": 0.1 * (p.ndim > 1)}
        for p in named.values()
        if id(p) not in {*map(id, of_layers)}
    ]
    return [
        torch.optim.Muon(of_layers, lr=lr, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), eps=1e-8),
    ]


PLAIN = {"lion": lion, "muon": muon}


@contextlib.contextmanager
def iterated_in(dtype):
    """Have torch iterate in another dtype than BF16, and the trainer send that."""
    from torch.optim import _muon

    from llama405b.optim import muon as ours

    iterate = _muon._zeropower_via_newtonschulz

    class Wide:
        """A matrix that BF16 leaves as it is."""

        def __init__(self, matrix):
            self.matrix, self.shape, self.size = matrix, matrix.shape, matrix.size

        def bfloat16(self):
            return self.matrix.to(dtype, copy=True)

    def wide(matrix, *args):
        return iterate(Wide(matrix), *args)

    with (
        mock.patch.object(_muon, "_zeropower_via_newtonschulz", wide),
        mock.patch.object(ours, "ITERATED", dtype),
    ):
        yield


def _train(me, model, optimizer, settings, dtype):
    with iterated_in(dtype):
        return mesh_rig.train(me, model, settings=settings, optimizer=optimizer, lr=LR)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return mesh_rig.write_model(tmp_path_factory.mktemp("models") / "model")


@pytest.mark.parametrize(("optimizer", "world", "settings"), MESHES, ids=str)
def test_steps_are_those_of_plain_pytorch(model, optimizer, world, settings):
    with iterated_in(torch.float64):
        right = mesh_rig.single(model, lr=LR, optimizers=PLAIN[optimizer])
    unlike = mesh_rig.single(model, lr=LR)
    found = run_ranks(world, functools.partial(_train, dtype=torch.float64), model, optimizer, settings)
    weights = {name: tensor for _, own in found for name, tensor in own.items()}
    for results, _ in found:
        assert max(mesh_rig.difference((results, weights), right)) < 1e-9
    assert mesh_rig.difference((results, weights), unlike)[1] > 1e-4


def test_as_torch_iterates_it_a_step_differs_by_what_bf16_rounds(model):
    right = mesh_rig.single(model, lr=LR, optimizers=muon)
    for found in run_ranks(2, _train, model, "muon", {}, torch.bfloat16):
        assert max(mesh_rig.difference(found, right)) < 1e-2


PLACES = [
    {"offload": "none", "overlap": False},
    {"offload": "all", "overlap": False},
    {"offload": "all", "overlap": True},
    {"offload": "optimizer", "overlap": True},
]


def _in_places(me, directory, numerics):
    runs = []
    for form in PLACES[: 3 if numerics != "fp32-master" else 4]:
        module, updater = build(me, directory, numerics=numerics, optimizer="lion", **form)
        if form["overlap"]:
            slow(updater)
        runs.append(([take(me, module, updater, step, 2) for step in range(1, 6)], bits(module, updater)))
    return [seen == runs[0][0] and same(kept, runs[0][1]) for seen, kept in runs]


@pytest.mark.parametrize(
    "numerics", ["fp32-master", "pure-bf16", pytest.param("bf16-stochastic", marks=pytest.mark.soak)]
)
def test_lion_has_the_same_bits_in_every_place_hidden_or_not(tiny, numerics):
    for equal in run_ranks(2, _in_places, tiny, numerics):
        assert equal == [True] * len(equal)


def _resume(me, directory, root, optimizer):
    from update_rig import restore

    form = {"numerics": "fp32-master", "offload": "none", "overlap": False, "optimizer": optimizer}
    module, updater = build(me, directory, **form)
    for step in (1, 2):
        take(me, module, updater, step)
    dcp_save(updater, me, root / "step-00000002")
    right = [take(me, module, updater, step) for step in (3, 4)], bits(module, updater)
    module, updater = build(me, directory, **form)
    assert restore(root / "step-00000002", module, updater, me) == 2
    again = [take(me, module, updater, step) for step in (3, 4)], bits(module, updater)
    return right[0] == again[0] and same(right[1], again[1])


@pytest.mark.parametrize("optimizer", ["lion", "muon"])
def test_a_resume_goes_on_with_the_same_bits(tiny_tied, tmp_path, optimizer):
    assert run_ranks(2, _resume, tiny_tied, tmp_path, optimizer) == [True, True]
