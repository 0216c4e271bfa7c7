"""Settings tried one after the other by the same processes, on the stand-in for a GPU: each begins with the memory of the first."""

import pytest

from llama405b.predict.tuning import Candidate, outliers

SETTINGS = {
    "as set": (),
    "optimizer": ("--parallel.offload=optimizer",),
    "all": ("--parallel.offload=all",),
    "inputs": ("--model.activations=host", "--parallel.fsdp_unit=sublayer"),
    "kept": ("--model.activation_checkpointing=none", "--training.micro_batch_size=1"),
    "again": (),
}


@pytest.mark.timeout(400)
def test_trials_compute_the_same_and_leave_nothing_to_the_next(standin):
    candidates = [Candidate(label, flags, {}, 0.0, (2,) if flags else (1, 2)) for label, flags in SETTINGS.items()]
    found = standin.try_out(candidates, 2, world=2)
    assert [*found] == [*SETTINGS]
    assert outliers({label: trial.first_steps for label, trial in found.items()}, "as set") == []
    for trial in found.values():
        assert trial.points[-1].layers == 2
        assert len(trial.first_steps) == 4
        assert all(point.step_s > 0 for point in trial.points)
    peaks = {label: [point.peak_bytes for point in trial.points] for label, trial in found.items()}
    assert peaks["as set"] == pytest.approx(peaks["again"], abs=2 << 20)  # a block of the allocator
    assert peaks["as set"][0] < peaks["as set"][1]
    assert peaks["kept"][0] != peaks["as set"][1]
