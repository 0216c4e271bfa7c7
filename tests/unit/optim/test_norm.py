"""The norm of gradients: exact, in whatever order and pieces, and by few kernels."""

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llama405b.optim.updater import ROW_ELEMENTS, square_sums

VIEWS = {f"aten::{name}" for name in ("view", "slice", "split", "_unsafe_view", "alias", "detach")}


class Kernels(TorchDispatchMode):
    """Counts what is called."""

    def __init__(self):
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += func.name().partition(".")[0] not in VIEWS
        return func(*args, **(kwargs or {}))


def test_each_tensor_costs_two_kernels_and_all_of_them_few_more():
    for count in (10, 100):
        tensors = [torch.ones(3 * ROW_ELEMENTS + 5) for _ in range(count)]
        with Kernels() as kernels:
            assert round(math.fsum(square_sums(tensors))) == count * (3 * ROW_ELEMENTS + 5)
        assert kernels.n <= 4 * count + 8  # of rows and what is left, and joined, which a GPU need not


def test_it_is_that_of_fp64_whatever_the_size_the_order_and_the_dtype():
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(size, generator=generator)
        for size in (1, ROW_ELEMENTS - 1, ROW_ELEMENTS, 5 * ROW_ELEMENTS + 3, 2_000_000)
    ]
    exact = math.fsum(float(tensor.double().square().sum()) for tensor in tensors)
    assert math.fsum(square_sums(tensors)) == math.fsum(square_sums(tensors[::-1]))
    assert abs(math.fsum(square_sums(tensors)) - exact) < 1e-7 * exact
    rounded = [tensor.bfloat16() for tensor in tensors]
    exact = math.fsum(float(tensor.double().square().sum()) for tensor in rounded)
    assert abs(math.fsum(square_sums(rounded)) - exact) < 2e-6 * exact
    assert square_sums([]) == square_sums([torch.empty(0)]) == []
