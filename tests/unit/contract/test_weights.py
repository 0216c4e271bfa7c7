import json
import os
import shutil

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from llama405b.contract import config, weights
from llama405b.contract.errors import UserError


@pytest.fixture
def copy(demo, tmp_path):
    shutil.copytree(demo, tmp_path / "model")
    return tmp_path / "model"


def edit(path, **changes):
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | changes))


def refusal(directory, seq_len=64):
    with pytest.raises(UserError) as caught:
        weights.check_checkpoint(directory, seq_len)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_headers_tell_what_transformers_wrote(demo, tiny_tied):
    for directory in (demo, tiny_tied):
        model = LlamaForCausalLM.from_pretrained(directory)
        tensors = weights.read_tensors(directory)
        assert {name: info.shape for name, info in tensors.items()} == {
            name: tuple(t.shape)
            for name, t in model.state_dict().items()
            if not (model.config.tie_word_embeddings and name == "lm_head.weight")
        }
        llama = weights.read_llama(directory)
        assert llama.tensors() == {name: info.shape for name, info in tensors.items()}
        assert llama.parameters == sum(p.numel() for p in model.parameters())


def test_model_flops_are_those_that_torch_counts(demo, tiny_tied):
    for directory in (demo, tiny_tied):
        model = LlamaForCausalLM.from_pretrained(directory, attn_implementation="eager")
        llama = weights.read_llama(directory)
        ids = torch.randint(0, llama.vocab, (2, 48))
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids, labels=ids).loss.backward()
        masked = (
            6 * llama.layers * llama.heads * llama.head_dim * 48
        )  # half of the attention matrix, which torch computes
        rotary = 2 * llama.head_dim // 2  # an outer product of positions and frequencies, once
        assert counter.get_total_flops() / 96 == pytest.approx(llama.flops_per_token(48) + masked, abs=rotary)


def test_a_good_checkpoint_passes(demo):
    assert weights.check_checkpoint(demo, 1024).vocab == 2048


def test_405b_has_its_parameters():
    known = json.loads((config.PRESET_DIR / "architectures.json").read_text())
    counts = {name: weights.parse_llama(record, name).parameters for name, record in known.items()}
    assert counts["llama3.1-405b"] == 405_853_388_800
    assert set(counts) == set(config.preset_names()) - {"demo"}
    assert LlamaConfig(**known["llama3.2-1b"]).tie_word_embeddings


def test_a_missing_directory_and_a_missing_shard(copy):
    assert "no such directory" in refusal(copy / "none")
    shard = sorted(copy.glob("*.safetensors"))[0]
    shard.unlink()
    assert f"{shard}: missing of" in refusal(copy)


def test_a_truncated_shard_says_both_sizes(copy):
    shard = sorted(copy.glob("*.safetensors"))[0]
    size = shard.stat().st_size
    os.truncate(shard, size - 7)
    assert refusal(copy) == f"{shard}: {size - 7} bytes, but its header says {size}; download it again"
    os.truncate(shard, 3)
    assert "not a safetensors file, or truncated at 3 bytes" in refusal(copy)


def test_not_a_safetensors_file(copy):
    shard = sorted(copy.glob("*.safetensors"))[0]
    shard.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "not a safetensors file" in refusal(copy)


def test_not_a_llama(copy):
    edit(copy / "config.json", model_type="mistral", architectures=["MistralForCausalLM"])
    assert "architectures ['MistralForCausalLM']; only a LlamaForCausalLM" in refusal(copy)


def test_config_of_another_model(copy):
    edit(copy / "config.json", num_hidden_layers=9)
    assert "no file contains model.layers.2." in refusal(copy)
    edit(copy / "config.json", num_hidden_layers=2, intermediate_size=100)
    assert "mlp." in refusal(copy)


def test_tokenizer_that_does_not_fit(copy):
    edit(copy / "config.json", vocab_size=100)
    assert "its largest id is 2047, but the model has 100 embeddings" in refusal(copy)
    (copy / "tokenizer.json").unlink()
    assert "tokenizer.json: no such file" in refusal(copy)


@pytest.mark.parametrize("value", ["big", None, [1], 0, -1, 1.5, True, 10**12, float("inf")])
def test_a_number_that_is_none(copy, value):
    edit(copy / "config.json", num_hidden_layers=value)
    assert "num_hidden_layers is" in refusal(copy)


@pytest.mark.parametrize(
    "model", [None, [], {"vocab": 5}, {"vocab": {"a": "b"}}, {"vocab": {}}, {"type": "BPE", "vocab": {"a": 0}}]
)
def test_a_tokenizer_that_cannot_be_read(copy, model):
    edit(copy / "tokenizer.json", model=model)
    assert "tokenizer.json: not a readable tokenizer; download it again" in refusal(copy)


def rewrite_header(shard, change):
    data = shard.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change({name: entry for name, entry in header.items() if name != "__metadata__"})
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda entry, other: entry.update(data_offsets=other["data_offsets"]), "header cannot be read"),
        (lambda entry, _: entry.update(shape=[float(n) for n in entry["shape"]]), "header cannot be read"),
        (lambda entry, _: entry.update(dtype="F8_E4M3"), "is F8_E4M3; only F32, F16 and BF16 can be trained"),
        (lambda entry, _: entry.pop("shape"), "header cannot be read"),
    ],
    ids=["overlap", "float shape", "F8", "no shape"],
)
def test_a_header_that_lies(copy, change, words):
    shard = sorted(copy.glob("*.safetensors"))[0]
    rewrite_header(shard, lambda entries: change(*list(entries.values())[:2]))
    assert f"{shard}: " in (said := refusal(copy))
    assert words in said


def test_sequences_over_the_limit(demo):
    assert "--data.seq_len: 2048 exceeds the model's limit of 1024 positions" in refusal(demo, 2048)
