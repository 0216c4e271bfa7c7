"""A model split over a mesh, on the stand-in: the losses of the same mesh on the CPU, bit for bit, with no race."""

import pytest

from standin_rig import NOTHING

CASES = {
    "tp": (2, ("--parallel.tp", 2)),
    "cp": (2, ("--parallel.cp", 2)),
    "pp": (2, ("--parallel.pp", 2)),
    "parts": (2, ("--parallel.loss", "parts")),
    "tp-parts": (2, ("--parallel.tp", 2, "--parallel.loss", "parts")),
    "zero1": (2, ("--parallel.strategy", "zero1")),
    "ddp": (2, ("--parallel.strategy", "ddp")),
    "hsdp": (4, ("--parallel.dp_replicate", 2)),
    "tp-pp": (4, ("--parallel.tp", 2, "--parallel.pp", 2)),
    "ahead-offload": (2, ("--parallel.prefetch", 2, "--parallel.offload", "all", "--model.activations", "host")),
    "kept": (4, ("--parallel.reshard_after_forward", 2, "--parallel.prefetch", 1)),
    "tp-offload": (2, ("--parallel.tp", 2, "--parallel.offload", "all")),
    "pp-offload": (2, ("--parallel.pp", 2, "--parallel.offload", "optimizer", "--model.activations", "host")),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_the_same_mesh_on_the_cpu(standin, name):
    world, flags = CASES[name]
    flags = (*flags, "--parallel.numerics", "fp32-master")
    trained = standin.train(*flags, accumulation=2, world=world)
    of_cpu = standin.train(*flags, device="cpu", accumulation=2, world=world)
    for (loss, norm, evaluation), (expected, its, of_evaluation) in zip(trained.losses, of_cpu.losses, strict=True):
        assert (loss, evaluation) == (expected, of_evaluation)
        # gloo adds four numbers of FP64 in another order
        assert norm == its if world == 2 else norm == pytest.approx(its, rel=1e-14)
    assert trained.found == NOTHING, trained.output
    if (
        "offload" in name
    ):  # torch's own AdamW starts CUDA between two steps; ours, and what saves, must not in a forward
        assert of_cpu.on_device == [False] * world
