"""Tokens for which the model has no embeddings get some: trained on, saved, resumed and exported, the same on several ranks."""

import json
import shutil

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from llama405b.contract.errors import UserError
from llama405b_tools.verbs import data, export
from ops_rig import metrics, settings, train

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def chats(demo, tmp_path):
    model = shutil.copytree(demo, tmp_path / "model")
    described = json.loads((model / "tokenizer_config.json").read_text())
    described |= {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "chat_template": CHATML}
    (model / "tokenizer_config.json").write_text(json.dumps(described))
    records = [
        {"messages": [{"role": role, "content": f"{i} {role} " * 9} for role in ("user", "assistant")]}
        for i in range(60)
    ]
    (tmp_path / "talk.jsonl").write_text("\n".join(map(json.dumps, records)))
    return model, tmp_path / "talk.jsonl"


def test_a_run_with_new_tokens(chats, tmp_path, monkeypatch, capsys):
    model, talks = chats
    monkeypatch.chdir(tmp_path)
    common = [*settings(model, talks, steps=4), "--optimizer.lr", 0.01]
    refused = train(tmp_path, "bad", *common, code=2)
    assert (
        "its tokenizer has '<|im_start|>' (2048), '<|im_end|>' (2049), but the model has 2048 embeddings; add some with "
        in refused.stderr
    )
    common += ["--model.resize_vocabulary", "true"]
    one = train(tmp_path, "one", *common)
    assert "model: added 128 embeddings to 2048 to match its tokenizer; each is the mean of the old ones" in one.stdout
    train(tmp_path, "two", *common, "--parallel.tp", 2, world=2)
    losses = [[m["loss"] for m in metrics(tmp_path, name).values()] for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][-1] < losses[0][0]
    rates = [(m["all_tokens_per_s"] * m["step_s"], m["step_tokens"]) for m in metrics(tmp_path, "one").values()]
    assert all(n_all == pytest.approx(4 * 64) and n_targets < 200 for n_all, n_targets in rates)
    train(
        tmp_path,
        "two",
        *common,
        "--training.max_steps",
        6,
        "--resume",
        "auto",
        "--checkpoint.allow_changes",
        "training.max_steps",
    )

    assert export.main(["one", "out", "--verify"]) == 0
    made = AutoModelForCausalLM.from_pretrained("out")
    assert made.config.vocab_size == 2176
    before, after = load_file(model / "model-00001-of-00002.safetensors"), made.state_dict()
    name = "model.embed_tokens.weight"
    assert after[name].shape == (2176, before[name].shape[1])
    assert (after[name][2050:] == after[name][2050]).all()  # which nobody has used: the mean, decayed
    assert not (after[name][2048] == after[name][2050]).all()
    assert AutoTokenizer.from_pretrained("out").convert_tokens_to_ids("<|im_end|>") == 2049

    shown = ["show", "--model.path", str(model), "--data.paths", str(talks), "--data.seq_len", "64", "--sequences", "1"]
    with pytest.raises(UserError, match=r"add some with --model\.resize_vocabulary true"):
        data.main(shown)
    assert data.main([*shown, "--model.resize_vocabulary", "true"]) == 0
    assert "assistant <|im_end|>\n⟧" in capsys.readouterr().out
