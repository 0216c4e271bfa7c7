"""Ask all hosts of a run what its ranks are doing, and diagnose who holds it up.

What each rank does (in which collective it waits, or what else it does) follows from what its host saw at one moment. A rank that does
something else while others wait in a collective holds them up; if all wait, the one that waits in another place than most; if all wait in
the same place, the network. Nobody is blamed while the run makes progress.
"""

import collections
import contextlib
import dataclasses
import enum
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from llama405b.contract import reader
from llama405b.contract.errors import fmt_if, pluralize, shorten
from llama405b.contract.files import read_record, write_atomic
from llama405b.contract.paths import RunDir
from llama405b.contract.records import PROCESS_STATE_NOTES, Cause, CauseKind, Phase, describe_rank_exit
from llama405b.spec.plan import Plan
from llama405b_tools.agent import evidence
from llama405b_tools.agent.evidence import HostConditions, HostEvidence, RankEvidence, RunProgress
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.transport import failure_texts, replies
from llama405b_tools.parsers import StackFrame, Thread, load_per_core
from llama405b_tools.run import hang
from llama405b_tools.run.hang import HANG_AFTER_S, SLOW_PHASES, Pace
from llama405b_tools.run.judge import Failure, score_origin
from llama405b_tools.run.screen import show
from llama405b_tools.text.figures import format_amount, format_duration
from llama405b_tools.text.words import clean, fold_names, fold_ranks

COLLECTIVES = re.compile(r"/torch/distributed/(distributed_c10d|_functional_collectives|rendezvous)\.py$")
FSDP = re.compile(r"/torch/distributed/fsdp/")
WAIT_CALL = re.compile(r"\.wait\(|\.wait_|synchronize\(")
SYNC_CALL = re.compile(r"synchronize\(|\.item\(|\.tolist\(|\.cpu\(|float\(all_reduce")
DEVICE_LIBRARY = re.compile(r"libcuda\.so|libnccl")
IDLE_FILES = (
    "/threading.py", "/queue.py", "/selectors.py", "/concurrent/futures/thread.py", "/concurrent/futures/_base.py",
    "/multiprocessing/connection.py", "/multiprocessing/queues.py", "/multiprocessing/popen_fork.py", "/socketserver.py",
)  # fmt: skip
OUR_CODE = re.compile(r"/llama405b/")
MODEL_CODE = re.compile(r"/torch/(nn/modules/module|autograd/graph)\.py$|/torch/distributed/fsdp/")
HELPER_CODE = re.compile(r"/llama405b/(distributed|parallel)/")
LIBRARY_CODE = re.compile(r"/(site|dist)-packages/|/lib/python\d|^<frozen")


class RankActivity(enum.StrEnum):
    """What a rank does, or what keeps it from running."""

    GONE = "gone"  # it has no process
    STOPPED = "stopped"  # by a signal, or a zombie
    COLLECTIVE = "collective"  # it waits for other ranks
    DEVICE = "device"  # it waits for its GPU, which may wait for other ranks
    ELSEWHERE = "elsewhere"  # it does something else
    UNKNOWN = "unknown"  # nothing of it can be seen


@dataclasses.dataclass(frozen=True, slots=True)
class RankPosition:
    """What one rank does, and where in its program."""

    host: str
    evidence: RankEvidence
    age_s: float | None  # since its last heartbeat, by its host's clock
    activity: RankActivity
    collective: str = ""  # the collective
    frame: StackFrame | None = None  # the innermost call of the program's own
    thread: str = ""  # in which this is, if not the main one
    unit: str = ""  # of FSDP that it is in, and which way; "" for none, or where that is not known

    @property
    def rank(self) -> int:
        """Its number."""
        return self.evidence.rank

    @property
    def step(self) -> int:
        """The step that is under way."""
        place, beat = self.evidence.place, self.evidence.beat
        return max(place.step if place else 0, beat.step if beat else 0)

    @property
    def phase(self) -> Phase | None:
        """The phase of its last heartbeat."""
        return self.evidence.beat.phase if self.evidence.beat else None

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Equal for ranks at the same place."""
        location = (
            f"{self.frame.file}:{self.frame.line}"
            if self.frame and self.activity is not RankActivity.COLLECTIVE
            else ""
        )
        return self.activity, self.collective or location, self.unit, self.step


def rank_positions(hosts: Mapping[str, HostEvidence]) -> list[RankPosition]:
    """Return the position of each rank, by rank."""
    all_positions = [_rank_position(host, rank) for host in hosts.values() for rank in host.ranks]
    return sorted(all_positions, key=lambda position: position.rank)


def _rank_position(host: HostEvidence, rank: RankEvidence) -> RankPosition:
    age_s = host.now - rank.beat.time if rank.beat else None
    if not rank.pid:
        return RankPosition(host.host, rank, age_s, RankActivity.GONE)
    main = rank.threads[0] if rank.threads else None
    activity, collective, thread = _find_activity(rank)
    shown_thread = thread or main
    own_frame = _own_frame(shown_thread.python_frames if shown_thread else ())
    if rank.state in ("T", "t", "Z"):
        activity = RankActivity.STOPPED
    elif rank.state == "D":
        activity = RankActivity.ELSEWHERE
    in_model = (
        any(MODEL_CODE.search(frame.file) for frame in rank.threads[0].python_frames) if rank.threads else rank.place
    )
    unit = rank.place.unit if rank.place and in_model else ""  # it stays after the backward
    return RankPosition(
        host.host,
        rank,
        age_s,
        activity,
        collective,
        own_frame,
        thread.name if thread and thread is not main else "",
        unit,
    )


def _find_activity(rank: RankEvidence) -> tuple[RankActivity, str, Thread | None]:
    """Return what a rank does, its collective, and the thread that shows it.

    If the main thread waits for another thread, that is the one that shows it.
    """
    if not rank.threads or not rank.threads[0].python_frames:
        return RankActivity.UNKNOWN, "", None
    main, *others = rank.threads
    if collective := _waiting_collective(main):
        holder = next((other for other in others if other.has_gil and other.python_frames), None)
        return (RankActivity.ELSEWHERE, "", holder) if holder else (RankActivity.COLLECTIVE, collective, main)
    if _waits_for_device(main):
        return RankActivity.DEVICE, "", main
    inner = main.python_frames[0]
    if inner.function == "_engine_run_backward" or inner.file.endswith(IDLE_FILES):
        for other in others:  # a thread of autograd, or one of ours
            if collective := _waiting_collective(other):
                return RankActivity.COLLECTIVE, collective, other
        working = [
            other for other in others if other.python_frames and not other.python_frames[0].file.endswith(IDLE_FILES)
        ]
        device = next((other for other in working if _waits_for_device(other)), None)
        if device:
            return RankActivity.DEVICE, "", device
        if working and inner.file.endswith(IDLE_FILES):
            return RankActivity.ELSEWHERE, "", working[0]
    return RankActivity.ELSEWHERE, "", main


def _waiting_collective(thread: Thread) -> str:
    """Return the collective that a thread waits in; "" if in none."""
    frames = thread.python_frames
    if not frames:
        return ""
    inner = frames[0]
    waits = WAIT_CALL.search(inner.code) and (FSDP.search(inner.file) or HELPER_CODE.search(inner.file))
    return inner.function if waits or COLLECTIVES.search(inner.file) else ""


def _waits_for_device(thread: Thread) -> bool:
    if any(DEVICE_LIBRARY.search(frame.file) for frame in thread.frames if not frame.is_python):
        return True
    return bool(thread.python_frames) and bool(SYNC_CALL.search(thread.python_frames[0].code))


def _own_frame(frames: tuple[StackFrame, ...]) -> StackFrame | None:
    """Return the innermost call of the program's own: not of a library, and not where we only watch or wait."""
    own_frames = [frame for frame in frames if OUR_CODE.search(frame.file) or not LIBRARY_CODE.search(frame.file)]
    outside_helpers = [frame for frame in own_frames if not HELPER_CODE.search(frame.file)]
    return next(iter([*outside_helpers, *own_frames, *frames]), None)


MIN_MOVED_BYTES, BUSY = 64 << 10, 0.5  # in the window; of a core
STARVED, RUNNING = 0.5, 0.1  # of the window: that it waited for a core, and had one
FAULTS_PER_S = 200.0  # page faults that wait for a disk
MIN_SWAPPED_BYTES, MIN_LOAD_PER_CORE = 1 << 30, 2.0  # of a host, from which on they are worth telling
MAX_CODE = 100  # characters of a line of a stack
SILENT_END = Cause(CauseKind.UNKNOWN)
READING_CODE = (
    "/llama405b/data/",
    "/llama405b/checkpoint/",
    "/llama405b/parallel/load_weights.py",
)  # where bytes that move are progress
FILE_CALLS = frozenset({
    "read", "write", "pread64", "pwrite64", "readv", "writev", "fsync", "fdatasync", "syncfs", "flock", "ioctl", "open",
    "openat", "close", "rename", "unlink", "statx", "newfstatat",
})  # fmt: skip


class DiagnosisKind(enum.StrEnum):
    """Whether a run makes progress."""

    MOVES = "moves"  # nobody is to blame
    HANGS = "hangs"
    UNCLEAR = "unclear"  # whether it moves is not known: it is a program of the user's own, or too little is seen
    OVER = "over"  # no process is left


class FaultKind(enum.StrEnum):
    """What kind of fault holds up a run."""

    HOST_LOST = "host lost"
    RANK_GONE = "rank gone"
    STOPPED = "stopped"
    BLOCKED = "blocked"  # in the kernel: a disk, a driver, a pipe
    STARVED = "starved"  # of a core, or of memory
    ELSEWHERE = "elsewhere"  # the rank does something else than the others
    MISMATCH = "mismatch"  # it waits in another collective than the others
    LINK = "link"


@dataclasses.dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks at the same place."""

    positions: tuple[RankPosition, ...]

    @property
    def first(self) -> RankPosition:
        """One of them."""
        return self.positions[0]

    @property
    def ranks(self) -> list[int]:
        """Their numbers."""
        return [position.rank for position in self.positions]


@dataclasses.dataclass(frozen=True, slots=True)
class Culprit:
    """What holds up a run."""

    fault: FaultKind
    hosts: tuple[str, ...]
    ranks: tuple[int, ...]  # () if it is no rank in particular
    words: str
    evidence: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """Who holds up a run."""

    verdict: DiagnosisKind
    words: str  # one sentence
    groups: tuple[RankGroup, ...] = ()
    culprit: Culprit | None = None


def diagnose_run(
    hosts: Mapping[str, HostEvidence], unreachable: Mapping[str, str], hang_after_s: float = HANG_AFTER_S
) -> Diagnosis:
    """Return who holds up the run. ``unreachable``: hosts that did not answer, and why; ``hang_after_s``: as cluster-top's."""
    all_positions = rank_positions(hosts)
    groups = group_ranks(all_positions)
    if unreachable and not hosts:
        return Diagnosis(DiagnosisKind.UNCLEAR, f"no host of the run answered; {_unanswered_words(unreachable)}")
    if not unreachable and not any(position.evidence.pid for position in all_positions):
        over = Diagnosis(DiagnosisKind.OVER, "no process of the run is left on any host", groups)
        return (
            _with_culprit(DiagnosisKind.OVER, culprit, hosts, groups)
            if (culprit := _find_gone(all_positions))
            else over
        )
    verdict, why = judge_pace(all_positions, hosts, hang_after_s)
    if culprit := _find_gone(all_positions) or _find_stopped(all_positions):
        return _with_culprit(DiagnosisKind.HANGS, culprit, hosts, groups)
    if verdict is DiagnosisKind.MOVES:
        remarks = fmt_if("; {} did not answer", fold_names(unreachable))
        remarks += fmt_if(
            "; not saved: {}", next((host.progress.unsaved for host in hosts.values() if host.progress.unsaved), "")
        )
        return Diagnosis(verdict, f"{why}{remarks}", groups)
    culprit = _find_elsewhere(all_positions, hosts, hangs=verdict is DiagnosisKind.HANGS)
    if verdict is DiagnosisKind.HANGS and unreachable:  # which may have much to do, and be well
        verdict, culprit = (
            DiagnosisKind.UNCLEAR,
            Culprit(FaultKind.HOST_LOST, tuple(unreachable), (), _unanswered_words(unreachable)),
        )
    elif verdict is DiagnosisKind.HANGS:
        culprit = (
            culprit
            or _find_throttled(all_positions, hosts)
            or _find_bad_link(all_positions, hosts)
            or _find_mismatch(all_positions)
        )
    if culprit:
        blamed = _with_culprit(verdict, culprit, hosts, groups)
        return blamed if verdict is DiagnosisKind.HANGS else dataclasses.replace(blamed, words=f"{blamed.words}; {why}")
    shared_place = f"; all {pluralize(len(all_positions), 'rank')} {group_words(groups[0])}" if len(groups) == 1 else ""
    return Diagnosis(verdict, f"{why}{shared_place}; cannot tell which rank or link is at fault", groups)


def group_ranks(all_positions: Iterable[RankPosition]) -> tuple[RankGroup, ...]:
    """Group the ranks that are at the same place, the largest group first."""
    groups = collections.defaultdict[object, list[RankPosition]](list)
    for position in all_positions:
        groups[position.key].append(position)
    return tuple(
        RankGroup(tuple(group)) for group in sorted(groups.values(), key=lambda group: (-len(group), group[0].rank))
    )


def judge_pace(
    all_positions: Sequence[RankPosition], hosts: Mapping[str, HostEvidence], hang_after_s: float
) -> tuple[DiagnosisKind, str]:
    """Return whether the run makes progress, and why."""
    reporting = [
        (position, position.age_s) for position in all_positions if position.age_s is not None and position.evidence.pid
    ]
    if not reporting:
        return DiagnosisKind.UNCLEAR, "its ranks report no steps"
    progress = next((host.progress for host in hosts.values() if host.progress != RunProgress()), RunProgress())
    newest_s = min(age_s for _, age_s in reporting)
    phase = next((position.phase for position, _ in reporting if position.phase in SLOW_PHASES), reporting[0][0].phase)
    if phase in SLOW_PHASES:
        usual_s = progress.usual_save_s if phase is Phase.CHECKPOINT else None
        limits, is_still = hang.phase_limits(usual_s), newest_s >= max(hang_after_s, usual_s or 0.0)
        beats = [(hosts[position.host].now, beat) for position, _ in reporting if (beat := position.evidence.beat)]
        still_s = max(now - beat.phase_since for now, beat in beats if beat.phase is phase) if is_still else 0.0
    else:
        pace = Pace(progress.usual_step_s, progress.load_s, hang_after_s)
        limits = pace.steps if progress.usual_step_s else pace.first_step
        still_s = newest_s
    usual = (
        fmt_if(", usually {}", format_duration(progress.usual_step_s))
        if progress.usual_step_s and phase is Phase.TRAIN
        else ""
    )
    silent = f"no rank has moved for {format_duration(newest_s)} (phase {phase}{usual})"
    if still_s <= limits.stall_s and all(position.evidence.moved for position, _ in reporting):
        return DiagnosisKind.MOVES, f"making progress (phase {phase}): every rank advanced during the sample"
    if still_s <= limits.stall_s:
        return (
            DiagnosisKind.MOVES,
            f"making progress (phase {phase}): a rank last advanced {format_duration(newest_s)} ago{usual}",
        )
    if still_s <= hang.LONG_SILENCE * limits.hang_s and (
        working := next((p for p, _ in reporting if _is_working(p, hosts[p.host])), None)
    ):
        moved = _bytes(working.evidence.doing.moved_bytes)
        return (
            DiagnosisKind.MOVES,
            f"{silent}, but rank {working.rank} works: {moved} moved in the last {hosts[working.host].window_s:.1f} s",
        )
    if still_s <= limits.hang_s:
        return DiagnosisKind.UNCLEAR, f"{silent}; it counts as a hang after {format_duration(limits.hang_s)}"
    return DiagnosisKind.HANGS, silent


def _is_working(position: RankPosition, host: HostEvidence) -> bool:
    """Return whether a silent rank does slow work: reading, writing, computing before the first step."""
    if position.activity is not RankActivity.ELSEWHERE:
        return False
    doing, window_s = position.evidence.doing, max(host.window_s, 0.1)
    if (
        position.frame
        and any(part in position.frame.file for part in READING_CODE)
        and doing.moved_bytes >= MIN_MOVED_BYTES
    ):
        return True
    return position.phase in (*SLOW_PHASES, Phase.UPDATE) and doing.cpu_s >= BUSY * window_s


def _find_gone(all_positions: Sequence[RankPosition]) -> Culprit | None:
    """Return the ranks whose process is gone: one that logged why, or else all silent ones of a host."""
    gone_positions = [
        position
        for position in all_positions
        if position.activity is RankActivity.GONE and position.evidence.beat and position.phase is not Phase.DONE
    ]
    if not gone_positions:
        return None
    causes = {position.rank: position.evidence.beat.cause for position in gone_positions if position.evidence.beat}
    first = max(gone_positions, key=lambda position: score_origin(causes[position.rank] or SILENT_END))
    if cause := causes[first.rank]:
        words = f"rank {first.rank} ended: {describe_rank_exit(cause)}"
        return Culprit(FaultKind.RANK_GONE, *_hosts_and_ranks([first]), words, _last_lines(first))
    silent = [position for position in gone_positions if position.host == first.host and causes[position.rank] is None]
    verb = "has" if len(silent) == 1 else "have"
    return Culprit(
        FaultKind.RANK_GONE,
        *_hosts_and_ranks(silent),
        f"{_rank_words(silent)} {verb} no process and logged no reason",
        _last_lines(first),
    )


def _find_stopped(all_positions: Sequence[RankPosition]) -> Culprit | None:
    stopped = [position for position in all_positions if position.activity is RankActivity.STOPPED]
    if not stopped:
        return None
    why = PROCESS_STATE_NOTES.get(stopped[0].evidence.state.upper(), "it is stopped")
    return Culprit(
        FaultKind.STOPPED,
        *_hosts_and_ranks(stopped),
        f"{_rank_words(stopped)} cannot continue: {why}{_waiting_words(all_positions)}",
        _stack(stopped[0]),
    )


def _unanswered_words(unreachable: Mapping[str, str]) -> str:
    name, why = next(iter(unreachable.items()))
    return f"{fold_names(unreachable)} did not answer: {name}: {why}"


def _find_elsewhere(
    all_positions: Sequence[RankPosition], hosts: Mapping[str, HostEvidence], *, hangs: bool
) -> Culprit | None:
    """Return ranks that do something else while others wait; of several, those that are furthest behind.

    Or all ranks, if they hang in one place.
    """
    busy = [
        position for position in all_positions if position.activity in (RankActivity.ELSEWHERE, RankActivity.UNKNOWN)
    ]
    is_distinct = len(busy) < len(all_positions) or len(all_positions) == 1
    if not busy or not (is_distinct or (hangs and len({position.key for position in busy}) == 1)):
        return None
    visible = [position for position in busy if position.activity is RankActivity.ELSEWHERE] or busy
    behind = min(position.step for position in visible)
    furthest_behind = [position for position in visible if position.step == behind]
    first = next((position for position in furthest_behind if _is_blocked(position)), furthest_behind[0])
    same_place = [position for position in furthest_behind if position.key == first.key]
    fault, doing = _doing_words(first, hosts[first.host], several=len(same_place) > 1)
    return Culprit(
        fault,
        *_hosts_and_ranks(same_place),
        f"{_rank_words(same_place)} {doing}{_waiting_words(all_positions)}",
        (*_stack(first), *_last_lines(first)),
    )


def _is_blocked(position: RankPosition) -> bool:
    return position.evidence.state == "D" or position.evidence.waits_in.partition(" ")[0] in FILE_CALLS


def _doing_words(position: RankPosition, host: HostEvidence, *, several: bool) -> tuple[FaultKind, str]:
    """Return what a rank does instead of waiting with the others; ``several``: it is one of those that do."""
    waits = "wait" if several else "waits"
    evidence, window_s = position.evidence, max(host.window_s, 0.1)
    location = f" in {frame_words(position.frame)}" if position.frame else ""
    if position.thread:
        location = f"{location} (thread {position.thread})"
    if evidence.doing.major_faults > FAULTS_PER_S * window_s:
        swap = fmt_if(", {} of it is in swap", _bytes(evidence.swapped_bytes) if evidence.swapped_bytes else "")
        return (
            FaultKind.STARVED,
            f"{waits} for memory: {evidence.doing.major_faults / window_s:,.0f} page faults a second{swap}{location}",
        )
    if _is_blocked(position):
        call = evidence.waits_in or evidence.kernel_wait or "the kernel"
        return (
            FaultKind.BLOCKED,
            f"{waits} in {call}{fmt_if(', state {}', 'D' if evidence.state == 'D' else '')}{location}",
        )
    if evidence.doing.waited_s > STARVED * window_s and evidence.doing.cpu_s < RUNNING * window_s:
        return (
            FaultKind.STARVED,
            f"{waits} for a core: it got {evidence.doing.cpu_s:.2f} s of one in {window_s:.1f} s{location}",
        )
    if position.activity is RankActivity.UNKNOWN:
        return (
            FaultKind.ELSEWHERE,
            f"cannot be inspected ({evidence.no_stacks or 'no stacks'}) while the others wait",
        )
    is_, does = ("are", "do") if several else ("is", "does")
    return FaultKind.ELSEWHERE, f"{is_}{location}" if location else f"{does} something else"


def _find_throttled(all_positions: Sequence[RankPosition], hosts: Mapping[str, HostEvidence]) -> Culprit | None:
    """Return ranks that wait like the others, and whose control group keeps them from running.

    That stops the threads that carry their messages, too.
    """
    shares = {
        position.rank: position.evidence.doing.throttled_s / max(hosts[position.host].window_s, 0.1)
        for position in all_positions
    }
    throttled = [position for position in all_positions if shares[position.rank] > STARVED]
    if not throttled:
        return None
    verb, possessive = ("gets", "its") if len(throttled) == 1 else ("get", "their")
    share = min(1.0, shares[throttled[0].rank])
    words = f"{_rank_words(throttled)} {verb} no core: {possessive} control group was out of its share {share:.0%} of the time"
    return Culprit(
        FaultKind.STARVED, *_hosts_and_ranks(throttled), f"{words}{_waiting_words(all_positions)}", _stack(throttled[0])
    )


def _find_bad_link(all_positions: Sequence[RankPosition], hosts: Mapping[str, HostEvidence]) -> Culprit | None:
    """Return the host whose link is down, or whose data, sent or received, is not acknowledged."""
    down = [name for name, host in hosts.items() if host.around.link_up is False]
    if down:
        links = ", ".join(f"{hosts[name].interface} of {name}" for name in down)
        return Culprit(FaultKind.LINK, tuple(down), (), f"the link is down: {links}{_waiting_words(all_positions)}")
    names = {host.address: name for name, host in hosts.items()}
    votes: collections.Counter[str] = collections.Counter()
    evidence = []
    for position in all_positions:
        for unsent in position.evidence.unsent:
            peer = names.get(unsent.peer, unsent.peer)
            if peer != position.host:
                votes.update((peer, position.host))
                evidence.append(
                    f"rank {position.rank} on {position.host}: {_bytes(unsent.queued_bytes)} to {peer} are not acknowledged "
                    f"after {pluralize(unsent.retries, 'retry', 'retries')}"
                )
    if not votes:
        return None
    max_votes = max(votes.values())
    suspects = tuple(sorted(name for name, n in votes.items() if n == max_votes))
    between = (
        f"the link between {' and '.join(suspects)}" if len(suspects) == 2 else f"the link of {fold_names(suspects)}"
    )
    return Culprit(
        FaultKind.LINK,
        suspects,
        (),
        f"{between} passes no data{_waiting_words(all_positions)}",
        tuple(dict.fromkeys(evidence))[:6],
    )


def _find_mismatch(all_positions: Sequence[RankPosition]) -> Culprit | None:
    """Return the ranks that wait in another collective than most; of two halves, the one that is behind."""
    waiting = [position for position in all_positions if position.activity is RankActivity.COLLECTIVE]
    groups = group_ranks(waiting)
    if len(groups) < 2:
        return None
    odd_group = min(groups, key=lambda group: (len(group.positions), group.first.step))
    main_group = groups[0] if groups[0] is not odd_group else groups[1]
    words = f"{_rank_words(odd_group.positions)} {group_words(odd_group)}; {_rank_words(main_group.positions)} {group_words(main_group)}"
    return Culprit(FaultKind.MISMATCH, *_hosts_and_ranks(odd_group.positions), words, _stack(odd_group.first))


def _with_culprit(
    verdict: DiagnosisKind, culprit: Culprit, hosts: Mapping[str, HostEvidence], groups: tuple[RankGroup, ...]
) -> Diagnosis:
    """Return the diagnosis, with further evidence from the culprit's hosts."""
    host_notes = [
        note for name in culprit.hosts if name in hosts for note in _condition_notes(name, hosts[name].around)
    ]
    full_culprit = dataclasses.replace(culprit, evidence=(*culprit.evidence, *host_notes))
    return Diagnosis(verdict, f"{fold_names(culprit.hosts)}: {culprit.words}", groups, full_culprit)


def _condition_notes(name: str, around: HostConditions) -> Iterator[str]:
    """Yield what may hold up any process of a host."""
    for disk in around.disks:
        if not disk.answers:
            yield f"{name}: the disk at {disk.path} does not answer"
        elif disk.free_bytes == 0:
            yield f"{name}: the disk at {disk.path} is full"
    if around.swap_used_bytes >= MIN_SWAPPED_BYTES:
        swapped, available = _bytes(around.swap_used_bytes), _bytes(around.available_bytes)
        yield f"{name}: {swapped} of memory are swapped out, {available} are available"
    if around.cores and around.load > MIN_LOAD_PER_CORE * around.cores:
        yield f"{name}: {around.load:.0f} processes want its {around.cores} cores"
    yield from (f"{name}, kernel, {line}" for line in (around.kernel or ())[-4:])


def _bytes(n: int) -> str:
    return f"{format_amount(n)}B"


def _hosts_and_ranks(positions_iter: Iterable[RankPosition]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    position_list = list(positions_iter)
    return tuple(dict.fromkeys(position.host for position in position_list)), tuple(
        position.rank for position in position_list
    )


def _rank_words(rank_list: Sequence[RankPosition]) -> str:
    return fold_ranks([position.rank for position in rank_list])


def _waiting_words(all_positions: Sequence[RankPosition]) -> str:
    """Return where most of the others wait, as a clause."""
    waiting = group_ranks(
        position for position in all_positions if position.activity in (RankActivity.COLLECTIVE, RankActivity.DEVICE)
    )
    if not waiting:
        return ""
    n_more = sum(len(group.positions) for group in waiting[1:])
    more_words = f", {n_more} elsewhere" if n_more else ""
    return f"; {pluralize(len(waiting[0].positions), 'rank')} {group_words(waiting[0])}{more_words}"


def group_words(group: RankGroup) -> str:
    """Return where a group is: ``wait in all_gather_single of layers.71 backward, step 4711``."""
    first, verb = group.first, "waits" if len(group.positions) == 1 else "wait"
    step = fmt_if(", step {}", first.step)
    at, within = fmt_if(" of {}", first.unit) + step, fmt_if(", in {}", first.unit) + step
    if first.activity is RankActivity.COLLECTIVE:
        return f"{verb} in {first.collective}{at}"
    if first.activity is RankActivity.DEVICE:
        return f"{verb} for the GPU{at}{fmt_if(', in {}', frame_words(first.frame) if first.frame else '')}"
    if first.activity is RankActivity.GONE:
        return "has no process" if verb == "waits" else "have no process"
    if first.activity is RankActivity.STOPPED:
        return f"stopped (state {first.evidence.state}){within}"
    if first.frame is None:
        return f"cannot be inspected ({first.evidence.no_stacks or 'no stacks'})"
    return f"in {frame_words(first.frame)}{within}"


def frame_words(frame: StackFrame) -> str:
    """Return a call as ``data/documents.py:88 (rows): the line``."""
    place = "/".join(frame.file.rsplit("/", 2)[-2:])
    code = frame.code.partition("  #")[0].rstrip()  # without a comment behind it
    return f"{place}:{frame.line} ({frame.function}){fmt_if(': {}', shorten(code, MAX_CODE))}"


def _stack(position: RankPosition) -> tuple[str, ...]:
    """Return the innermost calls of the thread that shows what a rank does."""
    threads = position.evidence.threads
    thread = next(
        (candidate for candidate in threads if candidate.name == position.thread), threads[0] if threads else None
    )
    if thread is None:
        return ()
    native = [
        frame.function
        for frame in thread.frames[: len(thread.frames) - len(thread.python_frames)]
        if not frame.is_python
    ]
    calls = [*native[:2], *(frame_words(frame) for frame in thread.python_frames[:3])]
    return (f"rank {position.rank}, innermost first: {' < '.join(calls)}",)


def _last_lines(position: RankPosition) -> tuple[str, ...]:
    return tuple(f"rank {position.rank} wrote: {line}" for line in position.evidence.log[-3:])


ANSWER_S, MAX_ANSWER_S = 9.0, 60.0  # for a host to answer, times its load per core
LOAD_COMMAND = "cat /proc/loadavg; grep -c ^processor /proc/cpuinfo"
SHOWN_GROUPS = 12
REPORT = "report.txt"  # written last
MAX_FINDING = 240  # characters in an incident


@dataclasses.dataclass(frozen=True, slots=True)
class Autopsy:
    """What the hosts saw, and what it means."""

    run: str
    attempt: int
    hosts: dict[str, HostEvidence]
    unreachable: dict[str, str]  # hosts that did not answer, and why
    diagnosis: Diagnosis
    elapsed_s: float

    @property
    def line(self) -> str:
        """The finding in one line."""
        return clean(f"{self.diagnosis.verdict.upper()}  {self.diagnosis.words}")

    def report(self) -> list[str]:
        """Return the report for people, as lines."""
        diagnosis, ranks = self.diagnosis, [rank for host in self.hosts.values() for rank in host.ranks]
        lines = [
            f"run {self.run}, attempt {self.attempt}: {pluralize(len(ranks), 'rank')} on {pluralize(len(self.hosts), 'host')}, "
            f"seen in {self.elapsed_s:.1f} s",
            self.line,
        ]
        lines += [f"  {line}" for line in (diagnosis.culprit.evidence if diagnosis.culprit else ())]
        lines += ["where the ranks are"]
        lines += [f"  {fold_ranks(group.ranks)}: {group_words(group)}" for group in diagnosis.groups[:SHOWN_GROUPS]]
        if len(diagnosis.groups) > SHOWN_GROUPS:
            lines.append(f"  and {pluralize(len(diagnosis.groups) - SHOWN_GROUPS, 'more place', 'more places')}")
        lines += [f"{name} did not answer: {why}" for name, why in self.unreachable.items()]
        lines += [
            f"{name}: NCCL's flight recorder wrote {path}"
            for name, host in self.hosts.items()
            for path in host.around.flight_records
        ]
        return [clean(line) for line in lines]


def take_autopsy(fleet: Fleet, plan: Plan, hang_after_s: float = HANG_AFTER_S) -> Autopsy:
    """Examine every rank of a run; hosts that do not answer are named."""
    start_s = time.monotonic()

    def examine_host(name: str) -> HostEvidence:
        load = load_per_core(fleet.connection(name).run(LOAD_COMMAND, "", ANSWER_S).out)
        wait_s = min(MAX_ANSWER_S, ANSWER_S * max(1.0, load))
        return fleet.call(name, evidence.evidence, wait_s, plan.run, name)

    outcomes = fleet.call_each(examine_host, [node.name for node in plan.nodes if node.name in fleet.hosts])
    hosts, unreachable = replies(outcomes), failure_texts(outcomes)
    return Autopsy(
        plan.run,
        plan.attempt,
        hosts,
        unreachable,
        diagnose_run(hosts, unreachable, hang_after_s),
        time.monotonic() - start_s,
    )


def save_autopsy(autopsy: Autopsy) -> Path | None:
    """Write an autopsy below the run's directory here; return where, or None if it cannot be written."""
    directory = RunDir.from_name(autopsy.run).autopsies / time.strftime("%Y%m%d-%H%M%S")
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)  # it has lines of logs
        lines = [line for host in autopsy.hosts.values() for rank in host.ranks for line in _rank_lines(host, rank)]
        write_atomic(directory / "stacks.txt", "\n".join([*lines, ""]))
        for name, host in autopsy.hosts.items():
            write_atomic(directory / f"{name}.json", reader.dumps(host) + "\n")
            if host.around.nccl:
                write_atomic(directory / f"{name}.nccl-ras.txt", host.around.nccl)
        write_atomic(directory / REPORT, "\n".join([*autopsy.report(), ""]))
        return directory
    return None


def examine_failure(fleet: Fleet, plan: Plan, failure: Failure, hang_after_s: float) -> Failure:
    """Take and save an autopsy of an attempt about to be ended; return its failure, a hang with its culprit.

    ``hang_after_s``: the limit of who ends it.

    If the autopsy fails, the failure is returned unchanged: a run waits to be restarted.
    """
    try:
        autopsy = take_autopsy(fleet, plan, hang_after_s)
        directory = save_autopsy(autopsy)
    except Exception as error:  # noqa: BLE001
        show(f"autopsy failed: {type(error).__name__}: {error}")
        return failure
    show(f"autopsy: {autopsy.line}{fmt_if('; full report in {}', str(directory or ''))}")
    culprit = autopsy.diagnosis.culprit
    if failure.cause.kind is not CauseKind.HUNG or culprit is None or not culprit.hosts:
        return failure
    host, rank = culprit.hosts[0], next(iter(culprit.ranks), failure.cause.rank)
    finding, ranks = shorten(culprit.words, MAX_FINDING), autopsy.hosts[host].ranks if host in autopsy.hosts else ()
    gpu = next(
        (rank_evidence.beat.gpu for rank_evidence in ranks if rank_evidence.rank == rank and rank_evidence.beat), ""
    )
    cause = dataclasses.replace(failure.cause, host=host, rank=rank, finding=finding, gpu=gpu)
    return dataclasses.replace(failure, host=host, cause=cause)


def last_stacks(run: str) -> tuple[str, dict[int, list[str]]]:
    """Return the time of the last autopsy that is kept here, and the lines about each rank; or "" and {}."""
    paths = [path for path in sorted(RunDir.from_name(run).autopsies.glob("*")) if (path / REPORT).exists()]
    if not paths:
        return "", {}
    hosts = [host for path in paths[-1].glob("*.json") if (host := read_record(HostEvidence, path))]
    lines_by_rank = {
        rank.rank: [clean(line) for line in _rank_lines(host, rank)] for host in hosts for rank in host.ranks
    }
    return paths[-1].name, lines_by_rank


def _rank_lines(host: HostEvidence, rank: RankEvidence) -> Iterator[str]:
    """Yield all that was seen of a rank."""
    doing, calls = rank.doing, rank.waits_in or "no system call"
    yield (
        f"rank {rank.rank} on {host.host}: process {rank.pid}, state {rank.state or 'none'}, in {calls}"
        f" ({rank.kernel_wait or 'not in the kernel'}); in {format_duration(host.window_s)}: {doing.cpu_s:.2f} s of CPU, "
        f"{doing.waited_s:.2f} s waiting for one, {format_amount(doing.moved_bytes)}B moved, {doing.major_faults} page faults"
    )
    yield f"  stacks by {rank.source}" if rank.source else f"  no stacks: {rank.no_stacks or 'it has no process'}"
    for thread in rank.threads:
        marks = (" (main)" if thread.is_main else "") + (", holds the GIL" if thread.has_gil else "")
        yield f"  thread {thread.name}{marks}"
        for frame in thread.frames:
            native = f"{Path(frame.file).name}: {frame.function}"
            yield f"    {frame_words(frame) if frame.is_python else native}"
    yield from (f"  wrote: {line}" for line in rank.log)
