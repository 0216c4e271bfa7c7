"""Fused norms and MLPs: the losses and gradients of transformers' own on two ranks, and fewer tensors that are kept."""

import functools

import mesh_rig
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from llama405b.model import fused
from ranks_rig import run_ranks

CONFIG = LlamaConfig(hidden_size=96, intermediate_size=160, num_attention_heads=4, num_key_value_heads=2)
CPU = torch.device("cpu")


@pytest.mark.parametrize("recompute", ["full", "operators", "none"])
def test_two_ranks_learn_as_with_transformers_own(tmp_path, recompute):
    directory = mesh_rig.write_model(tmp_path / "model")
    for usual, found in run_ranks(2, _trained, directory, recompute):
        assert found["losses"] == pytest.approx(usual["losses"], rel=1e-5)
        assert (usual["fused"], found["fused"] % 3) == (0, 1)  # two norms and an MLP in each layer, and the last norm
        assert found["fused"] > 1
        assert found["products"] == usual["products"]


def _trained(me, directory, recompute):
    from torch.utils.flop_counter import FlopCounterMode

    from llama405b.distributed.ranks import with_mesh
    from llama405b.optim.step import train_step
    from llama405b.settings.schema import Optimizer, Parallel

    found = []
    for fuses in (False, True):
        parallel = Parallel(numerics="fp32")
        me = with_mesh(me, parallel)
        model, passes, updater = mesh_rig.build(
            me, directory, parallel, Optimizer(lr=1e-3), torch.float32, recompute=recompute
        )
        for name in fused.FORWARDS if fuses else ():
            fused.fuse(model, name)
        with FlopCounterMode(display=False) as counter:
            losses = [
                train_step(passes, updater, mesh_rig.micro_batches(step, me, 3), max_norm=1.0).loss for step in range(3)
            ]
        is_fused = [isinstance(module.forward, functools.partial) for module in model.modules()]
        found.append({"losses": losses, "products": counter.get_total_flops(), "fused": sum(is_fused)})
    return found


def test_an_mlp_keeps_what_its_projections_return_and_nothing_else():
    assert [_kept(forward) for forward in (LlamaMLP.forward, fused.fused_mlp)] == [4, 2]


def _kept(forward):
    """How many tensors of the MLP's inner width its forward keeps."""
    kept = []
    x, module = torch.randn(8, CONFIG.hidden_size, requires_grad=True), LlamaMLP(CONFIG)
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        forward(module, x)
    return len({each.data_ptr() for each in kept if each.shape == (8, CONFIG.intermediate_size)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", fused.FORWARDS)
def test_what_computes_as_well_is_used(name, dtype):
    assert fused.unsupported_reason(name, CONFIG, CPU, dtype) == ""
    narrow = LlamaConfig(hidden_size=8, intermediate_size=16, num_attention_heads=2)
    assert fused.unsupported_reason(name, narrow, CPU, dtype) == ""


@pytest.mark.parametrize(
    ("name", "wrong", "why"),
    [
        ("RMSNorm", lambda module, x: fused.fused_norm(module, x) * 1.02, "rounds by"),
        ("RMSNorm", lambda module, x: fused.fused_norm(module, x.detach() + 0 * x), "rounds by"),
        ("SwiGLU", lambda module, x: fused.fused_mlp(module, x) * float("nan"), "rounds by nan"),
        ("SwiGLU", lambda module, x: module.nothing(x), "it fails on cpu"),
    ],
)
def test_what_computes_something_else_is_not(monkeypatch, name, wrong, why):
    kind, _ = fused.FORWARDS[name]
    monkeypatch.setitem(fused.FORWARDS, name, (kind, wrong))
    assert why in fused.unsupported_reason(name, CONFIG, CPU, torch.bfloat16)


@pytest.mark.parametrize("frozen", [("down_proj",), ("gate_proj", "up_proj")])
def test_a_frozen_matrix_has_no_gradient_and_the_others_theirs(frozen):
    module, x_Th = LlamaMLP(CONFIG), torch.randn(8, CONFIG.hidden_size)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
    found, expected = (
        torch.autograd.grad(forward(module, x_Th).square().sum(), weights)
        for forward in (fused.fused_mlp, LlamaMLP.forward)
    )
    torch.testing.assert_close(found, expected)
    fused.fused_mlp(module, x_Th).sum().backward()
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in module.parameters())


def test_another_mlp_stays_as_it_is():
    gelu = LlamaConfig(hidden_size=96, intermediate_size=160, hidden_act="gelu")
    assert (
        fused.unsupported_reason("SwiGLU", gelu, CPU, torch.float32)
        == "this model's MLP is not a SwiGLU of separate matrices without biases"
    )
