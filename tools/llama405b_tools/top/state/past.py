"""What was seen of a run before a moment, against which that moment is judged. Pure."""

import dataclasses

from llama405b_tools.run.judge import Failure
from llama405b_tools.top.state.levels import Level
from llama405b_tools.top.state.pace import Paces
from llama405b_tools.top.state.phases import PhaseTimes


@dataclasses.dataclass(frozen=True, slots=True)
class Past:
    """Filled by ``run_notes.remember`` at each moment; a new one for each run."""

    times: PhaseTimes = dataclasses.field(default_factory=PhaseTimes)
    paces: Paces = dataclasses.field(default_factory=Paces)
    power_w: Level = dataclasses.field(default_factory=Level)  # per GPU
    ib_bytes_per_s: Level = dataclasses.field(default_factory=Level)  # per host
    gone: dict[int, Failure] = dataclasses.field(default_factory=dict)  # by attempt, of the rank that was gone first
