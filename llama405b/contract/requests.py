"""What an operator asks of a run that trains: ``runs/<run>/requests/<id>.json``, a file each, written by the head's agent.

Rank 0 looks for new ones between steps, all ranks carry them out together, and an ``answered`` event says how it went.
To end a run is asked of each host's node runner instead (``records.StopMark``), which also can end what no longer steps.
"""

import dataclasses
import enum


class RequestKind(enum.StrEnum):
    """What is asked."""

    SAVE = "save"  # a checkpoint after this step
    PROFILE = "profile"  # the next ``steps`` steps, a trace for each rank
    MEMORY = "memory"  # what each rank's memory holds
    STACKS = "stacks"  # where every thread of each rank is


@dataclasses.dataclass(frozen=True, slots=True)
class RunRequest:
    """One thing asked of a run."""

    id: str  # of the file
    kind: RequestKind
    by: str  # user@machine
    time: float  # head's clock, seconds since the epoch
    steps: int = 1  # to profile
