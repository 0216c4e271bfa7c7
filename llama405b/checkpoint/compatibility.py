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
from llama405b.contract.errors import fmt_if
from llama405b.contract.software import code_version
from llama405b.data.batches import Batches
from llama405b.data.encode import DOCUMENT_START
from llama405b.data.tokens import RULES_VERSION
from llama405b.distributed import collectives
from llama405b.settings.schema import Config
from llama405b.spec.adapters import adapter_label
from llama405b.spec.rules import check_resume_changes, reads_same_data, update_settings
from llama405b.spec.tensors import compute_fingerprint, read_hf_json, read_tensors

N_SAMPLES = 1024  # of the tokens, evenly spaced
SAMPLE_TOKENS = 1024
IGNORED_MODEL_KEYS = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}


def identity_of(config: Config, model_dir: Path, batches: Batches) -> RunIdentity:
    """Return the identity of this run's model, data and settings; ``model_dir``: the directory of the model's small files.

    The data's fingerprint covers its length and a sample: it tells another corpus, but may miss a letter that changed.
    """
    sample, n_tokens = hashlib.sha256(), 0
    for source in batches.mixture.sources:
        tokens_N = source.tokens_N
        n_tokens += len(tokens_N)
        starts = np.linspace(0, max(0, len(tokens_N) - SAMPLE_TOKENS), N_SAMPLES, dtype=np.int64)
        for start in np.unique(starts):
            sample.update((tokens_N[start : start + SAMPLE_TOKENS] & ~DOCUMENT_START).tobytes())
    rules = f"rules {RULES_VERSION} ({config.data.special_tokens})"  # other rules may put a position elsewhere in the tokens
    return RunIdentity(
        model=model_fingerprint(config, model_dir),
        data=f"{n_tokens} tokens {sample.hexdigest()[:12]}{_selection_label(batches)}, {rules}",
        sequence_length=config.data.seq_len,
        global_batch_size=config.training.global_batch_size,
        numerics=config.parallel.numerics,
        data_seed=config.data.seed,
        training_seed=config.training.seed,
        packing="isolated" if batches.isolated else "concatenated",
        adapter=adapter_label(config.adapter),
        extension=extend.current().declared.identity_label,
    )


def model_fingerprint(config: Config, model_dir: Path) -> str:
    """Return the fingerprint of the model's configuration and, with adapters, of the base weights.

    ``model_dir``: see ``identity_of``. All ranks call it; rank 0 has the weights.

    Raises:
        UserError: Rank 0 cannot read the weights.
    """
    hf_config = read_hf_json(model_dir / "config.json")
    hf_values = {key: value for key, value in hf_config.items() if key not in IGNORED_MODEL_KEYS}
    encoded = json.dumps([hf_values, config.model.layers], sort_keys=True).encode()
    return f"config {hashlib.sha256(encoded).hexdigest()[:12]}{_base_weights_label(config)}"


def _base_weights_label(config: Config) -> str:
    """Return the fingerprint of the frozen base weights, which no checkpoint contains."""
    if not config.adapter.is_enabled or config.model.weights == "random":
        return ""
    fingerprint = ""
    with collectives.raise_on_all_ranks():
        if dist.get_rank() == 0:
            fingerprint = compute_fingerprint(read_tensors(Path(config.model.path)))[:12]
    return f", weights {collectives.broadcast_object(fingerprint)}"


def _selection_label(batches: Batches) -> str:
    """Describe which tokens are read, if that is not all of them or they come from several sources."""
    sources, counts = batches.mixture.sources, batches.mixture.counts
    if len(sources) == 1 and sources[0].selection is None and sources[0].spans_N2 is None:
        return ""
    excerpts = [source.selection for source in sources if source.selection]
    digest = hashlib.sha256(
        b"".join(part.tobytes() for excerpt in excerpts for part in (excerpt.begins_N, excerpt.ends_N))
    )
    documents_label = f", documents {digest.hexdigest()[:12]}" if excerpts else ""
    return f", {'+'.join(map(str, counts))} sequences an epoch{documents_label}"


@dataclasses.dataclass(frozen=True, slots=True)
class StartPoint:
    """Where a run starts or resumes."""

    identity: RunIdentity
    position: int  # sequences that were read before
    steps: int  # of the whole run


def start_point(checkpoint: CheckpointView | None, config: Config, model_dir: Path, batches: Batches) -> StartPoint:
    """Return where a run resumes from a checkpoint; None: where a new run starts."""
    identity = identity_of(config, model_dir, batches)
    step, position = (checkpoint.manifest.step, position_after(checkpoint, identity)) if checkpoint else (0, 0)
    training = config.training
    max_steps = training.max_steps or step + batches.n_steps(training.epochs, training.global_batch_size, position)
    settings = update_settings(config.optimizer, max_steps)
    if date := config.data.template_date:
        settings = {**settings, "data.template_date": date}
    return StartPoint(dataclasses.replace(identity, settings=settings), position, max_steps)


def check_changes(checkpoint: CheckpointView, current: RunIdentity, allowed: Sequence[str]) -> str:
    """Check what this resume changes, and return a line for the log; '' if nothing changes.

    Raises:
        UserError: Something changes that is not allowed to.
    """
    previous = checkpoint.manifest.identity
    if previous is None:
        return f"{checkpoint.path} does not record its model and data; they are not compared"
    return check_resume_changes(str(checkpoint.path), previous, current, allowed)


ROUNDING = (
    "stochastic rounding"  # the rule: 2 rounds an update of plain operations, 1 rounded that of torch's fused kernel
)


def rounding_version(numerics: str) -> dict[str, str]:
    """Return the version of the rule of rounding, if these numerics round stochastically."""
    return {ROUNDING: "2"} if numerics == "bf16-stochastic" else {}


def software_versions() -> dict[str, str]:
    """Return the versions of the software that computes a step, including this code."""
    packages = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    return packages | {"llama405b": code_version()}


def describe_version_changes(checkpoint: CheckpointView) -> str:
    """Return a log line about versions that differ from a checkpoint's; '' if none do or none are recorded."""
    previous, current = dict(checkpoint.manifest.versions), software_versions()
    identity = checkpoint.manifest.identity
    if previous and identity and (rounding := rounding_version(identity.numerics)):
        previous.setdefault(ROUNDING, "1")  # which manifests did not record
        current |= rounding
    changes = [
        f"{name} {previous[name]} -> {current[name]}"
        for name in current
        if previous.get(name, current[name]) != current[name]
    ]
    return fmt_if(f"{checkpoint.path} was saved with other versions ({{}})", ", ".join(changes))


def position_after(checkpoint: CheckpointView, current: RunIdentity) -> int:
    """Return how many sequences were read before a checkpoint; 0 if the data or its order has changed."""
    manifest = checkpoint.manifest
    if manifest.identity is None:
        return manifest.step * current.global_batch_size
    return manifest.sequences or 0 if reads_same_data(manifest.identity, current) else 0
