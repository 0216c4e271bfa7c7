"""Who holds up a run, from what all its hosts saw at one moment. Pure.

A rank that does something else while others wait in a collective holds them up; if all wait, the one that waits elsewhere than most;
if all wait in the same place, the network. Nobody is blamed while the run moves.
"""

import collections
import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence

from llama405b.contract.causes import STUCK, Cause, CauseKind, said_by_rank
from llama405b.contract.phrases import counted, given, short
from llama405b.contract.records import Phase
from llama405b_tools.machine.stacks import Frame
from llama405b_tools.remote.messages.autopsy import HostEvidence, Progress
from llama405b_tools.run import judge
from llama405b_tools.run.judge import SLOW_PHASES, origin_of
from llama405b_tools.run.positions import Position, Stand, positions
from llama405b_tools.text.figures import amount, span
from llama405b_tools.text.fold import fold_names, fold_ranks

MOVES_BYTES, BUSY = 64 << 10, 0.5  # in the window; of a core
STARVED, RUNS = 0.5, 0.1  # of the window: that it waited for a core, and had one
FAULTS_PER_S = 200.0  # page faults that wait for a disk
MOST_CODE = 100  # characters of a line of a stack
SILENT_END = Cause(CauseKind.UNKNOWN)
READS = (
    "/llama405b/data/",
    "/llama405b/checkpoint/",
    "/llama405b/parallel/load_weights.py",
)  # where bytes that move are progress
FILE_CALLS = frozenset({
    "read", "write", "pread64", "pwrite64", "readv", "writev", "fsync", "fdatasync", "syncfs", "flock", "ioctl", "open",
    "openat", "close", "rename", "unlink", "statx", "newfstatat",
})  # fmt: skip


class Verdict(enum.StrEnum):
    """What is to be said of a run."""

    MOVES = "moves"  # nobody is to blame
    HANGS = "hangs"
    UNCLEAR = "unclear"  # whether it moves is not known: it is a program of the user's own, or too little is seen
    OVER = "over"  # no process is left


class Fault(enum.StrEnum):
    """What kind of thing holds it up."""

    HOST_LOST = "host lost"
    RANK_GONE = "rank gone"
    STOPPED = "stopped"
    BLOCKED = "blocked"  # in the kernel: a disk, a driver, a pipe
    STARVED = "starved"  # of a core, or of memory
    ELSEWHERE = "elsewhere"  # the rank does something else than the others
    MISMATCH = "mismatch"  # it waits in another collective than the others
    LINK = "link"


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Ranks that stand at the same place."""

    positions: tuple[Position, ...]

    @property
    def first(self) -> Position:
        """One of them."""
        return self.positions[0]

    @property
    def ranks(self) -> list[int]:
        """Their numbers."""
        return [position.rank for position in self.positions]


@dataclasses.dataclass(frozen=True, slots=True)
class Culprit:
    """What holds up a run."""

    fault: Fault
    hosts: tuple[str, ...]
    ranks: tuple[int, ...]  # () if it is no rank in particular
    words: str
    evidence: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """Who holds up a run."""

    verdict: Verdict
    words: str  # one sentence
    groups: tuple[Group, ...] = ()
    culprit: Culprit | None = None


def diagnose(
    hosts: Mapping[str, HostEvidence], lost: Mapping[str, str], hang_after_s: float = judge.HANG_AFTER_S
) -> Diagnosis:
    """Return who holds up the run. ``lost``: hosts that did not answer, and why; ``hang_after_s``: as cluster-top's."""
    every = positions(hosts)
    groups = grouped(every)
    if lost and not hosts:
        return Diagnosis(Verdict.UNCLEAR, f"no host of the run answered; {_not_answered(lost)}")
    if not lost and not any(position.evidence.pid for position in every):
        over = Diagnosis(Verdict.OVER, "no process of the run is left on any host", groups)
        return _blamed(Verdict.OVER, culprit, hosts, groups) if (culprit := _gone(every)) else over
    verdict, why = pace_of(every, hosts, hang_after_s)
    if culprit := _gone(every) or _stopped(every):
        return _blamed(Verdict.HANGS, culprit, hosts, groups)
    if verdict is Verdict.MOVES:
        lacking = given("; {} did not answer", fold_names(lost))
        lacking += given(
            "; not saved: {}", next((host.progress.unsaved for host in hosts.values() if host.progress.unsaved), "")
        )
        return Diagnosis(verdict, f"{why}{lacking}", groups)
    culprit = _elsewhere(every, hosts, hangs=verdict is Verdict.HANGS)
    if verdict is Verdict.HANGS and lost:  # which may have much to do, and be well
        verdict, culprit = Verdict.UNCLEAR, Culprit(Fault.HOST_LOST, tuple(lost), (), _not_answered(lost))
    elif verdict is Verdict.HANGS:
        culprit = culprit or _throttled(every, hosts) or _link(every, hosts) or _mismatch(every)
    if culprit:
        blamed = _blamed(verdict, culprit, hosts, groups)
        return blamed if verdict is Verdict.HANGS else dataclasses.replace(blamed, words=f"{blamed.words}; {why}")
    alike = f"; all {counted(len(every), 'rank')} {group_words(groups[0])}" if len(groups) == 1 else ""
    return Diagnosis(verdict, f"{why}{alike}; nothing tells which rank or link is at fault", groups)


def grouped(every: Iterable[Position]) -> tuple[Group, ...]:
    """Return the ranks that stand at the same place together, the largest group first."""
    found = collections.defaultdict[object, list[Position]](list)
    for position in every:
        found[position.key].append(position)
    return tuple(Group(tuple(each)) for each in sorted(found.values(), key=lambda each: (-len(each), each[0].rank)))


def pace_of(every: Sequence[Position], hosts: Mapping[str, HostEvidence], hang_after_s: float) -> tuple[Verdict, str]:
    """Return whether the run moves, and why that is thought."""
    told = [(position, position.age_s) for position in every if position.age_s is not None and position.evidence.pid]
    if not told:
        return Verdict.UNCLEAR, "its ranks tell nothing of their steps"
    progress = next((host.progress for host in hosts.values() if host.progress != Progress()), Progress())
    newest_s = min(age_s for _, age_s in told)
    phase = next((position.phase for position, _ in told if position.phase in SLOW_PHASES), told[0][0].phase)
    if phase in SLOW_PHASES:
        usual_s = progress.usual_save_s if phase is Phase.CHECKPOINT else None
        patience, is_still = judge.in_phase(usual_s), newest_s >= max(hang_after_s, usual_s or 0.0)
        beats = [(hosts[position.host].now, beat) for position, _ in told if (beat := position.evidence.beat)]
        stands_s = max(now - beat.phase_since for now, beat in beats if beat.phase is phase) if is_still else 0.0
    else:
        first = judge.first_step(progress.load_s)
        patience = judge.between_steps(progress.usual_step_s, hang_after_s) if progress.usual_step_s else first
        stands_s = newest_s
    usual = given(", usually {}", span(progress.usual_step_s)) if progress.usual_step_s and phase is Phase.TRAIN else ""
    silent = f"no rank has moved for {span(newest_s)} (phase {phase}{usual})"
    if stands_s <= patience.odd_s and all(position.evidence.moved for position, _ in told):
        return Verdict.MOVES, f"it goes on: phase {phase}, every rank moved while it was looked at"
    if stands_s <= patience.odd_s:
        return Verdict.MOVES, f"it goes on: phase {phase}, a rank last moved {span(newest_s)} ago{usual}"
    if stands_s <= judge.LONG_SILENCE * patience.hang_s and (
        going := next((p for p, _ in told if _goes_on(p, hosts[p.host])), None)
    ):
        moved = _bytes(going.evidence.doing.moved_bytes)
        return (
            Verdict.MOVES,
            f"{silent}, but rank {going.rank} works: {moved} moved in the last {hosts[going.host].window_s:.1f} s",
        )
    if stands_s <= patience.hang_s:
        return Verdict.UNCLEAR, f"{silent}, which is no hang before {span(patience.hang_s)}"
    return Verdict.HANGS, silent


def _goes_on(position: Position, host: HostEvidence) -> bool:
    """Whether a silent rank does what takes its time: reading, writing, computing before the first step."""
    if position.stand is not Stand.ELSEWHERE:
        return False
    doing, window_s = position.evidence.doing, max(host.window_s, 0.1)
    if position.frame and any(part in position.frame.file for part in READS) and doing.moved_bytes >= MOVES_BYTES:
        return True
    return position.phase in (*SLOW_PHASES, Phase.UPDATE) and doing.cpu_s >= BUSY * window_s


def _gone(every: Sequence[Position]) -> Culprit | None:
    """A rank that was there in this attempt, and has no process any more; of several, one that told why, or died without a word."""
    gone = [
        position
        for position in every
        if position.stand is Stand.GONE and position.evidence.beat and position.phase is not Phase.DONE
    ]
    if not gone:
        return None
    told = {position.rank: position.evidence.beat.cause for position in gone if position.evidence.beat}
    first = max(gone, key=lambda position: origin_of(told[position.rank] or SILENT_END))
    if cause := told[first.rank]:
        said = f"rank {first.rank} ended: {said_by_rank(cause)}"
        return Culprit(Fault.RANK_GONE, *_places([first]), said, _last_lines(first))
    same = [position for position in gone if position.host == first.host and told[position.rank] is None]
    verb = "has" if len(same) == 1 else "have"
    return Culprit(
        Fault.RANK_GONE,
        *_places(same),
        f"{_ranks(same)} {verb} no process any more, and left no word",
        _last_lines(first),
    )


def _stopped(every: Sequence[Position]) -> Culprit | None:
    stopped = [position for position in every if position.stand is Stand.STOPPED]
    if not stopped:
        return None
    why = STUCK.get(stopped[0].evidence.state.upper(), "it is stopped")
    return Culprit(
        Fault.STOPPED, *_places(stopped), f"{_ranks(stopped)} cannot go on: {why}{_others(every)}", _stack(stopped[0])
    )


def _not_answered(lost: Mapping[str, str]) -> str:
    name, why = next(iter(lost.items()))
    return f"{fold_names(lost)} did not answer: {name}: {why}"


def _elsewhere(every: Sequence[Position], hosts: Mapping[str, HostEvidence], *, hangs: bool) -> Culprit | None:
    """Ranks that do something else while others wait; of several, those that are furthest behind. Or all, if they hang in one place."""
    others = [position for position in every if position.stand in (Stand.ELSEWHERE, Stand.UNKNOWN)]
    alone = len(others) < len(every) or len(every) == 1
    if not others or not (alone or (hangs and len({position.key for position in others}) == 1)):
        return None
    known = [position for position in others if position.stand is Stand.ELSEWHERE] or others
    behind = min(position.step for position in known)
    last = [position for position in known if position.step == behind]
    first = next((position for position in last if _is_blocked(position)), last[0])
    same = [position for position in last if position.key == first.key]
    fault, doing = _doing_words(first, hosts[first.host], several=len(same) > 1)
    return Culprit(
        fault, *_places(same), f"{_ranks(same)} {doing}{_others(every)}", (*_stack(first), *_last_lines(first))
    )


def _is_blocked(position: Position) -> bool:
    return position.evidence.state == "D" or position.evidence.waits_in.partition(" ")[0] in FILE_CALLS


def _doing_words(position: Position, host: HostEvidence, *, several: bool) -> tuple[Fault, str]:
    """Say what a rank does instead of waiting with the others; ``several``: it is one of those that do."""
    waits = "wait" if several else "waits"
    seen, window_s = position.evidence, max(host.window_s, 0.1)
    at = f" in {frame_words(position.frame)}" if position.frame else ""
    if position.thread:
        at = f"{at} (thread {position.thread})"
    if seen.doing.major_faults > FAULTS_PER_S * window_s:
        swap = given(", {} of it is in swap", _bytes(seen.swapped_bytes) if seen.swapped_bytes else "")
        return (
            Fault.STARVED,
            f"{waits} for memory: {seen.doing.major_faults / window_s:,.0f} page faults a second{swap}{at}",
        )
    if _is_blocked(position):
        call = seen.waits_in or seen.kernel_wait or "the kernel"
        return Fault.BLOCKED, f"{waits} in {call}{given(', state {}', 'D' if seen.state == 'D' else '')}{at}"
    if seen.doing.waited_s > STARVED * window_s and seen.doing.cpu_s < RUNS * window_s:
        return Fault.STARVED, f"{waits} for a core: it got {seen.doing.cpu_s:.2f} s of one in {window_s:.1f} s{at}"
    if position.stand is Stand.UNKNOWN:
        return (
            Fault.ELSEWHERE,
            f"cannot be looked into ({seen.no_stacks or 'no stacks'}), while the others wait",
        )
    is_, does = ("are", "do") if several else ("is", "does")
    return Fault.ELSEWHERE, f"{is_}{at}" if at else f"{does} something else"


def _throttled(every: Sequence[Position], hosts: Mapping[str, HostEvidence]) -> Culprit | None:
    """Ranks that wait as the others do, and whose control group keeps them, and the threads that carry their messages, from running."""
    shares = {
        position.rank: position.evidence.doing.throttled_s / max(hosts[position.host].window_s, 0.1)
        for position in every
    }
    found = [position for position in every if shares[position.rank] > STARVED]
    if not found:
        return None
    gets, whose = ("gets", "its") if len(found) == 1 else ("get", "their")
    share = min(1.0, shares[found[0].rank])
    said = f"{_ranks(found)} {gets} no core: {whose} control group was out of its share {share:.0%} of the time"
    return Culprit(Fault.STARVED, *_places(found), f"{said}{_others(every)}", _stack(found[0]))


def _link(every: Sequence[Position], hosts: Mapping[str, HostEvidence]) -> Culprit | None:
    """The host whose link is down, or to and from which what is sent is not confirmed."""
    down = [name for name, host in hosts.items() if host.around.link_up is False]
    if down:
        what = ", ".join(f"{hosts[name].interface} of {name}" for name in down)
        return Culprit(Fault.LINK, tuple(down), (), f"the link is down: {what}{_others(every)}")
    names = {host.address: name for name, host in hosts.items()}
    votes: collections.Counter[str] = collections.Counter()
    evidence = []
    for position in every:
        for unsent in position.evidence.unsent:
            peer = names.get(unsent.peer, unsent.peer)
            if peer != position.host:
                votes.update((peer, position.host))
                evidence.append(
                    f"rank {position.rank} on {position.host}: {_bytes(unsent.queued_bytes)} to {peer} are not confirmed "
                    f"after {counted(unsent.retries, 'retry', 'retries')}"
                )
    if not votes:
        return None
    most = max(votes.values())
    found = tuple(sorted(name for name, n in votes.items() if n == most))
    between = f"the link between {' and '.join(found)}" if len(found) == 2 else f"the link of {fold_names(found)}"
    return Culprit(
        Fault.LINK, found, (), f"{between} passes nothing{_others(every)}", tuple(dict.fromkeys(evidence))[:6]
    )


def _mismatch(every: Sequence[Position]) -> Culprit | None:
    """Those that wait in another collective than most; of two halves, the one that is behind."""
    waiting = [position for position in every if position.stand is Stand.COLLECTIVE]
    groups = grouped(waiting)
    if len(groups) < 2:
        return None
    odd = min(groups, key=lambda group: (len(group.positions), group.first.step))
    most = groups[0] if groups[0] is not odd else groups[1]
    said = f"{_ranks(odd.positions)} {group_words(odd)}; {_ranks(most.positions)} {group_words(most)}"
    return Culprit(Fault.MISMATCH, *_places(odd.positions), said, _stack(odd.first))


def _blamed(
    verdict: Verdict, culprit: Culprit, hosts: Mapping[str, HostEvidence], groups: tuple[Group, ...]
) -> Diagnosis:
    """Return the diagnosis, with what the culprit's hosts say besides."""
    besides = []
    for name in culprit.hosts:
        if host := hosts.get(name):
            besides += [
                f"{name}: the disk at {disk.path} does not answer" for disk in host.around.disks if not disk.answers
            ]
            besides += [
                f"{name}: the disk at {disk.path} is full"
                for disk in host.around.disks
                if disk.answers and disk.free_bytes == 0
            ]
            besides += [f"{name}, kernel, {line}" for line in (host.around.kernel or ())[-4:]]
    whole = dataclasses.replace(culprit, evidence=(*culprit.evidence, *besides))
    return Diagnosis(verdict, f"{fold_names(culprit.hosts)}: {culprit.words}", groups, whole)


def _bytes(n: int) -> str:
    return f"{amount(n)}B"


def _places(found: Iterable[Position]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    each = list(found)
    return tuple(dict.fromkeys(position.host for position in each)), tuple(position.rank for position in each)


def _ranks(found: Sequence[Position]) -> str:
    return fold_ranks([position.rank for position in found])


def _others(every: Sequence[Position]) -> str:
    """Say where most of the others wait."""
    waiting = grouped(position for position in every if position.stand in (Stand.COLLECTIVE, Stand.DEVICE))
    if not waiting:
        return ""
    n_more = sum(len(group.positions) for group in waiting[1:])
    more = f", {n_more} elsewhere" if n_more else ""
    return f"; {counted(len(waiting[0].positions), 'rank')} {group_words(waiting[0])}{more}"


def group_words(group: Group) -> str:
    """Say where a group stands: ``wait in all_gather_single of layers.71 backward, step 4711``."""
    first, verb = group.first, "waits" if len(group.positions) == 1 else "wait"
    step = given(", step {}", first.step)
    at, within = given(" of {}", first.unit) + step, given(", in {}", first.unit) + step
    if first.stand is Stand.COLLECTIVE:
        return f"{verb} in {first.what}{at}"
    if first.stand is Stand.DEVICE:
        return f"{verb} for the GPU{at}{given(', in {}', frame_words(first.frame) if first.frame else '')}"
    if first.stand is Stand.GONE:
        return "has no process" if verb == "waits" else "have no process"
    if first.stand is Stand.STOPPED:
        return f"stopped (state {first.evidence.state}){within}"
    if first.frame is None:
        return f"cannot be looked into ({first.evidence.no_stacks or 'no stacks'})"
    return f"in {frame_words(first.frame)}{within}"


def frame_words(frame: Frame) -> str:
    """Write a call as ``data/tables.py:88 (rows): the line``."""
    place = "/".join(frame.file.rsplit("/", 2)[-2:])
    code = frame.code.partition("  #")[0].rstrip()  # without a comment behind it
    return f"{place}:{frame.line} ({frame.function}){given(': {}', short(code, MOST_CODE))}"


def _stack(position: Position) -> tuple[str, ...]:
    """Return the innermost calls of the thread that was looked at."""
    threads = position.evidence.threads
    thread = next((each for each in threads if each.name == position.thread), threads[0] if threads else None)
    if thread is None:
        return ()
    native = [
        frame.function for frame in thread.frames[: len(thread.frames) - len(thread.python)] if not frame.is_python
    ]
    calls = [*native[:2], *(frame_words(frame) for frame in thread.python[:3])]
    return (f"rank {position.rank}, innermost first: {' < '.join(calls)}",)


def _last_lines(position: Position) -> tuple[str, ...]:
    return tuple(f"rank {position.rank} wrote: {line}" for line in position.evidence.log[-3:])
