"""Text as tokens. A special token that a text spells is text; one that a chat template writes is that token.

Knows the tokenizer; not documents or files.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase

ESCAPED = r"\ud800"  # what becomes of a guard where a template writes a value as source text
GUARD = "\ud800"  # before each letter of a special token that a text spells; texts have none, since UTF-8 has none


class Spelling:
    """A tokenizer to which special tokens have other names, which no text can know: only what ``named`` gives them is one.

    So the tokenizer itself splits the template's text at them, as it does by their own names.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, parses: bool = False) -> None:
        """``parses``: as ``data.special_tokens = parse`` says it: all special tokens have their own names, for all texts."""
        self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = not parses
        special = {} if parses else {n: t for n, t in self.backend.get_added_tokens_decoder().items() if t.special}
        secret = secrets.token_hex(8)
        self.names = {token.content: f"<{secret}-{number}>" for number, token in special.items()}
        self.backend.add_tokens([_called(token, self.names[token.content]) for token in special.values()])
        self.numbers = {self.backend.token_to_id(self.names[token.content]): n for n, token in special.items()}
        any_of_them = "|".join(map(re.escape, sorted(self.names, key=len, reverse=True)))
        self.special = re.compile(any_of_them) if special else None
        self.guarded_or_special = re.compile(f"{GUARD}(.?)|(?:{any_of_them})", re.DOTALL)

    def encoded(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text."""
        found = [each.ids for each in self.backend.encode_batch_fast(texts, add_special_tokens=False)]
        return [[self.numbers.get(token, token) for token in ids] for ids in found] if self.special else found

    def guarded(self, value: Any) -> Any:
        """Return what a record says, with guards: ``named`` leaves the special tokens that it spells as they are."""
        match value:
            case str() if self.special:
                return self.special.sub(lambda found: "".join(GUARD + letter for letter in found[0]), value)
            case list() | tuple():
                return [self.guarded(each) for each in value]
            case Mapping():
                return {self.guarded(key): self.guarded(each) for key, each in value.items()}
        return value

    def named(self, text: str) -> str:
        """Return what a template wrote of guarded values, with the names of its special tokens and without the guards."""
        if not self.special:
            return text
        return self.guarded_or_special.sub(lambda found: self.names.get(found[0]) or found[1], text)


def has_guards(text: str) -> bool:
    """Whether a guarded text spells special tokens."""
    return GUARD in text


def without_guards(text: str) -> str:
    """Return a text as it was before ``guarded``."""
    return text.replace(GUARD, "")


def _called(token: AddedToken, name: str) -> AddedToken:
    """The same token by another name, which is read although special ones are not."""
    return AddedToken(
        name,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=False,
    )
