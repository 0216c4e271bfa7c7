"""Create a small Llama in Hugging Face format, with a newly trained tokenizer, for experiments."""

import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from llama405b.contract.errors import UserError
from llama405b.data.documents import Documents, FileRange
from llama405b.formats.corpus import STDLIB, FileFormat, expand_paths
from llama405b.formats.document import Text

VOCAB = 2048
TOKENIZER_TEXT_BYTES = 2_000_000
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"


def make_demo(directory: Path, *, tied: bool = False, layers: int = 3, hidden: int = 256) -> None:
    """Write config.json, safetensors shards with their index, tokenizer.json and generation_config.json.

    The directory appears complete or not at all.

    Raises:
        UserError: ``directory`` already exists, or cannot be created.
    """
    if directory.exists():
        raise UserError(f"{directory}: already exists; name another directory, or delete it")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{directory}: cannot be created ({error.strerror}); name another directory") from None
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    tokenizer = _train_tokenizer()
    tokenizer.save_pretrained(partial)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(partial, max_shard_size="4MB")
    partial.rename(directory)


def _train_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of ``VOCAB`` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    source = Documents(
        [(FileRange(file), FileFormat.TEXT) for file in expand_paths([STDLIB])], TOKENIZER_TEXT_BYTES, skip=True
    )
    texts = (item.document.text for item in source if isinstance(item.document, Text))
    tokenizer.train_from_iterator(texts, trainer)
    begin = (BEGIN, tokenizer.token_to_id(BEGIN))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[begin])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END)
