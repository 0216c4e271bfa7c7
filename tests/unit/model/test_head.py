"""The loss of some words' logits at a time is that of all logits, and never has all of them."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from llama405b.data.batch import Batch
from llama405b.model import head
from llama405b.settings.schema import VOCAB_CHUNK

TOKENS, HIDDEN, WORDS, VOCABULARY, LENGTH = 50, 24, 131, 128_256, 32_768


def batch(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, TOKENS // 5, HIDDEN, generator=generator).to(dtype).requires_grad_()
    layer = nn.Linear(HIDDEN, WORDS, bias=False, dtype=dtype)
    layer.weight.data.copy_(0.3 * torch.randn(WORDS, HIDDEN, generator=generator))
    targets = torch.randint(0, WORDS, (5, TOKENS // 5), generator=generator)
    targets[:, ::3] = -100
    return hidden, layer, targets


def summed(loss, run, targets):
    return loss.loss(head.ModelOutput(nn.Module(), run), Batch(targets, targets))


def gradients(loss, hidden, layer, targets):
    nll = summed(loss, lambda: layer(hidden), targets)
    return [nll.detach(), *torch.autograd.grad(nll * 0.01, (hidden, layer.weight))]


@pytest.mark.parametrize("words", [1, 37, 131, 1000])
def test_loss_and_gradients_are_those_of_all_logits(monkeypatch, words):
    monkeypatch.setattr(head, "VOCAB_CHUNK", words)
    for dtype, within in ((torch.float64, 1e-13), (torch.float32, 1e-6)):
        given = batch(dtype)
        expected = gradients(head.CrossEntropy(), *given)
        for found, right in zip(gradients(head.ChunkedCrossEntropy(given[1]), *given), expected, strict=True):
            assert (found - right).abs().max() <= within * right.abs().max()


def test_rounding_is_that_of_all_logits(monkeypatch):
    """Each gradient of the weight is one product, which is rounded once; those of the hidden states are added up in FP32."""
    monkeypatch.setattr(head, "VOCAB_CHUNK", 37)
    given = batch(torch.bfloat16)
    [nll, of_hidden, of_weight] = gradients(head.CrossEntropy(), *given)
    [found, hidden, weight] = gradients(head.ChunkedCrossEntropy(given[1]), *given)
    assert (found.dtype, hidden.dtype) == (torch.float32, torch.bfloat16)
    assert torch.allclose(found, nll, rtol=1e-6)
    assert torch.equal(weight, of_weight)
    assert torch.allclose(hidden, of_hidden, rtol=2**-7, atol=1e-5)


def test_extreme_logits_and_no_target():
    hidden, layer, targets = batch()
    layer.weight.data.mul_(1e4)
    expected = gradients(head.CrossEntropy(), hidden, layer, targets)
    for found, right in zip(gradients(head.ChunkedCrossEntropy(layer), hidden, layer, targets), expected, strict=True):
        assert torch.isfinite(found).all()
        assert torch.allclose(found, right, rtol=1e-5)
    none = gradients(head.ChunkedCrossEntropy(layer), hidden, layer, torch.full_like(targets, -100))
    assert not any(each.any() for each in none)


def test_without_targets_a_head_returns_logits_also_after_a_failure():
    hidden, layer, targets = batch()
    logits, loss = layer(hidden), head.ChunkedCrossEntropy(layer)
    with pytest.raises(ZeroDivisionError):
        summed(loss, lambda: 1 / 0, targets)
    assert torch.equal(layer(hidden), logits)


@pytest.mark.parametrize("hidden_size", [4096, 16_384])
def test_there_are_never_all_logits(hidden_size):
    """No more than three parts' logits in FP32, and the gradient of the weight, beside what the head takes and returns."""
    with FakeTensorMode():
        layer = nn.Linear(hidden_size, VOCABULARY, bias=False, dtype=torch.bfloat16)
        hidden = torch.empty(1, LENGTH, hidden_size, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(1, LENGTH, dtype=torch.int64)
        loss, tracker = head.ChunkedCrossEntropy(layer), MemTracker()
        tracker.track_external(layer, hidden, targets)
        with tracker:
            summed(loss, lambda: layer(hidden), targets).backward()
        [peak] = [kinds["Total"] for kinds in tracker.get_tracker_snapshot("peak").values()]
    own = 2 * hidden.nbytes + targets.nbytes + layer.weight.nbytes
    assert peak - own <= layer.weight.nbytes + 3 * 4 * LENGTH * VOCAB_CHUNK
