"""Updates with stochastic rounding to BF16, in one kernel for each parameter where torch.compile works.

Stochastic rounding goes up or down with probabilities that preserve the mean, so that updates below BF16's resolution are not lost. The
random bits are a hash of the tensor's name, the element's index in the full tensor, and the step. An element is therefore rounded the
same way on any number of ranks and after a resume. Each operation of an update rounds once and none is fused with another, so compiled
and eager updates have the same bits on CPUs; on a GPU, Triton may fuse them.

Shape suffixes: R rows of a rank's shard, W elements in each.
"""

import dataclasses
import functools
import math
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llama405b.distributed import collectives
from llama405b.model.llama import compile_unsupported_reason, strip_wrappers
from llama405b.optim.updater import GroupParams, State, local_tensor
from llama405b.settings.choices import OPTIMIZERS, OptimizerName
from llama405b.settings.schema import Numerics

DROPPED_BITS = 0xFFFF  # mantissa bits of FP32 that BF16 drops
GOLDEN = -1640531527  # 2^32 over the golden ratio, as an int32
MIN_COMPILED = 1 << 24  # parameters of a model, below which compiling takes longer than it saves
EAGER_CPU_CHUNK, EAGER_GPU_CHUNK = 1 << 16, 1 << 22  # elements at a time if not compiled; a CPU's caches hold so many


@dataclasses.dataclass(frozen=True, slots=True)
class LocalElements:
    """The elements of a full tensor that this rank has: a range of rows and, of each row, a range of columns."""

    key: int  # identifies the tensor: 32 bits of its name
    row: int = 0
    column: int = 0
    width: int = 1  # elements in a row of the local shard
    full_width: int = 1  # elements in a row of the full tensor

    @classmethod
    def from_parameter(cls, name: str, parameter: nn.Parameter) -> "LocalElements":
        """Return the elements of a parameter that this rank has; ``name`` is its name in the checkpoint."""
        shape, begin = tuple(parameter.shape), (0,) * parameter.dim()
        local_shape = shape
        if isinstance(parameter, DTensor):
            local_shape, begin = compute_local_shape_and_global_offset(
                shape, parameter.device_mesh, parameter.placements
            )
        column = begin[1] if len(shape) > 1 else 0
        return cls(zlib.crc32(name.encode()), begin[0], column, math.prod(local_shape[1:]), math.prod(shape[1:]))

    def rows(self, tensor: Tensor) -> Tensor:
        """Return a shard as (R, W); a vector is one row."""
        return tensor.reshape(1, -1) if self.width == self.full_width == 1 else tensor.reshape(-1, self.width)

    def seeds(self, n_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the index in the full tensor of each row's first element, (R, 1), as int32 that may wrap around; and the key."""
        rows_R = torch.arange(self.row, self.row + n_rows, device=device)
        starts_R = (rows_R * self.full_width + self.column).to(torch.int32)
        return starts_R[:, None], torch.full((), _to_int32(self.key), dtype=torch.int32, device=device)


@dataclasses.dataclass(frozen=True, slots=True)
class StochasticRounding:
    """Updates the BF16 parameters of a model in FP32, and rounds weights and moments stochastically."""

    name: OptimizerName
    elements: Mapping[int, LocalElements]  # by ``id(parameter)``
    kernel: Callable[..., None] | None  # the compiled ``_update_chunk``; None: it stays eager
    seeds: dict[int, tuple[Tensor, Tensor]] = dataclasses.field(default_factory=dict)  # by ``id(parameter)``

    @classmethod
    def from_master(cls, master: nn.Module, numerics: Numerics, name: OptimizerName) -> "StochasticRounding | None":
        """Build the update of a master, alike on all ranks; None unless ``numerics`` is bf16-stochastic."""
        if numerics != "bf16-stochastic":
            return None
        parameters = {
            strip_wrappers(key): p
            for key, p in master.named_parameters()
            if p.dtype == torch.bfloat16 and p.requires_grad
        }
        elements = {id(p): LocalElements.from_parameter(key, p) for key, p in parameters.items()}
        kernel = None
        if sum(parameter.numel() for parameter in parameters.values()) >= MIN_COMPILED:
            kernel = _compile(name, local_tensor(next(iter(parameters.values()))).device)
            if dist.is_initialized() and not all(collectives.all_gather_objects(kernel is not None)):
                kernel = None
        return cls(name, elements, kernel)

    def update(
        self,
        parameters: Sequence[nn.Parameter],
        states: Sequence[State],
        gradients: Sequence[Tensor],
        params: GroupParams,
    ) -> None:
        """Update parameters of ``elements``, whose step counts are alike."""
        formula, make_constants = FORMULAS[self.name]
        steps = [state["step"] for state in states]
        constants, step_hash = make_constants(params, steps[0]).float(), _hash_bits(steps[0].to(torch.int32))
        for parameter, state, gradient in zip(parameters, states, gradients, strict=True):
            if not gradient.numel():
                continue
            own = self.elements[id(parameter)]
            tensors = (local_tensor(parameter), *(local_tensor(state[name]) for name in OPTIMIZERS[self.name].moments))
            gradient_RW, *tensors_RW = map(own.rows, (gradient, *tensors))
            n_rows, width = gradient_RW.shape
            if id(parameter) not in self.seeds:
                self.seeds[id(parameter)] = own.seeds(n_rows, gradient.device)
            starts_R1, key = self.seeds[id(parameter)]
            if self.kernel and min(n_rows, width) > 1:  # torch compiles anew for dimensions of 1
                self.kernel(tensors_RW, gradient_RW, constants, starts_R1, key, step_hash)
                continue
            n_chunk = max(1, (EAGER_GPU_CHUNK if gradient.is_cuda else EAGER_CPU_CHUNK) // width)
            chunks = (tensor.split(n_chunk) for tensor in (starts_R1, gradient_RW, *tensors_RW))
            for starts, gradient_chunk, *tensor_chunks in zip(*chunks, strict=True):
                _update_chunk(formula, tensor_chunks, gradient_chunk, constants, starts, key, step_hash)
        torch._foreach_add_(steps, 1)


def _compile(name: OptimizerName, device: torch.device) -> Callable[..., None] | None:
    """Compile an update, and try it; None if that fails. In the main thread: updates may run in another one, beside a forward."""
    if reason := compile_unsupported_reason(device):
        _warn_of_eager_updates(reason)
        return None
    formula, make_constants = FORMULAS[name]
    kernel = torch.compile(functools.partial(_update_chunk, formula), fullgraph=True, dynamic=True)
    step = torch.zeros((), device=device)
    tensors = [torch.zeros(4, 8, dtype=torch.bfloat16, device=device) for _ in range(2 + len(OPTIMIZERS[name].moments))]
    params = {"lr": 0.0, "betas": (0.9, 0.9), "eps": 1.0, "weight_decay": 0.0}
    starts_R1, key = LocalElements(0, width=8, full_width=8).seeds(4, device)
    try:
        with torch.no_grad():
            kernel(
                tensors[1:],
                tensors[0],
                make_constants(params, step).float(),
                starts_R1,
                key,
                _hash_bits(step.to(torch.int32)),
            )
    except Exception as error:  # noqa: BLE001 - a compiler may raise any exception
        _warn_of_eager_updates(" ".join(str(error).split())[:200])
        return None
    return kernel


def _warn_of_eager_updates(reason: str) -> None:
    warnings.warn(
        f"bf16-stochastic: updates are not compiled, so each takes about six times as long ({reason})", stacklevel=2
    )


def _update_chunk(
    formula: "Formula",
    tensors_RW: Sequence[Tensor],
    gradient_RW: Tensor,
    constants: Tensor,
    starts_R1: Tensor,
    key: Tensor,
    step_hash: Tensor,
) -> None:
    results_RW = formula([tensor.float() for tensor in tensors_RW], gradient_RW.float(), constants)
    columns_W = torch.arange(gradient_RW.shape[1], dtype=torch.int32, device=gradient_RW.device)
    bits_RW = _hash_bits(_hash_bits((starts_R1 + columns_W) ^ key) ^ step_hash)
    for index, (tensor_RW, result_RW) in enumerate(zip(tensors_RW, results_RW, strict=True)):
        bits_RW = _hash_bits(bits_RW + GOLDEN) if index else bits_RW
        tensor_RW.copy_(round_stochastically(result_RW, bits_RW))


def round_stochastically(fp32: Tensor, bits: Tensor) -> Tensor:
    """Round FP32 values to ones that BF16 has, by the low 16 of 32 random bits."""
    return ((fp32.view(torch.int32) + (bits & DROPPED_BITS)) & ~DROPPED_BITS).view(torch.float32)


def _hash_bits(x: Tensor) -> Tensor:
    """Mix 32 bits (Wellons' lowbias32: shifts by 16, 15, 16 and two products)."""
    # PyTorch shifts int32 arithmetically, so the masks clear the copies of the sign bit.
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _to_int32(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _to_int32(number: int) -> int:
    """Return the low 32 bits of a number as a signed int32."""
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >= 1 << 31 else number


Formula = Callable[
    [Sequence[Tensor], Tensor, Tensor], Sequence[Tensor]
]  # weight and moments, gradient, constants -> the new ones


def _adamw_constants(params: GroupParams, step: Tensor) -> Tensor:
    beta1, beta2 = params["betas"]
    lr, count = params["lr"], step.double() + 1
    known = [1 - lr * params["weight_decay"], 1 - beta1, beta2, 1 - beta2, params["eps"]]
    # Filled one by one: a tensor made of a list would wait for the device.
    constants = [torch.full_like(count, value) for value in known]
    return torch.stack([*constants, lr / (1 - beta1**count), (1 - beta2**count).rsqrt()])


def _adamw(tensors: Sequence[Tensor], gradient: Tensor, constants: Tensor) -> Sequence[Tensor]:
    """AdamW (arXiv 1711.05101)."""
    weight, first, second = tensors
    decay, rest1, beta2, rest2, eps, step_size, correction2 = constants.unbind()  # factors: a division takes longer
    first = first + rest1 * (gradient - first)
    second = second * beta2 + rest2 * gradient * gradient
    return weight * decay - step_size * first / (second.sqrt() * correction2 + eps), first, second


def _lion_constants(params: GroupParams, step: Tensor) -> Tensor:
    beta1, beta2 = params["betas"]
    known = [1 - params["lr"] * params["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2, params["lr"]]
    return torch.stack([torch.full_like(step, value, dtype=torch.float64) for value in known])


def _lion(tensors: Sequence[Tensor], gradient: Tensor, constants: Tensor) -> Sequence[Tensor]:
    """Lion (arXiv 2302.06675)."""
    weight, average = tensors
    decay, beta1, rest1, beta2, rest2, lr = constants.unbind()
    sign = (average * beta1 + gradient * rest1).sign()
    return weight * decay - sign * lr, average * beta2 + gradient * rest2


FORMULAS: dict[OptimizerName, tuple[Formula, Callable[[GroupParams, Tensor], Tensor]]] = {
    "adamw": (_adamw, _adamw_constants),
    "lion": (_lion, _lion_constants),
}
