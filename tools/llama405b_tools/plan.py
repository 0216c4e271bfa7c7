"""Format predictions for `llama405b plan`: as lines, as a JSON record, and side by side. Pure."""

import dataclasses
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from llama405b.contract.errors import STAGING_SHARE, fmt_if, pluralize
from llama405b.contract.software import DOCS
from llama405b.predict.calibration import MIN_PROGRAMS, STEPS_RANGE, Calibration, Evidence, TimeRange
from llama405b.predict.hardware import GIB
from llama405b.predict.offers import MAX_HOSTS, WORTHWHILE_SPEEDUP, Offer, Timing, sensitivities, worthwhile_hosts
from llama405b.predict.run_shape import PredictedRun
from llama405b.predict.search import (
    MEMORY_SPREAD,
    MIN_GAIN,
    NEAR_SHARE,
    Fit,
    Prediction,
    format_changes,
    is_near_fastest,
    largest_micro_batch,
    remedies,
    split_label,
    untested_features,
    with_larger_batch,
)
from llama405b.predict.step_time import StepTime
from llama405b.settings.axes import FULL_RECOMPUTE, idle_rank_note
from llama405b.settings.schema import BF16_NUMERICS, Config, Training
from llama405b.spec.adapters import adapter_label
from llama405b_tools.text.figures import format_columns

MAX_SUMMARY_LINES, WIDTH = 12, 100  # of the first screen, and its columns
BAR_WIDTH = 24
WITH_RETRIES = ", WITH ALLOCATOR RETRIES"
FIT_LABELS = {
    Fit.YES: "fits",
    Fit.RETRIES: f"RUNS SLOWER{WITH_RETRIES}",
    Fit.MAYBE: "MAY NOT FIT",
    Fit.NO: "DOES NOT FIT",
}
RETRIES_NOTE = (
    "PyTorch reserves more than the GPU has: in each step it waits for the GPU, frees cached blocks and allocates again"
)
MAX_REMEDIES, MAX_REMEDY_LINES = 3, 4  # changes, and lines on them and on a larger batch
MIN_SHOWN_BYTES, MIN_SHOWN_S = 0.05 * GIB, 0.05
UNMEASURED = "little is known of times on this GPU"
MEASURED_BASIS = {  # of what was measured on the hosts
    Evidence.STEPS: "from steps measured on these hosts",
    Evidence.RATES: "from rates measured on these hosts",
}
PROGRAMS_BASIS = {  # what was measured of other programs
    Evidence.SMALL: "with models below 5 B parameters",
    Evidence.MEDIUM: "with models of 5 to 10 B parameters, or one GPU",
    Evidence.LARGE: "with models of 10 B parameters or more",
    Evidence.MESH: "with tp, cp or pp",
    Evidence.FP8: "in FP8",
    Evidence.ADAPTERS: "with LoRA",
    Evidence.OFFLOAD: "with updates in host memory",
    Evidence.OTHER_GPU: "on B200, GB200, MI300X, MI325X and A6000",
}


@dataclasses.dataclass(frozen=True, slots=True)
class ReportOptions:
    """What to report besides the prediction; 0: not requested."""

    tokens: float = 0.0  # to train on
    # of a GPU for an hour, by kind; "": of any other
    prices: Mapping[str, float] = dataclasses.field(default_factory=dict)
    measured: float = 0.0  # seconds that a step is said to take

    def price_of(self, gpu: str) -> float | None:
        """Return the price of such a GPU for an hour; None: it was not given."""
        return self.prices.get(gpu, self.prices.get(""))


def fit_label(prediction: Prediction) -> str:
    """Return whether a run fits, in words."""
    if prediction.fit is Fit.RETRIES and not prediction.knows_kept_bytes:
        return f"MAY RUN SLOWER{WITH_RETRIES}"
    return FIT_LABELS[prediction.fit]


def short_fit_label(prediction: Prediction) -> str:
    """As ``fit_label``, where there is little room."""
    return fit_label(prediction).removesuffix(WITH_RETRIES)


def format_summary(
    prediction: Prediction, options: ReportOptions, notes: Sequence[str], *, is_fewest: bool = False
) -> list[str]:
    """Format what decides, on one screen; ``notes``: the assumptions; ``is_fewest``: whether it is of the fewest hosts that fit."""
    needs, run, gpu = prediction.needs, prediction.run, prediction.cluster.gpu
    ranks = pluralize(run.world, "rank" if gpu.is_cpu else "GPU") + ", fewest as set" * (
        is_fewest and prediction.fit is Fit.YES
    )
    machines = f"{run.hosts} x {run.ranks_per_host} {gpu.name} ({ranks})"
    settings = [
        str(run.numerics), f"offload {run.offload}", f"checkpointing {run.recompute}",
        adapter_label(run.adapter) * run.adapter.is_enabled, split_label(run), f"micro-batch {run.micro_batch}",
        f"batch {run.global_batch:,} x {run.seq_len:,} tokens",
    ]  # fmt: skip
    name = "rank memory" if gpu.is_cpu else "GPU memory"
    used_bytes, words = prediction.kept_bytes, "with what PyTorch keeps"
    if prediction.gpu_fit is Fit.NO:
        used_bytes, words = needs.gpu_bytes, "allocated"
    lines = [
        f"{short_fit_label(prediction)}: {_format_size(run)} on {machines}; {_format_margin(prediction)}",
        *_wrap("settings", ", ".join(filter(None, settings))),
        *_time_lines(prediction, options),
        _bar_line(name, used_bytes, gpu.memory_bytes, words),
    ]
    if prediction.host_bytes:
        spread = f"of each host, within {100 * MEMORY_SPREAD:.0f}%"
        lines.append(_bar_line("host memory", prediction.host_bytes, prediction.ram_bytes, spread))
    checkpoints = f"{needs.checkpoints_bytes / GIB:,.0f} GiB for {run.keep + 1} checkpoints"
    disk = f"disk         {checkpoints} and {needs.weights_bytes / GIB:,.0f} of weights, shared or over all hosts"
    rest = [*_waste_lines(run), *notes]
    if prediction.calibration:
        rest += _calibration_lines(run, prediction.calibration)[:1]
    for more in ([disk], _remedy_lines(prediction), _sensitivity_lines(prediction)):  # as many as there is room for
        lines += more[: max(0, MAX_SUMMARY_LINES - len(lines) - len(rest))]
    return [*lines, *rest]


def _format_size(run: PredictedRun) -> str:
    n = run.llama.parameters
    return f"{n / 1e9:,.1f} B parameters" if n >= 1e9 else f"{n / 1e6:,.1f} M parameters"


def _waste_lines(run: PredictedRun) -> list[str]:
    """Return the line on ranks that have nothing to do."""
    batch = Training(global_batch_size=run.global_batch, micro_batch_size=run.micro_batch)
    note = idle_rank_note(batch, run.dp)
    return _wrap("waste", note) if note else []


def _format_margin(prediction: Prediction) -> str:
    """Format what is to spare of the scarcest memory, or what is missing."""
    needs, gpu, used = prediction.needs, prediction.cluster.gpu, prediction.kept_bytes
    device = "rank" if gpu.is_cpu else "GPU"
    if prediction.gpu_fit is Fit.NO:
        return f"each {device} lacks {(needs.gpu_bytes - gpu.memory_bytes) / GIB:,.1f} GiB"
    if prediction.ram_fit is not Fit.YES:
        lacking = (prediction.host_bytes * (1 + MEMORY_SPREAD) - prediction.ram_bytes) / GIB
        return f"each host {'lacks' if prediction.ram_fit is Fit.NO else 'may lack'} {lacking:,.0f} GiB of memory"
    if prediction.gpu_fit is Fit.RETRIES:
        reserves = "reserves" if needs.gpu_reserved_bytes else "may reserve"
        return f"PyTorch {reserves} {(used - gpu.memory_bytes) / GIB:,.1f} GiB too much"
    return f"{(gpu.memory_bytes - used) / GIB:,.1f} GiB of each {device} to spare"


def _wrap(label: str, text: str) -> list[str]:
    """Return a label and a text in lines of ``WIDTH`` columns at most; a flag and its value stay on one."""
    joined = re.sub(r"(--[\w.]+) (?!--)", "\\1\xa0", text)
    indents = f"{label:12} ", " " * 13
    lines = textwrap.wrap(
        joined, WIDTH, initial_indent=indents[0], subsequent_indent=indents[1], break_on_hyphens=False
    )
    return [line.replace("\xa0", " ") for line in lines]


def _bar_line(name: str, used_bytes: float, limit_bytes: float, words: str) -> str:
    """Format a use of memory as a bar."""
    filled = min(BAR_WIDTH, round(BAR_WIDTH * used_bytes / limit_bytes))
    bar = "#" * filled + "." * (BAR_WIDTH - filled)
    digits = 1 if limit_bytes < 1000 * GIB else 0
    return f"{name:12} [{bar}] {used_bytes / GIB:,.{digits}f} of {limit_bytes / GIB:,.{digits}f} GiB {words}"


def _sensitivity_lines(prediction: Prediction) -> list[str]:
    """Return the line on what the time depends on most."""
    if prediction.calibration or prediction.cluster.gpu.is_cpu:
        return []
    moved = [f"{name} {100 * share:+.0f}%" for name, share in sensitivities(prediction) if share >= MIN_GAIN]
    likely = f"--calibrate: within {100 * (1 - STEPS_RANGE.low):.0f}%"
    return [f"depends on   time at half the speed of {', '.join(moved[:2])}; {likely}"] if moved else []


def format_prediction(prediction: Prediction, options: ReportOptions) -> list[str]:
    """Format all of a prediction as lines."""
    lines = [_format_run(prediction), *_memory_lines(prediction)]
    if prediction.host_bytes:
        limit = f"of {prediction.ram_bytes / GIB:,.0f} GiB: {FIT_LABELS[prediction.ram_fit]}"
        needed = format_spread(prediction.host_bytes / GIB, MEMORY_SPREAD)  # which no calibration measures
        lines.append(f"host memory  {needed} {limit}, per host: {_format_parts(prediction.host_bytes_by_kind)}")
    lines += [*_time_lines(prediction, options, is_verbose=True), *_storage_lines(prediction)]
    lines += _waste_lines(prediction.run)
    if prediction.calibration:
        lines += _calibration_lines(prediction.run, prediction.calibration)
    return [*lines, *_remedy_lines(prediction)]


def _format_run(prediction: Prediction) -> str:
    run = prediction.run
    cluster = prediction.cluster
    adapter = f", frozen, with {adapter_label(run.adapter)}," if run.adapter.is_enabled else ""
    network = f", {cluster.nic_bytes_per_s * 8 / 1e9:,.0f} Gbit/s a host" if not cluster.gpu.is_cpu else ""
    return (
        f"{_format_size(run)}{adapter} on {run.hosts} x {run.ranks_per_host} {cluster.gpu.name}{network}"
        f"{fmt_if(', as {}', split_label(run))}; "
        f"{run.numerics}, offload {run.offload}, micro-batch {run.micro_batch} of {run.seq_len:,} tokens, "
        f"{prediction.step_tokens:,} tokens a step"
    )


def _memory_lines(prediction: Prediction) -> list[str]:
    needs, gpu = prediction.needs, prediction.cluster.gpu
    name, runtime = ("rank memory", "PyTorch") if gpu.is_cpu else ("GPU memory", "CUDA and NCCL")
    is_slower = prediction.gpu_fit is Fit.RETRIES is prediction.fit
    verdict = fit_label(prediction) if is_slower else FIT_LABELS[prediction.gpu_fit]
    limit = f"of {gpu.memory_bytes / GIB:,.1f} GiB: {verdict}"
    if prediction.gpu_fit is Fit.YES:
        limit += f", {(gpu.memory_bytes - prediction.kept_bytes) / GIB:,.1f} to spare"
    largest = f"; largest micro-batch that fits and divides the batch: {largest_micro_batch(prediction)}"
    lines = [
        f"{name:12} {_format_gpu_memory(prediction)} {limit}{largest}",
        f"             allocated, peak at {needs.peak.moment}: {_format_parts({**needs.peak.bytes_by_kind, runtime: needs.runtime_bytes})}",
    ]
    if needs.reserved_by_pool:
        pools = _format_parts({**needs.reserved_by_pool, runtime: needs.runtime_bytes})
        lines.append(f"             reserved by stream: {pools}")
    if prediction.gpu_fit is Fit.RETRIES and needs.reserved_by_pool:
        lines.append(f"             {RETRIES_NOTE}")
    return lines


def _format_gpu_memory(prediction: Prediction) -> str:
    """Format the allocated and, if known, reserved memory of a GPU."""
    needs = prediction.needs
    reserved_bytes = needs.gpu_reserved_bytes
    if reserved_bytes is None:
        allocated = format_spread(needs.gpu_bytes / GIB, prediction.memory_spread)
        return allocated if prediction.cluster.gpu.is_cpu else f"{allocated} allocated"
    return f"{needs.gpu_bytes / GIB:,.1f} GiB allocated / {reserved_bytes / GIB:,.1f} reserved"


def format_short_memory(prediction: Prediction) -> str:
    """Format the allocated and reserved memory of a GPU for a table."""
    needs = prediction.needs
    reserved_bytes = needs.gpu_reserved_bytes
    reserved = f"{reserved_bytes / GIB:,.0f}" if reserved_bytes else "?"
    return f"{needs.gpu_bytes / GIB:,.0f} / {reserved}"


def _calibration_lines(run: PredictedRun, calibration: Calibration) -> list[str]:
    """Return the lines on a calibration."""
    subject = "rates of a run with other settings"
    if calibration.matches_run(run):
        subject = f"step and memory, with {calibration.few.layers} and {calibration.more.layers} layers"
    rates, links = calibration.alone, ""
    if rates.gather:
        links = f", all-gather {_format_rate(rates.gather)}, reduce-scatter {_format_rate(rates.scatter)}"
    return [
        f"measured     on these hosts on {calibration.made}: {subject}",
        f"             a layer {rates.layer_s:.3f} s; GB/s: AdamW {_format_rate(rates.device_update)} of a rank, "
        f"{_format_rate(rates.host_update)} "
        f"in a host's memory, copies {_format_rate(rates.copies)}{links}, writing {_format_rate(rates.disk)}",
    ]


def _format_rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.3g}"


def _storage_lines(prediction: Prediction) -> list[str]:
    """Return the lines on loading, saving and disks."""
    run, needs = prediction.run, prediction.needs
    loading, saving = needs.loading, needs.saving
    reading = f"{_format_duration(loading.rank0_s)} if the first host reads and sends them"
    if run.hosts > 1:
        memory_note = f" (with {loading.host_bytes / GIB:,.0f} GiB more of its memory)"
        reading += f"{memory_note}, {_format_duration(loading.local_s)} if each host reads its own part"
    writing = f"{_format_duration(saving.write_s)} in the background, training waits {_format_duration(saving.waits_s)}"
    writing += _format_copies(prediction)
    if needs.pinned_bytes:
        reading += (
            f"; pinning {needs.pinned_bytes / GIB:,.0f} GiB of each host's memory: {_format_duration(needs.pinning_s)}"
        )
    return [
        f"loading      {needs.weights_bytes / GIB:,.0f} GiB of weights: {reading}",
        f"saving       {run.checkpoint_bytes / GIB:,.0f} GiB a checkpoint, {saving.n_bytes / GIB:,.0f} of each host: {writing}; "
        f"best every {_format_duration(saving.best_interval_s)}",
        f"disk         {needs.checkpoints_bytes / GIB:,.0f} GiB for {run.keep + 1} checkpoints; "
        f"read and written at {_format_rate(prediction.cluster.disk_bytes_per_s)} GB/s of each host (--disk)",
    ]


def _format_copies(prediction: Prediction) -> str:
    """Format what a save takes of a host's memory, and its limit."""
    saving, limit = prediction.needs.saving, prediction.run.staging_bytes
    staged_gib, wanted_gib = saving.staged_bytes / GIB, saving.wanted_bytes / GIB
    if not wanted_gib:
        return ""
    if staged_gib == wanted_gib:
        return f", up to {staged_gib:,.0f} GiB of host memory for copies"
    reason = f"{100 * STAGING_SHARE:.0f}% of what is free" if limit is None else "checkpoint.staging"
    return f", host memory has room for {staged_gib:,.0f} of the {wanted_gib:,.0f} GiB of copies ({reason})"


def _remedy_lines(prediction: Prediction) -> list[str]:
    """Return the lines on the changes that help most, and on a larger batch, as many as there is room for."""
    lines, batch_lines = list[str](), _batch_lines(prediction)
    for label, other in remedies(prediction)[:MAX_REMEDIES]:
        gain = (
            f"{round(100 * other.speedup_over(prediction)):+d}% a GPU, "
            if other.tokens_per_s and prediction.tokens_per_s
            else ""
        )
        is_same_ram = other.needs.host_bytes == prediction.needs.host_bytes
        ram = f", {other.needs.host_bytes / GIB:,.0f} a host" if other.needs.host_bytes and not is_same_ram else ""
        verdict = f", {short_fit_label(other)}" if other.fit is not Fit.YES else ""
        change = f"{gain}{format_short_memory(other)} GiB{ram}{verdict}"
        is_wide = len(f"{'try':12} {label}: {change}") > WIDTH
        remedy_lines = _wrap("" if lines else "try", f"{label.partition(' (')[0] if is_wide else label}: {change}")
        if lines and len(lines) + len(remedy_lines) + len(batch_lines) > MAX_REMEDY_LINES:
            break
        lines += remedy_lines
    return lines + batch_lines


def _batch_lines(prediction: Prediction) -> list[str]:
    """Return the lines on a larger batch; none where that gains nothing."""
    larger = with_larger_batch(prediction)
    if not larger or not larger.needs.step_s:
        return []
    step_s = larger.needs.step_s * prediction.step_tokens / larger.step_tokens
    flags = format_changes(prediction.run, larger.run).strip()
    gain = round(100 * larger.speedup_over(prediction))
    time = f"{step_s:,.1f} s per {prediction.step_tokens:,} tokens ({gain:+d}%)"
    return _wrap(f"batch {larger.run.global_batch:,}", f"{flags}: {time}")


def _format_parts(bytes_by_kind: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size / GIB:,.1f}" for name, size in bytes_by_kind.items() if size >= MIN_SHOWN_BYTES)


DURATION_UNITS = (
    (172_800, 86_400, "days"),
    (7_200, 3_600, "h"),
    (600, 60, "min"),
    (0, 1, "s"),
)  # from so many seconds on


def _format_duration(seconds: float, time_range: TimeRange | None = None) -> str:
    """Format a duration in the unit that suits it, with its range if there is one."""
    divisor, unit = next((divisor, unit) for least, divisor, unit in DURATION_UNITS if seconds >= least)
    return f"{format_range(seconds / divisor, time_range)} {unit}"


def format_expectation(prediction: Prediction) -> str:
    """Format what a starting run is expected to take, in one line."""
    needs = prediction.needs
    step = f"a step in {format_range(needs.step_s, prediction.time_range)} s, " if needs.step_s else ""
    device = "rank" if prediction.cluster.gpu.is_cpu else "GPU"
    calibration = prediction.calibration
    basis = (
        f"from measurements of {calibration.made}"
        if calibration
        else "checked for layers on one H200, not yet on several GPUs"
    )
    if prediction.evidence is Evidence.OTHER_GPU:
        basis = UNMEASURED
    memory_gib = prediction.cluster.gpu.memory_bytes / GIB
    perhaps = "" if prediction.knows_kept_bytes else "perhaps "
    slower = f"; {perhaps}slower, with allocator retries" if prediction.gpu_fit is Fit.RETRIES else ""
    return (
        f"expected: {step}{_format_gpu_memory(prediction)} of {memory_gib:,.1f} GiB of each {device}{slower}; {basis}"
    )


def _claim_lines(prediction: Prediction, options: ReportOptions) -> list[str]:
    """Return the line on a step time that somebody claims."""
    claimed_s, step_s = options.measured, prediction.needs.step_s
    if claimed_s and claimed_s < prediction.floor_s:
        floor = f"the model's FLOPs take {prediction.floor_s:.1f} s at the GPUs' peak"
        return [f"IMPOSSIBLE   a step of {claimed_s:g} s: {floor}; check sequence, batch and GPUs"]
    if not (claimed_s and step_s):
        return []
    low_s, high_s = prediction.time_range.bounds(step_s)
    verdict = "as predicted" if low_s <= claimed_s <= high_s else "not as predicted"
    share = f"{claimed_s / step_s:.2f} of {format_range(step_s, prediction.time_range)} s"
    return [f"compared     {claimed_s:g} s a step, {verdict}: {share}"]


def _time_lines(prediction: Prediction, options: ReportOptions, *, is_verbose: bool = False) -> list[str]:
    """Return the lines on a step, and on all tokens or a day."""
    needs, rate, lines = prediction.needs, prediction.tokens_per_s, _claim_lines(prediction, options)
    if not (needs.time and needs.step_s and rate):
        return [*lines, f"time         unknown: no measured times with {prediction.run.numerics}"]
    step = f"step         {format_range(needs.step_s, prediction.time_range)} s"
    speed = f"{rate:,.0f} tokens/s, {rate / prediction.run.world:,.0f} per GPU"
    mfu, hfu = (
        f", {name} {100 * x:.0f}%" if x else "" for name, x in (("MFU", prediction.mfu), ("HFU", prediction.hfu))
    )
    if is_verbose:
        lines += [
            f"{step}: {_format_split(needs.time)}; lower bound {prediction.floor_s:.1f}",
            *_compute_lines(needs.time),
            f"range        {_format_basis(prediction)}",
            f"rate         {speed}{mfu}{hfu}",
            *_goodput_lines(prediction, options),
        ]
    else:
        lines.append(f"{step}; {speed}{mfu}")
    return [*lines, *_total_lines(prediction, options)]


def _total_lines(prediction: Prediction, options: ReportOptions) -> list[str]:
    """Return the line on time and cost of all tokens, or on the cost of a day and a step."""
    if options.tokens:
        return [f"{options.tokens:,.0f} tokens: {_format_total(prediction, options)}"]
    price = options.price_of(prediction.cluster.gpu.name)
    if price is None:
        return []
    hourly = price * prediction.run.world
    step = format_range(hourly * (prediction.needs.step_s or 0.0) / 3600, prediction.time_range)
    return [f"cost         {hourly * 24:,.0f} a day, {step} a step, at {price:g} a GPU-hour"]


def _goodput_lines(prediction: Prediction, options: ReportOptions) -> list[str]:
    """Return the line on goodput."""
    goodput = prediction.goodput(options.tokens)
    if not goodput:
        return []
    failures_percent = 100 * (1 - goodput.saves_share - goodput.share)
    failures = f"failures, one in {_format_duration(goodput.mtbf_s)} (checkpoint.mtbf), {failures_percent:.1f}%"
    saves = f"saves, every {_format_duration(goodput.interval_s)} of training, take {100 * goodput.saves_share:.1f}%"
    if not goodput.saves_share:
        saves = "nothing is saved (checkpoint.every)"
    return [f"goodput      {100 * goodput.share:.1f}%: {saves}; {failures}"]


def _format_total(prediction: Prediction, options: ReportOptions) -> str:
    """Format how long all tokens take, and what that costs."""
    hours, time_range = prediction.hours(options.tokens), prediction.time_range
    if not hours:
        return "never: failures undo steps as fast as they are made"
    gpu_hours, price = hours * prediction.run.world, options.price_of(prediction.cluster.gpu.name)
    cost = f", {format_range(price * gpu_hours, time_range)} at {price:g}" if price is not None else ""
    return f"{_format_duration(3600 * hours, time_range)}, {gpu_hours:,.0f} GPU-hours{cost}"


def _format_split(time: StepTime) -> str:
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


def _compute_lines(time: StepTime) -> list[str]:
    """Return the line on the parts of a step's compute, if it is predicted."""
    parts = ", ".join(
        f"{name} {seconds:.1f}" for name, seconds in time.compute_parts_s.items() if seconds >= MIN_SHOWN_S
    )
    return [f"             compute: {parts}"] if parts else []


def _format_basis(prediction: Prediction) -> str:
    """Format the basis of the range of times."""
    time_range, evidence = prediction.time_range, prediction.evidence
    if evidence in MEASURED_BASIS:
        return MEASURED_BASIS[evidence]
    likely = "rough" if time_range.programs < MIN_PROGRAMS else "90% likely"
    return (
        f"{likely}: {time_range.runs} published runs of {time_range.programs} other programs {PROGRAMS_BASIS[evidence]} "
        f"took {time_range.shortest:.2f} to {time_range.longest:.2f} times as long as predicted"
    )


def format_spread(value: float, share: float) -> str:
    """Format a number with a symmetric range, a share of it."""
    return format_range(value, TimeRange(1 - share, 1 + share))


def format_range(value: float, time_range: TimeRange | None) -> str:
    """Format a number, and its range if that is known."""
    digits = 3
    if value >= 1:
        digits = 0 if value >= 100 else 1
    if not time_range:
        return f"{value:,.{digits}f}"
    low, high = time_range.bounds(value)
    return f"{value:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


SCHEMA_VERSION = 2  # of the record: raised when a field is renamed, removed, or means something else
FIELD_UNITS = {  # of fields, by their name or how it ends
    "_bytes": "bytes",
    "_s": "seconds",
    "tokens_per_s": "tokens per second, of all GPUs",
    "_bytes_per_s": "bytes per second, one direction",
    "_spread": "share of the value by which it may be too high or too low",
    "time_range": "lowest and highest likely time, as shares of it, and the published runs behind it",
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


def prediction_record(prediction: Prediction, options: ReportOptions) -> dict[str, object]:
    """Return a prediction and its inputs as a record for JSON."""
    needs, run, time_range = prediction.needs, prediction.run, prediction.time_range
    hours, goodput = prediction.hours(options.tokens) or None, prediction.goodput(options.tokens)
    gpu_hours, price = hours * run.world if hours else None, options.price_of(prediction.cluster.gpu.name)
    return {
        "inputs": _record_inputs(prediction, options),
        "fits": prediction.fit.name.lower(), "gpu_bytes": needs.gpu_bytes, "host_bytes": prediction.host_bytes,
        "gpu_reserved_bytes": needs.gpu_reserved_bytes, "gpu_reserved_by_pool_bytes": needs.reserved_by_pool,
        "gpu_held_bytes": needs.peak.bytes_by_kind, "peak_moment": needs.peak.moment, "host_held_bytes": prediction.host_bytes_by_kind,
        "loading": dataclasses.asdict(needs.loading), "saving": dataclasses.asdict(needs.saving),
        "pinned_bytes": needs.pinned_bytes, "pinning_s": needs.pinning_s,
        "memory_spread": prediction.memory_spread, "time_range": dataclasses.asdict(time_range),
        "evidence": prediction.evidence, "calibrated": bool(prediction.calibration),
        "time": dataclasses.asdict(needs.time) | {"step_s": needs.step_s} if needs.time else None,
        "floor_s": prediction.floor_s, "tokens_per_s": prediction.tokens_per_s, "mfu": prediction.mfu, "hfu": prediction.hfu,
        "goodput": dataclasses.asdict(goodput) if goodput else None,
        "hours": hours, "gpu_hours": gpu_hours, "cost": gpu_hours * price if gpu_hours and price is not None else None,
        "cost_per_day": 24 * run.world * price if price is not None else None, "checkpoint_bytes": run.checkpoint_bytes,
        "settings": {"offload": run.offload, "moments": run.moments, "fsdp_unit": run.fsdp_unit, "fsdp_embedding": run.fsdp_embedding,
                     "micro_batch_size": run.micro_batch,
                     "strategy": run.apply_to(Config()).parallel.strategy, "loss": run.loss,
                     "activation_checkpointing": str(run.recompute), "activations": run.activations},
        "mesh": dataclasses.asdict(run.axes),
    }  # fmt: skip


def _record_inputs(prediction: Prediction, options: ReportOptions) -> Mapping[str, object]:
    """Return the inputs of a prediction: machines, model, and the settings that matter."""
    run, cluster = prediction.run, prediction.cluster
    return {
        "nodes": run.hosts, "slots": run.ranks_per_host, "gpu": cluster.gpu.name,
        "gpu_memory_bytes": cluster.gpu.memory_bytes, "ram_bytes": prediction.ram_bytes or None,
        "nic_bytes_per_s": cluster.nic_bytes_per_s, "disk_bytes_per_s": cluster.disk_bytes_per_s,
        "parameters": run.llama.parameters, "layers": run.llama.layers, "numerics": run.numerics, "overlap": run.overlap,
        "adapter": adapter_label(run.adapter),
        "seq_len": run.seq_len, "global_batch_size": prediction.run.global_batch, "attention": run.attention, "packing": run.packing,
        "keep": run.keep, "every": run.every, "mtbf_s": run.mtbf_s, "staging_bytes": run.staging_bytes,
        "tokens": options.tokens or None, "price": options.price_of(prediction.cluster.gpu.name),
        "measured_s": options.measured or None,
    }  # fmt: skip


MAX_SHOWN = 8  # of a search, and as many of what has run on one GPU at most


def ranking_lines(predictions: Sequence[Prediction]) -> list[str]:
    """Format the best results of a search as a table."""
    lines = ["", "  offload    moments  unit      micro-batch    GPU GiB  RAM GiB   step s  tokens/s"]
    tested = [candidate for candidate in predictions if not untested_features(candidate.run)]
    untested = [candidate for candidate in predictions if untested_features(candidate.run)]
    shown = [*tested[:MAX_SHOWN], *untested[:MAX_SHOWN]]
    for candidate in sorted(shown, key=predictions.index):
        moments = "bf16" if candidate.run.numerics in BF16_NUMERICS else candidate.run.moments
        time = (
            f"{candidate.needs.step_s:8.1f} {candidate.tokens_per_s:9,.0f}"
            if candidate.needs.step_s
            else "        -         -"
        )
        lines.append(
            f"  {candidate.run.offload:9}  {moments:7}  {candidate.run.fsdp_unit:8}  {candidate.run.micro_batch:11}  "
            f"{format_short_memory(candidate):>9}  {candidate.host_bytes / GIB:7,.0f} {time}  {fit_label(candidate)}"
            + fmt_if(", with {}", untested_features(candidate.run))
        )
    ties = _tie_lines(tested[:MAX_SHOWN]) if predictions[0] in tested and predictions[0].fit is not Fit.NO else []
    return [*lines, *ties, *_fastest_lines(predictions[0], untested)]


def _fastest_lines(first: Prediction, untested: Sequence[Prediction]) -> list[str]:
    """Return a line on whether something tested on one GPU at most is faster than the first."""
    if not untested:
        return []
    if features := untested_features(first.run):
        return [f"  the first needs {features}, tested on one GPU at most ({DOCS}/proof.md)"]
    fastest = max(untested, key=lambda candidate: candidate.tokens_per_s or 0.0)
    gain = (fastest.tokens_per_s or 0.0) / (first.tokens_per_s or math.inf) - 1
    if gain <= NEAR_SHARE:
        return ["  nothing tested on one GPU at most is predicted to be faster"]
    return [
        f"  fastest is {untested_features(fastest.run)}, by {100 * gain:.0f}%; "
        f"tested on one GPU at most so far ({DOCS}/proof.md), so it ranks lower"
    ]


def _tie_lines(predictions: Sequence[Prediction]) -> list[str]:
    """Return a line on why the first of a search is first, if others are about as fast."""
    same_fit = [candidate for candidate in predictions if candidate.fit is predictions[0].fit]
    fastest = max((candidate.tokens_per_s or 0.0 for candidate in same_fit), default=0.0)
    n_ties = sum(is_near_fastest(candidate, fastest) for candidate in same_fit)
    if n_ties < 2:
        return []
    return [
        f"  the first {n_ties} are within {100 * NEAR_SHARE:.1f}% of the fastest, too close for a prediction to tell apart: "
        "most memory to spare "
        f"is first ({100 * predictions[0].spare_share:.0f}%), moments in FP32 before BF16"
    ]


def comparison_lines(predictions: Mapping[str, Prediction], options: ReportOptions) -> list[str]:
    """Format predictions next to the first one, for so many tokens or a billion."""
    tokens = options.tokens or 1e9
    titles = ("what if", "batch", "GPU GiB", "RAM GiB", "step s", "tokens/s", "", "days", "GPU-hours", "cost")
    base_rate = next((prediction.tokens_per_s for prediction in predictions.values() if prediction.tokens_per_s), None)
    rows = [titles[: 9 + bool(options.prices)]]
    for name, prediction in predictions.items():
        ram = format_spread(prediction.host_bytes / GIB, MEMORY_SPREAD) if prediction.host_bytes else "-"
        rows.append(
            (
                name,
                f"{prediction.run.global_batch:,}",
                format_short_memory(prediction),
                ram,
                *_speed_cells(prediction, base_rate),
                *_cost_cells(prediction, tokens, options),
            )
        )
    cells = [f"  {line}" for line in format_columns(rows[0], rows[1:]).splitlines()]
    width = max(map(len, cells))
    verdicts = ["", *map(fit_label, predictions.values())]
    lines = [f"{line:{width}}  {verdict}".rstrip() for line, verdict in zip(cells, verdicts, strict=True)]
    planned = next(iter(predictions.values()))
    changes = [line for name, prediction in predictions.items() for line in _describe_change(name, prediction, planned)]
    totals = "days, GPU-hours and cost" if options.prices else "days and GPU-hours"
    return ["", *lines, *changes, f"  {totals} are for {tokens:,.0f} tokens, with saves and failures"]


def _describe_change(name: str, prediction: Prediction, planned: Prediction) -> list[str]:
    """Describe other settings than planned: a GPU's own, and the global batch."""
    run, lines = prediction.run, []
    if prediction.cluster.gpu.name != planned.cluster.gpu.name:
        lines.append(f"  {name}: {run.hosts} x {run.ranks_per_host}, {_format_settings(run)}")
    if prediction.evidence is Evidence.OTHER_GPU:
        lines.append(f"  {name}: {UNMEASURED}")
    if run.global_batch != planned.run.global_batch:
        division = f"micro-batches of {run.micro_batch} on its {run.dp:,} ranks"
        batch = f"--training.global_batch_size {run.global_batch}"
        lines.append(f"  {name}: {batch}, as {planned.run.global_batch} sequences do not divide into {division}")
    return lines


def _speed_cells(prediction: Prediction, base_rate: float | None) -> tuple[str, str, str]:
    """Return the cells of step time, tokens/s and the change in tokens/s."""
    if not (prediction.needs.step_s and prediction.tokens_per_s):
        return "-", "-", ""
    change = f"{100 * (prediction.tokens_per_s / base_rate - 1):+.0f}%" if base_rate else ""
    return format_range(prediction.needs.step_s, prediction.time_range), f"{prediction.tokens_per_s:,.0f}", change


def _cost_cells(prediction: Prediction, tokens: float, options: ReportOptions) -> tuple[str, ...]:
    """Return the cells of days, GPU-hours, and cost if there are prices."""
    hours, time_range = prediction.hours(tokens), prediction.time_range
    price = options.price_of(prediction.cluster.gpu.name)
    gpu_hours = hours * prediction.run.world if hours else 0.0
    days = format_range(hours / 24, time_range) if hours else "-"
    cost = format_range(price * gpu_hours, time_range) if price is not None and hours else "-"
    return (days, f"{gpu_hours:,.0f}" if hours else "-", *([cost] if options.prices else []))


MAX_OFFERS = 3  # of a kind of GPU
TIMINGS = {Timing.IN_TIME: "in time", Timing.LIKELY: "likely", Timing.LATE: "late"}


def offer_lines(offers: Mapping[str, Sequence[Offer]], *, has_deadline: bool, are_fewest: bool) -> list[str]:
    """Format kinds of GPUs on numbers of hosts as a table, the cheapest that is in time first.

    ``are_fewest``: the first of each kind is on the fewest hosts that fit, which is said, and from where on more bring little.
    """
    shown = [
        offer for of_kind in offers.values() for offer in sorted(of_kind, key=lambda offer: offer.rank)[:MAX_OFFERS]
    ]
    rows: list[tuple[str, ...]] = [
        ("GPUs", "", "deadline" * has_deadline, "time", _expense_title(shown), "batch", "free", "settings")
    ]
    rows += [
        (
            offer.prediction.cluster.gpu.name,
            _format_hosts(offer),
            TIMINGS[offer.timing] * has_deadline,
            *_offer_cells(offer),
        )
        for offer in sorted(shown, key=lambda offer: offer.rank)
    ]
    lines = format_columns(rows[0], rows[1:]).splitlines()
    for kind, of_kind in offers.items():
        first, limit = of_kind[0].prediction, worthwhile_hosts(of_kind)
        if first.fit is not Fit.YES:
            words = f"{fit_label(first)} on {pluralize(first.run.hosts, 'host')}: {_format_margin(first)}"
        elif are_fewest:
            slower = (
                f"; from {limit} on, twice as many are less than {WORTHWHILE_SPEEDUP:g} times as fast" if limit else ""
            )
            words = f"fits from {pluralize(first.run.hosts, 'host')} on{slower}"
        else:
            continue
        lines.append(f"{kind:9}  {words}")
    return lines


def _expense_title(offers: Iterable[Offer]) -> str:
    return "GPU-hours" if any(offer.price is None for offer in offers) else "cost"


def _format_hosts(offer: Offer) -> str:
    return f"{offer.prediction.run.hosts} x {offer.prediction.run.ranks_per_host}"


def _offer_cells(offer: Offer) -> tuple[str, ...]:
    """Return the cells of time, cost, batch, free memory and settings."""
    prediction = offer.prediction
    expense = offer.gpu_hours if offer.price is None else offer.cost
    fits = prediction.fit is not Fit.NO
    time = _format_duration(3600 * offer.hours, prediction.time_range) if offer.hours and fits else "-"
    cost = format_range(expense, None) if expense is not None and fits else "-"
    free = f"{100 * prediction.spare_share:.0f}%" if prediction.fit is Fit.YES else short_fit_label(prediction)
    return time, cost, f"{prediction.run.global_batch:,}", free, _format_settings(prediction.run)


def _format_settings(run: PredictedRun) -> str:
    """Format the settings that were chosen for a run."""
    recompute = "" if run.recompute == FULL_RECOMPUTE else str(run.recompute).replace("none", "no checkpointing")
    parts = [
        split_label(run), f"offload {run.offload}" if run.offload != "none" else "no offload",
        recompute, "sublayer units" * (run.fsdp_unit != "layer"),
        f"micro {run.micro_batch}" if run.micro_batch > 1 else "",
    ]  # fmt: skip
    return ", ".join(filter(None, parts))


def method_lines(rows: Mapping[str, tuple[int, Offer, str]]) -> list[str]:
    """Format methods of training beside each other: the fewest hosts that fit, and time and cost on the same hosts."""
    offers = [offer for _, offer, _ in rows.values()]
    on = f"on {_format_hosts(offers[0])} {offers[0].prediction.cluster.gpu.name}"
    table = []
    for name, (fewest, offer, lost) in rows.items():
        time, cost, _, fits, _ = _offer_cells(offer)
        table.append((name, pluralize(fewest, "host") if fewest <= MAX_HOSTS else "-", time, cost, fits, lost))
    titles = ("method", "fits from", on, _expense_title(offers), "free", "what is lost")
    return format_columns(titles, table).splitlines()
