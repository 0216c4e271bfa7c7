"""The verdict on everything, and why. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from llama405b.contract.phrases import counted, given
from llama405b_tools.run import judge
from llama405b_tools.run.judge import Failure, first_failure
from llama405b_tools.text.clean import clean
from llama405b_tools.top.state import verdicts
from llama405b_tools.top.state.moment import Moment
from llama405b_tools.top.state.picture import ENDED, GUARDED, HostRow, HostState, RunPhase, TrainingStatus, Verdict
from llama405b_tools.top.state.run_notes import UNSAVED
from llama405b_tools.top.state.verdicts import BEHIND, MISSING, Note

PHASES = {
    RunPhase.RUNNING: Verdict.RUNNING,
    RunPhase.STARTING: Verdict.STARTING,
    RunPhase.LOADING: Verdict.LOADING,
    RunPhase.SAVING: Verdict.SAVING,
    RunPhase.EVALUATING: Verdict.EVALUATING,
}


class Reason(NamedTuple):
    """Why the verdict is what it is."""

    host: str  # that it is about; "" if it is about the run
    words: str


def verdict(
    found: Moment, notes: Sequence[Note], rows: Sequence[HostRow], training: TrainingStatus | None
) -> tuple[Verdict, str, str]:
    """Return the verdict, why, and the host that this is about ("": none).

    What ends a run comes before what slows it, then what is not yet known, then its phase.
    ``notes``: what stands out about the run.
    """
    if found.hang:
        return Verdict.HUNG, f"{found.hang.host}: {found.hang.words}", found.hang.host
    if found.failures:
        return Verdict.FAILED, _failure(found), found.culprit
    used = {name for name, _, _ in found.nodes} or {row.name for row in rows}
    if lost := [_of_state(row) for row in rows if row.severity == 2 and row.name in used]:
        return Verdict.DOWN, _first(lost), lost[0].host
    if found.awaited:
        return Verdict.CONNECTING, str(found.away), ""
    if found.restart_by and training and training.guard in GUARDED:
        return (
            Verdict.RESTARTING,
            f"asked for by {found.restart_by}; its guard starts attempt {training.attempt + 1}",
            "",
        )
    if training and training.phase in ENDED:
        return *_end(found, training), found.blamed.host if found.blamed and not found.restart_by else ""
    if reasons := _reasons(found, notes, rows, training):
        return Verdict.DEGRADED, _first(reasons), reasons[0].host
    if waiting := [row for row in rows if row.state is HostState.CONNECTING]:
        return Verdict.CONNECTING, f"hosts that have not answered: {len(waiting)}", ""
    return *_phase(found, training), ""


def _failure(found: Moment) -> str:
    """Say where the run failed; as long as that may still turn out, only that it did."""
    if found.is_unblamed:
        hosts = counted(len({failure.host for failure in found.failures}), "host")
        return f"ranks on {hosts} lost contact with others; which one failed first is not known yet"
    worst = first_failure(found.failures)
    return f"{worst.host}: {verdicts.trouble_words(worst)}"


def _end(found: Moment, run: TrainingStatus) -> tuple[Verdict, str]:
    """Return the verdict on a run that has ended, and what it lost."""
    if found.restart_by:
        return Verdict.STOPPED, f"for a restart that {found.restart_by} asked for, and no guard starts the next attempt"
    if found.blamed and run.phase is RunPhase.STOPPED:
        words = f"{found.blamed.host}: {clean(judge.failure_words(Failure(found.blamed.host, found.blamed.cause)))}"
        if run.guard in GUARDED:
            return Verdict.RESTARTING, f"attempt {run.attempt} was ended ({words}); its guard starts the next"
        return Verdict.FAILED, words
    by = next((status.cause.by for run in found.heard.values() if (status := run.status) and status.cause), "")
    words = given("by {}", by) + given(" after step {:,}", run.step)
    lost = f"{counted(run.lost_steps, 'step', grouped=True)} lost" if run.lost_steps else ""
    if lost and (found.unsaved or run.checkpoint_step is not None):
        return Verdict.LOST, f"{words}: {lost}{given('; not saved: {}', found.unsaved)}".strip()
    if run.phase is RunPhase.DONE:
        return Verdict.DONE, given("{:,} steps", run.step)
    return Verdict.STOPPED, f"{words}{given('; {}', lost)}".strip()


def _phase(found: Moment, run: TrainingStatus | None) -> tuple[Verdict, str]:
    """Return what a run does in which nothing stands out. Only one that trains at the expected pace is healthy."""
    if run is None:
        return Verdict.NO_RUN, ""
    if run.phase is RunPhase.TRAINING:
        if not (pace := found.paces.pace):
            return Verdict.TRAINING, "too few steps to judge the pace"
        return Verdict.HEALTHY, pace.words
    if run.phase not in PHASES:
        return Verdict.CONNECTING, "not all hosts of the run report"
    return PHASES[run.phase], found.stay.words if found.stay else ""


def _first(reasons: Sequence[Reason]) -> str:
    return reasons[0].words + given(", and {} more", len(reasons) - 1)


def _of_state(row: HostRow) -> Reason:
    return Reason(row.name, f"{row.name}: {row.state} {row.why}")


def _reasons(
    found: Moment, notes: Sequence[Note], rows: Sequence[HostRow], training: TrainingStatus | None
) -> list[Reason]:
    """Return what slows the run, or may slow it, worst first; a cause comes before its symptom: a step that is slow."""
    reasons = [Reason(name, f"{name}: rank {beat.rank}: {note.words}") for name, beat, note in found.halted]
    missing = [(name, note) for name, each in found.notes.items() for note in each if note.key.startswith(MISSING)]
    reasons += [Reason(name, f"{name}: {note.words}") for name, note in missing]
    reasons += [Reason("", note.words) for note in notes if note.key == UNSAVED]
    if training and training.network == "SOCKET":
        reasons.append(Reason("", "training runs over TCP sockets"))
    behind = [each for each in found.slow_ranks if each[2].key == BEHIND]
    reasons += [Reason(name, f"{name}: rank {rank}: {note.words}") for name, rank, note in behind]
    reasons += [Reason("", note.words) for note in notes if note.key != UNSAVED]
    if training and training.is_unguarded:
        reasons.append(Reason("", "its guard is gone, so nothing restarts this run"))
    reasons += [_of_state(row) for row in rows if row.severity]
    of_hosts = [Reason(row.name, f"{row.name}: {row.notes[0]}") for row in rows if row.notes]
    return [*reasons, *(reason for reason in of_hosts if reason not in reasons)]
