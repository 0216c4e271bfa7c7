import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from llama405b.optim import optimizer
from llama405b.optim.optimizer import build_optimizer, lr_at, set_lr, update_group
from llama405b.settings.schema import Optimizer


def test_schedule():
    config = Optimizer(lr=1.0, min_lr=0.1, warmup=10, decay="cosine")
    assert lr_at(1, 110, config) == pytest.approx(0.1)
    assert lr_at(10, 110, config) == pytest.approx(1.0)
    assert lr_at(60, 110, config) == pytest.approx(0.55)
    assert lr_at(110, 110, config) == pytest.approx(0.1)
    assert lr_at(200, 110, config) == pytest.approx(0.1)


def test_linear_and_constant():
    wsd = Optimizer(lr=1.0, min_lr=0.1, warmup=10, decay="wsd", decay_steps=40)
    assert [lr_at(step, 110, wsd) for step in (5, 10, 70)] == pytest.approx([0.5, 1.0, 1.0])
    assert [lr_at(step, 110, wsd) for step in (80, 110, 120)] == pytest.approx([0.55, 0.1, 0.1])
    assert [lr_at(step, 100, Optimizer(lr=1.0, decay="wsd")) for step in (90, 91, 100)] == pytest.approx(
        [1.0, 1 - 0.1**0.5, 0.0]
    )
    assert lr_at(50, 100, Optimizer(lr=1.0, decay="linear")) == pytest.approx(0.5)
    assert lr_at(99, 100, Optimizer(lr=1.0, decay="constant")) == 1.0


def test_rounded_moments_are_updated_chunk_by_chunk_as_in_fp32(monkeypatch):
    monkeypatch.setattr(optimizer, "CHUNK", 64)
    torch.manual_seed(0)
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-8}
    weight, gradient = torch.randn(10, 31), torch.randn(10, 31)
    by_torch = torch.nn.Parameter(weight.clone())
    ours = torch.nn.Parameter(weight.clone())
    state = {"step": torch.zeros(())} | {
        name: torch.zeros_like(weight, dtype=torch.bfloat16) for name in ("exp_avg", "exp_avg_sq")
    }
    reference = torch.optim.AdamW([by_torch], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(1, 4):
        by_torch.grad = gradient * step
        reference.step()
        with torch.no_grad():
            update_group([ours], [state], [gradient * step], settings)
        for name in ("exp_avg", "exp_avg_sq"):  # what torch would have, had it rounded its moments
            exact = reference.state[by_torch][name]
            exact.copy_(exact.to(torch.bfloat16))
            assert torch.equal(state[name].float(), exact)
        assert torch.equal(ours, by_torch)
        assert state["step"] == step


def test_groups_have_a_rate_and_decay_of_their_own():
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
    )
    groups = (
        "model.embed_tokens.* lr_factor=0.5 weight_decay=0",
        "*layers.1.* lr_factor=0",
        "*layernorm* weight_decay=0.3",
    )
    built = build_optimizer(model, Optimizer(lr=1.0, weight_decay=0.1, groups=groups))
    set_lr(built, 2.0)
    named = {id(p): name for name, p in model.named_parameters()}
    of = {named[id(p)]: (group["lr"], group["weight_decay"]) for group in built.param_groups for p in group["params"]}
    assert set(of) == set(named.values())
    assert of["model.embed_tokens.weight"] == (1.0, 0.0)
    assert (of["model.layers.0.mlp.up_proj.weight"], of["model.norm.weight"]) == ((2.0, 0.1), (2.0, 0.0))
    assert (of["model.layers.1.mlp.up_proj.weight"], of["model.layers.1.input_layernorm.weight"]) == (
        (0.0, 0.1),
        (0.0, 0.0),
    )
    assert of["model.layers.0.input_layernorm.weight"] == (2.0, 0.3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    sum(p.square().sum() for p in model.parameters()).backward()
    built.step()
    still = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert still == {name for name in before if "layers.1." in name}
