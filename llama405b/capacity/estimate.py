"""Memory, disk and time of a training run, estimated from shapes. Nothing here has been measured on a GPU by this project.

Sources. Memory of a GPU: allocated ``memory``, reserved ``pools``. Time: ``step_time``. Memory of a host: ``run_shape``.
"""

import dataclasses
import math
from collections.abc import Mapping

from llama405b.capacity.coefficients import Rates
from llama405b.capacity.disk import BYTES, LoadingCost, SavingCost, loading, saving
from llama405b.capacity.hardware import GIB, USUAL, Gpu, read_gpus
from llama405b.capacity.memory import Peak, peak
from llama405b.capacity.pools import reserved
from llama405b.capacity.run_shape import INPUTS, PINNED_KINDS, RunShape
from llama405b.capacity.setting import Setting, Shape
from llama405b.capacity.step_time import StepTime, step_time
from llama405b.contract.adapters import adapted
from llama405b.contract.cadence import Cadence

RUNTIME_BYTES = 2 * GIB  # CUDA's context and NCCL's buffers
PINNED_BYTES_PER_S = 100e9 / 60  # by a rank: registering 100 GB takes about a minute; a prior
DISK_BYTES_PER_S = 5e9  # of one host, as checkpoints are written


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
class Estimate:
    """What it takes."""

    run: RunShape
    peak: Peak  # of a GPU: what is allocated then
    held_by_host: Mapping[str, float]  # bytes of RAM per host
    weights_bytes: int  # of disk, for the files in BF16
    checkpoints_bytes: int  # of disk, while one more than ``keep`` is being written
    time: StepTime | None  # None: unknown for these numerics
    loading: LoadingCost
    saving: SavingCost
    runtime_bytes: float  # of a GPU, beside the peak
    on_cpu: bool = False

    @property
    def host_bytes(self) -> float:
        """Bytes of RAM per host; 0: only what loading needs."""
        return sum(self.held_by_host.values())

    @property
    def gpu_bytes(self) -> float:
        """Allocated per GPU at the peak, with CUDA's context and NCCL's buffers: with less memory it does not run."""
        return self.peak.total + self.runtime_bytes

    @property
    def reserved(self) -> Mapping[str, int]:
        """What PyTorch reserves per GPU, by pool; empty: not known."""
        return {} if self.on_cpu else reserved(self.run)

    @property
    def gpu_reserved_bytes(self) -> float | None:
        """Its sum, with CUDA's context and NCCL's buffers: with less memory it runs slower; None: not known."""
        pools = self.reserved
        return sum(pools.values()) + self.runtime_bytes if pools else None

    @property
    def pinned_bytes(self) -> float:
        """Of a host's memory, what is pinned before the first step: what crosses to GPUs, and copies of what is saved."""
        if self.on_cpu:
            return 0.0
        inputs = self.held_by_host.get(INPUTS, 0.0)
        if self.run.offload == "none":
            return inputs + self.saving.staged_bytes * Cadence.read(self.run.every).saves
        return inputs + sum(self.held_by_host.get(name, 0.0) for name in PINNED_KINDS[self.run.offload])

    @property
    def pinning_s(self) -> float:
        """How long that takes; all ranks of a host at the same time."""
        return self.pinned_bytes / min(self.run.world, self.run.ranks_per_host) / PINNED_BYTES_PER_S

    @property
    def step_s(self) -> float | None:
        """The time of a step."""
        return self.time.step_s if self.time else None


def estimate(run: RunShape, cluster: Cluster | None = None, ram_bytes: float = 0.0) -> Estimate:
    """Estimate what a run takes; by default on H100s, whose hosts have ``ram_bytes``; 0: unknown."""
    cluster = cluster or Cluster()
    time, disk = _time(run, cluster), cluster.disk_bytes_per_s
    step_s = time.step_s if time else None
    return Estimate(
        run=run,
        peak=peak(run),
        held_by_host=run.host_bytes,
        weights_bytes=BYTES * run.llama.parameters,
        checkpoints_bytes=(run.keep + 1) * run.checkpoint_bytes,
        time=time,
        loading=loading(run.llama, run.hosts, disk, cluster.nic_bytes_per_s),
        saving=saving(
            run.checkpoint_bytes / run.hosts,
            disk,
            step_s,
            run.mtbf_s / run.world,
            run.room(ram_bytes),
            at_once=run.offload == "none" and not cluster.gpu.is_cpu,
        ),
        runtime_bytes=cluster.runtime_bytes,
        on_cpu=cluster.gpu.is_cpu,
    )


def seconds_per_step(run: RunShape, cluster: Cluster) -> float:
    """Return the time of a step, alone; infinite for numerics that nobody timed."""
    time = _time(run, cluster)
    return time.step_s if time else math.inf


def _time(run: RunShape, cluster: Cluster) -> StepTime | None:
    """The time of a step; None for numerics that nobody timed."""
    if run.numerics == "fp32" and not cluster.rates:
        return None
    return step_time(setting_of(run, cluster), cluster.rates or Rates.read())


def setting_of(run: RunShape, cluster: Cluster) -> Setting:
    """Return what is trained on what, as the model of a step's time takes it."""
    gradient = run.gradient_bytes
    weights = run.weight_bytes if run.offload == "all" else 0
    if run.adapter.trains:
        weights = run.compute_bytes * (run.offload == "all")
    return Setting(
        Shape.of(run.llama), cluster.pace or cluster.gpu, run.world, run.ranks_per_host, cluster.nic_bytes_per_s, run.seq_len,
        run.micro_batch, run.rounds, gradient,
        units=1 + run.halves,
        update_bytes=run.update_bytes_per_parameter,
        updates_on_host=run.offload != "none",
        norm_bytes=gradient * run.overlap,
        copied_up=weights,
        copied_down=gradient * (run.offload != "none"),
        compute_bytes=run.compute_bytes,
        sharded_over=run.shards,
        tp=run.tp,
        cp=run.cp,
        stages=run.stages,
        chunks=run.chunks if run.pp > 1 else 1,
        reshard=not run.keeps_weights,
        gathers_once=run.keeps_weights,
        loss_of_parts=run.loss == "parts",
        kept_by=run.kept_by,
        ours=True,
        compiled=run.compiled,
        fused=run.fused,
        fp8=run.numerics == "fp8",
        inputs_copied=run.activations == "host",
        recompute=run.recompute,
        reduces_once=not run.reduces_each,
        trained=run.trained / run.llama.parameters,
        adapted=adapted(run.llama, run.adapter),
    )  # fmt: skip


def describe_needs(run: RunShape) -> list[str]:
    """Say what a run takes, as lines of text."""
    needs = estimate(run)
    ram = "host memory only while loading"
    if needs.host_bytes:
        ram = f"{_gib(needs.host_bytes)} of RAM per host ({run.hosts} of {run.world // run.hosts} ranks)"
    time = ""
    if needs.step_s:
        time = f", about {needs.step_s:.1f} s per step on H100s"
    return [
        f"estimate     GPU memory per rank: {_both(needs)}; {ram}{time}; compared with one GPU, not yet with several",
        f"disk         {_gib(needs.weights_bytes)} of weights, {_gib(needs.checkpoints_bytes)} for {run.keep + 1} checkpoints",
        _saving(needs.saving),
    ]


def _saving(found: SavingCost) -> str:
    return (
        f"save         {_gib(found.n_bytes)} per host, {found.write_s:,.0f} s at {DISK_BYTES_PER_S / 1e9:.0f} GB/s, beside training; "
        "what is not written when its next update comes takes CPU memory, or delays it"
    )


def table_row(name: str, run: RunShape) -> str:
    """Return a run as a row of the table in README and docs/plan.md."""
    needs = estimate(run)
    ram, time = "-", "-"
    if needs.host_bytes:
        ram = _gib(needs.host_bytes)
    if needs.step_s:
        time = f"{needs.step_s:.0f} s"
    cells = [
        name, run.numerics, run.offload, f"{run.world}", _both(needs, short=True), ram, _gib(needs.weights_bytes),
        _gib(needs.checkpoints_bytes), time,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _both(needs: Estimate, *, short: bool = False) -> str:
    """Allocated and reserved memory of a GPU, if that is known."""
    kept = needs.gpu_reserved_bytes
    if kept is None:
        return _gib(needs.gpu_bytes)
    words = (" /", "") if short else (" GiB allocated,", " reserved")
    return f"{needs.gpu_bytes / GIB:,.0f}{words[0]} {_gib(kept)}{words[1]}"


def _gib(n_bytes: float) -> str:
    return f"{n_bytes / GIB:,.0f} GiB"
