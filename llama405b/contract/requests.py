"""An operator's requests to a training run: one file each, ``runs/<run>/requests/<id>.json``, written by the head's agent.

Rank 0 looks for new ones between steps, all ranks carry them out together, and an ``answered`` event reports the result.
Requests to stop go to each host's node runner instead (``records.StopMark``), which can also end a run that hangs.
"""

import dataclasses
import enum


class RequestKind(enum.StrEnum):
    """What is requested."""

    SAVE = "save"  # a checkpoint after this step
    PROFILE = "profile"  # the next ``steps`` steps, a trace for each rank
    MEMORY = "memory"  # what each rank's memory holds
    STACKS = "stacks"  # the stack of every thread of each rank


@dataclasses.dataclass(frozen=True, slots=True)
class RunRequest:
    """One request to a run."""

    id: str  # also the file's name
    kind: RequestKind
    by: str  # user@machine
    time: float  # head's clock, seconds since the epoch
    steps: int = 1  # to profile
