"""What a guard tells the hosts of its run. Pure."""

import dataclasses

from llama405b.contract.records import GuardState


@dataclasses.dataclass(frozen=True, slots=True)
class GuardNote:
    """What the guard of a run does now; until the next note, it is known to have lived when this one came."""

    run: str
    host: str
    only: str  # the rendezvous id of the launch that it guards; a later one's guard, if any, is another
    state: GuardState


@dataclasses.dataclass(frozen=True, slots=True)
class MachineRequest:
    """Ask which machine the host is."""


@dataclasses.dataclass(frozen=True, slots=True)
class MachineName:
    """The machine, as ``guarding.machine_id`` names it."""

    machine: str


@dataclasses.dataclass(frozen=True, slots=True)
class Disk:
    """One that the run writes to."""

    path: str
    free_bytes: int
    total_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class NoteReply:
    """The host has taken the note."""

    disks: tuple[Disk, ...] = ()  # the host's, or those that it shares
