"""A few decoder layers of the 405B shape on one GPU: parts of a step, peak memory, copy rates. Needs CUDA.

Compares CPU offload with no offload, if both fit. One GPU does not measure sharding over NCCL. The vocabulary is
small, so that the layers dominate.
"""

import json
from typing import Any

import torch
from transformers import LlamaConfig

from llama405b import load, ranks
from llama405b.contract.config import PRESET_DIR
from llama405b.contract.errors import UserError
from llama405b.contract.schema import Optimizer, Parallel
from llama405b.model import llama
from llama405b.optim.updater import build_updater
from llama405b.parallel import fsdp2
from llama405b.parallel.masters import kept_weights
from llama405b.step import train_step
from llama405b.timer import Laps

VOCAB = 8192
GIB = 1 << 30
COPY_BYTES = 2 * GIB


def bench_layers(layers: int, seq_len: int, steps: int) -> tuple[dict[str, Any], str]:
    """Train ``layers`` decoder layers on ``seq_len`` random tokens.

    Raises:
        UserError: There is no GPU.
    """
    if not torch.cuda.is_available():
        raise UserError("bench layers: torch sees no GPU; run it on a GPU host")
    me = ranks.join("cuda", 600)
    results = {
        "full": _measure(layers, seq_len, steps, me, Parallel(offload="full")),
        "states": _measure(layers, seq_len, steps, me, Parallel(offload="states")),
        "none": _measure(layers, seq_len, steps, me, Parallel(numerics="pure-bf16")),
    }
    report = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "layers": layers,
        "seq_len": seq_len,
        "copy_gib_per_s": _copy_rates(me.device),
        "results": results,
    }
    ranks.leave()
    return report, json.dumps(report, indent=2)


def _measure(layers: int, seq_len: int, steps: int, me: ranks.Ranks, parallel: Parallel) -> dict[str, Any]:
    known = json.loads((PRESET_DIR / "architectures.json").read_text())["llama3.1-405b"]
    config = LlamaConfig(**(known | {"num_hidden_layers": layers, "vocab_size": VOCAB}))
    attention, _ = llama.choose_attention("auto", me.device)
    module = llama.build_on_meta(config, attention, fsdp2.shard_dtype(parallel))
    fsdp2.shard(module, parallel, me.device)
    kept = kept_weights(module, parallel)
    load.materialise(module, me, offload=parallel.offload == "full")
    if kept is not module:
        load.materialise(kept, me, offload=True)
    for parameter in kept.parameters():
        own = parameter.data.to_local()
        own.copy_(0.02 * torch.randn(own.shape, dtype=own.dtype, device=me.device))  # on a CPU it takes minutes
    fsdp2.checkpoint_activations(module)
    updater = build_updater(module, Optimizer(), parallel, me.device, kept=kept)
    x = torch.randint(0, VOCAB, (1, seq_len), device=me.device)
    torch.cuda.reset_peak_memory_stats()
    timed = []
    for _ in range(steps + 1):
        laps = Laps(me.device)
        result = train_step(module, updater, [(x, x.roll(-1))], max_norm=1.0, dp_size=me.dp.size, lap=laps.end)
        assert result, "every token is a target"
        timed.append(dict(laps.seconds()))
        last_loss = result.loss
    mean = {part: sum(laps[part] for laps in timed[1:]) / steps for part in timed[0]}
    return {
        "numerics": parallel.numerics,
        "attention": attention,
        "parameters": sum(p.numel() for p in module.parameters()),
        "seconds": mean,
        "peak_allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "last_loss": last_loss,
    }


def _copy_rates(device: torch.device) -> dict[str, float]:
    """GiB/s between host and device, from pinned and from pageable memory."""
    rates = {}
    on_device = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    for name, pinned in (("pinned", True), ("pageable", False)):
        on_host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=pinned)
        for way, source, target in (("to_device", on_host, on_device), ("to_host", on_device, on_host)):
            target.copy_(source)
            laps = Laps(device)
            target.copy_(source, non_blocking=True)
            laps.end("copy")
            rates[f"{name}_{way}"] = COPY_BYTES / GIB / laps.seconds()["copy"]
    return rates
