"""The panel of the run: its step, its rates and when it will be done, of what is known at a moment. Pure."""

import dataclasses
import math
from typing import NamedTuple

from llama405b_tools.machine import gpus
from llama405b_tools.top.state.frames import StepMetrics
from llama405b_tools.top.state.hostview import HostView
from llama405b_tools.top.state.moment import Moment
from llama405b_tools.top.state.picture import GuardShown, RunPhase, Training, known

MOVING = (RunPhase.TRAIN, RunPhase.CKPT, RunPhase.EVAL)


class LoadBegan(NamedTuple):
    """When loading was first seen, and how far it was then."""

    time: float
    done_bytes: float

    def eta_s(self, now: float, done: int, total: int) -> float | None:
        """Seconds until all ranks have their weights, at the rate so far."""
        if done <= self.done_bytes:
            return None
        return (total - done) * (now - self.time) / (done - self.done_bytes)


NOT_LOADING = LoadBegan(0.0, math.inf)


def training(found: Moment, guard: GuardShown, load: LoadBegan) -> Training | None:
    """The run that is shown; None where no host knows it."""
    runs = found.told.values()
    if not runs:
        return None
    phase, phase_s = found.phase
    shown = Training(
        run=found.run,
        phase=phase,
        phase_s=phase_s,
        world=found.world,
        attempt=max(run.attempt for run in runs),
        steps=next((run.max_steps for run in runs if run.is_head), None) or None,
        checkpoint_step=next(iter(known(run.checkpoint_step for run in runs)), None),
        network=_network(found),
        guard=guard,
        others=found.others,
    )
    if found.metrics:
        shown = _stepping(shown, found, found.metrics[-1])
    done, total = found.loaded
    if phase is not RunPhase.LOADING or not total:
        return shown
    return dataclasses.replace(shown, done_bytes=done, total_bytes=total, eta_s=load.eta_s(found.now, done, total))


def _stepping(shown: Training, found: Moment, last: StepMetrics) -> Training:
    """With what its steps tell."""
    phase, step_s, tokens_per_s, eta_s = shown.phase, found.median("step_s"), None, None
    lost, lost_rank_hours = max(0, last.step - (shown.checkpoint_step or 0)), None
    if step_s:
        lost_rank_hours = lost * step_s * shown.world / 3600
    if phase in MOVING:
        tokens_per_s = found.median("tokens_per_s")
        if shown.steps and step_s:
            eta_s = (shown.steps - last.step) * step_s
    if phase is RunPhase.DONE and shown.steps and last.step < shown.steps:
        phase = RunPhase.STOPPED
    return dataclasses.replace(
        shown,
        phase=phase,
        step=last.step,
        loss=last.loss,
        losses=tuple(metrics.loss for metrics in found.metrics),
        step_s=step_s,
        data_s=found.median("data_s"),
        forward_s=found.median("forward_s"),
        backward_s=found.median("backward_s"),
        optimizer_s=found.median("optimizer_s"),
        tokens_per_s=tokens_per_s,
        mfu_pct=_mfu_pct(found, tokens_per_s, last.flops_per_token, shown.world),
        eta_s=eta_s,
        lost_steps=lost,
        lost_rank_hours=lost_rank_hours,
    )


def _mfu_pct(found: Moment, tokens_per_s: float | None, flops_per_token: float | None, world: int) -> float | None:
    """Model FLOPs utilization: those of the model over the most that the GPUs could do, all of one kind."""
    peaks = {gpus.bf16_flops(gpu.name) for host in found.ours for gpu in host.gpus}
    if len(peaks) != 1 or not (tokens_per_s and flops_per_token and world):
        return None
    [peak] = peaks
    return 100 * tokens_per_s * flops_per_token / (peak * world) if peak else None


def _network(found: Moment) -> str:
    """What the training's collectives use: "IB 8x400", "SOCKET"; "" where it is not known."""
    said = {run.net for run in found.heard.values()} - {""}
    if "SOCKET" in said:
        return "SOCKET"
    told = (plan.nccl for host in found.ours if (plan := host.plans.get(found.run)))
    named = next(told, {}).get("NCCL_IB_HCA", "")
    if said or named:
        return min(said, default="IB") + _ports(found.ours[0], named)
    if found.ours and all(host.is_without_gpus for host in found.ours):
        return "gloo"
    return ""


def _ports(host: HostView, named: str) -> str:
    """How many active ports a host has, and their Gb/s; of those that are named, where any is."""
    ports = [port for port in host.frame.ib if port.is_active and port.rate.strip()]
    rates = [port.rate.split()[0] for port in ports if not named or port.device in named]
    return f" {len(rates)}x{rates[0]}" if rates else ""
