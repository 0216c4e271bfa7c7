"""How a host's checkpoints get to the next one: what the trainer and the process that copies tell each other.

The hosts that have a directory of their own form a ring. A host's copies lie on the next one, in ``of-<host>/step-N`` in its
directory of checkpoints; a copy is complete once it has its manifest, which comes last.
"""

import dataclasses
from pathlib import Path

from llama405b.contract.checkpoints import MANIFEST, STEP_DIR

OF = "of-"  # what precedes the host's name


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a host takes copies: ``status/.HOST.spot``, which only its user can read."""

    attempt: int
    address: str  # on the training network
    port: int
    token: str


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """A host's place in the ring: ``status/.HOST.ring``, written by its first rank."""

    attempt: int
    before: str  # the host whose copies come here
    after: Endpoint  # where its own go
    root: str  # directory of checkpoints
    run: str  # whose checkpoints are copied
    keep: int  # of each host's newest
    step: int = 0  # what all hosts are to copy now; 0: nothing yet
    everywhere: int = 0  # the newest step of which every host has a copy on the next one


@dataclasses.dataclass(frozen=True, slots=True)
class Copied:
    """The newest step of which the next host has this host's part: ``status/HOST.copied``."""

    step: int = 0
    fault: str = ""  # why newer ones have not been copied yet
    attempt: int = 0


def replicas(root: Path, step: str) -> list[Path]:
    """Return the complete copies of other hosts' parts of a checkpoint, ``step-<8 digits>``."""
    return sorted(path for path in root.glob(f"{OF}*/{step}") if (path / MANIFEST).is_file())


def replicated_steps(root: Path) -> set[str]:
    """Return the names of the checkpoints of which there are complete copies."""
    return {path.parent.name for path in root.glob(f"{OF}*/step-*/{MANIFEST}") if STEP_DIR.fullmatch(path.parent.name)}
