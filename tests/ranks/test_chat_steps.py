"""Steps on packed conversations are those of a plain loop over the conversations, one at a time."""

import itertools
import json
import random
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, LlamaForCausalLM

from ranks_rig import run_ranks

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
STEPS, SEQ, GLOBAL, LR = 20, 64, 6, 1e-3


@pytest.fixture
def chats(demo, tmp_path):
    """A model with a chat template, and a file of conversations."""
    model = shutil.copytree(demo, tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    draw = random.Random(3)
    with (tmp_path / "talk.jsonl").open("w") as file:
        for number in range(400):
            turns = [{"role": "system", "content": f"Count from {number}."}] * (number % 2)
            for turn in range(draw.randint(1, 4)):
                turns.append({"role": "user", "content": "x = " + "+".join(map(str, range(draw.randint(1, 9))))})
                turns.append({"role": "assistant", "content": f"def f{turn}(): return {number} " * draw.randint(1, 3)})
            file.write(json.dumps({"messages": turns}) + "\n")
    return model, tmp_path / "talk.jsonl", tmp_path / "cache"


def _data(file):
    from llama405b.settings.schema import Data

    return Data(paths=(str(file),), seq_len=SEQ, seed=5, documents="split")


def _train(me, model, file, cache):
    from llama405b.data.batches import BatchLoader, open_batches
    from llama405b.optim.optimizer import set_lr
    from llama405b.optim.step import train_step
    from llama405b.parallel.passes import MicrobatchLoop
    from llama405b.settings.axes import MicrobatchSplit
    from update_rig import build

    batches = open_batches(_data(file), model, cache, me, lambda *_: None, lambda _: None)
    module, updater = build(me, model, overlap=True)
    set_lr(updater.optimizer, LR)
    losses = [
        train_step(MicrobatchLoop(module, me.dp.size), updater, micro, max_norm=0.0).loss
        for micro in itertools.islice(BatchLoader(batches, me, MicrobatchSplit(GLOBAL // 2, me.dp.size), 2), STEPS)
    ]
    updater.wait()
    return losses


def _talk(tokenizer, messages):
    """Its tokens, and which of them are learnt: from the end of an answer's header to the end of the answer."""
    ids, learnt = [], []
    for message in messages:
        header = (tokenizer.bos_token if not ids else "") + f"[{message['role']}]"
        pieces = [(header, False), (message["content"] + tokenizer.eos_token, True)]
        if message["role"] != "assistant":
            pieces = [(header + message["content"] + tokenizer.eos_token, False)]
        for text, is_learnt in pieces:
            more = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += more
            learnt += [is_learnt] * len(more)
    return ids, learnt


def _sequences(model, file):
    """The parts of conversations that each sequence of an epoch has: tokens, and which are learnt."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    flat = []  # token, learnt, conversation
    for number, line in enumerate(file.read_text().splitlines()):
        ids, learnt = _talk(tokenizer, json.loads(line)["messages"])
        flat += [(token, is_learnt, number) for token, is_learnt in zip(ids, learnt, strict=True)]
    sequences = []
    for begin in range(0, len(flat) - SEQ, SEQ):
        window = flat[begin : begin + SEQ + 1]
        numbers = dict.fromkeys(number for _, _, number in window)
        sequences.append([[(t, is_learnt) for t, is_learnt, n in window if n == number] for number in numbers])
    return sequences


def _plainly(model, file):
    sequences = _sequences(model, file)
    order = np.random.default_rng([5, 0]).permutation(len(sequences))
    llama = LlamaForCausalLM.from_pretrained(model, attn_implementation="sdpa")
    groups = [
        {"params": [p for p in llama.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in llama.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer, losses = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8), []
    for step in range(STEPS):
        parts = [part for i in order[step * GLOBAL : (step + 1) * GLOBAL] for part in sequences[i] if len(part) > 1]
        total, n_targets = torch.zeros(()), 0
        for part in parts:
            ids = torch.tensor([token for token, _ in part])
            targets = torch.where(torch.tensor([is_learnt for _, is_learnt in part]), ids, -100)[1:]
            logits = llama(input_ids=ids[None, :-1], use_cache=False).logits[0]
            total = total + F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
            n_targets += int((targets != -100).sum())
        optimizer.zero_grad()
        (total / n_targets).backward()
        optimizer.step()
        losses.append(total.item() / n_targets)
    return losses


def test_the_losses_are_those_of_a_plain_loop(chats):
    expected = _plainly(*chats[:2])
    assert expected[-1] < expected[0] - 1
    for world in (1, 3):
        for losses in run_ranks(world, _train, *chats):
            assert losses == pytest.approx(expected, abs=1e-5)
