"""Checkpoints on disk: names, manifests, copies, and the room they take. Knows the file formats; not tensors.

A manifest (format 3) is two lines: a ``Manifest`` as JSON, and the SHA-256 of that line, so that a damaged one is refused.

Hosts with directories of their own form a ring: each host's part of a checkpoint is copied to the next host, into
``of-<host>/step-N`` in its checkpoint directory. A copy is complete once it has its manifest, which is sent last. The records
below are what the trainer and the copying process write for each other.
"""

import contextlib
import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from llama405b.contract import reader
from llama405b.contract.errors import UserError, format_size, pluralize
from llama405b.contract.hashes import BLOCK_BYTES, n_blocks
from llama405b.contract.reader import MalformedError

STEP_DIR = re.compile(r"step-(\d{8})")
MANIFEST = "manifest.json"  # written last: a directory without it is not a checkpoint
INDEX = "index.json"  # which tensors there are, and which rank wrote which part
WEIGHTS_PREFIX = "model."  # prefix of the weights' names in the index
DATA_FILE = re.compile(r"(weights-|optimizer-|small-|__)(\d+)[-_]\d+\.(?:safetensors|distcp)")  # its kind, and its rank
LEGACY_FORMAT, LEGACY_INDEX = 2, ".metadata"  # of the version before, with DCP's files
CONFIG_FILE, MODEL_FILES = "config.toml", "model"  # the run's settings; the model's configuration and tokenizer
DESCRIPTION_FILE = re.compile(rf"{re.escape(CONFIG_FILE)}|{MODEL_FILES}/\w[\w.-]*")  # files that describe a checkpoint
MIN_KEPT = 2  # so that one is intact if the other is damaged


@dataclasses.dataclass(frozen=True, slots=True)
class FileDigest:
    """What a manifest records about a file."""

    bytes: int
    rank: int  # that wrote it
    blocks: tuple[str, ...]  # SHA-256 of each block; an empty file has one
    weights: bool = True  # whether there may be weights in it, and not only moments


@dataclasses.dataclass(frozen=True, slots=True)
class RunIdentity:
    """What a run trains on, and how: a change of any of these changes the result."""

    model: str
    data: str
    sequence_length: int
    global_batch_size: int
    numerics: str
    data_seed: int
    training_seed: int
    packing: str = "concatenated"  # the only packing of earlier versions
    settings: Mapping[str, Any] = dataclasses.field(
        default_factory=dict
    )  # other settings; those that both runs have are compared
    adapter: str = "none"  # if not none, only it is trained and saved
    extension: str = "none"  # the user's module, if it changes loss or data

    def changes(self, current: "RunIdentity") -> dict[str, str]:
        """Return what differs, by name: ``64 -> 32`` for ``training.global_batch_size``."""
        pairs = {name: (getattr(self, field), getattr(current, field)) for field, name in SETTING_NAMES.items()}
        pairs |= {
            name: (old, current.settings[name])
            for name, old in ({OPTIMIZER: "adamw"} | dict(self.settings)).items()
            if name in current.settings
        }
        return {name: f"{old} -> {new}" for name, (old, new) in pairs.items() if old != new}


OPTIMIZER = "optimizer.kind"  # checkpoints from before there was a choice do not have it
SETTING_NAMES = {  # by field of RunIdentity: the setting's name
    "model": "model",
    "data": "data",
    "sequence_length": "data.seq_len",
    "global_batch_size": "training.global_batch_size",
    "numerics": "parallel.numerics",
    "data_seed": "data.seed",
    "training_seed": "training.seed",
    "packing": "data.packing",
    "adapter": "adapter",
    "extension": "extension",
}


@dataclasses.dataclass(frozen=True, slots=True)
class TrainedSoFar:
    """How far training is after a step."""

    sequences: int  # read so far
    evaluation_loss: float | None = None  # if this step was evaluated


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """The record that makes a directory a checkpoint: its files by name, and the run that wrote them."""

    format: Literal[2, 3]
    step: int
    files: Mapping[str, FileDigest]
    world_size: int
    block_bytes: int = BLOCK_BYTES  # of each block but a file's last
    run: str = ""  # "": unknown
    hosts: tuple[str, ...] = ()  # by rank
    identity: RunIdentity | None = None  # None: unknown
    sequences: int | None = None  # position in the data: packed sequences read so far
    evaluation_loss: float | None = None  # after its step, if that was evaluated
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by package

    def __post_init__(self) -> None:
        """Refuse a manifest that does not describe all files of a checkpoint."""
        if self.world_size < 1 or self.block_bytes < 1:
            raise ValueError(f"world size {self.world_size} and block size {self.block_bytes} are not both positive")
        for name, digest in self.files.items():
            if not DATA_FILE.fullmatch(name) and not is_metadata_file(name):
                raise ValueError(f"{name!r} is not a file of a checkpoint")
            if len(digest.blocks) != n_blocks(digest.bytes, self.block_bytes):
                raise ValueError(f"{name} of {digest.bytes} bytes cannot have {len(digest.blocks)} blocks")
        if self.index_file not in self.files:
            raise ValueError(f"it lacks {self.index_file}")
        writers = {digest.rank for name, digest in self.files.items() if DATA_FILE.fullmatch(name)}
        if writers != set(range(self.world_size)):
            raise ValueError(f"it has files of {pluralize(len(writers), 'rank')}, not of all {self.world_size}")

    @property
    def index_file(self) -> str:
        """The file that says where each tensor is."""
        return LEGACY_INDEX if self.format == LEGACY_FORMAT else INDEX


def is_metadata_file(name: str) -> bool:
    """Whether this names a checkpoint file without tensors, not a stray file that somebody added."""
    return name in (INDEX, LEGACY_INDEX) or DESCRIPTION_FILE.fullmatch(name) is not None


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """Who may write into a checkpoint directory: ``lease-<8 digits>.json``; the highest number counts.

    Its holder renews it while it is alive. Only a change of the record is a sign of life, not its time: clocks differ.
    """

    run: str
    where: str  # rank 0's host, and the run's directory there
    attempt: int
    token: str  # of this process
    renewed: float = 0.0  # holder's clock, seconds since the epoch
    ended: bool = False


def write_manifest(manifest: Manifest) -> tuple[bytes, str]:
    """Return a manifest's bytes, and the digest that names its content."""
    body = reader.dumps(manifest).encode()
    digest = hashlib.sha256(body).hexdigest()
    return body + b"\n" + digest.encode() + b"\n", digest


def read_manifest(content: bytes) -> tuple[Manifest, str]:
    """Return a manifest and its digest.

    Raises:
        MalformedError: It was changed, truncated, or does not describe all files.
    """
    body, _, trailer = content.partition(b"\n")
    digest = hashlib.sha256(body).hexdigest()
    if trailer != digest.encode() + b"\n":
        raise MalformedError(f"{MANIFEST}: its content does not match its checksum")
    return reader.loads(Manifest, body, MANIFEST), digest


def step_of(path: Path) -> int:
    """Return the step after which a checkpoint was saved.

    Raises:
        UserError: Its name is not ``step-<8 digits>``.
    """
    match = STEP_DIR.fullmatch(path.name)
    if not match:
        raise UserError(f"{path}: its name is not step-<8 digits>; name a checkpoint directory")
    return int(match[1])


def named_path(root: Path, name: str) -> Path:
    """Return the path of a checkpoint that is given by its step or path."""
    return root / f"step-{int(name):08d}" if name.isdecimal() else Path(name)


def list_committed(root: Path) -> list[Path]:
    """List the checkpoint directories by step, oldest first."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(path for path in root.iterdir() if STEP_DIR.fullmatch(path.name))
    return []


def refuse_existing(root: Path, checkpoints: Sequence[Path]) -> None:
    """Refuse a directory that already has checkpoints, for a run that does not resume."""
    if checkpoints:
        raise UserError(
            f"--checkpoint.dir: {root} holds checkpoints up to {checkpoints[-1].name}; use another directory, "
            "or continue with --resume auto"
        )


def find_newest_complete(root: Path) -> Path | None:
    """Return the newest checkpoint that looks complete; it is not verified."""
    return next((path for path in reversed(list_committed(root)) if (path / MANIFEST).exists()), None)


REPLICA_PREFIX = "of-"  # what precedes the host's name


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a host receives copies: ``status/.HOST.spot``, which only its user can read."""

    attempt: int
    address: str  # on the training network
    port: int
    token: str


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """A host's place in the ring: ``status/.HOST.ring``, written by its first rank."""

    attempt: int
    before: str  # the host whose copies come here
    after: Endpoint  # where its own copies go
    root: str  # directory of checkpoints
    run: str  # whose checkpoints are copied
    keep: int  # of each host's newest
    step: int = 0  # that all hosts should copy now; 0: none yet
    everywhere: int = 0  # the newest step of which every host has a copy on the next one


@dataclasses.dataclass(frozen=True, slots=True)
class CopiedStep:
    """The newest step of which the next host has this host's part: ``status/HOST.copied``."""

    step: int = 0
    fault: str = ""  # why newer ones have not been copied yet
    attempt: int = 0


def replicas(root: Path, step: str) -> list[Path]:
    """Return the complete copies of other hosts' parts of a checkpoint, ``step-<8 digits>``."""
    return sorted(path for path in root.glob(f"{REPLICA_PREFIX}*/{step}") if (path / MANIFEST).is_file())


def replicated_steps(root: Path) -> set[str]:
    """Return the names of the checkpoints of which there are complete copies."""
    return {
        path.parent.name
        for path in root.glob(f"{REPLICA_PREFIX}*/step-*/{MANIFEST}")
        if STEP_DIR.fullmatch(path.parent.name)
    }


LOW_SHARE, LOW_BYTES = 0.02, 1 << 30  # free share of the disk; free bytes


def is_nearly_full(free_bytes: int, total_bytes: int) -> bool:
    """Whether a disk is almost full."""
    return free_bytes < LOW_BYTES or free_bytes < LOW_SHARE * total_bytes


class NoRoomError(Exception):
    """A disk cannot hold a run's checkpoints; the message is a clause about the directory, with a remedy."""


def check_disk_space(
    free_bytes: int | None, checkpoint_bytes: int, keep: int, n_present: int = 0, *, keep_best: bool = False
) -> None:
    """Check that a disk can hold ``keep`` checkpoints and one that is being written.

    ``free_bytes``: None: unknown; ``checkpoint_bytes``: size of one, with the copy of another host's part; ``n_present``: how many the disk
    has already; ``keep_best``: whether the best is one of those that are kept.
    """
    n_present = min(n_present, keep)
    if free_bytes is None or (keep + 1 - n_present) * checkpoint_bytes <= free_bytes:
        return
    max_kept = free_bytes // checkpoint_bytes + n_present - 1 - keep_best
    remedy = "use another directory"
    if max_kept >= MIN_KEPT:
        remedy = f"use --checkpoint.keep {max_kept}, or another directory"
    raise NoRoomError(
        f"has {format_size(free_bytes)} free, but a checkpoint takes {format_size(checkpoint_bytes)}, {keep} are kept, and one more "
        f"is being written; {remedy}"
    )
