import numpy as np
import torch

from llama405b.data.batches import Batches
from llama405b.data.tokens import NOT_LEARNT
from llama405b.ranks import Ranks


def rank(number, world):
    return Ranks(number, world, number, "h", torch.device("cpu"))


def test_every_world_size_sees_the_same_global_batch():
    batches = Batches(np.arange(1000, dtype=np.uint32), 10, seed=3)
    assert batches.n_sequences == 99
    for step in (1, 20):
        whole = torch.cat([x for x, _ in batches.microbatches(step, rank(0, 1), 6, 2)])
        for world in (2, 3):
            parts = [x for r in range(world) for x, _ in batches.microbatches(step, rank(r, world), 6, 1)]
            assert torch.equal(torch.cat(parts), whole)


def test_an_epoch_has_every_target_once_and_the_next_is_shuffled_anew():
    batches = Batches(np.arange(101, dtype=np.uint32), 10, seed=0)
    epochs = []
    for epoch in range(2):
        targets = [
            int(t) for i in range(10) for t in batches.microbatches(epoch * 10 + i + 1, rank(0, 1), 1, 1)[0][1][0]
        ]
        epochs.append(targets)
        assert sorted(targets) == list(range(1, 101))
    assert epochs[0] != epochs[1]
    assert batches.steps(1.0, 3) == 3


def test_targets_follow_tokens_and_prompts_are_not_learnt():
    tokens = np.array([5, 6 | NOT_LEARNT, 7, 8], dtype=np.uint32)
    [(x, y)] = Batches(tokens, 3, 0).microbatches(1, rank(0, 1), 1, 1)
    assert x.tolist() == [[5, 6, 7]]
    assert y.tolist() == [[-100, 7, 8]]
