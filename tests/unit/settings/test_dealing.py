import pytest

from llama405b.contract.errors import UserError
from llama405b.settings.axes import MicrobatchSplit, idle_rank_note
from llama405b.settings.schema import Training


@pytest.mark.parametrize("n_ranks", range(1, 71))
def test_each_micro_batch_is_dealt_once_and_evenly(n_ranks):
    dealing = MicrobatchSplit(64, n_ranks)
    places = [dealing.first_and_count(rank) for rank in range(n_ranks)]
    assert [number for first, n in places for number in range(first, first + n)] == list(range(64))
    assert {n for _, n in places} <= {dealing.grad_accum_steps, dealing.grad_accum_steps - 1}
    assert sum(dealing.grad_accum_steps - n for _, n in places) == dealing.n_idle_ranks
    assert all(first - (dealing.grad_accum_steps - n) >= 0 for first, n in places), (
        "who has one less takes that of the rank before"
    )


def test_a_batch_is_whole_micro_batches_or_the_nearest_ones_are_named():
    assert MicrobatchSplit.from_training(Training(global_batch_size=48, micro_batch_size=2), 7).grad_accum_steps == 4
    assert MicrobatchSplit.from_training(Training(global_batch_size=0, micro_batch_size=2), 7) == MicrobatchSplit(7, 7)
    for batch, nearest in ((47, "46 or 48"), (1, "2, or")):
        with pytest.raises(UserError, match=f"use --training.global_batch_size {nearest}"):
            MicrobatchSplit.from_training(Training(global_batch_size=batch, micro_batch_size=2), 7)


def test_what_the_last_round_wastes_is_said_with_batches_that_waste_nothing():
    assert idle_rank_note(Training(global_batch_size=64), 8) == ""
    note = idle_rank_note(Training(global_batch_size=64, micro_batch_size=2), 7)
    assert "in the last of 5 accumulation steps 3 of 7 ranks are idle" in note
    assert "9% of a step); --training.global_batch_size 56 or 70 leaves none idle" in note
    assert "in each step 1 of 2 ranks is idle" in idle_rank_note(Training(global_batch_size=1), 2)
