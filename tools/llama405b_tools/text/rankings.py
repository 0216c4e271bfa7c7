"""Predictions side by side, as lines: what a search found, and what-ifs. Pure."""

import math
from collections.abc import Mapping, Sequence

from llama405b.capacity.hardware import GIB
from llama405b.capacity.outlook import MEMORY_SPREAD, Outlook
from llama405b.capacity.run_shape import RunShape
from llama405b.capacity.search import NEAR, is_near, untried_of
from llama405b.contract.phrases import given
from llama405b.contract.schema import IN_BF16
from llama405b_tools.text.predictions import FITS, UNMEASURED, ReportOptions, between, short_sizes, spread

SHOWN = 8  # of a search, and as many of what has run on one GPU at most


def ranking(found: Sequence[Outlook]) -> list[str]:
    """Tell the first of a search."""
    lines = ["", "  offload    moments  units   micro-batch    GPU GiB  RAM GiB   step s  tokens/s"]
    without = [each for each in found if not untried_of(each.load)]
    untried = [each for each in found if untried_of(each.load)]
    for each in [*without[:SHOWN], *untried[:SHOWN]]:
        units = "halves" if each.load.halves else "layers"
        time = f"{each.needs.step_s:8.1f} {each.tokens_per_s:9,.0f}" if each.needs.step_s else "        -         -"
        lines.append(
            f"  {each.load.offload:9}  {_moments(each.load):7}  {units:6}  {each.load.micro_batch:11}  "
            f"{short_sizes(each):>9}  {each.host_bytes / GIB:7,.0f} {time}  {FITS[each.fit]}"
            + given(", with {}", untried_of(each.load))
        )
    return [*lines, *_ties(without), *_fastest(found[0], untried)]


def _fastest(first: Outlook, untried: Sequence[Outlook]) -> list[str]:
    """Say whether something that has run on one GPU at most is faster than what is first."""
    if not untried:
        return []
    if only := untried_of(first.load):
        return [f"  the first needs {only}, which has run on one GPU at most (docs/proof.md)"]
    fastest = max(untried, key=lambda each: each.tokens_per_s or 0.0)
    gain = (fastest.tokens_per_s or 0.0) / (first.tokens_per_s or math.inf) - 1
    if gain <= NEAR:
        return ["  nothing that has run on one GPU at most is faster, as far as a prediction can tell"]
    return [
        f"  fastest is {untried_of(fastest.load)}, by {100 * gain:.0f}%; it has run on one GPU at most (docs/proof.md), and so is not first"
    ]


def _moments(load: RunShape) -> str:
    """Their dtype."""
    return "bf16" if load.numerics in IN_BF16 else load.moments


def _ties(found: Sequence[Outlook]) -> list[str]:
    """Why the first of a search is the first, if others are as fast as far as a prediction can tell."""
    like = [each for each in found if each.fit is found[0].fit]
    fastest = max((each.tokens_per_s or 0.0 for each in like), default=0.0)
    ties = sum(is_near(each, fastest) for each in like)
    if ties < 2:
        return []
    return [
        f"  the first {ties} are within {100 * NEAR:.1f}% of the fastest, which a prediction does not tell apart: most memory to spare "
        f"is first ({100 * found[0].room:.0f}%), moments in FP32 before BF16"
    ]


def comparison(outlooks: Mapping[str, Outlook], asked: ReportOptions) -> list[str]:
    """Tell predictions beside the first one, for so many tokens or a billion."""
    tokens = asked.tokens or 1e9
    titles = ("what if", "batch", "GPU GiB", "RAM GiB", "step s", "tokens/s", "", "days", "GPU-hours", "cost")
    first = next((each.tokens_per_s for each in outlooks.values() if each.tokens_per_s), None)
    rows = [titles[: 9 + bool(asked.price)]]
    rows += [_compared(name, each, first) + _bill(each, tokens, asked.price) for name, each in outlooks.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ["  " + "  ".join(map(str.ljust, row, widths)) for row in rows]
    verdicts = ["", *(FITS[each.fit] for each in outlooks.values())]
    lines = [f"{line}  {verdict}".rstrip() for line, verdict in zip(cells, verdicts, strict=True)]
    planned = next(iter(outlooks.values()))
    batches = filter(None, (_changed_batch(name, each, planned) for name, each in outlooks.items()))
    unmeasured = [f"  {name}: {UNMEASURED}" for name, each in outlooks.items() if not each.time_range]
    what = "days, GPU-hours and cost" if asked.price else "days and GPU-hours"
    return ["", *lines, *batches, *unmeasured, f"  {what} are of {tokens:,.0f} tokens, with saves and failures"]


def _compared(name: str, outlook: Outlook, first: float | None) -> tuple[str, ...]:
    return (name, f"{outlook.load.global_batch:,}", short_sizes(outlook), _ram(outlook), *_pace(outlook, first))


def _changed_batch(name: str, outlook: Outlook, planned: Outlook) -> str:
    """What the batch became; '' if it is the planned one."""
    if outlook.load.global_batch == planned.load.global_batch:
        return ""
    each = f"micro-batches of {outlook.load.micro_batch} on its {outlook.load.dp:,} ranks"
    batch = f"--training.global_batch_size {outlook.load.global_batch}"
    return f"  {name}: {batch}, as {planned.load.global_batch} sequences do not divide into {each}"


def _ram(outlook: Outlook) -> str:
    return spread(outlook.host_bytes / GIB, MEMORY_SPREAD) if outlook.host_bytes else "-"


def _pace(outlook: Outlook, first: float | None) -> tuple[str, str, str]:
    """Time of a step, tokens/s, and how much more that is."""
    if not (outlook.needs.step_s and outlook.tokens_per_s):
        return "-", "-", ""
    more = f"{100 * (outlook.tokens_per_s / first - 1):+.0f}%" if first else ""
    return between(outlook.needs.step_s, outlook.time_range), f"{outlook.tokens_per_s:,.0f}", more


def _bill(outlook: Outlook, tokens: float, price: float) -> tuple[str, ...]:
    """Days, GPU-hours, and cost if there is a price."""
    hours, within = outlook.hours(tokens), outlook.time_range
    if not hours:
        return ("-",) * (2 + bool(price))
    gpu_hours = hours * outlook.load.world
    bill = (between(hours / 24, within), f"{gpu_hours:,.0f}")
    return (*bill, between(price * gpu_hours, within)) if price else bill
