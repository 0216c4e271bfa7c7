"""Read documents from files: text, code, Markdown, JSON Lines. Knows files; not tokens or ranks."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from llama405b.contract.corpus import Form, document_of, parsed, reading, text_of
from llama405b.contract.errors import UserError

Document = tuple[str, str]  # (prompt, which is read but not learned; text to learn)


class Documents:
    """The documents of files, up to ``max_bytes`` of text (0: all); knows how many bytes have been read.

    A line of JSON Lines is ``{"text": …}`` or ``{"prompt": …, "completion": …}``; any other file is one document.

    Raises:
        UserError: A file cannot be read, or a line has neither form.
    """

    def __init__(self, files: Sequence[tuple[Path, Form]], max_bytes: int = 0) -> None:
        self.files = files
        self.max_bytes = max_bytes or float("inf")
        self.total_bytes = int(min(self.max_bytes, sum(file.stat().st_size for file, _ in files)))
        self.done_bytes = 0

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents in the order of the files."""
        room, before = self.max_bytes, 0
        for file, form in self.files:
            for (prompt, text), at in _documents_of(file, form):
                if room <= 0:
                    return
                self.done_bytes = min(self.total_bytes, before + at)
                yield prompt, text
                room -= len(prompt) + len(text)
            before = self.done_bytes


def _documents_of(file: Path, form: Form) -> Iterator[tuple[Document, int]]:
    """Each document, and the bytes of the file that have been read."""
    with reading(file) as raw:
        lines = text_of(raw)
        if form is Form.TEXT:
            yield ("", lines.read()), raw.tell()
            return
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            document = document_of(parsed(line))
            if document is None:
                wanted = '{"text": …} or {"prompt": …, "completion": …}'
                raise UserError(f"{file}:{number}: not {wanted}; correct the line")
            yield (_sound(document[0]), _sound(document[1])), raw.tell()


def _sound(text: str) -> str:
    """Replace lone surrogates, which JSON can spell but text cannot hold, with question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")
