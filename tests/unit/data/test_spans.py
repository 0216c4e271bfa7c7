import random

import numpy as np
import pytest

from llama405b.contract.errors import UserError
from llama405b.data import sources
from llama405b.data.batches import Batches
from llama405b.data.encode import DOCUMENT_START, MARKS, NOT_TRAINED, WITH_PREVIOUS
from llama405b.data.sources import Mixture, Source, open_source

SEQ = 12


@pytest.fixture(params=[3, 1 << 20])
def documents(request, monkeypatch):
    """Token files of documents, some longer than a sequence; each token is another. Looked at in pieces of two sizes."""
    monkeypatch.setattr(sources, "CHUNK_TOKENS", request.param)
    draw = random.Random(request.param)
    lengths = [draw.choice([1, 3, 5, SEQ - 1, SEQ, SEQ + 1, 3 * SEQ + 2]) for _ in range(60)]
    tokens_N = np.arange(1, sum(lengths) + 1, dtype=np.uint32)
    begins = np.cumsum([0, *lengths[:-1]])
    tokens_N[begins] |= DOCUMENT_START
    return tokens_N, [np.arange(b + 1, b + n + 1) for b, n in zip(begins, lengths, strict=True)]


@pytest.mark.parametrize("truncate", [False, True])
def test_what_fits_into_a_sequence_is_never_split(documents, truncate):
    tokens_N, whole = documents
    source = Source(
        tokens_N, SEQ, sources.whole_document_spans(sources.document_bounds(tokens_N), SEQ, truncate=truncate)
    )
    read = [source.window(i)[:-1] & ~MARKS for i in range(source.n_sequences)]
    assert all(len(each) == SEQ for each in read)
    for document in whole:
        holders = [i for i, each in enumerate(read) if np.isin(document, each).any()]
        if len(document) <= SEQ:
            assert len(holders) == 1
            assert np.isin(document, read[holders[0]]).all()
        elif truncate:
            assert len(holders) == 1
            assert np.array_equal(read[holders[0]], document[:SEQ])
        else:
            assert np.array_equal(read[holders[0]], document[:SEQ])
            assert len(holders) == -(-len(document) // SEQ)
    found = np.concatenate(read)
    kept = [document[:SEQ] if truncate else document for document in whole]
    assert np.array_equal(found[found > 0], np.concatenate(kept))
    assert source.padding == pytest.approx((found == 0).mean())
    assert source.n_unread == sum(map(len, whole)) - sum(map(len, kept))


def test_documents_kept_together_are_in_one_sequence_also_of_what_is_held_out():
    draw = random.Random(4)
    lengths = [draw.choice([1, 2, 3, 4]) for _ in range(400)]
    begins = np.cumsum([0, *lengths[:-1]])
    tokens_N = np.arange(1, sum(lengths) + 1, dtype=np.uint32)
    tokens_N[begins] |= DOCUMENT_START
    tokens_N[begins[1::2]] |= WITH_PREVIOUS
    pairs = [{*range(begin + 1, begin + sum(lengths[i : i + 2]) + 1)} for i, begin in enumerate(begins) if not i % 2]
    whole = sources.whole_document_spans(sources.document_bounds(tokens_N, joined=True), SEQ, truncate=False)
    assert sources.needs_whole_documents(tokens_N)
    for source in Source(tokens_N, SEQ, whole).hold_out(0.2, np.random.default_rng(0)):
        read = [{*(source.window(i)[:-1] & ~MARKS).tolist()} - {0} for i in range(source.n_sequences)]
        assert set().union(*read)
        for pair in pairs:
            assert sum(bool(pair & each) for each in read) == any(pair <= each for each in read)


def test_documents_kept_together_fit_into_a_sequence(tmp_path):
    tokens_N = np.arange(1, 19, dtype=np.uint32)
    tokens_N[[0, 8, 16]] |= DOCUMENT_START
    tokens_N[8] |= WITH_PREVIOUS
    tokens_N.tofile(tmp_path / "tokens")
    with pytest.raises(
        UserError, match=r"--data\.seq_len: documents that are kept together have up to 16 tokens, more than 12"
    ):
        open_source(tmp_path / "tokens", 12, "auto")
    with pytest.raises(UserError, match=r"--data\.documents: split would separate documents that belong together"):
        open_source(tmp_path / "tokens", 16, "split")
    assert open_source(tmp_path / "tokens", 16, "auto").spans_N2.tolist() == [[0, 16], [16, 18]]
    with pytest.raises(UserError, match=r"--evaluation\.fraction: too few documents to hold some out"):
        sources.split_documents(tokens_N[:16], 1, np.random.default_rng(0))


def test_as_many_documents_stand_in_a_sequence_as_fit_into_it():
    bounds_N = np.cumsum([0, 5, 7, SEQ, 3, 9, 1, SEQ + 1, 2])
    found = sources.whole_document_spans(bounds_N, SEQ, truncate=False)
    assert found.tolist() == [[0, 12], [12, 24], [24, 36], [36, 37], [37, 49], [49, 52]]


def test_every_target_of_whole_documents_comes_once_and_padding_is_no_target(documents):
    tokens_N, whole = documents
    source = Source(tokens_N, SEQ, sources.whole_document_spans(sources.document_bounds(tokens_N), SEQ, truncate=False))
    batch = Batches(Mixture.from_weights([source], 0)).read_unshuffled(range(source.n_sequences))
    targets = sorted(batch.targets_BS[batch.targets_BS >= 0].tolist())
    assert targets == [int(token) for document in whole for token in document[1:]]
    assert batch.positions_BS.max() == SEQ - 1


def test_documents_are_whole_where_parts_are_only_read(documents, tmp_path):
    tokens_N, _ = documents
    tokens_N[0] |= NOT_TRAINED  # nothing foretells it
    tokens_N.tofile(tmp_path / "text.bin")
    tokens_N[-1] |= NOT_TRAINED
    tokens_N.tofile(tmp_path / "talk.bin")
    chosen = {
        (name, how): open_source(tmp_path / f"{name}.bin", SEQ, how).spans_N2 is not None
        for name in ("text", "talk")
        for how in ("auto", "whole", "split")
    }
    assert [how for how, whole in chosen.items() if whole] == [("text", "whole"), ("talk", "auto"), ("talk", "whole")]
    assert open_source(tmp_path / "text.bin", SEQ, "auto", truncate=True).n_unread > 0
