"""One step after another of a small model on each axis of a mesh, beside FSDP over all ranks, which learns the same from the same batch."""

import functools
import gc
import statistics
from pathlib import Path

from llama405b.commands.probes.steps import EXACT, STEPS, run_steps
from llama405b.contract.probes import Figure
from llama405b.contract.schema import Optimizer, Parallel
from llama405b.distributed.ranks import Rank, on_mesh
from llama405b.model import llama
from llama405b.model.checkpointing import checkpoint_activations
from llama405b.optim.build_updater import build_updater
from llama405b.optim.fp32_masters import master_model
from llama405b.parallel import fsdp2, load_weights
from llama405b.parallel.build_passes import build_passes
from llama405b.parallel.split import holdings_of, split

WITHIN = 1e-2  # relative, of a loss: BF16 rounds elsewhere where matrices are cut


def beside_fsdp(parallel: Parallel, me: Rank) -> list[Figure]:
    """Take steps with a mesh, and with FSDP over all ranks.

    Raises:
        RuntimeError: Losses differ.
    """
    plain, expected_s = _steps(Parallel(), me)
    losses, took_s = _steps(parallel, me)
    apart = [abs(loss / expected - 1) for loss, expected in zip(losses, plain, strict=True)]
    if not all(each <= WITHIN for each in apart):  # nor is one not a number
        raise RuntimeError(f"the losses are {losses}, and with FSDP alone {plain}")
    return [
        Figure("losses apart by", max(apart), ""),
        Figure("step", took_s, "s"),
        Figure("step by FSDP", expected_s, "s"),
    ]


tp = functools.partial(beside_fsdp, Parallel(tp=2))
cp = functools.partial(beside_fsdp, Parallel(cp=2))
pp = functools.partial(beside_fsdp, Parallel(pp=2))
hsdp = functools.partial(beside_fsdp, Parallel(dp_replicate=2))


def _steps(parallel: Parallel, me: Rank) -> tuple[list[float], float]:
    """Return the losses of some steps of a sequence for each rank, and the median of their seconds but the first's."""
    me, config = on_mesh(me, parallel), EXACT.config(me)
    whole = llama.build_on_meta(config, EXACT.attention, fsdp2.shard_dtype(parallel))
    holdings, model = holdings_of(whole, parallel, me), split(whole, parallel, me)
    master = master_model(model, parallel)
    if master is not model:
        load_weights.materialise(model, me)
    load_weights.load(master, Path(), "local", me, lambda *_: None, random=EXACT.llama(me), holdings=holdings)
    checkpoint_activations(model)
    passes = build_passes(parallel, model, me)
    updater = build_updater(model, Optimizer(), parallel, me.device, master=master)
    per_rank = me.world // me.dp.size  # sequences, one at a time, of a batch that has one for each rank
    mine = range(me.dp.rank * per_rank, (me.dp.rank + 1) * per_rank)
    losses, seconds, _ = run_steps(passes, updater, (EXACT.batches(me, step, mine) for step in range(1 + STEPS)), me)
    del model, master, passes, updater
    gc.collect()  # or its memory would be there beside the next model's
    return losses, statistics.median(sum(each.values()) for each in seconds[1:])
