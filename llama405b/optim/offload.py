"""States in CPU memory, updated there under the next forward: the optimizer's alone, or all.

The norm is known when the backward ends; from there one thread updates the units in the order in which the next forward needs them, and a
hook before each unit's all-gather waits for that unit alone. Every update is the one that ``torch.optim.AdamW`` would make between the
steps, bit for bit. Updating during the backward, as others do, is not exact: clipping needs the norm of all gradients, so the update would
be a guess, to be taken back with a copy of weights and moments (12 bytes per parameter) wherever it was wrong.

With ``offload = optimizer`` BF16 weights stay on the device, and FP32 masters, moments and the sum of gradients live in CPU memory: no
weight crosses PCIe in the forward or the backward. FSDP2 hands over each unit's gradient in FP32, before it is cast to the weights' dtype:
4 bytes per parameter come down for each micro-batch, and 2 go up per step. Only the gradient sums, one slot for gradients to be added, and
one stage for weights are pinned.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from llama405b.distributed.host_memory import Arrived, Progress, allocate, copy, nothing, refused
from llama405b.model.llama import unwrapped
from llama405b.optim.adamw import (
    Settings,
    group_settings,
    master_pairs,
    nothing_to_keep,
    numbered,
    start_moments,
    state_tensors,
    trained,
    update_adamw,
)
from llama405b.optim.updater import (
    BeforeUpdate,
    Unit,
    UpdateWork,
    clip_factor,
    is_counted,
    local,
    norm_over_ranks,
    scale,
    squares,
)
from llama405b.parallel.fsdp import FsdpUnit, fsdp_units
from llama405b.settings.schema import Moments, Numerics

LONG_WAIT_S = 5.0
OnLongWait = Callable[[bool], None]  # told when a wait has become long, and when it is over
LAUNCHING_CORES = 2  # left to the threads that launch kernels and serve NCCL


@dataclasses.dataclass(slots=True)
class UnitState:
    """The parameters of one FSDP unit as they are kept, and what is pending for them."""

    name: str
    groups: list[tuple[int, list[nn.Parameter]]]  # parameter group of the optimizer -> parameters
    frozen: list[nn.Parameter]
    gathers: int  # of it, for each micro-batch
    sums: list[list[Tensor]] = dataclasses.field(default_factory=list)  # by group, of the micro-batches so far
    adding: "Future[list[float]] | None" = None  # of a gradient to them; returns the squares of the last one's sums
    pending: "Future[None] | None" = None

    @property
    def trained(self) -> list[list[nn.Parameter]]:
        """The parameters that are updated, by group."""
        return [parameters for _, parameters in self.groups]

    @property
    def all(self) -> list[list[nn.Parameter]]:
        """The same, and those that are not."""
        return [*self.trained, self.frozen]


@dataclasses.dataclass(frozen=True, slots=True)
class UpdateParams:
    """How all units are updated in one step, as it was when that began."""

    settings: Sequence[Settings]  # by parameter group
    factor: float  # of the gradients
    before_update: BeforeUpdate


class OffloadedAll:
    """Weights, gradients and moments in CPU memory (``offload = all``): FSDP copies weights and gradients itself."""

    def __init__(
        self,
        model: nn.Module,
        master: nn.Module,
        optimizer: torch.optim.AdamW,
        device: torch.device,
        on_long_wait: OnLongWait,
        *,
        overlap: bool = True,
        moments: Moments = "fp32",
        numerics: Numerics = "fp32-master",
    ) -> None:
        """Set up the moments, and put a hook before each unit of a model that FSDP2 has sharded.

        ``overlap``: return from a step while updates are pending. ``moments`` = fp32: in the dtype of the weights.
        """
        self.master = master
        self.optimizer = optimizer
        self.on_long_wait = on_long_wait
        self.overlap = overlap
        self.numbered = numbered(master, numerics)
        self.factor = 1.0
        self.done, self.told = UpdateWork(), UpdateWork()
        self.before_update: BeforeUpdate = nothing_to_keep
        self.last = True  # the gradients that come are the last of the step
        self.coming: UnitState | None = None  # whose gradient FSDP copies to the host
        group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        named = {unwrapped(name): p for name, p in master.named_parameters()}
        self.weights = {id(p): p for p in named.values()} | {id(p): weight for weight, p in master_pairs(model, master)}
        self.parts, self.hooks = [], []
        units, by_state = fsdp_units(model), dict[object, UnitState]()
        for unit in units:
            groups: dict[int, list[nn.Parameter]] = {}
            members = [named[unwrapped(name)] for name in unit.parameters]
            frozen = [parameter for parameter in members if not parameter.requires_grad]
            for parameter in members:
                if parameter.requires_grad:
                    groups.setdefault(group_of[id(parameter)], []).append(parameter)
            self.parts.append(part := UnitState(unit.name, sorted(groups.items()), frozen, unit.gathers))
            unit.modules[0].set_all_reduce_hook(functools.partial(self._reduced, part))
            by_state[fully_shard.state(unit.modules[0])] = part
        for unit, part in zip(units, self.parts, strict=True):
            ahead = fully_shard.state(unit.modules[0])._states_to_forward_prefetch
            before = functools.partial(self._before_forward, [part, *(by_state[state] for state in ahead)])
            self.hooks += [module.register_forward_pre_hook(before, prepend=True) for module in unit.modules]
        for parameter in trained(master).values():
            dtype = torch.bfloat16 if moments == "bf16" else parameter.dtype
            start_moments(optimizer, parameter, dtype)
        self.worker = ThreadPoolExecutor(1, "update", _begin, (device, torch.get_num_threads()))

    def expect(self, *, last: bool) -> None:
        """See ``Updater``: from the last gradients the norm is taken as they come."""
        self.last = last

    def accumulate(self) -> None:
        """Take what the backward left, see ``_reduced``: FSDP has waited for it."""
        self._take(nothing)

    def _reduced(self, part: UnitState, flat: Tensor) -> None:
        """Take the gradient of the unit before from FSDP, which copies it to the host now; this one's is still to be copied.

        Gradients are added in the order in which the next backward makes more, which waits for that: there are two sets at most.
        """
        arrived = nothing
        if flat.is_cuda:
            stream = torch.cuda.current_stream(flat.device)
            flat.record_stream(stream)  # whose copy FSDP does not keep its memory for
            arrived = stream.record_event().synchronize
        self._finish_adding(part)
        self._take(arrived)
        self.coming = part

    def _take(self, arrived: Arrived) -> None:
        """Take a gradient from the parameters, to be added by the worker: adding to them there would block on their copy."""
        part, self.coming = self.coming, None
        if part is None:
            return
        weights = [[self.weights[id(p)] for p in parameters] for _, parameters in part.groups]
        gradients = [[_taken(weight) for weight in group] for group in weights]
        self.done.down_bytes += _bytes(gradients)
        self.done.up_bytes += part.gathers * _bytes([map(local, group) for group in [*weights, part.frozen]])
        if part.sums:
            self._gather(part, arrived, lambda: _add(part.sums, gradients))
        else:
            self.wait_unit(part)
            part.sums = gradients
            self._gather(part, arrived, lambda: None)

    def _gather(self, part: UnitState, arrived: Arrived, add: Callable[[], None]) -> None:
        """Have the worker add a gradient to a unit's sums once it is there; after the last it takes their norm."""

        @torch.no_grad()
        def gather() -> list[float]:
            arrived()
            add()
            if not last:
                return []
            return squares(
                gradient
                for group, (_, parameters) in zip(sums, groups, strict=True)
                for gradient, parameter in zip(group, parameters, strict=True)
                if is_counted(parameter)
            )

        last, sums, groups = self.last, part.sums, part.groups
        part.adding = self.worker.submit(gather)

    def _finish_adding(self, part: UnitState) -> list[float]:
        adding, part.adding = part.adding, None
        self._finish(adding)
        return adding.result() if adding else []

    def clip(self, max_norm: float) -> float:
        """See ``Updater``; the worker scales each unit before it updates it."""
        gathered = [self._finish_adding(part) for part in self.parts]
        norm = norm_over_ranks(itertools.chain(*gathered), torch.device("cpu"))
        self.factor = clip_factor(norm, max_norm)
        return norm

    def update(self) -> None:
        """See ``Updater``: returns at once, unless nothing is to be hidden."""
        step = UpdateParams(group_settings(self.optimizer), self.factor, self.before_update)
        for part in self.parts:
            sums, part.sums = part.sums, []
            part.pending = self.worker.submit(self._update, part, sums, step)
        if not self.overlap:
            self.wait()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.sums = []

    def _before_forward(self, gathered: Sequence[UnitState], *_: object) -> None:
        for part in gathered:
            self.wait_unit(part)

    def wait_unit(self, part: UnitState) -> None:
        """Wait for what is pending for one unit."""
        self._finish(part.pending)
        part.pending = None

    def _finish(self, update: "Future[Any] | None") -> None:
        if update is None:
            return
        began = time.perf_counter()
        if not concurrent.futures.wait([update], LONG_WAIT_S).done:
            self.on_long_wait(True)
            concurrent.futures.wait([update])
            self.on_long_wait(False)
        self.done.exposed_s += time.perf_counter() - began
        update.result()

    def units(self) -> list[Unit]:
        return [
            Unit([t for members in part.trained for t in state_tensors(self.optimizer, members)], part.pending)
            for part in self.parts
        ]

    def wait(self) -> None:
        for part in self.parts:
            self.wait_unit(part)

    def sync_weights(self) -> None:
        for part in self.parts:
            self._sync_unit(part, part.all)

    @torch.no_grad()
    def _sync_unit(self, _: UnitState, changed: Iterable[Sequence[nn.Parameter]]) -> None:
        """Give the model some weights of a unit; FSDP gathers from those that are kept, but for what has masters."""
        for parameter in itertools.chain(*changed):
            if (weight := self.weights[id(parameter)]) is not parameter:
                local(weight).copy_(local(parameter))

    def work(self) -> UpdateWork:
        before, self.told = self.told, dataclasses.replace(self.done)
        return self.told - before

    @torch.no_grad()
    def _update(self, part: UnitState, sums: Sequence[Sequence[Tensor]], step: UpdateParams) -> None:
        began = time.perf_counter()
        for (group, parameters), gradients in zip(part.groups, sums, strict=True):
            scale(gradients, step.factor)
            changed = state_tensors(self.optimizer, parameters)
            step.before_update(changed)
            update_adamw(
                parameters,
                [self.optimizer.state[p] for p in parameters],
                gradients,
                step.settings[group],
                self.numbered,
            )
            written, scaled = [tensor for tensor in changed if tensor.dim()], step.factor != 1.0
            self.done.update_bytes += 2 * _bytes([written]) + (1 + 2 * scaled) * _bytes([gradients])
        self.done.update_s += time.perf_counter() - began
        self._sync_unit(part, part.trained)


def pin_for_gradients(model: nn.Module, sets: int, progress: Progress) -> None:
    """Leave torch the pinned blocks that ``sets`` of an offloaded model's gradients will take.

    FSDP would pin them in the first backwards.

    Raises:
        UserError: CUDA cannot pin that much.
    """
    weights = [local(parameter) for parameter in trained(model).values()]
    done, total = 0, sum(weight.nbytes for weight in weights) * sets
    blocks = []
    for weight in weights:
        try:
            blocks += [torch.empty_like(weight, pin_memory=True) for _ in range(sets)]  # freed together, when all exist
        except RuntimeError as error:
            raise refused(done, total, str(error).partition("\n")[0]) from None
        done += weight.nbytes * sets
        progress(done, total)


def _begin(device: torch.device, threads: int) -> None:
    """Set up the worker's thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # or freeing pinned memory would make a context on GPU 0
        threads = max(1, threads - LAUNCHING_CORES)
    torch.set_num_threads(threads)


def _taken(parameter: nn.Parameter) -> Tensor:
    """Take this rank's gradient from a parameter."""
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    return local(gradient)


def _add(sums: Sequence[Sequence[Tensor]], gradients: Sequence[Sequence[Tensor]]) -> None:
    for group, more in zip(sums, gradients, strict=True):
        torch._foreach_add_(list(group), list(more))


def _bytes(groups: Iterable[Iterable[Tensor]]) -> int:
    return sum(tensor.nbytes for group in groups for tensor in group)


@dataclasses.dataclass(slots=True)
class Member:
    """One parameter of a unit."""

    weight: nn.Parameter  # in the model, in BF16
    master: nn.Parameter
    begin: int  # of this rank's elements in the unit's flat gradient

    def of(self, flat: Tensor) -> Tensor:
        """Return this parameter's part of a flat tensor."""
        shape = local(self.master).shape
        return flat[self.begin : self.begin + shape.numel()].view(shape)


@dataclasses.dataclass(slots=True)
class Landing:
    """Where a unit's gradients come down, and its weights go up."""

    members: dict[int, Member]  # by the master's identity
    total: Tensor  # of the flat gradients of the micro-batches so far, in FP32 and with FSDP's padding
    sums: list[list[Tensor]]  # parts of it, by parameter group
    unchecked: int  # of those that are trained, whose place in the flat gradient has not been compared with FSDP's
    came: Arrived
    uploaded: Arrived


class OffloadedOptimizer(OffloadedAll):
    """See the module; the update itself is ``OffloadedAll``'s."""

    def __init__(
        self,
        model: nn.Module,
        master: nn.Module,
        optimizer: torch.optim.AdamW,
        device: torch.device,
        on_long_wait: OnLongWait,
        *,
        overlap: bool,
        moments: Moments,
        pinning: Progress,
    ) -> None:
        """Allocate what crosses PCIe, and have FSDP hand over the gradients.

        ``pinning`` hears of the progress; all else: see ``OffloadedAll``.
        """
        super().__init__(model, master, optimizer, device, on_long_wait, overlap=overlap, moments=moments)
        self.landings: dict[str, Landing] = {}
        self.adding: Future[list[float]] | None = None
        self.device, self.uploads = device, torch.cuda.Stream(device) if device.type == "cuda" else None
        weights, masters = ({unwrapped(name): p for name, p in module.named_parameters()} for module in (model, master))
        units = fsdp_units(model)
        laid_out = [_lay_out(unit, weights, masters) for unit in units]
        sizes, most = [numel for _, numel, _ in laid_out], max(whole for *_, whole in laid_out)
        *totals, slot, stage = allocate([4 * n for n in (*sizes, max(sizes))] + [2 * most], device, pinning)
        self.slot, self.stage = slot.view(torch.float32), stage.view(torch.bfloat16)
        self.staged: Arrived = nothing
        self.landed: tuple[Arrived, Arrived] = (nothing, nothing)  # of the last two units
        for part, unit, (members, *_), total in zip(self.parts, units, laid_out, totals, strict=True):
            flat = total.view(torch.float32)
            sums = [[members[id(master)].of(flat) for master in group] for group in part.trained]
            of_trained = [members[id(master)] for group in part.trained for master in group]
            self.landings[part.name] = Landing(members, flat, sums, len(of_trained), nothing, nothing)
            unit.modules[0].set_all_reduce_hook(functools.partial(self._land, part))
            for member in of_trained:
                member.weight.register_post_accumulate_grad_hook(functools.partial(self._drop, part, member))

    def accumulate(self) -> None:
        """The gradients came during the backward."""

    def _land(self, part: UnitState, flat: Tensor) -> None:
        """Take a unit's gradient, in FP32 and reduced, from FSDP."""
        landing = self.landings[part.name]
        if flat.dtype != torch.float32 or flat.numel() != landing.total.numel():
            raise RuntimeError(f"{part.name}: FSDP's gradient is {flat.dtype} of {flat.numel()}, not as expected")
        self.done.down_bytes += flat.nbytes
        stream = torch.cuda.current_stream(self.device) if flat.is_cuda else None
        if not part.sums:
            self.wait_unit(part)
            self.landed[0]()  # of the unit before the last one: or flat gradients would fill the device
            part.sums, landing.came = landing.sums, copy([(landing.total, flat)], stream)
            self.landed = (self.landed[1], landing.came)
            self._gather(part, landing.came, lambda: None)
            return
        if self.adding:
            self.adding.result()  # which frees the slot
        slot = self.slot[: flat.numel()]
        came = copy([(slot, flat)], stream)
        self._gather(part, came, lambda: landing.total.add_(slot))
        self.adding = part.adding

    def _drop(self, part: UnitState, member: Member, weight: nn.Parameter) -> None:
        """Drop the BF16 gradient that FSDP makes of the flat one; the first shows whether that was understood."""
        gradient, weight.grad = weight.grad, None
        landing = self.landings[part.name]
        if not landing.unchecked:
            return
        landing.unchecked -= 1
        landing.came()
        expected = member.of(landing.total).to(weight.dtype)
        if gradient is None or not torch.equal(local(gradient).cpu().nan_to_num(), expected.nan_to_num()):
            raise RuntimeError(
                f"{part.name}: FSDP's gradients are not laid out as expected; use --parallel.offload all"
            )

    def wait_unit(self, part: UnitState) -> None:
        """Wait for what is pending for one unit, until its weights are on the device."""
        super().wait_unit(part)
        began = time.perf_counter()
        self.landings[part.name].uploaded()
        self.done.exposed_s += time.perf_counter() - began

    def sync_weights(self) -> None:
        if self.uploads:  # what made the weights' memory may still be writing it
            self.uploads.wait_stream(torch.cuda.current_stream(self.device))
        super().sync_weights()
        self.wait()
        self.told = dataclasses.replace(self.done)  # no step's work

    @torch.no_grad()
    def _sync_unit(self, part: UnitState, changed: Iterable[Sequence[nn.Parameter]]) -> None:
        """Round some of a unit's masters to BF16, and begin to copy them to the device."""
        self.staged()  # the unit before
        landing = self.landings[part.name]
        pairs = []
        for member in (landing.members[id(master)] for master in itertools.chain(*changed)):
            staged = member.of(self.stage)
            staged.copy_(local(member.master))
            pairs.append((local(member.weight), staged))
            self.done.up_bytes += staged.nbytes
        self.staged = landing.uploaded = copy(pairs, self.uploads)


def _lay_out(
    unit: FsdpUnit, weights: Mapping[str, nn.Parameter], masters: Mapping[str, nn.Parameter]
) -> tuple[dict[int, Member], int, int]:
    """Return a unit's parameters, the length of its flat gradient, in which each begins at a multiple of the largest shard, and of all.

    Those that are frozen follow: they have no gradient.
    """
    sized = zip((unwrapped(each) for each in unit.parameters), unit.padded_sizes, strict=True)
    members, begin, of_gradient = {}, 0, 0
    for name, size in sorted(sized, key=lambda each: not masters[each[0]].requires_grad):
        members[id(masters[name])] = Member(weights[name], masters[name], begin)
        begin += size
        of_gradient += size * masters[name].requires_grad
    return members, of_gradient, begin
