"""Files that go from host to host. Pure."""

import dataclasses

LOOK = "look\n"  # what the hosts of a chain are told once all have left their mark


@dataclasses.dataclass(frozen=True, slots=True)
class RelayRequest:
    """Receive files into a directory, and pass them on."""

    to: str
    token: str
    host: str


@dataclasses.dataclass(frozen=True, slots=True)
class RelayReady:
    """Where the host listens; or why it cannot receive, now or ever."""

    port: int = 0
    addresses: tuple[str, ...] = ()
    fault: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class RelaySees:
    """The hosts whose marks stand in the directory: it is one with theirs."""

    sees: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class NextHop:
    """The host after this one."""

    addresses: tuple[str, ...]
    port: int
    token: str


@dataclasses.dataclass(frozen=True, slots=True)
class Hop:
    """Who comes next in the chain; None: nobody."""

    below: NextHop | None


@dataclasses.dataclass(frozen=True, slots=True)
class SendRequest:
    """Send files of this host to the first of a chain."""

    path: str
    below: NextHop


@dataclasses.dataclass(frozen=True, slots=True)
class RelayNews:
    """How far a host of the chain is."""

    done: int = 0  # bytes
    total: int = 0
    end: bool = False
    fault: str = ""
    own: bool = False  # the fault is this host's, and would be again
