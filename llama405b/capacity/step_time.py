"""How long a step takes: compute and communication of each unit of FSDP, and how much of one hides the other. Pure.

The form of the overlap is that of ``hidden_s``; what a GPU computes: ``compute``; at which rates: ``coefficients``.
"""

import dataclasses
from collections.abc import Mapping

from llama405b.capacity.coefficients import Rates
from llama405b.capacity.compute import layer_work, logits_s, parts_s, products_s
from llama405b.capacity.setting import Setting


@dataclasses.dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, over all its micro-batches."""

    forward_s: float
    backward_s: float  # with what is computed again
    optimizer_s: float
    data_s: float = 0.0  # waiting for data
    compute_s: float | None = None  # of forward and backward; None: measured as a whole, as is what follows
    communication_s: float = 0.0  # of both; what is not hidden is in the first two
    copies_s: float = 0.0  # between GPU and host memory; the same
    compute_parts_s: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of ``compute_s``, by what it is

    @property
    def exposed_s(self) -> float | None:
        """Of communication and copies, what nothing hides."""
        if self.compute_s is None:
            return None
        return max(0.0, self.forward_s + self.backward_s - self.compute_s)

    @property
    def step_s(self) -> float:
        """All of it."""
        return self.data_s + self.forward_s + self.backward_s + self.optimizer_s


def step_time(setting: Setting, rates: Rates) -> StepTime:
    """Predict a step: every layer beside the communication of its units, then the head and the loss."""
    shape, layers = setting.shape, setting.shape.layers
    work = layer_work(setting, rates)
    last = products_s(setting, rates, shape.head) + logits_s(setting, rates)
    unit = unit_parameters(setting)
    gather = setting.units * ring_s(setting, rates, setting.compute_bytes * unit / setting.units, setting.shards)
    scatter = setting.units * reduce_s(setting, rates, setting.reduce_bytes * unit / setting.units)
    gather /= setting.accumulate if setting.gathers_once else 1
    scatter /= setting.accumulate if setting.reduces_once else 1
    reduce = scatter + gather * setting.reshard
    up, both = host_copies_s(setting, rates, 0.0), host_copies_s(setting, rates, setting.copied_down)
    beside = hidden_s if setting.prefetches else in_turn_s
    one_forward = layers * max(beside(work.forward.total_s, gather, rates), up) + last
    one_backward = layers * max(beside(work.backward_s, reduce, rates), both) + 2 * last
    one_forward = rates.whole * one_forward + layers * rates.delay_s / 3
    one_backward = rates.whole * one_backward + layers * rates.delay_s * 2 / 3
    parts = {name: setting.accumulate * seconds for name, seconds in parts_s(setting, rates, unit).items()}
    return StepTime(
        forward_s=setting.accumulate * one_forward,
        backward_s=setting.accumulate * one_backward,
        compute_s=sum(parts.values()),
        communication_s=setting.accumulate * layers * (gather + reduce),
        copies_s=setting.accumulate * layers * (up + both),
        optimizer_s=_optimizer_s(setting, rates, one_forward),
        compute_parts_s=parts,
    )


def unit_parameters(setting: Setting) -> float:
    """Return the parameters that are moved for a layer: its own, and a share of embedding and head."""
    return setting.shape.parameters / setting.shape.layers


def host_copies_s(setting: Setting, rates: Rates, down: float) -> float:
    """Return how long the copies of a layer take beside each other: weights up, and ``down`` bytes per parameter of gradients.

    Both ways at once are slower than each alone, and all GPUs of a host share its memory.
    """
    share = unit_parameters(setting) / setting.shards
    link, ram = setting.gpu.host_bytes_per_s, setting.gpu.ram_bytes_per_s * rates.ram / setting.gpus_on_host
    up, both = setting.copied_up, setting.copied_up + down
    return share * max(up / link, down / link, both / (rates.both_ways * link), both / ram)


def hidden_s(compute: float, communication: float, rates: Rates) -> float:
    """Return how long compute and communication take beside each other: the longer, and a share of the shorter."""
    return max(compute + rates.interference * min(compute, communication), communication)


def in_turn_s(compute: float, communication: float, _: Rates) -> float:
    """Return how long they take one after the other."""
    return compute + communication


def ring_s(setting: Setting, rates: Rates, n_bytes: float, n: int, stride: int = 1) -> float:
    """Return the time of an all-gather or reduce-scatter of so many bytes in all, over NVLink and the hosts' links.

    ``n``: GPUs in the ring, each so many (``stride``) after the one before; the rings between them share a host's links.
    """
    within, rings = setting.gpu.peers_bytes_per_s * rates.peers, min(stride, setting.gpus_per_host)
    if n == 1:
        return 0.0
    if n * stride <= setting.gpus_per_host or setting.hosts == 1:
        return n_bytes * (n - 1) / n / within
    link = setting.nic_bytes_per_s * rates.network / rings
    return n_bytes * (n - 1) / n / min(within, link) + (n - 1) * rates.hop_s


def reduce_s(setting: Setting, rates: Rates, n_bytes: float) -> float:
    """Return the time to sum so many bytes of gradients: a reduce-scatter over the shards, and with HSDP an all-reduce over the copies."""
    copies = setting.gpus // setting.shards
    between = ring_s(setting, rates, n_bytes / setting.shards, copies, setting.shards)
    return ring_s(setting, rates, n_bytes, setting.shards) / rates.scatter + 2 * between


def _optimizer_s(setting: Setting, rates: Rates, next_forward_s: float) -> float:
    """What an update takes of a step: bound by memory, on the GPU or in the host, where the next forward may hide it.

    In a host, the copies of that forward and the update share its memory.
    """
    if not setting.updates_on_host:
        per_gpu = setting.update_bytes * setting.shape.parameters / setting.shards
        return per_gpu / (setting.gpu.memory_bytes_per_s * rates.memory)
    held, ram = setting.shape.parameters / setting.hosts, setting.gpu.ram_bytes_per_s
    update, norm = (n_bytes * held / (ram * rates.update) for n_bytes in (setting.update_bytes, setting.norm_bytes))
    copied = setting.copied_up * held / (ram * rates.ram)
    return norm + max(0.0, update + copied - norm - next_forward_s) if norm else update
