"""Every setting, as frozen dataclasses with units, defaults and help texts. Imports no torch.

``config`` fills them from presets, files and flags. How often a run saves has a type of its own: ``100`` steps, ``10m``, or ``auto``.
"""

import contextlib
import dataclasses
import math
import re
import typing
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, Literal

from llama405b.contract.errors import UserError, parse_seconds, parse_staging_bytes
from llama405b.contract.software import DOCS
from llama405b.settings.choices import (
    OPTIMIZERS,
    STRATEGIES,
    FsdpUnit,
    OptimizerName,
    OptimizerSpec,
    Strategy,
    StrategyName,
)

FIRST_INTERVAL_S = 600.0  # before the first save with auto, when the cost of a save is unknown
MIN_INTERVAL_S = 60.0
MAX_EXPONENT = 700.0  # math.exp overflows a float above about 709


EPOCH = "epoch"  # of evaluation.every


def parse_evaluation_interval(text: str) -> str:
    """Check and return ``100`` or ``epoch``; ``0``: never.

    Raises:
        UserError: The text is something else.
    """
    if text != EPOCH and not re.fullmatch(r"0|[1-9]\d{0,8}", text):
        raise UserError(f"evaluation.every is {text!r}; write a number of steps, or epoch; 0: never")
    return text


@dataclasses.dataclass(frozen=True, slots=True)
class Cadence:
    """When to save: every N steps, every N seconds, or at the best interval (auto); all 0: never."""

    steps: int = 0
    seconds: float = 0.0
    auto: bool = False

    @classmethod
    def parse(cls, text: str) -> "Cadence":
        """Parse ``100``, ``10m`` or ``auto``; ``0``: never.

        Raises:
            UserError: It is none of them.
        """
        if text == "auto":
            return cls(auto=True)
        if text.isdecimal() and len(text) < 10:
            return cls(steps=int(text))
        duration_s = 0.0
        with contextlib.suppress(UserError):
            duration_s = parse_seconds(text, "")
        if not duration_s or text[-1].isdecimal():
            raise UserError(
                f"checkpoint.every is {text!r}; write a number of steps, a time like 10m, or auto; 0: never"
            )
        return cls(seconds=duration_s)

    @property
    def is_enabled(self) -> bool:
        """Whether the run saves at all."""
        return self != Cadence()

    def is_due(self, step: int, since_s: float, best_s: float) -> bool:
        """Return whether to save after this step, ``since_s`` after the last save; ``best_s``: see ``best_interval_s``."""
        if self.steps:
            return step % self.steps == 0
        return self.is_enabled and since_s >= self.interval_s(0.0, best_s)

    def interval_s(self, step_s: float, best_s: float) -> float:
        """Return the seconds between saves for steps of ``step_s``; 0: unknown."""
        return self.steps * step_s or (best_s if self.auto else self.seconds)


def best_interval_s(cost_s: float | None, restart_s: float, mtbf_s: float) -> float:
    """Return the interval in seconds that loses the least time to saves and to steps a failure undoes.

    ``sqrt(2 C (M + R)) - C`` for saves that block for C, restarts that take R, and a mean time M between failures: J. T. Daly, A higher
    order estimate of the optimum checkpoint interval for restart dumps (2006), in its first-order form; Young (1974) leaves out R.
    M is ``checkpoint.mtbf`` over the ranks; its default is that of Llama 3's training (arXiv 2407.21783: 419 unexpected interruptions
    of 16,384 GPUs in 54 days).
    """
    if cost_s is None:
        return FIRST_INTERVAL_S
    return max(MIN_INTERVAL_S, math.sqrt(2 * cost_s * (mtbf_s + restart_s)) - cost_s)


def useful_fraction(interval_s: float, cost_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the fraction of time spent on lasting steps, not on saves, restarts or undone steps.

    ``t exp(-R / M) / (M (exp((t + C) / M) - 1))`` for t between saves: Daly's complete model (as for ``best_interval_s``, equation 20),
    where failures come at random, and during saves and restarts as well.
    """
    exponent = (interval_s + cost_s) / mtbf_s
    if exponent > MAX_EXPONENT:
        return 0.0
    return interval_s / mtbf_s * math.exp(-restart_s / mtbf_s) / math.expm1(exponent)


Numerics = Literal["fp32-master", "fp8", "pure-bf16", "bf16-stochastic", "fp32"]
FP32_MASTERS = ("fp32-master", "fp8")  # FP32 weights, gradients and moments; gathered in BF16
BF16_NUMERICS = ("pure-bf16", "bf16-stochastic")  # weights, gradients and moments; both take the same memory
PipelineSchedule = Literal["1f1b", "interleaved", "gpipe"]
Offload = Literal["none", "optimizer", "all"]
Moments = Literal["fp32", "bf16"]
LossMode = Literal["full", "chunked"]
ADAPTER_TARGETS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)  # linear layers that can have an adapter
Activations = Literal["device", "host"]
TRACKERS = ("wandb", "tensorboard")
VOCAB_CHUNK = 16_384  # vocabulary entries; at least the hidden size, so that their logits take no less than the gradient of hidden states
STATE_BYTES = {  # of a weight as it is kept, of its gradient, and of a moment
    **dict.fromkeys(FP32_MASTERS, 4),
    **dict.fromkeys(BF16_NUMERICS, 2),
    "fp32": 4,
}
COMPUTE_BYTES = {
    **dict.fromkeys(FP32_MASTERS, 2),
    **dict.fromkeys(BF16_NUMERICS, 2),
    "fp32": 4,
}  # bytes of a gathered parameter


def moment_bytes(numerics: Numerics, moments: Moments) -> int:
    """Return the bytes of one moment of a parameter."""
    return 2 if moments == "bf16" else STATE_BYTES[numerics]


def option(default: Any, text: str) -> Any:
    """Declare a field with the help text (and unit) that ``--help`` prints."""
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """The model to train."""

    path: str = option("", "checkpoint directory in Hugging Face format (config.json, *.safetensors)")
    load: Literal["auto", "rank0", "local"] = option(
        "auto", "rank0: rank 0 reads the files and sends; local: each rank reads its own part; auto: local if all can"
    )
    attention: Literal[
        "auto", "flash_attention_4", "flash_attention_3", "flash_attention_2", "varlen", "sdpa", "eager"
    ] = option(
        "auto",
        "auto: the first of these that runs on the GPU and computes what sdpa does (flash_attention_*: if installed; varlen: "
        "PyTorch's own)",
    )
    activation_checkpointing: str = option(
        "full",
        "what the backward pass recomputes of a decoder layer. full: everything; operators: everything but matrix products and attention; "
        "operators:K: operators in the last K layers of each pipeline stage, full in the others; every:N: full in every Nth layer; none; "
        "auto: the fastest that fits, by prediction",
    )
    activations: Activations = option(
        "device",
        "host: offload the inputs of checkpointed layers to CPU memory; the GPU keeps four of them instead of one per layer",
    )
    compile: bool = option(
        False,
        "torch.compile decoder layers, one graph for all: norms, rotary embedding and activations become few kernels (different rounding)",
    )
    fused: Literal["auto", "true", "false"] = option(
        "auto",
        "compute RMSNorm in one kernel, and SwiGLU keeping two tensors instead of four; each is used only if a check passes on every "
        "rank (different rounding). auto: with BF16, FSDP2 and a model that has both, but not with compile, fp8 or adapters",
    )
    resize_vocabulary: bool = option(
        False,
        "add embeddings and head rows for tokens of the tokenizer that have none, up to a multiple of 128; each new one is the mean of the "
        "old ones",
    )
    loss: LossMode = option(
        "full",
        "full: cross-entropy over the whole vocabulary at once; chunked: 16,384 vocabulary entries at a time, with less memory and their "
        "product computed twice",
    )
    layers: int = option(0, "keep only the first N decoder layers, for quick experiments; 0: all")
    weights: Literal["files", "random"] = option("files", "random: generate them on rank 0 instead of reading files")

    @property
    def is_recompute_auto(self) -> bool:
        """Whether the prediction chooses what is recomputed."""
        return self.activation_checkpointing == "auto"


@dataclasses.dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter to train instead of the model's weights, which stay frozen."""

    kind: Literal["none", "lora"] = option(
        "none", "lora: train only a product of two narrow matrices added to each target (arXiv 2106.09685)"
    )
    rank: int = option(16, "inner dimension of the two matrices")
    alpha: float = option(32.0, "the product is scaled by alpha / rank")
    targets: tuple[str, ...] = option(ADAPTER_TARGETS, "linear layers to adapt")
    path: str = option(
        "",
        "initial adapter in peft's format, with the same rank, alpha and targets; default: random, with a product of 0",
    )

    @property
    def is_enabled(self) -> bool:
        """Whether an adapter is trained, so that the model's own weights are frozen."""
        return self.kind != "none"


@dataclasses.dataclass(frozen=True, slots=True)
class Data:
    """The data to train on."""

    paths: tuple[str, ...] = option(
        (), "files, folders or globs (text, code, JSON, CSV, Parquet), hf://datasets/OWNER/NAME/GLOB, or 'stdlib'"
    )
    weights: tuple[float, ...] = option(
        (), "how often each path is read, relative to the others; default: every sequence once per epoch"
    )
    seq_len: int = option(4096, "tokens per sequence")
    packing: Literal["isolated", "concatenated"] = option(
        "isolated",
        "isolated: documents in one sequence do not attend to each other, and positions restart at each; concatenated: they do attend",
    )
    documents: Literal["auto", "whole", "split"] = option(
        "auto",
        "whole: never split a document that fits into a sequence, and pad sequences; split: fill every sequence; "
        "auto: whole if some tokens are not trained on (prompts, conversations)",
    )
    long_documents: Literal["split", "truncate"] = option("split", "what to do with documents longer than a sequence")
    train_on: tuple[str, ...] = option(
        ("assistant",),
        "roles whose messages are trained on; the loss masks all others; last: only the last answer",
    )
    turns: Literal["auto", "joint", "per-answer"] = option(
        "auto",
        "joint: a conversation is one document; per-answer: one document per answer, as inference will see it; auto: joint unless the chat "
        "template changes earlier messages, so that the two differ",
    )
    chat_template: str = option(
        "", "file with the Jinja template for conversations, on the first host; default: the tokenizer's own"
    )
    template_arguments: tuple[str, ...] = option(
        (),
        "extra arguments of the chat template, like enable_thinking=false, one per flag; in TOML also "
        "template_arguments = {enable_thinking = false}",
    )
    template_date: str = option(
        "",
        "today's date for chat templates that ask for it, like 2026-11-28; default: the day on which the run first started",
    )
    fields: tuple[str, ...] = option(
        (),
        "names of the records' fields, like prompt=instruction,completion=output; in TOML also "
        f'fields = {{prompt = "instruction", completion = "output"}}; default: the usual names ({DOCS}/data.md)',
    )
    prompts: Literal["text", "chat"] = option(
        "text",
        "chat: format records of a question and an answer (also Alpaca's) as conversations with the chat template; text: use them as they "
        "are, Alpaca's with Alpaca's prompt",
    )
    bad_records: Literal["refuse", "skip"] = option(
        "refuse", "skip: leave out records that cannot be used, and print how many and why"
    )
    bad_records_limit: float = option(
        5.0, "with skip: refuse data if more than this percentage of its records is left out"
    )
    bos: Literal["tokenizer", "always", "never"] = option(
        "tokenizer",
        "whether documents other than conversations start with the begin-of-text token; tokenizer: as the tokenizer does by default",
    )
    special_tokens: Literal["text", "parse"] = option(
        "text",
        "how to read special tokens spelled out in texts; parse: as tokens, like those that the chat template writes",
    )
    seed: int = option(0, "seed of the shuffle")
    skip: str = option(
        "", "list of documents that are read but not trained on, on the first host; `llama405b blame` writes one"
    )
    max_bytes: int = option(0, "read at most this many bytes of text (with weights: of each path); 0: all")
    workers: int = option(0, "processes per rank that read sequences ahead; 0: one thread")

    @property
    def sources(self) -> tuple["Data", ...]:
        """The sources to mix: one per path if there are weights, else all paths as one."""
        if not self.weights:
            return (self,)
        return tuple(dataclasses.replace(self, paths=(path,), weights=()) for path in self.paths)


@dataclasses.dataclass(frozen=True, slots=True)
class Training:
    """Number and size of the steps."""

    global_batch_size: int = option(
        64, "sequences per step over all ranks; determines gradient accumulation; 0: one micro-batch on each rank"
    )
    micro_batch_size: int = option(1, "sequences per forward pass on each rank")
    max_steps: int = option(0, "number of steps; 0: as set by epochs")
    epochs: float = option(1.0, "passes over the data, if max_steps is 0")
    gpu_hours: float = option(
        0.0,
        "GPU-hour budget across restarts; warns at 80 %, saves and stops before 100 %; 0: unlimited",
    )
    extend: str = option(
        "", f"Python file or installed module with your own functions, present on every host ({DOCS}/extending.md)"
    )
    on_loss_spike: Literal["warn", "skip", "stop"] = option(
        "warn",
        "what to do when the loss spikes; skip: do not update the weights in that step; stop: end the run",
    )
    on_nonfinite: Literal["stop", "skip"] = option(
        "stop", "what to do when the loss or the gradient is NaN or infinite; skip: do not update the weights"
    )
    loss_spike_factor: float = option(3.0, "a loss above this many times the median of the last 64 steps is a spike")
    seed: int = option(0, "seed of every random generator")


@dataclasses.dataclass(frozen=True, slots=True)
class Optimizer:
    """The optimizer and its schedule."""

    kind: OptimizerName = option(
        "adamw",
        "adamw; lion: the sign of an averaged gradient, with one moment instead of two; muon: orthogonal updates of layers' matrices, and "
        "adamw for all else",
    )
    lr: float = option(1e-5, "peak learning rate")
    min_lr: float = option(0.0, "learning rate at the end of the decay")
    warmup: float = option(0.0, "steps of linear warmup; below 1: a fraction of the run's steps")
    decay: Literal["cosine", "linear", "constant", "wsd"] = option(
        "cosine", "schedule from lr to min_lr after the warmup; wsd: constant, then falls over the last decay_steps"
    )
    decay_steps: int = option(0, "with wsd: steps of the decay; 0: a tenth of the run's steps")
    betas: tuple[float, float] = option((0.9, 0.95), "decay of the moments, of AdamW and Lion")
    eps: float = option(1e-8, "AdamW epsilon")
    momentum: float = option(0.95, "decay of Muon's momentum")
    weight_decay: float = option(0.1, "applied to matrices, not to vectors (norms)")
    groups: tuple[str, ...] = option(
        (),
        "parameters with their own learning rate or weight decay, or frozen, by a pattern of their names in the files; the first match "
        "counts: 'model.embed_tokens.* lr_factor=0.1 weight_decay=0' or 'model.embed_tokens.* frozen=true'; in TOML also "
        "[[optimizer.groups]] with names, lr_factor, weight_decay, frozen",
    )
    max_norm: float = option(1.0, "clip the global gradient norm to this; 0: no clipping")

    @property
    def spec(self) -> OptimizerSpec:
        """What is known of the optimizer."""
        return OPTIMIZERS[self.kind]

    def warmup_steps(self, total_steps: int) -> int:
        """Return the number of warmup steps of a run of ``total_steps``."""
        return math.ceil(self.warmup * total_steps) if self.warmup < 1 else int(self.warmup)


@dataclasses.dataclass(frozen=True, slots=True)
class Parallel:
    """How the model is split over the ranks."""

    strategy: StrategyName = option(
        "fsdp2",
        "fsdp2: fully_shard; zero3: the same; zero2: weights stay gathered during a step; zero1: gradients too, until its last "
        "micro-batch; ddp: a copy of the model on each rank; hsdp: a copy on each host; 3d: the fastest tp, pp and sharding; "
        "auto: fsdp2 if that fits, else the fastest mesh that does; fsdp1: FullyShardedDataParallel",
    )
    dp_replicate: int = option(0, "copies of the model, each sharded over its own ranks; 0: set by strategy")
    tp: int = option(1, "ranks that split each matrix (tensor parallelism), neighbors on one host")
    tp_across_hosts: bool = option(False, "allow tp across hosts, over their slower links")
    cp: int = option(1, "ranks that split each sequence (context parallelism)")
    pp: int = option(1, "ranks that split the layers (pipeline parallelism)")
    pp_schedule: PipelineSchedule = option(
        "1f1b",
        "1f1b: run each micro-batch's backward as early as possible; interleaved: 1f1b with two stages per rank, for shorter waits; gpipe: "
        "all forwards first",
    )
    fsdp_unit: FsdpUnit = option("layer", "FSDP units: decoder layers, or each layer's attention and MLP")
    fsdp_embedding: bool = option(True, "make the embedding an FSDP unit of its own")
    offload: Offload = option(
        "none",
        "what to keep in CPU memory. optimizer: FP32 weights, moments and the gradient sum, with BF16 weights on the GPU; "
        "all: weights, gradients and moments",
    )
    overlap: bool = option(True, "with offload: update the weights while the next forward runs")
    prefetch: int = option(
        0,
        "FSDP units to gather ahead of the computing one, in forward and backward; 0: FSDP2's default, one at a time",
    )
    reshard_after_forward: int = option(
        0,
        "N: keep weights gathered over N neighboring ranks, such as those of a host, between forward and backward, so backward gathers "
        "only from those; 0: gather from all ranks again",
    )
    moments: Moments = option("fp32", "with offload; bf16: rounded, and 4 bytes of CPU memory less per parameter")
    numerics: Numerics = option(
        "fp32-master",
        "fp32-master: FP32 weights with BF16 compute (16 bytes/parameter); fp8: the same, with the layers' matrix products in FP8 by "
        "torchao; pure-bf16: all BF16 (8); bf16-stochastic: the same, rounded up or down at random so that the mean is right; fp32: all "
        "FP32 (16)",
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto: CUDA if there is a GPU")
    numa: Literal["auto", "off"] = option(
        "auto", "auto: each rank on its own cores of the NUMA node of its GPU, with memory of that node"
    )
    cuda_connections: int = option(
        0,
        "hardware queues of a GPU (CUDA_DEVICE_MAX_CONNECTIONS, at most 32): with more, copies and collectives wait less for computation; "
        "0: CUDA's own number, 8",
    )
    nccl_ctas: int = option(
        0,
        "most thread blocks of a collective (NCCL_MAX_CTAS): fewer leave more of the GPU to matrix products, and slow collectives; "
        "0: NCCL's choice",
    )
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"] = option("FULL_SHARD", "fsdp1 only")
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "none"] = option("BACKWARD_PRE", "fsdp1 only")
    forward_prefetch: bool = option(False, "fsdp1 only")
    limit_all_gathers: bool = option(True, "fsdp1 only")

    def state_bytes(self, n_moments: float) -> tuple[float, float]:
        """Return the bytes per parameter of weights, gradients and moments: on the device and in CPU memory."""
        total = 2 * STATE_BYTES[self.numerics] + n_moments * moment_bytes(self.numerics, self.moments)
        return {"none": (total, 0), "optimizer": (2, total), "all": (0, total)}[self.offload]

    @property
    def is_bf16(self) -> bool:
        """Whether weights, gradients and moments are BF16."""
        return self.numerics in BF16_NUMERICS

    @property
    def virtual_stages(self) -> int:
        """Pipeline stages of each rank."""
        return 2 if self.pp_schedule == "interleaved" else 1

    @property
    def strategy_spec(self) -> Strategy:
        """The settings behind the strategy's name."""
        return STRATEGIES[self.strategy]

    @property
    def is_fsdp1(self) -> bool:
        """Whether FSDP1 (FullyShardedDataParallel) shards the model; every other strategy uses FSDP2."""
        return self.strategy == "fsdp1"

    @property
    def updates_on_cpu(self) -> bool:
        """Whether the CPU updates the weights, unit by unit."""
        return self.offload != "none" and not self.is_fsdp1

    @property
    def updates_by_unit(self) -> bool:
        """Whether the CPU updates the weights unit by unit, with gradient sums kept apart from FSDP's."""
        return self.updates_on_cpu and (self.overlap or self.offload == "optimizer" or self.moments == "bf16")

    @property
    def hides_update(self) -> bool:
        """Whether the weights are updated while the next forward runs."""
        return self.overlap and self.updates_on_cpu

    @property
    def reuses_gradients(self) -> bool:
        """Whether gradients keep their memory between steps.

        FSDP1 needs that with offload; FSDP2 would block on copies.
        """
        return self.offload == "all" and self.is_fsdp1


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """When and where to save the run."""

    dir: str = option(
        "", "directory that all hosts share, or with storage = local one on each host; default: <run>/checkpoints"
    )
    storage: Literal["shared", "local"] = option(
        "shared", "local: each host keeps its own ranks' files on its disk, and a copy of the previous host's"
    )
    replicas: int = option(1, "with storage = local; 0: no copies, so losing a host loses all checkpoints")
    every: str = option(
        "100",
        "steps between checkpoints, a time like 10m, or auto: the interval that loses least time (Young/Daly), from mtbf "
        "(the last step is always saved); 0: never",
    )
    mtbf: float = option(50_000.0, "with auto: mean hours between failures of one rank; use less for rented machines")
    staging: str = option(
        "auto",
        "CPU memory per host for the copies of asynchronous saves, like 200GB; auto: up to 80% of what is free; 0: none",
    )
    keep: int = option(2, "how many of this run's newest checkpoints to keep; at least 2")
    max_failures: int = option(
        5, "end the run after this many failed saves in a row, so that no more steps are lost; 0: never"
    )
    keep_best: bool = option(
        False,
        "also keep the checkpoint with the lowest evaluation loss, and save whenever an evaluation is the best so far",
    )
    after_save: str = option(
        "",
        "shell command to run after each save, in order and in the background, such as 'rclone copy $LLAMA405B_CHECKPOINT …'; runs on the "
        "first host, or with storage = local on each",
    )
    after_save_limit: int = option(
        21600, "seconds that after_save may take per checkpoint; then it is killed and retried"
    )
    delete_unsent: bool = option(False, "delete old checkpoints even if after_save has not succeeded for them")
    allow_changes: tuple[str, ...] = option(
        (),
        "resume even if these differ from the checkpoint's: model, data, optimizer.lr and others that a refusal names; all: everything",
    )

    @property
    def copies(self) -> int:
        """Number of copies of each host's files on other hosts."""
        return self.replicas if self.storage == "local" else 0

    @property
    def staging_bytes(self) -> int | None:
        """CPU memory per host for copies of what is saved; None: auto."""
        return parse_staging_bytes(self.staging)

    @property
    def cadence(self) -> Cadence:
        """When to save."""
        return Cadence.parse(self.every)


@dataclasses.dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a collective may block before the run ends."""

    load: int = option(3600, "seconds a collective may block while loading, in the first step and in a checkpoint")
    step: int = option(600, "seconds a collective may block at all other times")


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    """The loss on data that is not trained on."""

    every: str = option(
        "0",
        "steps between evaluations, or epoch: at the end of each (also before the first and after the last step); 0: never",
    )
    paths: tuple[str, ...] = option((), "files, folders or globs to evaluate on, as data.paths")
    fraction: float = option(
        0.0,
        "fraction of the training data's tokens to hold out, in whole documents, if there are no paths; at most 0.5",
    )
    max_sequences: int = option(0, "evaluate on at most this many sequences, evenly spaced; 0: all")
    micro_batch_size: int = option(0, "sequences per forward pass on each rank; 0: as in training")
    prompts: tuple[str, ...] = option(
        (),
        "texts to continue greedily at each evaluation, one per flag or line; results go to the log, the report and trackers",
    )
    prompt_tokens: int = option(32, "tokens of each continuation; each token takes a forward of the whole model")

    @property
    def is_enabled(self) -> bool:
        """Whether the run evaluates at all."""
        return self.every != "0"

    def is_due(self, step: int, epoch_steps: Fraction) -> bool:
        """Return whether to evaluate after a step; ``epoch_steps``: steps per epoch, possibly fractional."""
        if self.every == EPOCH:
            return step // epoch_steps > (step - 1) // epoch_steps
        return step % int(self.every) == 0


@dataclasses.dataclass(frozen=True, slots=True)
class Tracking:
    """Trackers that receive the numbers of metrics.jsonl in the background."""

    to: tuple[str, ...] = option((), "wandb, tensorboard, or both")
    project: str = option("llama405b", "W&B project")
    entity: str = option("", "W&B user or team; default: that of the API key")
    display_name: str = option("", "name of the run in W&B; default: the run's name")
    group: str = option("", "W&B group")
    tags: tuple[str, ...] = option((), "W&B tags")
    log_model: bool = option(
        False, "upload the model that launch --export wrote to W&B, as an artifact; checkpoints are never uploaded"
    )
    offline: bool = option(False, "write W&B's files into the run's directory for `wandb sync`, and upload nothing")


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """All settings of a training run."""

    model: Model = Model()
    data: Data = Data()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    parallel: Parallel = Parallel()
    adapter: Adapter = Adapter()
    checkpoint: Checkpoint = Checkpoint()
    timeouts: Timeouts = Timeouts()
    evaluation: Evaluation = Evaluation()
    tracking: Tracking = Tracking()

    def fuses(self, is_fusible: bool) -> bool:
        """Return whether ``model.fused`` is on; ``is_fusible``: that of the model's shape."""
        if self.model.fused != "auto":
            return self.model.fused == "true"
        is_bf16 = self.parallel.numerics not in ("fp32", "fp8")
        return is_fusible and is_bf16 and not (self.model.compile or self.adapter.is_enabled or self.parallel.is_fsdp1)

    @property
    def auto_setting(self) -> str:
        """The flag of the setting that the prediction chooses; '' if there is none."""
        if self.parallel.strategy_spec.is_auto:
            return f"--parallel.strategy {self.parallel.strategy}"
        return "--model.activation_checkpointing auto" if self.model.is_recompute_auto else ""


def setting_fields() -> Iterator[tuple[str, Any, Any, str]]:
    """Yield every field as ``(section.key, type, default, help)``."""
    for section, cls in typing.get_type_hints(Config).items():
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            yield f"{section}.{field.name}", hints[field.name], field.default, field.metadata["help"]


SETTING_TYPES: dict[str, Any] = {key: type_ for key, type_, _, _ in setting_fields()}
LAST_ANSWER = "last"  # in data.train_on: only the last answer
TRAIN_ON_ROLES = ("assistant", LAST_ANSWER, "user", "system", "tool")
PAIR_SETTINGS = ("data.fields", "data.template_arguments")  # lists of NAME=VALUE; in TOML also tables
ONE_PER_FLAG = ("evaluation.prompts", "data.template_arguments")  # lists whose entries may contain commas
