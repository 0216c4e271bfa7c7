"""What our step costs beside a loop written by hand on the same FSDP2 units: CPU seconds, in turns in one process."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig

from benchmarks.pairs import in_turns, ratio_of
from llama405b.data.batch import Batch
from llama405b.distributed import ranks
from llama405b.distributed.ranks import Rank
from llama405b.model import llama
from llama405b.model.llama import checkpoint_activations
from llama405b.optim.build_updater import build_updater
from llama405b.optim.optimizer import build_optimizer
from llama405b.optim.step import train_step
from llama405b.parallel import fsdp, load_weights
from llama405b.parallel.passes import MicrobatchLoop
from llama405b.settings.schema import Optimizer, Parallel
from llama405b.spec import models

SHAPE = {
    "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 8,
    "num_hidden_layers": 4, "vocab_size": 8192,
}  # fmt: skip
SEQ = 128


def bench_step(pairs: int) -> tuple[dict[str, Any], str]:
    """Take ``pairs`` steps each, in turns."""
    me = ranks.join_process_group("cpu", 60)
    try:
        ours, by_hand = in_turns(_ours(me), _by_hand(me), pairs, time.process_time)
    finally:
        dist.destroy_process_group()
    ratio, seconds = ratio_of(ours, by_hand), {"ours": ours, "baseline": by_hand}
    report = {"shape": SHAPE, "cpu_seconds": seconds, "ratio": dataclasses.asdict(ratio), "torch": torch.__version__}
    return report, f"CPU seconds of a step: ours / by hand {ratio}"


def _model(me: Rank) -> nn.Module:
    config = LlamaConfig(**SHAPE)
    module = llama.build_on_meta(config, "sdpa", torch.float32)
    fsdp.shard_model(module, Parallel(numerics="fp32"), me.device)
    shape = models.parse_llama(config.to_dict() | {"architectures": None}, "the benchmark's model")
    load_weights.load(module, Path(), "local", me, lambda *_: None, random_shape=shape)
    checkpoint_activations(module)
    return module


def _ours(me: Rank) -> Callable[[], object]:
    module = _model(me)
    updater = build_updater(module, Optimizer(), Parallel(numerics="fp32"), me.device)
    x = torch.randint(0, SHAPE["vocab_size"], (1, SEQ))
    return lambda: train_step(MicrobatchLoop(module, 1), updater, [Batch(x, x.roll(-1))], max_norm=1.0)


def _by_hand(me: Rank) -> Callable[[], object]:
    """The loop that anyone would write."""
    module = _model(me)
    optimizer = build_optimizer(module, Optimizer())
    x = torch.randint(0, SHAPE["vocab_size"], (1, SEQ))

    def step() -> None:
        logits = module(input_ids=x, use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1).float(), x.roll(-1).flatten()).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
