"""How long a step takes: compute and communication of each unit of FSDP, and how much of one hides the other. Pure.

The form of the overlap is that of ``hidden_s``; what a GPU computes: ``compute``; at which rates: ``coefficients``.
"""

import dataclasses
from collections.abc import Mapping

from llama405b.capacity.coefficients import Rates
from llama405b.capacity.compute import head_s, layer_work, parts_s
from llama405b.capacity.setting import Setting
from llama405b.contract.recompute import Kind


@dataclasses.dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, over all its micro-batches."""

    forward_s: float
    backward_s: float  # with what is computed again
    optimizer_s: float
    data_s: float = 0.0  # waiting for data
    compute_s: float | None = None  # of forward and backward; None: measured as a whole, as is what follows
    communication_s: float = 0.0  # of both; what is not hidden is in the first two
    bubble_s: float = 0.0  # a pipeline's GPUs wait for each other
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
        return self.data_s + self.forward_s + self.backward_s + self.bubble_s + self.optimizer_s


def step_time(setting: Setting, rates: Rates) -> StepTime:
    """Predict a step: every layer beside the communication of its units, then the head and the loss; of a pipeline, the slowest GPU's.

    The GPUs of a pipeline wait (pp - 1) / chunks of the time that a micro-batch takes them (arXiv 2104.04473, section 2.2).
    """
    parts = {(*sorted(setting.kinds(place).items()), place == setting.pp - 1): place for place in range(setting.pp)}
    found = max((_of_gpu(setting, rates, place) for place in parts.values()), key=lambda each: each.step_s)
    bubble = (setting.pp - 1) / setting.chunks / setting.accumulate
    return dataclasses.replace(found, bubble_s=bubble * (found.forward_s + found.backward_s))


def _of_gpu(setting: Setting, rates: Rates, place: int) -> StepTime:
    """Predict what a GPU does in a step, without waiting for others of its pipeline; ``place``: in that."""
    work, kinds, has_head = layer_work(setting, rates), setting.kinds(place), place == setting.pp - 1
    layers = sum(kinds.values())
    head_forward, head_backward = (each.total_s * has_head for each in head_s(setting, rates))
    unit = unit_parameters(setting)
    of_unit = setting.compute_bytes * unit / setting.units
    gather = setting.units * gather_s(setting, rates, of_unit)
    again = setting.units * ring_s(setting, rates, of_unit, setting.kept_by) if setting.kept_by else gather
    scatter = setting.units * reduce_s(setting, rates, setting.reduce_bytes * setting.trained * unit / setting.units)
    gather /= setting.accumulate if setting.gathers_once else 1
    scatter /= setting.accumulate if setting.reduces_once else 1
    reduce = scatter + again * setting.reshard
    up, both = (host_copies_s(setting, rates, backward=each) for each in (False, True))
    beside = hidden_s if setting.prefetches else in_turn_s
    forward = within_layer_s(setting, rates, FORWARD)
    within = {kind: within_layer_s(setting, rates, times) for kind, times in BACKWARD.items()}
    backward = sum(count * within[kind] for kind, count in kinds.items())
    one_forward = layers * max(beside(work.forward.total_s + forward, gather, rates), up) + head_forward
    one_backward = head_backward + sum(
        count * max(beside(work.backward_s(kind) + within[kind], reduce, rates), both) for kind, count in kinds.items()
    )
    one_forward = rates.whole * one_forward + layers * rates.delay_s / 3
    one_backward = rates.whole * one_backward + layers * rates.delay_s * 2 / 3
    handed = between_stages_s(setting, rates)
    parts = {name: setting.accumulate * s for name, s in parts_s(setting, rates, unit, kinds, has_head).items()}
    return StepTime(
        forward_s=setting.accumulate * (one_forward + handed),
        backward_s=setting.accumulate * (one_backward + handed),
        compute_s=sum(parts.values()),
        communication_s=setting.accumulate * (layers * (gather + reduce + forward) + backward + 2 * handed),
        copies_s=setting.accumulate * layers * (up + both),
        optimizer_s=_optimizer_s(setting, rates, one_forward),
        compute_parts_s=parts,
    )


def unit_parameters(setting: Setting) -> float:
    """Return the parameters that are moved for a layer: its own, and a share of embedding and head; of those, what ``tp`` leaves."""
    return setting.shape.parameters / setting.shape.layers / setting.tp


# Within a layer: all-gathers and reduce-scatters of hidden states over ``tp``, and exchanges of heads over ``cp``. A backward has those
# of the recomputation, which ends before a layer's last reduce-scatter (docs/parallel.md has the counts).
FORWARD = (2, 2, 1)
BACKWARD: Mapping[Kind, tuple[int, int, int]] = {"none": FORWARD, "operators": (4, 3, 2), "full": (4, 3, 2)}


def within_layer_s(setting: Setting, rates: Rates, times: tuple[int, int, int]) -> float:
    """Return the time of what a layer communicates in between: nothing hides it."""
    gathers, scatters, exchanges = times
    tokens = setting.micro_batch * setting.seq_len / setting.cp
    hidden = setting.compute_bytes * tokens * setting.shape.hidden
    whole = ring_s(setting, rates, hidden, setting.tp)
    heads = setting.compute_bytes * tokens * 2 * (setting.shape.width + setting.shape.kv_width) / setting.tp
    return (gathers + scatters / rates.scatter) * whole + exchanges * exchange_s(setting, rates, heads)


def exchange_s(setting: Setting, rates: Rates, n_bytes: float) -> float:
    """Return the time in which each GPU of ``cp`` sends so many bytes, in equal parts, to all of them."""
    within = setting.gpu.peers_bytes_per_s * rates.peers
    if setting.cp * setting.tp > setting.gpus_per_host:
        within = min(within, setting.nic_bytes_per_s * rates.network / setting.gpus_on_host)
    return n_bytes * (setting.cp - 1) / setting.cp / within


def between_stages_s(setting: Setting, rates: Rates) -> float:
    """Return the time in which hidden states of a micro-batch reach the next stage, on another host if there are several."""
    if setting.pp == 1:
        return 0.0
    link = setting.gpu.peers_bytes_per_s * rates.peers
    if setting.hosts > 1:
        link = min(link, setting.nic_bytes_per_s * rates.network / setting.gpus_on_host)
    return setting.chunks * setting.compute_bytes * setting.tokens * setting.shape.hidden / link


def host_copies_s(setting: Setting, rates: Rates, *, backward: bool) -> float:
    """Return how long the copies of a layer take beside each other: weights up, in the backward gradients down, and its input.

    Both ways at once are slower than each alone, and all GPUs of a host share its memory.
    """
    share = unit_parameters(setting) / setting.shards
    entry = setting.inputs_copied * setting.compute_bytes * setting.tokens * setting.shape.hidden
    link, ram = setting.gpu.host_bytes_per_s, setting.gpu.ram_bytes_per_s * rates.ram / setting.gpus_on_host
    up = share * setting.copied_up + entry * backward
    down = share * setting.copied_down * setting.trained if backward else entry
    return max(up / link, down / link, (up + down) / (rates.both_ways * link), (up + down) / ram)


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


def gather_s(setting: Setting, rates: Rates, n_bytes: float) -> float:
    """Return the time to gather so many bytes of weights from the GPUs that shard them."""
    return ring_s(setting, rates, n_bytes, setting.shards, setting.tp)


def reduce_s(setting: Setting, rates: Rates, n_bytes: float) -> float:
    """Return the time to sum so many bytes of gradients: a reduce-scatter over the shards, and with HSDP an all-reduce over the copies."""
    of_a_copy = setting.shards * setting.tp
    copies = setting.gpus // (of_a_copy * setting.pp)
    between = ring_s(setting, rates, n_bytes / setting.shards, copies, of_a_copy)
    return gather_s(setting, rates, n_bytes) / rates.scatter + 2 * between


def _optimizer_s(setting: Setting, rates: Rates, next_forward_s: float) -> float:
    """What an update takes of a step: bound by memory, on the GPU or in the host, where the next forward may hide it.

    In a host, the copies of that forward and the update share its memory; the norm is taken as gradients come, beside the backward but
    for those of the last unit.
    """
    if not setting.updates_on_host:
        per_gpu = (
            setting.update_bytes
            * setting.trained
            * setting.shape.parameters
            / (setting.shards * setting.tp * setting.pp)
        )
        return per_gpu / (setting.gpu.memory_bytes_per_s * rates.memory)
    held, ram = setting.shape.parameters / setting.hosts, setting.gpu.ram_bytes_per_s
    update, norm = (
        n_bytes * setting.trained * held / (ram * rates.update)
        for n_bytes in (setting.update_bytes, setting.norm_bytes)
    )
    copied = setting.copied_up * held / (ram * rates.ram)
    return norm / setting.shape.layers + max(0.0, update + copied - next_forward_s) if norm else update
