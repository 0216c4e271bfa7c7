"""Memory, disk and time of a training run, estimated from shapes. Nothing here has been measured on a GPU by this project.

Sources. Memory of a GPU: ``memory``. Time: ``step_time``. Pinned memory: torch rounds blocks up to powers of two, 19 % for 405B's
shards on 64 ranks.
"""

import dataclasses
import math
from collections.abc import Mapping

from llama405b.capacity.files import BYTES, LoadingCost, SavingCost, loading, saving
from llama405b.capacity.hardware import GIB, USUAL, Gpu, read_gpus
from llama405b.capacity.memory import NORMS, Job, Peak, norm_elements, peak
from llama405b.capacity.setting import Setting, Shape
from llama405b.capacity.step_time import Rates, StepTime, step_time
from llama405b.contract.schema import COMPUTE_BYTES, Checkpoint, Config, Data, Moments, Numerics, Offload, Parallel
from llama405b.contract.units import SPARE
from llama405b.contract.weights import Llama

RANKS_PER_HOST = 8
RUNTIME_BYTES = 2 * GIB  # CUDA's context and NCCL's buffers
DISK_BYTES_PER_S = 5e9  # of one host, as checkpoints are written
PINNED = 1.19

KINDS = ("parameters", "gradients", "moments")
GRADIENT = {"fp32-master": 4, "pure-bf16": 2, "fp32": 4}  # bytes per parameter, kept and reduced


NORMS_IN_FP32 = {"pure-bf16": 4 + 4, "fp32-master": 0, "fp32": 0}  # more bytes per parameter of a norm: master, moments
WEIGHT_IN_FP32 = 2  # of them, those that take no memory of their own in a checkpoint: the master is the weight


NORM = {"pure-bf16": 4 + 4, "fp32-master": 0, "fp32": 0}  # more bytes per parameter of a norm: its master, and moments
NORM_SAVED = {"pure-bf16": 2 + 4, "fp32-master": 0, "fp32": 0}  # of those in a checkpoint: it has the master alone


def checkpoint_bytes_per_parameter(numerics: Numerics, moments: Moments) -> int:
    """Return what a checkpoint holds of a parameter: its weight and two moments, in bytes."""
    weight = GRADIENT[numerics]
    return weight + (4 if moments == "bf16" else 2 * weight)


@dataclasses.dataclass(frozen=True, slots=True)
class Cluster:
    """What it is trained on, beside the number of ranks."""

    gpu: Gpu = dataclasses.field(default_factory=lambda: read_gpus()[USUAL])
    nic_bytes_per_s: float = 400e9  # of a host: eight links of 400 Gbit/s
    disk_bytes_per_s: float = DISK_BYTES_PER_S  # of a host, reading weights and writing checkpoints
    pace: Gpu | None = None  # what its GPUs attain, measured; None: shares of their data sheet
    rates: Rates | None = None  # of that pace; None: the fitted ones
    runtime_bytes: float = RUNTIME_BYTES  # of a GPU, beside the peak


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What is trained, and on how many ranks."""

    llama: Llama
    numerics: Numerics
    offload: Offload
    world: int
    seq_len: int = 4096
    micro_batch: int = 1
    global_batch: int = 64
    keep: int = 2
    overlap: bool = True  # with offload: the update runs under the next forward
    moments: Moments = "fp32"
    wrap: tuple[str, ...] = Parallel().wrap
    ranks_per_host: int = RANKS_PER_HOST
    mtbf_s: float = Checkpoint().mtbf * 3600  # between failures of one rank
    attention: str = "auto"
    packing: str = Data().packing
    every: str = Checkpoint().every
    staging_bytes: int | None = None  # of a host, for copies of what is saved; None: as much as is free

    @classmethod
    def of(cls, llama: Llama, config: Config, world: int) -> "Load":
        """Return what a configuration trains, on ``world`` ranks."""
        return cls(
            llama,
            config.parallel.numerics,
            config.parallel.offload,
            world,
            config.data.seq_len,
            config.training.micro_batch_size,
            config.training.global_batch_size,
            config.checkpoint.keep,
            config.parallel.overlap and config.parallel.fsdp == "fsdp2",
            config.parallel.moments,
            config.parallel.wrap,
            mtbf_s=config.checkpoint.mtbf * 3600,
            attention=config.model.attention,
            packing=config.data.packing,
            every=config.checkpoint.every,
            staging_bytes=config.checkpoint.staging_bytes,
        )

    @property
    def hosts(self) -> int:
        """Hosts, or one with fewer ranks."""
        return max(1, self.world // self.ranks_per_host)

    @property
    def halves(self) -> bool:
        """Whether attention and MLP are units of their own, instead of the decoder layer."""
        return {"LlamaAttention", "LlamaMLP"} <= {*self.wrap} and "LlamaDecoderLayer" not in self.wrap

    @property
    def sums_apart(self) -> bool:
        """Whether the sum of gradients lives in host memory beside those of the next micro-batch."""
        apart = self.overlap or self.moments == "bf16"
        return self.offload == "all" and apart and self.global_batch > self.micro_batch * self.world

    @property
    def weight_bytes(self) -> int:
        """Bytes of a parameter as it is kept."""
        return GRADIENT[self.numerics]  # they have one dtype

    @property
    def moment_bytes(self) -> int:
        """Bytes of a parameter's two moments."""
        return checkpoint_bytes_per_parameter(self.numerics, self.moments) - self.weight_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint on disk, over all ranks."""
        norms = NORM_SAVED[self.numerics] * norm_elements(self.llama, 1)
        return checkpoint_bytes_per_parameter(self.numerics, self.moments) * self.llama.parameters + norms

    @property
    def host_bytes(self) -> dict[str, float]:
        """Bytes in a host's memory, by what they are, as torch pins them."""
        weight, gradient = self.weight_bytes, GRADIENT[self.numerics]
        parts = {
            "none": (0.0, 0.0, 0.0),
            "optimizer": (weight, gradient, self.moment_bytes),
            "all": (weight * PINNED, gradient * (1 + self.sums_apart) * PINNED, self.moment_bytes),
        }[self.offload]
        share = self.ranks_per_host / max(self.world, self.ranks_per_host)
        found = {name: size * self.llama.parameters * share for name, size in zip(KINDS, parts, strict=True) if size}
        norms = NORM[self.numerics] * norm_elements(self.llama, 1) * share
        return found | {NORMS: norms} if found and norms else found

    def room(self, ram_bytes: float) -> float:
        """Bytes of a host's memory that copies of what is saved may take; ``ram_bytes``: of a host; 0: unknown."""
        if self.staging_bytes is not None:
            return self.staging_bytes
        return SPARE * max(0.0, ram_bytes - sum(self.host_bytes.values())) if ram_bytes else math.inf

    @property
    def update_bytes_per_parameter(self) -> int:
        """Bytes that an update reads and writes."""
        published = 2 * (self.offload == "optimizer")
        return 2 * (self.weight_bytes + self.moment_bytes) + GRADIENT[self.numerics] + published


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """What it takes, with activation checkpointing."""

    peak: Peak  # of a GPU
    held_by_host: Mapping[str, float]  # bytes of RAM per host
    weights_bytes: int  # of disk, for the files in BF16
    checkpoints_bytes: int  # of disk, while one more than ``keep`` is being written
    time: StepTime | None  # None: unknown for these numerics
    loading: LoadingCost
    saving: SavingCost
    runtime_bytes: float  # of a GPU, beside the peak

    @property
    def host_bytes(self) -> float:
        """Bytes of RAM per host; 0: only what loading needs."""
        return sum(self.held_by_host.values())

    @property
    def gpu_bytes(self) -> float:
        """Per GPU, at the peak, with CUDA's context and NCCL's buffers."""
        return self.peak.total + self.runtime_bytes

    @property
    def step_s(self) -> float | None:
        """The time of a step."""
        return self.time.step_s if self.time else None


def estimate(load: Load, cluster: Cluster | None = None, ram_bytes: float = 0.0) -> Estimate:
    """Estimate what a run takes; by default on H100s, whose hosts have ``ram_bytes``; 0: unknown."""
    cluster = cluster or Cluster()
    time, disk = _time(load, cluster), cluster.disk_bytes_per_s
    step_s = time.step_s if time else None
    return Estimate(
        peak=peak(_job(load)),
        held_by_host=load.host_bytes,
        weights_bytes=BYTES * load.llama.parameters,
        checkpoints_bytes=(load.keep + 1) * load.checkpoint_bytes,
        time=time,
        loading=loading(load.llama, load.hosts, disk, cluster.nic_bytes_per_s),
        saving=saving(load.checkpoint_bytes / load.hosts, disk, step_s, load.mtbf_s / load.world, load.room(ram_bytes)),
        runtime_bytes=cluster.runtime_bytes,
    )


def _job(load: Load) -> Job:
    kept = {
        "none": (load.weight_bytes, GRADIENT[load.numerics], load.moment_bytes),
        "optimizer": (2, 0, 0),
        "all": (0, 0, 0),
    }[load.offload]
    return Job(
        load.llama,
        load.world,
        load.micro_batch * load.seq_len,
        compute=COMPUTE_BYTES[load.numerics],
        reduce=GRADIENT[load.numerics],
        kept=dict(zip(KINDS, kept, strict=True)),
        halves=load.halves,
        embedding_apart="Embedding" in load.wrap,
        norms=NORM[load.numerics] * (load.offload == "none"),
        sums=load.global_batch > load.micro_batch * load.world,
    )


def _time(load: Load, cluster: Cluster) -> StepTime | None:
    """The time of a step; None for numerics that nobody timed."""
    if load.numerics == "fp32" and not cluster.rates:
        return None
    return step_time(setting_of(load, cluster), cluster.rates or Rates.read())


def setting_of(load: Load, cluster: Cluster) -> Setting:
    """Return what is trained on what, as the model of a step's time takes it."""
    gradient = GRADIENT[load.numerics]
    weights = load.weight_bytes if load.offload == "all" else 0
    return Setting(
        Shape.of(load.llama), cluster.pace or cluster.gpu, load.world, load.ranks_per_host, cluster.nic_bytes_per_s, load.seq_len,
        load.micro_batch, max(1, load.global_batch // (load.micro_batch * load.world)), gradient,
        units=1 + load.halves,
        update_bytes=load.update_bytes_per_parameter,
        updates_on_host=load.offload != "none",
        norm_bytes=gradient * load.overlap,
        copied_forward=weights,
        copied_backward=weights + gradient * (load.offload != "none"),
        compute_bytes=COMPUTE_BYTES[load.numerics],
    )  # fmt: skip


def describe_needs(load: Load) -> list[str]:
    """Say what a run takes, as lines of text."""
    needs = estimate(load)
    ram = "host memory only while loading"
    if needs.host_bytes:
        ram = f"{_gib(needs.host_bytes)} of RAM per host ({load.hosts} of {load.world // load.hosts} ranks)"
    time = ""
    if needs.step_s:
        time = f", about {needs.step_s:.1f} s per step on H100s"
    return [
        f"estimate     {_gib(needs.gpu_bytes)} of GPU memory per rank, {ram}{time}; no GPU has confirmed this yet",
        f"disk         {_gib(needs.weights_bytes)} of weights, {_gib(needs.checkpoints_bytes)} for {load.keep + 1} checkpoints",
        _saving(needs.saving),
    ]


def _saving(found: SavingCost) -> str:
    return (
        f"save         {_gib(found.n_bytes)} per host, {found.write_s:,.0f} s at {DISK_BYTES_PER_S / 1e9:.0f} GB/s, beside training; "
        "what is not written when its next update comes takes CPU memory, or delays it"
    )


def table_row(name: str, load: Load) -> str:
    """Return a run as a row of the table in README and docs/plan.md."""
    needs = estimate(load)
    ram, time = "-", "-"
    if needs.host_bytes:
        ram = _gib(needs.host_bytes)
    if needs.step_s:
        time = f"{needs.step_s:.0f} s"
    cells = [
        name, load.numerics, load.offload, f"{load.world}", _gib(needs.gpu_bytes), ram, _gib(needs.weights_bytes),
        _gib(needs.checkpoints_bytes), time,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _gib(n_bytes: float) -> str:
    return f"{n_bytes / GIB:,.0f} GiB"
