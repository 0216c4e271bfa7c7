"""Load a model's tokenizer with the ids of its tokenizer.json, whatever its class. Knows no data files."""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from llama405b.contract.errors import UserError
from llama405b.spec.models import TOKENIZER_CONFIG, refuse_beyond, token_ids
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
    own = _file_of(directory)
    try:
        found = _by_class(directory)
        if own and not (found and has_ids_of(own, found, directory)):
            name = type(found).__name__ if found else "that class"
            say(
                f"tokenizer: using tokenizer.json as it is: {name}, named in the model's files, would give other tokens"
            )
            found = _as_in_file(directory)
        if found is None:
            found = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)  # raises the reason
    except Exception as error:  # noqa: BLE001
        why = " ".join(str(error).split())
        raise UserError(f"{directory}: cannot read its tokenizer ({why}); download tokenizer.json again") from None
    settings = read_hf_json(directory / TOKENIZER_CONFIG) if (directory / TOKENIZER_CONFIG).is_file() else {}
    begins = found("a")["input_ids"][:1] == [found.bos_token_id]
    if settings.get("add_bos_token") is (not begins):  # transformers leaves this to tokenizer.json
        found.add_bos_token = not begins
    if (directory / "config.json").is_file() and (n := read_hf_json(directory / "config.json").get("vocab_size")):
        refuse_beyond(directory, found.get_vocab(), n)
    return found


def is_read_as_it_is(directory: Path) -> bool:
    """Return whether AutoTokenizer, which servers use, gives the ids of tokenizer.json."""
    own, found = _file_of(directory), _by_class(directory)
    return own is None or (found is not None and has_ids_of(own, found, directory))


def has_ids_of(own: Tokenizer, found: PreTrainedTokenizerBase, directory: Path) -> bool:
    """Return whether a tokenizer encodes like tokenizer.json: probe and added tokens, with no extra tokens."""
    added = [token.content for token in own.get_added_tokens_decoder().values()]
    texts = [*PROBE, "x".join(added), *(f" {PROBE[-1]}{name}\n" for name in added)]
    expected = [each.ids for each in own.encode_batch(texts, add_special_tokens=False)]
    try:
        ids, names = found(texts, add_special_tokens=False)["input_ids"], {*found.get_vocab()}
    except Exception:  # noqa: BLE001  (a class that lacks what it needs)
        return False
    return expected == ids and names <= {*token_ids(directory)}


def _file_of(directory: Path) -> Tokenizer | None:
    """Load tokenizer.json; None if it cannot be read (AutoTokenizer reports that)."""
    with contextlib.suppress(Exception):
        found = Tokenizer.from_file(str(directory / "tokenizer.json"))
        found.no_padding()
        found.no_truncation()
        return found
    return None


def _by_class(directory: Path) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer by the class that the model's files name; None if that fails."""
    with contextlib.suppress(Exception):
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        return found
    return None


def _as_in_file(directory: Path) -> PreTrainedTokenizerBase:
    """Load tokenizer.json without the model's class, and mute transformers' warning about the other class."""
    logger = logging.getLogger("transformers.tokenization_utils_base")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        found: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(directory)
        return found
    finally:
        logger.setLevel(before)
