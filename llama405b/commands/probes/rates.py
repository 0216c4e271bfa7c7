"""What the parts of a planned run attain alone, all ranks at once: a layer, updates, copies, collectives and disks. Predicts nothing."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig

from llama405b.capacity.part import Part, UnitSizes
from llama405b.capacity.run_shape import RunShape
from llama405b.commands.probes import host, links
from llama405b.commands.probes.timing import best_s
from llama405b.contract.probes import Figure
from llama405b.contract.schema import Optimizer
from llama405b.distributed.ranks import Rank
from llama405b.model import llama
from llama405b.model.batch import Batch
from llama405b.model.checkpointing import checkpoint_activations
from llama405b.model.inputs import model_inputs
from llama405b.model.kernels import candidates, lack
from llama405b.model.llama import compute_dtype
from llama405b.optim.adamw import build_optimizer


def rates(me: Rank, load: RunShape, directory: Path) -> list[Figure]:
    """Measure what ``capacity.calibration.Alone`` holds, by its names and in its units; writes to the directory."""
    layer_s = best_s(me, layer_pass(load, me))
    n = (64 << 20) if me.on_gpu else (4 << 20)  # elements
    on_device, on_host = best_s(me, device_update(n, me)), best_s(me, host.update_of(n))
    return [
        Figure("layer_s", layer_s, "s"),
        Figure("device_update", host.UPDATE_BYTES * n / on_device, "B/s"),
        Figure("host_update", host.UPDATE_BYTES * n * load.ranks_per_host / on_host, "B/s"),
        Figure("copies", min(host.copy_rates(me, host.registered(me)).values()), "B/s"),
        *unit_collectives(load, me),
        Figure("disk", disk(directory, load, me), "B/s"),
    ]


def layer_pass(load: RunShape, me: Rank) -> Callable[[], None]:
    """Return what takes a layer forward and back, with the first attention that runs here.

    Raises:
        Exception: The last that is there does not run; its own.
    """
    dtype = compute_dtype(load.numerics)
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
    shape, dtype = load.llama, compute_dtype(load.numerics)
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


def unit_collectives(load: RunShape, me: Rank) -> list[Figure]:
    """Measure an all-gather and a reduce-scatter of a unit, and a small all-gather; all are 0 with one rank."""
    gather = scatter = hop_s = 0.0
    if me.world > 1:
        dtype = compute_dtype(load.numerics)
        n = UnitSizes.of(Part(load.llama)).layer // (1 + load.halves) // me.world
        whole, part = (torch.zeros(size, device=me.device, dtype=dtype) for size in (n * me.world, n))
        few, many = torch.zeros(1, device=me.device), torch.zeros(me.world, device=me.device)
        small_s = links.gather_seconds(me, many, few)
        hop_s = small_s / (me.world - 1)
        latency_s = small_s * (load.hosts > 1)  # which is counted by itself between hosts
        share = (me.world - 1) / me.world * whole.nbytes
        gather, scatter = (
            share / max(seconds / 2, seconds - latency_s)
            for seconds in (links.gather_seconds(me, whole, part), links.scatter_seconds(me, whole, part))
        )
    return [Figure("gather", gather, "B/s"), Figure("scatter", scatter, "B/s"), Figure("hop_s", hop_s, "s")]


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
        return len(block) * blocks * load.ranks_per_host / best_s(me, act)
    finally:
        file.unlink(missing_ok=True)
