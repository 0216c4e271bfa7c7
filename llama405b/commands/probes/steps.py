"""Whole steps. One layer of the 405B shape in each of three places; updates hidden, and exact."""

import dataclasses
import functools
import gc
import json
import math
import statistics
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig

from llama405b.capacity import estimate
from llama405b.capacity.run_shape import RunShape
from llama405b.commands.probes.timing import GB
from llama405b.contract import weights
from llama405b.contract.config import PRESET_DIR
from llama405b.contract.probes import Figure
from llama405b.contract.recompute import Recompute
from llama405b.contract.schema import Config, Data, Model, Offload, Optimizer, Parallel, Training
from llama405b.distributed.ranks import Rank
from llama405b.distributed.step_timer import StepTimer
from llama405b.model import compiling, fp8, fused, llama
from llama405b.model.batch import Batch
from llama405b.model.checkpointing import checkpoint_activations
from llama405b.model.host_inputs import keep_on_host
from llama405b.model.kernels import candidates, lack
from llama405b.optim.build_updater import build_updater
from llama405b.optim.fp32_masters import master_model
from llama405b.optim.step import train_step
from llama405b.optim.updater import Updater, UpdateWork
from llama405b.parallel import fsdp1, fsdp2, load_weights
from llama405b.parallel.build_passes import build_passes
from llama405b.parallel.passes import Passes

VOCAB = 8192  # small, so that the layers dominate
PLAIN = Model()
ROWS = 4096  # of random weights that are made at a time
STEPS = 3  # that are timed, after one that is not
EXACT_STEPS = 10
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """What is trained."""

    shape: str  # a preset's
    layers: int
    batch: int  # sequences of a micro-batch
    seq_len: int
    attention: str = "auto"
    vocab: int = VOCAB

    def config(self, me: Rank) -> LlamaConfig:
        """Return its shape; on a CPU a tiny one, which only shows that the test works."""
        known = json.loads((PRESET_DIR / "architectures.json").read_text(encoding="utf-8"))[self.shape]
        small = {} if me.on_gpu else TINY
        return LlamaConfig(**known | {"num_hidden_layers": self.layers, "vocab_size": self.vocab} | small)

    def tokens(self, me: Rank, step: int, number: int) -> torch.Tensor:
        """Return ``tokens_BS`` of a step; others for each number."""
        generator = torch.Generator().manual_seed(1000 * step + number)
        return torch.randint(0, VOCAB, self.batch_shape(me), generator=generator).to(me.device)

    def batches(self, me: Rank, step: int, numbers: Iterable[int]) -> list[Batch]:
        """Return a step's micro-batches of these numbers."""
        return [Batch(x, x.roll(-1, 1)) for x in (self.tokens(me, step, number) for number in numbers)]

    def batch_shape(self, me: Rank) -> tuple[int, int]:
        """Return ``(B, S)`` of a rank's micro-batch."""
        return (self.batch, self.seq_len) if me.on_gpu else (min(self.batch, 2), 64)

    def run_shape(self, parallel: Parallel, me: Rank, model: Model = PLAIN) -> RunShape:
        """Return what the plan is told of it."""
        n_sequences, seq_len = self.batch_shape(me)
        training = Training(micro_batch_size=n_sequences, global_batch_size=n_sequences * me.world)
        config = Config(model, Data(seq_len=seq_len), training, parallel=parallel)
        return RunShape.of(self.llama(me), config, me.world)

    def llama(self, me: Rank) -> weights.Llama:
        """Return its shape as a checkpoint's config.json tells it."""
        return weights.parse_llama(self.config(me).to_dict() | {"architectures": None}, "the model")


@dataclasses.dataclass(frozen=True, slots=True)
class Timed:
    """What a step took in the median."""

    seconds: dict[str, float]  # by part
    work: UpdateWork | None

    @property
    def whole_s(self) -> float:
        """The step."""
        return sum(self.seconds.values())


LAYER = Workload("llama3.1-405b", layers=1, batch=1, seq_len=4096)
HIDING = Workload("llama3.1-8b", layers=8, batch=16, seq_len=4096)  # its forward takes about as long as its update
EXACT = Workload("llama3.1-8b", layers=4, batch=1, seq_len=1024, attention="sdpa")  # flash-attn is not deterministic


def _build(what: Workload, parallel: Parallel, me: Rank, settings: Model) -> tuple[nn.Module, Updater]:
    """Build a sharded model with random weights, which are the same each time."""
    config = what.config(me)
    attention = next(name for name in candidates(what.attention) if not lack(name, me.device, torch.bfloat16))
    if parallel.by_fsdp1:
        module = fsdp1.load_wrapped(None, config, attention, parallel, me)
        checkpoint_activations(module)
        return module, build_updater(module, Optimizer(), parallel, me.device)
    module = llama.build_on_meta(config, attention, fsdp2.shard_dtype(parallel))
    if parallel.numerics == "fp8":
        fp8.convert(module, me.device)
    fsdp2.shard(module, parallel, me.device)
    if me.on_gpu and parallel.offload == "none":
        fsdp2.lend_gradients(module)
    master = master_model(module, parallel)
    if parallel.offload == "all":
        load_weights.materialise(module, me, offload=True, pinning=lambda *_: None)
    load_weights.materialise(master, me, offload=parallel.offload != "none")
    load_weights.materialise(module, me)
    generator = torch.Generator(me.device).manual_seed(0)
    for parameter in master.parameters():
        assert isinstance(parameter.data, DTensor)
        own = parameter.data.to_local()
        if own.ndim == 1:
            own.fill_(1)
            continue
        for rows in own.split(ROWS):
            rows.copy_(0.02 * torch.randn(rows.shape, device=me.device, generator=generator))
    for name in fused.FORWARDS if settings.fused else ():
        if not fused.lack(name, config, me.device, llama.compute_dtype(parallel.numerics)):
            fused.fuse(module, name)
    if settings.compile:
        compiling.compile_layers(module)
    checkpoint_activations(module, Recompute.read(settings.activation_checkpointing))
    if settings.activations == "host":
        run, dtype = what.run_shape(parallel, me, settings), llama.compute_dtype(parallel.numerics)
        keep_on_host(module, run, 0, dtype, me.device, lambda *_: None)
    return module, build_updater(module, Optimizer(), parallel, me.device, master=master)


def take_steps(
    what: Workload, parallel: Parallel, me: Rank, count: int, settings: Model = PLAIN
) -> tuple[list[float], Timed]:
    """Take steps; returns their losses, and what the last ``STEPS`` took."""
    module, updater = _build(what, parallel, me, settings)
    passes = build_passes(parallel, module, me)
    batches = (what.batches(me, step, [me.rank]) for step in range(count))
    losses, seconds, work = run_steps(passes, updater, batches, me)
    del module, passes, updater
    gc.collect()  # or its memory would be there beside the next model's
    median = {part: statistics.median(each[part] for each in seconds[-STEPS:]) for part in seconds[0]}
    return losses, Timed(median, work)


def run_steps(
    passes: Passes, updater: Updater, batches: Iterable[Sequence[Batch]], me: Rank
) -> tuple[list[float], list[dict[str, float]], UpdateWork | None]:
    """Take a step of each batch; returns their losses, their seconds by part, and the last one's update."""
    losses, seconds, work = [], [], None
    for microbatches in batches:
        timer = StepTimer(me.device)
        result = train_step(passes, updater, microbatches, max_norm=1.0, lap=timer.mark)
        assert result, "every token is a target"
        losses.append(result.loss)
        seconds.append(timer.seconds())
        work = updater.work()
    updater.wait()
    return losses, seconds, work


def layer(place: Offload, me: Rank) -> list[Figure]:
    """Train one decoder layer of the 405B shape; its peak beside the estimate."""
    parallel = Parallel(offload=place)
    if me.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    losses, timed = take_steps(LAYER, parallel, me, 1 + STEPS)
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"the losses are {losses}")
    figures = [Figure(part, seconds, "s") for part, seconds in timed.seconds.items()]
    if timed.work:
        figures += _work_figures(timed.work)
    counted = estimate.estimate(LAYER.run_shape(parallel, me))
    if me.on_gpu:
        peak = torch.cuda.max_memory_allocated()
        figures.append(Figure("peak", peak / GB, "GB"))
        figures.append(Figure("counted", (counted.gpu_bytes - estimate.RUNTIME_BYTES) / GB, "GB"))
        figures.append(Figure("reserved", torch.cuda.max_memory_reserved() / GB, "GB"))
        figures.append(Figure("counted reserved", sum(counted.reserved.values()) / GB, "GB"))
    return figures


layer_none = functools.partial(layer, "none")
layer_optimizer = functools.partial(layer, "optimizer")
layer_all = functools.partial(layer, "all")


def _work_figures(work: UpdateWork) -> list[Figure]:
    return [
        Figure("update", work.update_s, "s"),
        Figure("waited", work.exposed_s, "s"),
        Figure("host memory", work.update_bytes / GB / max(1e-9, work.update_s), "GB/s"),
        Figure("down", work.down_bytes / GB, "GB"),
        Figure("up", work.up_bytes / GB, "GB"),
    ]


def hiding(me: Rank) -> list[Figure]:
    """Compare steps with updates hidden and between the steps, where a forward takes about as long as an update."""
    figures = []
    for place in ("optimizer", "all"):
        hidden, between = (
            take_steps(HIDING, Parallel(offload=place, overlap=overlap), me, 1 + STEPS)[1] for overlap in (True, False)
        )
        assert hidden.work
        bound = hidden.seconds["backward"] + max(hidden.seconds["forward"], hidden.work.update_s)
        figures += [
            Figure(f"{place}: forward", hidden.seconds["forward"], "s"),
            Figure("update / forward", hidden.work.update_s / hidden.seconds["forward"], ""),
            Figure("waited", hidden.work.exposed_s, "s"),
            Figure("step hidden", hidden.whole_s, "s"),
            Figure("step between" if place == "optimizer" else "step by torch", between.whole_s, "s"),
            Figure("hidden / bound", hidden.whole_s / bound, ""),
        ]
    return figures


def exact(me: Rank) -> list[Figure]:
    """Compare losses bit for bit: the same twice (the control), hidden and between the steps, and both places.

    Raises:
        RuntimeError: Losses differ.
    """
    torch.use_deterministic_algorithms(True)
    runs = {
        "between the steps": Parallel(offload="all", overlap=False),
        "the same again": Parallel(offload="all", overlap=False),
        "all, hidden": Parallel(offload="all"),
        "optimizer, between the steps": Parallel(offload="optimizer", overlap=False),
        "optimizer, hidden": Parallel(offload="optimizer"),
    }
    try:
        losses = {name: take_steps(EXACT, parallel, me, EXACT_STEPS)[0] for name, parallel in runs.items()}
    finally:
        torch.use_deterministic_algorithms(False)
    [first, control, *others] = losses
    if losses[control] != losses[first]:
        raise RuntimeError(
            "the same steps twice give other losses: this device is not deterministic, so nothing is shown"
        )
    for name in others:
        if losses[name] != losses[first]:
            pairs = zip(losses[first], losses[name], strict=True)
            step = next(step for step, (a, b) in enumerate(pairs, 1) if a != b)
            raise RuntimeError(f"{first} and {name} differ from step {step}")
    return [Figure("runs that agree", len(runs), ""), Figure("steps", EXACT_STEPS, "")]
