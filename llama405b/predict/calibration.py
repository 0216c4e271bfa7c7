"""Measurements of a planned run on its hosts, and how far off a predicted time may be. Pure.

There are two kinds of measurements: steps of the run itself with few of its layers, whose difference is what a layer takes on these
hosts; and rates, each measured alone on all ranks, which replace data sheets for other settings.

A range holds the time of a run of one more program with nine chances in ten, judged by times that other programs published and that were
not fitted: programs differ by more than the runs of one program do (``scripts/fit_plan.py`` writes ``ranges.json``; see
docs/plan-accuracy.md). With fewer than four programs, it is what their runs took.
"""

import dataclasses
import enum
import functools
import json
import math
import operator
from collections.abc import Callable
from pathlib import Path

from llama405b.predict.estimate import RUNTIME_BYTES, Cluster, Estimate, estimate, training_setup
from llama405b.predict.hardware import Gpu, Rates, TrainingSetup
from llama405b.predict.run_shape import NO_ADAPTER, PredictedRun
from llama405b.predict.step_time import StepTime, layer_work

FEW_LAYERS, MORE_LAYERS = 1, 3  # layers
STEP_PARTS = ("forward_s", "backward_s", "optimizer_s", "data_s")
PLAUSIBLE_FACTOR = (
    0.5,
    2.0,
)  # the span of what a layer may take of what its parts do alone, before it is taken for noise
MEASURED_MEMORY_SPREAD = 0.05  # of docs/measurements/plan.md on CPUs; no GPU was calibrated yet


def layers_to_measure(layers: int) -> tuple[int, int]:
    """Return the two layer counts with which to measure a run of so many layers."""
    return FEW_LAYERS, min(layers, max(FEW_LAYERS + 1, min(MORE_LAYERS, layers - 1)))


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The median times of steps with some number of layers."""

    layers: int  # 0: all that the model has
    micro_batch: int
    global_batch: int
    data_s: float
    forward_s: float  # 0: with a pipeline, it is part of the backward
    backward_s: float
    optimizer_s: float
    peak_bytes: int  # the largest of all ranks: a GPU's, with what the allocator keeps, or a process's
    waited_s: float = 0.0  # of the forward, for updates in host memory

    def __post_init__(self) -> None:
        counts = (self.layers + 1, self.micro_batch, self.global_batch)
        if min(counts) < 1 or not (0 <= self.forward_s < math.inf and 0 < self.backward_s < math.inf):
            raise ValueError("a step has no layers or no batch, or takes no time")

    @property
    def step_s(self) -> float:
        """Seconds of a whole step."""
        return math.fsum(getattr(self, part) for part in STEP_PARTS)


@dataclasses.dataclass(frozen=True, slots=True)
class StandaloneRates:
    """Rates in bytes/s, each measured alone while all ranks do the same; the slowest rank counts."""

    layer_s: float  # a decoder layer of a micro-batch, forward, and backward with what is computed again
    device_update: float  # AdamW, clipping and the norm, where a rank trains
    host_update: float  # AdamW in the memory of a host, by all its ranks
    copies: float  # of each rank between its device and host memory, the slower way
    gather: float  # bus bandwidth of an all-gather of a unit, as nccl-tests define it; 0: one rank
    scatter: float  # the same of a reduce-scatter
    hop_s: float  # of a small all-gather, by ranks but one
    disk: float  # a host writes checkpoints

    def __post_init__(self) -> None:
        links = {self.gather, self.scatter, self.hop_s}
        local_rates = {self.layer_s, self.device_update, self.host_update, self.copies, self.disk}
        if not all(0 < rate < math.inf for rate in (local_rates | links if any(links) else local_rates)):
            raise ValueError("a rate is not positive")


@dataclasses.dataclass(frozen=True, slots=True)
class Calibration:
    """Measured steps (with fewer layers, if the run has three) and rates, with their hosts and GPUs."""

    load: PredictedRun  # the planned run
    few: MeasuredStep
    more: MeasuredStep
    other: MeasuredStep | None  # as ``more``, with another micro-batch; None: that failed
    alone: StandaloneRates
    hosts: tuple[str, ...]  # their names
    gpu: str  # of each
    made: str  # the day
    tuned: bool = False  # the run is the fastest of those that were tried on these hosts

    def __post_init__(self) -> None:
        run, counts = self.load, (self.load.micro_batch, self.load.ranks_per_host, self.load.world)
        if min(counts) < 1 or not 1 <= self.few.layers <= self.more.layers <= run.llama.layers:
            raise ValueError("its layers or ranks are impossible")

    def matches_run(self, run: PredictedRun) -> bool:
        """Check whether the measured steps are those of this run; only checkpoint settings may differ."""
        save_settings = {name: getattr(self.load, name) for name in ("keep", "mtbf_s", "every", "staging_bytes")}
        return dataclasses.replace(run, **save_settings) == self.load

    def covers_run(self, run: PredictedRun, gpu: Gpu) -> bool:
        """Check whether it tells about a run on such GPUs: its own steps do, or its rates.

        The rates hold for the same model, adapter, sequence, numerics, attention and packing, and without tp, cp and pp.
        """
        if gpu.name != self.gpu:
            return False
        fields = ("llama", "seq_len", "numerics", "attention", "packing", "adapter")
        is_alike = all(getattr(run, name) == getattr(self.load, name) for name in fields)
        return self.matches_run(run) or (is_alike and not (run.is_split or self.load.is_split))

    def with_measured_steps(self, needs: Estimate) -> Estimate:
        """Return the estimate with the measured steps in place of the predicted time."""
        forward_s, backward_s, optimizer_s, data_s = (
            self._extrapolate(operator.attrgetter(part)) for part in STEP_PARTS
        )
        return dataclasses.replace(needs, time=StepTime(forward_s, backward_s, optimizer_s, data_s))

    def with_measured_rates(self, cluster: Cluster) -> Cluster:
        """Return the cluster with measured rates, and with the step time and memory that those do not explain.

        Of a run with tp, cp or pp only with the memory.
        """
        needs = estimate(self._run_at(self.more), cluster)
        beyond = self.more.peak_bytes - (sum(needs.reserved_by_pool.values()) or needs.peak.total)
        if not (cluster.gpu.is_cpu or needs.reserved_by_pool):  # what PyTorch reserves grows with the layers, too
            reserved_bytes = self._extrapolate(lambda point: point.peak_bytes)
            beyond = reserved_bytes - estimate(self.load, cluster).peak.total
        runtime_bytes = (0 if cluster.gpu.is_cpu else RUNTIME_BYTES) + max(0.0, beyond)
        calibrated = dataclasses.replace(cluster, runtime_bytes=runtime_bytes)
        if self.load.is_split:
            return calibrated
        calibrated = self._with_rates(calibrated)
        assert calibrated.rates
        time_factor, delay_s = self._unexplained_time(calibrated)
        rates = dataclasses.replace(calibrated.rates, whole=time_factor, delay_s=delay_s)
        return dataclasses.replace(calibrated, rates=rates)

    def _unexplained_time(self, calibrated: Cluster) -> tuple[float, float]:
        """Fit a factor on the predicted time, and a delay of every layer, to the steps of two micro-batches."""

        def layer_seconds(point: MeasuredStep) -> tuple[float, float]:
            """Return the predicted and the measured time of a layer and micro-batch."""
            time = estimate(self._run_at(point), calibrated).time
            assert time
            # The host waits while a GPU computes what it was given before: no wait makes a forward faster than its rates.
            forward_s = max(point.forward_s - point.waited_s, min(point.forward_s, time.forward_s))
            passes = point.layers * self._run_at(point).grad_accum_steps  # forwards of a layer in a step
            return (time.forward_s + time.backward_s) / passes, (forward_s + point.backward_s) / passes

        predicted_s, measured_s = layer_seconds(self.more)
        other_predicted_s, other_measured_s = layer_seconds(self.other) if self.other else (predicted_s, measured_s)
        if predicted_s != other_predicted_s:
            factor = (measured_s - other_measured_s) / (predicted_s - other_predicted_s)
            delay_s = measured_s - factor * predicted_s
            if PLAUSIBLE_FACTOR[0] <= factor <= PLAUSIBLE_FACTOR[1] and delay_s >= 0:
                return factor, delay_s
        return measured_s / predicted_s, 0.0

    def _run_at(self, point: MeasuredStep) -> PredictedRun:
        llama = dataclasses.replace(self.load.llama, layers=point.layers)
        return dataclasses.replace(
            self.load, llama=llama, micro_batch=point.micro_batch, global_batch=point.global_batch
        )

    def _with_rates(self, cluster: Cluster) -> Cluster:
        """Return the cluster with the standalone rates."""
        measured = self.alone
        sheet = cluster.gpu
        is_one_host = self.load.hosts == 1
        rates = _rates_at_full(sheet)
        peers, nic = sheet.peers_bytes_per_s * Rates.read().peers, cluster.nic_bytes_per_s
        if measured.gather:
            rates = dataclasses.replace(rates, scatter=measured.scatter / measured.gather)
            peers = measured.gather if is_one_host or sheet.is_cpu else peers
        if measured.gather and not is_one_host:
            rates, nic = dataclasses.replace(rates, network=1.0, hop_s=measured.hop_s), measured.gather
        ram = measured.host_update / rates.update  # a data sheet's, of which AdamW would attain what it did
        layer_flops = self._layer_flops_per_s(cluster)
        attained = Gpu(sheet.name, sheet.memory_bytes, layer_flops, measured.device_update, peers, measured.copies, ram)
        return dataclasses.replace(
            cluster, nic_bytes_per_s=nic, disk_bytes_per_s=measured.disk, attained=attained, rates=rates
        )

    def _layer_flops_per_s(self, cluster: Cluster) -> float:
        """Return a layer's FLOP/s in the time that elementwise work leaves, at least half of the layer's."""

        def layer_s(flops: float, memory: float) -> float:
            gpu = dataclasses.replace(cluster.gpu, flops=flops, memory_bytes_per_s=memory)
            unadapted = dataclasses.replace(self.load, adapter=NO_ADAPTER, fused=False)  # as the probe trains it
            setup = training_setup(unadapted, dataclasses.replace(cluster, attained=gpu))
            work = layer_work(setup, _rates_at_full(gpu))
            return work.forward.total_s + work.backward_s("full")

        measured_s = self.alone.layer_s
        return layer_s(1.0, math.inf) / max(measured_s / 2, measured_s - layer_s(math.inf, self.alone.device_update))

    def _extrapolate(self, value_of: Callable[[MeasuredStep], float]) -> float:
        return extrapolate(self.few, self.more, self.load.llama.layers, value_of)


def extrapolate(few: MeasuredStep, more: MeasuredStep, layers: int, value_of: Callable[[MeasuredStep], float]) -> float:
    """Extrapolate what was measured with two numbers of layers linearly to another; the line does not fall."""
    slope = max(0.0, (value_of(more) - value_of(few)) / max(1, more.layers - few.layers))
    return value_of(more) + slope * (layers - more.layers)


def _rates_at_full(gpu: Gpu) -> Rates:
    """Return the fitted rates, with all of a data sheet attained and without FSDP's copies."""
    full_share = {gpu.name: 1.0}
    return dataclasses.replace(Rates.read(), matmul=full_share, attention=full_share, memory=1.0, peers=1.0, copies=0.0)


RANGES_FILE = Path(__file__).with_name("ranges.json")
MEDIUM_MODEL, LARGE_MODEL = 5e9, 10e9  # parameters; the smaller, the more launches of kernels count
MIN_PROGRAMS = 4  # programs that make a range; of fewer, it is what their runs took
MEASURED_GPUS = frozenset(
    {"h100-80", "h100-96-500w", "h200-141", "a100-80", "a100-40"}
)  # GPUs of which rates are known


class Evidence(enum.StrEnum):
    """The kind of measurements behind a predicted time."""

    STEPS = "steps"  # the run's own steps, on its hosts
    RATES = "rates"  # the rates of its hosts
    LARGE = "large"  # other programs, with models of at least 10 B parameters
    MEDIUM = "medium"  # the same, of at least 5 B, or on one GPU
    SMALL = "small"  # the same, of any less
    MESH = "mesh"  # the same, that split more than the parameters: tp, cp or pp
    FP8 = "fp8"
    ADAPTERS = "adapters"
    OFFLOAD = "offload"
    OTHER_GPU = "other GPU"  # the same, on GPUs whose rates were not fitted

    @classmethod
    def kinds_of(cls, setup: TrainingSetup) -> tuple["Evidence", ...]:
        """Return the kinds of published runs that tell about a setup; it counts as one of the first of them."""
        if setup.gpu.name not in MEASURED_GPUS:
            return (cls.OTHER_GPU,)
        techniques = {
            cls.OFFLOAD: setup.updates_on_host,
            cls.ADAPTERS: setup.is_adapter,
            cls.FP8: setup.fp8,
            cls.MESH: setup.tp * setup.cp * setup.pp > 1,
        }
        size = cls.MEDIUM if setup.gpus == 1 or setup.shape.parameters < LARGE_MODEL else cls.LARGE
        if setup.shape.parameters < MEDIUM_MODEL:
            size = cls.SMALL
        return (*(kind for kind, is_in_use in techniques.items() if is_in_use), size)


@dataclasses.dataclass(frozen=True, slots=True)
class TimeRange:
    """The range of a time, as shares of the prediction, and the published runs that it is after, if it is."""

    low: float
    high: float
    programs: int = 0
    runs: int = 0
    shortest: float = 0.0  # what those runs took, as shares of what is predicted for them
    longest: float = 0.0

    def bounds(self, value: float) -> tuple[float, float]:
        """Return the lowest and the highest likely value."""
        return value * self.low, value * self.high


STEPS_RANGE = TimeRange(0.90, 1.10)  # of docs/measurements/plan.md, on CPUs; no GPU was calibrated yet
RATES_RANGE = TimeRange(0.85, 1.15)  # the same, of settings that were not measured themselves


def find_time_range(setup: TrainingSetup) -> TimeRange:
    """Return the range for a setup not measured on its own hosts: that of all kinds of published runs that tell about it."""
    ranges = [_read_ranges()[kind] for kind in Evidence.kinds_of(setup)]
    return dataclasses.replace(ranges[0], low=min(each.low for each in ranges), high=max(each.high for each in ranges))


@functools.cache
def _read_ranges() -> dict[str, TimeRange]:
    """The ranges of other programs, by kind of evidence."""
    return {name: TimeRange(**fields) for name, fields in json.loads(RANGES_FILE.read_text()).items()}
