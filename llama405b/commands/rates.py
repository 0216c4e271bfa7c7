"""What ``plan --calibrate`` runs on every rank: what a layer, updates, copies, collectives and disks attain, all ranks at once.

Rank 0 prints a line of ``SIGN`` and the rates as JSON. Knows clocks and the modules that a step is made of; predicts nothing.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig

from llama405b.capacity.calibration import SIGN, Alone
from llama405b.capacity.run_shape import RunShape, UnitSizes
from llama405b.commands.checkup import best_of
from llama405b.contract import reader
from llama405b.contract.schema import COMPUTE_BYTES, Optimizer
from llama405b.distributed import collectives, numa, ranks
from llama405b.distributed.host_memory import allocate
from llama405b.distributed.ranks import Rank
from llama405b.model import llama
from llama405b.model.batch import Batch
from llama405b.model.inputs import model_inputs
from llama405b.model.kernels import candidates, lack
from llama405b.optim.adamw import Settings, build_optimizer, update_adamw
from llama405b.parallel.fsdp2 import checkpoint_activations

TIMEOUT_S = 120
DTYPES = {2: torch.bfloat16, 4: torch.float32}
UPDATE_BYTES = 28  # per element of FP32: weight, gradient and moments read, all but the gradient written


def main(argv: Sequence[str]) -> int:
    """Measure as one of the ranks that torchrun has started."""
    parser = argparse.ArgumentParser(prog="llama405b.commands.rates", description=__doc__)
    parser.add_argument("--load", type=lambda text: reader.loads(RunShape, text, "--load"), required=True)
    parser.add_argument("--checkpoints", type=Path, required=True, help="directory to write to")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--bind", choices=("auto", "off"), default="auto")
    args = parser.parse_args(argv)
    me = ranks.join(args.device, TIMEOUT_S)
    if args.bind == "auto":
        numa.bind(me)
    layer = slowest(me, layer_pass(args.load, me))
    n = (64 << 20) if me.on_gpu else (4 << 20)  # elements
    on_device = UPDATE_BYTES * n / slowest(me, device_update(n, me))
    in_host = UPDATE_BYTES * n * args.load.ranks_per_host / slowest(me, host_update(n))
    gather, scatter, hop_s = time_collectives(args.load, me)
    found = Alone(
        layer, on_device, in_host, measure_copies(me), gather, scatter, hop_s, disk(args.checkpoints, args.load, me)
    )
    if me.is_rank0:
        print(SIGN + reader.dumps(found), flush=True)
    ranks.leave()
    return 0


def slowest(me: Rank, act: Callable[[], object]) -> float:
    """Return the seconds of the fastest of three passes, on the slowest rank."""
    [micros] = collectives.all_reduce_max([int(1e6 * best_of(me, act)) + 1])
    return micros / 1e6


def layer_pass(load: RunShape, me: Rank) -> Callable[[], None]:
    """Return what takes a layer forward and back, with the first attention that runs here.

    Raises:
        Exception: The last that is there does not run; its own.
    """
    dtype = DTYPES[COMPUTE_BYTES[load.numerics]]
    *others, last = [name for name in candidates(load.attention) if not lack(name, me.device, dtype)]
    for kernel in others:
        act = layer_with(kernel, load, me)
        try:
            act()
        except Exception:  # noqa: BLE001 - whatever an installed kernel that does not fit says
            continue
        return act
    return layer_with(last, load, me)


def layer_with(kernel: str, load: RunShape, me: Rank) -> Callable[[], None]:
    """Build one decoder layer of the run, unsharded; returns what takes it forward and back, recomputed, over a micro-batch."""
    shape, dtype = load.llama, DTYPES[COMPUTE_BYTES[load.numerics]]
    config = LlamaConfig(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, num_hidden_layers=1, vocab_size=8,
        attention_bias=shape.attention_bias, mlp_bias=shape.mlp_bias, max_position_embeddings=load.seq_len,
    )  # fmt: skip
    model = llama.build_on_meta(config, kernel, dtype).to_empty(device=me.device)
    llama.restore_buffers(model, config, me.device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=shape.initializer_range)
    checkpoint_activations(model)
    ids = torch.zeros(load.micro_batch, load.seq_len, dtype=torch.int64, device=me.device)
    inputs = model_inputs(Batch(ids, ids), kernel)
    del inputs["input_ids"]
    hidden_BSH = torch.randn(*ids.shape, shape.hidden, device=me.device, dtype=dtype, requires_grad=True)

    def act() -> None:
        model.zero_grad(set_to_none=True)
        model.model(inputs_embeds=hidden_BSH, **inputs).last_hidden_state.sum().backward()

    return act


def device_update(n: int, me: Rank) -> Callable[[], None]:
    """Return what clips and updates so many elements as a run does whose states stay where it trains."""
    module = nn.Linear(1, n, bias=False, device=me.device)
    module.weight.grad = torch.randn_like(module.weight)
    optimizer = build_optimizer(module, Optimizer())

    def act() -> None:
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()

    return act


def host_update(n: int) -> Callable[[], None]:
    """Return what updates so many elements in host memory, on this rank's threads."""
    weight, gradient = nn.Parameter(torch.randn(n)), torch.randn(n)
    state = {"step": torch.zeros(())} | {name: torch.zeros(n) for name in ("exp_avg", "exp_avg_sq")}
    settings = Settings(1e-5, (0.9, 0.95), 0.1, 1e-8)
    return torch.no_grad()(lambda: update_adamw([weight], [state], [gradient], settings))


def measure_copies(me: Rank) -> float:
    """Measure copies between device and pinned host memory, both ways in turn; returns bytes/s of the slower way."""
    n_bytes = (1 << 30) if me.on_gpu else (32 << 20)
    on_device, [on_host] = (
        torch.empty(n_bytes, dtype=torch.uint8, device=me.device),
        allocate([n_bytes], me.device, lambda *_: None),
    )
    return n_bytes / max(
        slowest(me, functools.partial(target.copy_, source, non_blocking=True))
        for target, source in ((on_device, on_host), (on_host, on_device))
    )


def time_collectives(load: RunShape, me: Rank) -> tuple[float, float, float]:
    """Measure an all-gather and a reduce-scatter of a unit, and a small all-gather; see ``Alone``, 0 with one rank."""
    if me.world == 1:
        return 0.0, 0.0, 0.0
    dtype = DTYPES[COMPUTE_BYTES[load.numerics]]
    n = UnitSizes.of(load.llama).layer // (1 + load.halves) // me.world
    whole, part = (
        torch.zeros(n * me.world, device=me.device, dtype=dtype),
        torch.zeros(n, device=me.device, dtype=dtype),
    )
    few, many = torch.zeros(1, device=me.device), torch.zeros(me.world, device=me.device)
    hop_s = slowest(me, functools.partial(dist.all_gather_into_tensor, many, few)) / (me.world - 1)
    latency_s = hop_s * (me.world - 1) * (load.hosts > 1)  # which is counted by itself between hosts

    def rate(act: Callable[[], object]) -> float:
        seconds = slowest(me, act)
        return (me.world - 1) / me.world * whole.nbytes / max(seconds / 2, seconds - latency_s)

    gather = rate(functools.partial(dist.all_gather_into_tensor, whole, part))
    return gather, rate(functools.partial(dist.reduce_scatter_tensor, part, whole)), hop_s


def disk(directory: Path, load: RunShape, me: Rank) -> float:
    """Measure how fast a host writes to a directory, through to its disk; returns bytes/s of all its ranks."""
    block, blocks = os.urandom(1 << 20), 256 if me.on_gpu else 32
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f".rates-{me.rank}"

    def act() -> None:
        with file.open("wb", buffering=0) as into:
            for _ in range(blocks):
                into.write(block)
            os.fsync(into.fileno())

    try:
        return len(block) * blocks * load.ranks_per_host / slowest(me, act)
    finally:
        file.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
