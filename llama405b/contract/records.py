"""Records in a run's files: causes, events, status, metrics and requests, one dataclass per kind.

A cause says why a rank, a host or a run ended, as values and in words: decisions use the values, and no program parses the words.

Events are appended to ``runs/<run>/events/<writer>.jsonl``, one writer per file, and never changed. Readers merge the files, and put
the events into words.

Times are seconds since the epoch by the writer's clock; clocks may differ between hosts.

A rank that hangs still shows the unit that it computes and, on a signal, the stacks of its threads. It keeps a file in memory open for
that, which its user can read through ``/proc/PID/fd``: the disk may be what hangs.

A ``TrainingPosition`` is at its start, followed by what faulthandler writes.
A process without such a file does not handle the signal and would be killed by it.
"""

import dataclasses
import enum
import signal
import struct
from collections.abc import Mapping
from typing import Any, TypeAlias

from llama405b.contract.errors import fmt_if, pluralize
from llama405b.contract.reader import LINES, FirstOf


class CauseKind(enum.StrEnum):
    """What happened."""

    STOPPED = "stopped"  # on request: ``by``
    SIGNAL = "signal"  # the node runner received ``signal`` without a stop request
    RUNNER_KILLED = "runner killed"  # the node runner was killed; its guardian ended the rest
    NOT_STARTED = "not started"  # torchrun could not be started: ``detail``
    SETUP_FAILED = "setup failed"  # ``exit_code`` and ``detail``: the setup line
    TORCHRUN_KILLED = "torchrun killed"  # by ``signal``
    TORCHRUN_FAILED = "torchrun failed"  # without naming a rank of this host; ``detail``: its log, and the log's end
    RANK_KILLED = "rank killed"  # ``rank`` by ``signal``
    RANK_EXIT = "rank exit"  # ``rank`` with ``exit_code``; ``detail``: what it raised
    REFUSED = "refused"  # the trainer refused its input, on ``rank``: it would refuse it again
    FOLLOWED = "followed"  # ``rank`` stopped because ``peer`` refused its input
    LOST_PEER = "lost peer"  # ``rank`` lost contact with another, in ``phase``: it began there; ``detail``: for the log
    SPIKE = "loss spike"  # and training.on_loss_spike is stop
    NOT_FINITE = "not finite"  # the loss or the gradient of a step, on every rank
    SOCKETS = "sockets"  # NCCL fell back to TCP although there is RDMA; ``detail``: its log line
    VANISHED = "vanished"  # the host's processes are gone and left no status
    LEFTOVERS = "leftovers"  # ``count`` processes of an earlier attempt
    NEVER_STARTED = "never started"
    NOT_KEPT = "not kept"  # the launch was never confirmed on this host, which ended its part
    HALF_STOPPED = "half stopped"  # still running here, although ``by`` stopped it on other hosts
    FILES_GONE = "files gone"  # the host took part, but the run's files are gone
    NO_RUN = "no run"  # the host does not know the run
    HUNG = "hung"  # ``rank`` has been silent for ``age_s``, in ``phase`` at ``step``
    UNREACHABLE = "unreachable"  # the operator's machine cannot reach the host; ``detail``: why
    UNKNOWN = "unknown"  # nothing says why


@dataclasses.dataclass(frozen=True, slots=True)
class Cause:
    """What happened, with its data; fields that do not apply keep their defaults."""

    kind: CauseKind
    host: str = ""
    rank: int | None = None
    peer: int | None = None  # the other rank involved
    signal: int | None = None
    exit_code: int | None = None
    phase: str = ""
    step: int | None = None
    age_s: float | None = None
    count: int | None = None
    process_state: str = ""  # as the kernel writes it: R, S, D, T, …
    by: str = ""  # user@machine
    detail: str = ""  # a program's own message, for people; never parsed
    finding: str = ""  # what an autopsy found, for people
    gpu: str = ""  # of ``rank``: its number on the host


PROCESS_STATE_NOTES = {
    "T": "it is stopped by a signal",
    "D": "it is waiting for a disk or driver that does not respond",
    "Z": "its process has ended, and torchrun has not noticed",
}  # by process state
RANK_TEMPLATES = {  # how a rank reports its own end; other kinds: the detail alone
    CauseKind.LOST_PEER: "lost contact with another rank in phase {phase}",
    CauseKind.FOLLOWED: "rank {peer} failed: {detail}",
}
CAUSE_TEMPLATES = {
    CauseKind.STOPPED: "stopped by {by}",
    CauseKind.SIGNAL: "stopped by {signal}",
    CauseKind.RUNNER_KILLED: "the node runner was killed",
    CauseKind.NOT_STARTED: "torchrun could not be started ({detail})",
    CauseKind.SETUP_FAILED: "the setup line failed with exit code {exit_code}: {detail}",
    CauseKind.TORCHRUN_KILLED: "torchrun was killed by {signal}",
    CauseKind.TORCHRUN_FAILED: "torchrun failed; see {detail}",
    CauseKind.RANK_KILLED: "{who} was killed by {signal}",
    CauseKind.SOCKETS: "NCCL fell back to TCP sockets although RDMA ports are up ({detail}); "
    "set NCCL_IB_HCA with --env, or add --allow-sockets",
    CauseKind.VANISHED: "its processes disappeared without a trace; was the machine restarted, or its disk full?",
    CauseKind.NOT_KEPT: "its launch was interrupted before every host had started",
    CauseKind.HALF_STOPPED: "still running here, although {by} stopped the run on other hosts; `stop` it here, too",
    CauseKind.FILES_GONE: "the run's files are gone from this host; was it reinstalled, or is a disk not mounted?",
    CauseKind.HUNG: "hung: {who} is silent for {age_s:.0f} s, in phase {phase} at step {step}",
    CauseKind.UNREACHABLE: "cannot be reached: {detail}",
    CauseKind.UNKNOWN: "{detail}",
}


def describe_cause(cause: Cause) -> str:
    """Describe in a clause what happened; '' if the kind says everything."""
    if cause.kind in CAUSE_TEMPLATES:
        suffix = fmt_if("; autopsy: {}", cause.finding) or fmt_if("; {}", PROCESS_STATE_NOTES.get(cause.process_state))
        return _fill_template(CAUSE_TEMPLATES[cause.kind], cause) + suffix
    if cause.rank is None:
        return cause.detail
    return f"{rank_label(cause)} exited with {cause.exit_code}{fmt_if(': {}', describe_rank_exit(cause))}"


def rank_label(cause: Cause) -> str:
    """Return the name of a rank and its GPU: ``rank 5 (GPU 1)``."""
    return f"rank {cause.rank}{fmt_if(' (GPU {})', cause.gpu)}"


def describe_rank_exit(cause: Cause) -> str:
    """Describe what the rank itself reported about its end; '' if nothing."""
    return _fill_template(RANK_TEMPLATES.get(cause.kind, "{detail}"), cause)


def signal_name(number: int) -> str:
    """Return the name of a signal: ``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _fill_template(template: str, cause: Cause) -> str:
    values = {name: getattr(cause, name) for name in ("peer", "exit_code", "phase", "step", "by", "detail")}
    return template.format(
        **values, who=rank_label(cause), age_s=cause.age_s or 0.0, signal=signal_name(cause.signal or 0)
    )


class EventKind(enum.StrEnum):
    """What happened."""

    STARTED = "started"  # training begins after ``step``, from the model's weights
    RESUMED = "resumed"  # from the checkpoint ``path`` of ``step``
    PASSED_OVER = "passed over"  # the checkpoint ``path``, renamed aside: ``detail`` says why
    SAVED = "saved"  # the checkpoint ``path`` after ``step``, in ``took_s``; ``digest``: of its manifest
    NOT_SAVED = "not saved"  # the state after ``step``: ``detail`` says why; training went on
    NOT_WRITTEN = "not written"  # ``count`` lines of metrics, up to ``step``: ``detail`` says why; training went on
    AFTER_SAVE = "after save"  # the user's command succeeded for the checkpoint after ``step``, in ``took_s``
    AFTER_SAVE_FAILED = "after save failed"  # it did not: ``detail`` says where and why; it is tried again
    BUDGET = "budget"  # of GPU-hours: ``detail`` says how much is spent
    COPIED = "copied"  # a host's part of the checkpoint ``path`` after ``step``, to the next host
    # ``step``, whose loss was far above the last ones'; ``detail``: how far, what was done, its documents
    SPIKE = "spike"
    NOT_FINITE = "not finite"  # the loss or gradient of ``step``; ``detail``: what was done, its documents
    SKIPPED = "skipped"  # ``step``, in which every target is masked; the ``count``-th of this attempt
    STOPPED = "stopped"  # after ``step``, on request
    REFUSED = "refused"  # the trainer refused its input: ``cause``
    FAILED = "failed"  # the run failed, as its guard saw it: ``cause``
    RESTARTED = "restarted"  # by the guard, from ``path`` ("": the model's weights), for the ``count``-th time
    # the request ``request`` was carried out after ``step``, with ``path``; or ``detail`` says why not
    ANSWERED = "answered"


@dataclasses.dataclass(frozen=True, slots=True)
class RunEvent:
    """One thing that happened to a run."""

    time: float  # writer's clock, seconds since the epoch
    writer: str  # rank-0, guard
    kind: EventKind
    attempt: int = 0
    step: int | None = None
    path: str = ""
    count: int = 0
    cause: Cause | None = None
    request: str = ""
    detail: str = ""  # for people; never parsed
    digest: str = ""  # SHA-256
    took_s: float = 0.0
    blocked_s: float = 0.0  # of ``took_s``: how long training waited, or was slower


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
class FailureRecord:
    """Why an attempt failed, as decided once by whoever ended it."""

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
    tokens_per_s: float  # trained on, over all ranks
    step_s: float
    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float  # clipping and update
    step_tokens: int = 0  # target tokens of this step, over all ranks; 0: unknown
    flops_per_token: int = 0  # of the model, forward and backward; 0: unknown
    attempt: int = 0  # launch of this run that took the step; 0: unknown
    update_s: float | None = None  # of updates on the CPU since the previous step; None: not updated unit by unit there
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
    # also those that are only read, and padding, as the plan counts; 0: an earlier version wrote it
    all_tokens_per_s: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second as the plan counts them: all of the step's."""
        return self.all_tokens_per_s or self.tokens_per_s

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ValueError("its step is negative")


@dataclasses.dataclass(frozen=True, slots=True)
class SpentHours:
    """The GPU-hours that a run has used so far: ``spent.json``."""

    gpu_hours: float  # of all its attempts; of CPUs, hours of ranks

    def __post_init__(self) -> None:
        if self.gpu_hours < 0:
            raise ValueError("its hours are negative")


@dataclasses.dataclass(frozen=True, slots=True)
class EvaluationMetrics:
    """The loss on held-out data without a training step: before the first step, or in an evaluation run."""

    step: int  # whose weights these are; 0: before the first
    time: float  # rank 0's clock
    evaluation_loss: float | None  # nats per target token; None: not a finite number
    attempt: int

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ValueError("its step is negative")


@dataclasses.dataclass(frozen=True, slots=True)
class PromptSample:
    """A prompt and its continuation by the weights after a step: a line of ``samples.jsonl``."""

    step: int
    time: float  # rank 0's clock
    prompt: str = dataclasses.field(metadata=LINES)
    text: str = dataclasses.field(metadata=LINES)


@dataclasses.dataclass(frozen=True, slots=True)
class TextPart:
    """Text of a document that is trained on, or is context only."""

    text: str = dataclasses.field(metadata=LINES)
    is_trained: bool


@dataclasses.dataclass(frozen=True, slots=True)
class DocumentPreview:
    """The decoded tokens of a document, or the part of it in one sequence."""

    parts: tuple[TextPart, ...]
    is_continued: bool  # it began in another sequence


@dataclasses.dataclass(frozen=True, slots=True)
class SequencePreview:
    """A sequence that the run trains on: a line of ``sequences.jsonl``, with long texts shortened and only its first documents."""

    index: int  # in the order of sequences, from 0
    n_tokens: int
    n_targets: int
    n_documents: int
    names: tuple[str, ...]  # of the files and the documents in them
    documents: tuple[DocumentPreview, ...]

    @property
    def summary(self) -> str:
        """Its sizes and where it comes from, for people."""
        targets = pluralize(self.n_targets, "target", thousands=True)
        sizes = f"{pluralize(self.n_documents, 'document')}, {self.n_tokens:,} tokens, {targets}"
        return sizes + fmt_if(" ({})", ", ".join(self.names))


QUOTE_PREFIX = "  | "  # before each line of training text in a log, so that it is not taken for the program's own
MetricsLine: TypeAlias = FirstOf[Metrics, EvaluationMetrics]  # what metrics.jsonl consists of
METRICS_LINE: Any = MetricsLine


@dataclasses.dataclass(frozen=True, slots=True)
class StopMark:
    """Who asked a run to stop on a host: while the mark names them, the run is not restarted."""

    by: str  # "": only this attempt ends; the run's guard starts the next one
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


ACTIVE_GUARD_STAGES = (GuardStage.WATCHING, GuardStage.RECOVERING, GuardStage.FINISHING)


@dataclasses.dataclass(frozen=True, slots=True)
class GuardState:
    """What a guard has done so far."""

    run: str
    pid: int  # 0: it was requested, and has not reported yet
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
    died: bool = False  # its process is gone, as its machine found; the guard itself never writes this
    hang_after_s: float = 0.0  # of silence between steps, after which it ends an attempt; 0: unknown


class RequestKind(enum.StrEnum):
    """What is requested."""

    SAVE = "save"  # a checkpoint after this step
    PROFILE = "profile"  # the next ``steps`` steps, a trace for each rank
    MEMORY = "memory"  # what each rank's memory holds
    STACKS = "stacks"  # the stack of every thread of each rank


MAX_PROFILED_STEPS = 100  # by one request: a longer trace cannot be opened


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


STACKS_SIGNAL = 39  # a real-time signal: Python, torch, CUDA and NCCL use none
MEMORY_FILE_NAME = "llama405b-rank"
UNIT_BYTES = 64
POSITION_STRUCT = struct.Struct(f"<q{UNIT_BYTES}s")
POSITION_BYTES = POSITION_STRUCT.size


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingPosition:
    """The step and FSDP unit that a rank is computing."""

    step: int = 0  # the current or last step
    unit: str = ""  # FSDP unit and direction: ``layers.71 backward``; "": none


def parse_position(raw: bytes) -> TrainingPosition:
    """Parse the start of a rank's memory file; ``TrainingPosition()`` if it is cut short."""
    if len(raw) < POSITION_BYTES:
        return TrainingPosition()
    step, unit = POSITION_STRUCT.unpack(raw[:POSITION_BYTES])
    return TrainingPosition(step, unit.rstrip(b"\0").decode("utf-8", "replace"))
