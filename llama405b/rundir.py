"""The contract between the trainer and the operator's tools: the files under ``runs/<run>/``.

Knows names, schemas and how to write a file so that no reader ever sees half of it. Knows nothing of torch,
SSH or tmux. Every file has one writer::

    plan.json                     launch         what runs where; see llama405b_tools.commands.Plan
    config.toml                   rank 0         the configuration as resolved
    metrics.jsonl                 rank 0         one ``Metrics`` object a step
    status/<host>.json            node runner    ``NodeStatus`` of that host
    status/<host>.ends.jsonl      node runner    the ``NodeStatus`` with which each attempt ended
    status/<host>.stop            stop           who asked for the end, and the grace
    status/<host>.lock            node runner    held (flock) while that host's node runner lives
    heartbeat/rank-<N>.json       rank N         ``Heartbeat``
    logs/<host>/…/stdout.log      torchrun       and stderr.log, one pair for each local rank
    logs/<host>/torchrun.log      torchrun       the agent's own words
    checkpoints/step-<8 digits>/  all ranks      complete once it has manifest.json
"""

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

UMASK = 0o077  # a run's files are its owner's alone


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


@dataclasses.dataclass(frozen=True, slots=True)
class RunDir:
    """Paths inside one run's directory."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def plan(self) -> Path:
        """Written by launch."""
        return self.path / "plan.json"

    @property
    def config(self) -> Path:
        """Written by rank 0."""
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        """Written by rank 0."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go unless the configuration says otherwise."""
        return self.path / "checkpoints"

    def status(self, host: str) -> Path:
        """Written by that host's node runner."""
        return self.path / "status" / f"{host}.json"

    def ends(self, host: str) -> Path:
        """How every attempt ended on that host, a line each; written by its node runner."""
        return self.path / "status" / f"{host}.ends.jsonl"

    def lock(self, host: str) -> Path:
        """Held by that host's node runner while it lives."""
        return self.path / "status" / f"{host}.lock"

    def logs(self, host: str) -> Path:
        """Torchrun's log directory on that host."""
        return self.path / "logs" / host

    def heartbeat(self, rank: int) -> Path:
        """Written by that rank."""
        return self.path / "heartbeat" / f"rank-{rank}.json"


def write_atomic(path: Path, text: str) -> None:
    """Replace ``path`` with ``text`` so that a reader sees the old file or the new one, never a part.

    Raises:
        OSError: The directory cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def write_json(path: Path, record: Any) -> None:
    """``write_atomic`` a dataclass (or plain value) as one line of JSON.

    On a full disk a file that is there is written over in place, where it has its blocks: a status must still be said.

    Raises:
        OSError: The directory cannot be made or written.
    """
    value = dataclasses.asdict(record) if dataclasses.is_dataclass(record) else record  # type: ignore[arg-type]
    text = json.dumps(value) + "\n"
    try:
        write_atomic(path, text)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not path.exists():
            raise
        with path.open("r+", encoding="utf-8") as file:
            file.write(text.rstrip().ljust(path.stat().st_size - 1) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None where there is none (yet), or none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
