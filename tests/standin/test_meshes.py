"""A model split over a mesh, on the stand-in: the losses of the same mesh on the CPU, bit for bit, with no race."""

import pytest

from standin_rig import NOTHING

CASES = {  # ranks; settings that decide the losses; settings that change no bit
    "tp": (2, ("--parallel.tp", 2), ()),
    "cp": (2, ("--parallel.cp", 2), ()),
    "pp": (2, ("--parallel.pp", 2), ()),
    "parts": (2, ("--model.loss", "chunked"), ()),
    "tp-parts": (2, ("--parallel.tp", 2, "--model.loss", "chunked"), ()),
    "zero1": (2, ("--parallel.strategy", "zero1"), ()),
    "ddp": (2, ("--parallel.strategy", "ddp"), ()),
    "hsdp": (4, ("--parallel.dp_replicate", 2), ()),
    "tp-pp": (4, ("--parallel.tp", 2, "--parallel.pp", 2), ()),
    "ahead-offload": (2, (), ("--parallel.prefetch", 2, "--parallel.offload", "all", "--model.activations", "host")),
    "kept": (4, (), ("--parallel.reshard_after_forward", 2, "--parallel.prefetch", 1)),
    "tp-offload": (2, ("--parallel.tp", 2), ("--parallel.offload", "all")),
    "pp-offload": (2, ("--parallel.pp", 2), ("--parallel.offload", "optimizer", "--model.activations", "host")),
}
LONGER = ("tp-parts", "kept")  # what others show in parts


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak if name in LONGER else ()) for name in CASES]
)
def test_losses_are_those_of_the_same_mesh_on_the_cpu(standin, name):
    world, deciding, others = CASES[name]
    trained = standin.train(*deciding, *others, "--parallel.numerics", "fp32-master", accumulation=2, world=world)
    of_cpu = standin.losses_of_cpu("fp32-master", 2, world, *deciding)
    for (loss, norm, evaluation), (expected, its, of_evaluation) in zip(trained.losses, of_cpu, strict=True):
        assert (loss, evaluation) == (expected, of_evaluation)
        # gloo adds four numbers of FP64 in another order
        assert norm == its if world == 2 else norm == pytest.approx(its, rel=1e-14)
    assert trained.found == NOTHING, trained.output


@pytest.mark.parametrize(
    "name", ["ahead-offload", *(pytest.param(name, marks=pytest.mark.soak) for name in ("tp-offload", "pp-offload"))]
)
def test_a_run_on_the_cpu_does_not_start_the_device(standin, name):
    """As torch's own AdamW does between two steps: ours, and what saves, must not within a forward."""
    world, deciding, others = CASES[name]
    flags = (*deciding, *others, "--parallel.numerics", "fp32-master")
    of_cpu = standin.train(*flags, device="cpu", accumulation=2, world=world)
    assert of_cpu.on_device == [False] * world
