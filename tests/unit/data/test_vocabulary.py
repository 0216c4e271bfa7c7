"""Tokens for which a model has no embeddings are refused with their names, wherever they come from, before it is loaded."""

import json
import shutil

import pytest
from tokenizers import Tokenizer

from llama405b.commands.export import pin_tokenizer_class
from llama405b.contract.errors import UserError
from llama405b.data.tokenizer import auto_tokenizer_matches, read_tokenizer
from llama405b.spec.models import check_checkpoint, grow_vocabulary, read_small_files
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
    assert ", but the model has 2048 embeddings; add some with --model.resize_vocabulary true, " in str(refused.value)
    (tmp_path / "a.txt").write_text("some text " * 200)
    with pytest.raises(UserError, match="but the model has 2048 embeddings"):
        data.main(["show", "--model.path", str(model), "--data.paths", str(tmp_path / "a.txt"), "--data.seq_len", "16"])


def test_fewer_tokens_than_embeddings_are_none_too_many(model):
    change(model, "config.json", vocab_size=2304)
    assert read_tokenizer(model).vocab_size == 2048
    change(model, "config.json", vocab_size=2047)
    with pytest.raises(UserError, match=r"its tokenizer has '.+' \(2047\), but the model has 2047 embeddings"):
        read_tokenizer(model)


CLASSES = [
    "GPT2Tokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast",
    "CodeLlamaTokenizer", "GPTNeoXTokenizer", None,
]  # fmt: skip
DIGITS = {  # as SmolLM's: each digit is a token of its own
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}
LETTERS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "olmo2"])
@pytest.mark.parametrize("name", CLASSES)
def test_the_ids_are_those_of_tokenizer_json_whatever_the_class(model, family, name):
    change(model, "config.json", model_type=family)
    change(model, "tokenizer_config.json", tokenizer_class=name)
    for parts in (DIGITS, LETTERS):
        change(model, "tokenizer.json", pre_tokenizer=parts)
        own, said = Tokenizer.from_file(str(model / "tokenizer.json")), []
        found = read_tokenizer(model, said.append)
        for text in ("1234567 and 89", "  a\n\n\tb  ", "don't", "<|end_of_text|>x", "日本 été"):
            assert found(text, add_special_tokens=False)["input_ids"] == own.encode(text, add_special_tokens=False).ids
        assert (found.bos_token, found.eos_token) == ("<|begin_of_text|>", "<|end_of_text|>")
        assert bool(said) is not auto_tokenizer_matches(model)
        if (family, name) == ("llama", "GPT2Tokenizer") and parts is DIGITS:
            assert said[0].startswith(
                "tokenizer: using tokenizer.json as it is: GPT2Tokenizer, named in the model's files, would"
            )


def test_an_export_names_a_class_that_reads_its_tokenizer_as_it_is(model, capsys):
    change(model, "tokenizer.json", pre_tokenizer=DIGITS)
    change(model, "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    assert not auto_tokenizer_matches(model)
    pin_tokenizer_class(model)
    assert auto_tokenizer_matches(model)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("has_config", [True, False])
def test_an_export_whose_family_has_one_class_alone_is_warned_of_and_stays_as_it_was(model, capsys, has_config):
    change(model, "config.json", model_type="qwen2")
    change(model, "tokenizer.json", pre_tokenizer=DIGITS)
    change(model, "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    if not has_config:
        (model / "tokenizer_config.json").unlink()
    before = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
    pin_tokenizer_class(model)
    assert {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()} == before
    assert "AutoTokenizer, which transformers and vLLM use, gives other tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "more"),
    [
        ("tokenizer_config.json", {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"2048": {"content": "<new>", "special": True}}}),
        ("tokenizer_config.json", {"pad_token": {"content": "[PAD]", "__type": "AddedToken"}}),
    ],
)
def test_launch_and_the_trainer_refuse_in_the_same_sentence(model, file, more):
    """Launch's check reads the files by itself: a host needs no transformers for it."""
    change(model, file, **more)
    with pytest.raises(UserError) as by_launch:
        check_checkpoint(model, 64)
    with pytest.raises(UserError) as by_trainer:
        read_tokenizer(model)
    assert str(by_launch.value) == str(by_trainer.value)


def test_a_vocabulary_grows_to_a_multiple_of_128_where_it_must(model):
    assert grow_vocabulary(model, 2048) == 2048
    change(model, "tokenizer_config.json", additional_special_tokens=["<|im_start|>", "<|im_end|>"])
    assert grow_vocabulary(model, 2048) == 2176
    assert grow_vocabulary(model, 2050) == 2050
    assert check_checkpoint(model, 64, resize=True).vocab == 2048
    assert json.loads(read_small_files(model, resize=True)["config.json"])["vocab_size"] == 2176
    assert json.loads(read_small_files(model)["config.json"])["vocab_size"] == 2048


def test_code_that_a_model_brings_for_its_tokenizer_is_never_run(tmp_path):
    (tmp_path / "tokenization_mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    own_class = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["tokenization_mine.Mine", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own_class))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 10}))
    with pytest.raises(UserError, match="cannot read its tokenizer"):
        read_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()
