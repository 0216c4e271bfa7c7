"""Who updates the weights once the gradients are there: AdamW at once, or hidden under the next forward.

``Hidden`` is for weights, gradients and moments in CPU memory (``parallel.cpu_offload``). The norm is known when the
backward ends; from there one thread updates the units in the order in which the next forward needs them, and a hook before
each unit's all-gather waits for that unit alone. Every update is the one that ``Sequential`` would make, bit for bit.

Updating during the backward, as others do, is not exact: clipping needs the norm of all gradients, so the update would be
a guess, to be taken back with a copy of weights and moments (12 bytes per parameter) wherever it was wrong.
"""

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim.adamw import adamw

from llama405b.contract.schema import Optimizer, Parallel
from llama405b.optim.adamw import build_optimizer
from llama405b.optim.norm import clip_factor, local, norm_over_ranks, scale
from llama405b.parallel.fsdp2 import fsdp_units
from llama405b.step import Updater, UpdateTimes

LONG_WAIT_S = 5.0
Waits = Callable[[bool], None]  # told when a wait has become long, and when it is over
LAUNCHING_CORES = 2  # left to the threads that launch kernels and serve NCCL


def build_updater(
    model: nn.Module, config: Optimizer, parallel: Parallel, device: torch.device, waits: Waits = lambda _: None
) -> Updater:
    """Build fused AdamW, hidden under the forward where ``parallel`` says so; ``waits`` hears of long waits for it."""
    optimizer = build_optimizer(model, config)
    if parallel.hides_update:
        return Hidden(model, optimizer, device, waits)
    return Sequential(model, optimizer, reuses_gradients=parallel.reuses_gradients)


class Sequential:
    """``torch.optim.AdamW`` between the backward and the next forward."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.AdamW, *, reuses_gradients: bool = False) -> None:
        self.model, self.optimizer, self.reuses_gradients = model, optimizer, reuses_gradients

    def collect(self) -> None:
        """Gradients add up where they are."""

    def clip(self, max_norm: float) -> float:
        """See ``Updater``."""
        if isinstance(self.model, FullyShardedDataParallel):  # its gradients are pieces of flat ones
            return float(self.model.clip_grad_norm_(max_norm or torch.inf))
        gradients = [local(p.grad) for p in self.model.parameters() if p.grad is not None]
        norm = norm_over_ranks(gradients)
        scale(gradients, clip_factor(norm, max_norm))
        return norm

    def update(self) -> None:
        """See ``Updater``."""
        self.optimizer.step()
        self.zero()

    def zero(self) -> None:
        """See ``Updater``."""
        self.optimizer.zero_grad(set_to_none=not self.reuses_gradients)

    def drain(self) -> None:
        """Nothing is ever pending."""

    def times(self) -> UpdateTimes:
        """Nothing is hidden."""
        return UpdateTimes()


@dataclasses.dataclass(slots=True)
class Part:
    """The parameters of one FSDP unit, and its update that is pending."""

    name: str
    groups: list[tuple[int, list[nn.Parameter]]]  # parameter group of the optimizer -> parameters
    sums: list[list[Tensor]] = dataclasses.field(default_factory=list)  # by group, of the micro-batches so far
    adding: "Future[None] | None" = None
    pending: "Future[None] | None" = None


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """How a parameter group is updated in one step: the optimizer's may change before that has happened."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    eps: float


class Hidden:
    """AdamW on the CPU, under the next forward."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.AdamW, device: torch.device, waits: Waits) -> None:
        """Set up the moments, and put a hook before each unit of a model that FSDP2 has sharded."""
        self.optimizer, self.waits, self.factor = optimizer, waits, 1.0
        self.busy_s, self.exposed_s, self.told = 0.0, 0.0, (0.0, 0.0)
        group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        named = dict(model.named_parameters())
        self.parts, self.hooks = [], []
        for unit in fsdp_units(model):
            groups: dict[int, list[nn.Parameter]] = {}
            for name in unit.parameters:
                groups.setdefault(group_of[id(named[name])], []).append(named[name])
            self.parts.append(part := Part(unit.name, sorted(groups.items())))
            before = functools.partial(self._before_forward, part)
            self.hooks += [module.register_forward_pre_hook(before, prepend=True) for module in unit.modules]
        for parameter in named.values():
            start_moments(optimizer, parameter)
        self.worker = ThreadPoolExecutor(1, "update", _begin, (device, torch.get_num_threads()))

    def collect(self) -> None:
        """Take the gradients of a micro-batch from the parameters: adding to them there would block on their copy.

        Raises:
            Exception: An update failed; the worker's own.
        """
        for part in self.parts:
            gradients = [[_taken(p) for p in parameters] for _, parameters in part.groups]
            if part.sums:
                self._finish(part.adding)  # or a slow worker would leave more and more gradients waiting
                part.adding = self.worker.submit(self._timed, _add, part.sums, gradients)
            else:
                self.wait(part)
                part.sums = gradients

    def clip(self, max_norm: float) -> float:
        """See ``Updater``; the worker scales each unit before it updates it."""
        for part in self.parts:
            self._finish(part.adding)
            part.adding = None
        began = time.perf_counter()
        norm = norm_over_ranks([gradient for part in self.parts for group in part.sums for gradient in group])
        self.factor = clip_factor(norm, max_norm)
        self.exposed_s += time.perf_counter() - began
        return norm

    def update(self) -> None:
        """See ``Updater``: returns at once."""
        settings = [
            Settings(group["lr"], group["betas"], group["weight_decay"], group["eps"])
            for group in self.optimizer.param_groups
        ]
        for part in self.parts:
            sums, part.sums = part.sums, []
            part.pending = self.worker.submit(self._timed, self._update, part, sums, settings, self.factor)

    def zero(self) -> None:
        """See ``Updater``."""
        for part in self.parts:
            part.sums = []

    def _before_forward(self, part: Part, *_: object) -> None:
        self.wait(part)

    def wait(self, part: Part) -> None:
        """Wait for what is pending for one unit.

        Raises:
            Exception: It failed; the worker's own.
        """
        self._finish(part.pending)
        part.pending = None

    def _finish(self, update: "Future[None] | None") -> None:
        if update is None:
            return
        began = time.perf_counter()
        if not concurrent.futures.wait([update], LONG_WAIT_S).done:
            self.waits(True)
            concurrent.futures.wait([update])
            self.waits(False)
        self.exposed_s += time.perf_counter() - began
        update.result()

    def drain(self) -> None:
        """See ``Updater``."""
        for part in self.parts:
            self.wait(part)

    def times(self) -> UpdateTimes:
        """See ``Updater``."""
        (busy_s, exposed_s), self.told = self.told, (self.busy_s, self.exposed_s)
        return UpdateTimes(self.told[0] - busy_s, self.told[1] - exposed_s)

    @torch.no_grad()
    def _timed(self, act: Callable[..., None], *args: Any) -> None:
        began = time.perf_counter()
        act(*args)
        self.busy_s += time.perf_counter() - began

    def _update(
        self, part: Part, sums: Sequence[Sequence[Tensor]], settings: Sequence[Settings], factor: float
    ) -> None:
        for (group, parameters), gradients in zip(part.groups, sums, strict=True):
            scale(gradients, factor)
            update_adamw([(p, self.optimizer.state[p]) for p in parameters], gradients, settings[group])


def _begin(device: torch.device, threads: int) -> None:
    """Set up the worker's thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # or freeing pinned memory would make a context on GPU 0
        threads = max(1, threads - LAUNCHING_CORES)
    torch.set_num_threads(threads)


def start_moments(optimizer: torch.optim.AdamW, parameter: nn.Parameter) -> None:
    """Set the moments of a parameter to zero, as AdamW does in its first step."""
    optimizer.state[parameter] = {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def update_adamw(
    states: Sequence[tuple[nn.Parameter, dict[str, Tensor]]], gradients: Sequence[Tensor], settings: Settings
) -> None:
    """Update this rank's parts of parameters with torch's fused AdamW, and without DTensor's dispatch."""
    adamw(
        [local(parameter) for parameter, _ in states],
        list(gradients),
        *([local(state[name]) for _, state in states] for name in ("exp_avg", "exp_avg_sq")),
        [],
        [state["step"] for _, state in states],
        fused=True,
        amsgrad=False,
        beta1=settings.betas[0],
        beta2=settings.betas[1],
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        maximize=False,
    )


def _taken(parameter: nn.Parameter) -> Tensor:
    """Take this rank's gradient from a parameter."""
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    return local(gradient)


def _add(sums: Sequence[Sequence[Tensor]], gradients: Sequence[Sequence[Tensor]]) -> None:
    for group, more in zip(sums, gradients, strict=True):
        torch._foreach_add_(list(group), list(more))
