"""Rounding to BF16 by the numbers of elements: to one of two neighbors, right in the mean, alike however a tensor is cut."""

import pytest
import torch

from llama405b.optim.optimizer import LocalElements, RoundingNoise


def rounded(wide_C, elements=None, step=3, first=0):
    elements = elements or LocalElements(77, full_width=len(wide_C), width=len(wide_C))
    to_C = torch.empty(len(wide_C), dtype=torch.bfloat16)
    RoundingNoise(elements, first, first + len(wide_C), torch.tensor(float(step))).round_(to_C, wide_C)
    return to_C


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


def test_each_call_uses_other_bits():
    wide_C, dice = torch.full((1 << 16,), 1.001), RoundingNoise(LocalElements(1), 0, 1 << 16, torch.tensor(1.0))
    found = [torch.empty(1 << 16, dtype=torch.bfloat16) for _ in range(3)]
    for each in found:
        dice.round_(each, wide_C)
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def test_parts_of_a_tensor_are_rounded_as_the_whole():
    wide_RC = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    whole_RC = rounded(wide_RC.flatten(), LocalElements(5, full_width=10, width=10)).view(6, 10)
    for rows, columns in ((slice(2, 5), slice(0, 10)), (slice(0, 6), slice(4, 7)), (slice(3, 6), slice(7, 10))):
        own = wide_RC[rows, columns].reshape(-1)
        elements = LocalElements(5, rows.start, columns.start, columns.stop - columns.start, 10)
        parts = torch.cat([rounded(own[at : at + 4], elements, first=at) for at in range(0, len(own), 4)])
        assert torch.equal(parts, whole_RC[rows, columns].reshape(-1))
