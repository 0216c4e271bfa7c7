"""Tokens for which a model has no embeddings are refused with their names, wherever they come from, before it is loaded."""

import json
import shutil

import pytest

from llama405b.contract.errors import UserError
from llama405b.data.tokens import read_tokenizer
from llama405b_tools.verbs import data


@pytest.fixture
def model(demo, tmp_path):
    return shutil.copytree(demo, tmp_path / "model")


def change(model, name, **more):
    found = json.loads((model / name).read_text())
    (model / name).write_text(json.dumps(found | more))


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}, ("<|im_start|>", "<|im_end|>")),
        ({"extra_special_tokens": ["<|im_start|>"]}, ("<|im_start|>",)),
        ({"pad_token": "[PAD]"}, ("[PAD]",)),
        ({"added_tokens_decoder": {"2048": {"content": "<new>", "special": True}}}, ("<new>",)),
    ],
)
def test_tokens_beyond_the_embeddings_are_named(model, tmp_path, more, named):
    change(model, "tokenizer_config.json", **more)
    with pytest.raises(UserError) as refused:
        read_tokenizer(model)
    assert all(f"{name!r} (20" in str(refused.value) for name in named)
    assert ", and the model 2048 embeddings; remove these tokens from " in str(refused.value)
    (tmp_path / "a.txt").write_text("some text " * 200)
    with pytest.raises(UserError, match="and the model 2048 embeddings"):
        data.main(["show", "--model.path", str(model), "--data.paths", str(tmp_path / "a.txt"), "--data.seq_len", "16"])


def test_fewer_tokens_than_embeddings_are_none_too_many(model):
    change(model, "config.json", vocab_size=2304)
    assert read_tokenizer(model).vocab_size == 2048
    change(model, "config.json", vocab_size=2047)
    with pytest.raises(UserError, match=r"its tokenizer has '.+' \(2047\), and the model 2047 embeddings"):
        read_tokenizer(model)
