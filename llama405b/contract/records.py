"""Records in a run's files: one dataclass per kind. Knows meanings and units, not files.

Times are seconds since the epoch by the writer's clock; clocks may differ between hosts.
"""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, TypeAlias

from llama405b.contract.causes import Cause
from llama405b.contract.reader import LINES, FirstOf


class NodeState(enum.StrEnum):
    """State of torchrun on a host."""

    STARTING = "starting"
    RUNNING = "running"
    EXITED = "exited"
    KILLED = "killed"
    STOPPED = "stopped"  # on request


class Phase(enum.StrEnum):
    """What a rank is doing."""

    START = "start"
    DATA = "data"
    LOAD = "load"
    PIN = "pin"  # CPU memory, for copies to and from a GPU
    RESUME = "resume"
    TRAIN = "train"
    UPDATE = "update"  # waiting unusually long for a hidden update of the weights
    CHECKPOINT = "checkpoint"
    EVAL = "eval"
    DONE = "done"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True)
class NodeStatus:
    """State of torchrun on one host, as its node runner saw it."""

    host: str
    state: NodeState
    attempt: int  # 1, 2, …: counts launches of this run
    pid: int  # of the node runner
    pid_start: int  # its start time in clock ticks since boot: a pid alone can be reused
    exit_code: int | None = None  # of torchrun, if it exited
    signal: int | None = None  # the one that killed it, if killed
    cause: Cause | None = None  # if it did not end well
    time: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Blame:
    """Why an attempt failed, as decided once, by whoever ended it."""

    attempt: int
    host: str  # where it began
    cause: Cause
    time: float = 0.0  # when, as that host's node runner saw it, by the clock of the run's head; 0: unknown


@dataclasses.dataclass(frozen=True, slots=True)
class Heartbeat:
    """Where one rank is; written at most once per second, from the start of loading on."""

    rank: int
    host: str
    pid: int
    time: float
    step: int
    phase: Phase
    phase_since: float
    done_bytes: int = 0  # of the text to tokenize, then of the tokens to receive, then of the weights to load
    total_bytes: int = 0
    cause: Cause | None = None  # why it failed, and in which phase
    data_s: float | None = None  # this rank's wait for its batch in the last step
    optimizer_s: float | None = None  # clipping and the update, in the last step
    # its own computing in the forward and backward of the last step, without waiting for others
    busy_s: float | None = None
    gpu: str = ""  # its number on the host, once the ranks have joined; "" without one
    save_since: float | None = None  # since when a save is due, or under way; None: none is
    save_every_s: float = 0.0  # and how long it is from save to save as configured, 0: unknown

    def __post_init__(self) -> None:
        if self.rank < 0 or self.step < 0:
            raise ValueError("its rank or step is negative")


@dataclasses.dataclass(frozen=True, slots=True)
class Metrics:
    """One step of training."""

    step: int
    time: float  # rank 0's clock
    loss: float  # nats per target token, over the whole global batch
    grad_norm: float  # before clipping
    lr: float
    tokens: int  # target tokens so far, over all ranks
    tokens_per_s: float  # over all ranks
    step_s: float
    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float  # clipping and update
    step_tokens: int = 0  # target tokens of this step, over all ranks; 0: unknown
    flops_per_token: int = 0  # of the model, forward and backward; 0: unknown
    attempt: int = 0  # launch of this run that took the step; 0: unknown
    update_s: float | None = None  # of updates on the CPU since the step before; None: not made unit by unit there
    exposed_s: float | None = None  # of them, and of the norm: what the step waited for
    update_bytes: int | None = None  # that rank 0's updates read from and wrote to CPU memory
    down_bytes: int | None = None  # of rank 0's gradients to CPU memory; on a GPU, over PCIe
    up_bytes: int | None = None  # of rank 0's weights from there
    input_bytes: int | None = None  # of its layers' inputs, to CPU memory and back; None: they stay on the device
    input_wait_s: float | None = None  # that rank 0's GPU waited for them
    # nats per target token of the data held out, after this step; None: not evaluated
    evaluation_loss: float | None = None

    # the most that rank 0 held so far: of its GPU, with what the allocator keeps; else of CPU memory
    peak_bytes: int = 0
    peak_allocated_bytes: int = 0  # the most that tensors held of rank 0's GPU so far; 0: it has none, or unknown
    # so far in this attempt: rank 0's GPU was short, so its allocator gave back what was free
    num_alloc_retries: int = 0
    num_ooms: int = 0  # so far in this attempt: and that did not suffice
    own: Mapping[str, float] = dataclasses.field(default_factory=dict)  # what the user's module adds, by name

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ValueError("its step is negative")


@dataclasses.dataclass(frozen=True, slots=True)
class SpentHours:
    """What a run has taken so far: ``spent.json``."""

    gpu_hours: float  # of all its attempts; of CPUs, hours of ranks

    def __post_init__(self) -> None:
        if self.gpu_hours < 0:
            raise ValueError("its hours are negative")


@dataclasses.dataclass(frozen=True, slots=True)
class EvaluationMetrics:
    """The loss on data held out where no step was taken: before the first one, or without training."""

    step: int  # whose weights these are; 0: before the first
    time: float  # rank 0's clock
    evaluation_loss: float | None  # nats per target token; None: not a finite number
    attempt: int

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ValueError("its step is negative")


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """A prompt, as the weights after a step continued it: a line of ``samples.jsonl``."""

    step: int
    time: float  # rank 0's clock
    prompt: str = dataclasses.field(metadata=LINES)
    text: str = dataclasses.field(metadata=LINES)


MetricsLine: TypeAlias = FirstOf[Metrics, EvaluationMetrics]  # what metrics.jsonl consists of
METRICS_LINE: Any = MetricsLine


@dataclasses.dataclass(frozen=True, slots=True)
class StopMark:
    """Who asked a run to stop on a host: while the mark names them, the run is not restarted."""

    by: str  # "": the attempt is to end, and the run's guard starts the next one
    grace_s: float = 0.0  # for the trainer to save first
    time: float = 0.0


class GuardStage(enum.StrEnum):
    """What a guard is doing."""

    WATCHING = "watching"
    RECOVERING = "recovering"
    FINISHING = "finishing"  # the run ended well, and what follows it is under way
    ENDED = "ended"  # the run ended well
    STOPPED = "stopped"  # somebody stopped the run
    GAVE_UP = "gave up"


GUARDING = (GuardStage.WATCHING, GuardStage.RECOVERING, GuardStage.FINISHING)


@dataclasses.dataclass(frozen=True, slots=True)
class GuardState:
    """What a guard has done so far."""

    run: str
    pid: int  # 0: it was asked for, and has not been heard yet
    pid_start: int
    machine: str  # the one it runs on
    limit: int  # restarts without progress that it allows
    state: GuardStage = GuardStage.WATCHING
    message: str = ""  # for people
    restarts: int = 0
    in_vain: int = 0  # restarts since the last new checkpoint
    checkpoint: str = ""  # newest known
    time: float = 0.0  # by the clock of the machine that keeps this record
    cause: Cause | None = None  # of the last incident
    command: str = ""  # what follows ``llama405b launch`` to guard the run again, whether it is running or not
    directory: str = ""  # where to type it
    died: bool = False  # its process is gone, as its own machine finds; the guard itself never writes that
    hang_after_s: float = 0.0  # of silence between steps, after which it ends an attempt; 0: unknown


class RequestKind(enum.StrEnum):
    """What is requested."""

    SAVE = "save"  # a checkpoint after this step
    PROFILE = "profile"  # the next ``steps`` steps, a trace for each rank
    MEMORY = "memory"  # what each rank's memory holds
    STACKS = "stacks"  # the stack of every thread of each rank


MOST_PROFILED_STEPS = 100  # by one request: a longer trace cannot be opened


@dataclasses.dataclass(frozen=True, slots=True)
class RunRequest:
    """An operator's request to a run: a file in ``requests/``, written by the head's agent.

    Rank 0 looks for new ones between steps, all ranks carry them out together, and an ``answered`` event reports the result.
    Requests to stop go to each host's node runner instead (``StopMark``), which can also end a run that hangs.
    """

    id: str  # also the file's name
    kind: RequestKind
    by: str  # user@machine
    time: float  # head's clock, seconds since the epoch
    steps: int = 1  # to profile
