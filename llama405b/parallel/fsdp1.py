"""The recipe as written: FullyShardedDataParallel with the module states synchronized from rank 0.

Rank 0 holds the whole model in CPU memory; all other ranks build it on the meta device. For users who want FSDP1's
options; ``shard`` and ``load`` do the same with one unit in memory at a time. torch does not support this on CPU.
"""

import functools
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from llama405b.contract.schema import Parallel
from llama405b.distributed.ranks import Rank
from llama405b.model.llama import build_on_meta, llama_name, restore_buffers, tie_head
from llama405b.parallel.fsdp2 import check_wrap, shard_dtype


def load_wrapped(
    directory: Path | None, config: PreTrainedConfig, attention: str, parallel: Parallel, me: Rank
) -> nn.Module:
    """Load on rank 0 (None: random weights), wrap, synchronize; returns the FSDP module with its weights.

    Raises:
        UserError: ``parallel.wrap`` names a class that the model does not have.
    """
    model = _unwrapped(directory, config, attention, shard_dtype(parallel), me)
    check_wrap(model, parallel.wrap)
    tied = config.tie_word_embeddings  # a weight that two modules share must stay in one unit: the root
    classes = {
        type(m)
        for m in model.modules()
        if llama_name(m, config) in parallel.wrap and not (tied and type(m) is nn.Embedding)
    }

    def materialise(module: nn.Module) -> None:
        module.to_empty(device=me.device, recurse=False)
        tie_head(model)  # to_empty unties it

    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes),
        sync_module_states=True,
        param_init_fn=None if me.is_rank0 else materialise,
        device_id=me.device,
        sharding_strategy=ShardingStrategy[parallel.sharding_strategy],
        mixed_precision=mixed if parallel.numerics == "fp32-master" else None,
        cpu_offload=CPUOffload(offload_params=parallel.offload == "all"),
        backward_prefetch=BackwardPrefetch.__members__.get(parallel.backward_prefetch),
        forward_prefetch=parallel.forward_prefetch,
        limit_all_gathers=parallel.limit_all_gathers,
        use_orig_params=True,
    )
    restore_buffers(wrapped, config, me.device)
    return wrapped


def _unwrapped(
    directory: Path | None, config: PreTrainedConfig, attention: str, dtype: torch.dtype, me: Rank
) -> PreTrainedModel:
    """Build the model, on rank 0 with its weights; the rotary frequencies are FP32 on all ranks, or they could not be sent."""
    if not me.is_rank0:
        meta = build_on_meta(config, attention, dtype)
        restore_buffers(meta, config, torch.device("meta"))
        return meta
    config.use_cache = False
    if directory:
        model = AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype=dtype, attn_implementation=attention
        )
    else:
        config._attn_implementation = attention
        model = AutoModelForCausalLM.from_config(config).to(dtype)
    restore_buffers(model, config, torch.device("cpu"))
    return model.train()
