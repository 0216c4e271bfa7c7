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
from llama405b.contract import reader
from llama405b.data.batch import Batch
from llama405b.distributed.host_memory import StepTimer
from llama405b.distributed.ranks import Rank, with_mesh
from llama405b.model import fused, llama
from llama405b.model.attention import attention_candidates, attention_unsupported_reason
from llama405b.model.host_inputs import offload_inputs
from llama405b.model.llama import checkpoint_activations
from llama405b.optim.build_updater import build_updater
from llama405b.optim.optimizer import master_model
from llama405b.optim.step import StepResult, train_step
from llama405b.optim.updater import Updater, UpdateWork
from llama405b.parallel import fsdp, load_weights
from llama405b.parallel.passes import ForwardBackward, build_forward_backward
from llama405b.parallel.split import shard_layout_of, split_model
from llama405b.predict import estimate
from llama405b.predict.estimate import RUNTIME_BYTES, Cluster
from llama405b.predict.hardware import match_gpu, read_gpus
from llama405b.predict.run_shape import PredictedRun
from llama405b.predict.search import Prediction
from llama405b.settings.axes import Recompute
from llama405b.settings.choices import StrategyName
from llama405b.settings.config import PRESET_DIR
from llama405b.settings.schema import Config, Data, Model, Offload, Optimizer, Parallel, Training
from llama405b.spec import models
from llama405b.spec.probes import Figure

VOCAB = 8192  # small, so that the layers dominate
DEFAULT_MODEL = Model(fused="false")
ROWS_PER_FILL = 4096  # rows of random weights that are generated at a time
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

    def config(self, rank: Rank) -> LlamaConfig:
        """Return the model's configuration; on a CPU a tiny one, which only shows that the probe works."""
        architectures = json.loads((PRESET_DIR / "architectures.json").read_text(encoding="utf-8"))[self.shape]
        overrides = {} if rank.on_gpu else TINY
        return LlamaConfig(**architectures | {"num_hidden_layers": self.layers, "vocab_size": self.vocab} | overrides)

    def tokens(self, rank: Rank, step: int, number: int) -> torch.Tensor:
        """Return ``tokens_BS`` of a step, different for each micro-batch number."""
        generator = torch.Generator().manual_seed(1000 * step + number)
        return torch.randint(0, VOCAB, self.batch_shape(rank), generator=generator).to(rank.device)

    def batches(self, rank: Rank, step: int, numbers: Iterable[int]) -> list[Batch]:
        """Return a step's micro-batches with these numbers."""
        return [Batch(x, x.roll(-1, 1)) for x in (self.tokens(rank, step, number) for number in numbers)]

    def batch_shape(self, rank: Rank) -> tuple[int, int]:
        """Return ``(B, S)`` of a rank's micro-batch."""
        return (self.batch, self.seq_len) if rank.on_gpu else (min(self.batch, 2), 64)

    def run_shape(self, parallel: Parallel, rank: Rank, model: Model = DEFAULT_MODEL) -> PredictedRun:
        """Return the run as the prediction describes it."""
        n_sequences, seq_len = self.batch_shape(rank)
        training = Training(micro_batch_size=n_sequences, global_batch_size=n_sequences * rank.world_size)
        config = Config(model, Data(seq_len=seq_len), training, parallel=parallel)
        return PredictedRun.from_config(self.llama(rank), config, rank.world_size)

    def llama(self, rank: Rank) -> models.Llama:
        """Return the model's shape, parsed from its configuration."""
        return models.parse_llama(self.config(rank).to_dict() | {"architectures": None}, "the model")


@dataclasses.dataclass(frozen=True, slots=True)
class StepTiming:
    """Median times of a step, and the last update."""

    seconds: dict[str, float]  # by part
    work: UpdateWork | None

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return sum(self.seconds.values())


LAYER = Workload("llama3.1-405b", layers=1, batch=1, seq_len=4096)
HIDING = Workload("llama3.1-8b", layers=8, batch=16, seq_len=4096)  # its forward takes about as long as its update
EXACT = Workload("llama3.1-8b", layers=4, batch=1, seq_len=1024, attention="sdpa")  # flash-attn is not deterministic


def _build_model(
    workload: Workload, parallel: Parallel, rank: Rank, model_settings: Model
) -> tuple[nn.Module, Updater]:
    """Build a sharded model with random weights from a fixed seed."""
    config = workload.config(rank)
    attention = next(
        name
        for name in attention_candidates(workload.attention)
        if not attention_unsupported_reason(name, rank.device, torch.bfloat16)
    )
    if parallel.is_fsdp1:
        module = fsdp.load_fsdp1(None, config, attention, parallel, rank)
        checkpoint_activations(module)
        return module, build_updater(module, Optimizer(), parallel, rank.device)
    module = llama.build_on_meta(config, attention, fsdp.shard_dtype(parallel))
    if parallel.numerics == "fp8":
        llama.convert_to_fp8(module, rank.device)
    fsdp.shard_model(module, parallel, rank.device)
    if rank.on_gpu and parallel.offload == "none":
        fsdp.allocate_grads_on_compute_stream(module)
    master = master_model(module, parallel)
    if parallel.offload == "all":
        load_weights.materialize(module, rank, offload=True, on_pin_progress=lambda *_: None)
    load_weights.materialize(master, rank, offload=parallel.offload != "none")
    load_weights.materialize(module, rank)
    generator = torch.Generator(rank.device).manual_seed(0)
    for parameter in master.parameters():
        assert isinstance(parameter.data, DTensor)
        local = parameter.data.to_local()
        if local.ndim == 1:
            local.fill_(1)
            continue
        for rows in local.split(ROWS_PER_FILL):
            rows.copy_(0.02 * torch.randn(rows.shape, device=rank.device, generator=generator))
    for name in fused.FORWARDS if workload.run_shape(parallel, rank, model_settings).fused else ():
        if not fused.unsupported_reason(name, config, rank.device, llama.compute_dtype(parallel.numerics)):
            fused.fuse(module, name)
    if model_settings.compile:
        llama.compile_layers(module)
    checkpoint_activations(module, Recompute.parse(model_settings.activation_checkpointing))
    if model_settings.activations == "host":
        run, dtype = workload.run_shape(parallel, rank, model_settings), llama.compute_dtype(parallel.numerics)
        offload_inputs(module, run.inputs_on_host(0), run.input_shape, dtype, rank.device, lambda *_: None)
    return module, build_updater(module, Optimizer(), parallel, rank.device, master=master)


def take_steps(
    workload: Workload, parallel: Parallel, rank: Rank, count: int, model_settings: Model = DEFAULT_MODEL
) -> tuple[list[float], StepTiming]:
    """Take steps; return their losses and the median times of the last ``STEPS``."""
    module, updater = _build_model(workload, parallel, rank, model_settings)
    passes = build_forward_backward(parallel, module, rank, model_settings)
    batches = (workload.batches(rank, step, [rank.index]) for step in range(count))
    results, seconds, work = run_steps(passes, updater, batches, rank)
    del module, passes, updater
    gc.collect()  # or its memory would be there beside the next model's
    median = {part: elapsed_s for part, elapsed_s in median_seconds(seconds[-STEPS:]).items() if part != "data"}
    return [result.loss for result in results], StepTiming(median, work)


def median_seconds(seconds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each part of steps."""
    return {part: statistics.median(step_seconds[part] for step_seconds in seconds) for part in seconds[0]}


def run_steps(
    passes: ForwardBackward, updater: Updater, batches: Iterable[Sequence[Batch]], rank: Rank, max_norm: float = 1.0
) -> tuple[list[StepResult], list[dict[str, float]], UpdateWork | None]:
    """Take a step per batch; return their results, the seconds by part, and the last step's update.

    A step without a target counts for nothing.
    """
    results, seconds, work = [], [], None
    timer = StepTimer(rank.device)
    for microbatches in batches:
        timer.mark("data")
        result = train_step(passes, updater, microbatches, max_norm=max_norm, on_phase_end=timer.mark)
        if result:
            results.append(result)
            seconds.append(timer.seconds())
        work = updater.work()
        timer = StepTimer(rank.device)
    updater.wait()
    return results, seconds, work


def measure_layer(offload: Offload, rank: Rank) -> list[Figure]:
    """Train one decoder layer of the 405B shape; compare its peak memory with the estimate."""
    parallel = Parallel(offload=offload)
    if rank.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    losses, timing = take_steps(LAYER, parallel, rank, 1 + STEPS)
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"the losses are {losses}")
    run = LAYER.run_shape(parallel, rank)
    figures = [Figure(part, seconds, "s") for part, seconds in timing.seconds.items()]
    figures.append(Figure("step", timing.total_s, "s", run=reader.dumps(run)))
    if timing.work:
        figures += [
            Figure("update", timing.work.update_s, "s"),
            Figure("waited", timing.work.exposed_s, "s"),
            Figure("host memory", timing.work.update_bytes / GB / max(1e-9, timing.work.update_s), "GB/s"),
            Figure("down", timing.work.down_bytes / GB, "GB"),
            Figure("up", timing.work.up_bytes / GB, "GB"),
        ]
    predicted = estimate.estimate(run)
    if rank.on_gpu:
        peak = torch.cuda.max_memory_allocated()
        figures.append(Figure("peak", peak / GB, "GB"))
        figures.append(Figure("counted", (predicted.gpu_bytes - estimate.RUNTIME_BYTES) / GB, "GB"))
        figures.append(Figure("reserved", torch.cuda.max_memory_reserved() / GB, "GB"))
        figures.append(Figure("counted reserved", sum(predicted.reserved_by_pool.values()) / GB, "GB"))
    return figures


measure_layer_none = functools.partial(measure_layer, "none")
measure_layer_optimizer = functools.partial(measure_layer, "optimizer")
measure_layer_all = functools.partial(measure_layer, "all")


def measure_hiding(rank: Rank) -> list[Figure]:
    """Compare hidden updates with updates between the steps, with a forward about as long as an update."""
    figures = []
    for offload in ("optimizer", "all"):
        hidden, sequential = (
            take_steps(HIDING, Parallel(offload=offload, overlap=overlap), rank, 1 + STEPS)[1]
            for overlap in (True, False)
        )
        assert hidden.work
        bound = hidden.seconds["backward"] + max(hidden.seconds["forward"], hidden.work.update_s)
        figures += [
            Figure(f"{offload}: forward", hidden.seconds["forward"], "s"),
            Figure("update / forward", hidden.work.update_s / hidden.seconds["forward"], ""),
            Figure("waited", hidden.work.exposed_s, "s"),
            Figure("step hidden", hidden.total_s, "s"),
            Figure("step between" if offload == "optimizer" else "step by torch", sequential.total_s, "s"),
            Figure("hidden / bound", hidden.total_s / bound, ""),
        ]
    return figures


def compare_exact(rank: Rank) -> list[Figure]:
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
        losses = {name: take_steps(EXACT, parallel, rank, EXACT_STEPS)[0] for name, parallel in runs.items()}
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


LOSS_TOLERANCE = 1e-2  # relative, of a loss: BF16 rounds differently in split matrices


def compare_with_fsdp(parallel: Parallel, rank: Rank) -> list[Figure]:
    """Compare losses and step times of a mesh with those of FSDP over all ranks."""
    fsdp_losses, fsdp_step_s = _take_mesh_steps(Parallel(), rank)
    losses, step_s = _take_mesh_steps(parallel, rank)
    differences = [abs(loss / expected - 1) for loss, expected in zip(losses, fsdp_losses, strict=True)]
    if not all(difference <= LOSS_TOLERANCE for difference in differences):  # written so that a NaN fails, too
        raise RuntimeError(f"the losses are {losses}, but with FSDP alone {fsdp_losses}")
    return [
        Figure("losses apart by", max(differences), ""),
        Figure("step", step_s, "s"),
        Figure("step by FSDP", fsdp_step_s, "s"),
    ]


tp = functools.partial(compare_with_fsdp, Parallel(tp=2))
cp = functools.partial(compare_with_fsdp, Parallel(cp=2))
pp = functools.partial(compare_with_fsdp, Parallel(pp=2))
hsdp = functools.partial(compare_with_fsdp, Parallel(dp_replicate=2))


def _take_mesh_steps(parallel: Parallel, rank: Rank) -> tuple[list[float], float]:
    """Return the losses of steps with one sequence per rank, and their median seconds (not the first's)."""
    rank, config = with_mesh(rank, parallel), EXACT.config(rank)
    full = llama.build_on_meta(config, EXACT.attention, fsdp.shard_dtype(parallel))
    layout, model = shard_layout_of(full, parallel, rank), split_model(full, parallel, rank)
    master = master_model(model, parallel)
    if master is not model:
        load_weights.materialize(model, rank)
    load_weights.load(
        master, Path(), "local", rank, lambda *_: None, random_shape=EXACT.llama(rank), shard_layout=layout
    )
    checkpoint_activations(model)
    passes = build_forward_backward(parallel, model, rank, DEFAULT_MODEL)
    updater = build_updater(model, Optimizer(), parallel, rank.device, master=master)
    per_rank = (
        rank.world_size // rank.dp.size
    )  # the batch has one sequence per rank; ranks of one dp coordinate share theirs
    numbers = range(rank.dp.rank * per_rank, (rank.dp.rank + 1) * per_rank)
    results, seconds, _ = run_steps(
        passes, updater, (EXACT.batches(rank, step, numbers) for step in range(1 + STEPS)), rank
    )
    del model, master, passes, updater
    gc.collect()  # or its memory would be there beside the next model's
    return [result.loss for result in results], statistics.median(
        sum(step_seconds.values()) for step_seconds in seconds[1:]
    )


# A full-size embedding, and enough layers for inputs to come back one layer ahead.
KNOBS_WORKLOAD = Workload("llama3.1-8b", layers=4, batch=2, seq_len=4096, attention="sdpa", vocab=128_256)


BASE_PARALLEL = Parallel(fsdp_embedding=False)
Knobs = dict[str, dict[str, Any]]  # settings of [parallel] and [model], by label
FSDP2_KNOBS: Knobs = {"embedding": {"fsdp_embedding": True}, "offload": {"offload": "all"}}
FSDP1_KNOBS = FSDP2_KNOBS | {
    "forward prefetch": {"forward_prefetch": True},
    "all-gathers not limited": {"limit_all_gathers": False},
}
TRADE_KNOBS: Knobs = {
    "chunked loss": {"loss": "chunked"},
    "operators": {"activation_checkpointing": "operators"},
    "no checkpointing": {"activation_checkpointing": "none"},
    "fused": {"fused": "true"},
    "layer inputs on the host": {"activations": "host"},
    "pure-bf16": {"numerics": "pure-bf16"},
    "bf16-stochastic": {"numerics": "bf16-stochastic"},
}
COMPILE_KNOBS: Knobs = {"compiled": {"compile": True}}
FP8_KNOBS: Knobs = COMPILE_KNOBS | {"fp8": {"numerics": "fp8"}}
COMBINED_KNOBS = ("chunked loss", "no checkpointing", "compiled")


def recipe_variants(strategy: StrategyName) -> dict[str, Knobs]:
    """Return the settings that a strategy's recipe leaves open, by label: none, each alone, and all."""
    knobs = FSDP1_KNOBS if strategy == "fsdp1" else FSDP2_KNOBS
    return {"none of them": {}} | {name: {name: knobs[name]} for name in knobs} | {"all of them": knobs}


def trade_variants(device: torch.device) -> dict[str, Knobs]:
    """Return other settings of FSDP2 that work on this device, by label: each alone, some together."""
    available = TRADE_KNOBS if llama.compile_unsupported_reason(device) else TRADE_KNOBS | COMPILE_KNOBS
    sets: list[Knobs] = [{name: available[name]} for name in available]
    sets += [{name: available[name] for name in COMBINED_KNOBS if name in available}]
    sets += [FP8_KNOBS] if "compiled" in available and not llama.fp8_unsupported_reason(device) else []
    return {" + ".join(variant): variant for variant in sets}


def measure_knobs(rank: Rank) -> list[Figure]:
    """Measure steps with each setting of the recipe.

    For FSDP2, and on GPUs also for FSDP1, which torch does not have for CPUs.
    """
    figures = _measure_variants("fsdp2", recipe_variants("fsdp2"), rank)
    return figures + _measure_variants("fsdp1", recipe_variants("fsdp1"), rank) if rank.on_gpu else figures


def measure_more_knobs(rank: Rank) -> list[Figure]:
    """Measure steps with each setting that trades memory for speed."""
    return _measure_variants("fsdp2", trade_variants(rank.device), rank)


def _measure_variants(strategy: StrategyName, variants: Mapping[str, Knobs], rank: Rank) -> list[Figure]:
    figures = []
    for name, variant in variants.items():
        values: dict[str, Any] = functools.reduce(operator.or_, variant.values(), {"strategy": strategy})
        model_values = {key: value for key, value in values.items() if hasattr(DEFAULT_MODEL, key)}
        parallel = dataclasses.replace(
            BASE_PARALLEL, **{key: values[key] for key in values.keys() - model_values.keys()}
        )
        figures += (
            measured := _measure_variant(
                f"{strategy}, {name}", parallel, dataclasses.replace(DEFAULT_MODEL, **model_values), rank
            )
        )
        if rank.is_rank0:  # printed now, as the figures are lost if a later variant fails
            print(
                "; ".join(f"{figure.name} {figure.value:.3g} {figure.unit}" for figure in measured),
                file=sys.stderr,
                flush=True,
            )
    return figures


def _measure_variant(name: str, parallel: Parallel, model: Model, rank: Rank) -> list[Figure]:
    if rank.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    _, timing = take_steps(KNOBS_WORKLOAD, parallel, rank, 1 + STEPS, model)
    figures = [Figure(f"{name}: {part}", timing.seconds[part], "s") for part in ("forward", "backward")]
    run = None if parallel.is_fsdp1 else KNOBS_WORKLOAD.run_shape(parallel, rank, model)
    figures.append(Figure(f"{name}: step", timing.total_s, "s", run=reader.dumps(run) if run else ""))
    if not rank.on_gpu:
        return figures
    figures.append(Figure(f"{name}: peak", torch.cuda.max_memory_allocated() / GB, "GB"))
    figures.append(Figure(f"{name}: reserved", torch.cuda.max_memory_reserved() / GB, "GB"))
    return figures + _predict_variant(name, run, rank) if run else figures


def _predict_variant(name: str, run: PredictedRun, rank: Rank) -> list[Figure]:
    """Return the predicted memory, and the predicted step if the GPU is known."""
    properties = torch.cuda.get_device_properties(rank.device)
    gpu = match_gpu(properties.name, properties.total_memory, read_gpus())
    needs = Prediction.from_run(run, Cluster(gpu) if gpu else Cluster()).needs
    figures = [Figure(f"{name}: planned peak", (needs.gpu_bytes - RUNTIME_BYTES) / GB, "GB")]
    if needs.reserved_by_pool:
        figures.append(Figure(f"{name}: planned reserved", sum(needs.reserved_by_pool.values()) / GB, "GB"))
    return [*figures, Figure(f"{name}: planned step", needs.step_s, "s")] if gpu and needs.step_s else figures
