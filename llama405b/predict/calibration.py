"""Measurements of a planned run on its hosts, and how far off a predicted time may be. Pure.

There are two kinds of measurements: steps of the run itself with few of its layers, whose difference is what a layer takes on these
hosts; and rates, each measured alone on all ranks, which replace data sheets for other settings.

A range holds the time of a run of one more program with nine chances in ten, judged by times that other programs published and that were
not fitted: programs differ by more than the runs of one program do (Student's t over programs; ``scripts/fit_plan.py`` writes
``ranges.json``; see docs/plan-accuracy.md). With fewer than three programs there is no such range; a wide one is assumed instead.
"""

import dataclasses
import enum
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path

from llama405b.predict.estimate import RUNTIME_BYTES, Cluster, Estimate, estimate, setting_of
from llama405b.predict.hardware import Gpu, Rates, Setting
from llama405b.predict.run_shape import WITHOUT, RunShape
from llama405b.predict.step_time import StepTime, layer_work

FEW, MORE = 1, 3  # layers
WHOLE = (0.5, 2.0)  # the span of what a layer may take of what its parts do alone, before it is taken for noise
MEMORY_SPREAD = 0.05  # of docs/measurements/plan.md on CPUs; no GPU was calibrated yet


def measured_layers(layers: int) -> tuple[int, int]:
    """Return the two layer counts with which to measure a run of so many layers."""
    return FEW, min(layers, max(FEW + 1, min(MORE, layers - 1)))


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """The median times of steps with some number of layers."""

    layers: int  # 0: all that the model has
    micro_batch: int
    global_batch: int
    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    peak_bytes: int  # of rank 0: its GPU, with what the allocator keeps, or its process
    waited_s: float = 0.0  # of the forward, for updates in host memory

    def __post_init__(self) -> None:
        counts, times = (self.layers + 1, self.micro_batch, self.global_batch), (self.forward_s, self.backward_s)
        if min(counts) < 1 or not all(0 < each < math.inf for each in times):
            raise ValueError("a step has no layers or no batch, or takes no time")

    @property
    def step_s(self) -> float:
        """Seconds of a whole step."""
        return self.data_s + self.forward_s + self.backward_s + self.optimizer_s


@dataclasses.dataclass(frozen=True, slots=True)
class Alone:
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
        alone = {self.layer_s, self.device_update, self.host_update, self.copies, self.disk}
        if not all(0 < each < math.inf for each in (alone | links if any(links) else alone)):
            raise ValueError("a rate is not positive")


@dataclasses.dataclass(frozen=True, slots=True)
class Calibration:
    """Measured steps (with fewer layers, if the run has three) and rates, with their hosts and GPUs."""

    load: RunShape  # the planned run
    few: Point
    more: Point
    other: Point | None  # as ``more``, with another micro-batch; None: that failed
    alone: Alone
    hosts: tuple[str, ...]  # their names
    gpu: str  # of each
    made: str  # the day

    def __post_init__(self) -> None:
        load, counts = self.load, (self.load.micro_batch, self.load.ranks_per_host, self.load.world)
        if min(counts) < 1 or not 1 <= self.few.layers <= self.more.layers <= load.llama.layers:
            raise ValueError("its layers or ranks are impossible")

    def fits(self, load: RunShape) -> bool:
        """Check whether the measured steps are those of this run; only checkpoint settings may differ."""
        saves = {name: getattr(self.load, name) for name in ("keep", "mtbf_s", "every", "staging_bytes")}
        return dataclasses.replace(load, **saves) == self.load

    def knows(self, load: RunShape, gpu: Gpu) -> bool:
        """Check whether the rates hold for a run.

        They do with the same GPUs, model, adapter, sequence, numerics, attention and packing, and without tp, cp and pp.
        """
        if load.is_split:
            return False
        same = ("llama", "seq_len", "numerics", "attention", "packing", "adapter")
        return gpu.name == self.gpu and all(getattr(load, name) == getattr(self.load, name) for name in same)

    def applied(self, needs: Estimate) -> Estimate:
        """Return the estimate with the measured steps in place of the predicted time."""
        time = StepTime(
            forward_s=self._at_all(lambda point: point.forward_s),
            backward_s=self._at_all(lambda point: point.backward_s),
            optimizer_s=self._at_all(lambda point: point.optimizer_s),
            data_s=self._at_all(lambda point: point.data_s),
        )
        return dataclasses.replace(needs, time=time)

    def measured(self, cluster: Cluster) -> Cluster:
        """Return the cluster with measured rates, and with the step time and memory that those do not explain."""
        paced = self._paced(cluster)
        assert paced.rates
        whole, delay_s = self._beside(paced)
        like = estimate(self._load_of(self.more), cluster)
        kept = sum(like.reserved.values()) or like.peak.total  # as the peak that was measured: what PyTorch kept
        return dataclasses.replace(
            paced,
            rates=dataclasses.replace(paced.rates, whole=whole, delay_s=delay_s),
            runtime_bytes=(0 if cluster.gpu.is_cpu else RUNTIME_BYTES) + max(0.0, self.more.peak_bytes - kept),
        )

    def _beside(self, paced: Cluster) -> tuple[float, float]:
        """Fit a factor on the predicted time, and a delay of every layer, to the steps of two micro-batches."""

        def seconds(point: Point) -> tuple[float, float]:
            """Return the predicted and the measured time of a layer and micro-batch."""
            time = estimate(self._load_of(point), paced).time
            assert time
            # The host waits while a GPU computes what it was given before: no wait makes a forward faster than its rates.
            forward_s = max(point.forward_s - point.waited_s, min(point.forward_s, time.forward_s))
            passes = point.layers * self._load_of(point).rounds  # forwards of a layer in a step
            return (time.forward_s + time.backward_s) / passes, (forward_s + point.backward_s) / passes

        given, took = seconds(self.more)
        other_given, other_took = seconds(self.other) if self.other else (given, took)
        if given != other_given:
            whole = (took - other_took) / (given - other_given)
            delay_s = took - whole * given
            if WHOLE[0] <= whole <= WHOLE[1] and delay_s >= 0:
                return whole, delay_s
        return took / given, 0.0

    def _load_of(self, point: Point) -> RunShape:
        llama = dataclasses.replace(self.load.llama, layers=point.layers)
        return dataclasses.replace(
            self.load, llama=llama, micro_batch=point.micro_batch, global_batch=point.global_batch
        )

    def _paced(self, cluster: Cluster) -> Cluster:
        """Return the cluster with the standalone rates."""
        alone = self.alone
        sheet = cluster.gpu
        one_host = self.load.hosts == 1
        rates = _all_of(sheet)
        peers, nic = sheet.peers_bytes_per_s * Rates.read().peers, cluster.nic_bytes_per_s
        if alone.gather:
            rates = dataclasses.replace(rates, scatter=alone.scatter / alone.gather)
            peers = alone.gather if one_host or sheet.is_cpu else peers
        if alone.gather and not one_host:
            rates, nic = dataclasses.replace(rates, network=1.0, hop_s=alone.hop_s), alone.gather
        ram = alone.host_update / rates.update  # a data sheet's, of which AdamW would attain what it did
        pace = Gpu(sheet.name, sheet.memory_bytes, self._flops(cluster), alone.device_update, peers, alone.copies, ram)
        return dataclasses.replace(cluster, nic_bytes_per_s=nic, disk_bytes_per_s=alone.disk, pace=pace, rates=rates)

    def _flops(self, cluster: Cluster) -> float:
        """Return a layer's FLOP/s in the time that elementwise work leaves, at least half of the layer's."""

        def layer(flops: float, memory: float) -> float:
            gpu = dataclasses.replace(cluster.gpu, flops=flops, memory_bytes_per_s=memory)
            whole = dataclasses.replace(self.load, adapter=WITHOUT)  # as the probe trains it
            setting = setting_of(whole, dataclasses.replace(cluster, pace=gpu))
            work = layer_work(setting, _all_of(gpu))
            return work.forward.total_s + work.backward_s("full")

        took = self.alone.layer_s
        return layer(1.0, math.inf) / max(took / 2, took - layer(math.inf, self.alone.device_update))

    def _at_all(self, of: Callable[[Point], float]) -> float:
        """Extrapolate linearly to all of the run's layers; the line does not fall."""
        slope = max(0.0, (of(self.more) - of(self.few)) / max(1, self.more.layers - self.few.layers))
        return of(self.more) + slope * (self.load.llama.layers - self.more.layers)


def _all_of(gpu: Gpu) -> Rates:
    """Return the fitted rates, with all of a data sheet attained and without FSDP's copies."""
    whole = {gpu.name: 1.0}
    return dataclasses.replace(Rates.read(), matmul=whole, attention=whole, memory=1.0, peers=1.0, copies=0.0)


RANGES = Path(__file__).with_name("ranges.json")
SMALL = 10e9  # parameters; below, launches of kernels count, and programs differ by more
FEWEST = 3  # programs that make a range
MEASURED = frozenset({"h100-80", "h100-96-500w", "h200-141", "a100-80", "a100-40"})  # GPUs of which rates are known


class Evidence(enum.StrEnum):
    """The kind of measurements behind a predicted time."""

    STEPS = "steps"  # the run's own steps, on its hosts
    RATES = "rates"  # the rates of its hosts
    LARGE = "large"  # other programs, on such GPUs
    SMALL = "small"  # the same, of small models or of one GPU
    MESH = "mesh"  # the same, that split more than the parameters: tp, cp or pp
    OFFLOAD = "offload"  # fewer than three programs
    FP8 = "fp8"  # likewise
    ADAPTERS = "adapters"  # no program
    NOTHING = "nothing"  # no one has timed this GPU

    @classmethod
    def of(cls, setting: Setting) -> "Evidence":
        """Return the evidence for a setup that was not measured on its own hosts."""
        if setting.gpu.name not in MEASURED:
            return cls.NOTHING
        if setting.frozen:
            return cls.ADAPTERS
        if setting.fp8:
            return cls.FP8
        if setting.updates_on_host:
            return cls.OFFLOAD
        return _alike(setting)


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """The range of a time, as shares of the prediction."""

    low: float
    high: float
    programs: int = 0  # it is after those of so many; 0: it is not after programs

    def of(self, value: float) -> tuple[float, float]:
        """Return the lowest and the highest likely value."""
        return value * self.low, value * self.high


STEPS = Range(0.90, 1.10)  # of docs/measurements/plan.md, on CPUs; no GPU was calibrated yet
FP8 = Range(0.85, 1.13, 2)  # a factor of the others: five published rows, of two programs (docs/plan-accuracy.md)
ADAPTERS = Range(0.85, 1.18)  # a factor of the others, by assumption: no program's times with LoRA have been compared
RATES = Range(0.85, 1.15)  # the same, of settings that were not measured themselves


def range_of(setting: Setting) -> Range | None:
    """Return the range for a setup not measured on its own hosts; None: its GPU was never measured."""
    known = Evidence.of(setting)
    if known is Evidence.NOTHING:
        return None
    alike = _ranges()[_alike(setting)]
    offload = setting.updates_on_host, _ranges()[Evidence.OFFLOAD]
    for applies, more in (offload, (setting.fp8, FP8), (setting.frozen, ADAPTERS)):
        if applies:
            alike = Range(alike.low * more.low, alike.high * more.high, more.programs)
    return alike


@functools.cache
def _ranges() -> dict[str, Range]:
    """The ranges of other programs, by what is known; that of ``OFFLOAD`` is a factor of the other's."""
    return {name: Range(**found) for name, found in json.loads(RANGES.read_text()).items()}


def _alike(setting: Setting) -> Evidence:
    """Return the class of published runs that is like this one, except for where the states are."""
    if setting.tp * setting.cp * setting.pp > 1:
        return Evidence.MESH
    is_small = setting.gpus == 1 or setting.shape.parameters < SMALL
    return Evidence.SMALL if is_small else Evidence.LARGE
