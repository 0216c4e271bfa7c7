"""Each document of a step by itself: its loss and gradient as plain PyTorch has them, on any mesh; and what stands out is named."""

import math

import mesh_rig
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from llama405b.commands.blame_step import (
    MIN_BLAMED_SCORE,
    DocumentEffect,
    DocumentInStep,
    iterate_documents,
    iterate_skips,
    report_lines,
    score_documents,
)
from llama405b.data.batches import Batches
from llama405b.data.encode import DOCUMENT_START, NOT_TRAINED
from llama405b.data.sources import Mixture, open_source
from ranks_rig import run_ranks

SEQ, STEP = 16, range(3, 10)  # sequences
LENGTHS = [5, 20, 3, 9, 16, 1, 11, 30, 2, 7] * 6
LENGTHS[-1] += 1  # the last sequence ends in the last document, before its end


def _file(path):
    draw = np.random.default_rng(0)
    tokens_N = draw.integers(0, mesh_rig.VOCABULARY, sum(LENGTHS), dtype=np.uint32)
    tokens_N[::7] |= NOT_TRAINED
    tokens_N[np.cumsum([0, *LENGTHS])[:-1]] |= DOCUMENT_START
    tokens_N.tofile(path)
    return path


def _batches(path):
    return Batches(Mixture.from_weights([open_source(path, SEQ)], 1))


def _measure(me, directory, path, settings):
    from llama405b.commands.blame_step import measure_document
    from llama405b.distributed.ranks import with_mesh
    from llama405b.settings.schema import Optimizer, Parallel

    parallel = Parallel(numerics="fp32", **settings)
    me = with_mesh(me, parallel)
    batches = _batches(path)
    with mesh_rig.in_dtype():
        model, passes, updater = mesh_rig.build(me, directory, parallel, Optimizer(), torch.float64)
        before = mesh_rig.whole_weights(model)
        found = [measure_document(passes, updater, me, batches, piece) for piece in iterate_documents(batches, STEP)]
        updater.wait()
        after = mesh_rig.whole_weights(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    return list(filter(None, found))


@mesh_rig.in_dtype()
def _alone(directory, path):
    """By plain PyTorch: each document's own tokens through the model."""
    model, batches = (
        LlamaForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="sdpa"),
        _batches(path),
    )
    found = []
    for piece in iterate_documents(batches, STEP):
        window = torch.from_numpy(batches.mixture.window(piece.index).astype(np.int64))
        own = window[piece.offset : piece.offset + piece.n_tokens]
        ids = own & ~int(DOCUMENT_START | NOT_TRAINED)
        targets = torch.where(own[1:] & int(DOCUMENT_START | NOT_TRAINED) != 0, -100, ids[1:])
        if not (targets != -100).any():
            continue
        logits = model(ids[None, :-1]).logits[0]
        loss = F.cross_entropy(logits, targets)
        model.zero_grad()
        loss.backward(retain_graph=True)
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
        is_read = own[1:] & int(DOCUMENT_START | NOT_TRAINED) == int(NOT_TRAINED)
        read = F.cross_entropy(logits, torch.where(is_read, ids[1:], -100)).item() if is_read.any() else None
        found.append((int((targets != -100).sum()), loss.item(), norm, read))
    return found


@pytest.mark.parametrize(
    ("world", "settings"), [(3, {}), (2, {"tp": 2}), (2, {"pp": 2}), (2, {"cp": 2})], ids=["three", "tp", "pp", "cp"]
)
def test_each_document_is_measured_as_if_it_were_alone(tmp_path, world, settings):
    directory, path = mesh_rig.write_model(tmp_path / "model"), _file(tmp_path / "a.bin")
    expected = _alone(directory, path)
    assert len(expected) > 8
    for found in run_ranks(world, _measure, directory, path, settings):
        assert [each.n_targets for each in found] == [n for n, *_ in expected]
        assert [each.loss for each in found] == pytest.approx([loss for _, loss, *_ in expected], rel=1e-9)
        assert [each.grad_norm for each in found] == pytest.approx([norm for *_, norm, _ in expected], rel=1e-8)
        assert [each.read_loss is None for each in found] == [read is None for *_, read in expected]
        pairs = [(each.read_loss, read) for each, (*_, read) in zip(found, expected, strict=True) if read is not None]
        assert len(pairs) > 3
        assert [one for one, _ in pairs] == pytest.approx([other for _, other in pairs], rel=1e-9)


def test_pieces_are_all_tokens_of_a_step_once(tmp_path):
    batches = _batches(_file(tmp_path / "a.bin"))
    for index in STEP:
        pieces = list(iterate_documents(batches, [index]))
        assert [piece.offset for piece in pieces] == np.cumsum([0, *(piece.n_tokens for piece in pieces)])[:-1].tolist()
        assert sum(piece.n_tokens for piece in pieces) == len(batches.mixture.window(index))


def _measured(loss, norm, n_targets=100, place=0, read=5.0):
    return DocumentEffect(DocumentInStep(0, 0, place, place + 5, 0, f"a {place}"), n_targets, loss, norm, read)


def test_what_stands_out_is_first_and_only_that_is_blamed(tmp_path):
    draw = np.random.default_rng(0)
    healthy = [
        _measured(*pair, place=i)
        for i, pair in enumerate(zip(draw.normal(4, 0.4, 63), draw.lognormal(1, 0.2, 63), strict=True))
    ]
    assert score_documents(healthy)[0].score < MIN_BLAMED_SCORE
    for odd in (
        _measured(12.0, 3.0, place=99),
        _measured(4.0, 60.0, place=99),
        _measured(4.0, 3.0, read=1.0, place=99),
        _measured(math.nan, math.nan, place=99),
    ):
        scores = score_documents([*healthy, odd])
        assert scores[0].measured is odd
        assert [each.score >= MIN_BLAMED_SCORE for each in scores[:2]] == [True, False]
        assert next(reversed(list(report_lines(7, scores, tmp_path / "skip.jsonl")))).startswith(
            "to blame: a 99; resume with --data.skip "
        )
    assert list(report_lines(7, score_documents(healthy), tmp_path))[-1].startswith("no document stands out")
    assert score_documents([_measured(4.0, 1.0), _measured(4.01, 1.0)])[0].score < MIN_BLAMED_SCORE  # alike
    assert (
        score_documents([*healthy, _measured(9.0, 3.0, n_targets=2)])[0].score < MIN_BLAMED_SCORE
    )  # two targets tell little


def test_a_skip_list_has_whole_documents(tmp_path):
    batches = _batches(_file(tmp_path / "a.bin"))
    bounds = np.cumsum([0, *LENGTHS]).tolist()
    for piece in iterate_documents(batches, range(batches.n_sequences)):
        [skip] = iterate_skips(batches, score_documents([DocumentEffect(piece, 1, 1.0, 1.0)]))
        assert skip.begin in bounds
        assert skip.end in bounds
        assert bounds.index(skip.end) == bounds.index(skip.begin) + 1
        assert skip.begin <= piece.place < piece.end <= skip.end
