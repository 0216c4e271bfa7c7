import json
import os
import shutil

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from llama405b import config, weights
from llama405b.errors import UserError


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
    assert refusal(copy) == f"{shard}: {size - 7} bytes where its header says {size}; fetch it again"
    os.truncate(shard, 3)
    assert "not a safetensors file, or cut short at 3 bytes" in refusal(copy)


def test_not_a_safetensors_file(copy):
    shard = sorted(copy.glob("*.safetensors"))[0]
    shard.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "not a safetensors file" in refusal(copy)


def test_not_a_llama(copy):
    edit(copy / "config.json", model_type="mistral", architectures=["MistralForCausalLM"])
    assert "this is a MistralForCausalLM, not a LlamaForCausalLM" in refusal(copy)


def test_config_of_another_model(copy):
    edit(copy / "config.json", num_hidden_layers=9)
    assert "no file holds model.layers.2." in refusal(copy)
    edit(copy / "config.json", num_hidden_layers=2, intermediate_size=100)
    assert "mlp." in refusal(copy)


def test_tokenizer_that_does_not_fit(copy):
    edit(copy / "config.json", vocab_size=100)
    assert "its largest id is 2047, but the model has 100 embeddings" in refusal(copy)
    (copy / "tokenizer.json").unlink()
    assert "no tokenizer here" in refusal(copy)


def test_sequences_over_the_limit(demo):
    assert "--data.seq_len: 2048 is over the model's limit of 1024 positions" in refusal(demo, 2048)
