"""The verdict on everything, and why. Pure."""

from collections.abc import Sequence

from llama405b.contract.phrases import given
from llama405b_tools.run.judge import first_failure
from llama405b_tools.top.state import verdicts
from llama405b_tools.top.state.moment import Moment
from llama405b_tools.top.state.picture import HostRow, HostState, TrainingStatus, Verdict


def verdict(found: Moment, rows: Sequence[HostRow], training: TrainingStatus | None) -> tuple[Verdict, str]:
    """Return the verdict and why: what ends a run comes before what slows it, then what is not yet known."""
    if found.hang:
        return Verdict.HUNG, f"{found.hang.host}: {found.hang.words}"
    if found.failures:
        worst = first_failure(found.failures)
        return Verdict.FAILED, f"{worst.host}: {verdicts.trouble_words(worst)}"
    used = {name for name, _, _ in found.nodes} or {row.name for row in rows}
    if lost := [f"{row.name}: {row.state} {row.why}" for row in rows if row.severity == 2 and row.name in used]:
        return Verdict.DOWN, _first(lost)
    if found.awaited:
        return Verdict.CONNECTING, str(found.away)
    if reasons := _reasons(found, rows, training):
        return Verdict.DEGRADED, _first(reasons)
    if waiting := [row for row in rows if row.state is HostState.CONNECTING]:
        return Verdict.CONNECTING, f"hosts that have not answered: {len(waiting)}"
    return Verdict.HEALTHY, ""


def _first(reasons: Sequence[str]) -> str:
    return reasons[0] + given(", and {} more", len(reasons) - 1)


def _reasons(found: Moment, rows: Sequence[HostRow], training: TrainingStatus | None) -> list[str]:
    """Return what slows the run, or may slow it, worst first."""
    reasons = []
    if training and training.network == "SOCKET":
        reasons.append("training runs over TCP sockets")
    reasons += [note.words for note in found.run_notes]
    if training and training.is_unguarded:
        reasons.append("its guard is gone, so nothing restarts this run")
    reasons += [f"{row.name}: {row.state} {row.why}" for row in rows if row.severity]
    return reasons + [f"{row.name}: {row.notes[0]}" for row in rows if row.notes]
