"""Encode documents as uint32 tokens.

The highest bits mark tokens that are not trained on, and where documents begin.
A special token spelled in a text stays text; one that the chat template writes becomes that token. Knows documents and the
tokenizer; not files.

Shape suffixes: N tokens.
"""

import contextlib
import dataclasses
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase

from llama405b.contract.errors import UserError, and_more, counted, given
from llama405b.data.chat_template import (
    MOST_S,
    OTHERWISE,
    EndlessError,
    RefusedError,
    Rendered,
    Segment,
    Template,
    UnusableError,
)
from llama405b.data.documents import Documents, Found, LeftOut
from llama405b.formats.conversation import Chat
from llama405b.formats.corpus import NO_TEMPLATE
from llama405b.formats.document import NAMED, Text
from llama405b.settings.schema import Data

ESCAPED = r"\ud800"  # a guard in a value that a template wrote as source text
GUARD = "\ud800"  # put before each letter of a special token in a text; no text contains one, as UTF-8 cannot encode it


class Spelling:
    """Give special tokens random names that no text contains; only ``named`` writes these names.

    The backend then splits the template's text at these names, as it would at the original ones.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, parses: bool = False) -> None:
        """``parses``: special tokens in texts are tokens (``data.special_tokens = parse``)."""
        self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = not parses
        special = {} if parses else {n: t for n, t in self.backend.get_added_tokens_decoder().items() if t.special}
        # Random names: no text of the data set can spell one.
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
        """Return a value with guards in the special tokens that it spells, which ``named`` keeps as text."""
        match value:
            case str() if self.special:
                return self.special.sub(lambda found: "".join(GUARD + letter for letter in found[0]), value)
            case list() | tuple():
                return [self.guarded(each) for each in value]
            case Mapping():
                return {self.guarded(key): self.guarded(each) for key, each in value.items()}
        return value

    def named(self, text: str) -> str:
        """Return a template's output without guards, with its special tokens under their random names."""
        if not self.special:
            return text
        return self.guarded_or_special.sub(lambda found: self.names.get(found[0]) or found[1], text)


def has_guards(text: str) -> bool:
    """Return whether an escaped text spells special tokens."""
    return GUARD in text


def without_guards(text: str) -> str:
    """Return a text as it was before ``guarded``."""
    return text.replace(GUARD, "")


def _called(token: AddedToken, name: str) -> AddedToken:
    """Return the token under another name, not special, so that the backend parses it in texts."""
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
SAME = np.uint32(1 << 29)  # first token of a document that belongs to the same conversation as the previous one
MARKS = NOT_LEARNT | FIRST | SAME
ENCODE_CHARS = 4 << 20  # encoded at a time: seconds
ENCODE_PIECES = 512
LEAD = "\n"  # a prefix that absorbs the space which some tokenizers add
APART = 1 << 20  # tokens between two recorded offsets of a file


@dataclasses.dataclass(slots=True)
class Counts:
    """What a token file is made of."""

    documents: int = 0
    conversations: int = 0  # of them
    tokens: int = 0
    learnt: int = 0  # tokens
    spelt: int = 0  # documents that spell special tokens as text
    crlf: int = 0  # documents with such line ends
    left_out: Mapping[str, LeftOut] = dataclasses.field(default_factory=dict)  # records that could not be used, by why
    # Fields of records that are not read, and the file in which one is first.
    unread: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unanswered: int = 0  # conversations without a token that is trained on
    roles: tuple[str, ...] = ()  # in them
    divided: int = 0  # conversations with a document per answer
    divided_documents: int = 0  # of them
    divided_chars: int = 0  # in these documents
    joint_chars: int = 0  # in one document for each of them
    omitted: int = 0  # conversations whose answers the template drops parts of
    first_omitted: str = ""

    def __add__(self, other: "Counts") -> "Counts":
        both = {**other.left_out, **self.left_out}
        sums = {name: getattr(self, name) + getattr(other, name) for name in SUMMED}
        return Counts(
            left_out={
                why: one.times(sum(each.left_out[why].count for each in (self, other) if why in each.left_out))
                for why, one in both.items()
            },
            unread={**other.unread, **self.unread},
            roles=tuple(dict.fromkeys((*self.roles, *other.roles))),
            first_omitted=self.first_omitted or other.first_omitted,
            **sums,
        )

    def __str__(self) -> str:
        of_them = given(", {:,} of them conversations", self.conversations)
        share = 100 * self.learnt / max(1, self.tokens)
        line = f"data: {counted(self.documents, 'document')}{of_them}, {self.tokens:,} tokens, {self.learnt:,} trained on ({share:.0f}%)"
        if self.spelt:
            spell = counted(self.spelt, "document spells", "documents spell")
            line += f"; {spell} special tokens, kept as text (--data.special_tokens parse makes them tokens)"
        if self.crlf:
            line += f"; {counted(self.crlf, 'document has', 'documents have')} CRLF line endings, kept as they are"
        if self.unanswered:
            these = counted(self.unanswered, "conversation", grouped=True)
            line += f"; nothing is trained on in {these}: their roles are {', '.join(self.roles)}"
        if self.unread:
            names = [f"{name!r} ({file})" for name, file in self.unread.items()]
            line += f"; unused fields: {', '.join(names[:NAMED])}{and_more(names, NAMED)}"
        if self.divided:
            these = counted(self.divided, "conversation", grouped=True)
            more = 100 * (self.divided_chars / max(1, self.joint_chars) - 1)
            line += f"; {these} became {self.divided_documents:,} documents, one per answer, with {more:.0f}% more text ({OTHERWISE})"
        if self.omitted:
            these = counted(self.omitted, "conversation", grouped=True)
            line += f"; the chat template drops parts of the answers in {these}, first {self.first_omitted}"
        if self.left_out:
            kinds = [f"{found.count:,} like {found.first}" for found in self.left_out.values()]
            line += f"; {counted(self.skipped, 'record', grouped=True)} left out: {', '.join(kinds[:NAMED])}{and_more(kinds, NAMED)}"
        return line

    @property
    def skipped(self) -> int:
        """Number of records that were skipped."""
        return sum(found.count for found in self.left_out.values())

    def refuse_useless(self, settings: Data) -> None:
        """Raise an error if too many records were skipped, or nothing would be trained on."""
        if self.documents and not self.learnt:
            these = counted(self.documents, "document", grouped=True)
            why = "they are empty; add text to train on"
            if self.roles:
                roles = f"their roles are {', '.join(self.roles)}, and data.train_on is {', '.join(settings.train_on)}"
                why = f"{roles}; correct one of them"
            raise UserError(f"--data.paths: nothing of {these} would be trained on: {why}")
        records = counted(self.skipped, "record", grouped=True)
        first = next(iter(self.left_out.values()), None)
        if first and not self.documents:
            raise UserError(f"--data.bad_records skip leaves nothing of {records}; first {first.words}")
        n_documents = self.documents - self.divided_documents + self.divided
        share = 100 * self.skipped / max(1, self.skipped + n_documents)
        if first and share > settings.bad_records_limit:
            raise UserError(
                f"--data.bad_records skip leaves out {records} of {self.skipped + n_documents:,} ({share:.0f}%), first {first.words}; "
                f"or raise --data.bad_records_limit, which is {settings.bad_records_limit:g}%"
            )


SUMMED = [field.name for field in dataclasses.fields(Counts) if field.type is int]


class FileOffset(NamedTuple):
    """The token at which a file, or a later document of it, begins."""

    token: int
    file: str
    before: int  # documents of the file before this token


@dataclasses.dataclass(slots=True)
class _Piece:
    """A piece of text to encode, with the tokens around it and its mark."""

    text: str
    learnt: bool
    done_bytes: int = 0  # of all texts, up to the end of this piece
    before: list[int] = dataclasses.field(default_factory=list)
    after: list[int] = dataclasses.field(default_factory=list)
    begins: str = ""  # the file, if a document begins here
    starts: bool = False  # whether the text is the first of its document
    mark: np.uint32 = FIRST  # of that document's first token


class Encoder:
    """Iterate over the tokens of documents in order; afterwards ``counts`` and ``files`` describe them."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        settings: Data,
        texts: Documents,
        progress: Callable[[int, int], None],
    ) -> None:
        """``progress``: called with the bytes of text that are done, and all bytes."""
        self.tokenizer = tokenizer
        self.texts = texts
        self.progress = progress
        self.template, self.counts = Template(tokenizer, settings), Counts()
        self.spelling = Spelling(tokenizer, parses=settings.special_tokens == "parse")
        self.begins_with = begin_tokens(tokenizer, settings.bos)
        self.lead = _lead(self.spelling)
        self.files = list[FileOffset]()  # every file that has tokens, and every ``APART`` of them

    def __iter__(self) -> Iterator[NDArray[np.uint32]]:
        """Yield the tokens of one piece of text at a time."""
        # If set: the next token begins a document of this file. ``n_documents`` counts the file's earlier documents.
        begins, mark, n_documents = "", FIRST, 0
        for batch in _batches(self._pieces()):
            for piece, ids in zip(batch, self._encoded(batch), strict=True):
                tokens_N = np.array(piece.before + ids + piece.after, dtype=np.uint32)
                if piece.begins:
                    begins, mark = piece.begins, piece.mark
                if begins and len(tokens_N):
                    n_documents = self._began(begins, n_documents)
                self.counts.tokens += len(tokens_N)
                if piece.learnt:
                    self.counts.learnt += len(tokens_N)
                else:
                    tokens_N |= NOT_LEARNT
                if begins and len(tokens_N):
                    tokens_N[0] |= mark
                    begins = ""
                yield tokens_N
            self.progress(batch[-1].done_bytes, self.texts.total_bytes)
        texts, counts = self.texts, self.counts
        counts.left_out, counts.unread = texts.left_out, texts.unread

    def _encoded(self, batch: Sequence[_Piece]) -> list[list[int]]:
        """Encode pieces of text, without the space that some tokenizers add, unless a piece begins a document."""
        lead = self.lead
        texts = [f"{LEAD}{piece.text}" if lead and not piece.starts else piece.text for piece in batch]
        encoded = self.spelling.encoded(texts)
        return [
            ids[len(lead) :] if lead and not piece.starts and ids[: len(lead)] == lead else ids
            for piece, ids in zip(batch, encoded, strict=True)
        ]

    def _began(self, file: str, before: int) -> int:
        """Record that the next token begins a document of a file; return the number of its documents so far."""
        last = self.files[-1] if self.files else FileOffset(0, "", 0)
        if last.file != file:
            before = 0
        if last.file != file or self.counts.tokens - last.token >= APART:
            self.files.append(FileOffset(self.counts.tokens, file, before))
        return before + 1

    def _pieces(self) -> Iterator[_Piece]:
        """Yield documents in pieces that take seconds to encode; only longer ones are split, at a line end."""
        before = 0
        for found in self.texts:
            try:
                pieces = self._pieces_of(found)
            except UnusableError as error:
                self.texts.refuse(
                    found.place, without_guards(str(error)), "name another template with --data.chat_template"
                )
                continue
            for i, piece in enumerate(pieces, 1):
                piece.done_bytes = before + (self.texts.done_bytes - before) * i // len(pieces)
                yield piece
            before = self.texts.done_bytes

    def _pieces_of(self, found: Found) -> list[_Piece]:
        pieces, documents = list[_Piece](), self._documents(found)
        for number, segments in enumerate(documents):
            own = [_Piece(self.spelling.named(part), learnt) for text, learnt in segments for part in _split(text)]
            next((piece for piece in own if piece.text), own[0]).starts = True
            own[0].begins, own[0].mark = str(found.place.file), FIRST | SAME if number else FIRST
            pieces += own
            self.counts.spelt += any(has_guards(text) for text, _ in segments)
            self.counts.crlf += any("\r\n" in text for text, _ in segments)
        if isinstance(found.document, Text):  # a template writes begin and end tokens itself
            end = self.tokenizer.eos_token_id
            pieces[0].before, pieces[-1].after = self.begins_with, [] if end is None else [end]
        self.counts.documents += len(documents)
        return pieces

    def proof(self, found: Found, chat: Chat) -> tuple[int, int]:
        """Return the number of answers whose context is exactly that of inference, and of all answers trained on.

        ``found``: a conversation, ``chat``; the tokens are those of transformers' apply_chat_template with add_generation_prompt.

        Raises:
            UnusableError: The template cannot be used for it.
        """
        ids, given, before, exact, n_answers = list[int](), set[tuple[int, ...]](), False, 0, 0
        for number in range(1, len(chat.messages)):
            with contextlib.suppress(RefusedError):
                text = self.template.render(chat, number, prompt=True)
                given.add(tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"]))
        pieces = self._pieces_of(found)
        for piece, own in zip(pieces, self._encoded(pieces), strict=True):
            if piece.begins:
                ids, before = [], False
            if piece.learnt and not before:
                n_answers, exact = n_answers + 1, exact + (tuple(ids) in given)
            ids, before = ids + own, piece.learnt
        return exact, n_answers

    def _documents(self, found: Found) -> list[list[Segment]]:
        document = found.document
        if isinstance(document, Text):
            guarded = self.spelling.guarded
            return [[(guarded(document.prompt), False), (guarded(document.text), True)]]
        if not self.tokenizer.chat_template:
            raise UserError(f"{found.place}: {NO_TEMPLATE}")
        try:
            guarded_messages = tuple(self.spelling.guarded(message) for message in document.messages)
            chat = Chat(
                guarded_messages, self.spelling.guarded(document.tools), self.spelling.guarded(document.arguments)
            )
            made = self.template.rendered(chat)
        except EndlessError:
            raise UserError(
                f"{found.place}: the chat template did not finish within {MOST_S:.0f} s for this conversation; correct it, or set "
                "another one in --data.chat_template"
            ) from None
        segments = [segment for each in made.documents for segment in each]
        if chat != document and any(ESCAPED in text for text, _ in segments) and ESCAPED not in str(document):
            raise UnusableError(
                "the chat template escapes its output, so special tokens in it would become other tokens"
            )
        self._count(chat, made, found)
        return made.documents

    def _count(self, chat: Chat, made: Rendered, found: Found) -> None:
        self.counts.conversations += 1
        segments = [segment for each in made.documents for segment in each]
        if made.omitted:
            self.counts.omitted += 1
            self.counts.first_omitted = self.counts.first_omitted or f"{found.place}: {made.omitted}"
        if len(made.documents) > 1:
            self.counts.divided += 1
            self.counts.divided_documents += len(made.documents)
            self.counts.divided_chars += sum(len(text) for text, _ in segments)
            self.counts.joint_chars += made.n_chars
        if not any(learnt for _, learnt in segments):
            roles = (str(message["role"]) for message in chat.messages)
            self.counts.unanswered += 1
            self.counts.roles = tuple(dict.fromkeys((*self.counts.roles, *roles)))


def begin_tokens(tokenizer: PreTrainedTokenizerBase, bos: str) -> list[int]:
    """Return the token to put before a plain text, or []; ``bos``: the setting ``data.bos``.

    Raises:
        UserError: The tokenizer has no such token, and ``bos`` is "always".
    """
    token = tokenizer.bos_token_id
    if token is None and bos == "always":
        raise UserError("--data.bos always: the tokenizer has no beginning-of-text token; use tokenizer")
    adds = bos == "always" or (bos == "tokenizer" and tokenizer("a")["input_ids"][:1] == [token])
    return [token] if adds and token is not None else []


def _lead(spelling: Spelling) -> list[int]:
    """Return a line break's tokens if the tokenizer puts a space before texts, as Llama 2's does; else []."""
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
