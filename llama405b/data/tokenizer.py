"""Load a model's tokenizer with the ids of its tokenizer.json, whatever its class. Knows no data files."""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from llama405b.contract.errors import UserError
from llama405b.spec.models import TOKENIZER_CONFIG, check_token_ids, read_token_ids
from llama405b.spec.tensors import read_hf_json

# Texts on which tokenizers of different families differ: numbers, blanks, line ends, contractions, scripts, signs.
PROBE = (
    "In 2024, 3.14159 of 1,000,000 and 0x7f  two   blanks\n\n\n\ttabs\r\n don't I'LL we've _x__y CamelCase a+b!=c <a href='x'> ",
    " été Ελλάδα Россия 日本語 한국어 العربية हिन्दी 👩‍🚀 ½ ﬁ \u00a0\u200b",
    "a",
)


def read_tokenizer(directory: Path, say: Callable[[str], None] = lambda _: None) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer. Logs through ``say`` if its class would give other ids than tokenizer.json.

    Raises:
        UserError: transformers cannot read it, or it has tokens without an embedding in the model.
    """
    file_tokenizer = _load_file_tokenizer(directory)
    try:
        tokenizer = _load_by_class(directory)
        if file_tokenizer and not (tokenizer and has_same_ids(file_tokenizer, tokenizer, directory)):
            name = type(tokenizer).__name__ if tokenizer else "that class"
            say(
                f"tokenizer: using tokenizer.json as it is: {name}, named in the model's files, would give other tokens"
            )
            tokenizer = _load_without_class(directory)
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)  # raises the reason
    except Exception as error:  # noqa: BLE001
        reason = " ".join(str(error).split())
        raise UserError(f"{directory}: cannot read its tokenizer ({reason}); download tokenizer.json again") from None
    settings = read_hf_json(directory / TOKENIZER_CONFIG) if (directory / TOKENIZER_CONFIG).is_file() else {}
    adds_bos = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    if settings.get("add_bos_token") is (not adds_bos):  # transformers leaves this to tokenizer.json
        tokenizer.add_bos_token = not adds_bos
    if (directory / "config.json").is_file() and (
        vocab_size := read_hf_json(directory / "config.json").get("vocab_size")
    ):
        check_token_ids(directory, tokenizer.get_vocab(), vocab_size)
    return tokenizer


def auto_tokenizer_matches(directory: Path) -> bool:
    """Return whether AutoTokenizer, which servers use, gives the ids of tokenizer.json."""
    file_tokenizer, tokenizer = _load_file_tokenizer(directory), _load_by_class(directory)
    return file_tokenizer is None or (tokenizer is not None and has_same_ids(file_tokenizer, tokenizer, directory))


def has_same_ids(file_tokenizer: Tokenizer, tokenizer: PreTrainedTokenizerBase, directory: Path) -> bool:
    """Return whether a tokenizer encodes like tokenizer.json: probe and added tokens, with no extra tokens."""
    added = [token.content for token in file_tokenizer.get_added_tokens_decoder().values()]
    texts = [*PROBE, "x".join(added), *(f" {PROBE[-1]}{name}\n" for name in added)]
    expected = [encoding.ids for encoding in file_tokenizer.encode_batch(texts, add_special_tokens=False)]
    try:
        ids, names = tokenizer(texts, add_special_tokens=False)["input_ids"], {*tokenizer.get_vocab()}
    except Exception:  # noqa: BLE001  (a class that lacks what it needs)
        return False
    return expected == ids and names <= {*read_token_ids(directory)}


def _load_file_tokenizer(directory: Path) -> Tokenizer | None:
    """Load tokenizer.json; None if it cannot be read (AutoTokenizer reports that)."""
    with contextlib.suppress(Exception):
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer
    return None


def _load_by_class(directory: Path) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer by the class that the model's files name; None if that fails."""
    with contextlib.suppress(Exception):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        return tokenizer
    return None


def _load_without_class(directory: Path) -> PreTrainedTokenizerBase:
    """Load tokenizer.json without the model's class, and mute transformers' warning about the other class."""
    logger = logging.getLogger("transformers.tokenization_utils_base")
    previous_level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(directory)
        return tokenizer
    finally:
        logger.setLevel(previous_level)
