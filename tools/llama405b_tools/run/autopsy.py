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
from llama405b.contract.errors import counted, given, short
from llama405b.contract.files import read_record, write_atomic
from llama405b.contract.paths import RunDir
from llama405b.contract.records import STUCK, Cause, CauseKind, Phase, said_by_rank
from llama405b.spec.plan import Plan
from llama405b_tools.agent.autopsy import EvidenceRequest, HostEvidence, Progress, RankEvidence
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.transport import replies, unanswered
from llama405b_tools.parsers import Frame, Thread, load_per_core
from llama405b_tools.run import judge
from llama405b_tools.run.judge import HANG_AFTER_S, SLOW_PHASES, Failure, origin_of
from llama405b_tools.run.screen import show
from llama405b_tools.text.figures import amount, span
from llama405b_tools.text.words import clean, fold_names, fold_ranks

COLLECTIVES = re.compile(r"/torch/distributed/(distributed_c10d|_functional_collectives|rendezvous)\.py$")
FSDP = re.compile(r"/torch/distributed/fsdp/")
WAITS = re.compile(r"\.wait\(|\.wait_|synchronize\(")
SYNCS = re.compile(r"synchronize\(|\.item\(|\.tolist\(|\.cpu\(|float\(all_reduce")
DEVICE_LIBRARY = re.compile(r"libcuda\.so|libnccl")
IDLE_FILES = (
    "/threading.py", "/queue.py", "/selectors.py", "/concurrent/futures/thread.py", "/concurrent/futures/_base.py",
    "/multiprocessing/connection.py", "/multiprocessing/queues.py", "/multiprocessing/popen_fork.py", "/socketserver.py",
)  # fmt: skip
OURS = re.compile(r"/llama405b/")
MODEL = re.compile(r"/torch/(nn/modules/module|autograd/graph)\.py$|/torch/distributed/fsdp/")
HELPERS = re.compile(r"/llama405b/(distributed|parallel)/")
LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python\d|^<frozen")


class Stand(enum.StrEnum):
    """What a rank does, or what keeps it from running."""

    GONE = "gone"  # it has no process
    STOPPED = "stopped"  # by a signal, or a zombie
    COLLECTIVE = "collective"  # it waits for other ranks
    DEVICE = "device"  # it waits for its GPU, which may wait for other ranks
    ELSEWHERE = "elsewhere"  # it does something else
    UNKNOWN = "unknown"  # nothing of it can be seen


@dataclasses.dataclass(frozen=True, slots=True)
class Position:
    """What one rank does, and where in its program."""

    host: str
    evidence: RankEvidence
    age_s: float | None  # since its last heartbeat, by its host's clock
    stand: Stand
    what: str = ""  # the collective
    frame: Frame | None = None  # the innermost call of the program's own
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
        where = f"{self.frame.file}:{self.frame.line}" if self.frame and self.stand is not Stand.COLLECTIVE else ""
        return self.stand, self.what or where, self.unit, self.step


def positions(hosts: Mapping[str, HostEvidence]) -> list[Position]:
    """Return the position of each rank, by rank."""
    found = [_position(host, rank) for host in hosts.values() for rank in host.ranks]
    return sorted(found, key=lambda position: position.rank)


def _position(host: HostEvidence, rank: RankEvidence) -> Position:
    age_s = host.now - rank.beat.time if rank.beat else None
    if not rank.pid:
        return Position(host.host, rank, age_s, Stand.GONE)
    main = rank.threads[0] if rank.threads else None
    stand, what, thread = _stand_of(rank)
    told = thread or main
    own = _own_frame(told.python if told else ())
    if rank.state in ("T", "t", "Z"):
        stand = Stand.STOPPED
    elif rank.state == "D":
        stand = Stand.ELSEWHERE
    in_model = any(MODEL.search(frame.file) for frame in rank.threads[0].python) if rank.threads else rank.place
    unit = rank.place.unit if rank.place and in_model else ""  # it stays after the backward
    return Position(
        host.host, rank, age_s, stand, what, own, thread.name if thread and thread is not main else "", unit
    )


def _stand_of(rank: RankEvidence) -> tuple[Stand, str, Thread | None]:
    """Return what a rank does, its collective, and the thread that shows it.

    If the main thread waits for another thread, that is the one that shows it.
    """
    if not rank.threads or not rank.threads[0].python:
        return Stand.UNKNOWN, "", None
    main, *others = rank.threads
    if found := _collective(main):
        holder = next((other for other in others if other.has_gil and other.python), None)
        return (Stand.ELSEWHERE, "", holder) if holder else (Stand.COLLECTIVE, found, main)
    if _waits_for_device(main):
        return Stand.DEVICE, "", main
    inner = main.python[0]
    if inner.function == "_engine_run_backward" or inner.file.endswith(IDLE_FILES):
        for other in others:  # a thread of autograd, or one of ours
            if found := _collective(other):
                return Stand.COLLECTIVE, found, other
        working = [other for other in others if other.python and not other.python[0].file.endswith(IDLE_FILES)]
        device = next((other for other in working if _waits_for_device(other)), None)
        if device:
            return Stand.DEVICE, "", device
        if working and inner.file.endswith(IDLE_FILES):
            return Stand.ELSEWHERE, "", working[0]
    return Stand.ELSEWHERE, "", main


def _collective(thread: Thread) -> str:
    """Return the collective that a thread waits in; "" if in none."""
    frames = thread.python
    if not frames:
        return ""
    inner = frames[0]
    waits = WAITS.search(inner.code) and (FSDP.search(inner.file) or HELPERS.search(inner.file))
    return inner.function if waits or COLLECTIVES.search(inner.file) else ""


def _waits_for_device(thread: Thread) -> bool:
    if any(DEVICE_LIBRARY.search(frame.file) for frame in thread.frames if not frame.is_python):
        return True
    return bool(thread.python) and bool(SYNCS.search(thread.python[0].code))


def _own_frame(frames: tuple[Frame, ...]) -> Frame | None:
    """Return the innermost call of the program's own: not of a library, and not where we only watch or wait."""
    own = [frame for frame in frames if OURS.search(frame.file) or not LIBRARY.search(frame.file)]
    apart = [frame for frame in own if not HELPERS.search(frame.file)]
    return next(iter([*apart, *own, *frames]), None)


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
    """Whether a run makes progress."""

    MOVES = "moves"  # nobody is to blame
    HANGS = "hangs"
    UNCLEAR = "unclear"  # whether it moves is not known: it is a program of the user's own, or too little is seen
    OVER = "over"  # no process is left


class Fault(enum.StrEnum):
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
class Group:
    """Ranks at the same place."""

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
    return Diagnosis(verdict, f"{why}{alike}; cannot tell which rank or link is at fault", groups)


def grouped(every: Iterable[Position]) -> tuple[Group, ...]:
    """Group the ranks that are at the same place, the largest group first."""
    found = collections.defaultdict[object, list[Position]](list)
    for position in every:
        found[position.key].append(position)
    return tuple(Group(tuple(each)) for each in sorted(found.values(), key=lambda each: (-len(each), each[0].rank)))


def pace_of(every: Sequence[Position], hosts: Mapping[str, HostEvidence], hang_after_s: float) -> tuple[Verdict, str]:
    """Return whether the run makes progress, and why."""
    told = [(position, position.age_s) for position in every if position.age_s is not None and position.evidence.pid]
    if not told:
        return Verdict.UNCLEAR, "its ranks report no steps"
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
        return Verdict.MOVES, f"making progress (phase {phase}): every rank advanced during the sample"
    if stands_s <= patience.odd_s:
        return Verdict.MOVES, f"making progress (phase {phase}): a rank last advanced {span(newest_s)} ago{usual}"
    if stands_s <= judge.LONG_SILENCE * patience.hang_s and (
        going := next((p for p, _ in told if _goes_on(p, hosts[p.host])), None)
    ):
        moved = _bytes(going.evidence.doing.moved_bytes)
        return (
            Verdict.MOVES,
            f"{silent}, but rank {going.rank} works: {moved} moved in the last {hosts[going.host].window_s:.1f} s",
        )
    if stands_s <= patience.hang_s:
        return Verdict.UNCLEAR, f"{silent}; it counts as a hang after {span(patience.hang_s)}"
    return Verdict.HANGS, silent


def _goes_on(position: Position, host: HostEvidence) -> bool:
    """Return whether a silent rank does slow work: reading, writing, computing before the first step."""
    if position.stand is not Stand.ELSEWHERE:
        return False
    doing, window_s = position.evidence.doing, max(host.window_s, 0.1)
    if position.frame and any(part in position.frame.file for part in READS) and doing.moved_bytes >= MOVES_BYTES:
        return True
    return position.phase in (*SLOW_PHASES, Phase.UPDATE) and doing.cpu_s >= BUSY * window_s


def _gone(every: Sequence[Position]) -> Culprit | None:
    """Return the ranks whose process is gone: one that logged why, or else all silent ones of a host."""
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
        f"{_ranks(same)} {verb} no process and logged no reason",
        _last_lines(first),
    )


def _stopped(every: Sequence[Position]) -> Culprit | None:
    stopped = [position for position in every if position.stand is Stand.STOPPED]
    if not stopped:
        return None
    why = STUCK.get(stopped[0].evidence.state.upper(), "it is stopped")
    return Culprit(
        Fault.STOPPED,
        *_places(stopped),
        f"{_ranks(stopped)} cannot continue: {why}{_others(every)}",
        _stack(stopped[0]),
    )


def _not_answered(lost: Mapping[str, str]) -> str:
    name, why = next(iter(lost.items()))
    return f"{fold_names(lost)} did not answer: {name}: {why}"


def _elsewhere(every: Sequence[Position], hosts: Mapping[str, HostEvidence], *, hangs: bool) -> Culprit | None:
    """Return ranks that do something else while others wait; of several, those that are furthest behind.

    Or all ranks, if they hang in one place.
    """
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
    """Return what a rank does instead of waiting with the others; ``several``: it is one of those that do."""
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
            f"cannot be inspected ({seen.no_stacks or 'no stacks'}) while the others wait",
        )
    is_, does = ("are", "do") if several else ("is", "does")
    return Fault.ELSEWHERE, f"{is_}{at}" if at else f"{does} something else"


def _throttled(every: Sequence[Position], hosts: Mapping[str, HostEvidence]) -> Culprit | None:
    """Return ranks that wait like the others, and whose control group keeps them from running.

    That stops the threads that carry their messages, too.
    """
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
    """Return the host whose link is down, or whose data, sent or received, is not acknowledged."""
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
                    f"rank {position.rank} on {position.host}: {_bytes(unsent.queued_bytes)} to {peer} are not acknowledged "
                    f"after {counted(unsent.retries, 'retry', 'retries')}"
                )
    if not votes:
        return None
    most = max(votes.values())
    found = tuple(sorted(name for name, n in votes.items() if n == most))
    between = f"the link between {' and '.join(found)}" if len(found) == 2 else f"the link of {fold_names(found)}"
    return Culprit(
        Fault.LINK, found, (), f"{between} passes no data{_others(every)}", tuple(dict.fromkeys(evidence))[:6]
    )


def _mismatch(every: Sequence[Position]) -> Culprit | None:
    """Return the ranks that wait in another collective than most; of two halves, the one that is behind."""
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
    """Return the diagnosis, with further evidence from the culprit's hosts."""
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
    """Return where most of the others wait, as a clause."""
    waiting = grouped(position for position in every if position.stand in (Stand.COLLECTIVE, Stand.DEVICE))
    if not waiting:
        return ""
    n_more = sum(len(group.positions) for group in waiting[1:])
    more = f", {n_more} elsewhere" if n_more else ""
    return f"; {counted(len(waiting[0].positions), 'rank')} {group_words(waiting[0])}{more}"


def group_words(group: Group) -> str:
    """Return where a group is: ``wait in all_gather_single of layers.71 backward, step 4711``."""
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
        return f"cannot be inspected ({first.evidence.no_stacks or 'no stacks'})"
    return f"in {frame_words(first.frame)}{within}"


def frame_words(frame: Frame) -> str:
    """Return a call as ``data/documents.py:88 (rows): the line``."""
    place = "/".join(frame.file.rsplit("/", 2)[-2:])
    code = frame.code.partition("  #")[0].rstrip()  # without a comment behind it
    return f"{place}:{frame.line} ({frame.function}){given(': {}', short(code, MOST_CODE))}"


def _stack(position: Position) -> tuple[str, ...]:
    """Return the innermost calls of the thread that shows what a rank does."""
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


ANSWER_S, MOST_ANSWER_S = 9.0, 60.0  # for a host to answer, times its load per core
LOAD = "cat /proc/loadavg; grep -c ^processor /proc/cpuinfo"
SHOWN_GROUPS = 12
REPORT = "report.txt"  # written last
FINDING = 240  # characters in an incident


@dataclasses.dataclass(frozen=True, slots=True)
class Autopsy:
    """What the hosts saw, and what it means."""

    run: str
    attempt: int
    hosts: dict[str, HostEvidence]
    lost: dict[str, str]  # hosts that did not answer, and why
    diagnosis: Diagnosis
    took_s: float

    @property
    def line(self) -> str:
        """The finding in one line."""
        return clean(f"{self.diagnosis.verdict.upper()}  {self.diagnosis.words}")

    def report(self) -> list[str]:
        """Return the report for people, as lines."""
        found, ranks = self.diagnosis, [rank for host in self.hosts.values() for rank in host.ranks]
        lines = [
            f"run {self.run}, attempt {self.attempt}: {counted(len(ranks), 'rank')} on {counted(len(self.hosts), 'host')}, "
            f"seen in {self.took_s:.1f} s",
            self.line,
        ]
        lines += [f"  {line}" for line in (found.culprit.evidence if found.culprit else ())]
        lines += ["where the ranks are"]
        lines += [f"  {fold_ranks(group.ranks)}: {group_words(group)}" for group in found.groups[:SHOWN_GROUPS]]
        if len(found.groups) > SHOWN_GROUPS:
            lines.append(f"  and {counted(len(found.groups) - SHOWN_GROUPS, 'more place', 'more places')}")
        lines += [f"{name} did not answer: {why}" for name, why in self.lost.items()]
        lines += [
            f"{name}: NCCL's flight recorder wrote {path}"
            for name, host in self.hosts.items()
            for path in host.around.flight_records
        ]
        return [clean(line) for line in lines]


def take_autopsy(fleet: Fleet, plan: Plan, hang_after_s: float = HANG_AFTER_S) -> Autopsy:
    """Examine every rank of a run; hosts that do not answer are named."""
    began = time.monotonic()
    requests = {node.name: EvidenceRequest(plan.run, node.name) for node in plan.nodes if node.name in fleet.hosts}

    def look(name: str) -> HostEvidence:
        load = load_per_core(fleet.connection(name).run(LOAD, "", ANSWER_S).out)
        wait_s = min(MOST_ANSWER_S, ANSWER_S * max(1.0, load))
        return fleet.ask(name, "evidence", requests[name], HostEvidence, wait_s)

    outcomes = fleet.each(look, requests)
    hosts, lost = replies(outcomes), unanswered(outcomes)
    return Autopsy(plan.run, plan.attempt, hosts, lost, diagnose(hosts, lost, hang_after_s), time.monotonic() - began)


def keep_autopsy(autopsy: Autopsy) -> Path | None:
    """Write an autopsy below the run's directory here; return where, or None if it cannot be written."""
    place = RunDir.here(autopsy.run).autopsies / time.strftime("%Y%m%d-%H%M%S")
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True, mode=0o700)  # it has lines of logs
        lines = [line for host in autopsy.hosts.values() for rank in host.ranks for line in _rank_lines(host, rank)]
        write_atomic(place / "stacks.txt", "\n".join([*lines, ""]))
        for name, host in autopsy.hosts.items():
            write_atomic(place / f"{name}.json", reader.dumps(host) + "\n")
            if host.around.nccl:
                write_atomic(place / f"{name}.nccl-ras.txt", host.around.nccl)
        write_atomic(place / REPORT, "\n".join([*autopsy.report(), ""]))
        return place
    return None


def examined(fleet: Fleet, plan: Plan, failure: Failure, hang_after_s: float) -> Failure:
    """Take and save an autopsy of an attempt about to be ended; return its failure, a hang with its culprit.

    ``hang_after_s``: the limit of who ends it.

    If the autopsy fails, the failure is returned unchanged: a run waits to be restarted.
    """
    try:
        autopsy = take_autopsy(fleet, plan, hang_after_s)
        place = keep_autopsy(autopsy)
    except Exception as error:  # noqa: BLE001
        show(f"autopsy failed: {type(error).__name__}: {error}")
        return failure
    show(f"autopsy: {autopsy.line}{given('; full report in {}', str(place or ''))}")
    culprit = autopsy.diagnosis.culprit
    if failure.cause.kind is not CauseKind.HUNG or culprit is None or not culprit.hosts:
        return failure
    host, rank = culprit.hosts[0], next(iter(culprit.ranks), failure.cause.rank)
    finding, ranks = short(culprit.words, FINDING), autopsy.hosts[host].ranks if host in autopsy.hosts else ()
    gpu = next((each.beat.gpu for each in ranks if each.rank == rank and each.beat), "")
    cause = dataclasses.replace(failure.cause, host=host, rank=rank, finding=finding, gpu=gpu)
    return dataclasses.replace(failure, host=host, cause=cause)


def last_stacks(run: str) -> tuple[str, dict[int, list[str]]]:
    """Return the time of the last autopsy that is kept here, and the lines about each rank; or "" and {}."""
    kept = [path for path in sorted(RunDir.here(run).autopsies.glob("*")) if (path / REPORT).exists()]
    if not kept:
        return "", {}
    hosts = [host for path in kept[-1].glob("*.json") if (host := read_record(HostEvidence, path))]
    found = {rank.rank: [clean(line) for line in _rank_lines(host, rank)] for host in hosts for rank in host.ranks}
    return kept[-1].name, found


def _rank_lines(host: HostEvidence, rank: RankEvidence) -> Iterator[str]:
    """Yield all that was seen of a rank."""
    doing, calls = rank.doing, rank.waits_in or "no system call"
    yield (
        f"rank {rank.rank} on {host.host}: process {rank.pid}, state {rank.state or 'none'}, in {calls}"
        f" ({rank.kernel_wait or 'not in the kernel'}); in {span(host.window_s)}: {doing.cpu_s:.2f} s of CPU, "
        f"{doing.waited_s:.2f} s waiting for one, {amount(doing.moved_bytes)}B moved, {doing.major_faults} page faults"
    )
    yield f"  stacks by {rank.source}" if rank.source else f"  no stacks: {rank.no_stacks or 'it has no process'}"
    for thread in rank.threads:
        marks = (" (main)" if thread.is_main else "") + (", holds the GIL" if thread.has_gil else "")
        yield f"  thread {thread.name}{marks}"
        for frame in thread.frames:
            native = f"{Path(frame.file).name}: {frame.function}"
            yield f"    {frame_words(frame) if frame.is_python else native}"
    yield from (f"  wrote: {line}" for line in rank.log)
