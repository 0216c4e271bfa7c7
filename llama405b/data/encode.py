"""Records as tokens, with what is learnt of them marked.

Conversations as text: through the tokenizer's chat template, in pieces of which some are learnt. Knows no files.

Text as tokens. A special token that a text spells is text; one that a chat template writes is that token.

Knows the tokenizer; not documents or files.

Documents as tokens: a uint32 each, whose highest bit marks one that is read but not learnt, and the next one the first of a document.

Knows documents and the tokenizer; not files or ranks.

Shape suffixes: N tokens.
"""

import contextlib
import dataclasses
import os
import re
import secrets
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase

from llama405b.contract.errors import UserError, and_more, counted, given
from llama405b.data.documents import Documents, Found
from llama405b.formats.conversation import Chat
from llama405b.formats.corpus import NO_TEMPLATE
from llama405b.formats.document import NAMED, Text

Segment = tuple[str, bool]  # text, and whether it is learnt
MOST_S = 10.0  # of this process's time, for the text of a conversation: it takes milliseconds


class UnusableError(ValueError):
    """A conversation that the template cannot be used for."""


class EndlessError(Exception):
    """The template does not end."""


class Template:
    """The tokenizer's chat template, and the roles whose messages are learnt."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, learn: Collection[str]) -> None:
        self.tokenizer, self.learn = tokenizer, learn

    def segments(self, chat: Chat) -> list[Segment]:
        """Split a conversation where learning begins and ends: after the header of a message, and after the message's end.

        That is where its text is split at inference, too: a prompt ends with the header. A message of weight 0 is not learnt.
        """
        whole = self._rendered(chat, len(chat.messages))
        found, done = list[Segment](), 0
        for number, message in enumerate(chat.messages):
            if message["role"] not in self.learn or message.get("weight") == 0:
                continue
            answers = message["role"] == "assistant"
            before = self._rendered(chat, number, prompt=answers) if number else self._beginning(chat)
            after = self._rendered(chat, number + 1)
            if not (whole.startswith(after) and after.startswith(before) and done <= len(before)):
                raise UnusableError("the chat template changes earlier messages when later ones follow")
            found += [(whole[done : len(before)], False), (whole[len(before) : len(after)], True)]
            done = len(after)
        if not whole:
            raise UnusableError("the chat template writes nothing for it")
        return [(text, learnt) for text, learnt in (*found, (whole[done:], False)) if text]

    def _beginning(self, chat: Chat) -> str:
        """What precedes the text of the first message, its header with it: where two conversations part that have different ones."""
        first = chat.messages[0]
        text = "b" if str(first.get("content")).strip().startswith("a") else "a"
        other = dataclasses.replace(chat, messages=({**first, "content": text},))
        return os.path.commonprefix([self._rendered(chat, 1), self._rendered(other, 1)])  # noqa: RUF071  (of texts)

    def _rendered(self, chat: Chat, n_messages: int, *, prompt: bool = False) -> str:
        """The first messages as text; ``prompt``: and the header of an answer."""
        messages: Sequence[object] = [dict(message) for message in chat.messages[:n_messages]]
        try:
            with _ending_in_time():
                return str(
                    self.tokenizer.apply_chat_template(
                        messages, tools=chat.tools, tokenize=False, add_generation_prompt=prompt
                    )
                )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise UnusableError(f"the chat template refuses it ({' '.join(str(error).split())})") from None


@contextlib.contextmanager
def _ending_in_time() -> Iterator[None]:
    """Raise EndlessError in the main thread, which this is, after ``MOST_S`` of computing: a template may loop without end."""

    def strike(*_: object) -> None:
        raise EndlessError

    before = signal.signal(signal.SIGVTALRM, strike)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


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


NOT_LEARNT = np.uint32(1 << 31)
FIRST = np.uint32(1 << 30)  # of a document
MARKS = NOT_LEARNT | FIRST
ENCODE_CHARS = 4 << 20  # encoded at a time: seconds
ENCODE_PIECES = 512
LEAD = "\n"  # takes the space in its place
APART = 1 << 20  # tokens between the places that are noted


@dataclasses.dataclass(slots=True)
class Counts:
    """What a token file is made of."""

    documents: int = 0
    conversations: int = 0  # of them
    tokens: int = 0
    learnt: int = 0  # tokens
    spelt: int = 0  # documents that spell special tokens, which are text
    crlf: int = 0  # documents with such line ends
    skipped: int = 0  # records that could not be used
    first_skipped: str = ""  # where, and why
    remedy: str = ""  # for that one
    # Fields of records that are not read, and the file in which one is first.
    unread: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unanswered: int = 0  # conversations of which nothing is learnt
    roles: tuple[str, ...] = ()  # in them

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.documents + other.documents,
            self.conversations + other.conversations,
            self.tokens + other.tokens,
            self.learnt + other.learnt,
            self.spelt + other.spelt,
            self.crlf + other.crlf,
            self.skipped + other.skipped,
            self.first_skipped or other.first_skipped,
            self.remedy or other.remedy,
            {**other.unread, **self.unread},
            self.unanswered + other.unanswered,
            tuple(dict.fromkeys((*self.roles, *other.roles))),
        )

    def __str__(self) -> str:
        of_them = given(", {:,} of them conversations", self.conversations)
        share = 100 * self.learnt / max(1, self.tokens)
        line = f"data: {counted(self.documents, 'document')}{of_them}, {self.tokens:,} tokens, {self.learnt:,} learnt ({share:.0f}%)"
        if self.spelt:
            spell = counted(self.spelt, "document spells", "documents spell")
            line += f"; {spell} special tokens, which are text (or tokens, with --data.special_tokens parse)"
        if self.crlf:
            line += f"; {counted(self.crlf, 'document has', 'documents have')} CRLF line ends, which are kept"
        if self.unanswered:
            these = counted(self.unanswered, "conversation", grouped=True)
            line += f"; nothing is learnt of {these}, with the roles {', '.join(self.roles)}"
        if self.unread:
            names = [f"{name!r} ({file})" for name, file in self.unread.items()]
            line += f"; not read: {', '.join(names[:NAMED])}{and_more(names, NAMED)}"
        if self.skipped:
            line += f"; {counted(self.skipped, 'record')} left out, the first: {self.first_skipped}"
        return line

    def refuse_nothing(self, learn: Collection[str]) -> None:
        """Refuse texts of which no record could be used, or nothing would be learnt; ``learn``: as data.train_on has it."""
        if self.documents and not self.learnt:
            these = counted(self.documents, "document", grouped=True)
            why = "they are empty; add what is to be learnt"
            if self.roles:
                roles = f"their roles are {', '.join(self.roles)}, and data.train_on is {', '.join(learn)}"
                why = f"{roles}; correct one of them"
            raise UserError(f"--data.paths: nothing of {these} would be learnt: {why}")
        if self.skipped and not self.documents:
            records = counted(self.skipped, "record", grouped=True)
            raise UserError(
                f"--data.bad_records skip leaves nothing of {records}; the first, {self.first_skipped}; {self.remedy}"
            )


class FileOffset(NamedTuple):
    """Where in the tokens a file begins, or goes on with another document."""

    token: int
    file: str
    before: int  # documents of it before this one


@dataclasses.dataclass(slots=True)
class _Piece:
    """Text to encode, with the tokens around it and its mark."""

    text: str
    learnt: bool
    done_bytes: int = 0  # of all texts, with this piece
    before: list[int] = dataclasses.field(default_factory=list)
    after: list[int] = dataclasses.field(default_factory=list)
    begins: str = ""  # a document, of this file


class Encoder:
    """The tokens of documents, in their order; then knows what it has seen."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        learn: Collection[str],
        texts: Documents,
        progress: Callable[[int, int], None],
        *,
        parses: bool = False,
    ) -> None:
        """``learn``: roles of a conversation that are learnt; ``progress``: bytes of text done, and in all.

        ``parses``: special tokens that texts spell, too.
        """
        self.tokenizer = tokenizer
        self.texts = texts
        self.progress = progress
        self.template, self.counts = Template(tokenizer, learn), Counts()
        self.spelling = Spelling(tokenizer, parses=parses)
        self.lead = _lead(self.spelling)
        self.files = list[FileOffset]()  # every file that has tokens, and every ``APART`` of them

    def __iter__(self) -> Iterator[NDArray[np.uint32]]:
        """Yield the tokens of some text at a time."""
        begins, n_documents = "", 0  # the next token is the first of a document of this file, which has had so many
        for batch in _batches(self._pieces()):
            for piece, ids in zip(batch, self._encoded(batch), strict=True):
                tokens_N = np.array(piece.before + ids + piece.after, dtype=np.uint32)
                begins = piece.begins or begins
                if begins and len(tokens_N):
                    n_documents = self._began(begins, n_documents)
                self.counts.tokens += len(tokens_N)
                if piece.learnt:
                    self.counts.learnt += len(tokens_N)
                else:
                    tokens_N |= NOT_LEARNT
                if begins and len(tokens_N):
                    tokens_N[0] |= FIRST
                    begins = ""
                yield tokens_N
            self.progress(batch[-1].done_bytes, self.texts.total_bytes)
        texts, counts = self.texts, self.counts
        counts.skipped = texts.n_bad
        counts.first_skipped = texts.first_bad
        counts.remedy, counts.unread = texts.remedy, texts.unread

    def _encoded(self, batch: Sequence[_Piece]) -> list[list[int]]:
        """Encode pieces of text; what follows another piece without the space that some tokenizers put before a text."""
        lead = self.lead
        texts = [f"{LEAD}{piece.text}" if lead and not piece.begins else piece.text for piece in batch]
        encoded = self.spelling.encoded(texts)
        return [
            ids[len(lead) :] if lead and not piece.begins and ids[: len(lead)] == lead else ids
            for piece, ids in zip(batch, encoded, strict=True)
        ]

    def _began(self, file: str, before: int) -> int:
        """Note that a document of a file begins with the next token; returns how many of it have begun."""
        last = self.files[-1] if self.files else FileOffset(0, "", 0)
        if last.file != file:
            before = 0
        if last.file != file or self.counts.tokens - last.token >= APART:
            self.files.append(FileOffset(self.counts.tokens, file, before))
        return before + 1

    def _pieces(self) -> Iterator[_Piece]:
        """The documents in pieces that are encoded in seconds: only a longer one is split, at the end of a line."""
        tokenizer, before = self.tokenizer, 0
        begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        for found in self.texts:
            try:
                segments = self._segments(found)
            except UnusableError as error:
                self.texts.refuse(
                    found.place, without_guards(str(error)), "name another template with --data.chat_template"
                )
                continue
            named = self.spelling.named
            pieces = [_Piece(named(part), learnt) for text, learnt in segments for part in _split(text)]
            pieces[0].begins = str(found.place.file)
            if isinstance(found.document, Text):  # a template writes its own
                pieces[0].before, pieces[-1].after = begin, end
            self.counts.documents += 1
            self.counts.spelt += any(has_guards(text) for text, _ in segments)
            self.counts.crlf += any("\r\n" in text for text, _ in segments)
            for i, piece in enumerate(pieces, 1):
                piece.done_bytes = before + (self.texts.done_bytes - before) * i // len(pieces)
                yield piece
            before = self.texts.done_bytes

    def _segments(self, found: Found) -> list[Segment]:
        document = found.document
        if isinstance(document, Text):
            guarded = self.spelling.guarded
            return [(guarded(document.prompt), False), (guarded(document.text), True)]
        if not self.tokenizer.chat_template:
            raise UserError(f"{found.place}: {NO_TEMPLATE}")
        try:
            guarded_messages = tuple(self.spelling.guarded(message) for message in document.messages)
            chat = Chat(guarded_messages, self.spelling.guarded(document.tools))
            segments = self.template.segments(chat)
        except EndlessError:
            raise UserError(
                f"{found.place}: the chat template has not ended after {MOST_S:.0f} s for this conversation; correct it, or name "
                "another one in --data.chat_template"
            ) from None
        if chat != document and any(ESCAPED in text for text, _ in segments) and ESCAPED not in str(document):
            raise UnusableError(
                "the chat template escapes what it writes, so that special tokens in it would be others"
            )
        self.counts.conversations += 1
        if not any(learnt for _, learnt in segments):
            roles = (str(message["role"]) for message in chat.messages)
            self.counts.unanswered += 1
            self.counts.roles = tuple(dict.fromkeys((*self.counts.roles, *roles)))
        return segments


def _lead(spelling: Spelling) -> list[int]:
    """The tokens of a line break, for tokenizers that put a space before every text, as Llama 2's does; [] for others."""
    alone, lead, both = spelling.encoded(["b", LEAD, f"{LEAD}b"])
    return lead if both[: len(lead)] == lead and both[len(lead) :] != alone else []


def _split(text: str) -> list[str]:
    parts, begin = [], 0
    while len(text) - begin > ENCODE_CHARS:
        end = text.rfind("\n", begin, begin + ENCODE_CHARS) + 1 or begin + ENCODE_CHARS
        parts.append(text[begin:end])
        begin = end
    return [*parts, text[begin:]]


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    n_chars = 0
    for piece in pieces:
        batch.append(piece)
        n_chars += len(piece.text)
        if len(batch) >= ENCODE_PIECES or n_chars >= ENCODE_CHARS:
            yield batch
            batch, n_chars = [], 0
    if batch:
        yield batch
