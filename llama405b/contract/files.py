"""Files that no reader ever sees half of. Knows nothing of what is in them."""

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any


def write_atomic(path: Path, text: str) -> None:
    """Replace ``path`` with ``text`` so that a reader sees the old file or the new one, never a part.

    Raises:
        OSError: The directory cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def write_json(path: Path, record: Any) -> None:
    """``write_atomic`` a dataclass (or plain value) as one line of JSON.

    On a full disk a file that is there is written over in place, where it has its blocks: a status must still be said.

    Raises:
        OSError: The directory cannot be made or written.
    """
    value = dataclasses.asdict(record) if dataclasses.is_dataclass(record) else record  # type: ignore[arg-type]
    text = json.dumps(value) + "\n"
    try:
        write_atomic(path, text)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not path.exists():
            raise
        with path.open("r+", encoding="utf-8") as file:
            file.write(text.rstrip().ljust(path.stat().st_size - 1) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None where there is none (yet), or none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
