"""The panel of the run: its step, its rates and when it will be done, of what is known at a moment. Pure."""

from typing import NamedTuple

from llama405b_tools.top.state.machines import mfu_pct, network
from llama405b_tools.top.state.moment import Moment
from llama405b_tools.top.state.picture import GuardShown, RunPhase, Training

MOVING = (RunPhase.TRAIN, RunPhase.CKPT, RunPhase.EVAL)


class LoadBegan(NamedTuple):
    """When loading was first seen, and how far it was then."""

    time: float
    done_bytes: int


def training(found: Moment, guard: GuardShown, load: LoadBegan | None) -> Training | None:
    """The run that is shown; None where no host knows it."""
    if not (runs := found.told.values()):
        return None
    phase, phase_s = found.phase
    head = next((run for run in runs if run.max_steps is not None or run.metrics), None)
    saved = next((run.checkpoint_step for run in runs if run.checkpoint_step is not None), None)
    world = sum(ranks for _, _, ranks in found.nodes)
    last = found.metrics[-1] if found.metrics else None
    step, steps = last.step if last else None, (head.max_steps or None) if head else None
    if phase is RunPhase.DONE and step is not None and steps and step < steps:
        phase = RunPhase.STOPPED
    step_s, eta_s = found.median("step_s"), None
    tokens_per_s = found.median("tokens_per_s") if phase in MOVING else None
    if phase in MOVING and steps and step is not None and step_s:
        eta_s = (steps - step) * step_s
    done_bytes = total_bytes = None
    if phase is RunPhase.LOADING and found.loaded[1]:
        done_bytes, total_bytes = found.loaded
        eta_s = _load_eta_s(found, load)
    lost = None if step is None else max(0, step - (saved or 0))
    ours = [found.hosts[name] for name in found.heard]
    others = {name for run in found.heard.values() for name in run.others} - {found.run}
    return Training(
        run=found.run,
        phase=phase,
        phase_s=phase_s,
        world=world,
        attempt=max(run.attempt for run in runs),
        step=step,
        steps=steps,
        loss=last.loss if last else None,
        losses=tuple(metrics.loss for metrics in found.metrics),
        step_s=step_s,
        data_s=found.median("data_s"),
        forward_s=found.median("forward_s"),
        backward_s=found.median("backward_s"),
        optimizer_s=found.median("optimizer_s"),
        tokens_per_s=tokens_per_s,
        mfu_pct=mfu_pct(tokens_per_s, last.flops_per_token if last else None, ours, world),
        eta_s=eta_s,
        done_bytes=done_bytes,
        total_bytes=total_bytes,
        checkpoint_step=saved,
        lost_steps=lost,
        lost_rank_hours=lost * step_s * world / 3600 if lost is not None and step_s else None,
        network=network(ours, found.run),
        guard=guard,
        others=tuple(sorted(others)),
    )


def _load_eta_s(found: Moment, load: LoadBegan | None) -> float | None:
    """Seconds until all ranks have their weights, at the rate so far."""
    done, total = found.loaded
    if load is None or done <= load.done_bytes:
        return None
    return (total - done) * (found.now - load.time) / (done - load.done_bytes)
