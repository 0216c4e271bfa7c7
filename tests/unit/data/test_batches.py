import json

import numpy as np
import pytest
import torch

from llama405b.contract.errors import UserError
from llama405b.data.batches import NOT_LEARNT, Batches
from llama405b.data.documents import documents, expand
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


def test_documents(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")  # not UTF-8
    lines = [{"text": "x"}, {"prompt": "p", "completion": "c"}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "c").write_text("no")
    assert list(documents(expand([str(tmp_path)]))) == [("", "caf�"), ("", "x"), ("p", "c")]
    (tmp_path / "half.jsonl").write_text('{"text": "a\\ud800b"}')  # JSON can spell half of a character
    assert list(documents([tmp_path / "half.jsonl"])) == [("", "a?b")]
    assert expand([f"{tmp_path}/*.txt"]) == [tmp_path / "a.txt"]
    assert len(expand(["stdlib"])) > 100


def test_bad_documents_are_named(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n{"txt": "y"}\n')
    with pytest.raises(UserError, match=r"b.jsonl:2: not "):
        list(documents([tmp_path / "b.jsonl"]))
    with pytest.raises(UserError, match="matches no file"):
        expand([str(tmp_path / "none*")])
