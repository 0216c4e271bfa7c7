"""LoRA adapters: their shapes and sizes, and peft's files. Knows nothing of torch.

Beside a frozen matrix W is the product of two narrow ones, W + alpha / rank * B A (arXiv 2106.09685).
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from llama405b.contract.errors import UserError, and_more
from llama405b.settings.choices import OPTIMIZERS, OptimizerName, is_layer_matrix
from llama405b.settings.schema import ADAPTER_TARGETS, COMPUTE_BYTES, Adapter, Config
from llama405b.spec.models import FUSED, Llama, split_projections
from llama405b.spec.tensors import Layout, read_header, read_hf_json

LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"  # beside a matrix; peft's A (rank, inputs) and B (outputs, rank)
PEFT_PREFIX = "base_model.model."  # what the names in its files begin with
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# What peft's other kinds of LoRA set, and this one does not.
UNSUPPORTED_PEFT_SETTINGS = (
    "use_dora", "use_rslora", "use_qalora", "use_bdlora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "layers_to_transform",
    "layer_replication", "modules_to_save", "trainable_token_indices", "target_parameters", "lora_bias", "alora_invocation_tokens",
    "kasa_config", "arrow_config", "monteclora_config",
)  # fmt: skip
# Beginnings that take themselves out of the weights beside which they are.
UNSUPPORTED_INITIALIZATIONS = ("pissa", "olora", "corda", "loftq", "lora_ga")


def is_lora_name(name: str) -> bool:
    """Check whether a parameter belongs to an adapter."""
    return name.endswith((LORA_A, LORA_B))


def lora_shapes(llama: Llama, adapter: Adapter) -> dict[str, tuple[int, int]]:
    """Return the shapes of an adapter's parameters by name, in the model's order; none without an adapter.

    Raises:
        UserError: The targets are only some of the projections that a matrix holds, or the rank is above the model's hidden size.
    """
    if adapter.is_enabled and adapter.rank > llama.hidden:
        raise UserError(
            f"--adapter.rank: {adapter.rank:,} is above the model's hidden size, {llama.hidden:,}; lower it"
        )
    shapes: dict[str, tuple[int, int]] = {}
    targets = llama.family.matrices(adapter.targets)
    if adapter.is_enabled and (missing := [name for name in split_projections(targets) if name not in adapter.targets]):
        fused = next(name for name in targets if missing[0] in split_projections([name]))
        raise UserError(
            f"--adapter.targets: {llama.family.architecture} holds {' and '.join(FUSED[fused])} in one matrix, {fused}; name all of them"
        )
    for name, shape in llama.tensors().items() if adapter.is_enabled else ():
        matrix = name.removesuffix(".weight")
        if len(shape) == 2 and matrix.rpartition(".")[2] in targets:
            shapes |= {matrix + LORA_A: (adapter.rank, shape[1]), matrix + LORA_B: (shape[0], adapter.rank)}
    return shapes


@functools.lru_cache(64)
def n_adapter_parameters(llama: Llama, adapter: Adapter) -> int:
    """Count an adapter's parameters."""
    return sum(map(math.prod, lora_shapes(llama, adapter).values()))


def n_trained_parameters(llama: Llama, adapter: Adapter) -> int:
    """Count the parameters that take gradients and that a checkpoint holds."""
    return n_adapter_parameters(llama, adapter) if adapter.is_enabled else llama.parameters


@functools.lru_cache(64)
def moments_per_parameter(llama: Llama, adapter: Adapter, optimizer: OptimizerName) -> float:
    """Return how many moments a trained parameter has; where some have more than others, the mean."""
    spec = OPTIMIZERS[optimizer]
    if not spec.rest:
        return len(spec.moments)
    shapes, n_others = lora_shapes(llama, adapter) or llama.tensors(), len(OPTIMIZERS[spec.rest].moments)
    matrices = sum(math.prod(shape) for name, shape in shapes.items() if is_layer_matrix(name, len(shape)))
    return n_others - (n_others - len(spec.moments)) * matrices / n_trained_parameters(llama, adapter)


def bytes_per_parameter(llama: Llama, config: Config) -> tuple[float, float]:
    """Return the bytes of states per model parameter, on the device and in CPU memory."""
    adapter, parallel = config.adapter, config.parallel
    trained = parallel.state_bytes(moments_per_parameter(llama, adapter, config.optimizer.kind))
    if not adapter.is_enabled:
        return trained
    share, frozen = n_adapter_parameters(llama, adapter) / llama.parameters, COMPUTE_BYTES[parallel.numerics]
    device, host = (share * n_bytes for n_bytes in trained)
    return (device, host + frozen) if parallel.offload == "all" else (device + frozen, host)


def adapted_features(llama: Llama, adapter: Adapter) -> tuple[int, int]:
    """Return the summed input and output features of a layer's adapted matrices."""
    shapes = lora_shapes(dataclasses.replace(llama, layers=1), adapter)
    inputs = sum(shape[1] for name, shape in shapes.items() if name.endswith(LORA_A))
    return inputs, sum(shape[0] for name, shape in shapes.items() if name.endswith(LORA_B))


def adapter_label(adapter: Adapter) -> str:
    """Describe an adapter; checkpoints store this text."""
    if not adapter.is_enabled:
        return "none"
    targets = (
        "all matrices"
        if {*adapter.targets} == {*ADAPTER_TARGETS}
        else ",".join(sorted(adapter.targets, key=ADAPTER_TARGETS.index))
    )
    return f"{adapter.kind} of rank {adapter.rank}, alpha {adapter.alpha:g}, beside {targets}"


def adapter_flops(llama: Llama, adapter: Adapter, seq_len: int) -> int:
    """Count the model FLOPs of training on one token, as ``Llama.flops_per_token`` does.

    Frozen matrices count four per weight, not six.
    """
    full_flops = llama.flops_per_token(seq_len)
    if not adapter.is_enabled:
        return full_flops
    frozen_weights = sum(math.prod(shape) for name, shape in llama.tensors().items() if name.endswith("_proj.weight"))
    return full_flops - 2 * (frozen_weights + llama.vocab * llama.hidden) + 6 * n_adapter_parameters(llama, adapter)


def read_peft(directory: Path, llama: Llama, adapter: Adapter) -> Layout:
    """Locate an adapter's parameters in a directory that peft wrote.

    Raises:
        UserError: It is no LoRA, or not of this model, rank, alpha and targets.
    """
    config_path, weights_path = directory / PEFT_CONFIG, directory / PEFT_WEIGHTS
    if not config_path.is_file():
        raise UserError(
            f"--adapter.path: {config_path} is not a file; name a directory that peft or export --adapter wrote"
        )
    config = read_hf_json(config_path)
    if config.get("peft_type") != "LORA":
        raise UserError(f"{config_path}: peft_type is {config.get('peft_type')!r}; only LORA can be trained")
    unsupported = [key for key in UNSUPPORTED_PEFT_SETTINGS if config.get(key)]
    if config.get("bias", "none") != "none":
        unsupported.append("bias")
    if str(config.get("init_lora_weights")).lower().startswith(UNSUPPORTED_INITIALIZATIONS):
        unsupported.append("init_lora_weights")
    if unsupported:
        raise UserError(
            f"{config_path}: {unsupported[0]} is {config[unsupported[0]]!r}, which is not supported; train an adapter without it"
        )
    if not weights_path.is_file():
        raise UserError(f"{weights_path}: no such file; save the adapter as safetensors, as peft does")
    tensors = {name.removeprefix(PEFT_PREFIX): info for name, info in read_header(weights_path).items()}
    matrices = {name.removesuffix(LORA_B).rpartition(".")[2] for name in tensors if name.endswith(LORA_B)}
    targets = {*split_projections(matrices)}
    if unknown_targets := sorted(targets - {*ADAPTER_TARGETS}):
        raise UserError(
            f"{weights_path}: {unknown_targets[0]} has an adapter, which is not supported; use one of {', '.join(ADAPTER_TARGETS)} alone"
        )
    _check_peft_settings(config_path, config, targets, adapter)
    expected = lora_shapes(llama, adapter)
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise UserError(
            f"{weights_path}: has {unknown[0]}{and_more(unknown)}, of another model or kind; use an adapter of this model"
        )
    for name, shape in expected.items():
        if name not in tensors or tensors[name].shape != shape:
            actual = list(tensors[name].shape) if name in tensors else "missing"
            raise UserError(
                f"{weights_path}: {name} is {actual}, but the model needs {list(shape)}; use an adapter of this model"
            )
        if tensors[name].dtype not in ("F32", "F16", "BF16"):
            raise UserError(f"{weights_path}: {name} is {tensors[name].dtype}; only F32, F16 and BF16 can be trained")
    return tensors


def _check_peft_settings(
    config_path: Path, config: Mapping[str, Any], target_names: Collection[str], adapter: Adapter
) -> None:
    """Refuse settings that are not those of an adapter that is to be gone on with; ``target_names``: its targets."""
    targets = ",".join(name for name in ADAPTER_TARGETS if name in target_names)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float):
        raise UserError(
            f"{config_path}: r is {rank!r} and lora_alpha {alpha!r}; both must be numbers; save the adapter again"
        )
    if (rank, alpha, {*target_names}) != (adapter.rank, adapter.alpha, {*adapter.targets}):
        flags = f"--adapter.rank {rank} --adapter.alpha {alpha} --adapter.targets {targets}"
        raise UserError(f"--adapter.path: {config_path.parent} has other settings; use {flags}")


def peft_config(adapter: Adapter, base: str, names: Iterable[str]) -> dict[str, Any]:
    """Return what ``adapter_config.json`` holds; ``base``: the model that it is of; ``names``: its parameters'."""
    matrices = {name.removesuffix(LORA_B).rpartition(".")[2] for name in names if name.endswith(LORA_B)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(matrices, key=lambda name: ADAPTER_TARGETS.index(split_projections([name])[0])),
        "inference_mode": True,
    }
