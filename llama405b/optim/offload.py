"""Update state in CPU memory during the next forward: optimizer state alone (``offload = optimizer``), or all state (``offload = all``).

The norm is known when the backward ends. From then on one worker thread updates the units in the order in which the next forward needs
them, and a hook before each unit's all-gather waits for that unit only. Every update is bit for bit the one that would be made between
the steps. Updating during the backward, as other programs do, is not exact: clipping needs the norm of all gradients,
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

from llama405b.distributed.host_memory import (
    OnByteProgress,
    WaitForCopy,
    allocate_blocks,
    async_copy,
    no_wait,
    pinning_error,
)
from llama405b.model.llama import strip_wrappers
from llama405b.optim.optimizer import (
    group_params,
    ignore_update,
    init_moments,
    master_pairs,
    optimizer_name,
    trainable_parameters,
    update_group,
)
from llama405b.optim.rounding import StochasticRounding
from llama405b.optim.updater import (
    BeforeUpdate,
    GroupParams,
    UpdateUnit,
    UpdateWork,
    clip_factor,
    is_first_replica,
    local_tensor,
    norm_over_ranks,
    scale_gradients,
    square_sums,
    state_tensors,
)
from llama405b.parallel.fsdp import FsdpUnit, fsdp_units
from llama405b.parallel.fsdp_internals import forward_prefetched
from llama405b.settings.schema import Moments, Numerics

LONG_WAIT_S = 5.0
OnLongWait = Callable[[bool], None]  # called with True when a wait becomes long, and with False when it ends
RESERVED_CORES = 2  # for the threads that launch kernels and serve NCCL


@dataclasses.dataclass(slots=True)
class UnitState:
    """The stored parameters of one FSDP unit, and the work that is pending for them."""

    name: str
    groups: list[tuple[int, list[nn.Parameter]]]  # parameter group of the optimizer -> parameters
    frozen: list[nn.Parameter]
    n_gathers: int  # all-gathers of the unit in each micro-batch
    sums: list[list[Tensor]] = dataclasses.field(
        default_factory=list
    )  # gradient sums of the micro-batches so far, by group
    pending_add: "Future[list[float]] | None" = (
        None  # adds a gradient to the sums; after the last micro-batch returns sums of squares
    )
    pending_update: "Future[None] | None" = None

    @property
    def trained_groups(self) -> list[list[nn.Parameter]]:
        """The trainable parameters, by group."""
        return [parameters for _, parameters in self.groups]

    @property
    def all_groups(self) -> list[list[nn.Parameter]]:
        """The trainable parameters by group, and the frozen ones as one more group."""
        return [*self.trained_groups, self.frozen]


@dataclasses.dataclass(frozen=True, slots=True)
class UpdateParams:
    """Parameters of one step's update for all units, captured when the update begins."""

    group_params: Sequence[GroupParams]  # by parameter group
    factor: float  # of the gradients
    before_update: BeforeUpdate


class HostUpdater:
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
    #  7. update, for each unit: scale gradients, call ``before_update`` (a save may block here), update, copy masters to weights if any.
    #  8. main, next forward, pre-forward hook of u (runs before FSDP's own): wait for the update of u and of the units that FSDP
    #     prefetches with it. Then FSDP copies the weights to the device and all-gathers them. No CUDA event guards this: the host waited.
    #
    # ``offload = optimizer`` (the subclass) differs:
    #  2. The hook itself queues the copy of the FP32 gradient on A and records an event after it; update waits for that event. In the first
    #     micro-batch the hook also waits for the download of the unit before the last. From the second micro-batch on, the copy goes to
    #     one shared slot, once update has added the gradient that was there.
    #  3. FSDP sets a BF16 gradient, which another hook discards.
    #  7. After that, the worker waits until the previous unit has left the one staging buffer, rounds masters to BF16 into it, and queues
    #     their copy on the upload stream.
    #  8. main also waits for the event after that copy.

    def __init__(
        self,
        model: nn.Module,
        master: nn.Module,
        optimizer: torch.optim.Optimizer,
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
        self.rounding = StochasticRounding.from_master(master, numerics, optimizer_name(optimizer.param_groups[0]))
        self.factor = 1.0
        self.total_work, self.reported_work = UpdateWork(), UpdateWork()
        self.before_update: BeforeUpdate = ignore_update
        self.is_last_microbatch = True  # the current micro-batch is the last of the step
        self.unit_in_flight: UnitState | None = None  # the unit whose gradient FSDP is copying to the host
        group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        parameters = {strip_wrappers(name): p for name, p in master.named_parameters()}
        self.weights = {id(p): p for p in parameters.values()} | {
            id(p): weight for weight, p in master_pairs(model, master)
        }
        self.unit_states, self.hooks = [], []
        units, unit_state_of = fsdp_units(model), dict[object, UnitState]()
        for unit in units:
            groups: dict[int, list[nn.Parameter]] = {}
            members = [parameters[strip_wrappers(name)] for name in unit.parameters]
            frozen = [parameter for parameter in members if not parameter.requires_grad]
            for parameter in members:
                if parameter.requires_grad:
                    groups.setdefault(group_of[id(parameter)], []).append(parameter)
            self.unit_states.append(unit_state := UnitState(unit.name, sorted(groups.items()), frozen, unit.n_gathers))
            unit.modules[0].set_all_reduce_hook(functools.partial(self._on_gradient_reduced, unit_state))
            unit_state_of[fully_shard.state(unit.modules[0])] = unit_state
        for unit, unit_state in zip(units, self.unit_states, strict=True):
            prefetched_states = forward_prefetched(unit.modules[0])
            hook = functools.partial(
                self._before_forward, [unit_state, *(unit_state_of[state] for state in prefetched_states)]
            )
            self.hooks += [module.register_forward_pre_hook(hook, prepend=True) for module in unit.modules]
        for parameter in trainable_parameters(master).values():
            dtype = torch.bfloat16 if moments == "bf16" else parameter.dtype
            init_moments(optimizer, parameter, dtype)
        self.worker = ThreadPoolExecutor(1, "update", _init_worker, (device, torch.get_num_threads()))

    def begin_microbatch(self, *, is_last: bool) -> None:
        """See ``Updater``: in the last micro-batch the norm is computed as gradients arrive."""
        self.is_last_microbatch = is_last

    def accumulate(self) -> None:
        """Take what the backward left, see ``_on_gradient_reduced``: its copies are finished."""
        self._collect_gradient(no_wait)

    def _on_gradient_reduced(self, unit: UnitState, flat: Tensor) -> None:
        """Collect the previous unit's gradient, whose copy to the host is in flight; this unit's has not started.

        Adds run in the order in which the next backward makes gradients, and that backward waits for them: at most two sets exist.
        """
        wait_for_copy = no_wait
        if flat.is_cuda:
            stream = torch.cuda.current_stream(flat.device)
            flat.record_stream(stream)  # FSDP does not keep this memory alive until its copy is done
            wait_for_copy = stream.record_event().synchronize
        self._wait_for_add(unit)
        self._collect_gradient(wait_for_copy)
        self.unit_in_flight = unit

    def _collect_gradient(self, wait_for_copy: WaitForCopy) -> None:
        """Move a gradient from the parameters to the worker, which adds it: left in place, FSDP would block on its copy to add to it."""
        unit, self.unit_in_flight = self.unit_in_flight, None
        if unit is None:
            return
        weights = [[self.weights[id(p)] for p in parameters] for _, parameters in unit.groups]
        gradients = [[_take_gradient(weight) for weight in group] for group in weights]
        self.total_work.down_bytes += _n_bytes(gradients)
        self.total_work.up_bytes += unit.n_gathers * _n_bytes(
            [map(local_tensor, group) for group in [*weights, unit.frozen]]
        )
        if unit.sums:
            self._submit_add(unit, wait_for_copy, lambda: _add_gradients(unit.sums, gradients))
        else:
            self.wait_unit(unit)
            unit.sums = gradients
            self._submit_add(unit, wait_for_copy, lambda: None)

    def _submit_add(self, unit: UnitState, wait_for_copy: WaitForCopy, add: Callable[[], None]) -> None:
        """Have the worker add a gradient to a unit's sums once it has arrived; after the last one, compute sums of squares."""

        @torch.no_grad()
        def wait_and_add() -> list[float]:
            wait_for_copy()
            add()
            if not is_last:
                return []
            return square_sums(
                gradient
                for group, (_, parameters) in zip(sums, groups, strict=True)
                for gradient, parameter in zip(group, parameters, strict=True)
                if is_first_replica(parameter)
            )

        is_last, sums, groups = self.is_last_microbatch, unit.sums, unit.groups
        unit.pending_add = self.worker.submit(wait_and_add)

    def _wait_for_add(self, unit: UnitState) -> list[float]:
        pending_add, unit.pending_add = unit.pending_add, None
        self._wait_for(pending_add)
        return pending_add.result() if pending_add else []

    def clip(self, max_norm: float) -> float:
        """See ``Updater``; the worker scales the gradients of each unit just before its update."""
        square_sums_by_unit = [self._wait_for_add(unit) for unit in self.unit_states]
        norm = norm_over_ranks(itertools.chain(*square_sums_by_unit), torch.device("cpu"))
        self.factor = clip_factor(norm, max_norm)
        return norm

    def update(self) -> None:
        """See ``Updater``: queue the updates; return immediately if updates overlap with the forward."""
        params = UpdateParams(group_params(self.optimizer), self.factor, self.before_update)
        for unit in self.unit_states:
            sums, unit.sums = unit.sums, []
            unit.pending_update = self.worker.submit(self._update_unit, unit, sums, params)
        if not self.overlap:
            self.wait()

    def zero_grad(self) -> None:
        for unit in self.unit_states:
            unit.sums = []

    def _before_forward(self, units: Sequence[UnitState], *_: object) -> None:
        for unit in units:
            self.wait_unit(unit)

    def wait_unit(self, unit: UnitState) -> None:
        """Wait for the pending update of one unit."""
        self._wait_for(unit.pending_update)
        unit.pending_update = None

    def _wait_for(self, future: "Future[Any] | None") -> None:
        if future is None:
            return
        start_s = time.perf_counter()
        if not concurrent.futures.wait([future], LONG_WAIT_S).done:
            self.on_long_wait(True)
            concurrent.futures.wait([future])
            self.on_long_wait(False)
        self.total_work.exposed_s += time.perf_counter() - start_s
        future.result()

    def units(self) -> list[UpdateUnit]:
        return [
            UpdateUnit(
                [t for members in unit.trained_groups for t in state_tensors(self.optimizer, members)],
                unit.pending_update,
            )
            for unit in self.unit_states
        ]

    def wait(self) -> None:
        for unit in self.unit_states:
            self.wait_unit(unit)

    def sync_weights(self) -> None:
        for unit in self.unit_states:
            self._sync_unit(unit, unit.all_groups)

    @torch.no_grad()
    def _sync_unit(self, _: UnitState, groups: Iterable[Sequence[nn.Parameter]]) -> None:
        """Copy masters to the weights that have one; FSDP gathers all other weights from the stored ones."""
        for parameter in itertools.chain(*groups):
            if (weight := self.weights[id(parameter)]) is not parameter:
                local_tensor(weight).copy_(local_tensor(parameter))

    def work(self) -> UpdateWork:
        previous, self.reported_work = self.reported_work, dataclasses.replace(self.total_work)
        return self.reported_work - previous

    @torch.no_grad()
    def _update_unit(self, unit: UnitState, sums: Sequence[Sequence[Tensor]], params: UpdateParams) -> None:
        start_s = time.perf_counter()
        for (group, parameters), gradients in zip(unit.groups, sums, strict=True):
            scale_gradients(gradients, params.factor)
            tensors = state_tensors(self.optimizer, parameters)
            params.before_update(tensors)
            update_group(
                parameters,
                [self.optimizer.state[p] for p in parameters],
                gradients,
                params.group_params[group],
                self.rounding,
            )
            written_tensors, is_scaled = [tensor for tensor in tensors if tensor.dim()], params.factor != 1.0
            self.total_work.update_bytes += 2 * _n_bytes([written_tensors]) + (1 + 2 * is_scaled) * _n_bytes(
                [gradients]
            )
        self.total_work.update_s += time.perf_counter() - start_s
        self._sync_unit(unit, unit.trained_groups)


def pin_for_gradients(model: nn.Module, n_sets: int, on_progress: OnByteProgress) -> None:
    """Leave torch the pinned blocks that ``n_sets`` of an offloaded model's gradients will take.

    Otherwise FSDP would pin them during the first backward passes.

    Raises:
        UserError: CUDA cannot pin that much.
    """
    weights = [local_tensor(parameter) for parameter in trainable_parameters(model).values()]
    done_bytes, total_bytes = 0, sum(weight.nbytes for weight in weights) * n_sets
    blocks = []
    for weight in weights:
        try:
            blocks += [
                torch.empty_like(weight, pin_memory=True) for _ in range(n_sets)
            ]  # freed together, so torch caches all
        except RuntimeError as error:
            raise pinning_error(done_bytes, total_bytes, str(error).partition("\n")[0]) from None
        done_bytes += weight.nbytes * n_sets
        on_progress(done_bytes, total_bytes)


def _init_worker(device: torch.device, n_threads: int) -> None:
    """Initialize the worker thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # otherwise freeing pinned memory would create a context on GPU 0
        n_threads = max(1, n_threads - RESERVED_CORES)
    torch.set_num_threads(n_threads)


def _take_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the local gradient of a parameter, and set its ``grad`` to None."""
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    return local_tensor(gradient)


def _add_gradients(sums: Sequence[Sequence[Tensor]], gradients: Sequence[Sequence[Tensor]]) -> None:
    for group, added in zip(sums, gradients, strict=True):
        torch._foreach_add_(list(group), list(added))


def _n_bytes(groups: Iterable[Iterable[Tensor]]) -> int:
    return sum(tensor.nbytes for group in groups for tensor in group)


@dataclasses.dataclass(slots=True)
class UnitParameter:
    """One parameter of a unit."""

    weight: nn.Parameter  # in the model, in BF16
    master: nn.Parameter
    begin: int  # offset of its local elements in the unit's flat gradient

    def view_in(self, flat: Tensor) -> Tensor:
        """Return the view of this parameter in a flat tensor."""
        shape = local_tensor(self.master).shape
        return flat[self.begin : self.begin + shape.numel()].view(shape)


@dataclasses.dataclass(slots=True)
class GradBuffer:
    """Pinned buffer for the gradients of a unit, and the state of its copies from and to the device."""

    members: dict[int, UnitParameter]  # by ``id(master)``
    flat_sum: Tensor  # sum of the flat gradients so far, in FP32 with FSDP's padding
    sums: list[list[Tensor]]  # views of the flat sum, by parameter group
    n_unchecked: int  # trainable parameters whose offset has not yet been compared with FSDP's
    wait_for_download: WaitForCopy
    wait_for_upload: WaitForCopy


class OptimizerOffload(HostUpdater):
    """Update optimizer state in CPU memory (``offload = optimizer``); the update itself is ``HostUpdater``'s."""

    def __init__(
        self,
        model: nn.Module,
        master: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        on_long_wait: OnLongWait,
        *,
        overlap: bool,
        moments: Moments,
        on_progress: OnByteProgress,
    ) -> None:
        """Allocate the pinned buffers, and have FSDP hand over the gradients.

        ``on_progress`` hears of the progress; all else: see ``HostUpdater``.
        """
        super().__init__(model, master, optimizer, device, on_long_wait, overlap=overlap, moments=moments)
        self.grad_buffers: dict[str, GradBuffer] = {}
        self.slot_add: Future[list[float]] | None = None
        self.device, self.upload_stream = device, torch.cuda.Stream(device) if device.type == "cuda" else None
        weights, masters = (
            {strip_wrappers(name): p for name, p in module.named_parameters()} for module in (model, master)
        )
        units = fsdp_units(model)
        layouts = [_lay_out(unit, weights, masters) for unit in units]
        sizes, max_numel = [numel for _, numel, _ in layouts], max(full_numel for *_, full_numel in layouts)
        *totals, slot, stage = allocate_blocks(
            [4 * n for n in (*sizes, max(sizes))] + [2 * max_numel], device, on_progress
        )
        self.slot, self.stage = slot.view(torch.float32), stage.view(torch.bfloat16)
        self.wait_for_stage: WaitForCopy = no_wait
        self.wait_for_last_downloads: tuple[WaitForCopy, WaitForCopy] = no_wait, no_wait  # of the last two units
        for unit_state, unit, (members, *_), total in zip(self.unit_states, units, layouts, totals, strict=True):
            flat = total.view(torch.float32)
            sums = [[members[id(master)].view_in(flat) for master in group] for group in unit_state.trained_groups]
            trained_members = [members[id(master)] for group in unit_state.trained_groups for master in group]
            self.grad_buffers[unit_state.name] = GradBuffer(members, flat, sums, len(trained_members), no_wait, no_wait)
            unit.modules[0].set_all_reduce_hook(functools.partial(self._receive_grad, unit_state))
            for member in trained_members:
                member.weight.register_post_accumulate_grad_hook(
                    functools.partial(self._discard_bf16_grad, unit_state, member)
                )

    def accumulate(self) -> None:
        """Do nothing: gradients were taken during the backward."""

    def _receive_grad(self, unit: UnitState, flat: Tensor) -> None:
        """Copy a unit's reduced FP32 gradient from FSDP to the host."""
        buffer = self.grad_buffers[unit.name]
        if flat.dtype != torch.float32 or flat.numel() != buffer.flat_sum.numel():
            raise RuntimeError(f"{unit.name}: FSDP's gradient is {flat.dtype} of {flat.numel()}, not as expected")
        self.total_work.down_bytes += flat.nbytes
        stream = torch.cuda.current_stream(self.device) if flat.is_cuda else None
        if not unit.sums:
            self.wait_unit(unit)
            self.wait_for_last_downloads[0]()  # bounds the flat gradients that are alive on the device
            unit.sums, buffer.wait_for_download = buffer.sums, async_copy([(buffer.flat_sum, flat)], stream)
            self.wait_for_last_downloads = (self.wait_for_last_downloads[1], buffer.wait_for_download)
            self._submit_add(unit, buffer.wait_for_download, lambda: None)
            return
        if self.slot_add:
            self.slot_add.result()  # the slot is then free
        slot = self.slot[: flat.numel()]
        wait_for_download = async_copy([(slot, flat)], stream)
        self._submit_add(unit, wait_for_download, lambda: buffer.flat_sum.add_(slot))
        self.slot_add = unit.pending_add

    def _discard_bf16_grad(self, unit: UnitState, member: UnitParameter, weight: nn.Parameter) -> None:
        """Discard the BF16 gradient that FSDP makes; on first use compare it with the flat one, to verify the offsets."""
        gradient, weight.grad = weight.grad, None
        buffer = self.grad_buffers[unit.name]
        if not buffer.n_unchecked:
            return
        buffer.n_unchecked -= 1
        buffer.wait_for_download()
        expected = member.view_in(buffer.flat_sum).to(weight.dtype)
        if gradient is None or not torch.equal(local_tensor(gradient).cpu().nan_to_num(), expected.nan_to_num()):
            raise RuntimeError(
                f"{unit.name}: FSDP's gradients are not laid out as expected; use --parallel.offload all"
            )

    def wait_unit(self, unit: UnitState) -> None:
        """Wait until one unit is updated and its weights are on the device."""
        super().wait_unit(unit)
        start_s = time.perf_counter()
        self.grad_buffers[unit.name].wait_for_upload()
        self.total_work.exposed_s += time.perf_counter() - start_s

    def sync_weights(self) -> None:
        if self.upload_stream:  # kernels on the current stream may still be writing to this memory
            self.upload_stream.wait_stream(torch.cuda.current_stream(self.device))
        super().sync_weights()
        self.wait()
        self.reported_work = dataclasses.replace(self.total_work)  # this belongs to no step

    @torch.no_grad()
    def _sync_unit(self, unit: UnitState, groups: Iterable[Sequence[nn.Parameter]]) -> None:
        """Round masters of a unit to BF16, and start to copy them to the device."""
        self.wait_for_stage()  # until the previous unit has left the staging buffer
        buffer = self.grad_buffers[unit.name]
        pairs = []
        for member in (buffer.members[id(master)] for master in itertools.chain(*groups)):
            staged_weight = member.view_in(self.stage)
            staged_weight.copy_(local_tensor(member.master))
            pairs.append((local_tensor(member.weight), staged_weight))
            self.total_work.up_bytes += staged_weight.nbytes
        self.wait_for_stage = buffer.wait_for_upload = async_copy(pairs, self.upload_stream)


def _lay_out(
    unit: FsdpUnit, weights: Mapping[str, nn.Parameter], masters: Mapping[str, nn.Parameter]
) -> tuple[dict[int, UnitParameter], int, int]:
    """Return a unit's parameters with their offsets, the length of its flat gradient, and the length with frozen parameters.

    Each parameter takes the padded size of its largest shard. Frozen parameters come last, as they have no gradient.
    """
    names_and_sizes = zip((strip_wrappers(item) for item in unit.parameters), unit.padded_sizes, strict=True)
    members, begin, gradient_numel = {}, 0, 0
    for name, size in sorted(names_and_sizes, key=lambda item: not masters[item[0]].requires_grad):
        members[id(masters[name])] = UnitParameter(weights[name], masters[name], begin)
        begin += size
        gradient_numel += size * masters[name].requires_grad
    return members, gradient_numel, begin
