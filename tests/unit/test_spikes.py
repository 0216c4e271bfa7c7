from llama405b.spikes import LEAST, WINDOW, Spikes


def test_a_spike_is_told_by_the_median_and_does_not_move_it():
    spikes = Spikes(3.0)
    for _ in range(LEAST - 1):
        assert not spikes.is_one(100.0)
        spikes.add(2.0)
    assert not spikes.is_one(100.0)  # too few steps
    spikes.add(2.0)
    assert spikes.usual == 2.0
    assert [spikes.is_one(loss) for loss in (5.9, 6.0, 6.1)] == [False, False, True]


def test_after_a_resume_the_same_losses_are_usual():
    losses = [2.0 + i % 3 / 10 for i in range(WINDOW)] + [50.0] * 40 + [2.05, 2.15]
    spikes = Spikes(3.0)
    for loss in losses:
        if not spikes.is_one(loss):
            spikes.add(loss)
    again = Spikes(3.0, losses)
    assert list(again.losses) == list(spikes.losses)
    assert 50.0 not in again.losses
