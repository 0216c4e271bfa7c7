"""Prompts that the sharded model continues are continued as transformers' own generate does, and no step after that is another."""

import pytest
import torch
from transformers import LlamaForCausalLM

from ranks_rig import run_ranks

PROMPTS = [[3, 17, 40, 9], [5], [60, 2, 2, 7, 11, 30, 8]]
NEW, NO_END = 6, 10_000


def _continue(me, directory):
    from llama405b.training.evaluate import generate_continuations
    from update_rig import build, take

    results = []
    for continues in (False, True):
        module, updater = build(me, directory, overlap=True)
        steps, found = [], []
        for step in range(3):
            if continues:
                found.append(generate_continuations(module, PROMPTS, NEW, {NO_END}, me.device))
            steps.append(take(me, module, updater, step))
        updater.wait()
        assert module.training
        results.append(steps)
    last = generate_continuations(module, PROMPTS, NEW, {NO_END}, me.device)
    ended = generate_continuations(module, PROMPTS, NEW, {last[0][1]}, me.device)
    return results, found, last, ended


@pytest.mark.parametrize("world", [1, 3])
def test_it_is_what_generate_says_and_changes_no_step(tiny, world):
    model = LlamaForCausalLM.from_pretrained(tiny)
    expected = []
    for prompt in PROMPTS:
        asked = torch.tensor([prompt])
        said = model.generate(asked, max_new_tokens=NEW, do_sample=False, eos_token_id=NO_END, pad_token_id=0)
        expected.append(said[0, len(prompt) :].tolist())
    for (without, with_prompts), found, last, ended in run_ranks(world, _continue, tiny):
        assert found[0] == expected  # by the weights before the first step
        assert found[1] != found[0]
        assert with_prompts == without  # bit for bit
        end = last[0][1]
        assert ended == [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in last]
