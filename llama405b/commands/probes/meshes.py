"""One step after another of a small model on each axis of a mesh, beside FSDP over all ranks, which learns the same from the same batch."""

import functools
import gc
import statistics
from pathlib import Path

from llama405b.commands.probes.steps import EXACT, STEPS
from llama405b.contract import weights
from llama405b.contract.probes import Figure
from llama405b.contract.schema import Optimizer, Parallel
from llama405b.distributed.ranks import Rank, on_mesh
from llama405b.distributed.step_timer import StepTimer
from llama405b.model import llama
from llama405b.model.batch import Batch
from llama405b.model.checkpointing import checkpoint_activations
from llama405b.optim.build_updater import build_updater
from llama405b.optim.fp32_masters import master_model
from llama405b.optim.step import train_step
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
    master, shape = (
        master_model(model, parallel),
        weights.parse_llama(config.to_dict() | {"architectures": None}, "the model"),
    )
    if master is not model:
        load_weights.materialise(model, me)
    load_weights.load(master, Path(), "local", me, lambda *_: None, random=shape, holdings=holdings)
    checkpoint_activations(model)
    passes, updater = (
        build_passes(parallel, model, me),
        build_updater(model, Optimizer(), parallel, me.device, master=master),
    )
    losses, seconds = [], []
    for step in range(1 + STEPS):
        timer = StepTimer(me.device)
        result = train_step(passes, updater, _micro_batches(step, me), max_norm=1.0, lap=timer.mark)
        assert result, "every token is a target"
        losses.append(result.loss)
        seconds.append(sum(timer.seconds().values()))
    updater.wait()
    del model, master, passes, updater
    gc.collect()  # or its memory would be there beside the next model's
    return losses, statistics.median(seconds[1:])


def _micro_batches(step: int, me: Rank) -> list[Batch]:
    """Return this rank's sequences, one at a time, of a batch that has one for each rank."""
    each = me.world // me.dp.size
    sequences = [EXACT.tokens(me, step, number) for number in range(me.dp.rank * each, (me.dp.rank + 1) * each)]
    return [Batch(x, x.roll(-1, 1)) for x in sequences]
