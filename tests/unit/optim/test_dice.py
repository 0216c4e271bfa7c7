"""Rounding to BF16 by the numbers of elements: to one of two neighbors, right in the mean, alike however a tensor is cut."""

import functools
import itertools
import warnings

import pytest
import torch
from torch._dynamo.utils import counters

from llama405b.optim import rounding
from llama405b.optim.adamw import update_adamw
from llama405b.optim.lion import update_lion
from llama405b.optim.rounding import LocalElements, StochasticRounding
from llama405b.settings.choices import OPTIMIZERS
from ranks_rig import run_ranks

PARAMS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def rounded(wide, elements=None, step=3):
    """FP32 values rounded as an update's weights are: by an update that does nothing else."""
    elements = elements or LocalElements(77, full_width=wide.numel(), width=wide.numel())
    to = torch.empty(wide.shape, dtype=torch.bfloat16)
    constants = torch.zeros(1)
    starts, key = elements.seeds(elements.rows(to).shape[0], to.device)
    step_hash = rounding._hash_bits(torch.tensor(step, dtype=torch.int32))
    values = elements.rows(wide)
    rounding._update_chunk(lambda *_: [values], [elements.rows(to)], values, constants, starts, key, step_hash)
    return to


@pytest.mark.parametrize("value", [1.001, -3.1415, 1e-30, 6e4])
def test_it_is_one_of_two_neighbors_and_right_in_the_mean(value):
    found = rounded(torch.full((1 << 18,), value)).double()
    low, high = sorted(set(found.tolist()))
    assert low < value < high
    assert torch.nextafter(*torch.tensor([low, torch.inf], dtype=torch.bfloat16)).item() == high
    deviation = (high - low) * 0.5 / (1 << 9)
    assert found.mean().item() == pytest.approx(value, abs=5 * deviation)


def test_what_bf16_has_stays():
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, torch.inf, -torch.inf])
    assert torch.equal(rounded(values).float(), values)
    assert rounded(torch.tensor([torch.nan])).isnan().all()


def test_neighbors_steps_and_tensors_are_rounded_apart():
    wide_C = torch.full((1 << 16,), 1.001)
    up_C = rounded(wide_C) > 1.0
    for other_C in (
        up_C.roll(1),
        rounded(wide_C, step=4) > 1.0,
        rounded(wide_C, LocalElements(78, full_width=1, width=1)) > 1.0,
    ):
        both = (up_C & other_C).float().mean().item()
        assert both == pytest.approx(up_C.float().mean().item() * other_C.float().mean().item(), abs=0.01)


def test_weights_and_moments_are_rounded_apart():
    wide, found = torch.full((1, 1 << 16), 1.001), [torch.empty(1, 1 << 16, dtype=torch.bfloat16) for _ in range(3)]
    starts, key = LocalElements(1).seeds(1, wide.device)
    rounding._update_chunk(
        lambda *_: [wide] * 3, found, wide, torch.zeros(1), starts, key, torch.tensor(1, dtype=torch.int32)
    )
    ups = [each > 1.0 for each in found]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        both = (ups[one] & ups[other]).float().mean().item()
        assert both == pytest.approx(ups[one].float().mean().item() * ups[other].float().mean().item(), abs=0.01)


def test_parts_of_a_tensor_are_rounded_as_the_whole():
    wide_RC = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    whole_RC = rounded(wide_RC, LocalElements(5, full_width=10, width=10))
    for rows, columns in ((slice(2, 5), slice(0, 10)), (slice(0, 6), slice(4, 7)), (slice(3, 6), slice(7, 10))):
        own = wide_RC[rows, columns].contiguous()
        elements = LocalElements(5, rows.start, columns.start, columns.stop - columns.start, 10)
        assert torch.equal(rounded(own, elements), whole_RC[rows, columns])


def tensors_of(shape, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    weight, gradient, first, second = (torch.randn(shape, generator=generator) for _ in range(4))
    return [tensor.to(dtype) for tensor in (weight, gradient, 0.1 * first, second.square())]


@torch.no_grad()
def update(name, tensors, elements, kernel=None):
    """Update copies; returns weight and moments."""
    weight, gradient, *moments = (tensor.clone() for tensor in tensors)
    parameter, state = torch.nn.Parameter(weight, False), {"step": torch.tensor(4.0)}
    state |= dict(zip(OPTIMIZERS[name].moments, moments, strict=False))
    StochasticRounding(name, {id(parameter): elements}, kernel).update([parameter], [state], [gradient], PARAMS)
    assert state.pop("step") == 5
    return [weight, *state.values()]


@pytest.mark.parametrize("name", rounding.FORMULAS)
def test_it_is_the_optimizer_s_update_rounded_to_a_neighbor(name):
    tensors = tensors_of((300, 40))
    wide = [tensor.float() for tensor in tensors]
    weight, gradient, *moments = wide
    if name == "adamw":
        update_adamw([weight], [gradient], [[moment] for moment in moments], [torch.tensor(4.0)], PARAMS)
    else:
        moments = moments[:1]
        update_lion([weight], [gradient], [moments], [torch.tensor(4.0)], PARAMS)
    found = update(name, tensors, LocalElements(3, width=40, full_width=40))
    for ours, exact in zip(found, [weight, *moments], strict=True):
        ulp = torch.finfo(torch.bfloat16).eps * exact.abs()
        assert ((ours.float() - exact).abs() <= ulp + 1e-30).all()
        assert 0.4 < (ours.float() > exact).float().mean() < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("name", rounding.FORMULAS)
def test_compiled_and_eager_updates_have_the_same_bits(name):
    run_ranks(1, _compare_compiled, name)  # a process of its own: what earlier tests left in this one is not compiled


def _compare_compiled(_, name):
    rounding.EAGER_CPU_CHUNK = 500
    counters.clear()
    with warnings.catch_warnings(record=True) as reasons:
        kernel = rounding._compile(name, torch.device("cpu"))
    assert kernel, [str(each.message) for each in reasons]
    for seed, (shape, column) in enumerate(itertools.product([(64, 96), (37, 96), (128, 33), (1, 128)], (0, 7))):
        elements = LocalElements(9, row=5, column=column, width=shape[1], full_width=shape[1] + column)
        compiled, eager = (update(name, tensors_of(shape, seed), elements, each) for each in (kernel, None))
        assert all(map(torch.equal, compiled, eager))
    assert counters["stats"]["unique_graphs"] == 1  # of all shapes


def test_nothing_is_compiled_for_small_models_or_without_a_compiler(monkeypatch):
    model = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
    build = functools.partial(StochasticRounding.from_master, model, "bf16-stochastic", "adamw")
    tried = []
    monkeypatch.setattr(rounding.torch, "compile", lambda *_, **__: lambda *_: tried.append(1) or 1 / 0)
    assert build().kernel is None
    assert not tried
    monkeypatch.setattr(rounding, "MIN_COMPILED", 1)
    with pytest.warns(UserWarning, match=r"updates are not compiled, .* \(division by zero\)"):
        assert build().kernel is None  # the compiler failed
    assert tried
    assert StochasticRounding.from_master(model, "pure-bf16", "adamw") is None
