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

from llama405b.contract.errors import UserError, and_more, fmt_if, pluralize
from llama405b.data.chat_template import (
    MAX_RENDER_S,
    REWRITES_EARLIER,
    ChatTemplate,
    RenderedChat,
    Segment,
    TemplateRefusedError,
    TemplateTimeoutError,
    UnusableChatError,
)
from llama405b.data.documents import Documents, LocatedDocument, SkippedRecords
from llama405b.formats.conversation import Chat
from llama405b.formats.corpus import NO_TEMPLATE
from llama405b.formats.document import MAX_NAMED, Text
from llama405b.settings.schema import Data

ESCAPED = r"\ud800"  # a guard in a value that a template wrote as source text
GUARD = "\ud800"  # put before each letter of a special token in a text; no text contains one, as UTF-8 cannot encode it


class SpecialTokenEscaper:
    """Give special tokens random names that no text contains; only ``restore`` writes these names.

    The backend then splits the template's text at these names, as it would at the original ones.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, parse_special: bool = False) -> None:
        """``parse_special``: special tokens in texts are tokens (``data.special_tokens = parse``)."""
        self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = not parse_special
        special = (
            {} if parse_special else {n: t for n, t in self.backend.get_added_tokens_decoder().items() if t.special}
        )
        # Random names: no text of the data set can spell one.
        secret = secrets.token_hex(8)
        self.names = {token.content: f"<{secret}-{number}>" for number, token in special.items()}
        self.backend.add_tokens([_rename_token(token, self.names[token.content]) for token in special.values()])
        self.original_ids = {self.backend.token_to_id(self.names[token.content]): n for n, token in special.items()}
        alternatives = "|".join(map(re.escape, sorted(self.names, key=len, reverse=True)))
        self.special_pattern = re.compile(alternatives) if special else None
        self.guard_pattern = re.compile(f"{GUARD}(.?)|(?:{alternatives})", re.DOTALL)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text."""
        ids_per_text = [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]
        return (
            [[self.original_ids.get(token, token) for token in ids] for ids in ids_per_text]
            if self.special_pattern
            else ids_per_text
        )

    def escape(self, value: Any) -> Any:
        """Return a value with guards in the special tokens that it spells, which ``restore`` keeps as text."""
        match value:
            case str() if self.special_pattern:
                return self.special_pattern.sub(lambda match: "".join(GUARD + letter for letter in match[0]), value)
            case list() | tuple():
                return [self.escape(item) for item in value]
            case Mapping():
                return {self.escape(key): self.escape(item) for key, item in value.items()}
        return value

    def restore(self, text: str) -> str:
        """Return a template's output without guards, with its special tokens under their random names."""
        if not self.special_pattern:
            return text
        return self.guard_pattern.sub(lambda match: self.names.get(match[0]) or match[1], text)


def has_guards(text: str) -> bool:
    """Return whether an escaped text spells special tokens."""
    return GUARD in text


def strip_guards(text: str) -> str:
    """Return a text as it was before ``guarded``."""
    return text.replace(GUARD, "")


def _rename_token(token: AddedToken, name: str) -> AddedToken:
    """Return the token under another name, not special, so that the backend parses it in texts."""
    return AddedToken(
        name,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=False,
    )


NOT_TRAINED = np.uint32(1 << 31)
DOCUMENT_START = np.uint32(1 << 30)  # of a document
SAME_CHAT = np.uint32(1 << 29)  # first token of a document that belongs to the same conversation as the previous one
WITH_PREVIOUS = np.uint32(1 << 28)  # first token of a document that is kept in one sequence with the previous one
MARKS = NOT_TRAINED | DOCUMENT_START | SAME_CHAT | WITH_PREVIOUS
ENCODE_CHARS = 4 << 20  # encoded at a time: seconds
ENCODE_CHUNKS = 512
LINE_BREAK = "\n"  # a prefix that absorbs the space which some tokenizers add
OFFSET_INTERVAL = 1 << 20  # tokens between two recorded offsets of a file


@dataclasses.dataclass(slots=True)
class TokenCounts:
    """What a token file is made of."""

    documents: int = 0
    conversations: int = 0  # of them
    tokens: int = 0
    learnt: int = 0  # tokens
    spelt: int = 0  # documents that spell special tokens as text
    crlf: int = 0  # documents with such line ends
    left_out: Mapping[str, SkippedRecords] = dataclasses.field(
        default_factory=dict
    )  # records that could not be used, by why
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

    def __add__(self, other: "TokenCounts") -> "TokenCounts":
        merged_records = {**other.left_out, **self.left_out}
        sums = {name: getattr(self, name) + getattr(other, name) for name in SUMMED_FIELDS}
        return TokenCounts(
            left_out={
                reason: records.with_count(
                    sum(counts.left_out[reason].count for counts in (self, other) if reason in counts.left_out)
                )
                for reason, records in merged_records.items()
            },
            unread={**other.unread, **self.unread},
            roles=tuple(dict.fromkeys((*self.roles, *other.roles))),
            first_omitted=self.first_omitted or other.first_omitted,
            **sums,
        )

    def __str__(self) -> str:
        chats_note = fmt_if(", {:,} of them conversations", self.conversations)
        share = 100 * self.learnt / max(1, self.tokens)
        documents = pluralize(self.documents, "document")
        line = f"data: {documents}{chats_note}, {self.tokens:,} tokens, {self.learnt:,} trained on ({share:.0f}%)"
        if self.spelt:
            spell = pluralize(self.spelt, "document spells", "documents spell")
            line += f"; {spell} special tokens, kept as text (--data.special_tokens parse makes them tokens)"
        if self.crlf:
            line += f"; {pluralize(self.crlf, 'document has', 'documents have')} CRLF line endings, kept as they are"
        if self.unanswered:
            n_chats = pluralize(self.unanswered, "conversation", thousands=True)
            line += f"; nothing is trained on in {n_chats}: their roles are {', '.join(self.roles)}"
        if self.unread:
            names = [f"{name!r} ({file})" for name, file in self.unread.items()]
            line += f"; unused fields: {', '.join(names[:MAX_NAMED])}{and_more(names, MAX_NAMED)}"
        if self.divided:
            n_chats = pluralize(self.divided, "conversation", thousands=True)
            extra_percent = 100 * (self.divided_chars / max(1, self.joint_chars) - 1)
            line += f"; {n_chats} became {self.divided_documents:,} documents, one per answer, "
            line += f"with {extra_percent:.0f}% more text ({REWRITES_EARLIER})"
        if self.omitted:
            n_chats = pluralize(self.omitted, "conversation", thousands=True)
            line += f"; the chat template drops parts of the answers in {n_chats}, first {self.first_omitted}"
        if self.left_out:
            kinds = [f"{records.count:,} like {records.first}" for records in self.left_out.values()]
            skipped = pluralize(self.n_skipped, "record", thousands=True)
            line += f"; {skipped} left out: {', '.join(kinds[:MAX_NAMED])}{and_more(kinds, MAX_NAMED)}"
        return line

    @property
    def n_skipped(self) -> int:
        """Number of records that were skipped."""
        return sum(records.count for records in self.left_out.values())

    def check_usable(self, settings: Data) -> None:
        """Raise an error if too many records were skipped, or nothing would be trained on."""
        if self.documents and not self.learnt:
            n_given = pluralize(self.documents, "document", thousands=True)
            reason = "they are empty; add text to train on"
            if self.roles:
                roles = f"their roles are {', '.join(self.roles)}, and data.train_on is {', '.join(settings.train_on)}"
                reason = f"{roles}; correct one of them"
            raise UserError(f"--data.paths: nothing of {n_given} would be trained on: {reason}")
        records = pluralize(self.n_skipped, "record", thousands=True)
        first = next(iter(self.left_out.values()), None)
        if first and not self.documents:
            raise UserError(f"--data.bad_records skip leaves nothing of {records}; first {first.summary}")
        n_documents = self.documents - self.divided_documents + self.divided
        share = 100 * self.n_skipped / max(1, self.n_skipped + n_documents)
        if first and share > settings.bad_records_limit:
            raise UserError(
                f"--data.bad_records skip leaves out {records} of {self.n_skipped + n_documents:,} ({share:.0f}%), first {first.summary}; "
                f"or raise --data.bad_records_limit, which is {settings.bad_records_limit:g}%"
            )


SUMMED_FIELDS = [field.name for field in dataclasses.fields(TokenCounts) if field.type is int]


class FileOffset(NamedTuple):
    """The token at which a file, or a later document of it, begins."""

    token: int
    file: str
    before: int  # documents of the file before this token


@dataclasses.dataclass(slots=True)
class _TextChunk:
    """A piece of text to encode, with the tokens around it and its mark."""

    text: str
    is_trained: bool
    done_bytes: int = 0  # of all texts, up to the end of this piece
    prefix_ids: list[int] = dataclasses.field(default_factory=list)
    suffix_ids: list[int] = dataclasses.field(default_factory=list)
    document_file: str = ""  # the file, if a document begins here
    is_document_start: bool = False  # whether the text is the first of its document
    mark: np.uint32 = DOCUMENT_START  # of that document's first token


class Encoder:
    """Iterate over the tokens of documents in order; afterwards ``counts`` and ``files`` describe them."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        settings: Data,
        documents: Documents,
        on_progress: Callable[[int, int], None],
    ) -> None:
        """``on_progress``: called with the bytes of text that are done, and all bytes."""
        self.tokenizer = tokenizer
        self.documents = documents
        self.on_progress = on_progress
        self.template, self.counts = ChatTemplate(tokenizer, settings), TokenCounts()
        self.escaper = SpecialTokenEscaper(tokenizer, parse_special=settings.special_tokens == "parse")
        self.begin_ids = begin_tokens(tokenizer, settings.bos)
        self.lead_ids = _lead_ids(self.escaper)
        self.files = list[FileOffset]()  # every file that has tokens, and every ``OFFSET_INTERVAL`` of them

    def __iter__(self) -> Iterator[NDArray[np.uint32]]:
        """Yield the tokens of one piece of text at a time."""
        # If set: the next token begins a document of this file. ``n_documents`` counts the file's earlier documents.
        document_file, mark, n_documents = "", DOCUMENT_START, 0
        for batch in _batch_chunks(self._chunks()):
            for chunk, ids in zip(batch, self._encode(batch), strict=True):
                tokens_N = np.array(chunk.prefix_ids + ids + chunk.suffix_ids, dtype=np.uint32)
                if chunk.document_file:
                    if (
                        document_file and not mark & WITH_PREVIOUS
                    ):  # the document before has no token: this one is first
                        chunk.mark &= ~WITH_PREVIOUS
                    document_file, mark = chunk.document_file, chunk.mark
                if document_file and len(tokens_N):
                    n_documents = self._note_document(document_file, n_documents)
                self.counts.tokens += len(tokens_N)
                if chunk.is_trained:
                    self.counts.learnt += len(tokens_N)
                else:
                    tokens_N |= NOT_TRAINED
                if document_file and len(tokens_N):
                    tokens_N[0] |= mark
                    document_file = ""
                yield tokens_N
            self.on_progress(batch[-1].done_bytes, self.documents.total_bytes)
        documents, counts = self.documents, self.counts
        counts.left_out, counts.unread = documents.skipped_records, documents.unread

    def _encode(self, batch: Sequence[_TextChunk]) -> list[list[int]]:
        """Encode pieces of text, without the space that some tokenizers add, unless a piece begins a document."""
        lead_ids = self.lead_ids
        texts = [
            f"{LINE_BREAK}{chunk.text}" if lead_ids and not chunk.is_document_start else chunk.text for chunk in batch
        ]
        batch_ids = self.escaper.encode(texts)
        return [
            ids[len(lead_ids) :]
            if lead_ids and not chunk.is_document_start and ids[: len(lead_ids)] == lead_ids
            else ids
            for chunk, ids in zip(batch, batch_ids, strict=True)
        ]

    def _note_document(self, file: str, n_documents: int) -> int:
        """Record that the next token begins a document of a file; return the number of its documents so far."""
        last = self.files[-1] if self.files else FileOffset(0, "", 0)
        if last.file != file:
            n_documents = 0
        if last.file != file or self.counts.tokens - last.token >= OFFSET_INTERVAL:
            self.files.append(FileOffset(self.counts.tokens, file, n_documents))
        return n_documents + 1

    def _chunks(self) -> Iterator[_TextChunk]:
        """Yield documents in pieces that take seconds to encode; only longer ones are split, at a line end."""
        previous_bytes, together = 0, list[LocatedDocument]()
        for item in self.documents:
            together.append(item)
            if item.with_next:
                continue
            group, together = together, []
            try:
                chunks = [chunk for member in group for chunk in self._document_chunks(member)]
            except UnusableChatError as error:
                self.documents.reject(
                    item.location, strip_guards(str(error)), "name another template with --data.chat_template"
                )
                continue
            for i, chunk in enumerate(chunks, 1):
                chunk.done_bytes = previous_bytes + (self.documents.n_read_bytes - previous_bytes) * i // len(chunks)
                yield chunk
            previous_bytes = self.documents.n_read_bytes

    def _document_chunks(self, item: LocatedDocument) -> list[_TextChunk]:
        chunks, documents = list[_TextChunk](), self._render_segments(item)
        for number, segments in enumerate(documents):
            document_chunks = [
                _TextChunk(self.escaper.restore(part), is_trained)
                for text, is_trained in segments
                for part in _split_text(text)
            ]
            next((chunk for chunk in document_chunks if chunk.text), document_chunks[0]).is_document_start = True
            document_chunks[0].document_file = str(item.location.file)
            if number:
                document_chunks[0].mark |= SAME_CHAT
            if item.with_previous or (number and item.with_next):
                document_chunks[0].mark |= WITH_PREVIOUS
            chunks += document_chunks
            self.counts.spelt += any(has_guards(text) for text, _ in segments)
            self.counts.crlf += any("\r\n" in text for text, _ in segments)
        if isinstance(item.document, Text):  # a template writes begin and end tokens itself
            end_id = self.tokenizer.eos_token_id
            chunks[0].prefix_ids, chunks[-1].suffix_ids = self.begin_ids, [] if end_id is None else [end_id]
        self.counts.documents += len(documents)
        return chunks

    def count_exact_answers(self, item: LocatedDocument, chat: Chat) -> tuple[int, int]:
        """Return the number of answers whose context is exactly that of inference, and of all answers trained on.

        ``item``: a conversation, ``chat``; the tokens are those of transformers' apply_chat_template with add_generation_prompt.

        Raises:
            UnusableError: The template cannot be used for it.
        """
        ids, prompts, was_trained, n_exact, n_answers = list[int](), set[tuple[int, ...]](), False, 0, 0
        for number in range(1, len(chat.messages)):
            with contextlib.suppress(TemplateRefusedError):
                text = self.template.render(chat, number, prompt=True)
                prompts.add(tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"]))
        chunks = self._document_chunks(item)
        for chunk, chunk_ids in zip(chunks, self._encode(chunks), strict=True):
            if chunk.document_file:
                ids, was_trained = [], False
            if chunk.is_trained and not was_trained:
                n_answers, n_exact = n_answers + 1, n_exact + (tuple(ids) in prompts)
            ids, was_trained = ids + chunk_ids, chunk.is_trained
        return n_exact, n_answers

    def _render_segments(self, item: LocatedDocument) -> list[list[Segment]]:
        document = item.document
        if isinstance(document, Text):
            escape = self.escaper.escape
            return [[(escape(document.prompt), False), (escape(document.text), True)]]
        if not self.tokenizer.chat_template:
            raise UserError(f"{item.location}: {NO_TEMPLATE}")
        try:
            messages = tuple(self.escaper.escape(message) for message in document.messages)
            chat = Chat(messages, self.escaper.escape(document.tools), self.escaper.escape(document.arguments))
            rendered = self.template.render_documents(chat)
        except TemplateTimeoutError:
            raise UserError(
                f"{item.location}: the chat template did not finish within {MAX_RENDER_S:.0f} s for this conversation; correct it, or set "
                "another one in --data.chat_template"
            ) from None
        segments = [segment for part in rendered.documents for segment in part]
        if chat != document and any(ESCAPED in text for text, _ in segments) and ESCAPED not in str(document):
            raise UnusableChatError(
                "the chat template escapes its output, so special tokens in it would become other tokens"
            )
        self._count_chat(chat, rendered, item)
        return rendered.documents

    def _count_chat(self, chat: Chat, rendered: RenderedChat, item: LocatedDocument) -> None:
        self.counts.conversations += 1
        segments = [segment for document in rendered.documents for segment in document]
        if rendered.omission:
            self.counts.omitted += 1
            self.counts.first_omitted = self.counts.first_omitted or f"{item.location}: {rendered.omission}"
        if len(rendered.documents) > 1:
            self.counts.divided += 1
            self.counts.divided_documents += len(rendered.documents)
            self.counts.divided_chars += sum(len(text) for text, _ in segments)
            self.counts.joint_chars += rendered.n_chars
        if not any(is_trained for _, is_trained in segments):
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


def _lead_ids(escaper: SpecialTokenEscaper) -> list[int]:
    """Return a line break's tokens if the tokenizer puts a space before texts, as Llama 2's does; else []."""
    plain, lead, combined = escaper.encode(["b", LINE_BREAK, f"{LINE_BREAK}b"])
    return lead if combined[: len(lead)] == lead and combined[len(lead) :] != plain else []


def _split_text(text: str) -> list[str]:
    parts, begin = [], 0
    while len(text) - begin > ENCODE_CHARS:
        end = text.rfind("\n", begin, begin + ENCODE_CHARS) + 1 or begin + ENCODE_CHARS
        parts.append(text[begin:end])
        begin = end
    return [*parts, text[begin:]]


def _batch_chunks(chunks: Iterable[_TextChunk]) -> Iterator[list[_TextChunk]]:
    batch: list[_TextChunk] = []
    n_chars = 0
    for chunk in chunks:
        batch.append(chunk)
        n_chars += len(chunk.text)
        if len(batch) >= ENCODE_CHUNKS or n_chars >= ENCODE_CHARS:
            yield batch
            batch, n_chars = [], 0
    if batch:
        yield batch
