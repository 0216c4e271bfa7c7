"""What can be changed of a run, one thing at a time, so that it fits or is faster. Pure."""

import bisect
import dataclasses
import functools

from llama405b.capacity.estimate import Cluster
from llama405b.capacity.outlook import HALVES, WHOLE, Fit, Outlook
from llama405b.capacity.run_shape import RunShape
from llama405b.contract.recompute import FULL, Recompute
from llama405b.contract.schema import FP32_MASTERS, IN_BF16, Offload

LEAST_GAIN = 0.01
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "all")


def keeping_most(outlook: Outlook) -> Outlook:
    """Return the same run with the activations of as many layers kept as surely fit, operators' results at least."""

    def kept(recompute: Recompute) -> Outlook:
        return outlook.of_load(dataclasses.replace(outlook.load, recompute=recompute))

    def operators(layers: int) -> Outlook:
        return kept(Recompute("operators", last=layers))

    for whole in (Recompute("none"), Recompute("operators")):
        if (found := kept(whole)).gpu is Fit.YES:
            return found
    spare, layers = _beyond(outlook), max(outlook.load.stages, default=outlook.load.llama.layers)
    while True:  # by what is allocated, as what is reserved beside it takes long to find
        room = outlook.cluster.gpu.memory_bytes - spare
        fits = bisect.bisect_right(range(1, layers), room, key=lambda count: operators(count).needs.gpu_bytes)
        found = operators(fits) if fits else outlook
        if not fits or found.gpu is Fit.YES:
            return found
        spare, layers = max(spare, _beyond(found)), fits


def _beyond(outlook: Outlook) -> float:
    """Bytes of a GPU that PyTorch reserves beyond what is allocated; 0: not known."""
    return (outlook.needs.gpu_reserved_bytes or outlook.needs.gpu_bytes) - outlook.needs.gpu_bytes


def largest_micro_batch(outlook: Outlook) -> int:
    """Return the largest micro-batch that fits with these settings; 0: none."""

    def fits(micro: int) -> bool:
        load = dataclasses.replace(outlook.load, micro_batch=micro)
        return outlook.of_load(load).gpu is Fit.YES

    return bisect.bisect_left(range(1, 1025), x=True, key=lambda micro: not fits(micro))


def remedies(outlook: Outlook) -> list[tuple[str, Outlook]]:
    """Return single changes that help, the most helpful first: what they are, and what follows.

    While it does not surely fit, those that fit better help; then those that make it faster by more than 1 %.
    """
    load, cluster = outlook.load, outlook.cluster
    changed = [(words, other) for words, other in _changes(load) if other != load and can_run(other, cluster)]
    if cluster.rates:  # measured with these numerics
        changed = [(words, other) for words, other in changed if other.numerics == load.numerics]
    found = [(words, outlook.of_load(other)) for words, other in changed]
    if outlook.fit is Fit.YES and load.recompute == FULL and not load.compiled:
        most = keeping_most(outlook)
        found.append((f"--model.activation_checkpointing {most.load.recompute}", most))
    faster = dataclasses.replace(cluster, nic_bytes_per_s=2 * cluster.nic_bytes_per_s)
    if load.hosts > 1:
        found.append(("twice the network", Outlook.of(load, faster, outlook.ram_bytes)))
    helps = [
        (words, other)
        for words, other in found
        if other.fit > outlook.fit or (other.fit == outlook.fit == Fit.YES and other.gain(outlook) > LEAST_GAIN)
    ]
    return sorted(helps, key=lambda each: (-each[1].fit, -each[1].gain(outlook)))


def _changes(load: RunShape) -> list[tuple[str, RunShape]]:
    """Return what can be changed alone, in words, and what is then run."""
    change = functools.partial(dataclasses.replace, load)
    return [
        (f"smaller units (--parallel.wrap {','.join(HALVES)})", change(wrap=HALVES)),
        (f"larger units (--parallel.wrap {','.join(WHOLE)})", change(wrap=WHOLE)),
        ("--parallel.offload none", change(offload="none", moments="fp32")),
        ("--parallel.offload optimizer", change(offload="optimizer")),
        ("--parallel.offload all", change(offload="all")),
        ("--parallel.loss parts", change(loss="parts")),
        ("--model.compile true (rounds otherwise)", change(compiled=True)),
        ("--model.fused true (rounds otherwise)", change(fused=True)),
        ("--model.activations host", change(activations="host")),
        (f"--parallel.reshard_after_forward {load.ranks_per_host}", change(kept_by=load.ranks_per_host)),
        ("--parallel.moments bf16 (with optimizer.betas of at most 0.99)", change(moments="bf16")),
        (
            "--parallel.numerics fp8 --model.compile true (products in FP8, by torchao)",
            change(numerics="fp8", compiled=True, fused=False),
        ),
        (f"--training.micro_batch_size {2 * load.micro_batch}", change(micro_batch=2 * load.micro_batch)),
        (_twice(load), change(world=2 * load.world, global_batch=max(load.global_batch, 2 * load.dp))),
    ]


def _twice(load: RunShape) -> str:
    """Name twice the hosts, and what that makes of the batch."""
    batch = 2 * load.dp
    return (
        f"twice the hosts (with --training.global_batch_size {batch})"
        if batch > load.global_batch
        else "twice the hosts"
    )


def can_run(load: RunShape, cluster: Cluster) -> bool:
    """Whether the trainer takes these settings, and their time is known on what was measured, if that was."""
    if cluster.gpu.is_cpu and load.offload != "none":
        return False
    if load.offload != "none" and load.axes.dp_replicate > 1:
        return False
    if load.compiled and (
        load.tp * load.cp > 1 or load.halves or "operators" in str(load.recompute) or cluster.gpu.is_cpu
    ):
        return False
    if load.adapter.trains and (load.offload == "optimizer" or load.numerics == "fp8"):
        return False
    if load.numerics == "fp8" and (load.fused or load.tp > 1 or not cluster.gpu.fp8_flops):
        return False
    if load.fused and (load.compiled or load.tp > 1):
        return False
    if load.prefetch and load.halves:
        return False
    if load.kept_by and (
        load.keeps_weights or load.tp * load.pp > 1 or load.kept_by >= load.shards or load.shards % load.kept_by
    ):
        return False
    if load.activations == "host" and (cluster.gpu.is_cpu or load.recompute == Recompute("none")):
        return False
    if load.offload == "optimizer" and load.numerics not in FP32_MASTERS:
        return False
    if load.moments == "bf16" and (load.offload == "none" or load.numerics in IN_BF16):
        return False
    return load.global_batch % (load.micro_batch * load.dp) == 0
