"""The trainer in every place of the states, with evaluations and saves beside training: the CPU's losses, bit for bit."""

import shutil

import pytest

from standin_rig import NOTHING

NUMERICS = {  # by place and micro-batches of a step
    ("none", 1): "pure-bf16",
    ("none", 2): "fp32-master",
    ("optimizer", 1): "fp32-master",
    ("optimizer", 2): "fp32-master",
    ("all", 1): "fp32",
    ("all", 2): "fp32-master",
}
KEPT = {  # what is computed again, and where layers' inputs wait: neither changes a bit
    ("none", 1): ("operators", "device"),
    ("none", 2): ("every:2", "host"),
    ("optimizer", 1): ("full", "host"),
    ("optimizer", 2): ("operators:1", "device"),
    ("all", 1): ("operators:1", "host"),
    ("all", 2): ("none", "device"),
}


@pytest.mark.parametrize(
    ("place", "accumulation", "world"),
    [
        pytest.param(*case, world, marks=pytest.mark.soak if (number + world) % 2 else ())
        for number, case in enumerate(NUMERICS)
        for world in (1, 2)
    ],
)
def test_losses_are_the_cpus(standin, place, accumulation, world):
    numerics = NUMERICS[place, accumulation]
    again, inputs = KEPT[place, accumulation]
    flags = (
        *("--parallel.offload", place, "--parallel.numerics", numerics),
        *("--model.activation_checkpointing", again, "--model.activations", inputs),
    )
    trained = standin.train(*flags, accumulation=accumulation, world=world)
    assert trained.losses == standin.losses_of_cpu(numerics, accumulation, world)
    assert trained.found == NOTHING, trained.output


@pytest.mark.parametrize("split", ["tp", "cp"])
def test_fused_mlps_learn_as_on_the_cpu(standin, split):
    flags = ("--model.fused", "auto", "--parallel.numerics", "fp32-master", f"--parallel.{split}", 2)
    trained = standin.train(*flags, accumulation=2, world=2)
    assert "SwiGLU: fused; verified on this device" in trained.output  # of the norm's kernel, a CPU has no backward
    for found, expected in zip(trained.losses, standin.losses_of_cpu("fp32-master", 2, 2, *flags), strict=True):
        assert found[:2] == pytest.approx(expected[:2], rel=1e-3)
    assert trained.found == NOTHING, trained.output


def test_memory_that_torch_fills_with_nan_is_not_read(standin):
    trained = standin.train("--parallel.numerics", "fp32", program="standin_rig:deterministic_trainer", world=2)
    assert trained.losses == standin.losses_of_cpu("fp32", 1, 2)
    assert trained.found == NOTHING, trained.output


@pytest.mark.parametrize("place", ["none", "optimizer", "all"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(standin, place):
    numerics = {"none": "bf16-stochastic"}.get(place, "fp32-master")  # whose rounding goes on alike, too
    flags = ("--parallel.offload", place, "--parallel.numerics", numerics)
    whole = standin.train(*flags, world=2)
    saved = whole.run / "checkpoints"
    shutil.rmtree(saved / "step-00000004")
    resumed = standin.train(*flags, "--checkpoint.dir", saved, "--resume", "auto", world=2)
    assert len(resumed.losses) == 2
    assert resumed.losses == whole.losses[2:]
    assert resumed.found == NOTHING, resumed.output


@pytest.mark.parametrize(
    ("place", "inputs", "accumulation"), [("none", "host", 1), pytest.param("all", "device", 2, marks=pytest.mark.soak)]
)
def test_adapters_learn_as_on_the_cpu_and_resume(standin, place, inputs, accumulation):
    lora = (
        "--adapter.kind",
        "lora",
        "--adapter.rank",
        "3",
        "--optimizer.lr",
        "1e-2",
        "--parallel.numerics",
        "fp32-master",
    )
    flags = (*lora, "--parallel.offload", place, "--model.activations", inputs)
    whole = standin.train(*flags, accumulation=accumulation, world=2)
    assert whole.losses == standin.train(*lora, device="cpu", accumulation=accumulation, world=2).losses
    assert whole.found == NOTHING, whole.output
    saved = whole.run / "checkpoints"
    shutil.rmtree(saved / "step-00000004")
    resumed = standin.train(*flags, "--checkpoint.dir", saved, "--resume", "auto", accumulation=accumulation, world=2)
    assert resumed.losses == whole.losses[2:]
    assert resumed.found == NOTHING, resumed.output


def test_a_pipeline_stage_that_is_frozen_saves_as_the_others_do(standin):
    """Its ranks have nothing that is copied before a save, and pin as the others do."""
    frozen = "model.embed_tokens.* frozen=true,model.layers.0.* frozen=true"
    flags = ("--parallel.pp", "2", "--optimizer.groups", frozen, "--parallel.numerics", "fp32-master")
    trained = standin.train(*flags, world=2)
    assert trained.losses == standin.train(*flags, device="cpu", world=2).losses
    assert trained.found == NOTHING, trained.output
