"""Settings that change no bit, or little, on a GPU; run them with ``.venv/bin/python -m pytest -m gpu``."""

import pytest
import torch

from llama405b.model import llama
from llama405b.settings.schema import Model, Parallel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT RUN: no GPU")]
SAME_BITS = ("operators", "operators:2", "every:2", "none")
ROUNDED_OTHERWISE = {  # losses apart by at most
    "chunked loss": (Parallel(), Model(loss="chunked"), 1e-2),
    "compiled": (Parallel(), Model(compile=True), 1e-2),
    "fused": (Parallel(), Model(fused="true"), 1e-2),
    "stochastic": (Parallel(numerics="bf16-stochastic"), Model(), 1e-1),
}


@pytest.fixture(scope="module")
def eight_steps():
    from llama405b.bench.steps import EXACT, take_steps
    from llama405b.distributed import ranks

    me = ranks.join_process_group("cuda", 60)
    torch.use_deterministic_algorithms(True)
    yield lambda parallel, model: take_steps(EXACT, parallel, me, 8, model)[0]
    torch.use_deterministic_algorithms(False)
    ranks.leave_process_group()


@pytest.fixture(scope="module")
def usual(eight_steps):
    losses = eight_steps(Parallel(), Model())
    assert len(set(losses)) == len(losses)
    assert eight_steps(Parallel(), Model()) == losses  # the control
    return losses


@pytest.mark.parametrize("activations", ["device", "host"])
@pytest.mark.parametrize("kind", SAME_BITS)
def test_what_is_computed_again_changes_no_bit(eight_steps, usual, kind, activations):
    if (kind, activations) == ("none", "host"):
        kind = "full"
    assert eight_steps(Parallel(), Model(activation_checkpointing=kind, activations=activations)) == usual


@pytest.mark.parametrize("name", ROUNDED_OTHERWISE)
def test_what_rounds_otherwise_learns_the_same(eight_steps, usual, name):
    parallel, model, apart = ROUNDED_OTHERWISE[name]
    if model.compile and (why := llama.compile_unsupported_reason(torch.device("cuda"))):
        pytest.skip(f"NOT RUN: {why}")
    assert eight_steps(parallel, model) == pytest.approx(usual, abs=apart)
