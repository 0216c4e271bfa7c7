"""Messages for copying files from host to host. Pure."""

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
class RelayNews:
    """The progress of a host of the chain."""

    done: int = 0  # bytes
    total: int = 0
    end: bool = False
    fault: str = ""
    own: bool = False  # the fault is this host's, and would recur
