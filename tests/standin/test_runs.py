"""What else a run does, on the stand-in: other engines, other ways to load, documents packed otherwise, a profile on request."""

import json

import pytest

from standin_rig import NOTHING

MASTER = ("--parallel.numerics", "fp32-master")
FSDP1 = {  # numerics, place, what layers keep -> relative distance from FSDP2's losses: FSDP1 sums gradients in another order
    ("fp32", "none", ("--model.activation_checkpointing", "operators")): 2e-5,
    ("fp32-master", "none", ("--model.activations", "host")): 3e-4,
    ("fp32-master", "all", ()): 3e-4,
}


@pytest.mark.parametrize(("numerics", "place", "kept"), FSDP1)
def test_fsdp1_is_near_fsdp2(standin, numerics, place, kept):
    """torch has no FSDP1 for the CPU, so this is the first time that it runs as it is."""
    flags = ("--parallel.strategy", "fsdp1", "--parallel.numerics", numerics, "--parallel.offload", place, *kept)
    trained = standin.train(*flags, "--checkpoint.every", 0, world=2)
    expected = standin.losses_of_cpu(numerics, 1, 2)
    assert _flat(trained.losses) == pytest.approx(_flat(expected), rel=FSDP1[numerics, place, kept])
    assert trained.found == NOTHING, trained.output


def _flat(losses):
    return [value for row in losses for value in row if value is not None]


@pytest.mark.parametrize("place", ["none", "optimizer", "all"])
def test_rank_0_streams_the_weights_through_pinned_stages(standin, place):
    """The stages are so small that each is filled several times for every unit."""
    flags = ("--model.load", "rank0", *MASTER, "--parallel.offload", place)
    trained = standin.train(*flags, world=2, program="standin_rig:trainer_with_small_stages")
    assert trained.losses == standin.losses_of_cpu("fp32-master", 1, 2)
    assert trained.found == NOTHING, trained.output


def test_packed_documents_are_kept_apart(standin):
    """What is concatenated has other losses, also the CPU's."""
    flags = (*MASTER, "--data.packing", "concatenated")
    trained, on_cpu = (standin.train(*flags, device=device) for device in ("cuda", "cpu"))
    assert trained.losses == on_cpu.losses
    assert trained.losses[0] != standin.losses_of_cpu("fp32-master", 1, 1)[0]
    assert trained.found == NOTHING, trained.output


def test_a_profile_is_taken_on_request(standin):
    trained = standin.train(*MASTER, "--parallel.offload", "optimizer", world=2, program="standin_rig:profiled_trainer")
    assert trained.losses == standin.losses_of_cpu("fp32-master", 1, 2)
    [first, second] = sorted(trained.run.glob("**/profile*.json"))
    for path in (first, second):
        names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
        assert "c10d::_allgather_base_" in names
    assert trained.found == NOTHING, trained.output


@pytest.mark.parametrize(
    ("one", "other"),
    [("fsdp1", ("--parallel.tp", 2)), ("fsdp1", ("--parallel.pp", 2)), ("fsdp2", ("--parallel.strategy", "fsdp1"))],
)
def test_a_checkpoint_goes_between_fsdp1_and_meshes(standin, one, other):
    whole = standin.train("--parallel.strategy", one, *MASTER, world=2)
    checkpoint = whole.run / "checkpoints/step-00000002"
    resumed = standin.train("--resume", checkpoint, *other, *MASTER, world=2)
    assert _flat(resumed.losses) == pytest.approx(_flat(whole.losses[2:]), rel=1e-3)  # in BF16, with other parts
    assert resumed.found == NOTHING, resumed.output
