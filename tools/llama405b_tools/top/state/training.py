"""What is known of the training itself, for the picture: steps, rates, network, what is at risk. Pure."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from llama405b.contract.accounting import Account
from llama405b_tools.machine import gpus
from llama405b_tools.top.state import steps
from llama405b_tools.top.state.frames import RunFrame, StepMetrics
from llama405b_tools.top.state.hostview import HostView
from llama405b_tools.top.state.moment import Moment
from llama405b_tools.top.state.picture import GuardShown, RunPhase, TrainingStatus, known
from llama405b_tools.top.state.run_notes import MOVING, stall
from llama405b_tools.top.state.verdicts import Note


class LoadBegan(NamedTuple):
    """When loading (or tokenizing) this many bytes was first seen, and how far along it was."""

    time: float
    done_bytes: float
    total_bytes: int

    def eta_s(self, now: float, done: int, total: int) -> float | None:
        """Return the seconds until all is done, at the rate so far."""
        if done <= self.done_bytes:
            return None
        return (total - done) * (now - self.time) / (done - self.done_bytes)


NOT_LOADING = LoadBegan(0.0, math.inf, 0)


def training(
    found: Moment, notes: Sequence[Note], guard: GuardShown, load: LoadBegan, account: Account | None
) -> TrainingStatus | None:
    """Describe the shown run, of which ``notes`` stand out; None if no host knows it."""
    runs = found.told.values()
    if not runs:
        return None
    phase, phase_s = found.phase
    shown = TrainingStatus(
        run=found.run,
        phase=phase,
        phase_s=phase_s,
        usual_phase_s=found.stay.usual_s if found.stay else None,
        world=sum(ranks for _, _, ranks in found.nodes),
        attempt=max(run.attempt for run in runs),
        steps=_steps(found),
        checkpoint_step=max(known(run.checkpoint_step for run in found.heard.values() or runs), default=None),
        copied_step=min(known(run.copied_step for run in found.heard.values() or runs), default=None),
        network=_network(found),
        expected_step_s=found.planned_s,
        mesh=next((plan.mesh for host in found.hosts.values() if (plan := host.plans.get(found.run))), None),
        guard=guard,
        others=tuple(found.others),
        goodput_pct=None if account is None or account.goodput is None else 100 * account.goodput,
        age_s=max(known(map(_age_s, found.ours)), default=None),
        is_stale=_is_stale(found),
        odd_in=tuple(field for note in notes for field in note.fields),
    )
    if found.metrics:
        shown = _stepping(shown, found, found.metrics[-1])
    done, total = found.loaded
    if phase is not RunPhase.LOADING or not total:
        return shown
    return dataclasses.replace(shown, done_bytes=done, total_bytes=total, eta_s=load.eta_s(found.now, done, total))


def _steps(found: Moment) -> int | None:
    """Return the number of steps in total; None if it is unknown, or smaller than the steps so far."""
    told = (run.max_steps for run in found.told.values() if run.max_steps is not None or run.metrics)
    so_far = max((metrics.step for metrics in found.metrics), default=1)
    return next((steps for steps in told if steps and steps >= so_far), None)


def _stepping(shown: TrainingStatus, found: Moment, last: StepMetrics) -> TrainingStatus:
    """Add what its steps tell."""
    phase = shown.phase
    step_s = found.median("step_s")
    tokens_per_s = None
    eta_s = None
    saved = shown.checkpoint_step or 0
    evaluated = next((each for each in reversed(found.metrics) if each.evaluation_loss is not None), None)
    if evaluated:
        shown = dataclasses.replace(shown, evaluation_loss=evaluated.evaluation_loss, evaluated_step=evaluated.step)
    if last.step_s is None:  # no step was taken, and none is at risk
        return dataclasses.replace(shown, step=last.step)
    step = last.step
    if shown.is_stale:  # what the other hosts' ranks say is newer
        beats = [beat.step for each in found.beats.values() for beat, _ in each]
        step = max(step, min(beats, default=0))
    if phase in MOVING and not shown.is_stale:
        tokens_per_s = found.median("tokens_per_s")
        if shown.steps and step_s:
            eta_s = (shown.steps - step) * step_s
    if phase is RunPhase.DONE and shown.steps and last.step < shown.steps:
        phase = RunPhase.STOPPED
    return dataclasses.replace(
        shown,
        phase=phase,
        step=step,
        loss=last.loss,
        losses=tuple(known(metrics.loss for metrics in found.metrics)),
        step_s=step_s,
        data_s=found.median("data_s"),
        forward_s=found.median("forward_s"),
        backward_s=found.median("backward_s"),
        optimizer_s=found.median("optimizer_s"),
        update_s=found.median("update_s"),
        exposed_s=found.median("exposed_s"),
        update_bytes=found.median("update_bytes"),
        down_bytes=found.median("down_bytes"),
        up_bytes=found.median("up_bytes"),
        tokens_per_s=tokens_per_s,
        mfu_pct=_mfu_pct(found, tokens_per_s, last.flops_per_token, shown.world),
        eta_s=eta_s,
        lost_steps=max(0, step - saved),
        lost_rank_hours=steps.seconds_between(found.metrics, saved, step) * shown.world / 3600,
    )


def _is_stale(found: Moment) -> bool:
    """Whether a live run's steps are no longer as they were: none came for long, or the host that tells them is not heard."""
    if found.phase[0] not in (*MOVING, RunPhase.HUNG):
        return False
    return found.hang is not None or any(stall(found)) or found.head is None


def _mfu_pct(found: Moment, tokens_per_s: float | None, flops_per_token: float | None, world: int) -> float | None:
    """Model FLOPs utilization: the model's FLOPs over the peak of the GPUs, if they are all the same model."""
    peaks = {gpus.bf16_flops(gpu.name) for host in found.ours for gpu in host.gpus}
    peak = peaks.pop() if len(peaks) == 1 else None
    if not (tokens_per_s and flops_per_token and peak and world):
        return None
    share = tokens_per_s * flops_per_token / (peak * world)
    return 100 * share if share <= 1 else None


def _age_s(host: HostView) -> float | None:
    """Return how long ago a host first ran the run, by the host's clock."""
    run = host.frame.run
    return max(0.0, host.frame.now - run.run_created) if run and run.run_created is not None else None


def _plans(found: Moment) -> Iterator[RunFrame]:
    return (plan for host in found.ours if (plan := host.plans.get(found.run)))


def _network(found: Moment) -> str:
    """Return what the training's collectives use: "IB 8x400", "SOCKET"; "" if unknown."""
    said = {run.net for run in found.heard.values()} - {""}
    if "SOCKET" in said:
        return "SOCKET"
    named = next((plan.nccl for plan in _plans(found)), {}).get("NCCL_IB_HCA", "")
    if said or named:
        return min(said, default="IB") + _ports(found.ours[0], named)
    if found.ours and all(not host.gpus and host.frame.pci_gpus is not None for host in found.ours):
        return "gloo"
    return ""


def _ports(host: HostView, named: str) -> str:
    """Return how many active ports a host has, and their Gb/s; only the named ports, if any are named."""
    ports = [port for port in host.frame.ib if "ACTIVE" in port.state and port.rate.strip()]
    rates = [port.rate.split()[0] for port in ports if not named or port.device in named]
    return f" {len(rates)}x{rates[0]}" if rates else ""
