"""Messages for copying files from host to host, and for finding what of a run's checkpoints is where. Pure."""

import dataclasses

from llama405b.contract.parts import Part

LOOK = "look\n"  # sent to the hosts of a chain once all have left their marks


@dataclasses.dataclass(frozen=True, slots=True)
class RelayRequest:
    """Receive files into a directory, and pass them on."""

    to: str
    token: str
    host: str


@dataclasses.dataclass(frozen=True, slots=True)
class RelayReady:
    """Where the host listens, or why it cannot receive."""

    port: int = 0
    addresses: tuple[str, ...] = ()
    fault: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class RelaySees:
    """The hosts whose marks are in the directory: they share it."""

    sees: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class NextHop:
    """The host after this one."""

    addresses: tuple[str, ...]
    port: int
    token: str


@dataclasses.dataclass(frozen=True, slots=True)
class Hop:
    """The next host of the chain; None at its end."""

    below: NextHop | None


@dataclasses.dataclass(frozen=True, slots=True)
class SendRequest:
    """Send files of this host to the first host of a chain."""

    path: str
    below: NextHop
    part: Part | None = None  # of the checkpoint there; None: all of it
    names: tuple[str, ...] = ()  # of the files there; (): all


@dataclasses.dataclass(frozen=True, slots=True)
class RelayProgress:
    """The progress of a host of the chain."""

    done: int = 0  # bytes
    total: int = 0
    end: bool = False
    fault: str = ""
    own: bool = False  # the fault is this host's, and would recur


@dataclasses.dataclass(frozen=True, slots=True)
class PartsRequest:
    """List what is needed to export a run's checkpoints, and is here."""

    run: str


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointPart:
    """A directory with files of a checkpoint: the host's own part, or its copy of another's."""

    step: int
    digest: str  # of the manifest: equal for all parts of one checkpoint
    path: str
    here: tuple[str, ...]  # files with weights, or about them, that are complete
    needed: tuple[str, ...]  # all of them


@dataclasses.dataclass(frozen=True, slots=True)
class PartsReply:
    """What is on a host."""

    root: str  # directory of the run's checkpoints; "": it has none here
    parts: tuple[CheckpointPart, ...] = ()
