"""Train one small model on with each kind of numerics: losses, and the share of weights that a step changes.

    .venv/bin/python scripts/numerics.py [STEPS] [NUMERICS …]

Bytes of the standard library's source. The model is trained in FP32 first, so that what follows is fine-tuning, by the trainer's own
step and updates, on one rank and a CPU, which emulates FP8 if torchao is installed (`PYTHONPATH=.venv/torchao`);
docs/measurements/numerics.md has what it printed.
"""

import copy
import statistics
import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from llama405b.data.batch import Batch
from llama405b.model import llama
from llama405b.model.llama import strip_wrappers
from llama405b.optim.build_updater import build_updater
from llama405b.optim.optimizer import master_model, master_pairs
from llama405b.optim.step import train_step
from llama405b.optim.updater import local_tensor
from llama405b.parallel.fsdp import shard_dtype, shard_model
from llama405b.parallel.passes import MicrobatchLoop
from llama405b.settings.schema import Optimizer, Parallel

BEFORE, STEPS, BATCH, LENGTH, LAST = 3000, 500, 8, 64, 100
RATES, SEEDS = (1e-5, 1e-4), (1, 2)
NUMERICS = ("fp32-master", "fp8", "bf16-stochastic", "pure-bf16")
SHAPE = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip


def main():
    steps = int(sys.argv[1]) if sys.argv[1:] else STEPS
    kinds = sys.argv[2:] or [
        each for each in NUMERICS if each != "fp8" or not llama.fp8_unsupported_reason(torch.device("cpu"))
    ]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    text = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    torch.manual_seed(0)
    start = LlamaForCausalLM(LlamaConfig(**SHAPE)).state_dict()
    start, losses, _ = trained(start, "fp32", 1e-3, ids, BEFORE, seed=0)
    print(f"{BEFORE} steps in FP32 at 1e-3: loss {statistics.mean(losses[-LAST:]):.4f}", flush=True)
    start = {name: weight.bfloat16() for name, weight in start.items()}  # as models are published
    for rate in RATES:
        for numerics in kinds:
            for seed in SEEDS:
                _, losses, share = trained(start, numerics, rate, ids, steps, seed=seed)
                means = [statistics.mean(losses[at : at + LAST]) for at in (0, steps // 2 - LAST // 2, steps - LAST)]
                said = ", ".join(f"{mean:.4f}" for mean in means)
                print(
                    f"{rate:g} {numerics}, data {seed}: loss {said}; a step changes {100 * share:.2f}% of the weights",
                    flush=True,
                )
    return 0


def trained(start, numerics, rate, ids, steps, seed):
    """Train from these weights; returns those after it, each step's loss, and the mean share of matrices' elements that a step changed."""
    parallel = Parallel(numerics=numerics, fsdp_embedding=False, device="cpu")
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(shard_dtype(parallel))
    model.load_state_dict(start)
    if numerics == "fp8":
        llama.convert_to_fp8(model, torch.device("cpu"))
    shard_model(model, parallel, torch.device("cpu"))
    master = master_model(model, parallel)
    with torch.no_grad():
        for weight, kept in master_pairs(model, master):
            local_tensor(kept).copy_(local_tensor(weight))
    updater = build_updater(model, Optimizer(lr=rate, weight_decay=0.0), parallel, torch.device("cpu"), master=master)
    passes, draw = MicrobatchLoop(model, 1), torch.Generator().manual_seed(seed)
    losses, shares = [], []
    for step in range(steps):
        at = torch.randint(0, len(ids) - LENGTH - 1, (BATCH,), generator=draw)
        rows = torch.stack([ids[i : i + LENGTH + 1] for i in at.tolist()]).long()
        before = copy.deepcopy(matrices(master)) if step % 50 == 49 else None
        losses.append(train_step(passes, updater, [Batch(rows[:, :-1], rows[:, 1:])], max_norm=1.0).loss)
        if before:
            now = matrices(master)
            changed = sum(int((now[name].bfloat16() != w.bfloat16()).sum()) for name, w in before.items())
            shares.append(changed / sum(w.numel() for w in before.values()))
    whole = {strip_wrappers(name): local_tensor(p.detach()).clone() for name, p in master.named_parameters()}
    return whole, losses, statistics.mean(shares)


def matrices(master):
    return {name: local_tensor(p.detach()) for name, p in master.named_parameters() if p.dim() > 1}


if __name__ == "__main__":
    sys.exit(main())
