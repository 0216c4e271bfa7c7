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
from llama405b.predict.search import (
    OFFLOADS,
    Fit,
    Prediction,
    fastest_meshes,
    is_runnable,
    keep_most_activations,
    variants,
)
from llama405b.settings.axes import FULL_RECOMPUTE
from llama405b.settings.schema import Adapter

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

    prediction: Prediction
    tokens: float
    price: float | None = None  # of a GPU for an hour; None: unknown
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
        return self.gpu_hours * self.price if self.gpu_hours and self.price is not None else None

    @property
    def timing(self) -> Timing:
        """Whether it ends before the deadline."""
        hours = self.hours or math.inf
        longest = hours * self.prediction.time_range.high
        return Timing(Timing.LATE + (hours <= self.deadline_h) + (longest <= self.deadline_h))

    @property
    def rank(self) -> tuple[float, ...]:
        """The cheapest that fits and is in time comes first; without prices, the fewest GPU-hours; of those too late, the fastest."""
        hours = self.hours or math.inf
        expense = (self.gpu_hours or math.inf) if self.price is None else (self.cost or 0.0)
        if self.timing is Timing.LATE:
            expense = hours
        return -self.prediction.fit, -self.timing, expense, hours


def best_settings(prediction: Prediction) -> Prediction:
    """Return the run with the settings that are fastest, by the longest likely time, of those that surely fit.

    On a mesh only where nothing else fits. Moments stay as they are, as BF16 rounds.
    """
    options = sorted(variants(prediction), key=_longest_s)
    by_offload = [[option for option in options if option.run.offload == offload] for offload in OFFLOADS]
    fitting = [found for each in by_offload if (found := next(filter(surely_fits, each), None))]
    if not fitting:
        options += fastest_meshes(prediction, at_most=1)
        return max(options, key=lambda option: (option.fit, -option.needs.gpu_bytes, -option.host_bytes))
    is_full = prediction.run.recompute == FULL_RECOMPUTE and not prediction.run.compiled
    return min([keep_most_activations(each) if is_full else each for each in fitting], key=_longest_s)


def _longest_s(prediction: Prediction) -> float:
    """Return the longest likely time of a step; of those that are equal, one with less offload is first."""
    return (prediction.needs.step_s or math.inf) * prediction.time_range.high


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


def fewest_hosts(predict: Callable[[int], Prediction]) -> int:
    """Return the fewest hosts on which some variant surely fits; if none does, the first power of two on which a mesh does.

    Above ``MAX_HOSTS``: on none up to that.
    """

    def fits(hosts: int) -> bool:
        return any(map(surely_fits, sorted(variants(predict(hosts)), key=lambda option: option.needs.gpu_bytes)))

    first = 1 + bisect.bisect_left(range(1, MAX_HOSTS + 1), True, key=fits)
    powers = (1 << i for i in range(MAX_HOSTS.bit_length()))
    if first > MAX_HOSTS:
        first = next((hosts for hosts in powers if best_settings(predict(hosts)).fit is Fit.YES), first)
    return first


def offers_by_hosts(at: Callable[[int], Offer], first: int) -> list[Offer]:
    """Return offers from the fewest hosts on, ``first``, and the fewest that surely meet their deadline; ``at``: by number of hosts.

    If nothing fits, the one that comes nearest to it.
    """
    at = functools.cache(at)
    if first > MAX_HOSTS:
        return [at(MAX_HOSTS)]
    counts = {min(MAX_HOSTS, first * factor) for factor in HOST_FACTORS}
    if not math.isinf(at(first).deadline_h):
        counts.add(_fewest_in_time(at, sorted(counts)))
    return [at(hosts) for hosts in sorted(counts)]


def _fewest_in_time(at: Callable[[int], Offer], counts: Sequence[int]) -> int:
    """Return the fewest hosts that surely meet the deadline, looked for between two counts; ``MAX_HOSTS``: none does."""
    in_time = next((hosts for hosts in counts if at(hosts).timing is Timing.IN_TIME), MAX_HOSTS)
    fewer = max((hosts for hosts in counts if hosts < in_time), default=in_time)
    if fewer == in_time or at(in_time).timing is not Timing.IN_TIME:
        return in_time
    slow = at(fewer)
    hosts = in_time
    if slow.hours:  # twice as many take about half as long
        wanted = fewer * slow.hours * slow.prediction.time_range.high / slow.deadline_h
        hosts = min(max(math.ceil(wanted), fewer + 1), in_time)
    while at(hosts).timing is not Timing.IN_TIME:
        hosts += 1
    while hosts - 1 > fewer and at(hosts - 1).timing is Timing.IN_TIME:
        hosts -= 1
    return hosts


def worthwhile_hosts(offers: Sequence[Offer]) -> int:
    """Return the number of hosts from which on twice as many always bring too little; 0: that was not found."""
    speeds = {offer.prediction.run.hosts: offer.prediction.tokens_per_s or 0.0 for offer in offers}
    gains = {hosts: speeds[2 * hosts] / speed for hosts, speed in speeds.items() if speed and 2 * hosts in speeds}
    worth_it = [hosts for hosts, gain in gains.items() if gain >= WORTHWHILE_SPEEDUP]
    return min((hosts for hosts in gains if hosts > max(worth_it, default=0)), default=0)


def methods(run: PredictedRun, cluster: Cluster) -> Mapping[str, tuple[PredictedRun, str]]:
    """Return the run by each method that its machines can train with, and what is lost by that."""
    change = functools.partial(
        dataclasses.replace, run, adapter=NO_ADAPTER, micro_batch=1, fused=run.llama.is_fusible, compiled=False
    )
    lora = run.adapter if run.adapter.is_enabled else Adapter(kind="lora")
    found = {
        "full": (change(numerics="fp32-master"), "nothing"),
        f"LoRA, rank {lora.rank}": (
            change(numerics="fp32-master", adapter=lora, fused=False),
            "what few weights cannot learn",
        ),
        "FP8": (change(numerics="fp8", compiled=True, fused=False), "digits of each product"),
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
