"""Small real checkpoints for the tests, written by transformers."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def write_llama(directory, *, tied=False, layers=4, vocab=131, dtype=torch.float32, family="llama", **more):
    """A Llama, or a model of another family, whose rows do not divide evenly over ranks; on 3 ranks k_proj leaves one without any row."""
    torch.manual_seed(1)
    shape = {
        "hidden_size": 24,
        "intermediate_size": 50,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 4,
    } | more
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
