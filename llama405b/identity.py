"""What a run learns, and whether it still does. Knows the configuration and the tokens; not tensors."""

import hashlib
import json
from pathlib import Path

import numpy as np

from llama405b.checkpoint.store import Found
from llama405b.contract.checkpoints import RunIdentity
from llama405b.contract.errors import UserError
from llama405b.contract.schema import Config
from llama405b.contract.tensors import read_hf_json
from llama405b.data.batches import Batches
from llama405b.data.encode import FIRST

SAMPLES = 1024  # of the tokens, evenly spaced
SAMPLE_TOKENS = 1024
NOT_OF_THE_MODEL = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}


def identity_of(config: Config, files: Path, batches: Batches) -> RunIdentity:
    """Return what this run learns; ``files``: the directory of the model's small files.

    The data's fingerprint covers its length and a sample: another corpus shows, a letter that changed may not.
    """
    hf_config = read_hf_json(files / "config.json")
    described = {key: value for key, value in hf_config.items() if key not in NOT_OF_THE_MODEL}
    model = json.dumps([described, config.model.layers], sort_keys=True).encode()
    tokens_N = batches.tokens_N
    starts = np.linspace(0, max(0, len(tokens_N) - SAMPLE_TOKENS), SAMPLES, dtype=np.int64)
    sample = hashlib.sha256()
    for start in np.unique(starts):
        sample.update((tokens_N[start : start + SAMPLE_TOKENS] & ~FIRST).tobytes())
    return RunIdentity(
        model=f"config {hashlib.sha256(model).hexdigest()[:12]}",
        data=f"{len(tokens_N)} tokens {sample.hexdigest()[:12]}{' isolated' * batches.isolated}{_held_out(batches)}",
        sequence_length=config.data.seq_len,
        global_batch_size=config.training.global_batch_size,
        numerics=config.parallel.numerics,
        data_seed=config.data.seed,
        training_seed=config.training.seed,
    )


def _held_out(batches: Batches) -> str:
    return "" if batches.chosen is None else f", {batches.n_sequences} sequences of them"


def accept_changes(start: Found, now: RunIdentity, *, allowed: bool) -> str:
    """Say what changes with this resume, for the log; '' if nothing does.

    Raises:
        UserError: Something changes, and is not allowed to.
    """
    before = start.manifest.identity
    if before is None:
        return f"{start.path} does not record its model and data (version 0.1); they are not compared"
    changes = before.changes(now)
    if not changes:
        return ""
    said = f"{start.path} was saved with other settings ({', '.join(changes)}){_data_skipped(start, now)}"
    if not allowed:
        raise UserError(f"--resume: {said}; set them back, or accept this with --checkpoint.allow_changes true")
    return said


def _data_skipped(start: Found, now: RunIdentity) -> str:
    """What another batch size does to the position in the data."""
    read, step = start.manifest.sequences or 0, start.manifest.step
    ahead = step * now.global_batch_size - read
    if ahead > 0:
        return f", which skips {ahead} sequences"
    if ahead < 0:
        return f", which repeats {-ahead} sequences"
    return ""
