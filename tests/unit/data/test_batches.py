import numpy as np
import torch

from llama405b.data.batches import Batches
from llama405b.data.encode import FIRST, NOT_LEARNT
from llama405b.ranks import Ranks


def rank(number, world):
    return Ranks(number, world, number, "h", torch.device("cpu"))


def test_every_world_size_sees_the_same_global_batch():
    batches = Batches(np.arange(1000, dtype=np.uint32), 10, seed=3)
    assert batches.n_sequences == 99
    for step in (1, 20):
        whole = torch.cat([each.ids_BS for each in batches.microbatches(step, rank(0, 1), 6, 2)])
        for world in (2, 3):
            parts = [each.ids_BS for r in range(world) for each in batches.microbatches(step, rank(r, world), 6, 1)]
            assert torch.equal(torch.cat(parts), whole)


def test_an_epoch_has_every_target_once_and_the_next_is_shuffled_anew():
    batches = Batches(np.arange(101, dtype=np.uint32), 10, seed=0)
    epochs = []
    for epoch in range(2):
        targets = [
            int(t)
            for i in range(10)
            for t in batches.microbatches(epoch * 10 + i + 1, rank(0, 1), 1, 1)[0].targets_BS[0]
        ]
        epochs.append(targets)
        assert sorted(targets) == list(range(1, 101))
    assert epochs[0] != epochs[1]
    assert batches.steps(1.0, 3) == 3


def test_targets_follow_tokens_and_prompts_are_not_learnt():
    tokens = np.array([5, 6 | NOT_LEARNT, 7, 8], dtype=np.uint32)
    [batch] = Batches(tokens, 3, 0).microbatches(1, rank(0, 1), 1, 1)
    assert batch.ids_BS.tolist() == [[5, 6, 7]]
    assert batch.targets_BS.tolist() == [[-100, 7, 8]]
    assert batch.positions_BS is None


def test_documents_that_share_a_sequence_begin_anew_and_do_not_foretell_each_other():
    tokens = np.array([1 | FIRST, 2, 3, 4 | FIRST, 5 | FIRST | NOT_LEARNT, 6, 7, 8, 9], dtype=np.uint32)
    for isolated in (True, False):
        batches = Batches(tokens, 4, 0, isolated=isolated)
        found = [batches.microbatches(step, rank(0, 1), 1, 1)[0] for step in (1, 2)]
        first, second = sorted(found, key=lambda batch: int(batch.ids_BS[0, 0]))
        assert first.ids_BS.tolist() == [[1, 2, 3, 4]]
        assert second.ids_BS.tolist() == [[5, 6, 7, 8]]
        assert second.targets_BS.tolist() == [[6, 7, 8, 9]]
        assert second.positions_BS is None  # it is one document
        if isolated:
            assert first.targets_BS.tolist() == [[2, 3, -100, -100]]
            assert first.positions_BS.tolist() == [[0, 1, 2, 0]]
        else:
            assert first.targets_BS.tolist() == [[2, 3, 4, -100]]  # the last is a prompt's
            assert first.positions_BS is None


def test_the_rest_of_a_document_counts_from_0():
    tokens = np.array([1 | FIRST, 2, 3, 4, 5 | FIRST, 6, 7, 8 | FIRST, 9], dtype=np.uint32)
    windows = np.stack([tokens[i : i + 7] for i in (2, 1)])
    batch = Batches(tokens, 6, 0).batch(windows)
    assert batch.positions_BS.tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 0, 1, 2]]
    assert [part.positions_BS.tolist() for part in batch.split(1)] == [[[0, 1, 0, 1, 2, 0]], [[0, 1, 2, 0, 1, 2]]]
