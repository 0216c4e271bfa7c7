from llama405b.training.guards import MIN_STEPS, WINDOW, SpikeDetector


def test_a_spike_is_told_by_the_median_and_does_not_move_it():
    spikes = SpikeDetector(3.0)
    for _ in range(MIN_STEPS - 1):
        assert not spikes.is_spike(100.0)
        spikes.update(2.0)
    assert not spikes.is_spike(100.0)  # too few steps
    spikes.update(2.0)
    assert spikes.median == 2.0
    assert [spikes.update(loss) for loss in (5.9, 6.0, 6.1, 6.1, 2.0)] == [False, False, True, True, False]
    assert spikes.n_skipped == 0
    assert 6.1 not in spikes.losses


def test_losses_that_stay_high_become_usual_if_steps_are_taken_all_the_same():
    spikes = SpikeDetector(3.0, [1.0] * WINDOW)
    found = [spikes.update(4.0, count_spikes=True) for _ in range(WINDOW)]
    assert found[0]
    assert not found[-1]
    spikes = SpikeDetector(3.0, [1.0] * WINDOW)
    assert all(spikes.update(4.0) for _ in range(WINDOW))
    assert spikes.n_skipped == WINDOW


def test_after_a_resume_the_same_losses_are_usual():
    losses = [2.0 + i % 3 / 10 for i in range(WINDOW)] + [50.0] * 40 + [2.05, 2.15]
    spikes = SpikeDetector(3.0)
    for loss in losses:
        spikes.update(loss)
    again = SpikeDetector(3.0, SpikeDetector.from_losses(3.0, losses).losses)
    assert list(again.losses) == list(spikes.losses)
    assert 50.0 not in again.losses
    assert 50.0 in SpikeDetector.from_losses(3.0, losses, count_spikes=True).losses  # where spikes are only reported
