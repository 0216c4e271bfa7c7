"""The order of a pipeline's passes: it ends, however many micro-batches there are, and holds no more of them than it must."""

import itertools

import pytest

from llama405b.spec.rules import InFlight, MicrobatchPass, find_in_flight, pipeline_order

CASES = [
    (schedule, n_ranks, 2 if schedule == "interleaved" else 1, n_micro)
    for schedule, n_ranks, n_micro in itertools.product(
        ("1f1b", "gpipe", "interleaved"), (2, 3, 4, 8), (1, 2, 3, 4, 5, 7, 8, 16)
    )
]


def played(orders, n_ranks, n_chunks):
    """Take each rank's passes in its order, each as soon as what it needs has come; returns the rounds, if all are taken."""
    last, done, at, rounds = n_ranks * n_chunks - 1, set(), [0] * n_ranks, 0
    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        ready = []
        for rank, order in enumerate(orders):
            if at[rank] == len(order):
                continue
            each = order[at[rank]]
            stage = each.virtual_stage * n_ranks + rank
            if each.is_backward:
                needs = (True, stage + 1, each.microbatch) if stage < last else (False, stage, each.microbatch)
            else:
                needs = (False, stage - 1, each.microbatch) if stage else None
            if needs is None or needs in done:
                ready.append((rank, (each.is_backward, stage, each.microbatch)))
        assert ready, "every rank waits for another one"
        for rank, what in ready:
            assert what not in done
            done.add(what)
            at[rank] += 1
        rounds += 1
    return rounds, done


@pytest.mark.parametrize(("schedule", "n_ranks", "n_chunks", "n_micro"), CASES)
def test_every_pass_is_taken_once_and_none_waits_for_ever(schedule, n_ranks, n_chunks, n_micro):
    orders = [pipeline_order(schedule, n_ranks, n_chunks, rank, n_micro) for rank in range(n_ranks)]
    rounds, done = played(orders, n_ranks, n_chunks)
    assert len(done) == 2 * n_micro * n_ranks * n_chunks
    if n_chunks == 1:
        assert rounds == 2 * (n_micro + n_ranks - 1), (
            "each rank waits for the pipeline to fill and to drain, and no longer"
        )


@pytest.mark.parametrize("n_micro", [4, 8, 16])
def test_two_stages_on_each_rank_wait_half_as_long(n_micro):
    plain, _ = played([pipeline_order("1f1b", 4, 1, rank, n_micro) for rank in range(4)], 4, 1)
    halves, _ = played([pipeline_order("interleaved", 4, 2, rank, n_micro) for rank in range(4)], 4, 2)
    waits, waits_halves = 2 * plain - 4 * n_micro, halves - 4 * n_micro  # in passes of half a stage
    assert waits_halves <= waits / 2 + 1


def held(order):
    """The most micro-batches of which a rank has the activations at once."""
    inside, most = 0, 0
    for each in order:
        inside += -1 if each.is_backward else 1
        most = max(most, inside)
    return most


def test_1f1b_holds_as_many_as_the_stages_that_follow_and_gpipe_all():
    assert [held(pipeline_order("1f1b", 4, 1, rank, 16)) for rank in range(4)] == [4, 3, 2, 1]
    assert [held(pipeline_order("gpipe", 4, 1, rank, 16)) for rank in range(4)] == [16] * 4
    assert pipeline_order("1f1b", 2, 1, 1, 2) == [
        MicrobatchPass(False, 0, 0),
        MicrobatchPass(True, 0, 0),
        MicrobatchPass(False, 0, 1),
        MicrobatchPass(True, 0, 1),
    ]


def test_what_waits_while_a_backward_is_computed():
    assert find_in_flight("1f1b", 4, 1, 3, 6) == {InFlight(0, (0,), (True,))}  # a later one has gradients as well
    assert find_in_flight("1f1b", 4, 1, 0, 6) == {
        InFlight(0, (3,), (True,))
    }  # in the first stage as many as ranks follow
    first, then = InFlight(0, (2,), (False,)), InFlight(0, (1,), (True,), after_forward=False)
    assert find_in_flight("gpipe", 2, 1, 1, 3) == {first, then}  # no forward comes between backwards
    assert {each.virtual_stage for each in find_in_flight("interleaved", 2, 2, 0, 4)} == {0, 1}
