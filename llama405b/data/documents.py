"""Read documents from files: text, code, Markdown, JSONL. Knows files; not tokens or ranks."""

import contextlib
import glob
import json
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from llama405b.contract.errors import UserError

STDLIB = "stdlib"  # the one path that every machine has: the source of Python's standard library
Document = tuple[str, str]  # (prompt, which is read but not learned; text to learn)


def expand(paths: Sequence[str]) -> list[Path]:
    """List the files that ``data.paths`` names, in a fixed order.

    Raises:
        UserError: A path matches no file.
    """
    files: list[Path] = []
    for path in paths:
        found = _named(path)
        if not found:
            raise UserError(f"--data.paths: {path!r} matches no file; check the path")
        files += sorted(found)
    return files


def _named(path: str) -> list[Path]:
    if path == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        return [p for p in root.rglob("*.py") if not {"site-packages", "test", "tests"} & set(p.parts)]
    if Path(path).is_dir():
        return [p for p in Path(path).rglob("*") if p.is_file() and "/." not in f"/{p}"]  # skip hidden files
    return [Path(p) for p in glob.glob(path, recursive=True) if Path(p).is_file()]  # noqa: PTH207


def documents(files: Sequence[Path], max_bytes: int = 0) -> Iterator[Document]:
    """Yield the documents, up to ``max_bytes`` of text (0: all).

    A ``.jsonl`` line is ``{"text": …}`` or ``{"prompt": …, "completion": …}``; any other file is one document.

    Raises:
        UserError: A JSONL line has neither form; names file and line.
    """
    room = max_bytes or float("inf")
    for file in files:
        for prompt, text in _documents_of(file):
            if room <= 0:
                return
            yield prompt, text
            room -= len(prompt) + len(text)


def _documents_of(file: Path) -> Iterator[Document]:
    if file.suffix != ".jsonl":
        yield "", file.read_text("utf-8", "replace")
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            record = None
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
            match record:
                case {"prompt": str(prompt), "completion": str(completion)}:
                    yield _sound(prompt), _sound(completion)
                case {"text": str(text)}:
                    yield "", _sound(text)
                case _:
                    wanted = '{"text": …} or {"prompt": …, "completion": …}'
                    raise UserError(f"{file}:{number}: not {wanted}; correct the line")


def _sound(text: str) -> str:
    """Replace lone surrogates, which JSON can spell but text cannot hold, with question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")
