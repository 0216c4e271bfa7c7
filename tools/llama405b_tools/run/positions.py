"""Where each rank stands, from what its host saw of it: in which collective, or in what else. Pure."""

import dataclasses
import enum
import re
from collections.abc import Mapping

from llama405b.contract.records import Phase
from llama405b_tools.machine.stacks import Frame, Thread
from llama405b_tools.remote.messages.autopsy import HostEvidence, RankEvidence

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
    """What keeps a rank where it is."""

    GONE = "gone"  # it has no process
    STOPPED = "stopped"  # by a signal, or a zombie
    COLLECTIVE = "collective"  # it waits for other ranks
    DEVICE = "device"  # it waits for its GPU, which may wait for other ranks
    ELSEWHERE = "elsewhere"  # it does something else
    UNKNOWN = "unknown"  # nothing of it can be seen


@dataclasses.dataclass(frozen=True, slots=True)
class Position:
    """Where one rank stands."""

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
        """Which phase its last heartbeat told."""
        return self.evidence.beat.phase if self.evidence.beat else None

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Alike for those that stand at the same place."""
        where = f"{self.frame.file}:{self.frame.line}" if self.frame and self.stand is not Stand.COLLECTIVE else ""
        return self.stand, self.what or where, self.unit, self.step


def positions(hosts: Mapping[str, HostEvidence]) -> list[Position]:
    """Return where each rank stands, by rank."""
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
    """Return what keeps it, the collective, and the thread that tells: the one that holds it up, if the main one waits for it."""
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
