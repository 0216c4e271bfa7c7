"""How much of a model BF16 lets a step of AdamW change. Pure."""

import math

from llama405b.contract.schema import Optimizer, Parallel

STD = 0.02  # of a weight: Llama's initializer_range
EXPONENTS = range(-60, 2)  # of weights in BF16 that count
ENOUGH = 0.5  # of the weights


def rounding_note(parallel: Parallel, optimizer: Optimizer) -> str:
    """Say how few of the weights a step changes, where they are kept in BF16; '' if it changes most."""
    share = changed_share(optimizer.lr, optimizer.betas[0])
    if parallel.numerics != "pure-bf16" or share > ENOUGH:
        return ""
    norms = " and none of the norms'" * parallel.by_fsdp1  # which have no FP32 masters there
    return (
        f"with numerics pure-bf16 a step at learning rate {optimizer.lr:g} changes about {100 * share:.2g}% of the weights{norms}; "
        "BF16 rounds the other updates away: use fp32-master, or a higher --optimizer.lr"
    )


def changed_share(lr: float, beta1: float) -> float:
    """Return the share of BF16 weights that one step changes, roughly: weights and updates are normal, and independent.

    A weight changes if its update is above half a unit in its last place, 2^-8 of its power of two. An update is lr m / sqrt(v), where
    m is a running average of gradients, whose variance is (1 - beta1) / (1 + beta1) of theirs if they are noise (AdamW: arXiv 1711.05101).
    """
    update = lr * math.sqrt((1 - beta1) / (1 + beta1))
    return sum(
        (_within(2.0 ** (e + 1) / STD) - _within(2.0**e / STD)) * (1 - _within(2.0 ** (e - 8) / update))
        for e in EXPONENTS
    )


def _within(deviations: float) -> float:
    """The share of a normal distribution that is within so many standard deviations."""
    return math.erf(deviations / math.sqrt(2))
