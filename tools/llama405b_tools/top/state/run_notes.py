"""What stands out about the run as a whole at a moment. Pure."""

import itertools
import statistics
from collections.abc import Iterator, Sequence

from llama405b.contract.causes import Cause, CauseKind
from llama405b.contract.records import Phase
from llama405b_tools.run.judge import Failure, between_steps, in_phase
from llama405b_tools.text.clean import clean
from llama405b_tools.top.state import steps
from llama405b_tools.top.state.levels import Fall
from llama405b_tools.top.state.moment import Moment
from llama405b_tools.top.state.pace import slow_note
from llama405b_tools.top.state.picture import RunPhase, known
from llama405b_tools.top.state.verdicts import HALTED, Note

MOVING = (RunPhase.TRAINING, RunPhase.SAVING, RunPhase.EVALUATING)
UNSAVED = "unsaved"  # the key of the note on a save that failed
LIVE = (RunPhase.STARTING, RunPhase.LOADING, *MOVING)


def run_notes(found: Moment) -> Sequence[Note]:
    """Return what stands out about the run, worst first; nothing once it hangs or has failed."""
    phase, _ = found.phase
    notes = list(_long_phase(found)) if phase in LIVE else []
    if phase not in MOVING:
        return notes
    if found.unsaved:  # it loses work, while all else costs time
        notes.append(Note(UNSAVED, f"not saved: {found.unsaved}", ("checkpoint_step",)))
    if unsent := clean(next((run.unsent for run in found.told.values() if run.unsent), "")):
        notes.append(Note("unsent", f"after save failed: {unsent}", ("checkpoint_step",)))
    notes += stall(found)
    notes += _falls(found)
    notes += slow_note(found.paces.pace)
    if found.metrics:
        notes += steps.unusual(found.metrics)
    knows_attempt = not found.metrics or found.metrics[-1].attempt
    if found.head and knows_attempt:
        notes += steps.without_metrics(found.measured, found.beats.get(found.head.name, ()), found.patience_s)
    return notes


def stall(found: Moment) -> Iterator[Note]:
    """Yield that no rank has moved for twice what a step takes, which may become a hang."""
    step_s = found.paces.usual_s
    beats = list(itertools.chain.from_iterable(found.telling.values()))
    if not step_s or any(beat.phase is not Phase.TRAIN for beat, _ in beats):
        return
    age_s = min((age_s for _, age_s in beats), default=0.0)
    if age_s >= between_steps(step_s).odd_s:
        yield Note("stall", f"this step has run for {age_s:.0f} s, usually {step_s:.1f} s", ("step",))


def remember(found: Moment) -> None:
    """Add what is seen now to the past, against which later moments are judged."""
    if found.head and found.heard[found.head.name].alive:
        for beat in found.heard[found.head.name].beats[:1]:
            found.past.times.see(beat.phase, beat.phase_since)
    for name, beat, note in found.halted if not found.failures else ():
        if note is not HALTED["T"]:
            gone = Failure(name, Cause(CauseKind.RANK_EXIT, name, beat.rank, detail=note.words, gpu=beat.gpu))
            found.past.gone.setdefault(found.heard[name].attempt, gone)
    if found.phase[0] is RunPhase.TRAINING:
        powers = known(gpu.power_w for host in found.ours for gpu in host.gpus)
        flows = known(host.ib_rate for host in found.ours)
        found.past.power_w.add(found.now, statistics.mean(powers) if powers else None, found.interval_s)
        found.past.ib_bytes_per_s.add(found.now, statistics.mean(flows) if flows else None, found.interval_s)


def _long_phase(found: Moment) -> Iterator[Note]:
    """Yield that a phase lasts longer than it usually does; or, if that is not known, that nothing moves in it."""
    if not found.stay or found.stay.lasts_s < in_phase(found.stay.usual_s).odd_s:
        return
    if found.stay.usual_s is not None or found.still_s >= found.hang_after_s:
        yield Note(f"long {found.stay.phase}", found.stay.words, ("phase",))


def _falls(found: Moment) -> Iterator[Note]:
    """Yield that all GPUs draw less than before, or all links carry less."""
    if power := found.past.power_w.fall(found.interval_s):
        n_gpus = sum(len(host.gpus) for host in found.ours)
        words = f"the power of all {n_gpus} GPUs fell from {_from_to(power, n_gpus / 1e3, '.1f')} kW"
        yield Note("power fell", words, ("power_w",))
    if flow := found.past.ib_bytes_per_s.fall(found.interval_s):
        gbit = 8e-9 * len(found.ours)
        words = f"the RDMA traffic of all {len(found.ours)} hosts fell from {_from_to(flow, gbit, ',.0f')} Gb/s"
        yield Note("rdma fell", words, ("ib_bytes_per_s",))


def _from_to(fall: Fall, factor: float, form: str) -> str:
    """Write a fall, of all together: ``43.1 to 8.5``."""
    return f"{factor * fall.usual:{form}} to {factor * fall.now:{form}}"
