"""Format predictions for `llama405b plan`: as lines, as a JSON record, and side by side. Pure."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from llama405b.contract.errors import SPARE, counted, given
from llama405b.predict.calibration import FEWEST, Calibration, Evidence, Range
from llama405b.predict.estimate import Machines
from llama405b.predict.hardware import GIB
from llama405b.predict.run_shape import RunShape
from llama405b.predict.search import (
    MEMORY_SPREAD,
    NEAR,
    Fit,
    Outlook,
    is_near,
    largest_micro_batch,
    remedies,
    untried_of,
)
from llama405b.predict.step_time import StepTime
from llama405b.settings.axes import waste_note
from llama405b.settings.schema import IN_BF16, Parallel, Training
from llama405b.spec.models import describe

FITS = {
    Fit.YES: "fits",
    Fit.RETRIES: "RUNS SLOWER, WITH ALLOCATOR RETRIES",
    Fit.MAYBE: "MAY NOT FIT",
    Fit.NO: "DOES NOT FIT",
}
RETRIES = (
    "PyTorch reserves more than the GPU has: in each step it waits for the GPU, frees cached blocks and allocates again"
)
HELPS = 3  # changes
SMALL, SHORT_S = 0.05 * GIB, 0.05
UNMEASURED = "never measured on this GPU"
OWN = {  # of what was measured on the hosts
    Evidence.STEPS: "from steps measured on these hosts",
    Evidence.RATES: "from rates measured on these hosts",
}
ALIKE = {  # what was measured of other programs
    Evidence.SMALL: "with models below 10 B parameters or one GPU",
    Evidence.LARGE: "with models of 10 B parameters or more",
    Evidence.MESH: "with tp, cp or pp",
}


@dataclasses.dataclass(frozen=True, slots=True)
class ReportOptions:
    """What to report besides the prediction; 0: not requested."""

    tokens: float = 0.0  # to train on
    price: float = 0.0  # of a GPU for an hour
    measured: float = 0.0  # seconds that a step is said to take


def prediction(outlook: Outlook, asked: ReportOptions) -> list[str]:
    """Format a prediction as lines."""
    lines = [_what(outlook), *_memory(outlook)]
    if outlook.host_bytes:
        has = (
            f" of {outlook.ram_bytes / GIB:,.0f} GiB: {FITS[outlook.ram]}"
            if outlook.ram_bytes
            else " GiB (pass --ram to check)"
        )
        held = spread(outlook.host_bytes / GIB, MEMORY_SPREAD)  # which no calibration measures
        lines.append(f"host memory  {held}{has}, per host: {_parts(outlook.host_held_bytes)}")
    lines += [*_time(outlook, asked), *_files(outlook)]
    load = outlook.load
    batch = Training(global_batch_size=load.global_batch, micro_batch_size=load.micro_batch)
    if note := waste_note(batch, load.dp):
        lines.append(f"waste        {note}")
    if outlook.calibration:
        lines += _measured(outlook.load, outlook.calibration)
    return [*lines, *_remedies(outlook)]


def _what(outlook: Outlook) -> str:
    load = outlook.load
    cluster = outlook.cluster
    n = outlook.load.llama.parameters
    size = f"{n / 1e9:,.1f} B" if n >= 1e9 else f"{n / 1e6:,.1f} M"
    adapter = f", frozen, with {describe(load.adapter)}," if load.adapter.trains else ""
    network = f", {cluster.nic_bytes_per_s * 8 / 1e9:,.0f} Gbit/s a host" if not cluster.gpu.is_cpu else ""
    return (
        f"{size} parameters{adapter} on {load.hosts} x {load.ranks_per_host} {cluster.gpu.name}{network}"
        f"{given(', as {}', load.axes.told)}; "
        f"{load.numerics}, offload {load.offload}, micro-batch {load.micro_batch} of {load.seq_len:,} tokens, "
        f"{outlook.step_tokens:,} tokens a step"
    )


def _memory(outlook: Outlook) -> list[str]:
    needs, gpu = outlook.needs, outlook.cluster.gpu
    name, runtime = ("rank memory", "PyTorch") if gpu.is_cpu else ("GPU memory", "CUDA and NCCL")
    has = f"of {gpu.memory_bytes / GIB:,.0f} GiB: {FITS[outlook.gpu]}"
    largest = f"; largest micro-batch that fits: {largest_micro_batch(outlook)}"
    lines = [
        f"{name:12} {_sizes(outlook)} {has}{largest}",
        f"             allocated, peak at {needs.peak.moment}: {_parts({**needs.peak.held, runtime: needs.runtime_bytes})}",
    ]
    if needs.reserved:
        pools = _parts({**needs.reserved, runtime: needs.runtime_bytes})
        lines.append(f"             reserved by stream: {pools}")
    if outlook.gpu is Fit.RETRIES and needs.reserved:
        lines.append(f"             {RETRIES}")
    return lines


def _sizes(outlook: Outlook) -> str:
    """Format the allocated and, if known, reserved memory of a GPU."""
    needs = outlook.needs
    kept = needs.gpu_reserved_bytes
    if kept is None:
        held = spread(needs.gpu_bytes / GIB, outlook.memory_spread)
        return held if outlook.cluster.gpu.is_cpu else f"{held} allocated"
    return f"{needs.gpu_bytes / GIB:,.1f} GiB allocated / {kept / GIB:,.1f} reserved"


def short_sizes(outlook: Outlook) -> str:
    """Format the allocated and reserved memory of a GPU for a table."""
    needs = outlook.needs
    kept = needs.gpu_reserved_bytes
    beside = f"{kept / GIB:,.0f}" if kept else "?"
    return f"{needs.gpu_bytes / GIB:,.0f} / {beside}"


def _measured(load: RunShape, found: Calibration) -> list[str]:
    """Return the lines on a calibration."""
    what = "rates of a run with other settings"
    if found.fits(load):
        what = f"step and memory, with {found.few.layers} and {found.more.layers} layers"
    alone, links = found.alone, ""
    if alone.gather:
        links = f", all-gather {_rate(alone.gather)}, reduce-scatter {_rate(alone.scatter)}"
    return [
        f"measured     on these hosts on {found.made}: {what}",
        f"             a layer {alone.layer_s:.3f} s; GB/s: AdamW {_rate(alone.device_update)} of a rank, {_rate(alone.host_update)} "
        f"in a host's memory, copies {_rate(alone.copies)}{links}, writing {_rate(alone.disk)}",
    ]


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.3g}"


def _files(outlook: Outlook) -> list[str]:
    """Return the lines on loading, saving and disks."""
    load, needs = outlook.load, outlook.needs
    loads, saves = needs.loading, needs.saving
    reading = f"{_took(loads.rank0_s)} if the first host reads and sends them"
    if load.hosts > 1:
        more = f" (with {loads.host_bytes / GIB:,.0f} GiB more of its memory)"
        reading += f"{more}, {_took(loads.local_s)} if each host reads its own part"
    writing = f"{_took(saves.write_s)} in the background, training waits {_took(saves.waits_s)}{_copies(outlook)}"
    if needs.pinned_bytes:
        reading += f"; pinning {needs.pinned_bytes / GIB:,.0f} GiB of each host's memory: {_took(needs.pinning_s)}"
    return [
        f"loading      {needs.weights_bytes / GIB:,.0f} GiB of weights: {reading}",
        f"saving       {load.checkpoint_bytes / GIB:,.0f} GiB a checkpoint, {saves.n_bytes / GIB:,.0f} of each host: {writing}; "
        f"best every {_took(saves.best_interval_s)}",
        f"disk         {needs.checkpoints_bytes / GIB:,.0f} GiB for {load.keep + 1} checkpoints; "
        f"read and written at {_rate(outlook.cluster.disk_bytes_per_s)} GB/s of each host (--disk)",
    ]


def _copies(outlook: Outlook) -> str:
    """Format what a save takes of a host's memory, and its limit."""
    saves, limit = outlook.needs.saving, outlook.load.staging_bytes
    staged, wanted = saves.staged_bytes / GIB, saves.wanted_bytes / GIB
    if not wanted:
        return ""
    if staged == wanted:
        return f", up to {staged:,.0f} GiB of host memory for copies"
    why = f"{100 * SPARE:.0f}% of what is free" if limit is None else "checkpoint.staging"
    return f", host memory has room for {staged:,.0f} of the {wanted:,.0f} GiB of copies ({why})"


def _remedies(outlook: Outlook) -> list[str]:
    """Return the lines on the changes that help most."""
    lines = []
    for words, other in remedies(outlook)[:HELPS]:
        gain = (
            f"{round(100 * other.gain(outlook)):+d}% tokens/s per GPU, "
            if other.tokens_per_s and outlook.tokens_per_s
            else ""
        )
        ram = f" and {other.needs.host_bytes / GIB:,.0f} of each host" if other.needs.host_bytes else ""
        lines.append(f"{words}: {gain}{short_sizes(other)} GiB of each GPU{ram}, {FITS[other.fit]}")
    return [f"{'try' if i == 0 else '':12} {line}" for i, line in enumerate(lines)]


def _parts(held: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size / GIB:,.1f}" for name, size in held.items() if size >= SMALL)


def _took(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:,.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:,.0f} min"
    return f"{seconds / 3600:,.1f} h"


def expectation(outlook: Outlook) -> str:
    """Format what a starting run is expected to take, in one line."""
    needs = outlook.needs
    step = f"a step in {between(needs.step_s, outlook.time_range)} s, " if needs.step_s else ""
    of = "rank" if outlook.cluster.gpu.is_cpu else "GPU"
    found = outlook.calibration
    how = f"from measurements of {found.made}" if found else "checked for layers on one H200, not yet on several GPUs"
    if not outlook.time_range:
        how = UNMEASURED
    has = outlook.cluster.gpu.memory_bytes / GIB
    slower = "; slower, with allocator retries" if outlook.gpu is Fit.RETRIES else ""
    return f"expected: {step}{_sizes(outlook)} of {has:,.0f} GiB of each {of}{slower}; {how}"


def _time(outlook: Outlook, asked: ReportOptions) -> list[str]:
    time, lines = outlook.needs.time, list[str]()
    if asked.measured and asked.measured < outlook.floor_s:
        lines.append(
            f"IMPOSSIBLE   a step of {asked.measured:g} s: the model's FLOPs alone take {outlook.floor_s:.1f} s at the GPUs' peak; "
            "check the sequence, the batch and the number of GPUs"
        )
    if not (time and outlook.tokens_per_s):
        return [*lines, f"time         unknown: no measured times with {outlook.load.numerics}"]
    rate = outlook.tokens_per_s
    used = f", MFU {100 * outlook.mfu:.0f}%, HFU {100 * outlook.hfu:.0f}%" if outlook.mfu and outlook.hfu else ""
    lines += [
        f"step         {between(time.step_s, outlook.time_range)} s: {_split(time)}; lower bound {outlook.floor_s:.1f}",
        *_compute(time),
        f"range        {_basis(outlook)}",
        f"rate         {rate:,.0f} tokens/s, {rate / outlook.load.world:,.0f} per GPU{used}",
        *_goodput(outlook, asked),
    ]
    if asked.tokens:
        lines.append(f"{asked.tokens:,.0f} tokens: {_whole(outlook, asked)}")
    elif asked.price:
        hourly = asked.price * outlook.load.world
        step = between(hourly * time.step_s / 3600, outlook.time_range)
        lines.append(f"cost         {hourly * 24:,.0f} a day, {step} a step, at {asked.price:g} a GPU-hour")
    return lines


def _goodput(outlook: Outlook, asked: ReportOptions) -> list[str]:
    """Return the line on goodput."""
    found = outlook.goodput(asked.tokens)
    if not found:
        return []
    failures = (
        f"failures, one in {_took(found.mtbf_s)} (checkpoint.mtbf), {100 * (1 - found.saves_share - found.share):.1f}%"
    )
    saves = f"saves, every {_took(found.interval_s)} of training, take {100 * found.saves_share:.1f}%"
    if not found.saves_share:
        saves = "nothing is saved (checkpoint.every)"
    return [f"goodput      {100 * found.share:.1f}%: {saves}; {failures}"]


def _whole(outlook: Outlook, asked: ReportOptions) -> str:
    """Format how long all tokens take, and what that costs."""
    hours, within = outlook.hours(asked.tokens), outlook.time_range
    if not hours:
        return "never: failures undo steps as fast as they are made"
    gpu_hours = hours * outlook.load.world
    cost = f", {between(asked.price * gpu_hours, within)} at {asked.price:g} a GPU-hour" if asked.price else ""
    return f"{between(hours / 24, within)} days, {gpu_hours:,.0f} GPU-hours{cost}, with saves and failures"


def _split(time: StepTime) -> str:
    if time.compute_s is None or time.exposed_s is None:
        parts = {
            "forward": time.forward_s,
            "backward": time.backward_s,
            "update": time.optimizer_s,
            "data": time.data_s,
        }
        return ", ".join(f"{name} {seconds:.3f}" for name, seconds in parts.items())
    moved = f"communication {time.communication_s:.1f}"
    if time.copies_s:
        moved += f" + copies to and from the host {time.copies_s:.1f}"
    hidden = f"({time.exposed_s:.1f} exposed)"
    bubble = f"; pipeline bubble {time.bubble_s:.1f}" if time.bubble_s else ""
    return f"compute {time.compute_s:.1f}; {moved} {hidden}{bubble}; update {time.optimizer_s:.1f}"


def _compute(time: StepTime) -> list[str]:
    """Return the line on the parts of a step's compute, if it is predicted."""
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in time.compute_parts_s.items() if seconds >= SHORT_S)
    return [f"             compute: {parts}"] if parts else []


def _basis(outlook: Outlook) -> str:
    """Format the basis of the range of times."""
    within, known = outlook.time_range, outlook.evidence
    if not within:
        return f"{UNMEASURED} ({outlook.cluster.gpu.name}); `plan HOSTS --calibrate` measures it on its hosts"
    if known in OWN:
        return OWN[known]
    if known is Evidence.ADAPTERS:
        return "rough (no published times with adapters to compare with)"
    if within.programs < FEWEST:
        programs = counted(within.programs, "other program")
        what = "in FP8" if known is Evidence.FP8 else "with offload"
        return f"rough: {programs} {what} published a time; a range needs {FEWEST}"
    return f"covers 90% of published times of {within.programs} other programs, {ALIKE[known]}"


def spread(value: float, share: float) -> str:
    """Format a number with a symmetric range, a share of it."""
    return between(value, Range(1 - share, 1 + share))


def between(value: float, within: Range | None) -> str:
    """Format a number, and its range if that is known."""
    digits = 3
    if value >= 1:
        digits = 0 if value >= 100 else 1
    if not within:
        return f"{value:,.{digits}f}"
    low, high = within.of(value)
    return f"{value:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


SCHEMA = 2  # of the record: raised when a field is renamed, removed, or means something else
UNITS = {  # of fields, by their name or how it ends
    "_bytes": "bytes",
    "_s": "seconds",
    "tokens_per_s": "tokens per second, of all GPUs",
    "_bytes_per_s": "bytes per second, one direction",
    "_spread": "share of the value by which it may be too high or too low",
    "time_range": "lowest and highest likely time, as shares of it, and how many programs show it; null: this GPU was never measured",
    "share": "share of the time",
    "mesh": "ranks along each axis",
    "mfu": "share",
    "hfu": "share",
    "seq_len": "tokens",
    "global_batch_size": "sequences",
    "micro_batch_size": "sequences",
    "hours": "hours, with saves and failures",
    "gpu_hours": "hours of one GPU, with saves and failures",
    "price": "of a GPU for an hour",
    "cost": "as price, with saves and failures",
    "cost_per_day": "as price",
}


def record(outlook: Outlook, machines: Machines, asked: ReportOptions) -> dict[str, object]:
    """Return a prediction and its inputs as a record for JSON."""
    needs, load, within = outlook.needs, outlook.load, outlook.time_range
    hours, goodput = outlook.hours(asked.tokens) or None, outlook.goodput(asked.tokens)
    gpu_hours = hours * load.world if hours else None
    return {
        "inputs": _inputs(outlook, machines, asked),
        "fits": outlook.fit.name.lower(), "gpu_bytes": needs.gpu_bytes, "host_bytes": outlook.host_bytes,
        "gpu_reserved_bytes": needs.gpu_reserved_bytes, "gpu_reserved_by_pool_bytes": needs.reserved,
        "gpu_held_bytes": needs.peak.held, "peak_moment": needs.peak.moment, "host_held_bytes": outlook.host_held_bytes,
        "loading": dataclasses.asdict(needs.loading), "saving": dataclasses.asdict(needs.saving),
        "pinned_bytes": needs.pinned_bytes, "pinning_s": needs.pinning_s,
        "memory_spread": outlook.memory_spread, "time_range": dataclasses.asdict(within) if within else None,
        "evidence": outlook.evidence, "calibrated": bool(outlook.calibration),
        "time": dataclasses.asdict(needs.time) | {"step_s": needs.step_s} if needs.time else None,
        "floor_s": outlook.floor_s, "tokens_per_s": outlook.tokens_per_s, "mfu": outlook.mfu, "hfu": outlook.hfu,
        "goodput": dataclasses.asdict(goodput) if goodput else None,
        "hours": hours, "gpu_hours": gpu_hours, "cost": gpu_hours * asked.price if gpu_hours and asked.price else None,
        "cost_per_day": 24 * load.world * asked.price if asked.price else None, "checkpoint_bytes": load.checkpoint_bytes,
        "settings": {"offload": load.offload, "moments": load.moments, "wrap": load.wrap, "micro_batch_size": load.micro_batch,
                     "strategy": load.parallel(Parallel()).strategy, "loss": load.loss,
                     "activation_checkpointing": str(load.recompute), "activations": load.activations},
        "mesh": dataclasses.asdict(load.axes),
    }  # fmt: skip


def _inputs(outlook: Outlook, machines: Machines, asked: ReportOptions) -> Mapping[str, object]:
    """Return the inputs of a prediction: machines, model, and the settings that matter."""
    load = outlook.load
    return {
        "nodes": machines.nodes, "slots": machines.slots, "gpu": outlook.cluster.gpu.name,
        "gpu_memory_bytes": outlook.cluster.gpu.memory_bytes, "ram_bytes": machines.ram_bytes or None,
        "nic_bytes_per_s": machines.nic_bytes_per_s, "disk_bytes_per_s": machines.disk_bytes_per_s,
        "parameters": load.llama.parameters, "layers": load.llama.layers, "numerics": load.numerics, "overlap": load.overlap,
        "adapter": describe(load.adapter),
        "seq_len": load.seq_len, "global_batch_size": outlook.load.global_batch, "attention": load.attention, "packing": load.packing,
        "keep": load.keep, "every": load.every, "mtbf_s": load.mtbf_s, "staging_bytes": load.staging_bytes,
        "tokens": asked.tokens or None, "price": asked.price or None, "measured_s": asked.measured or None,
    }  # fmt: skip


SHOWN = 8  # of a search, and as many of what has run on one GPU at most


def ranking(found: Sequence[Outlook]) -> list[str]:
    """Format the best results of a search as a table."""
    lines = ["", "  offload    moments  units   micro-batch    GPU GiB  RAM GiB   step s  tokens/s"]
    without = [each for each in found if not untried_of(each.load)]
    untried = [each for each in found if untried_of(each.load)]
    for each in [*without[:SHOWN], *untried[:SHOWN]]:
        units = "halves" if each.load.halves else "layers"
        moments = "bf16" if each.load.numerics in IN_BF16 else each.load.moments
        time = f"{each.needs.step_s:8.1f} {each.tokens_per_s:9,.0f}" if each.needs.step_s else "        -         -"
        lines.append(
            f"  {each.load.offload:9}  {moments:7}  {units:6}  {each.load.micro_batch:11}  "
            f"{short_sizes(each):>9}  {each.host_bytes / GIB:7,.0f} {time}  {FITS[each.fit]}"
            + given(", with {}", untried_of(each.load))
        )
    return [*lines, *_ties(without), *_fastest(found[0], untried)]


def _fastest(first: Outlook, untried: Sequence[Outlook]) -> list[str]:
    """Return a line on whether something tested on one GPU at most is faster than the first."""
    if not untried:
        return []
    if only := untried_of(first.load):
        return [f"  the first needs {only}, tested on one GPU at most (docs/proof.md)"]
    fastest = max(untried, key=lambda each: each.tokens_per_s or 0.0)
    gain = (fastest.tokens_per_s or 0.0) / (first.tokens_per_s or math.inf) - 1
    if gain <= NEAR:
        return ["  nothing tested on one GPU at most is predicted to be faster"]
    return [
        f"  fastest is {untried_of(fastest.load)}, by {100 * gain:.0f}%; "
        "tested on one GPU at most so far (docs/proof.md), so it ranks lower"
    ]


def _ties(found: Sequence[Outlook]) -> list[str]:
    """Return a line on why the first of a search is first, if others are about as fast."""
    like = [each for each in found if each.fit is found[0].fit]
    fastest = max((each.tokens_per_s or 0.0 for each in like), default=0.0)
    ties = sum(is_near(each, fastest) for each in like)
    if ties < 2:
        return []
    return [
        f"  the first {ties} are within {100 * NEAR:.1f}% of the fastest, too close for a prediction to tell apart: "
        "most memory to spare "
        f"is first ({100 * found[0].room:.0f}%), moments in FP32 before BF16"
    ]


def comparison(outlooks: Mapping[str, Outlook], asked: ReportOptions) -> list[str]:
    """Format predictions next to the first one, for so many tokens or a billion."""
    tokens = asked.tokens or 1e9
    titles = ("what if", "batch", "GPU GiB", "RAM GiB", "step s", "tokens/s", "", "days", "GPU-hours", "cost")
    first = next((each.tokens_per_s for each in outlooks.values() if each.tokens_per_s), None)
    rows = [titles[: 9 + bool(asked.price)]]
    for name, each in outlooks.items():
        ram = spread(each.host_bytes / GIB, MEMORY_SPREAD) if each.host_bytes else "-"
        rows.append(
            (
                name,
                f"{each.load.global_batch:,}",
                short_sizes(each),
                ram,
                *_pace(each, first),
                *_bill(each, tokens, asked.price),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ["  " + "  ".join(map(str.ljust, row, widths)) for row in rows]
    verdicts = ["", *(FITS[each.fit] for each in outlooks.values())]
    lines = [f"{line}  {verdict}".rstrip() for line, verdict in zip(cells, verdicts, strict=True)]
    planned = next(iter(outlooks.values()))
    batches = filter(None, (_changed_batch(name, each, planned) for name, each in outlooks.items()))
    unmeasured = [f"  {name}: {UNMEASURED}" for name, each in outlooks.items() if not each.time_range]
    what = "days, GPU-hours and cost" if asked.price else "days and GPU-hours"
    return ["", *lines, *batches, *unmeasured, f"  {what} are for {tokens:,.0f} tokens, with saves and failures"]


def _changed_batch(name: str, outlook: Outlook, planned: Outlook) -> str:
    """Describe a changed global batch; '' if it is the planned one."""
    if outlook.load.global_batch == planned.load.global_batch:
        return ""
    each = f"micro-batches of {outlook.load.micro_batch} on its {outlook.load.dp:,} ranks"
    batch = f"--training.global_batch_size {outlook.load.global_batch}"
    return f"  {name}: {batch}, as {planned.load.global_batch} sequences do not divide into {each}"


def _pace(outlook: Outlook, first: float | None) -> tuple[str, str, str]:
    """Return the cells of step time, tokens/s and the change in tokens/s."""
    if not (outlook.needs.step_s and outlook.tokens_per_s):
        return "-", "-", ""
    more = f"{100 * (outlook.tokens_per_s / first - 1):+.0f}%" if first else ""
    return between(outlook.needs.step_s, outlook.time_range), f"{outlook.tokens_per_s:,.0f}", more


def _bill(outlook: Outlook, tokens: float, price: float) -> tuple[str, ...]:
    """Return the cells of days, GPU-hours, and cost if there is a price."""
    hours, within = outlook.hours(tokens), outlook.time_range
    if not hours:
        return ("-",) * (2 + bool(price))
    gpu_hours = hours * outlook.load.world
    bill = (between(hours / 24, within), f"{gpu_hours:,.0f}")
    return (*bill, between(price * gpu_hours, within)) if price else bill
