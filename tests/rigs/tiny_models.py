"""Small real checkpoints for the tests, written by transformers."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

COMMON = {
    "bos_token_id": 0, "eos_token_id": 1, "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 48,
    "max_position_embeddings": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16", "transformers_version": "4.43.0", "use_cache": True, "vocab_size": 128,
}  # fmt: skip
OF_ALL_HEADS = {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}
UNTIED = {"tie_word_embeddings": False}
LLAMA_3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
LLAMA_31 = {
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_theta": 500000.0,
}
MISTRAL = COMMON | UNTIED | {"model_type": "mistral", "rope_theta": 10000.0}
QWEN_2 = COMMON | UNTIED | {
    "model_type": "qwen2", "attention_dropout": 0.0, "max_window_layers": 2, "rope_theta": 1000000.0, "sliding_window": 48,
    "use_sliding_window": False,
}  # fmt: skip
PUBLISHED = {  # config.json with the keys that are published, and sizes that are not: neither more keys nor fewer
    "Llama 2, first form": OF_ALL_HEADS | {"model_type": "llama", "pad_token_id": 0},
    "Llama 2": COMMON | UNTIED | {"model_type": "llama", "pretraining_tp": 1, "rope_scaling": None},
    "CodeLlama": COMMON | {"model_type": "llama", "rope_theta": 1000000},
    "Llama 3.1": COMMON | UNTIED | LLAMA_31 | {"rope_scaling": LLAMA_3, "eos_token_id": [1, 2, 3]},
    "Llama 3.2": COMMON
    | LLAMA_31
    | {"rope_scaling": LLAMA_3 | {"factor": 32.0}, "head_dim": 8, "tie_word_embeddings": True},
    "linear rope of old": COMMON | UNTIED | {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "Mistral 0.1": MISTRAL | {"sliding_window": 48},
    "Mistral 0.3": MISTRAL | {"sliding_window": None, "attention_dropout": 0.0},
    "Mistral NeMo": MISTRAL | {"sliding_window": None, "head_dim": 16},
    "Mistral, null": MISTRAL | {"sliding_window": None, "head_dim": None},
    "Qwen 2": QWEN_2,
    "Qwen 2.5, tied, windowed": QWEN_2
    | {"tie_word_embeddings": True, "use_sliding_window": True, "max_window_layers": 1},
    "Qwen 3": QWEN_2
    | {"model_type": "qwen3", "attention_bias": False, "head_dim": 16, "rope_scaling": None, "sliding_window": None},
    "OLMo 2": COMMON
    | UNTIED
    | {"model_type": "olmo2", "attention_bias": False, "attention_dropout": 0.0, "rope_scaling": None},
    "Gemma 3": {key: value for key, value in COMMON.items() if key != "hidden_act"}
    | {
        "model_type": "gemma3_text", "attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": None,
        "cache_implementation": "hybrid", "eos_token_id": [1, 3], "final_logit_softcapping": None, "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh", "pad_token_id": 0, "query_pre_attn_scalar": 16, "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    },
    "Phi-3": COMMON
    | {
        "model_type": "phi3", "attention_bias": False, "attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "pad_token_id": 1,
        "original_max_position_embeddings": 64, "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 48,
        "tie_word_embeddings": False, "partial_rotary_factor": 1.0,
    },
}  # fmt: skip


OTHER_SHAPES = {
    "qwen3": {"head_dim": 4},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 12, "pad_token_id": None, "sliding_window": 64},
    "phi3": {"pad_token_id": None},
}


def write_llama(directory, *, tied=False, layers=4, vocab=131, dtype=torch.float32, family="llama", **more):
    """A Llama, or a model of another family, whose rows do not divide evenly over ranks; on 3 ranks k_proj leaves one without any row."""
    torch.manual_seed(1)
    shape = (
        {
            "hidden_size": 24,
            "intermediate_size": 50,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
        }
        | OTHER_SHAPES.get(family, {})
        | more
    )  # of the others, no published file needs to have it
    config = AutoConfig.for_model(
        family,
        vocab_size=vocab,
        num_hidden_layers=layers,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
        **shape,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype).save_pretrained(
        directory, max_shard_size="20KB"
    )
    return directory
