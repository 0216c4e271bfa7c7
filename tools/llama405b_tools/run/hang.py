"""The one rule of a hang: how long a rank may be silent, by the pace of its run and the phase it is in. Pure.

Guard, autopsy and cluster-top read it; they differ only in how soon they act (``Pace.min_hang_s``). A first step compiles and connects,
and a phase like loading takes minutes: their limits scale with what the run itself allows for loading.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from llama405b.contract.records import PROCESS_STATE_NOTES, Cause, CauseKind, Phase
from llama405b.settings.schema import Timeouts
from llama405b_tools.agent.messages import HEARTBEAT_INTERVAL_S, RankHeartbeat

STALE_AFTER_S = (
    3 * HEARTBEAT_INTERVAL_S
)  # of a host that is silent for longer nothing is known; its connection notices far later
SLOW_PHASES = (Phase.START, Phase.DATA, Phase.LOAD, Phase.PIN, Phase.RESUME, Phase.CHECKPOINT)
HANG_AFTER_S = 60.0  # --hang-after of autopsy and cluster-top, which end nothing
# between steps, a run stalls after the longer of STALL_S and STALL_STEPS steps; HANG_STEPS: at least so many before it hangs
STALL_S, STALL_STEPS, HANG_STEPS = 10.0, 2, 5
LONG_SILENCE = 3  # times the silence of a hang: after that, nothing is an excuse
MIN_PHASE_S, LONG_PHASE, HUNG_PHASE = 10.0, 3.0, 10.0  # times the usual time of a phase
UNKNOWN_PHASE_S = 60.0  # taken for usual, if nothing is known
SLACK_S = 60.0  # beyond the trainer's own timeout, so that it can report what it waits for


class SilenceLimits(NamedTuple):
    """How long nothing of a run may move, in seconds."""

    stall_s: float  # from then on it is not healthy
    hang_s: float  # and from then on it hangs


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """How fast a run goes, as far as that is known."""

    step_s: float | None = None  # of a usual step, or of the longest; None or 0: none was taken
    load_s: float = 0.0  # the run's timeouts.load; 0: unknown
    min_hang_s: float = HANG_AFTER_S  # between steps

    @property
    def steps(self) -> SilenceLimits:
        """The limits between steps."""
        step_s = self.step_s or 0.0
        return SilenceLimits(max(STALL_S, STALL_STEPS * step_s), max(self.min_hang_s, HANG_STEPS * step_s))

    @property
    def first_step(self) -> SilenceLimits:
        """The limits for the first step, and for a rank while others are in a slow phase."""
        return SilenceLimits(phase_limits(None).stall_s, (self.load_s or Timeouts().load) + SLACK_S)


def phase_limits(usual_s: float | None) -> SilenceLimits:
    """Return the limits for a phase other than training, from the phase's begin on."""
    odd_s = max(MIN_PHASE_S, LONG_PHASE * (usual_s or UNKNOWN_PHASE_S))
    return SilenceLimits(odd_s, odd_s * HUNG_PHASE / LONG_PHASE)


@dataclasses.dataclass(frozen=True, slots=True)
class HostHeartbeats:
    """A host's latest heartbeats."""

    beats: Sequence[RankHeartbeat]
    now: float  # by the host's clock, when they were read
    arrived_s: float  # by the operator's monotonic clock, when they arrived


@dataclasses.dataclass(frozen=True, slots=True)
class SilentRank:
    """A rank that has been silent for too long."""

    host: str
    beat: RankHeartbeat
    age_s: float

    @property
    def cause(self) -> Cause:
        """The silence as the cause of an end."""
        beat = self.beat
        return Cause(
            CauseKind.HUNG,
            self.host,
            beat.rank,
            phase=beat.phase,
            step=beat.step,
            age_s=self.age_s,
            process_state=beat.state,
            gpu=beat.gpu,
        )


def quietest_rank(beats: Mapping[str, Sequence[tuple[RankHeartbeat, float]]]) -> SilentRank | None:
    """Return the rank that the others most likely wait for, however long it has been silent."""
    return _find_silent(beats, 0.0, math.inf)


def find_silent_rank(beats: Mapping[str, Sequence[tuple[RankHeartbeat, float]]], pace: Pace) -> SilentRank | None:
    """Return the rank that the others most likely wait for, if any rank has been silent for too long.

    ``beats``: by host, heartbeats with their age in seconds. A rank that cannot run comes first, then one in a phase that
    may be slow, for which the others wait as long, then the one furthest behind. A process that is stopped, or has ended,
    has no excuse in any phase.
    """
    return _find_silent(beats, pace.steps.hang_s, pace.first_step.hang_s)


def _find_silent(
    beats: Mapping[str, Sequence[tuple[RankHeartbeat, float]]], step_limit_s: float, slow_limit_s: float
) -> SilentRank | None:
    silent = []
    others_wait = any(beat.phase in SLOW_PHASES for host_beats in beats.values() for beat, _ in host_beats)
    for host, host_beats in beats.items():
        for beat, age_s in host_beats:
            # Before the first step, which compiles and connects; a long wait for an update is one of a later step.
            before_first_step = beat.time == beat.phase_since and beat.phase is not Phase.UPDATE
            before_first_step = before_first_step or (beat.phase is Phase.EVAL and beat.step == 0)
            slow = (others_wait or before_first_step) and beat.state not in ("T", "Z")
            limit_s = slow_limit_s if slow else step_limit_s
            if beat.phase not in (Phase.DONE, Phase.FAILED) and age_s > limit_s:
                silent.append(SilentRank(host, beat, age_s))
    return min(
        silent,
        key=lambda rank: (
            is_process_runnable(rank.beat),
            rank.beat.phase not in SLOW_PHASES,
            rank.beat.step,
            -rank.age_s,
        ),
        default=None,
    )


def is_process_runnable(beat: RankHeartbeat) -> bool:
    """Return whether a rank's process can go on: it is there, and neither stopped nor waiting for a device."""
    return bool(beat.state) and beat.state not in PROCESS_STATE_NOTES


def find_hung_rank(heartbeats: Mapping[str, HostHeartbeats], now_s: float, pace: Pace) -> SilentRank | None:
    """``find_silent_rank`` of hosts that report; each host's clock is compared only with itself, so skew does not matter."""
    beats = {
        host: [(beat, reported.now - beat.time + now_s - reported.arrived_s) for beat in reported.beats]
        for host, reported in heartbeats.items()
        if now_s - reported.arrived_s <= STALE_AFTER_S
    }
    return find_silent_rank(beats, pace)
