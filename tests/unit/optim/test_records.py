"""Optimizers by their records: what they keep, what they need, and what a resume compares."""

import dataclasses

import pytest
import torch

from llama405b.contract.checkpoints import RunIdentity
from llama405b.contract.errors import UserError
from llama405b.model.llama import add_adapters, build_on_meta, config_from_dict, freeze
from llama405b.optim.build_updater import OnDeviceUpdate
from llama405b.optim.optimizer import build_optimizer, init_moments, trainable_parameters
from llama405b.predict.estimate import Cluster
from llama405b.predict.run_shape import PredictedRun
from llama405b.predict.search import is_runnable
from llama405b.settings.choices import OPTIMIZERS
from llama405b.settings.rules import find_faults
from llama405b.settings.schema import Adapter, Config, Optimizer, Parallel
from llama405b.spec.models import parse_llama
from llama405b.spec.rules import check_resume_changes, rounding_note, update_settings

SHAPE = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40,
}  # fmt: skip
LORA = Adapter("lora", rank=2)


@pytest.mark.parametrize("adapter", [Adapter(), LORA], ids=["whole", "adapter"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_plan_counts_the_moments_that_there_are(name, adapter):
    model = build_on_meta(config_from_dict(SHAPE), "sdpa", torch.float32)
    freeze(model, (), freeze_all=adapter.is_enabled)
    if adapter.is_enabled:
        add_adapters(model, adapter, torch.float32)
    optimizer = build_optimizer(model, Optimizer(kind=name))
    parameters = trainable_parameters(model).values()
    for parameter in parameters:
        init_moments(optimizer, parameter, parameter.dtype)
    kept = sum(state.numel() for states in optimizer.state.values() for state in states.values() if state.dim())
    run = PredictedRun(parse_llama(SHAPE, ""), "fp32", "none", 1, adapter=adapter, optimizer=name)
    assert run.n_moments * run.trained_parameters == pytest.approx(kept)
    assert run.checkpoint_bytes == 4 * (kept + sum(parameter.numel() for parameter in parameters))


def test_a_matrix_optimizer_takes_the_time_of_its_products():
    llama = dataclasses.replace(parse_llama(SHAPE, ""), layers=3)
    run = PredictedRun(llama, "fp32", "none", 1, optimizer="muon")
    square, wide = 5 * 6 * 16**3, 5 * (4 * 16 * 16 * 24 + 2 * 16**3)
    assert run.update_flops == 3 * (4 * square + 3 * wide)
    assert dataclasses.replace(run, optimizer="lion").update_flops == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tp": 2}, "needs whole matrices, which tp 2 splits; use tp 1, or adamw"),
        ({"offload": "all"}, "updates on the device; use none, or adamw"),
        ({"offload": "optimizer"}, "updates on the device; use none, or adamw"),
        ({"strategy": "fsdp1"}, "needs matrices, which fsdp1 flattens; use fsdp2, or adamw"),
        ({"numerics": "bf16-stochastic"}, "does not round stochastically; use pure-bf16, or adamw"),
    ],
    ids=str,
)
def test_a_matrix_optimizer_has_whole_matrices_on_the_device(settings, words):
    [key] = settings
    config = Config(parallel=Parallel(**settings))
    before = [*find_faults(config)]
    assert [*find_faults(dataclasses.replace(config, optimizer=Optimizer(kind="lion")))] == before
    faults = [*find_faults(dataclasses.replace(config, optimizer=Optimizer(kind="muon")))]
    assert [fault for fault in faults if fault not in before] == [(f"parallel.{key}", f"optimizer.kind muon {words}")]


def test_a_momentum_that_would_never_end_is_refused():
    config = Config(optimizer=Optimizer(kind="muon", momentum=1.0))
    assert ("optimizer.momentum", "optimizer.momentum is 1; it must be below 1") in find_faults(config)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stage_may_be_all_frozen(name):
    model = build_on_meta(config_from_dict(SHAPE), "sdpa", torch.float32)
    freeze(model, (), freeze_all=True)
    optimizer = build_optimizer(model, Optimizer(kind=name))
    optimizer.step(closure=None)  # as torch does for a checkpoint
    assert not any(group["params"] for group in optimizer.param_groups)
    assert not optimizer.state


def test_what_never_updates_has_no_moments():
    model = torch.nn.Linear(4, 4)
    optimizer = build_optimizer(model, Optimizer())
    OnDeviceUpdate(model, model, optimizer, has_moments=False)
    assert not optimizer.state
    OnDeviceUpdate(model, model, optimizer)
    assert len(optimizer.state) == 2


@pytest.mark.parametrize(
    ("name", "offload", "tp"), [("adamw", True, True), ("lion", True, True), ("muon", False, False)]
)
def test_what_would_help_is_what_the_optimizer_can_have(name, offload, tp):
    run = PredictedRun(parse_llama(SHAPE, ""), "fp32-master", "none", 4, global_batch=4, optimizer=name)
    cluster = Cluster()
    assert is_runnable(run, cluster)
    assert is_runnable(dataclasses.replace(run, offload="all"), cluster) is offload
    assert is_runnable(dataclasses.replace(run, tp=2), cluster) is tp


def _identity(**optimizer):
    settings = update_settings(Optimizer(**optimizer), 0)
    return RunIdentity("m", "d", 8, 4, "fp32", 0, 0, settings=settings)


def test_a_resume_compares_what_the_optimizer_reads():
    read = {"optimizer.betas", "optimizer.eps", "optimizer.kind", "optimizer.lr"}
    assert read <= _identity().settings.keys()
    assert "optimizer.momentum" not in _identity().settings
    assert {"optimizer.eps", "optimizer.momentum"}.isdisjoint(_identity(kind="lion").settings)
    assert check_resume_changes("x", _identity(momentum=0.9), _identity(), ()) == ""
    assert "optimizer.momentum 0.9 -> 0.95" in check_resume_changes(
        "x", _identity(kind="muon", momentum=0.9), _identity(kind="muon"), ("all",)
    )


def test_a_resume_with_another_optimizer_is_refused_whatever_is_allowed():
    settings = {name: value for name, value in _identity().settings.items() if name != "optimizer.kind"}
    of_old = dataclasses.replace(_identity(), settings=settings)  # from before there was a choice
    assert check_resume_changes("x", of_old, _identity(), ()) == ""
    words = r"x was saved with another optimizer, whose states differ \(optimizer\.kind adamw -> lion\); set it back"
    with pytest.raises(UserError, match=words):
        check_resume_changes("x", of_old, _identity(kind="lion"), ("all",))


def test_bf16_rounds_fewer_of_lions_updates_away():
    parallel = Parallel(numerics="pure-bf16")
    notes = [rounding_note(parallel, Optimizer(kind=name, lr=1e-6)) for name in OPTIMIZERS]
    shares = [float(note.partition("about ")[2].partition("%")[0]) for note in notes]
    assert shares[1] > 3 * shares[0] > shares[2]
