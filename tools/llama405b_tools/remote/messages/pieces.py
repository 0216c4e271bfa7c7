"""What of a run's checkpoints is on a host. Pure."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class PiecesRequest:
    """List what is needed to export a run's checkpoints, and is here."""

    run: str


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A directory with files of a checkpoint: the host's own part, or its copy of another's."""

    step: int
    digest: str  # of the manifest: equal for all parts of one checkpoint
    path: str
    here: tuple[str, ...]  # files with weights, or about them, that are complete
    needed: tuple[str, ...]  # all of them


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """What is on a host."""

    root: str  # directory of the run's checkpoints; "": it has none here
    found: tuple[Piece, ...] = ()
