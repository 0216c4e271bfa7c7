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
AGAIN = {  # what is computed again, which changes no bit
    ("none", 1): "operators",
    ("none", 2): "every:2",
    ("optimizer", 2): "operators:1",
    ("all", 2): "none",
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("place", "accumulation"), NUMERICS)
def test_losses_are_the_cpus(standin, place, accumulation, world):
    numerics = NUMERICS[place, accumulation]
    again = AGAIN.get((place, accumulation), "full")
    flags = ("--parallel.offload", place, "--parallel.numerics", numerics, "--model.activation_checkpointing", again)
    trained = standin.train(*flags, accumulation=accumulation, world=world)
    assert trained.losses == standin.losses_of_cpu(numerics, accumulation, world)
    assert trained.found == NOTHING, trained.output


@pytest.mark.parametrize("place", ["none", "optimizer", "all"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(standin, place):
    flags = ("--parallel.offload", place, "--parallel.numerics", "fp32-master")
    whole = standin.train(*flags, world=2)
    saved = whole.run / "checkpoints"
    shutil.rmtree(saved / "step-00000004")
    resumed = standin.train(*flags, "--checkpoint.dir", saved, "--resume", "auto", world=2)
    assert len(resumed.losses) == 2
    assert resumed.losses == whole.losses[2:]
    assert resumed.found == NOTHING, resumed.output
