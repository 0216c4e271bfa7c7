"""A prediction of the plan, as lines for people and as JSON for programs. Pure."""

import dataclasses
from collections.abc import Mapping

from llama405b.capacity.calibration import Calibration
from llama405b.capacity.changes import largest_micro_batch, remedies
from llama405b.capacity.evidence import FEWEST, Evidence, Range
from llama405b.capacity.hardware import GIB
from llama405b.capacity.outlook import MEMORY_SPREAD, Fit, Outlook
from llama405b.capacity.run_shape import RunShape
from llama405b.capacity.step_time import StepTime
from llama405b.contract.adapters import describe
from llama405b.contract.dealing import waste_note
from llama405b.contract.phrases import counted, given
from llama405b.contract.schema import Training
from llama405b.contract.units import SPARE

FITS = {
    Fit.YES: "fits",
    Fit.RETRIES: "RUNS SLOWER, WITH ALLOCATOR RETRIES",
    Fit.MAYBE: "MAY NOT FIT",
    Fit.NO: "DOES NOT FIT",
}
RETRIES = "more is reserved than the GPU has: then PyTorch waits for the GPU, gives back what is free, and asks again, in each step"
HELPS = 3  # changes
SMALL, SHORT_S = 0.05 * GIB, 0.05
UNMEASURED = "never measured on this GPU"
OWN = {  # of what was measured on the hosts
    Evidence.STEPS: "of steps that were measured on these hosts",
    Evidence.RATES: "of rates that were measured on these hosts",
}
ALIKE = {  # what was measured of other programs
    Evidence.SMALL: "with models below 10 B parameters or one GPU",
    Evidence.LARGE: "with models of 10 B parameters or more",
    Evidence.MESH: "with tp, cp or pp",
}


@dataclasses.dataclass(frozen=True, slots=True)
class ReportOptions:
    """What is asked beside the prediction; 0: not."""

    tokens: float = 0.0  # to train on
    price: float = 0.0  # of a GPU for an hour
    measured: float = 0.0  # seconds that a step is said to take


def prediction(outlook: Outlook, asked: ReportOptions) -> list[str]:
    """Tell a prediction."""
    lines = [_what(outlook), *_memory(outlook)]
    if outlook.host_bytes:
        has = (
            f" of {outlook.ram_bytes / GIB:,.0f} GiB: {FITS[outlook.ram]}"
            if outlook.ram_bytes
            else " GiB (say --ram to compare)"
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
        f"             allocated, most at {needs.peak.moment}: {_parts({**needs.peak.held, runtime: needs.runtime_bytes})}",
    ]
    if needs.reserved:
        pools = _parts({**needs.reserved, runtime: needs.runtime_bytes})
        lines.append(f"             reserved, in pools that cannot lend to each other: {pools}")
    if outlook.gpu is Fit.RETRIES and needs.reserved:
        lines.append(f"             {RETRIES}")
    return lines


def _sizes(outlook: Outlook) -> str:
    """What is allocated of each GPU, and what PyTorch reserves, if that is known."""
    needs = outlook.needs
    kept = needs.gpu_reserved_bytes
    if kept is None:
        held = spread(needs.gpu_bytes / GIB, outlook.memory_spread)
        return held if outlook.cluster.gpu.is_cpu else f"{held} allocated"
    return f"{needs.gpu_bytes / GIB:,.1f} GiB allocated / {kept / GIB:,.1f} reserved"


def short_sizes(outlook: Outlook) -> str:
    """The same, for a table."""
    needs = outlook.needs
    kept = needs.gpu_reserved_bytes
    beside = f"{kept / GIB:,.0f}" if kept else "?"
    return f"{needs.gpu_bytes / GIB:,.0f} / {beside}"


def _measured(load: RunShape, found: Calibration) -> list[str]:
    """What was measured of it."""
    what = "a run of other settings, whose rates these are"
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
    """Loading and saving."""
    load, needs = outlook.load, outlook.needs
    loads, saves = needs.loading, needs.saving
    reading = f"{_took(loads.rank0_s)} if the first host reads and sends them"
    if load.hosts > 1:
        more = f" (with {loads.host_bytes / GIB:,.0f} GiB more of its memory)"
        reading += f"{more}, {_took(loads.local_s)} if each host reads its own part"
    writing = f"{_took(saves.write_s)} beside training, which waits {_took(saves.waits_s)}{_copies(outlook)}"
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
    """What a save takes of a host's memory, and why it does not take more."""
    saves, limit = outlook.needs.saving, outlook.load.staging_bytes
    staged, wanted = saves.staged_bytes / GIB, saves.wanted_bytes / GIB
    if not wanted:
        return ""
    if staged == wanted:
        return f", and up to {staged:,.0f} GiB of its memory"
    why = f"{100 * SPARE:.0f}% of what is free" if limit is None else "checkpoint.staging"
    return f", as its memory has room for {staged:,.0f} of the {wanted:,.0f} GiB that copies would take ({why})"


def _remedies(outlook: Outlook) -> list[str]:
    """What would help most."""
    lines = []
    for words, other in remedies(outlook)[:HELPS]:
        gain = (
            f"{round(100 * other.gain(outlook)):+d}% tokens/s per GPU, "
            if other.tokens_per_s and outlook.tokens_per_s
            else ""
        )
        ram = f" and {other.needs.host_bytes / GIB:,.0f} of each host" if other.needs.host_bytes else ""
        lines.append(f"{words}: {gain}{short_sizes(other)} GiB of each GPU{ram}, {FITS[other.fit]}")
    return [f"{'would help' if i == 0 else '':12} {line}" for i, line in enumerate(lines)]


def _parts(held: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size / GIB:,.1f}" for name, size in held.items() if size >= SMALL)


def _took(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:,.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:,.0f} min"
    return f"{seconds / 3600:,.1f} h"


def expectation(outlook: Outlook) -> str:
    """Tell in a line what a run that begins is expected to take."""
    needs = outlook.needs
    step = f"a step in {between(needs.step_s, outlook.time_range)} s, " if needs.step_s else ""
    of = "rank" if outlook.cluster.gpu.is_cpu else "GPU"
    found = outlook.calibration
    how = (
        f"from measurements of {found.made}"
        if found
        else "confirmed for layers on one H200 alone, not yet for GPUs together"
    )
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
        return [*lines, f"time         unknown: nobody has timed {outlook.load.numerics}"]
    rate = outlook.tokens_per_s
    used = f", MFU {100 * outlook.mfu:.0f}%, HFU {100 * outlook.hfu:.0f}%" if outlook.mfu and outlook.hfu else ""
    lines += [
        f"step         {between(time.step_s, outlook.time_range)} s: {_split(time)}; never below {outlook.floor_s:.1f}",
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
    """What saves and failures leave of the time."""
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
    """How long all tokens take, and what that costs."""
    hours, within = outlook.hours(asked.tokens), outlook.time_range
    if not hours:
        return "never, as failures undo the steps as fast as they are made"
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
        moved += f" and copies to and from the host {time.copies_s:.1f}"
    hidden = f"of which {time.exposed_s:.1f} is not hidden"
    bubble = f"; {time.bubble_s:.1f} of waiting in the pipeline" if time.bubble_s else ""
    return f"compute {time.compute_s:.1f}; {moved}, {hidden}{bubble}; update {time.optimizer_s:.1f}"


def _compute(time: StepTime) -> list[str]:
    """What the compute of a step is made of, if it is predicted."""
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in time.compute_parts_s.items() if seconds >= SHORT_S)
    return [f"             compute: {parts}"] if parts else []


def _basis(outlook: Outlook) -> str:
    """What the range of the times rests on."""
    within, known = outlook.time_range, outlook.evidence
    if not within:
        return f"{UNMEASURED} ({outlook.cluster.gpu.name}); `plan HOSTS --calibrate` measures it on its hosts"
    if known in OWN:
        return OWN[known]
    if known is Evidence.ADAPTERS:
        return "an assumption: no times of other programs with adapters have been compared"
    if within.programs < FEWEST:
        programs = counted(within.programs, "other program")
        what = "in FP8" if known is Evidence.FP8 else "with offload"
        return f"an assumption: {programs} {what} published a time, and a range takes {FEWEST}"
    return f"holds nine of ten times of {within.programs} other programs, {ALIKE[known]}"


def spread(value: float, share: float) -> str:
    """Tell a number that is known to such a share of it."""
    return between(value, Range(1 - share, 1 + share))


def between(value: float, within: Range | None) -> str:
    """Tell a number, and where it lies if that is known."""
    digits = 3
    if value >= 1:
        digits = 0 if value >= 100 else 1
    if not within:
        return f"{value:,.{digits}f}"
    low, high = within.of(value)
    return f"{value:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"
