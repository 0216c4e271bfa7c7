"""Read documents out of files: text, code, Markdown, JSONL. Knows files; not tokens or ranks."""

import glob
import json
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from llama405b.contract.errors import UserError

STDLIB = "stdlib"  # the one path that every machine has: the Python standard library's own source
Document = tuple[str, str]  # (prompt, which is read but not learnt; text to learn)


def expand(paths: Sequence[str]) -> list[Path]:
    """List the files that ``data.paths`` names, in a fixed order.

    Raises:
        UserError: A path names nothing.
    """
    files: list[Path] = []
    for path in paths:
        if path == STDLIB:
            root = Path(sysconfig.get_paths()["stdlib"])
            found = [p for p in root.rglob("*.py") if not {"site-packages", "test", "tests"} & set(p.parts)]
        elif Path(path).is_dir():
            found = [
                p for p in Path(path).rglob("*") if p.is_file() and not any(part.startswith(".") for part in p.parts)
            ]
        else:
            found = [Path(p) for p in glob.glob(path, recursive=True) if Path(p).is_file()]  # noqa: PTH207
        if not found:
            raise UserError(f"--data.paths: {path!r} names no file here; check the path")
        files += sorted(found)
    return files


def documents(files: Sequence[Path], max_bytes: int = 0) -> Iterator[Document]:
    """Yield the documents, up to ``max_bytes`` of text (0: all).

    A ``.jsonl`` line is ``{"text": …}`` or ``{"prompt": …, "completion": …}``; any other file is one document.

    Raises:
        UserError: A JSONL line is neither; names file and line.
    """
    room = max_bytes or float("inf")
    for file in files:
        for prompt, text in _jsonl(file) if file.suffix == ".jsonl" else [("", file.read_text("utf-8", "replace"))]:
            if room <= 0:
                return
            yield prompt, text
            room -= len(prompt) + len(text)


def _jsonl(file: Path) -> Iterator[Document]:
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            match record:
                case {"prompt": str(prompt), "completion": str(completion)}:
                    yield _sound(prompt), _sound(completion)
                case {"text": str(text)}:
                    yield "", _sound(text)
                case _:
                    raise UserError(
                        f'{file}:{number}: not {{"text": …}} or {{"prompt": …, "completion": …}}; correct the line'
                    )


def _sound(text: str) -> str:
    """JSON can spell half of a character (a lone surrogate), which is no text: it becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")
