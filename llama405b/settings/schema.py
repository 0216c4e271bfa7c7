"""Every setting: frozen dataclasses with units, defaults and help texts; ``config`` reads them. No torch.

How often a run saves is one: ``100`` steps, ``10m``, or ``auto``.
"""

import contextlib
import dataclasses
import math
import re
import typing
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, Literal

from llama405b.contract.errors import UserError, seconds, staging_bytes
from llama405b.settings.strategies import STRATEGIES, Name, Strategy

FIRST_S = 600.0  # with auto: until the first save, whose cost is not known yet
LEAST_S = 60.0
MOST_EXPONENT = 700.0  # that a float holds


EPOCH = "epoch"  # of evaluation.every


def read_evaluations(text: str) -> str:
    """Read ``100`` or ``epoch``; ``0``: never.

    Raises:
        UserError: It is none of them.
    """
    if text != EPOCH and not re.fullmatch(r"0|[1-9]\d{0,8}", text):
        raise UserError(f"evaluation.every is {text!r}; write a number of steps, or epoch; 0: never")
    return text


@dataclasses.dataclass(frozen=True, slots=True)
class Cadence:
    """When to save: after so many steps, after so long, or as often as is best; all 0: never."""

    steps: int = 0
    seconds: float = 0.0
    auto: bool = False

    @classmethod
    def read(cls, text: str) -> "Cadence":
        """Read ``100``, ``10m`` or ``auto``; ``0``: never.

        Raises:
            UserError: It is none of them.
        """
        if text == "auto":
            return cls(auto=True)
        if text.isdecimal() and len(text) < 10:
            return cls(steps=int(text))
        found = 0.0
        with contextlib.suppress(UserError):
            found = seconds(text, "")
        if not found or text[-1].isdecimal():
            raise UserError(
                f"checkpoint.every is {text!r}; write a number of steps, a time like 10m, or auto; 0: never"
            )
        return cls(seconds=found)

    @property
    def saves(self) -> bool:
        """Whether it saves at all."""
        return self != Cadence()

    def due(self, step: int, since_s: float, best_s: float) -> bool:
        """Return whether to save after this step, ``since_s`` after the last save; ``best_s``: see ``best_interval``."""
        if self.steps:
            return step % self.steps == 0
        return self.saves and since_s >= self.interval_s(0.0, best_s)

    def interval_s(self, step_s: float, best_s: float) -> float:
        """Return the seconds between saves, if a step takes ``step_s``; 0: unknown."""
        return self.steps * step_s or (best_s if self.auto else self.seconds)


def best_interval(cost_s: float | None, restart_s: float, mtbf_s: float) -> float:
    """Return the seconds between saves at which a run loses the least: to saving, and to steps that a failure undoes.

    ``sqrt(2 C (M + R)) - C`` for saves that block for C, restarts that take R, and a mean time M between failures: J. T. Daly, A higher
    order estimate of the optimum checkpoint interval for restart dumps (2006), in its first-order form; Young (1974) is without R.
    M is ``checkpoint.mtbf`` over the ranks; its default is that of Llama 3's training (arXiv 2407.21783: 419 unexpected interruptions
    of 16,384 GPUs in 54 days).
    """
    if cost_s is None:
        return FIRST_S
    return max(LEAST_S, math.sqrt(2 * cost_s * (mtbf_s + restart_s)) - cost_s)


def share_that_counts(interval_s: float, cost_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the share of the time in which a run makes steps that last: not saves, restarts, or steps that a failure undoes.

    ``t exp(-R / M) / (M (exp((t + C) / M) - 1))`` for t between saves: Daly's complete model (as for ``best_interval``, equation 20),
    where failures come at random, and during saves and restarts as well.
    """
    together = (interval_s + cost_s) / mtbf_s
    if together > MOST_EXPONENT:
        return 0.0
    return interval_s / mtbf_s * math.exp(-restart_s / mtbf_s) / math.expm1(together)


Numerics = Literal["fp32-master", "fp8", "pure-bf16", "bf16-stochastic", "fp32"]
FP32_MASTERS = ("fp32-master", "fp8")  # FP32 weights, gradients and moments; gathered in BF16
IN_BF16 = ("pure-bf16", "bf16-stochastic")  # weights, gradients and moments; both take the same memory
PipelineSchedule = Literal["1f1b", "interleaved", "gpipe"]
Offload = Literal["none", "optimizer", "all"]
Moments = Literal["fp32", "bf16"]
LossOf = Literal["logits", "parts"]
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # what an adapter can be beside
Activations = Literal["device", "host"]
TRACKERS = ("wandb", "tensorboard")
LOSS_PART = 16_384  # words of a part; at least the hidden size, so that their logits take no less than the gradient of hidden states
# Cost of each choice of numerics, in bytes per parameter: weight + gradient + two moments.
BYTES_PER_PARAMETER = {**dict.fromkeys(FP32_MASTERS, 4 + 4 + 8), **dict.fromkeys(IN_BF16, 2 + 2 + 4), "fp32": 4 + 4 + 8}
COMPUTE_BYTES = {**dict.fromkeys(FP32_MASTERS, 2), **dict.fromkeys(IN_BF16, 2), "fp32": 4}  # of a gathered parameter


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
        "what a decoder layer computes again in the backward pass. full: all; operators: all but matrix products and attention; "
        "operators:K: so in the last K layers of each pipeline stage, full in the others; every:N: all in every Nth layer; none; auto: "
        "what the plan finds fastest that fits",
    )
    activations: Activations = option(
        "device",
        "host: the inputs of checkpointed layers wait in CPU memory for the backward pass, and a GPU holds four of them, not one for each "
        "layer",
    )
    compile: bool = option(
        False,
        "torch.compile decoder layers, one graph for all: norms, rotary embedding and activations become few kernels; rounds otherwise",
    )
    fused: bool = option(
        False,
        "compute RMSNorm in one kernel, and SwiGLU so that two tensors are kept instead of four, each if a check on every rank finds it "
        "right; rounds otherwise",
    )
    resize_vocabulary: bool = option(
        False,
        "add embeddings, and rows of the head, for the tokenizer's tokens that have none, to a multiple of 128: the mean of the others",
    )
    layers: int = option(0, "keep only the first N decoder layers, for quick experiments; 0: all")
    weights: Literal["files", "random"] = option("files", "random: generate them on rank 0 instead of reading files")

    @property
    def chooses_recompute(self) -> bool:
        """Whether the plan chooses what is computed again."""
        return self.activation_checkpointing == "auto"


@dataclasses.dataclass(frozen=True, slots=True)
class Adapter:
    """What is trained beside the model's weights, which then stay as they are."""

    kind: Literal["none", "lora"] = option(
        "none", "lora: beside each target train a product of two narrow matrices (arXiv 2106.09685), and nothing else"
    )
    rank: int = option(16, "columns of the one and rows of the other")
    alpha: float = option(32.0, "the product counts alpha / rank times")
    targets: tuple[str, ...] = option(TARGETS, "matrices of each decoder layer that have one")
    path: str = option(
        "",
        "an adapter in peft's format to begin with, which has this rank, alpha and targets; default: random, with a product of 0",
    )

    @property
    def trains(self) -> bool:
        """Whether there is one, so that the model's own weights are frozen."""
        return self.kind != "none"


@dataclasses.dataclass(frozen=True, slots=True)
class Data:
    """The data to train on."""

    paths: tuple[str, ...] = option(
        (), "files, folders or globs (text, code, JSON, CSV, Parquet), hf://datasets/OWNER/NAME/GLOB, or 'stdlib'"
    )
    weights: tuple[float, ...] = option(
        (), "with several paths: how often each is read, beside the others; default: every sequence once in an epoch"
    )
    seq_len: int = option(4096, "tokens per sequence")
    packing: Literal["isolated", "concatenated"] = option(
        "isolated",
        "documents that share a sequence do not attend to each other, and their positions restart; concatenated: they do",
    )
    documents: Literal["auto", "whole", "split"] = option(
        "auto",
        "whole: one that fits into a sequence is never split, and sequences end with padding; split: every sequence is filled; "
        "auto: whole if parts are only read (prompts, conversations)",
    )
    long_documents: Literal["split", "truncate"] = option(
        "split", "what is done with documents that are longer than a sequence"
    )
    train_on: tuple[str, ...] = option(
        ("assistant",),
        "roles of a conversation whose messages are trained on; the loss mask leaves out all others; last: the last answer alone",
    )
    turns: Literal["auto", "joint", "per-answer"] = option(
        "auto",
        "joint: a conversation is one document; per-answer: one for each answer, as inference will see it; auto: joint where that is "
        "the same, as chat templates that change earlier messages do not have it",
    )
    chat_template: str = option(
        "", "a file with the Jinja template for conversations, on the first host; default: the tokenizer's own"
    )
    template_arguments: tuple[str, ...] = option(
        (),
        "what the chat template is given beside a conversation, as enable_thinking=false, one per flag; in TOML also "
        "template_arguments = {enable_thinking = false}",
    )
    template_date: str = option(
        "",
        "the date that the chat template is given, if it asks for today's, as 2026-11-28; default: the day on which the run first began",
    )
    fields: tuple[str, ...] = option(
        (),
        "the fields of records under other names, like prompt=instruction,completion=output; in TOML also "
        'fields = {prompt = "instruction", completion = "output"}; default: the usual names (docs/data.md)',
    )
    prompts: Literal["text", "chat"] = option(
        "text",
        "chat: records of a question and an answer (also Alpaca's) are conversations, through the chat template; text: they are as they "
        "are, Alpaca's in Alpaca's words",
    )
    bad_records: Literal["refuse", "skip"] = option(
        "refuse", "skip: leave out records that cannot be used, and say how many, and why"
    )
    bad_records_limit: float = option(
        5.0, "with skip: refuse data of which more than this many percent of records are left out"
    )
    bos: Literal["tokenizer", "always", "never"] = option(
        "tokenizer",
        "the token for the begin of a text, before documents that are no conversation; tokenizer: as that puts it",
    )
    special_tokens: Literal["text", "parse"] = option(
        "text",
        "what special tokens are that a text spells; parse: tokens, as those that the chat template writes always are",
    )
    seed: int = option(0, "seed of the shuffle")
    skip: str = option(
        "", "a list of documents that are read but not learnt, on the first host; `llama405b blame` writes one"
    )
    max_bytes: int = option(0, "read at most this many bytes of text (with weights: of each path); 0: all")
    workers: int = option(0, "processes of each rank that read sequences ahead of the step; 0: a thread does")

    @property
    def by_source(self) -> tuple["Data", ...]:
        """What is mixed: each path, with weights."""
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
        "GPU-hours that the run may take, over all its attempts: it warns at 80 %, and saves and stops before they are spent; 0: any",
    )
    extend: str = option(
        "", "a Python file, or an installed module, with functions of your own that every host has (docs/extending.md)"
    )
    on_loss_spike: Literal["warn", "skip", "stop"] = option(
        "warn",
        "what to do when the loss spikes; skip: leave the weights as they are in that step; stop: end the run",
    )
    on_nonfinite: Literal["stop", "skip"] = option(
        "stop", "what to do when the loss or the gradient is NaN or infinite; skip: leave the weights as they are"
    )
    loss_spike_factor: float = option(3.0, "a loss above this many times the median of the last 64 steps is a spike")
    seed: int = option(0, "seed of every random generator")


@dataclasses.dataclass(frozen=True, slots=True)
class Optimizer:
    """AdamW and its schedule."""

    lr: float = option(1e-5, "peak learning rate")
    min_lr: float = option(0.0, "learning rate at the end of the decay")
    warmup: float = option(0.0, "steps of linear warmup; below 1: that share of the run's steps")
    decay: Literal["cosine", "linear", "constant", "wsd"] = option(
        "cosine", "schedule from lr to min_lr after the warmup; wsd: lr stays, and falls in the last decay_steps"
    )
    decay_steps: int = option(0, "with wsd; 0: a tenth of the run's steps")
    betas: tuple[float, float] = option((0.9, 0.95), "AdamW betas")
    eps: float = option(1e-8, "AdamW epsilon")
    weight_decay: float = option(0.1, "applied to matrices, not to vectors (norms)")
    groups: tuple[str, ...] = option(
        (),
        "parameters with a learning rate or decay of their own, or that are not trained, by a pattern of their names in the files, the "
        "first that matches: 'model.embed_tokens.* lr_factor=0.1 weight_decay=0' or 'model.embed_tokens.* frozen=true'; in TOML also "
        "[[optimizer.groups]] with names, lr_factor, weight_decay, frozen",
    )
    max_norm: float = option(1.0, "clip the global gradient norm to this; 0: no clipping")

    def warmup_steps(self, total_steps: int) -> int:
        """Return the steps of the warmup of a run of so many."""
        return math.ceil(self.warmup * total_steps) if self.warmup < 1 else int(self.warmup)


@dataclasses.dataclass(frozen=True, slots=True)
class Parallel:
    """How the model is split over the ranks."""

    strategy: Name = option(
        "fsdp2",
        "fsdp2: fully_shard; zero3: the same; zero2 and zero1: weights stay gathered during a step, with zero1 gradients, too, until its "
        "last micro-batch; ddp: a copy of the model on each rank; hsdp: one on each host; 3d: tp, pp and shards, as they are fastest; "
        "auto: fsdp2 if that fits, else the fastest mesh that does; fsdp1: FullyShardedDataParallel",
    )
    dp_replicate: int = option(0, "copies of the model, each sharded over its part of the ranks; 0: as strategy says")
    tp: int = option(1, "ranks that split each matrix (tensor parallelism), neighbors on one host")
    tp_across_hosts: bool = option(False, "allow tp to reach over hosts, whose links are slower")
    cp: int = option(1, "ranks that split each sequence (context parallelism)")
    pp: int = option(1, "ranks that split the layers (pipeline parallelism)")
    pp_schedule: PipelineSchedule = option(
        "1f1b",
        "1f1b: each micro-batch's backward as early as possible; interleaved: also two stages on each rank, for shorter waits; gpipe: all "
        "forwards first",
    )
    wrap: tuple[str, ...] = option(("LlamaDecoderLayer", "Embedding"), "module classes that become FSDP units")
    offload: Offload = option(
        "none",
        "what is kept in CPU memory: optimizer: FP32 weights, moments and the gradient sum, with BF16 weights on the GPU; "
        "all: weights, gradients and moments",
    )
    overlap: bool = option(True, "with offload: update the weights while the next forward runs")
    prefetch: int = option(
        0,
        "FSDP units that are gathered ahead of the one that computes, forward and backward; 0: as FSDP2 does, one at a time",
    )
    reshard_after_forward: int = option(
        0,
        "with N, weights stay gathered over N neighboring ranks, such as those of a host, between forward and backward, which then gathers "
        "from those alone; 0: they are gathered from all ranks again",
    )
    loss: LossOf = option(
        "logits",
        "logits: of all words' logits at once; parts: of 16,384 words' at a time, which takes less memory and computes their product twice",
    )
    moments: Moments = option("fp32", "with offload; bf16: 4 bytes per parameter less of CPU memory, and rounded")
    numerics: Numerics = option(
        "fp32-master",
        "FP32 weights with BF16 compute (16 bytes/parameter); fp8: likewise, with the layers' matrix products in FP8, by torchao; all BF16 "
        "(8), rounded to the nearest or, with bf16-stochastic, up or down so that the mean is right; all FP32 (16)",
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto: CUDA if there is a GPU")
    numa: Literal["auto", "off"] = option("auto", "auto: each rank on its own cores, of its GPU's NUMA node")
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"] = option("FULL_SHARD", "fsdp1 only")
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "none"] = option("BACKWARD_PRE", "fsdp1 only")
    forward_prefetch: bool = option(False, "fsdp1 only")
    limit_all_gathers: bool = option(True, "fsdp1 only")

    @property
    def state_bytes(self) -> tuple[int, int]:
        """Bytes per parameter of weights, gradients and moments: on the device, and in CPU memory."""
        whole = BYTES_PER_PARAMETER[self.numerics] - 4 * (self.moments == "bf16")
        return {"none": (whole, 0), "optimizer": (2, whole), "all": (0, whole)}[self.offload]

    @property
    def in_bf16(self) -> bool:
        """Whether weights, gradients and moments are BF16."""
        return self.numerics in IN_BF16

    @property
    def chunks(self) -> int:
        """Pipeline stages of each rank."""
        return 2 if self.pp_schedule == "interleaved" else 1

    @property
    def of_strategy(self) -> Strategy:
        """What the strategy's name sets."""
        return STRATEGIES[self.strategy]

    @property
    def by_fsdp1(self) -> bool:
        """Whether FullyShardedDataParallel is the engine; all else is FSDP2's."""
        return self.strategy == "fsdp1"

    @property
    def updates_on_cpu(self) -> bool:
        """Whether the CPU updates the weights, unit by unit."""
        return self.offload != "none" and not self.by_fsdp1

    @property
    def updates_by_unit(self) -> bool:
        """Whether the CPU updates the weights unit by unit, with sums of gradients apart from FSDP's own."""
        return self.updates_on_cpu and (self.overlap or self.offload == "optimizer" or self.moments == "bf16")

    @property
    def hides_update(self) -> bool:
        """Whether the weights are updated while the next forward runs."""
        return self.overlap and self.updates_on_cpu

    @property
    def reuses_gradients(self) -> bool:
        """Whether gradients keep their memory between steps: FSDP1 wants it with offload, FSDP2 would then block on copies."""
        return self.offload == "all" and self.by_fsdp1


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """When and where to save the run."""

    dir: str = option(
        "", "a directory that all hosts share, or with storage = local one on each; default: <run>/checkpoints"
    )
    storage: Literal["shared", "local"] = option(
        "shared", "local: each host keeps what its ranks wrote on its own disk, and a copy of the host before it"
    )
    replicas: int = option(1, "with storage = local: 0: no copies, so a lost host loses all checkpoints")
    every: str = option(
        "100",
        "steps between checkpoints, a time like 10m, or auto: the interval that loses least time, by the mean time between failures "
        "(the last step is always saved); 0: never",
    )
    mtbf: float = option(50_000.0, "with auto: mean hours between failures of one rank; rented machines may have fewer")
    staging: str = option(
        "auto",
        "with saves beside training: CPU memory per host for copies, like 200GB; auto: up to 80% of what is free; 0: none",
    )
    keep: int = option(2, "how many of this run's newest checkpoints to keep; at least 2")
    max_failures: int = option(
        5, "saves in a row that may fail before the run ends, so that no more steps are lost; 0: any number"
    )
    keep_best: bool = option(
        False, "keep the one with the least evaluation loss as well, and save whenever an evaluation is the best so far"
    )
    after_save: str = option(
        "",
        "shell command for each checkpoint that has landed, beside training and in order, such as 'rclone copy $LLAMA405B_CHECKPOINT …'; "
        "on the first host, or with storage = local on each",
    )
    after_save_limit: int = option(
        21600, "seconds that after_save may take for one checkpoint; then it is ended, and tried again"
    )
    delete_unsent: bool = option(False, "delete old checkpoints even if after_save has not succeeded for them")
    allow_changes: tuple[str, ...] = option(
        (),
        "resume although these differ from the checkpoint's: model, data, optimizer.lr and others that a refusal names; all: anything",
    )

    @property
    def copies(self) -> int:
        """How many copies are made of each host's part."""
        return self.replicas if self.storage == "local" else 0

    @property
    def staging_bytes(self) -> int | None:
        """CPU memory per host for copies of what is saved; None: as much as is free."""
        return staging_bytes(self.staging)

    @property
    def cadence(self) -> Cadence:
        """When to save."""
        return Cadence.read(self.every)


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
        0.0, "of the training data's tokens, whole documents held out for that if no paths are named; at most 0.5"
    )
    max_sequences: int = option(0, "evaluate on at most this many sequences, evenly spaced; 0: all")
    micro_batch_size: int = option(0, "sequences per forward pass on each rank; 0: as in training")
    prompts: tuple[str, ...] = option(
        (),
        "texts, one per flag or line, that are continued at each evaluation, greedily: into the log, the report and trackers",
    )
    prompt_tokens: int = option(32, "tokens of each continuation; every one is a forward of the whole model")

    @property
    def evaluates(self) -> bool:
        """Whether it does at all."""
        return self.every != "0"

    def due(self, step: int, epoch_steps: Fraction) -> bool:
        """Return whether to evaluate after a step; ``epoch_steps``: steps of an epoch, whole or not."""
        if self.every == EPOCH:
            return step // epoch_steps > (step - 1) // epoch_steps
        return step % int(self.every) == 0


@dataclasses.dataclass(frozen=True, slots=True)
class Tracking:
    """Trackers that the numbers of metrics.jsonl are sent to, beside training."""

    to: tuple[str, ...] = option((), "wandb, tensorboard, or both")
    project: str = option("llama405b", "of W&B")
    entity: str = option("", "user or team of W&B; default: that of the key")
    display_name: str = option("", "of the run there; default: its name here")
    group: str = option("", "of W&B")
    tags: tuple[str, ...] = option((), "of W&B")
    log_model: bool = option(
        False, "send W&B what launch --export has written, as an artifact; checkpoints are never sent"
    )
    offline: bool = option(False, "write W&B's files below the run, for `wandb sync`, and send nothing")


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

    @property
    def left_to_plan(self) -> str:
        """The setting that the plan chooses, with its name; '': none."""
        if self.parallel.of_strategy.chosen:
            return f"--parallel.strategy {self.parallel.strategy}"
        return "--model.activation_checkpointing auto" if self.model.chooses_recompute else ""


def fields() -> Iterator[tuple[str, Any, Any, str]]:
    """Yield every field as ``(section.key, type, default, help)``."""
    for section, cls in typing.get_type_hints(Config).items():
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            yield f"{section}.{field.name}", hints[field.name], field.default, field.metadata["help"]


TYPES: dict[str, Any] = {key: type_ for key, type_, _, _ in fields()}
LAST = "last"  # among data.train_on: the last answer
TRAINED_ON = ("assistant", LAST, "user", "system", "tool")
PAIRS = ("data.fields", "data.template_arguments")  # NAME=VALUE each; in TOML tables, too
ONE_PER_FLAG = ("evaluation.prompts", "data.template_arguments")  # lists whose entries may have commas
