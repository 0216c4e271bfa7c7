import pickle

import numpy as np
import pytest
import torch

from llama405b.contract.errors import UserError
from llama405b.data.batches import Batches, BatchLoader
from llama405b.data.encode import DOCUMENT_START, NOT_TRAINED
from llama405b.data.sources import Mixture, Source, open_source
from llama405b.distributed.ranks import Rank
from llama405b.settings.axes import MicrobatchSplit


def packed(tokens, seq_len, seed=0, *, isolated=True):
    return Batches(Mixture.from_weights([Source(tokens, seq_len)], seed), isolated=isolated)


def rank(number, world):
    return Rank(number, world, number, "h", torch.device("cpu"))


@pytest.mark.parametrize(
    "cases", [((1, 0), (2, 0), (3, 0)), pytest.param(((2, 2),), marks=pytest.mark.slow)], ids=["alone", "workers"]
)
def test_every_world_size_sees_the_same_global_batch(cases):
    batches = packed(np.arange(1000, dtype=np.uint32), 10, seed=3)
    assert batches.n_sequences == 99
    whole = torch.cat([batches.read(range(begin, begin + 6)).ids_BS for begin in (114, 120)])
    for world, workers in cases:
        readers = [
            BatchLoader(batches, rank(r, world), MicrobatchSplit(6, world), 1, 114, workers) for r in range(world)
        ]
        found = [each.ids_BS for _ in range(2) for reader in readers for each in next(reader)]
        assert torch.equal(torch.cat(found), whole)
        assert {reader.position for reader in readers} == {126}
        for reader in readers:
            reader.close()


@pytest.mark.parametrize("world", [4, 5, 9])
def test_where_micro_batches_do_not_go_evenly_each_is_learnt_once(world):
    batches = packed(np.arange(1000, dtype=np.uint32), 10, seed=3)
    readers = [BatchLoader(batches, rank(r, world), MicrobatchSplit(6, world), 2, 108) for r in range(world)]
    for begin in (108, 120):
        found = [next(reader) for reader in readers]
        assert {len(each) for each in found} == {-(-6 // world)}, "all take part in each round"
        learnt = [micro.targets_BS for each in found for micro in each if (micro.targets_BS != -100).any()]
        assert torch.equal(torch.cat(learnt), batches.read(range(begin, begin + 12)).targets_BS)
    for reader in readers:
        reader.close()


def test_an_epoch_has_every_target_once_and_the_next_is_shuffled_anew():
    batches = packed(np.arange(101, dtype=np.uint32), 10, seed=0)
    epochs = []
    for epoch in range(2):
        targets = [int(t) for i in range(10) for t in batches.read([epoch * 10 + i]).targets_BS[0]]
        epochs.append(targets)
        assert sorted(targets) == list(range(1, 101))
    assert epochs[0] != epochs[1]
    assert batches.n_steps(1.0, 3) == 3


def test_targets_follow_tokens_and_prompts_are_not_learnt():
    tokens = np.array([5, 6 | NOT_TRAINED, 7, 8], dtype=np.uint32)
    [batch] = packed(tokens, 3).read([0]).split(1)
    assert batch.ids_BS.tolist() == [[5, 6, 7]]
    assert batch.targets_BS.tolist() == [[-100, 7, 8]]
    assert batch.positions_BS is None


def test_documents_that_share_a_sequence_begin_anew_and_do_not_foretell_each_other():
    tokens = np.array(
        [1 | DOCUMENT_START, 2, 3, 4 | DOCUMENT_START, 5 | DOCUMENT_START | NOT_TRAINED, 6, 7, 8, 9], dtype=np.uint32
    )
    for isolated in (True, False):
        batches = packed(tokens, 4, isolated=isolated)
        found = [batches.read([i]) for i in (0, 1)]
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
    tokens = np.array([1 | DOCUMENT_START, 2, 3, 4, 5 | DOCUMENT_START, 6, 7, 8 | DOCUMENT_START, 9], dtype=np.uint32)
    windows = np.stack([tokens[i : i + 7] for i in (2, 1)])
    batch = packed(tokens, 6).make_batch(windows)
    assert batch.positions_BS.tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 0, 1, 2]]
    assert [part.positions_BS.tolist() for part in batch.split(1)] == [[[0, 1, 0, 1, 2, 0]], [[0, 1, 2, 0, 1, 2]]]


def mixed(weights, sizes=(50, 30, 20)):
    """Sources whose sequences say in each token which they are."""
    sources = [Source(np.arange(100 * i, 100 * i + n + 1, dtype=np.uint32), 1) for i, n in enumerate(sizes)]
    return Mixture.from_weights(sources, 4, weights)


def test_without_weights_every_sequence_comes_once_in_an_epoch():
    mixture = mixed(())
    for epoch in range(3):
        order = [mixture.locate(epoch * 100 + i) for i in range(100)]
        assert sorted(order) == [(i, place) for i, n in enumerate((50, 30, 20)) for place in range(n)]
        assert order != sorted(order)
    assert [int(mixture.window(i)[0]) for i in range(9)] == [100 * n + p for n, p in map(mixture.locate, range(9))]


def test_weights_say_how_often_a_source_is_read_and_it_is_read_in_whole_passes():
    mixture = mixed((1, 1, 2))
    assert mixture.counts == (25, 25, 50)
    order = [mixture.locate(i) for i in range(400)]
    for number, size in enumerate((50, 30, 20)):
        places = [place for which, place in order if which == number]
        assert len(places) == 4 * mixture.counts[number]
        for begin in range(0, len(places) - size + 1, size):
            assert sorted(places[begin : begin + size]) == list(range(size))
    assert mixed((5, 5, 1), sizes=(3, 3, 3)).counts == (4, 4, 1)


def test_a_weight_that_reads_nothing_is_refused():
    with pytest.raises(UserError, match="an epoch of 100 sequences would have none of source 2; raise its weight"):
        mixed((1, 0.001, 1))


def test_another_process_opens_the_file_itself(tmp_path):
    np.arange(100_000, dtype=np.uint32).tofile(tmp_path / "tokens.bin")
    source = open_source(tmp_path / "tokens.bin", 10)
    written = pickle.dumps(source)
    assert len(written) < 1000
    assert np.array_equal(pickle.loads(written).window(7), source.window(7))
