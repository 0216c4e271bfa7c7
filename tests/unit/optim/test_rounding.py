"""What is said of pure BF16 at small learning rates, against AdamW itself."""

import dataclasses

import pytest
import torch

from llama405b.optim.optimizer import build_optimizer, set_lr
from llama405b.settings.schema import Optimizer, Parallel
from llama405b.spec.rules import changed_share, rounding_note

PURE = Parallel(numerics="pure-bf16")


@pytest.mark.parametrize("lr", [1e-6, 1e-5, 1e-4, 3e-3])
def test_a_step_changes_the_share_that_is_told(lr):
    torch.manual_seed(0)
    model = torch.nn.Linear(1000, 200, bias=False, dtype=torch.bfloat16)
    torch.nn.init.normal_(model.weight, 0, 0.02)
    optimizer = build_optimizer(model, Optimizer())
    for step in range(60):
        set_lr(optimizer, lr * (step == 59))
        before = model.weight.detach().clone()
        model.weight.grad = torch.randn_like(before)
        optimizer.step()
    changed = (model.weight != before).float().mean().item()
    assert changed_share(lr * Optimizer().spec.update_rms(0.9)) == pytest.approx(changed, rel=0.15)


def test_only_bf16_at_a_small_learning_rate_is_warned_of():
    small = Optimizer(lr=1e-5)
    note = rounding_note(PURE, small)
    assert note.startswith("with numerics pure-bf16 a step at learning rate 1e-05 changes about 2.7% of the weights; ")
    assert "weights and none of the norms'" in rounding_note(dataclasses.replace(PURE, strategy="fsdp1"), small)
    assert rounding_note(PURE, Optimizer(lr=3e-3)) == rounding_note(Parallel(), small) == ""
