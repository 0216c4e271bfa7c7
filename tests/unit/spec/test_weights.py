import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from llama405b.contract.errors import UserError
from llama405b.model import llama
from llama405b.settings import config
from llama405b.settings.schema import Adapter
from llama405b.spec import adapters, models
from llama405b.spec.models import FAMILIES
from llama405b.spec.tensors import INDEX_FILE, SINGLE_FILE, read_tensors
from tiny_models import write_llama


@pytest.fixture
def copy(demo, tmp_path):
    shutil.copytree(demo, tmp_path / "model")
    return tmp_path / "model"


def edit(path, **changes):
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | changes))


def refusal(directory, seq_len=64):
    with pytest.raises(UserError) as caught:
        models.check_checkpoint(directory, seq_len)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_headers_tell_what_transformers_wrote(demo, tiny_tied):
    for directory in (demo, tiny_tied):
        model = LlamaForCausalLM.from_pretrained(directory)
        tensors = read_tensors(directory)
        assert {name: info.shape for name, info in tensors.items()} == {
            name: tuple(t.shape)
            for name, t in model.state_dict().items()
            if not (model.config.tie_word_embeddings and name == "lm_head.weight")
        }
        llama = models.read_llama(directory)
        assert llama.tensors() == {name: info.shape for name, info in tensors.items()}
        assert llama.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_the_tensors_that_transformers_gives_it(tmp_path, family):
    for number, more in enumerate(({"attention_bias": True}, {"tied": True})):
        directory = write_llama(tmp_path / str(number), family=family, **more)
        model = AutoModelForCausalLM.from_pretrained(directory)
        tensors = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert models.read_llama(directory).tensors() == tensors


def test_sequences_are_no_longer_than_a_sliding_window(copy):
    edit(copy / "config.json", model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=48)
    assert "--data.seq_len: 64 exceeds the model's sliding window of 48 tokens" in refusal(copy)
    assert models.check_checkpoint(copy, 48).window == 48
    edit(copy / "config.json", model_type="qwen2", architectures=["Qwen2ForCausalLM"], attention_bias=None)
    assert models.read_llama(copy).window == 0  # use_sliding_window says whether
    edit(copy / "config.json", use_sliding_window=True)
    assert models.read_llama(copy).window == 48


@pytest.mark.slow
def test_model_flops_are_those_that_torch_counts(demo, tiny_tied):
    for directory in (demo, tiny_tied):
        model = LlamaForCausalLM.from_pretrained(directory, attn_implementation="eager")
        llama = models.read_llama(directory)
        ids = torch.randint(0, llama.vocab, (2, 48))
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids, labels=ids).loss.backward()
        masked = (
            6 * llama.layers * llama.heads * llama.head_dim * 48
        )  # half of the attention matrix, which torch computes
        rotary = 2 * llama.head_dim // 2  # an outer product of positions and frequencies, once
        assert counter.get_total_flops() / 96 == pytest.approx(llama.flops_per_token(48) + masked, abs=rotary)


def test_a_good_checkpoint_passes(demo):
    assert models.check_checkpoint(demo, 1024).vocab == 2048


def test_405b_has_its_parameters():
    known = json.loads((config.PRESET_DIR / "architectures.json").read_text())
    counts = {name: models.parse_llama(record, name).parameters for name, record in known.items()}
    assert counts["llama3.1-405b"] == 405_853_388_800
    assert set(counts) == set(config.preset_names()) - {"demo"}
    assert LlamaConfig(**known["llama3.2-1b"]).tie_word_embeddings


def test_only_llamas_have_biases_in_their_mlp():
    known = json.loads((config.PRESET_DIR / "architectures.json").read_text())
    for name, asked, biased in (("llama3.1-8b", True, True), ("llama3.1-8b", False, False), ("qwen3-8b", True, False)):
        assert models.parse_llama(known[name] | {"mlp_bias": asked}, name).mlp_bias is biased


def test_an_adapter_is_beside_all_that_a_matrix_holds():
    config = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"), 64)
    llama = models.parse_llama(config | {"model_type": "phi3", "num_hidden_layers": 1}, "phi3")
    shapes = adapters.lora_shapes(llama, Adapter("lora", rank=2))
    matrices = {name.split(".")[-3]: shape[0] for name, shape in shapes.items() if name.endswith("lora_B.weight")}
    assert matrices == {"o_proj": 64, "qkv_proj": 192, "gate_up_proj": 128, "down_proj": 64}
    words = "Phi3ForCausalLM holds q_proj and k_proj and v_proj in one matrix, qkv_proj; name all of them"
    with pytest.raises(UserError, match=words):
        adapters.lora_shapes(llama, Adapter("lora", targets=("q_proj", "v_proj", "down_proj")))


def test_keys_that_a_family_leaves_out_have_its_own_defaults():
    config = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34}
    llama = models.parse_llama(config, "gemma3")
    theirs = AutoConfig.for_model(**config)
    assert (llama.heads, llama.kv_heads, llama.head_dim) == (
        theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim,
    )  # fmt: skip
    assert (llama.vocab, llama.window, llama.tied) == (
        theirs.vocab_size,
        theirs.sliding_window,
        theirs.tie_word_embeddings,
    )
    assert llama.max_positions == theirs.max_position_embeddings


def test_the_rope_of_each_type_of_layer_is_checked():
    config = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    good = {"rope_type": "default", "rope_theta": 1e4}
    for bad, words in (({"rope_type": "linear"}, "has no valid factor"), ({"rope_theta": 0}, "rope_theta is 0, not")):
        rope = {"full_attention": good | bad, "sliding_attention": good}
        with pytest.raises(UserError, match=words):
            models.parse_llama(config | {"rope_parameters": rope}, "gemma3")


@pytest.mark.parametrize("key", models.UNSUPPORTED_KEYS)
def test_what_a_family_may_have_and_the_trainer_has_not_is_refused(copy, key):
    edit(copy / "config.json", **{key: 30.0})
    assert f"config.json: {key} is 30.0, which is not supported; use another model" in refusal(copy)


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
    edit(copy / "config.json", model_type="mixtral", architectures=["MixtralForCausalLM"])
    assert "architectures ['MixtralForCausalLM']; only LlamaForCausalLM, MistralForCausalLM, Qwen2" in refusal(copy)


def test_config_of_another_model(copy):
    edit(copy / "config.json", num_hidden_layers=9)
    assert "no file contains model.layers.2." in refusal(copy)
    edit(copy / "config.json", num_hidden_layers=2, intermediate_size=100)
    assert "mlp." in refusal(copy)


def test_tokenizer_that_does_not_fit(copy):
    edit(copy / "config.json", vocab_size=100)
    assert "its tokenizer has " in refusal(copy)
    assert " and 1944 more, but the model has 100 embeddings; " in refusal(copy)
    (copy / "tokenizer.json").unlink()
    assert refusal(copy).endswith("tokenizer.json: no such file; download tokenizer.json of the same model")
    (copy / "tokenizer.model").touch()
    assert f"AutoTokenizer.from_pretrained('{copy}').save_pretrained('{copy}')" in refusal(copy)


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


@pytest.fixture
def tied(tiny_tied, demo, tmp_path):
    shutil.copytree(tiny_tied, tmp_path / "tied")
    shutil.copy(demo / "tokenizer.json", tmp_path / "tied")
    edit(tmp_path / "tied" / "tokenizer.json", model={"vocab": {"a": 0}}, added_tokens=[])
    return tmp_path / "tied"


def add(directory, name, tensor, file=""):
    """Add a tensor to a file of the checkpoint (the first), and to its index if that is the file's own."""
    shard = directory / (file or min(path.name for path in directory.glob("*.safetensors")))
    held = load_file(shard) if shard.exists() else {}
    save_file(held | {name: tensor}, shard, {"format": "pt"})
    index = directory / INDEX_FILE
    if not file:
        edit(index, weight_map=json.loads(index.read_text())["weight_map"] | {name: shard.name})
    return shard


def test_a_head_that_differs_from_a_tied_embedding_is_refused_as_transformers_unties_it(tied):
    held = LlamaForCausalLM.from_pretrained(tied).state_dict()
    add(tied, models.HEAD, held[models.EMBEDDING].clone())
    assert models.check_checkpoint(tied, 64).tied  # equal: nothing is lost
    shard = add(tied, models.HEAD, held[models.EMBEDDING] + 1)
    assert refusal(tied) == (
        f"{shard}: lm_head.weight differs from model.embed_tokens.weight, but config.json ties them; set "
        "tie_word_embeddings to false there to train both, or delete the tensor"
    )
    loaded = LlamaForCausalLM.from_pretrained(tied)
    assert loaded.lm_head.weight is not loaded.model.embed_tokens.weight
    edit(tied / "config.json", tie_word_embeddings=False)
    assert not models.check_checkpoint(tied, 64).tied


def test_what_the_configuration_denies_is_refused(copy):
    add(copy, "model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(4))  # of old checkpoints: computed anyway
    assert models.check_checkpoint(copy, 64)
    shard = add(copy, "model.layers.0.self_attn.q_proj.bias", torch.zeros(192))
    denied = (
        "which config.json says the model does not have; correct config.json, and use --model.layers to train fewer"
    )
    assert f"{shard}: contains model.layers.0.self_attn.q_proj.bias, {denied}" in refusal(copy)


def test_layers_beyond_the_configuration_s_number_are_refused_but_not_those_that_model_layers_leaves_out(copy):
    assert models.check_checkpoint(copy, 64, layers=1).layers == 1
    edit(copy / "config.json", num_hidden_layers=1)
    assert "contains model.layers.1.input_layernorm.weight and 8 more, which config.json says" in refusal(copy)


def test_quantized_weights_are_refused(copy):
    edit(copy / "config.json", quantization_config={"quant_method": "fp8"})
    assert "config.json: quantization_config is {'quant_method': 'fp8'}; only unquantized weights can be" in refusal(
        copy
    )


def test_two_files_with_one_tensor_are_refused(copy):
    first, *_, last = sorted(copy.glob("*.safetensors"))
    name = min(load_file(last))
    add(copy, name, load_file(last)[name] + 1, first.name)
    assert refusal(copy) == f"{last}: contains {name}, as {first.name} does; download both again"


def test_a_single_file_beside_an_index_of_others_is_refused(copy):
    single = add(copy, "x", torch.zeros(1), SINGLE_FILE)
    assert refusal(copy) == (
        f"{single}: is next to {INDEX_FILE}, which lists other files; delete the one that is not the model's"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_parameters": {"rope_type": "wild"}}, "rope type 'wild' is not one of default, linear, "),
        ({"rope_scaling": {"type": "wild"}}, "rope type 'wild' is not one of default, linear, "),
        ({"rope_scaling": "wild"}, "rope type 'wild' is not one of default, linear, "),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope type 'llama3' has no valid low_freq_factor, high_freq_factor; download config.json again",
        ),
        ({"num_attention_heads": 5}, "hidden_size 192, 5 attention heads and 2 key-value heads do not divide evenly"),
        ({"num_key_value_heads": 3}, "hidden_size 192, 4 attention heads and 3 key-value heads do not divide evenly"),
    ],
)
def test_a_shape_that_transformers_cannot_build_is_refused_before_anything_else_reads_it(copy, changes, words):
    edit(copy / "config.json", **changes)
    assert f"config.json: {words}" in refusal(copy)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        (LLAMA3 | {"factor": math.nan}, "rope type 'llama3' has no valid factor; download config.json again"),
        (LLAMA3 | {"factor": 0}, "rope type 'llama3' has no valid factor; download config.json again"),
        (LLAMA3 | {"low_freq_factor": math.inf}, "rope type 'llama3' has no valid low_freq_factor; "),
        (LLAMA3 | {"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0, not "),
        (LLAMA3 | {"rope_theta": math.nan}, "rope_theta is nan, not a number above 0; download config.json again"),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 24, "long_factor": [2.0] * 24},
            "rope type 'longrope' cannot be trained: its factors depend on the longest sequence of a batch ",
        ),
    ],
)
def test_rope_that_makes_nan_or_changes_with_the_batch_is_refused_by_name(copy, rope, words):
    edit(copy / "config.json", rope_scaling=rope)
    assert f"config.json: {words}" in refusal(copy)


def test_the_types_of_rope_are_those_of_transformers(copy):
    assert {*models.ROPE_REQUIRED_KEYS, "longrope"} == {"default", *ROPE_INIT_FUNCTIONS}
    for kind, needs in models.ROPE_REQUIRED_KEYS.items():
        rope = {"rope_type": kind, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
        numbers = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        edit(copy / "config.json", rope_parameters=rope | {key: numbers[key] for key in needs})
        assert models.check_checkpoint(copy, 64)
        assert LlamaRotaryEmbedding(llama.read_hf_config(copy)).inv_freq.isfinite().all()


def test_an_activation_that_transformers_does_not_know_is_refused(copy):
    edit(copy / "config.json", hidden_act="gelux")
    with pytest.raises(
        UserError, match=r"config\.json: transformers has no activation 'gelux' \(hidden_act\); download"
    ):
        llama.read_hf_config(copy)


def test_sequences_over_the_limit(demo):
    assert "--data.seq_len: 2048 exceeds the model's limit of 1024 positions" in refusal(demo, 2048)


def test_a_model_of_the_hub_is_answered_with_the_download():
    words = r"run `llama405b download meta-llama/Llama-3\.1-8B`, which writes models/Llama-3\.1-8B, or point --model\.path at it"
    with pytest.raises(UserError, match=words):
        models.read_llama(Path("meta-llama/Llama-3.1-8B"))


def test_a_model_that_is_not_where_downloads_go_is_answered_with_what_writes_it():
    with pytest.raises(UserError, match=r"run `llama405b download OWNER/Llama-3\.1-405B`, which writes it, or point"):
        models.read_llama(Path("models/Llama-3.1-405B"))


def rewritten(directory, renamed, more=()):
    """Write the weights as one file, under other names, with others beside them."""
    tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (directory / INDEX_FILE).unlink(missing_ok=True)
    save_file({renamed(name): value for name, value in tensors.items()} | dict(more), directory / SINGLE_FILE)


LAYER = "model.layers.0.self_attn.q_proj"
UNMERGED = "belongs to an adapter that is not merged; merge"


@pytest.mark.parametrize(
    ("renamed", "more", "words"),
    [
        (str, {f"{LAYER}.weight_scale_inv": torch.ones(2)}, "weight_scale_inv belongs to quantized weights (such as FP8); download the"),
        (str, {f"{LAYER}.weight_scale": torch.ones(2)}, "weight_scale belongs to quantized weights (such as FP8); "),
        (str, {f"{LAYER}.qweight": torch.ones(2, dtype=torch.int32)}, "qweight belongs to quantized weights (GPTQ or AWQ); "),
        (str, {f"{LAYER}.weight.absmax": torch.ones(2)}, "weight.absmax belongs to quantized weights (bitsandbytes); "),
        (lambda name: name.replace("q_proj.", "q_proj.base_layer."), {}, f"base_layer.weight {UNMERGED}"),
        (str, {f"base_model.model.{LAYER}.lora_A.weight": torch.ones(2, 2)}, f"lora_A.weight {UNMERGED}"),
        (lambda name: f"_orig_mod.{name}", {}, "its files call model.embed_tokens.weight '_orig_mod.model.embed_tokens.weight', and"),
        (lambda name: name.removeprefix("model."), {}, "its files call model.embed_tokens.weight 'embed_tokens.weight', and other"),
        (lambda name: f"module.{name}", {}, "save the model with transformers' save_pretrained, which writes the standard names"),
    ],
)  # fmt: skip
def test_weights_under_other_names_are_said_to_be_what_they_are(copy, renamed, more, words):
    rewritten(copy, renamed, more)
    assert words in refusal(copy)


def test_a_model_in_fp8_is_refused_as_that(copy):
    rewritten(copy, str)
    tensors = load_file(copy / SINGLE_FILE)
    matrices = [name for name in tensors if name.endswith("proj.weight")]
    tensors |= {name: tensors[name].to(torch.float8_e4m3fn) for name in matrices}
    save_file(tensors | {f"{name}_scale_inv": torch.ones(1) for name in matrices}, copy / SINGLE_FILE)
    assert "is F8_E4M3; only F32, F16 and BF16 can be trained; download the model in BF16" in refusal(copy)
