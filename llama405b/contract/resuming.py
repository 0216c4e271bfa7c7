"""What changes when a run goes on from a checkpoint, and whether it is allowed to. Knows settings; not files or tensors."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from llama405b.contract.adapters import describe
from llama405b.contract.checkpoints import NAMES, RunIdentity
from llama405b.contract.errors import UserError
from llama405b.contract.schema import Config, Optimizer

ALL = "all"  # changes are allowed
STEPS = "training.max_steps"
CHANGES = (
    *(name for name in NAMES.values() if name != "adapter"),
    *(f"optimizer.{field.name}" for field in dataclasses.fields(Optimizer)),
    STEPS,
)


def settings_of(optimizer: Optimizer, steps: int) -> Mapping[str, Any]:
    """Return what determines the updates: the optimizer's settings, and the run's steps if its schedule depends on them.

    ``steps``: 0 if unknown.
    """
    found = {f"optimizer.{name}": value for name, value in dataclasses.asdict(optimizer).items()}
    found |= {f"optimizer.{name}": list(getattr(optimizer, name)) for name in ("betas", "groups")}  # as JSON has them
    if optimizer.decay != "constant" and optimizer.min_lr != optimizer.lr and steps > optimizer.warmup:
        found[STEPS] = steps
    return found


def as_configured(before: RunIdentity, config: Config) -> RunIdentity:
    """Return a checkpoint's identity with these settings; whether model, data and packing are the same, only ranks see.

    A global batch of 0 follows the number of ranks, which is not known here: it is taken for the same.
    """
    return dataclasses.replace(
        before,
        sequence_length=config.data.seq_len,
        global_batch_size=config.training.global_batch_size or before.global_batch_size,
        numerics=config.parallel.numerics,
        data_seed=config.data.seed,
        training_seed=config.training.seed,
        adapter=describe(config.adapter),
        settings=settings_of(config.optimizer, config.training.max_steps),
    )


def same_data(before: RunIdentity, now: RunIdentity) -> bool:
    """Whether both read the same sequences in the same order; how they are packed does not matter."""
    one, other = ((each.data, each.sequence_length, each.data_seed) for each in (before, now))
    return one == other


def accept_changes(path: str, before: RunIdentity, now: RunIdentity, allowed: Sequence[str]) -> str:
    """Say what changes with a resume from ``path``, for the log; '' if nothing does.

    Raises:
        UserError: Something changes that is not in ``allowed``.
    """
    changes = before.changes(now)
    if not changes:
        return ""
    anew = "" if same_data(before, now) else ", so the data is read from its beginning"
    if before.adapter != now.adapter:  # then it holds other tensors
        raise UserError(
            f"--resume: {path} was saved with adapter {changes['adapter']}; set --adapter.kind, .rank, .alpha and .targets back, or "
            "begin another run with another --checkpoint.dir"
        )
    said = f"{path} was saved with other settings ({', '.join(map(' '.join, changes.items()))}){anew}"
    if ALL not in allowed and not changes.keys() <= {*allowed}:
        names = ",".join([*allowed, *(name for name in changes if name not in allowed)])
        raise UserError(f"--resume: {said}; set them back, or accept this with --checkpoint.allow_changes {names}")
    return said
