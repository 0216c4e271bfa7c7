"""Muon's own arithmetic beside torch's iteration."""

import torch
from torch import nn

from llama405b.optim import muon


def test_weights_in_bf16_decay(monkeypatch):
    """The factor of decay alone is nearer to 1 than BF16 can tell."""
    torch.manual_seed(0)
    before, direction = torch.randn(64, 64).bfloat16(), torch.randn(64, 64)
    monkeypatch.setattr(muon, "orthogonalize", lambda *_: [direction])
    after = {}
    for decay in (0.0, 0.5):
        weight = nn.Parameter(before.clone())
        state = {"momentum_buffer": torch.zeros(64, 64), "step": torch.tensor(0.0)}
        with torch.no_grad():
            params = {"momentum": 0.95, "lr": 1e-3, "weight_decay": decay}
            muon.update_muon([weight], [state], [torch.ones(64, 64)], params)
        after[decay] = weight.detach()
        right = before.float() * (1 - 1e-3 * decay) + direction * (-1e-3 * muon.UPDATE_RMS * 8)
        assert torch.equal(after[decay], right.bfloat16())
    assert not torch.equal(after[0.0], after[0.5])
