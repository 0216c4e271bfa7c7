"""What torch's FSDPMemTracker counts of the trainer's own step, on a fake process group and fake tensors: bytes per rank.

Streams are not simulated, so nothing is said of what they keep alive; NCCL's and CUDA's own memory is not in it.
"""

import contextlib
import dataclasses
import functools
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from llama405b.data.batch import Batch
from llama405b.distributed.ranks import Rank
from llama405b.model import attention  # noqa: F401  # registers varlen
from llama405b.model.host_inputs import offload_inputs
from llama405b.model.llama import (
    add_adapters,
    build_on_meta,
    checkpoint_activations,
    compute_dtype,
    config_from_dict,
    freeze,
    tie_head,
)
from llama405b.optim.offload import OptimizerOffload
from llama405b.optim.optimizer import build_optimizer, init_moments, master_model
from llama405b.optim.updater import local_tensor
from llama405b.parallel.fsdp import make_device_mesh, shard_dtype, shard_model
from llama405b.parallel.passes import build_forward_backward
from llama405b.parallel.split import split_model
from llama405b.predict.run_shape import PredictedRun
from llama405b.settings.axes import FULL_RECOMPUTE, Axes, Recompute
from llama405b.settings.schema import Adapter, LossMode, Model, Optimizer, Parallel

ON_HOST = ("Sharded Param", "Sharded Grad")  # with offload = all
NEITHER = ("Inputs", "Buffer")
HOST = torch.device("meta")  # stands for host memory where all else is on the CPU


@dataclasses.dataclass(frozen=True)
class Tracked:
    """Bytes of a rank."""

    before: int  # the shards of the weights
    after: int  # and of the gradients, after a backward
    peak: int  # on the GPU


class Tracker(FSDPMemTracker):
    """It hooks every module of a unit by itself, and would let a unit of two be gathered and reduced twice: leave those their hooks."""

    def __init__(self, model, elsewhere):
        super().__init__(model)
        self.elsewhere, self.peak_there = elsewhere, 0

    def _instrument_fsdp_module(self):
        states = {fully_shard.state(m) for m in self._root_mod.modules() if isinstance(m, FSDPModule)}
        several = {state: state._fsdp_param_groups for state in states if len(state._modules) > 1}
        for state in several:
            state._fsdp_param_groups = []
        super()._instrument_fsdp_module()
        for state, groups in several.items():
            state._fsdp_param_groups = groups
            for group in groups:
                self._instrument_fsdp_sharded_params_grads(group)
                group.post_backward = functools.partial(self._then_see_gradients, group, group.post_backward)

    def _then_see_gradients(self, group, post_backward, *args):
        post_backward(*args)
        self._instrument_fsdp_sharded_params_grads(group)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outcome = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak_there = max(self.peak_there, self.now(*self.elsewhere))
        return outcome

    def now(self, *less):
        """Bytes at this moment, but for some categories."""
        snapshot = self.get_tracker_snapshot("current")
        return sum(
            n_bytes
            for device, categories in snapshot.items()
            if device != HOST
            for kind, n_bytes in categories.items()
            if str(getattr(kind, "value", kind)) not in ("Total", *NEITHER, *less)
        )


def track(
    config: dict,
    parallel: Parallel,
    world: int,
    seq_len: int,
    micro_batch: int,
    axes: Axes | None = None,
    rank: int = 0,
    n_micro: int = 1,
    recompute: Recompute = FULL_RECOMPUTE,
    on_host: PredictedRun | None = None,
    adapter: Adapter | None = None,
    loss: LossMode = "full",
) -> Tracked:
    """Track the forwards and backwards of a step, of a model in the form of config.json.

    ``on_host``: what is run, if layers' inputs are in host memory.
    """
    _clear_sharding_prop_cache()  # DTensor's plans name groups of an earlier call
    clear_redistribute_planner_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    me = Rank(rank, world, 0, "host", torch.device("cpu"), mesh=axes)
    try:
        model = _split(config, parallel, me, adapter).train()
        passes = build_forward_backward(parallel, model, me, Model(loss=loss))
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            tie_head(model)
            master = master_model(model, parallel)
            checkpoint_activations(model, recompute)
            if parallel.offload == "optimizer":
                _offload(model, master, parallel)
            if on_host:
                _inputs_on_host(model, on_host, me)
            tracker = Tracker(model, ON_HOST if parallel.offload == "all" else ())
            ids_BS = torch.zeros(micro_batch, seq_len, dtype=torch.long)
            tracker.track_inputs((ids_BS,))
            with _only_what_ranks_have(), tracker:
                before = tracker.now()
                passes.train([Batch(ids_BS, ids_BS)] * n_micro, 1, Unheard(), _hear)
            return Tracked(before, tracker.now(), tracker.peak_there)
    finally:
        torch.set_default_dtype(torch.float32)
        dist.destroy_process_group()


def _split(config: dict, parallel: Parallel, me: Rank, adapter: Adapter | None) -> nn.Module:
    """Build a rank's part of a model, as the trainer does."""
    kept = shard_dtype(parallel)
    frozen = compute_dtype(parallel.numerics) if adapter else kept
    whole = build_on_meta(config_from_dict({"model_type": "llama"} | config), "varlen", frozen)
    freeze(whole, (), freeze_all=bool(adapter))
    adapt = functools.partial(add_adapters, adapter=adapter, dtype=kept)
    return split_model(whole, parallel, me, adapt if adapter else None)


@contextlib.contextmanager
def _only_what_ranks_have():
    """Leave out what torch makes only to learn shapes of whole tensors, and what a fake group never sends."""
    meta, isend = ShardingPropagator._propagate_tensor_meta_non_cached, dist.isend

    def apart(self, op_schema):
        with _disable_current_modes():
            return meta(self, op_schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = apart
    dist.isend = _hear
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached, dist.isend = meta, isend


class Unheard:
    """Takes no gradients: they stay where FSDP leaves them."""

    def begin_microbatch(self, *, is_last: bool) -> None:
        """See ``GradientAccumulator``."""

    def accumulate(self) -> None:
        """See ``GradientAccumulator``."""


def _offload(model: nn.Module, master: nn.Module, parallel: Parallel) -> OptimizerOffload:
    """Let the trainer's own hooks take the gradients to host memory."""
    if model.config.tie_word_embeddings:
        master.lm_head.weight = master.model.embed_tokens.weight  # as ``materialize`` does
    optimizer, moments = build_optimizer(master, Optimizer()), parallel.moments
    updater = OptimizerOffload(
        model, master, optimizer, torch.device("cpu"), _hear, overlap=True, moments=moments, on_progress=_hear
    )
    updater.worker = Idle()
    for landing in updater.grad_buffers.values():
        landing.n_unchecked = 0  # values, which fakes have not
        landing.flat_sum = landing.flat_sum.to(HOST)
    return updater


def _inputs_on_host(model: nn.Module, run: PredictedRun, me: Rank) -> None:
    """Let the trainer's own hooks take the inputs of layers to host memory."""
    dtype = torch.bfloat16 if run.compute_bytes == 2 else torch.float32
    count = run.inputs_on_host(me.axes.coordinate(me.index, ("pp",)).rank)
    inputs = offload_inputs(model, count, run.input_shape, dtype, torch.device("cpu"), _hear)
    inputs.free_slots = [slot.to(HOST) for slot in inputs.free_slots]
    model.input_buffers = inputs.buffers  # for the tracker, which counts what a model has


class Idle:
    """In the place of the thread that works on values in host memory: fakes have none, and are of one thread."""

    def submit(self, *_: object) -> Future[list[float]]:
        """Have it done."""
        done = Future[list[float]]()
        done.set_result([])
        return done


def _hear(*_: object) -> None:
    """Of waits and of what was pinned."""


def host_bytes(config: dict, parallel: Parallel, world: int) -> int:
    """What a rank keeps in host memory with ``offload = optimizer``, on the meta device, but for what it allocates itself."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        model = build_on_meta(config_from_dict({"model_type": "llama"} | config), "sdpa", shard_dtype(parallel))
        if model.config.tie_word_embeddings:
            model.lm_head.weight = model.model.embed_tokens.weight
        shard_model(model, parallel, torch.device("cpu"), make_device_mesh(Axes(dp_shard=world), "cpu"))
        master = master_model(model, parallel)
        updater = _offload(model, master, parallel)
        states = [t for state in updater.optimizer.state.values() for t in state.values() if t.dim()]
        sums = [landing.flat_sum for landing in updater.grad_buffers.values()]
        return _bytes([*master.parameters(), *states, *sums, updater.slot, updater.stage])
    finally:
        dist.destroy_process_group()


def optimizer_bytes(config: dict, parallel: Parallel, world: int) -> tuple[int, int]:
    """What a rank keeps beside the model's parameters and gradients, and what of a rank goes into a checkpoint."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        config = config_from_dict({"model_type": "llama"} | config)
        model = build_on_meta(config, "sdpa", shard_dtype(parallel))
        if config.tie_word_embeddings:
            model.lm_head.weight = model.model.embed_tokens.weight
        shard_model(model, parallel, torch.device("cpu"), make_device_mesh(Axes(dp_shard=world), "cpu"))
        kept, own = master_model(model, parallel), {id(p) for p in model.parameters()}
        optimizer = torch.optim.AdamW(kept.parameters())
        for parameter in kept.parameters():
            init_moments(optimizer, parameter, parameter.dtype)
        moments = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
        weights, masters = list(kept.parameters()), [p for p in kept.parameters() if id(p) not in own]
        return _bytes([*moments, *masters]), _bytes([*moments, *weights])
    finally:
        dist.destroy_process_group()


def _bytes(tensors: list[torch.Tensor]) -> int:
    """This rank's, which as the first needs no padding."""
    return sum(local_tensor(t).numel() * t.dtype.itemsize for t in tensors)
