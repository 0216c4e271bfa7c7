"""Update state in CPU memory during the next forward: optimizer state alone (``offload = optimizer``), or all state (``offload = all``).

The norm is known when the backward ends. From then on one worker thread updates the units in the order in which the next forward needs
them, and a hook before each unit's all-gather waits for that unit only. Every update is bit for bit the one that ``torch.optim.AdamW``
would make between the steps. Updating during the backward, as other programs do, is not exact: clipping needs the norm of all gradients,
so an early update is a guess, and undoing a wrong one needs a copy of weights and moments (12 bytes per parameter).

With ``offload = optimizer`` BF16 weights stay on the device; FP32 masters, moments and gradient sums are in CPU memory. No weight crosses
PCIe in the forward or the backward. FSDP2 hands over each unit's gradient in FP32, before the cast to the weights' dtype: 4 bytes per
parameter are copied to the host for each micro-batch, and 2 bytes per parameter to the device for each step. Pinned are only the gradient
sums, one slot for a gradient to be added, and one staging buffer for weights.
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
OnLongWait = Callable[[bool], None]  # called with True when a wait becomes long, and with False when it ends
LAUNCHING_CORES = 2  # for the threads that launch kernels and serve NCCL


@dataclasses.dataclass(slots=True)
class UnitState:
    """The stored parameters of one FSDP unit, and the work that is pending for them."""

    name: str
    groups: list[tuple[int, list[nn.Parameter]]]  # parameter group of the optimizer -> parameters
    frozen: list[nn.Parameter]
    gathers: int  # all-gathers of the unit in each micro-batch
    sums: list[list[Tensor]] = dataclasses.field(
        default_factory=list
    )  # gradient sums of the micro-batches so far, by group
    adding: "Future[list[float]] | None" = (
        None  # adds a gradient to the sums; after the last micro-batch returns sums of squares
    )
    pending: "Future[None] | None" = None

    @property
    def trained(self) -> list[list[nn.Parameter]]:
        """The trainable parameters, by group."""
        return [parameters for _, parameters in self.groups]

    @property
    def all(self) -> list[list[nn.Parameter]]:
        """The trainable parameters by group, and the frozen ones as one more group."""
        return [*self.trained, self.frozen]


@dataclasses.dataclass(frozen=True, slots=True)
class UpdateParams:
    """Parameters of one step's update for all units, captured when the update begins."""

    settings: Sequence[Settings]  # by parameter group
    factor: float  # of the gradients
    before_update: BeforeUpdate


class OffloadedAll:
    """Update weights, gradients and moments in CPU memory (``offload = all``); FSDP itself copies weights and gradients."""

    # Timeline of one step with CUDA. Threads: "main" trains, "backward" is the thread in which autograd runs FSDP's post-backward,
    # "update" is our single worker. Stream R is FSDP's reduce-scatter stream, stream A its all-reduce stream.
    #
    #  1. backward, for each unit u: FSDP reduce-scatters on R, has A wait for R, and calls the all-reduce hook with A as current stream.
    #  2. backward, hook of u: record event E on A. It follows the device-to-host copy of the previous unit p, which was queued on A.
    #     Wait for u's earlier add, take p's gradient from its parameters, and queue "wait for E, add p's gradient to p's sums" on update.
    #  3. backward: FSDP queues the copy of u's gradient to pinned memory on A (non-blocking, as the gradient of u is None by now).
    #  4. FSDP's final callback of the backward blocks on the copies that are left; then ``accumulate`` (main) queues the last unit's add.
    #     In the last micro-batch update also takes the sums of squares after each add.
    #  5. main, ``clip``: wait for the adds of all units; all-reduce the sums of squares; compute the clip factor.
    #  6. main, ``update``: queue one update for each unit in forward order; return at once (without ``overlap``: wait for all of them).
    #  7. update, for each unit: scale gradients, call ``before_update`` (a save may block here), AdamW, copy masters to weights if any.
    #  8. main, next forward, pre-forward hook of u (runs before FSDP's own): wait for the update of u and of the units that FSDP
    #     prefetches with it. Then FSDP copies the weights to the device and all-gathers them. No CUDA event guards this: the host waited.
    #
    # ``offload = optimizer`` (the subclass) differs:
    #  2. The hook itself queues the copy of the FP32 gradient on A and records an event after it; update waits for that event. In the first
    #     micro-batch the hook also waits for the download of the unit before the last. From the second micro-batch on, the copy goes to
    #     one shared slot, once update has added the gradient that was there.
    #  3. FSDP sets a BF16 gradient, which another hook discards.
    #  7. After AdamW, update waits until the previous unit has left the one staging buffer, rounds masters to BF16 into it, and queues
    #     their copy on the upload stream.
    #  8. main also waits for the event after that copy.

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
        """Create the moments, and hook into the units of a model that FSDP2 has sharded.

        ``overlap``: return from a step while updates are pending. ``moments`` = fp32: the dtype of the weights.
        """
        self.master = master
        self.optimizer = optimizer
        self.on_long_wait = on_long_wait
        self.overlap = overlap
        self.numbered = numbered(master, numerics)
        self.factor = 1.0
        self.done, self.told = UpdateWork(), UpdateWork()
        self.before_update: BeforeUpdate = nothing_to_keep
        self.last = True  # the current micro-batch is the last of the step
        self.coming: UnitState | None = None  # the unit whose gradient FSDP is copying to the host
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
        """See ``Updater``: in the last micro-batch the norm is computed as gradients arrive."""
        self.last = last

    def accumulate(self) -> None:
        """Take what the backward left, see ``_reduced``: its copies are finished."""
        self._take(nothing)

    def _reduced(self, part: UnitState, flat: Tensor) -> None:
        """Collect the previous unit's gradient, whose copy to the host is in flight; this unit's has not started.

        Adds run in the order in which the next backward makes gradients, and that backward waits for them: at most two sets exist.
        """
        arrived = nothing
        if flat.is_cuda:
            stream = torch.cuda.current_stream(flat.device)
            flat.record_stream(stream)  # FSDP does not keep this memory alive until its copy is done
            arrived = stream.record_event().synchronize
        self._finish_adding(part)
        self._take(arrived)
        self.coming = part

    def _take(self, arrived: Arrived) -> None:
        """Move a gradient from the parameters to the worker, which adds it: left in place, FSDP would block on its copy to add to it."""
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
        """Have the worker add a gradient to a unit's sums once it has arrived; after the last one, compute sums of squares."""

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
        """See ``Updater``; the worker scales the gradients of each unit just before its update."""
        gathered = [self._finish_adding(part) for part in self.parts]
        norm = norm_over_ranks(itertools.chain(*gathered), torch.device("cpu"))
        self.factor = clip_factor(norm, max_norm)
        return norm

    def update(self) -> None:
        """See ``Updater``: queue the updates; return immediately if updates overlap with the forward."""
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
        """Wait for the pending update of one unit."""
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
        """Copy masters to the weights that have one; FSDP gathers all other weights from the stored ones."""
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

    Otherwise FSDP would pin them during the first backward passes.

    Raises:
        UserError: CUDA cannot pin that much.
    """
    weights = [local(parameter) for parameter in trained(model).values()]
    done, total = 0, sum(weight.nbytes for weight in weights) * sets
    blocks = []
    for weight in weights:
        try:
            blocks += [
                torch.empty_like(weight, pin_memory=True) for _ in range(sets)
            ]  # freed together, so torch caches all
        except RuntimeError as error:
            raise refused(done, total, str(error).partition("\n")[0]) from None
        done += weight.nbytes * sets
        progress(done, total)


def _begin(device: torch.device, threads: int) -> None:
    """Initialize the worker thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # otherwise freeing pinned memory would create a context on GPU 0
        threads = max(1, threads - LAUNCHING_CORES)
    torch.set_num_threads(threads)


def _taken(parameter: nn.Parameter) -> Tensor:
    """Return the local gradient of a parameter, and set its ``grad`` to None."""
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
    begin: int  # offset of its local elements in the unit's flat gradient

    def of(self, flat: Tensor) -> Tensor:
        """Return the view of this parameter in a flat tensor."""
        shape = local(self.master).shape
        return flat[self.begin : self.begin + shape.numel()].view(shape)


@dataclasses.dataclass(slots=True)
class Landing:
    """Pinned buffer for the gradients of a unit, and the state of its copies from and to the device."""

    members: dict[int, Member]  # by ``id(master)``
    total: Tensor  # sum of the flat gradients so far, in FP32 with FSDP's padding
    sums: list[list[Tensor]]  # views of the flat sum, by parameter group
    unchecked: int  # trainable parameters whose offset has not yet been compared with FSDP's
    came: Arrived
    uploaded: Arrived


class OffloadedOptimizer(OffloadedAll):
    """Update optimizer state in CPU memory (``offload = optimizer``); the update itself is ``OffloadedAll``'s."""

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
        """Allocate the pinned buffers, and have FSDP hand over the gradients.

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
        self.landed: tuple[Arrived, Arrived] = (nothing, nothing)  # downloads of the last two units
        for part, unit, (members, *_), total in zip(self.parts, units, laid_out, totals, strict=True):
            flat = total.view(torch.float32)
            sums = [[members[id(master)].of(flat) for master in group] for group in part.trained]
            of_trained = [members[id(master)] for group in part.trained for master in group]
            self.landings[part.name] = Landing(members, flat, sums, len(of_trained), nothing, nothing)
            unit.modules[0].set_all_reduce_hook(functools.partial(self._land, part))
            for member in of_trained:
                member.weight.register_post_accumulate_grad_hook(functools.partial(self._drop, part, member))

    def accumulate(self) -> None:
        """Do nothing: gradients were taken during the backward."""

    def _land(self, part: UnitState, flat: Tensor) -> None:
        """Copy a unit's reduced FP32 gradient from FSDP to the host."""
        landing = self.landings[part.name]
        if flat.dtype != torch.float32 or flat.numel() != landing.total.numel():
            raise RuntimeError(f"{part.name}: FSDP's gradient is {flat.dtype} of {flat.numel()}, not as expected")
        self.done.down_bytes += flat.nbytes
        stream = torch.cuda.current_stream(self.device) if flat.is_cuda else None
        if not part.sums:
            self.wait_unit(part)
            self.landed[0]()  # of the unit before the last: bounds the flat gradients that are alive on the device
            part.sums, landing.came = landing.sums, copy([(landing.total, flat)], stream)
            self.landed = (self.landed[1], landing.came)
            self._gather(part, landing.came, lambda: None)
            return
        if self.adding:
            self.adding.result()  # the slot is then free
        slot = self.slot[: flat.numel()]
        came = copy([(slot, flat)], stream)
        self._gather(part, came, lambda: landing.total.add_(slot))
        self.adding = part.adding

    def _drop(self, part: UnitState, member: Member, weight: nn.Parameter) -> None:
        """Discard the BF16 gradient that FSDP makes; on first use compare it with the flat one, to verify the offsets."""
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
        """Wait until one unit is updated and its weights are on the device."""
        super().wait_unit(part)
        began = time.perf_counter()
        self.landings[part.name].uploaded()
        self.done.exposed_s += time.perf_counter() - began

    def sync_weights(self) -> None:
        if self.uploads:  # kernels on the current stream may still be writing to this memory
            self.uploads.wait_stream(torch.cuda.current_stream(self.device))
        super().sync_weights()
        self.wait()
        self.told = dataclasses.replace(self.done)  # this belongs to no step

    @torch.no_grad()
    def _sync_unit(self, part: UnitState, changed: Iterable[Sequence[nn.Parameter]]) -> None:
        """Round masters of a unit to BF16, and start to copy them to the device."""
        self.staged()  # until the previous unit has left the staging buffer
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
    """Return a unit's parameters with their offsets, the length of its flat gradient, and the length with frozen parameters.

    Each parameter takes the padded size of its largest shard. Frozen parameters come last, as they have no gradient.
    """
    sized = zip((unwrapped(each) for each in unit.parameters), unit.padded_sizes, strict=True)
    members, begin, of_gradient = {}, 0, 0
    for name, size in sorted(sized, key=lambda each: not masters[each[0]].requires_grad):
        members[id(masters[name])] = Member(weights[name], masters[name], begin)
        begin += size
        of_gradient += size * masters[name].requires_grad
    return members, of_gradient, begin
