"""Probes of whole steps: of the 405B shape, on meshes, and with each of the recipe's settings.

Layers: one layer of the 405B shape with each value of offload; updates hidden under the next forward, and compared bit for bit.
Meshes: steps of a small model with each mesh axis, and with FSDP over all ranks, which must give the same losses for the same batch.

Knobs: the time and memory of a step with each setting alone and together, and what the plan predicts. First the settings that the recipe
leaves open: the embedding as a unit of its own, and offload; for FSDP1 also forward prefetch and unlimited all-gathers, as FSDP2 always
gathers the next unit and never more. Then, for FSDP2, the settings that trade memory for speed.
"""

import dataclasses
import functools
import gc
import json
import math
import operator
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig

from llama405b.bench.host import GB
from llama405b.data.batch import Batch
from llama405b.distributed.host_memory import StepTimer
from llama405b.distributed.ranks import Rank, on_mesh
from llama405b.model import fused, llama
from llama405b.model.attention import candidates, flash_lack
from llama405b.model.host_inputs import keep_on_host
from llama405b.model.llama import checkpoint_activations
from llama405b.optim.adamw import master_model
from llama405b.optim.build_updater import build_updater
from llama405b.optim.step import train_step
from llama405b.optim.updater import Updater, UpdateWork
from llama405b.parallel import fsdp, load_weights
from llama405b.parallel.passes import Passes, build_passes
from llama405b.parallel.split import holdings_of, split
from llama405b.predict import estimate
from llama405b.predict.estimate import RUNTIME_BYTES, Cluster
from llama405b.predict.hardware import gpu_like, read_gpus
from llama405b.predict.run_shape import RunShape
from llama405b.predict.search import WHOLE, Outlook
from llama405b.settings.axes import Recompute
from llama405b.settings.config import PRESET_DIR
from llama405b.settings.schema import Config, Data, Model, Offload, Optimizer, Parallel, Training
from llama405b.settings.strategies import Name
from llama405b.spec import models
from llama405b.spec.probes import Figure

VOCAB = 8192  # small, so that the layers dominate
PLAIN = Model()
ROWS = 4096  # rows of random weights that are generated at a time
STEPS = 3  # timed steps, after one that is not timed
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
    """The model and batch of a probe."""

    shape: str  # name of a preset
    layers: int
    batch: int  # sequences of a micro-batch
    seq_len: int
    attention: str = "auto"
    vocab: int = VOCAB

    def config(self, me: Rank) -> LlamaConfig:
        """Return the model's configuration; on a CPU a tiny one, which only shows that the probe works."""
        known = json.loads((PRESET_DIR / "architectures.json").read_text(encoding="utf-8"))[self.shape]
        small = {} if me.on_gpu else TINY
        return LlamaConfig(**known | {"num_hidden_layers": self.layers, "vocab_size": self.vocab} | small)

    def tokens(self, me: Rank, step: int, number: int) -> torch.Tensor:
        """Return ``tokens_BS`` of a step, different for each micro-batch number."""
        generator = torch.Generator().manual_seed(1000 * step + number)
        return torch.randint(0, VOCAB, self.batch_shape(me), generator=generator).to(me.device)

    def batches(self, me: Rank, step: int, numbers: Iterable[int]) -> list[Batch]:
        """Return a step's micro-batches with these numbers."""
        return [Batch(x, x.roll(-1, 1)) for x in (self.tokens(me, step, number) for number in numbers)]

    def batch_shape(self, me: Rank) -> tuple[int, int]:
        """Return ``(B, S)`` of a rank's micro-batch."""
        return (self.batch, self.seq_len) if me.on_gpu else (min(self.batch, 2), 64)

    def run_shape(self, parallel: Parallel, me: Rank, model: Model = PLAIN) -> RunShape:
        """Return the run as the prediction describes it."""
        n_sequences, seq_len = self.batch_shape(me)
        training = Training(micro_batch_size=n_sequences, global_batch_size=n_sequences * me.world)
        config = Config(model, Data(seq_len=seq_len), training, parallel=parallel)
        return RunShape.of(self.llama(me), config, me.world)

    def llama(self, me: Rank) -> models.Llama:
        """Return the model's shape, parsed from its configuration."""
        return models.parse_llama(self.config(me).to_dict() | {"architectures": None}, "the model")


@dataclasses.dataclass(frozen=True, slots=True)
class Timed:
    """Median times of a step, and the last update."""

    seconds: dict[str, float]  # by part
    work: UpdateWork | None

    @property
    def whole_s(self) -> float:
        """Seconds of the whole step."""
        return sum(self.seconds.values())


LAYER = Workload("llama3.1-405b", layers=1, batch=1, seq_len=4096)
HIDING = Workload("llama3.1-8b", layers=8, batch=16, seq_len=4096)  # its forward takes about as long as its update
EXACT = Workload("llama3.1-8b", layers=4, batch=1, seq_len=1024, attention="sdpa")  # flash-attn is not deterministic


def _build(what: Workload, parallel: Parallel, me: Rank, settings: Model) -> tuple[nn.Module, Updater]:
    """Build a sharded model with random weights from a fixed seed."""
    config = what.config(me)
    attention = next(name for name in candidates(what.attention) if not flash_lack(name, me.device, torch.bfloat16))
    if parallel.by_fsdp1:
        module = fsdp.load_wrapped(None, config, attention, parallel, me)
        checkpoint_activations(module)
        return module, build_updater(module, Optimizer(), parallel, me.device)
    module = llama.build_on_meta(config, attention, fsdp.shard_dtype(parallel))
    if parallel.numerics == "fp8":
        llama.convert_to_fp8(module, me.device)
    fsdp.shard(module, parallel, me.device)
    if me.on_gpu and parallel.offload == "none":
        fsdp.lend_gradients(module)
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
        llama.compile_layers(module)
    checkpoint_activations(module, Recompute.read(settings.activation_checkpointing))
    if settings.activations == "host":
        run, dtype = what.run_shape(parallel, me, settings), llama.compute_dtype(parallel.numerics)
        keep_on_host(module, run.inputs_on_host(0), run.input_shape, dtype, me.device, lambda *_: None)
    return module, build_updater(module, Optimizer(), parallel, me.device, master=master)


def take_steps(
    what: Workload, parallel: Parallel, me: Rank, count: int, settings: Model = PLAIN
) -> tuple[list[float], Timed]:
    """Take steps; return their losses and the median times of the last ``STEPS``."""
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
    """Take a step per batch; return the losses, the seconds by part, and the last step's update."""
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
    """Train one decoder layer of the 405B shape; compare its peak memory with the estimate."""
    parallel = Parallel(offload=place)
    if me.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    losses, timed = take_steps(LAYER, parallel, me, 1 + STEPS)
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"the losses are {losses}")
    figures = [Figure(part, seconds, "s") for part, seconds in timed.seconds.items()]
    if timed.work:
        figures += [
            Figure("update", timed.work.update_s, "s"),
            Figure("waited", timed.work.exposed_s, "s"),
            Figure("host memory", timed.work.update_bytes / GB / max(1e-9, timed.work.update_s), "GB/s"),
            Figure("down", timed.work.down_bytes / GB, "GB"),
            Figure("up", timed.work.up_bytes / GB, "GB"),
        ]
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


def hiding(me: Rank) -> list[Figure]:
    """Compare hidden updates with updates between the steps, with a forward about as long as an update."""
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
    """Compare losses bit for bit between ways of updating.

    Runs: the same twice (control), hidden and sequential updates, offload all and optimizer.
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
            "the same steps gave different losses twice: this device is not deterministic, so the comparison proves nothing"
        )
    for name in others:
        if losses[name] != losses[first]:
            pairs = zip(losses[first], losses[name], strict=True)
            step = next(step for step, (a, b) in enumerate(pairs, 1) if a != b)
            raise RuntimeError(f"{first} and {name} differ from step {step}")
    return [Figure("runs that agree", len(runs), ""), Figure("steps", EXACT_STEPS, "")]


WITHIN = 1e-2  # relative, of a loss: BF16 rounds differently in split matrices


def beside_fsdp(parallel: Parallel, me: Rank) -> list[Figure]:
    """Compare losses and step times of a mesh with those of FSDP over all ranks."""
    plain, expected_s = _steps(Parallel(), me)
    losses, took_s = _steps(parallel, me)
    apart = [abs(loss / expected - 1) for loss, expected in zip(losses, plain, strict=True)]
    if not all(each <= WITHIN for each in apart):  # written so that a NaN fails, too
        raise RuntimeError(f"the losses are {losses}, but with FSDP alone {plain}")
    return [
        Figure("losses apart by", max(apart), ""),
        Figure("step", took_s, "s"),
        Figure("step by FSDP", expected_s, "s"),
    ]


tp = functools.partial(beside_fsdp, Parallel(tp=2))
cp = functools.partial(beside_fsdp, Parallel(cp=2))
pp = functools.partial(beside_fsdp, Parallel(pp=2))
hsdp = functools.partial(beside_fsdp, Parallel(dp_replicate=2))


def _steps(parallel: Parallel, me: Rank) -> tuple[list[float], float]:
    """Return the losses of steps with one sequence per rank, and their median seconds (not the first's)."""
    me, config = on_mesh(me, parallel), EXACT.config(me)
    whole = llama.build_on_meta(config, EXACT.attention, fsdp.shard_dtype(parallel))
    holdings, model = holdings_of(whole, parallel, me), split(whole, parallel, me)
    master = master_model(model, parallel)
    if master is not model:
        load_weights.materialise(model, me)
    load_weights.load(master, Path(), "local", me, lambda *_: None, random=EXACT.llama(me), holdings=holdings)
    checkpoint_activations(model)
    passes = build_passes(parallel, model, me)
    updater = build_updater(model, Optimizer(), parallel, me.device, master=master)
    per_rank = me.world // me.dp.size  # the batch has one sequence per rank; ranks of one dp coordinate share theirs
    mine = range(me.dp.rank * per_rank, (me.dp.rank + 1) * per_rank)
    losses, seconds, _ = run_steps(passes, updater, (EXACT.batches(me, step, mine) for step in range(1 + STEPS)), me)
    del model, master, passes, updater
    gc.collect()  # or its memory would be there beside the next model's
    return losses, statistics.median(sum(each.values()) for each in seconds[1:])


# A full-size embedding, and enough layers for inputs to come back one layer ahead.
MODEL = Workload("llama3.1-8b", layers=4, batch=2, seq_len=4096, attention="sdpa", vocab=128_256)


BASE = Parallel(wrap=WHOLE[:1])  # a layer is a unit
Knobs = dict[str, dict[str, Any]]  # settings of [parallel] and [model], by label
FSDP2: Knobs = {"embedding": {"wrap": WHOLE}, "offload": {"offload": "all"}}
FSDP1 = FSDP2 | {
    "forward prefetch": {"forward_prefetch": True},
    "all-gathers not limited": {"limit_all_gathers": False},
}
MORE: Knobs = {
    "loss in parts": {"loss": "parts"},
    "operators": {"activation_checkpointing": "operators"},
    "no checkpointing": {"activation_checkpointing": "none"},
    "fused": {"fused": True},
    "layer inputs on the host": {"activations": "host"},
    "pure-bf16": {"numerics": "pure-bf16"},
    "bf16-stochastic": {"numerics": "bf16-stochastic"},
}
COMPILED: Knobs = {"compiled": {"compile": True}}
FP8: Knobs = COMPILED | {"fp8": {"numerics": "fp8"}}
TOGETHER = ("loss in parts", "no checkpointing", "compiled")


def recipes(strategy: Name) -> dict[str, Knobs]:
    """Return the settings that a strategy's recipe leaves open, by label: none, each alone, and all."""
    knobs = FSDP1 if strategy == "fsdp1" else FSDP2
    return {"none of them": {}} | {name: {name: knobs[name]} for name in knobs} | {"all of them": knobs}


def trades(device: torch.device) -> dict[str, Knobs]:
    """Return other settings of FSDP2 that work on this device, by label: each alone, some together."""
    alone = MORE if llama.compile_lack(device) else MORE | COMPILED
    sets: list[Knobs] = [{name: alone[name]} for name in alone]
    sets += [{name: alone[name] for name in TOGETHER if name in alone}]
    sets += [FP8] if "compiled" in alone and not llama.fp8_lack(device) else []
    return {" + ".join(each): each for each in sets}


def knobs(me: Rank) -> list[Figure]:
    """Measure steps with each setting of the recipe.

    For FSDP2, and on GPUs also for FSDP1, which torch does not have for CPUs.
    """
    found = _table("fsdp2", recipes("fsdp2"), me)
    return found + _table("fsdp1", recipes("fsdp1"), me) if me.on_gpu else found


def more_knobs(me: Rank) -> list[Figure]:
    """Measure steps with each setting that trades memory for speed."""
    return _table("fsdp2", trades(me.device), me)


def _table(strategy: Name, named: Mapping[str, Knobs], me: Rank) -> list[Figure]:
    figures = []
    for name, together in named.items():
        values: dict[str, Any] = functools.reduce(operator.or_, together.values(), {"strategy": strategy})
        of_model = {key: value for key, value in values.items() if hasattr(PLAIN, key)}
        parallel = dataclasses.replace(BASE, **{key: values[key] for key in values.keys() - of_model.keys()})
        figures += (found := _measured(f"{strategy}, {name}", parallel, dataclasses.replace(PLAIN, **of_model), me))
        if me.is_rank0:  # printed now, as the figures are lost if a later variant fails
            print("; ".join(f"{each.name} {each.value:.3g} {each.unit}" for each in found), file=sys.stderr, flush=True)
    return figures


def _measured(name: str, parallel: Parallel, model: Model, me: Rank) -> list[Figure]:
    if me.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    _, timed = take_steps(MODEL, parallel, me, 1 + STEPS, model)
    found = [Figure(f"{name}: {part}", timed.seconds[part], "s") for part in ("forward", "backward")]
    found.append(Figure(f"{name}: step", timed.whole_s, "s"))
    if not me.on_gpu:
        return found
    found.append(Figure(f"{name}: peak", torch.cuda.max_memory_allocated() / GB, "GB"))
    found.append(Figure(f"{name}: reserved", torch.cuda.max_memory_reserved() / GB, "GB"))
    return found if parallel.by_fsdp1 else found + _planned(name, parallel, model, me)


def _planned(name: str, parallel: Parallel, model: Model, me: Rank) -> list[Figure]:
    """Return the predicted memory, and the predicted step if the GPU is known; FSDP1 is not predicted."""
    of = torch.cuda.get_device_properties(me.device)
    gpu = gpu_like(of.name, of.total_memory, read_gpus())
    run = MODEL.run_shape(parallel, me, model)
    needs = Outlook.of(run, Cluster(gpu) if gpu else Cluster()).needs
    found = [Figure(f"{name}: planned peak", (needs.gpu_bytes - RUNTIME_BYTES) / GB, "GB")]
    if needs.reserved:
        found.append(Figure(f"{name}: planned reserved", sum(needs.reserved.values()) / GB, "GB"))
    return [*found, Figure(f"{name}: planned step", needs.step_s, "s")] if gpu and needs.step_s else found
