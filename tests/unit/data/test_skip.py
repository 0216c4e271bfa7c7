"""Documents that are read but not learnt: their targets are masked where they are, and nothing else changes."""

import pickle

import numpy as np
import pytest

from llama405b.contract.errors import UserError
from llama405b.data.batch import IGNORE_INDEX
from llama405b.data.batches import Batches, SkippedRange, describe_skipped, mask_skipped, read_skips
from llama405b.data.encode import DOCUMENT_START, MARKS
from llama405b.data.sources import MaskedRanges, Mixture, open_source

SEQ = 10
LENGTHS = [1, 7, SEQ, 3, 35, 2, SEQ + 1, 5] * 10
N_TOKENS = sum(LENGTHS)


@pytest.fixture
def file(tmp_path):
    tokens_N = np.arange(1, 1 + sum(LENGTHS), dtype=np.uint32)
    tokens_N[np.cumsum([0, *LENGTHS])[:-1]] |= DOCUMENT_START
    tokens_N.tofile(tmp_path / "a.bin")
    return tmp_path / "a.bin"


def batches(file, documents="split", skips=(), holds_out=False, n_sources=1):
    mixture = Mixture.from_weights([open_source(file, SEQ, documents) for _ in range(n_sources)], 3)
    found = Batches(mask_skipped(mixture, skips))
    return found.hold_out(0.2)[0] if holds_out else found


def skip(begin, end, source=0, n_tokens=N_TOKENS):
    return SkippedRange(source, n_tokens, begin, end)


@pytest.mark.parametrize("documents", ["split", "whole"])
@pytest.mark.parametrize("holds_out", [False, True])
def test_only_the_targets_in_the_ranges_are_masked(file, documents, holds_out):
    ranges = [(1, 8), (21, 56), (40, 60), (300, 303), (sum(LENGTHS) - 5, sum(LENGTHS))]
    out = {token for begin, end in ranges for token in range(begin + 1, end + 1)}  # each token is its place, from 1
    plain = batches(file, documents, holds_out=holds_out)
    masked = batches(file, documents, [skip(*each) for each in ranges], holds_out=holds_out)
    seen = 0
    for index in range(2 * plain.n_sequences):  # in a second pass, too
        one, other = plain.read([index]), masked.read([index])
        assert one.ids_BS.equal(other.ids_BS)
        assert (one.positions_BS is None) == (other.positions_BS is None)
        for was, now in zip(one.targets_BS[0].tolist(), other.targets_BS[0].tolist(), strict=True):
            assert now == (IGNORE_INDEX if was in out else was)
            seen += was in out
    assert seen >= 20


def test_only_the_source_that_is_named_is_masked(file):
    found = batches(file, skips=[skip(0, 50, source=1)], n_sources=2).mixture.sources
    assert found[0].masked_ranges is None
    assert pickle.loads(pickle.dumps(found[1])).window(0).tolist() == found[1].window(0).tolist()
    assert (found[1].window(0) & ~MARKS).tolist() == (found[0].window(0) & ~MARKS).tolist()


def test_ranges_that_touch_are_one():
    found = MaskedRanges.from_ranges([(5, 9), (0, 3), (8, 12), (3, 4)])
    assert (found.begins_N.tolist(), found.ends_N.tolist()) == ([0, 5], [4, 12])
    assert MaskedRanges.from_ranges([]) is None


@pytest.mark.parametrize("wrong", [skip(0, 5, n_tokens=7), skip(5, 5), skip(0, 10**6), skip(0, 5, source=1)])
def test_a_list_of_other_data_is_refused(file, wrong):
    with pytest.raises(UserError, match=r"--data\.skip: the list was made from other data"):
        batches(file, skips=[wrong])


def test_a_list_is_read_as_it_is_written_and_what_is_none_is_refused(tmp_path):
    path = tmp_path / "skip.jsonl"
    path.write_text('{"source": 0, "n_tokens": 9, "begin": 1, "end": 4, "document": "a.txt 1", "why": "x"}\n\n')
    assert read_skips(path) == (SkippedRange(0, 9, 1, 4, "a.txt 1", "x"),)
    assert describe_skipped(read_skips(path)) == "data: 1 range of 3 tokens excluded from the loss by data.skip"
    path.write_text('{"source": 0}\n')
    with pytest.raises(UserError, match=r"skip\.jsonl:1: .*; name a list that `llama405b blame` wrote"):
        read_skips(path)
    with pytest.raises(UserError, match=r"no\.jsonl: cannot be read"):
        read_skips(tmp_path / "no.jsonl")
