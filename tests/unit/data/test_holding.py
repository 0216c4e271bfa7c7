"""Documents that are held out of training, and what is left."""

import itertools
import pickle

import numpy as np
import pytest
import torch

from llama405b.contract.errors import UserError
from llama405b.data.batches import Batches, BatchLoader
from llama405b.data.encode import DOCUMENT_START, MARKS, NOT_TRAINED, FileOffset
from llama405b.data.sources import Mixture, documents_in_sequence, open_source, write_offsets
from llama405b.distributed.ranks import Rank
from llama405b.settings.axes import MicrobatchSplit
from llama405b.settings.schema import Data

SEQ = 10
LENGTHS = [1, 7, SEQ, 3, 35, 2, SEQ + 1, 5] * 40


def file_of(path, lengths, begin=1):
    """A token file in which each token is another one; returns the documents."""
    tokens_N = np.arange(begin, begin + sum(lengths), dtype=np.uint32)
    bounds = np.cumsum([0, *lengths])
    documents = [set(tokens_N[b:e].tolist()) for b, e in itertools.pairwise(bounds)]
    tokens_N[bounds[:-1]] |= DOCUMENT_START
    tokens_N.tofile(path)
    return documents


def read(batches):
    """All tokens that are read, and padding as 0."""
    windows = [batches.mixture.unshuffled_window(i)[:-1] for i in range(batches.n_sequences)]
    return np.concatenate(windows) & ~MARKS


def batches_of(*files, documents="split", truncate=False, seed=0):
    sources = [open_source(file, SEQ, documents, truncate=truncate) for file in files]
    return Batches(Mixture.from_weights(sources, seed))


def test_a_little_less_or_more_than_a_document_is_still_a_whole_document(tmp_path):
    file_of(tmp_path / "a.bin", [20] * 100)
    for seed in range(40):
        _, held = batches_of(tmp_path / "a.bin", seed=seed).hold_out(0.012)  # 24 tokens
        assert held.mixture.sources[0].n_tokens == 20


@pytest.mark.parametrize("packing", ["split", "whole"])
@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.5])
def test_no_document_is_both_trained_on_and_held_out(tmp_path, packing, fraction):
    documents = file_of(tmp_path / "a.bin", LENGTHS)
    for truncate in (False, True):
        whole = batches_of(tmp_path / "a.bin", documents=packing, truncate=truncate)
        kept, held = (read(each) for each in whole.hold_out(fraction))
        trained, evaluated = ({*each.tolist()} - {0} for each in (kept, held))
        assert not any(document & trained and document & evaluated for document in documents)
        assert np.unique(kept[kept > 0]).size == np.count_nonzero(kept)  # each once in an epoch
        if truncate:
            continue
        left_over = sum(LENGTHS) - len(trained | evaluated)
        assert left_over <= SEQ * (packing == "split")  # at the end of what is trained on
        assert {len(document & evaluated) for document in documents} <= {0, *LENGTHS}  # whole ones
        assert abs(len(evaluated) - fraction * sum(LENGTHS)) <= max(LENGTHS) / 2


def test_the_seed_decides_which_and_nothing_else(tmp_path):
    file_of(tmp_path / "a.bin", LENGTHS)
    file_of(tmp_path / "b.bin", LENGTHS, begin=10**6)

    def held(seed):
        return read(batches_of(tmp_path / "a.bin", tmp_path / "b.bin", seed=seed).hold_out(0.1)[1])

    assert np.array_equal(held(3), held(3))
    assert not np.array_equal(held(3), held(4))
    first, second = held(3)[held(3) < 10**6], held(3)[held(3) >= 10**6]  # of each source
    assert min(np.count_nonzero(first), np.count_nonzero(second)) > 0.07 * sum(LENGTHS)


def test_every_number_of_ranks_trains_on_the_same_and_so_do_other_processes(tmp_path):
    file_of(tmp_path / "a.bin", LENGTHS)
    kept, _ = batches_of(tmp_path / "a.bin").hold_out(0.1)
    expected = kept.read(range(6)).ids_BS
    for world in (1, 2, 3):
        ranks = [Rank(number, world, number, "h", torch.device("cpu")) for number in range(world)]
        readers = [BatchLoader(kept, each, MicrobatchSplit(6, len(ranks)), 1) for each in ranks]
        assert torch.equal(torch.cat([each.ids_BS for reader in readers for each in next(reader)]), expected)
        for reader in readers:
            reader.close()
    source = pickle.loads(pickle.dumps(kept.mixture.sources[0]))
    assert np.array_equal(source.window(40), kept.mixture.sources[0].window(40))
    assert 0 < source.n_documents == kept.mixture.sources[0].n_documents < len(LENGTHS)


@pytest.mark.parametrize("lengths", [[1000], [700, 300], [2, 3, 995]], ids=["one", "two", "one that is long"])
def test_where_no_document_is_short_enough_the_end_of_the_longest_is_held_out(tmp_path, lengths):
    documents = file_of(tmp_path / "a.bin", lengths)
    kept, held = batches_of(tmp_path / "a.bin").hold_out(0.05)
    last = max(max(documents, key=len))
    assert sorted(read(held).tolist()) == list(range(last - 49, last + 1))
    assert not {*read(kept).tolist()} & {*read(held).tolist()}
    from llama405b.data.batches import describe_held_out

    [said] = describe_held_out(Data(paths=("a.txt",)), held)
    assert said == "evaluation: the end of the longest document held out, 50 tokens in 5 sequences"


@pytest.mark.parametrize("lengths", [[49, 51], [49, 49, 2], [60, 40], [30, 30, 40], [25] * 4])
@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.5])
def test_of_few_documents_something_is_held_out_and_most_is_left(tmp_path, lengths, fraction):
    documents = file_of(tmp_path / "a.bin", lengths)
    for seed in range(20):
        kept, held = batches_of(tmp_path / "a.bin", documents="whole", seed=seed).hold_out(fraction)
        kept_tokens, held_tokens = ({*read(each).tolist()} - {0} for each in (kept, held))
        assert kept_tokens | held_tokens == set.union(*documents)
        assert not kept_tokens & held_tokens
        assert 0 < len(held_tokens) <= 75
        assert sum(each.mixture.sources[0].n_documents for each in (kept, held)) == len(lengths)


def test_documents_short_and_long_are_held_out_as_there_are(tmp_path):
    file_of(tmp_path / "a.bin", [90] * 100 + [10] * 900)
    for seed in range(5):
        _, held = batches_of(tmp_path / "a.bin", seed=seed).hold_out(0.1)
        long_ones = np.count_nonzero(read(held) <= 9000) / 90
        assert (held.mixture.sources[0].n_documents, long_ones) == (100, 10)


def test_many_documents_are_held_out_rather_than_a_long_one(tmp_path):
    file_of(tmp_path / "a.bin", [90] * 100 + [10] * 100)
    for seed in range(5):
        _, held = batches_of(tmp_path / "a.bin", seed=seed).hold_out(0.01)
        assert held.mixture.sources[0].n_documents == 10


def test_it_is_said_what_is_held_out(tmp_path):
    from llama405b.data.batches import describe_held_out

    for name in "ab":
        file_of(tmp_path / f"{name}.bin", [5] * 200)
    config = Data(paths=("a.txt", "b.txt"), weights=(1, 1))
    _, held = batches_of(tmp_path / "a.bin", tmp_path / "b.bin").hold_out(0.1)
    expected = [f"evaluation: 20 documents of {name}.txt held out, 100 tokens in 10 sequences" for name in "ab"]
    assert describe_held_out(config, held) == expected


def test_at_least_a_sequence_is_held_out_and_no_target_of_it_is_lost(tmp_path):
    file_of(tmp_path / "a.bin", [5] * 100)
    _, held = batches_of(tmp_path / "a.bin").hold_out(0.001)
    targets = held.read_unshuffled(range(held.n_sequences)).targets_BS
    assert (held.n_sequences, int((targets >= 0).sum())) == (1, 8)
    assert held.mixture.sources[0].n_documents == 2  # the first token of each is no target
    file_of(tmp_path / "a.bin", [3, SEQ - 2])
    with pytest.raises(UserError, match=r"there is only one sequence; add text, or name --evaluation.paths"):
        batches_of(tmp_path / "a.bin").hold_out(0.1)


def test_documents_of_what_is_left_are_named(tmp_path):
    documents = file_of(tmp_path / "a.bin", [5] * 60)
    write_offsets(tmp_path / "a.bin", [FileOffset(0, "talk.jsonl", 0)])
    both = batches_of(tmp_path / "a.bin", documents="whole").hold_out(0.3)
    assert [each.mixture.sources[0].n_documents for each in both] == [42, 18]
    for batches in both:
        source = batches.mixture.sources[0]
        for place in range(source.n_sequences):
            tokens = {*(source.window(place)[:-1] & ~MARKS).tolist()} - {0}
            numbers = {n for span in documents_in_sequence(source, place) for n in range(span.first, span.last + 1)}
            assert set().union(*(documents[n - 1] for n in numbers)) == tokens


def test_prompts_stay_unlearnt_in_what_is_held_out(tmp_path):
    documents = file_of(tmp_path / "a.bin", [6] * 100)
    tokens_N = np.fromfile(tmp_path / "a.bin", np.uint32)
    prompts = {token for document in documents for token in sorted(document)[:3]}
    tokens_N[np.isin(tokens_N & ~MARKS, list(prompts))] |= NOT_TRAINED
    tokens_N.tofile(tmp_path / "a.bin")
    for batches in batches_of(tmp_path / "a.bin", documents="auto").hold_out(0.2):
        targets = batches.read_unshuffled(range(batches.n_sequences)).targets_BS
        learnt = {*targets[targets >= 0].tolist()}
        assert not learnt & prompts
        assert len(learnt) == 3 * batches.mixture.sources[0].n_documents
