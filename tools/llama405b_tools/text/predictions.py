"""A prediction of the plan, as lines for people. Pure."""

import dataclasses
from collections.abc import Mapping, Sequence

from llama405b.capacity.estimate import DISK_BYTES_PER_S, RUNTIME_BYTES
from llama405b.capacity.hardware import GIB
from llama405b.capacity.outlook import MEMORY_SPREAD, TIME_SPREAD, Fit, Outlook, largest_micro_batch

FITS = {Fit.YES: "fits", Fit.MAYBE: "MAY NOT FIT", Fit.NO: "DOES NOT FIT"}
SHOWN = 8  # of a search


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What is asked beside the prediction; 0: not."""

    tokens: float = 0.0  # to train on
    price: float = 0.0  # of a GPU for an hour
    measured: float = 0.0  # seconds that a step is said to take


def prediction(outlook: Outlook, asked: Asked) -> list[str]:
    """Tell a prediction."""
    load, needs, cluster = outlook.load, outlook.needs, outlook.cluster
    lines = [
        f"{load.llama.parameters / 1e9:,.1f} B parameters on {load.hosts} x {load.ranks_per_host} {cluster.gpu.name}, "
        f"{cluster.nic_bytes_per_s * 8 / 1e9:,.0f} Gbit/s a host; "
        f"{load.numerics}, offload {load.offload}, micro-batch {load.micro_batch} of {load.seq_len:,} tokens, "
        f"{outlook.step_tokens:,} tokens a step",
        f"GPU memory   {_spread(needs.gpu_bytes / GIB, MEMORY_SPREAD)} of {cluster.gpu.memory_bytes / GIB:,.0f} GiB: {FITS[outlook.gpu]}"
        f" (states {needs.states_bytes / GIB:,.1f}, activations and gathered units {needs.activations_bytes / GIB:,.1f}, "
        f"CUDA and NCCL {RUNTIME_BYTES / GIB:,.1f}); largest micro-batch that fits: {largest_micro_batch(outlook)}",
    ]
    if needs.host_bytes:
        has = (
            f" of {outlook.ram_bytes / GIB:,.0f} GiB: {FITS[outlook.ram]}"
            if outlook.ram_bytes
            else " GiB (say --ram to compare)"
        )
        lines.append(f"host memory  {_spread(needs.host_bytes / GIB, MEMORY_SPREAD)}{has}, per host")
    lines += _time(outlook, asked)
    each = load.checkpoint_bytes / load.hosts
    lines.append(
        f"disk         {needs.weights_bytes / GIB:,.0f} GiB of weights; a checkpoint is {load.checkpoint_bytes / GIB:,.0f} GiB, "
        f"{each / GIB:,.0f} per host, {each / DISK_BYTES_PER_S:,.0f} s at {DISK_BYTES_PER_S / 1e9:.0f} GB/s; "
        f"{load.keep + 1} of them: {needs.checkpoints_bytes / GIB:,.0f} GiB"
    )
    return lines


def _time(outlook: Outlook, asked: Asked) -> list[str]:
    time, lines = outlook.needs.time, list[str]()
    if asked.measured and asked.measured < outlook.floor_s:
        lines.append(
            f"IMPOSSIBLE   a step of {asked.measured:g} s: the model's FLOPs alone take {outlook.floor_s:.1f} s at the GPUs' peak; "
            "check the sequence, the batch and the number of GPUs"
        )
    if not (time and outlook.tokens_per_s and outlook.mfu):
        return [*lines, f"time         unknown: nobody has timed {outlook.load.numerics}"]
    rate = outlook.tokens_per_s
    moved = f"communication {time.communication_s:.1f}"
    if time.copies_s:
        moved += f" and copies to and from the host {time.copies_s:.1f}"
    lines += [
        f"step         {_spread(time.step_s, TIME_SPREAD)} s: compute {time.compute_s:.1f}; {moved}, of which {time.exposed_s:.1f} is not "
        f"hidden; update {time.optimizer_s:.1f}; never below {outlook.floor_s:.1f}",
        f"rate         {rate:,.0f} tokens/s, {rate / outlook.load.world:,.0f} per GPU, MFU {100 * outlook.mfu:.0f}%",
    ]
    if asked.tokens:
        hours = asked.tokens / outlook.tokens_per_s / 3600
        cost = (
            f", {_spread(asked.price * hours * outlook.load.world, TIME_SPREAD)} at {asked.price:g} a GPU-hour"
            if asked.price
            else ""
        )
        days = f"{_spread(hours / 24, TIME_SPREAD)} days"
        lines.append(f"{asked.tokens:,.0f} tokens: {days}, {hours * outlook.load.world:,.0f} GPU-hours{cost}")
    return lines


def ranking(found: Sequence[Outlook]) -> list[str]:
    """Tell the first of a search."""
    lines = ["", "  offload  units   micro-batch  GPU GiB  RAM GiB   step s  tokens/s"]
    for each in found[:SHOWN]:
        units = "halves" if each.load.halves else "layers"
        time = f"{each.needs.step_s:8.1f} {each.tokens_per_s:9,.0f}" if each.needs.step_s else "        -         -"
        lines.append(
            f"  {each.load.offload:7}  {units:6}  {each.load.micro_batch:11}  {each.needs.gpu_bytes / GIB:7,.0f}  "
            f"{each.needs.host_bytes / GIB:7,.0f} {time}  {FITS[each.fit]}"
        )
    return lines


def comparison(outlooks: Mapping[str, Outlook]) -> list[str]:
    """Tell predictions beside the first one."""
    lines, first = (
        ["", "  what if           GPU GiB  RAM GiB   step s  tokens/s  per GPU  GPU-hours per billion tokens"],
        None,
    )
    for name, each in outlooks.items():
        row = f"  {name:16}  {each.needs.gpu_bytes / GIB:7,.0f}  {each.needs.host_bytes / GIB:7,.0f}"
        if each.needs.step_s and each.tokens_per_s:
            first = first or each.tokens_per_s
            rate, per_gpu = each.tokens_per_s, each.tokens_per_s / each.load.world
            hours, more = 1e9 / per_gpu / 3600, f"{100 * (rate / first - 1):+.0f}% tokens/s"
            row += f" {each.needs.step_s:8.1f} {rate:9,.0f}  {per_gpu:7,.0f}  {hours:9,.0f}  {more:>14}"
        lines.append(f"{row}  {FITS[each.fit]}")
    return lines


def _spread(value: float, share: float) -> str:
    digits = 0 if value >= 100 else 1
    return f"{value:,.{digits}f} ({value * (1 - share):,.{digits}f} to {value * (1 + share):,.{digits}f})"
