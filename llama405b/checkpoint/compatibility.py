"""Identify what a run trains on, and check that a resume still does. Knows the configuration and the tokens; not tensors."""

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch.distributed as dist

from llama405b import extend
from llama405b.checkpoint.store import CheckpointView
from llama405b.contract.checkpoints import RunIdentity
from llama405b.contract.errors import given
from llama405b.contract.software import code_version
from llama405b.data.batches import Batches
from llama405b.data.encode import FIRST
from llama405b.data.tokens import RULES
from llama405b.distributed import collectives
from llama405b.settings.schema import Config
from llama405b.spec.models import describe
from llama405b.spec.rules import accept_changes, same_data, settings_of
from llama405b.spec.tensors import fingerprint_of, read_hf_json, read_tensors

SAMPLES = 1024  # of the tokens, evenly spaced
SAMPLE_TOKENS = 1024
NOT_OF_THE_MODEL = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}


def identity_of(config: Config, files: Path, batches: Batches) -> RunIdentity:
    """Return the identity of this run's model, data and settings; ``files``: the directory of the model's small files.

    The data's fingerprint covers its length and a sample: it tells another corpus, but may miss a letter that changed.
    """
    sample, n_tokens = hashlib.sha256(), 0
    for source in batches.mixture.sources:
        tokens_N = source.tokens_N
        n_tokens += len(tokens_N)
        starts = np.linspace(0, max(0, len(tokens_N) - SAMPLE_TOKENS), SAMPLES, dtype=np.int64)
        for start in np.unique(starts):
            sample.update((tokens_N[start : start + SAMPLE_TOKENS] & ~FIRST).tobytes())
    rules = f"rules {RULES} ({config.data.special_tokens})"  # other rules may put a position elsewhere in the tokens
    return RunIdentity(
        model=model_of(config, files),
        data=f"{n_tokens} tokens {sample.hexdigest()[:12]}{_parts(batches)}, {rules}",
        sequence_length=config.data.seq_len,
        global_batch_size=config.training.global_batch_size,
        numerics=config.parallel.numerics,
        data_seed=config.data.seed,
        training_seed=config.training.seed,
        packing="isolated" if batches.isolated else "concatenated",
        adapter=describe(config.adapter),
        extension=extend.current().declared.described,
    )


def model_of(config: Config, files: Path) -> str:
    """Return the fingerprint of the model's configuration and, with adapters, of the base weights.

    ``files``: see ``identity_of``. All ranks call it; rank 0 has the weights.

    Raises:
        UserError: Rank 0 cannot read the weights.
    """
    hf_config = read_hf_json(files / "config.json")
    described = {key: value for key, value in hf_config.items() if key not in NOT_OF_THE_MODEL}
    model = json.dumps([described, config.model.layers], sort_keys=True).encode()
    return f"config {hashlib.sha256(model).hexdigest()[:12]}{_weights_of(config)}"


def _weights_of(config: Config) -> str:
    """Return the fingerprint of the frozen base weights, which no checkpoint contains."""
    if not config.adapter.trains or config.model.weights == "random":
        return ""
    found = ""
    with collectives.raise_on_all_ranks():
        if dist.get_rank() == 0:
            found = fingerprint_of(read_tensors(Path(config.model.path)))[:12]
    return f", weights {collectives.broadcast_object(found)}"


def _parts(batches: Batches) -> str:
    """Describe which tokens are read, if that is not all of them or they come from several sources."""
    sources, counts = batches.mixture.sources, batches.mixture.counts
    if len(sources) == 1 and sources[0].excerpt is None and sources[0].spans_N2 is None:
        return ""
    excerpts = [source.excerpt for source in sources if source.excerpt]
    held_out = hashlib.sha256(b"".join(part.tobytes() for each in excerpts for part in (each.begins_N, each.ends_N)))
    which = f", documents {held_out.hexdigest()[:12]}" if excerpts else ""
    return f", {'+'.join(map(str, counts))} sequences an epoch{which}"


@dataclasses.dataclass(frozen=True, slots=True)
class Beginning:
    """Where a run starts or resumes."""

    identity: RunIdentity
    position: int  # sequences that were read before
    steps: int  # of the whole run


def beginning(start: CheckpointView | None, config: Config, files: Path, batches: Batches) -> Beginning:
    """Return where a run resumes from a checkpoint; None: where a new run starts."""
    identity = identity_of(config, files, batches)
    done, position = (start.manifest.step, position_after(start, identity)) if start else (0, 0)
    training = config.training
    steps = training.max_steps or done + batches.steps(training.epochs, training.global_batch_size, position)
    settings = settings_of(config.optimizer, steps)
    if date := config.data.template_date:
        settings = {**settings, "data.template_date": date}
    return Beginning(dataclasses.replace(identity, settings=settings), position, steps)


def changes_at(start: CheckpointView, now: RunIdentity, allowed: Sequence[str]) -> str:
    """Check what this resume changes, and return a line for the log; '' if nothing changes.

    Raises:
        UserError: Something changes that is not allowed to.
    """
    before = start.manifest.identity
    if before is None:
        return f"{start.path} does not record its model and data; they are not compared"
    return accept_changes(str(start.path), before, now, allowed)


def software() -> dict[str, str]:
    """Return the versions of the software that computes a step, including this code."""
    packages = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    return packages | {"llama405b": code_version()}


def other_software(start: CheckpointView) -> str:
    """Return a log line about versions that differ from a checkpoint's; '' if none do or none are recorded."""
    before, now = start.manifest.versions, software()
    differ = [f"{name} {before[name]} -> {now[name]}" for name in now if before.get(name, now[name]) != now[name]]
    return given(f"{start.path} was saved with other versions ({{}})", ", ".join(differ))


def position_after(start: CheckpointView, now: RunIdentity) -> int:
    """Return how many sequences were read before a checkpoint; 0 if the data or its order has changed."""
    manifest = start.manifest
    if manifest.identity is None:
        return manifest.step * now.global_batch_size
    return manifest.sequences or 0 if same_data(manifest.identity, now) else 0
