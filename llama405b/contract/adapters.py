"""LoRA: beside a frozen matrix W the product of two narrow ones, W + alpha / rank * B A (arXiv 2106.09685), and peft's files of it.

Knows names and shapes; of files, headers alone.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from llama405b.contract.errors import UserError
from llama405b.contract.phrases import and_more
from llama405b.contract.schema import COMPUTE_BYTES, TARGETS, Adapter, Parallel
from llama405b.contract.tensors import Layout, read_header, read_hf_json
from llama405b.contract.weights import Llama

DOWN, UP = ".lora_A.weight", ".lora_B.weight"  # what peft calls A (rank, inputs) and B (outputs, rank), beside a matrix
PEFT = "base_model.model."  # what the names in its files begin with
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# What peft's other kinds of LoRA set, and this one does not.
OTHERS = (
    "use_dora", "use_rslora", "use_qalora", "use_bdlora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "layers_to_transform",
    "layer_replication", "modules_to_save", "trainable_token_indices", "target_parameters", "lora_bias", "alora_invocation_tokens",
    "kasa_config", "arrow_config", "monteclora_config",
)  # fmt: skip
BESIDE_OTHERS = (
    "pissa",
    "olora",
    "corda",
    "loftq",
    "lora_ga",
)  # beginnings that take themselves out of the weights beside which they are


def is_factor(name: str) -> bool:
    """Whether a parameter is an adapter's."""
    return name.endswith((DOWN, UP))


def factors(llama: Llama, adapter: Adapter) -> dict[str, tuple[int, int]]:
    """Return an adapter's parameters by name, with their shapes, in the order of the model's; none without one."""
    found: dict[str, tuple[int, int]] = {}
    for name, shape in llama.tensors().items() if adapter.trains else ():
        matrix = name.removesuffix(".weight")
        if len(shape) == 2 and matrix.rpartition(".")[2] in adapter.targets:
            found |= {matrix + DOWN: (adapter.rank, shape[1]), matrix + UP: (shape[0], adapter.rank)}
    return found


def n_parameters(llama: Llama, adapter: Adapter) -> int:
    """Count an adapter's parameters."""
    return sum(map(math.prod, factors(llama, adapter).values()))


def n_trained(llama: Llama, adapter: Adapter) -> int:
    """Count the parameters that take gradients, and that a checkpoint holds."""
    return n_parameters(llama, adapter) if adapter.trains else llama.parameters


def held_bytes(llama: Llama, adapter: Adapter, parallel: Parallel) -> tuple[float, float]:
    """Return the bytes per parameter of the model that its states take: on the device, and in CPU memory."""
    if not adapter.trains:
        return parallel.state_bytes
    share, frozen = n_parameters(llama, adapter) / llama.parameters, COMPUTE_BYTES[parallel.numerics]
    device, host = (share * each for each in parallel.state_bytes)
    return (device, host + frozen) if parallel.offload == "all" else (device + frozen, host)


def adapted(llama: Llama, adapter: Adapter) -> tuple[int, int]:
    """Return the inputs, and the outputs, of a layer's matrices that have adapters, each summed."""
    shapes = factors(dataclasses.replace(llama, layers=1), adapter)
    inputs = sum(shape[1] for name, shape in shapes.items() if name.endswith(DOWN))
    return inputs, sum(shape[0] for name, shape in shapes.items() if name.endswith(UP))


def describe(adapter: Adapter) -> str:
    """Say what an adapter is."""
    if not adapter.trains:
        return "none"
    targets = (
        "all matrices" if {*adapter.targets} == {*TARGETS} else ",".join(sorted(adapter.targets, key=TARGETS.index))
    )
    return f"{adapter.kind} of rank {adapter.rank}, alpha {adapter.alpha:g}, beside {targets}"


def flops_per_token(llama: Llama, adapter: Adapter, seq_len: int) -> int:
    """Count the model FLOPs of training on one token, as ``Llama.flops_per_token``: of frozen matrices four per weight, not six."""
    whole = llama.flops_per_token(seq_len)
    if not adapter.trains:
        return whole
    frozen = sum(math.prod(shape) for name, shape in llama.tensors().items() if name.endswith("_proj.weight"))
    return whole - 2 * (frozen + llama.vocab * llama.hidden) + 6 * n_parameters(llama, adapter)


def read_peft(directory: Path, llama: Llama, adapter: Adapter) -> Layout:
    """Return where an adapter's parameters are in a directory that peft wrote.

    Raises:
        UserError: It is no LoRA, or not of this model, rank, alpha and targets.
    """
    where, file = directory / PEFT_CONFIG, directory / PEFT_WEIGHTS
    if not where.is_file():
        raise UserError(f"--adapter.path: {where} is no file; name a directory that peft, or export --adapter, wrote")
    described = read_hf_json(where)
    if described.get("peft_type") != "LORA":
        raise UserError(f"{where}: peft_type is {described.get('peft_type')!r}; only LORA can be trained")
    others = [key for key in OTHERS if described.get(key)]
    if described.get("bias", "none") != "none":
        others.append("bias")
    if str(described.get("init_lora_weights")).lower().startswith(BESIDE_OTHERS):
        others.append("init_lora_weights")
    if others:
        raise UserError(
            f"{where}: {others[0]} is {described[others[0]]!r}, which is not done here; train an adapter without it"
        )
    if not file.is_file():
        raise UserError(f"{file}: no such file; save the adapter as safetensors, as peft does")
    found = {name.removeprefix(PEFT): info for name, info in read_header(file).items()}
    there = {name.removesuffix(UP).rpartition(".")[2] for name in found if name.endswith(UP)}
    if odd := sorted(there - {*TARGETS}):
        raise UserError(
            f"{file}: {odd[0]} has an adapter, which is not done here; use one of {', '.join(TARGETS)} alone"
        )
    _check_settings(where, described, there, adapter)
    expected = factors(llama, adapter)
    if unknown := sorted(found.keys() - expected.keys()):
        raise UserError(
            f"{file}: has {unknown[0]}{and_more(unknown)}, of another model or kind; use an adapter of this model"
        )
    for name, shape in expected.items():
        if name not in found or found[name].shape != shape:
            its = list(found[name].shape) if name in found else "not there"
            raise UserError(f"{file}: {name} is {its}, but the model needs {list(shape)}; use an adapter of this model")
        if found[name].dtype not in ("F32", "F16", "BF16"):
            raise UserError(f"{file}: {name} is {found[name].dtype}; only F32, F16 and BF16 can be trained")
    return found


def _check_settings(where: Path, described: Mapping[str, Any], there: Collection[str], adapter: Adapter) -> None:
    """Refuse settings that are not those of an adapter that is to be gone on with; ``there``: its targets."""
    targets = ",".join(name for name in TARGETS if name in there)
    rank, alpha = described.get("r"), described.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float):
        raise UserError(
            f"{where}: r is {rank!r} and lora_alpha {alpha!r}, which are no numbers; save the adapter again"
        )
    if (rank, alpha, {*there}) != (adapter.rank, adapter.alpha, {*adapter.targets}):
        right = f"--adapter.rank {rank} --adapter.alpha {alpha} --adapter.targets {targets}"
        raise UserError(f"--adapter.path: {where.parent} has other settings; write {right}")


def peft_config(adapter: Adapter, base: str) -> dict[str, Any]:
    """Return what ``adapter_config.json`` holds; ``base``: the model that it is of."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(adapter.targets, key=TARGETS.index),
        "inference_mode": True,
    }
