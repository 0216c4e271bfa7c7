"""Compare kinds of GPUs, numbers of hosts and methods of training by time and money. Pure.

Each is predicted with the settings that are fastest on it: a GPU with more memory needs no offload, and keeps activations. All train the
same tokens. The global batch is that of the asked run, or the nearest that gives each rank as many sequences.
"""

import bisect
import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Mapping, Sequence

from llama405b.predict.estimate import Cluster, seconds_per_step
from llama405b.predict.hardware import Rates
from llama405b.predict.run_shape import NO_ADAPTER, PredictedRun
from llama405b.predict.search import Fit, Prediction, fastest_meshes, is_runnable, keep_most_activations, variants
from llama405b.settings.axes import FULL_RECOMPUTE
from llama405b.settings.schema import Adapter, Moments

MAX_HOSTS = 64
HOST_FACTORS = (1, 2, 4, 8)  # of the fewest hosts that fit: the numbers that are compared
WORTHWHILE_SPEEDUP = 1.8  # by twice the hosts: below it, the same tokens cost over a tenth more


class Timing(enum.IntEnum):
    """Whether the tokens are trained on before a deadline."""

    LATE = 0
    LIKELY = 1  # by the prediction, not by the longest likely time
    IN_TIME = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """A run on machines that may be rented, with its best settings."""

    label: str  # the kind of GPU, or the method
    prediction: Prediction
    tokens: float
    price: float = 0.0  # of a GPU for an hour; 0: unknown
    deadline_h: float = math.inf

    @property
    def hours(self) -> float | None:
        """How long the tokens take; None: unknown, or for ever."""
        return self.prediction.hours(self.tokens)

    @property
    def gpu_hours(self) -> float | None:
        """Hours of all GPUs."""
        return self.hours * self.prediction.run.world if self.hours else None

    @property
    def cost(self) -> float | None:
        """The price of the GPU-hours."""
        return self.gpu_hours * self.price if self.gpu_hours and self.price else None

    @property
    def timing(self) -> Timing:
        """Whether it ends before the deadline."""
        hours = self.hours or math.inf
        longest = hours * self.prediction.time_range.high
        return Timing(Timing.LATE + (hours <= self.deadline_h) + (longest <= self.deadline_h))

    @property
    def rank(self) -> tuple[float, ...]:
        """The cheapest that fits and is in time comes first; without prices, the fewest GPU-hours."""
        expense = self.cost or self.gpu_hours or math.inf
        return -(self.prediction.fit is Fit.YES), -self.timing, expense, self.prediction.run.world


def best_settings(prediction: Prediction, moments: Sequence[Moments] = ("fp32",)) -> Prediction:
    """Return the run with the fastest settings that surely fit, and on a mesh only where nothing else does."""
    options = sorted(variants(prediction, moments), key=lambda option: seconds_per_step(option.run, option.cluster))
    fitting = next(filter(surely_fits, options), None)
    if fitting is None:
        options += fastest_meshes(prediction, at_most=1)
        return max(options, key=lambda option: (option.fit, -option.needs.gpu_bytes, -option.host_bytes))
    if fitting.run.recompute != FULL_RECOMPUTE or fitting.run.compiled:
        return fitting
    return keep_most_activations(fitting)


def surely_fits(prediction: Prediction) -> bool:
    """As ``fit`` is YES, but what PyTorch reserves, which takes long to find, is looked at last."""
    return prediction.ram_fit is Fit.YES and prediction.gpu_fit is Fit.YES


def on_hosts(run: PredictedRun, hosts: int, ranks_per_host: int) -> PredictedRun:
    """Return the run on so many hosts, without a mesh, with one sequence a micro-batch, and a batch that its ranks divide."""
    world = hosts * ranks_per_host
    batch = world * max(1, round(run.global_batch / world))
    return dataclasses.replace(
        run, world=world, ranks_per_host=ranks_per_host, global_batch=batch, micro_batch=1, recompute=FULL_RECOMPUTE,
        dp_shard=0, tp=1, cp=1, pp=1, keeps_weights=False, reduces_each=True, kept_by=0, prefetch=0,
    )  # fmt: skip


def fewest_hosts(predict: Callable[[int], Prediction], moments: Sequence[Moments] = ("fp32",)) -> int:
    """Return the fewest hosts on which some variant surely fits, without a mesh; above ``MAX_HOSTS``: on none up to that."""

    def fits(hosts: int) -> bool:
        options = sorted(variants(predict(hosts), moments), key=lambda option: option.needs.gpu_bytes)
        return any(map(surely_fits, options))

    return 1 + bisect.bisect_left(range(1, MAX_HOSTS + 1), True, key=fits)


def offers_by_hosts(at: Callable[[int], Offer], first: int, deadline_h: float = math.inf) -> list[Offer]:
    """Return offers from the fewest hosts on, ``first``, and the fewest that surely meet the deadline; ``at``: by number of hosts.

    If nothing fits without a mesh, the one that comes nearest to it, perhaps with one.
    """
    at = functools.cache(at)
    if first > MAX_HOSTS:
        return [at(MAX_HOSTS)]
    counts = {min(MAX_HOSTS, math.ceil(first * factor)) for factor in HOST_FACTORS}
    in_time = [hosts for hosts in sorted(counts) if at(hosts).timing is Timing.IN_TIME]
    if in_time and not math.isinf(deadline_h):
        fewer = max((hosts for hosts in counts if hosts < in_time[0]), default=in_time[0])
        span = range(fewer, in_time[0] + 1)
        counts.add(span[bisect.bisect_left(span, Timing.IN_TIME, hi=len(span) - 1, key=lambda hosts: at(hosts).timing)])
    return [at(hosts) for hosts in sorted(counts)]


def worthwhile_hosts(offers: Sequence[Offer]) -> int:
    """Return the number of hosts from which twice as many bring too little; 0: that was not found."""
    speeds = {offer.prediction.run.hosts: offer.prediction.tokens_per_s or 0.0 for offer in offers}
    doubled = {hosts: speeds[2 * hosts] / speed for hosts, speed in speeds.items() if speed and 2 * hosts in speeds}
    return min((hosts for hosts, gain in doubled.items() if gain < WORTHWHILE_SPEEDUP), default=0)


def methods(run: PredictedRun, cluster: Cluster) -> Mapping[str, tuple[PredictedRun, str]]:
    """Return the run by each method that its machines can train with, and what is lost by that."""
    change = functools.partial(dataclasses.replace, run, adapter=NO_ADAPTER, micro_batch=1, fused=False, compiled=False)
    lora = run.adapter if run.adapter.is_enabled else Adapter(kind="lora")
    found = {
        "full": (change(numerics="fp32-master"), "nothing"),
        f"LoRA, rank {lora.rank}": (change(numerics="fp32-master", adapter=lora), "what few weights cannot learn"),
        "FP8": (change(numerics="fp8", compiled=True), "digits of each product"),
        "all BF16": (change(numerics="pure-bf16"), "most updates at rates like 1e-5"),
    }
    return {name: (other, loss) for name, (other, loss) in found.items() if is_runnable(other, cluster)}


def sensitivities(prediction: Prediction) -> list[tuple[str, float]]:
    """Return what moves the time of a step most, and by which share: assumptions that are half as good as assumed."""
    run, cluster, rates = prediction.run, prediction.cluster, prediction.cluster.rates or Rates.read()
    attention = {gpu: share / 2 for gpu, share in rates.attention.items()}
    changes = {
        "network": dataclasses.replace(cluster, nic_bytes_per_s=cluster.nic_bytes_per_s / 2),
        "host memory": dataclasses.replace(
            cluster, rates=dataclasses.replace(rates, update=rates.update / 2, ram=rates.ram / 2)
        ),
        "attention": dataclasses.replace(cluster, rates=dataclasses.replace(rates, attention=attention)),
    }
    step_s = seconds_per_step(run, cluster)
    if not 0 < step_s < math.inf:
        return []
    found = [(name, seconds_per_step(run, other) / step_s - 1) for name, other in changes.items()]
    return sorted(found, key=lambda change: -change[1])
