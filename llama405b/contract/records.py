"""What the files of a run say: a dataclass for each kind of record. Knows meanings and units, not files."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class NodeStatus:
    """What became of torchrun on one host, as its node runner saw it."""

    host: str
    state: str  # starting | running | exited | killed | stopped (when somebody asked for it)
    attempt: int  # 1, 2, …: counts launches of this run
    pid: int  # of the node runner
    pid_start: int  # its start time in clock ticks since boot: a pid alone can be reused
    exit_code: int | None = None  # of torchrun, when it exited
    signal: int | None = None  # that ended it, when killed
    reason: str = ""  # one sentence, where there is more to say
    time: float = 0.0  # host clock, seconds since the epoch


@dataclasses.dataclass(frozen=True, slots=True)
class Heartbeat:
    """Where one rank is; written at most once a second, from the first moment of loading on."""

    rank: int
    host: str
    pid: int
    time: float  # host clock, seconds since the epoch
    step: int
    phase: str  # start | data | load | resume | train | checkpoint | done | failed
    phase_since: float
    done_bytes: int = 0
    total_bytes: int = 0
    message: str = ""  # why it failed
    failed_in: str = ""  # the phase in which it did
    data_s: float | None = None  # of the last step, this rank's own: until it had its batch
    optimizer_s: float | None = None  # and clipping and the update


@dataclasses.dataclass(frozen=True, slots=True)
class Metrics:
    """One step of training."""

    step: int
    time: float  # rank 0's clock, seconds since the epoch
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
