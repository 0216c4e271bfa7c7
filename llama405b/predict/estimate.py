"""Estimate the memory, disk and time of a training run from shapes, on given machines.

Sources: allocated GPU memory ``memory``, reserved GPU memory ``reserved``, time ``step_time``, host memory ``run_shape``. Goodput is the
share of a run's time that makes steps that last: without saves, restarts, and steps that a failure undoes. Single layers and steps have
been compared with one H200 (docs/proof.md), nothing with several GPUs. Machines are detected on hosts, or described by options.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

from llama405b.contract.errors import UserError, pluralize
from llama405b.predict.hardware import DEFAULT_GPU, GIB, Gpu, ModelShape, Rates, TrainingSetup, find_gpu, read_gpus
from llama405b.predict.memory import Peak, find_peak
from llama405b.predict.reserved import predict_reserved
from llama405b.predict.run_shape import LAYER_INPUTS, PINNED_KINDS, PredictedRun
from llama405b.predict.step_time import (
    WEIGHT_BYTES,
    LoadingCost,
    SavingCost,
    StepTime,
    loading_cost,
    saving_cost,
    step_time,
)
from llama405b.settings.schema import Cadence, useful_fraction
from llama405b.spec.adapters import adapted_features

RUNTIME_BYTES = 2 * GIB  # CUDA's context and NCCL's buffers
PINNED_BYTES_PER_S = 100e9 / 60  # by a rank: registering 100 GB takes about a minute; a prior
DISK_BYTES_PER_S = 5e9  # of one host, as checkpoints are written


@dataclasses.dataclass(frozen=True, slots=True)
class Cluster:
    """The hardware that a run is trained on, apart from the number of ranks."""

    gpu: Gpu = dataclasses.field(default_factory=lambda: read_gpus()[DEFAULT_GPU])
    nic_bytes_per_s: float = 400e9  # of a host: eight links of 400 Gbit/s
    disk_bytes_per_s: float = DISK_BYTES_PER_S  # of a host, reading weights and writing checkpoints
    attained: Gpu | None = None  # what its GPUs attain, measured; None: shares of their data sheet
    rates: Rates | None = None  # of that pace; None: the fitted ones
    runtime_bytes: float = RUNTIME_BYTES  # of a GPU, beside the peak


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """The memory, disk and time that a run takes."""

    run: PredictedRun
    peak: Peak  # of a GPU: what is allocated then
    host_bytes_by_kind: Mapping[str, float]  # bytes of RAM per host
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
        return sum(self.host_bytes_by_kind.values())

    @property
    def gpu_bytes(self) -> float:
        """Allocated per GPU at the peak, with CUDA's context and NCCL's buffers: with less memory it does not run."""
        return self.peak.total + self.runtime_bytes

    @property
    def reserved_by_pool(self) -> Mapping[str, int]:
        """Bytes that PyTorch reserves per GPU, by pool; empty: not known."""
        return {} if self.on_cpu else predict_reserved(self.run)

    @property
    def gpu_reserved_bytes(self) -> float | None:
        """Reserved per GPU, with CUDA and NCCL: with less memory it runs slower; None: not known."""
        pools = self.reserved_by_pool
        return sum(pools.values()) + self.runtime_bytes if pools else None

    @property
    def pinned_bytes(self) -> float:
        """Bytes pinned on a host before the first step: for transfers to GPUs, and for checkpoint copies."""
        if self.on_cpu:
            return 0.0
        inputs = self.host_bytes_by_kind.get(LAYER_INPUTS, 0.0)
        if self.run.offload == "none":
            return inputs + self.saving.staged_bytes * Cadence.parse(self.run.every).is_enabled
        return inputs + sum(self.host_bytes_by_kind.get(name, 0.0) for name in PINNED_KINDS[self.run.offload])

    @property
    def pinning_s(self) -> float:
        """Seconds to pin that memory; all ranks of a host pin at the same time."""
        return self.pinned_bytes / min(self.run.world, self.run.ranks_per_host) / PINNED_BYTES_PER_S

    @property
    def step_s(self) -> float | None:
        """The time of a step."""
        return self.time.step_s if self.time else None


def estimate(run: PredictedRun, cluster: Cluster | None = None, ram_bytes: float = 0.0) -> Estimate:
    """Estimate what a run takes, by default on H100s; hosts have ``ram_bytes``; 0: unknown."""
    cluster = cluster or Cluster()
    time, disk = _predict_step_time(run, cluster), cluster.disk_bytes_per_s
    step_s = time.step_s if time else None
    return Estimate(
        run=run,
        peak=find_peak(run),
        host_bytes_by_kind=run.host_bytes,
        weights_bytes=WEIGHT_BYTES * run.llama.parameters,
        checkpoints_bytes=(run.keep + 1) * run.checkpoint_bytes,
        time=time,
        loading=loading_cost(run.llama, run.hosts, disk, cluster.nic_bytes_per_s),
        saving=saving_cost(
            run.checkpoint_bytes / run.hosts,
            disk,
            step_s,
            run.mtbf_s / run.world,
            run.max_staging_bytes(ram_bytes),
            copies_all=run.offload == "none" and not cluster.gpu.is_cpu,
        ),
        runtime_bytes=cluster.runtime_bytes,
        on_cpu=cluster.gpu.is_cpu,
    )


def seconds_per_step(run: PredictedRun, cluster: Cluster) -> float:
    """Return the time of a step only; infinite for numerics without measured times."""
    time = _predict_step_time(run, cluster)
    return time.step_s if time else math.inf


def _predict_step_time(run: PredictedRun, cluster: Cluster) -> StepTime | None:
    """Predict the time of a step; None for numerics without measured times."""
    if run.numerics == "fp32" and not cluster.rates:
        return None
    return step_time(training_setup(run, cluster), cluster.rates or Rates.read())


def training_setup(run: PredictedRun, cluster: Cluster) -> TrainingSetup:
    """Return a run and its cluster as the inputs of the step time model."""
    gradient = run.gradient_bytes
    weights = run.weight_bytes if run.offload == "all" else 0
    if run.adapter.is_enabled:
        weights = run.compute_bytes * (run.offload == "all")
    return TrainingSetup(
        ModelShape.from_llama(run.llama), cluster.attained or cluster.gpu, run.world, run.ranks_per_host, cluster.nic_bytes_per_s,
        run.seq_len, run.micro_batch, run.grad_accum_steps, gradient,
        attention=run.attention,
        units=1 + run.has_sublayer_units,
        update_bytes=run.update_bytes_per_parameter,
        update_flops=run.update_flops,
        updates_on_host=run.offload != "none",
        norm_bytes=gradient * run.overlap,
        copied_up=weights,
        copied_down=gradient * (run.offload != "none"),
        compute_bytes=run.compute_bytes,
        sharded_over=run.shards,
        tp=run.tp,
        cp=run.cp,
        stages=run.stages,
        chunks=run.virtual_stages if run.pp > 1 else 1,
        reshard=not run.keeps_weights,
        gathers_once=run.keeps_weights,
        has_chunked_loss=run.loss == "chunked",
        reshard_group_size=run.kept_by,
        is_this_trainer=True,
        compiled=run.compiled,
        fused=run.fused,
        fp8=run.numerics == "fp8",
        offloads_inputs=run.activations == "host",
        recompute=run.recompute,
        reduces_once=not run.reduces_each,
        trained_share=run.trained_parameters / run.llama.parameters,
        adapted_features=adapted_features(run.llama, run.adapter),
        adapter_rank=run.adapter.rank,
    )  # fmt: skip


RESTART_S = 60.0  # to notice a failure, end all ranks and start them anew, before anything is read; a prior
MIN_GOODPUT = 0.01  # below this share a run is said to get nowhere


@dataclasses.dataclass(frozen=True, slots=True)
class Goodput:
    """How a run's time divides into lasting steps, saves and failures."""

    share: float  # that makes steps that last
    saves_share: float  # that goes to saves
    interval_s: float  # of training between saves
    mtbf_s: float  # between failures, of the run

    @property
    def makes_progress(self) -> bool:
        """Whether enough steps last for the run to make progress."""
        return self.share >= MIN_GOODPUT


def predict_goodput(
    saving: SavingCost, cadence: Cadence, step_s: float, mtbf_s: float, training_s: float, start_s: float = 0.0
) -> Goodput | None:
    """Predict it; ``mtbf_s``: between failures of the run; ``training_s``: of its steps, which are all lost if it never saves; 0: unknown.

    ``start_s``: of a start, beside reading.

    A failure undoes what came after the last complete save; a save completes as long after its start as it takes to write.
    A restart reads it at the rate of writing. A save waits for the previous one.
    """
    every_s = saving.best_interval_s if cadence.auto else cadence.steps * step_s or cadence.seconds
    interval_s = max(step_s, every_s) if cadence.is_enabled else training_s
    if not interval_s:
        return None
    cost_s = max(saving.waits_s, saving.write_s - interval_s) if cadence.is_enabled else 0.0
    restart_s = RESTART_S + start_s + 2 * saving.write_s * cadence.is_enabled
    share = useful_fraction(interval_s, cost_s, restart_s, mtbf_s)
    return Goodput(share, cost_s / (interval_s + cost_s), interval_s, mtbf_s)


ASSUMED_RAM_BYTES = 2048.0 * GIB  # of a host
LINK_BYTES_PER_S = 50e9  # of a GPU to other hosts, assumed: 400 Gbit/s
RATE_PATTERN = re.compile(r"([0-9]{1,9}(?:[.][0-9]{1,9})?) *(Gb/s|GB/s)")
SIZE_PATTERN = re.compile(r"([0-9]{1,9}(?:[.][0-9]{1,9})?) *(GiB|TiB|GB|TB)")
UNIT_VALUES = {"Gb/s": 1e9 / 8, "GB/s": 1e9, "GiB": float(GIB), "TiB": 1024.0 * GIB, "GB": 1e9, "TB": 1e12}


@dataclasses.dataclass(frozen=True, slots=True)
class MachineOptions:
    """Machines as options describe them; 0 or '': not given."""

    nodes: int = 0
    slots: int = 0
    gpu: str = ""
    ram: str = ""
    nic: str = ""
    disk: str = ""
    gpus: int = 0  # of all hosts

    def host_and_gpu_counts(self, slots: int) -> tuple[int, int]:
        """Return hosts and GPUs of each, 0: not said; ``slots``: of such hosts.

        Raises:
            UserError: The GPUs in all are not those of a whole number of hosts.
        """
        if not self.gpus:
            return self.nodes, self.slots
        slots = self.slots or (self.gpus // self.nodes if self.nodes else min(self.gpus, slots))
        nodes = self.nodes or self.gpus // max(1, slots)
        if nodes * slots != self.gpus:
            raise UserError(
                f"--gpus: {self.gpus} is not {pluralize(nodes, 'host')} of {slots}; correct --gpus, --nodes or --slots"
            )
        return nodes, slots


@dataclasses.dataclass(frozen=True, slots=True)
class Machines:
    """A number of identical hosts."""

    nodes: int
    slots: int  # 0: as many as hosts with such GPUs have
    gpu: Gpu | None  # None: nvidia-smi reports none
    ram_bytes: float  # 0: unknown
    nic_bytes_per_s: float  # 0: no RDMA link is active
    disk_bytes_per_s: float = DISK_BYTES_PER_S
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of packages, on the first

    @property
    def world_size(self) -> int:
        """Number of ranks on all hosts."""
        return self.nodes * self.slots


UNKNOWN_MACHINES = Machines(1, 0, None, 0.0, 0.0)  # no host was asked


def apply_machine_options(detected: Machines, options: MachineOptions, gpus: dict[str, Gpu]) -> Machines:
    """Return the detected machines, overridden by options, with assumptions for what is unknown.

    Raises:
        UserError: It cannot be read, or names a GPU that is not known.
    """
    gpu = find_gpu(options.gpu, gpus) if options.gpu else detected.gpu or gpus[DEFAULT_GPU]
    is_default_count = not detected.slots or (detected.gpu is not None and detected.slots == detected.gpu.per_host)
    slots = gpu.per_host if is_default_count else detected.slots  # other GPUs come in other numbers
    nic = parse_quantity(options.nic, "--nic", RATE_PATTERN) if options.nic else detected.nic_bytes_per_s
    n_hosts, n_slots = options.host_and_gpu_counts(slots)
    return Machines(
        nodes=n_hosts or detected.nodes,
        slots=n_slots or slots,
        gpu=gpu,
        ram_bytes=parse_quantity(options.ram, "--ram", SIZE_PATTERN)
        if options.ram
        else detected.ram_bytes or ASSUMED_RAM_BYTES,
        nic_bytes_per_s=nic or gpu.per_host * LINK_BYTES_PER_S,
        disk_bytes_per_s=parse_quantity(options.disk, "--disk", RATE_PATTERN)
        if options.disk
        else detected.disk_bytes_per_s,
        versions=detected.versions,
    )


def describe_assumptions(
    detected: Machines, options: MachineOptions, machines: Machines, *, hosts_asked: bool
) -> list[str]:
    """Say what is neither found nor described; ``hosts_asked``: whether hosts were."""
    assert machines.gpu, "a kind of GPU was chosen"
    parts = []
    if options.gpu and machines.gpu.name != options.gpu:
        parts.append(f"--gpu {options.gpu} is {machines.gpu.name}")
    elif not (options.gpu or hosts_asked):
        parts.append(f"GPUs are {machines.gpu.name}")
    if machines.nodes > 1 and not options.nic and not detected.nic_bytes_per_s:
        link_note = " (no active RDMA link was found)" if hosts_asked else ""
        parts.append(f"{machines.nic_bytes_per_s * 8 / 1e9:,.0f} Gbit/s a host{link_note}")
    if not (options.ram or detected.ram_bytes):
        parts.append(f"{machines.ram_bytes / GIB:,.0f} GiB of RAM a host (--ram)")
    return [f"assumed      {'; '.join(parts)}"] if parts else []


def parse_quantity(text: str, option: str, pattern: re.Pattern[str]) -> float:
    """Parse bytes, or bytes per second."""
    if not (match := pattern.fullmatch(text)) or not float(match[1]):
        units = " or ".join(unit for unit in UNIT_VALUES if pattern.fullmatch(f"1{unit}"))
        raise UserError(f"{option}: {text!r} is not a number with {units}; correct it")
    return float(match[1]) * UNIT_VALUES[match[2]]
