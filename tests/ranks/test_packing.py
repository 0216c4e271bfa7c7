"""Documents packed into one sequence do not see each other: they are learnt as if each were alone."""

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from llama405b.data.batch import IGNORE_INDEX, Batch
from llama405b.model.attention import document_mask, model_inputs
from ranks_rig import run_ranks

LENGTHS = ([5, 1, 7, 3], [16], [2, 2, 12], [9, 7], [1, 15], [4, 4, 4, 4])  # of the documents in each sequence
SEQ, STEPS = 16, 8


def _documents(step):
    generator = torch.Generator().manual_seed(step)
    return [[torch.randint(0, 131, (length,), generator=generator) for length in row] for row in LENGTHS]


def _packed(rows):
    ids = torch.stack([torch.cat(row) for row in rows])
    targets = torch.stack([torch.cat([F.pad(each[1:], (0, 1), value=IGNORE_INDEX) for each in row]) for row in rows])
    positions = torch.stack([torch.cat([torch.arange(len(each)) for each in row]) for row in rows])
    return Batch(ids, targets, positions)


def _alone(model, rows):
    """The summed loss of documents that are alone, and their number of targets."""
    losses, n_targets = [], 0
    for each in (each for row in rows for each in row if len(each) > 1):
        logits = model(input_ids=each[None], use_cache=False).logits[0, :-1]
        losses.append(F.cross_entropy(logits, each[1:], reduction="sum"))
        n_targets += len(each) - 1
    return torch.stack(losses).sum(), n_targets


def _loss(model, batch, attention):
    logits = model(**model_inputs(batch, attention), use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch.targets_BS.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def test_a_token_sees_those_of_its_document_up_to_itself():
    lengths = ((2, 3), (1, 3, 1))
    mask_B1ST = document_mask(torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths]))
    for mask_ST, row in zip(mask_B1ST[:, 0], lengths, strict=True):
        assert torch.equal(mask_ST, torch.block_diag(*(torch.ones(n, n).tril() for n in row)).bool())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_loss_and_gradients_are_those_of_the_documents_alone(tiny, attention):
    rows = _documents(0)
    found = []
    for packed in (True, False):
        model = LlamaForCausalLM.from_pretrained(tiny, attn_implementation=attention)
        loss = _loss(model, _packed(rows), attention) if packed else _alone(model, rows)[0]
        (loss / 80).backward()
        found.append((loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}))
    (one, grads), (other, expected) = found
    assert one == pytest.approx(other, rel=1e-6)
    for name, gradient in grads.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_changed_document_leaves_its_neighbours_as_they_were(tiny, attention):
    model = LlamaForCausalLM.from_pretrained(tiny, attn_implementation=attention)
    rows = _documents(0)
    batch = _packed(rows)
    ids = batch.ids_BS.clone()
    ids[0, 6:13] = (ids[0, 6:13] + 1) % 131  # the third document of the first sequence
    changed = Batch(ids, batch.targets_BS, batch.positions_BS)
    with torch.no_grad():
        before, after = (model(**model_inputs(each, attention), use_cache=False).logits for each in (batch, changed))
        assert torch.equal(before[:, :6], after[:, :6])
        assert torch.equal(before[:, 13:], after[:, 13:])
        assert torch.equal(before[1:], after[1:])
        assert not torch.isclose(before[0, 6:13], after[0, 6:13]).all(-1).any()
        together = [Batch(each.ids_BS, each.targets_BS) for each in (batch, changed)]  # concatenated
        before, after = (model(**model_inputs(each, attention), use_cache=False).logits for each in together)
        assert not torch.isclose(before[0, 13:], after[0, 13:]).all(-1).any()


def test_flash_attention_is_told_where_documents_end():
    rows = [[torch.zeros(length, dtype=torch.long) for length in row] for row in LENGTHS[:3]]
    batch = _packed(rows)
    inputs = model_inputs(batch, "flash_attention_2")
    assert inputs["cu_seq_lens_q"].tolist() == [0, 5, 6, 13, 16, 32, 34, 36, 48]
    assert inputs["cu_seq_lens_q"].dtype is torch.int32
    assert inputs["cu_seq_lens_k"] is inputs["cu_seq_lens_q"]
    assert inputs["max_length_q"] == inputs["max_length_k"] == 16
    whole = model_inputs(Batch(batch.ids_BS, batch.targets_BS), "flash_attention_2")
    assert (whole["cu_seq_lens_q"].tolist(), whole["max_length_q"]) == ([0, 16, 32, 48], 16)
    assert whole["position_ids"].tolist() == [list(range(16))] * 3  # as of packed ones: compiled layers have one graph


def _train(me, directory):
    from llama405b.optim.step import train_step
    from llama405b.parallel.passes import MicrobatchLoop
    from update_rig import build

    module, updater = build(me, directory, overlap=True)
    each = len(LENGTHS) // me.world_size
    losses = []
    for step in range(STEPS):
        micro = _packed(_documents(step)[me.index * each :][:each]).split(1 + step % 2)
        losses.append(train_step(MicrobatchLoop(module, me.dp.size), updater, micro, max_norm=0.0).loss)
    updater.wait()
    return losses


@pytest.mark.parametrize("world", [1, 2, 3])
def test_training_on_packed_documents_is_training_on_each_alone(tiny, world):
    model = LlamaForCausalLM.from_pretrained(tiny, attn_implementation="sdpa")
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer, expected = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8), []
    for step in range(STEPS):
        loss, n_targets = _alone(model, _documents(step))
        optimizer.zero_grad()
        (loss / n_targets).backward()
        optimizer.step()
        expected.append(loss.item() / n_targets)
    for losses in run_ranks(world, _train, tiny):
        assert losses == pytest.approx(expected, abs=1e-5)
