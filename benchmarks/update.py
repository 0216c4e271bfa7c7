"""The optimizer on the CPU: how near its update is to the memory's speed, and how much of it a forward hides.

``optimizer``: our fused AdamW update, in bytes per second, against a triad (``a += s * b``, STREAM's, in place) on the
same threads. In place, because a cache reads a line before it writes it: both then move what they count.

``overlap``: the real schedule (worker, hooks, FSDP2) with a stand-in for the device: each unit's forward, backward and
update take a fixed time, and no core. The baseline is what the same forward and backward take without an update, measured in
the same run: a step can take no less than the backward, the norm, and the longer of forward and update.
"""

import dataclasses
import itertools
import json
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from benchmarks.pairs import in_turns, ratio_of
from llama405b.contract.errors import UserError, pluralize, reason_of
from llama405b.distributed import ranks
from llama405b.optim.offload import HostUpdater, UnitState, UpdateParams
from llama405b.optim.optimizer import build_optimizer, update_group
from llama405b.optim.updater import State
from llama405b.settings.schema import Optimizer

UPDATE_BYTES, TRIAD_BYTES = 28, 12  # per FP32 element: four read and three written; two read and one written
WIDTH = 16  # of the stand-in's layers
UNITS = 24


def bench_optimizer(elements: int, pairs: int) -> tuple[dict[str, Any], str]:
    """Update tensors of ``elements`` elements in all, in turns with the triad."""
    parts = [torch.randn(elements // 8) for _ in range(8)]
    moments = [torch.zeros_like(part) for part in parts for _ in range(2)]
    parameters = [nn.Parameter(part) for part in parts]
    states: list[State] = [
        {"step": torch.zeros(()), "exp_avg": moments[2 * i], "exp_avg_sq": moments[2 * i + 1]}
        for i in range(len(parts))
    ]
    gradients = [torch.randn_like(part) for part in parts]
    settings = {"lr": 1e-5, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-8}
    a, b = torch.randn(elements), torch.randn(elements)

    def update() -> None:
        with torch.no_grad():
            update_group(parameters, states, gradients, settings)

    def triad() -> None:
        a.add_(b, alpha=1e-9)

    ours, baseline = in_turns(update, triad, pairs)
    speeds = [[elements * size / s for s in series] for size, series in ((UPDATE_BYTES, ours), (TRIAD_BYTES, baseline))]
    ratio = ratio_of(*speeds)
    report = {
        "elements": elements,
        "threads": torch.get_num_threads(),
        "update_bytes_per_s": statistics.median(speeds[0]),
        "triad_bytes_per_s": statistics.median(speeds[1]),
        "ratio": dataclasses.asdict(ratio),
        "torch": torch.__version__,
    }
    rates = f"update {statistics.median(speeds[0]) / 1e9:.1f} GB/s, triad {statistics.median(speeds[1]) / 1e9:.1f} GB/s"
    return report, f"{rates} on {pluralize(torch.get_num_threads(), 'thread')}; update / triad {ratio}"


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """What the stand-in's units take, in seconds."""

    forward: float
    backward: float
    update: float


@dataclasses.dataclass(frozen=True, slots=True)
class Steps:
    """What a step took in the median, in seconds."""

    forward: float
    backward: float
    norm: float
    whole: float
    waited: float  # for updates, with the norm


@dataclasses.dataclass(slots=True)
class Trace:
    """Spans by thread, in the form that chrome://tracing and Perfetto read."""

    began: float = dataclasses.field(default_factory=time.perf_counter)
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def span(self, name: str, unit: int, seconds: float) -> None:
        """Take that long, and record it."""
        start = time.perf_counter()
        time.sleep(seconds)
        us = [1e6 * (at - self.began) for at in (start, time.perf_counter())]
        thread = threading.get_native_id()
        self.events.append(
            {"name": f"{name} {unit}", "cat": name, "ph": "X", "ts": us[0], "dur": us[1] - us[0], "pid": 0, "tid": thread,
             "args": {"unit": unit}}
        )  # fmt: skip


class _Device(torch.autograd.Function):
    """Takes a unit's time in the forward and in the backward."""

    @staticmethod
    def forward(context: Any, x: Tensor, unit: "_Unit") -> Tensor:
        context.unit = unit
        unit.trace.span("forward", unit.number, unit.case.forward)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        unit = context.unit
        unit.trace.span("backward", unit.number, unit.case.backward)
        return gradient, None


class _Unit(nn.Linear):
    def __init__(self, number: int, case: Case, trace: Trace) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.number = number
        self.case = case
        self.trace = trace

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Device.apply(super().forward(x), self)
        return out


def stand_in_model(case: Case, trace: Trace) -> nn.Sequential:
    """Return ``UNITS`` units that FSDP2 has sharded, and whose device is a stand-in."""
    model = nn.Sequential(*(_Unit(i, case, trace) for i in range(UNITS)))
    for unit in model:
        fully_shard(unit, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return model


def measure_overlap(case: Case, steps: int) -> tuple[Steps, Trace]:
    """Take steps of ``UNITS`` units; returns how long they took, and what ran when."""
    trace = Trace()
    model = stand_in_model(case, trace)
    updater = HostUpdater(model, model, build_optimizer(model, Optimizer()), torch.device("cpu"), lambda _: None)
    update, numbers = updater._update_unit, {part.name: i for i, part in enumerate(updater.unit_states)}

    def stand_in(part: UnitState, sums: Sequence[Sequence[Tensor]], step: UpdateParams) -> None:
        trace.span("update", numbers[part.name], case.update)
        update(part, sums, step)

    updater._update_unit = stand_in
    x, rows = torch.randn(2, WIDTH), []
    for _ in range(1 + steps):
        marks = [time.perf_counter()]
        loss = model(x).sum()
        marks.append(time.perf_counter())
        loss.backward()
        updater.accumulate()
        marks.append(time.perf_counter())
        updater.clip(1.0)
        marks.append(time.perf_counter())
        updater.update()
        laps = [end - begin for begin, end in itertools.pairwise(marks)]
        rows.append((*laps, time.perf_counter() - marks[0], updater.work().exposed_s))
    updater.wait()
    return Steps(*map(statistics.median, zip(*rows[1:], strict=True))), trace


def bench_overlap(unit_s: float, steps: int, trace_file: Path | None) -> tuple[dict[str, Any], str]:
    """Compare steps with the longer of forward and update, plus the backward; write the last case's trace."""
    if trace_file:
        _write(trace_file, "")  # or it would be found out only after the measurement
    lines, results = ["backward  update    step / bound   waited for / bound"], []
    ranks.join_process_group("cpu", 60)
    try:
        for backward in (2.0, 3.0):
            bare, _ = measure_overlap(Case(unit_s, backward * unit_s, 0.0), steps)
            for update in (0.5, 1.0, 1.5, 2.0):
                case = Case(unit_s, backward * unit_s, update * unit_s)
                taken, trace = measure_overlap(case, steps)
                found = judge_overlap(case, bare, taken)
                results.append(found | {"backward": backward, "update": update})
                lines.append(
                    f"{backward:.0f} x       {update:.1f} x     {found['step_ratio']:.3f}          {found['waited_ratio']:.3f}"
                )
    finally:
        dist.destroy_process_group()
    if trace_file:
        _write(trace_file, json.dumps({"traceEvents": trace.events}))
        lines.append(f"trace of the last case: {trace_file}")
    report = {"units": UNITS, "unit_s": unit_s, "steps": steps, "cases": results, "torch": torch.__version__}
    return report, "\n".join(lines)


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--trace: {file} cannot be written ({reason_of(error)}); name another file") from None


def judge_overlap(case: Case, bare: Steps, taken: Steps) -> dict[str, float]:
    """Compare with what is to be had, by the same steps without an update.

    The updates of the first two units have nothing to hide under; 2 % of a step are for waking threads.
    """
    update = UNITS * case.update
    best = bare.backward + taken.norm + max(bare.forward, update)
    least = max(0.0, update - bare.forward) + 2 * case.update + taken.norm + 0.02 * best
    return {
        "step_s": taken.whole,
        "step_ratio": taken.whole / best,
        "waited_s": taken.waited,
        "waited_ratio": taken.waited / least,
    }
