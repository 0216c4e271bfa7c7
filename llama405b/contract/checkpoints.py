"""Names of checkpoints, and which are complete. Knows directories, not file contents."""

import contextlib
import re
from pathlib import Path

from llama405b.contract.errors import UserError

STEP_DIR = re.compile(r"step-(\d{8})")
MANIFEST = "manifest.json"  # written last: a directory without it is not a checkpoint


def step_of(path: Path) -> int:
    """Return the step after which a checkpoint was saved.

    Raises:
        UserError: Its name is not ``step-<8 digits>``.
    """
    match = STEP_DIR.fullmatch(path.name)
    if not match:
        raise UserError(f"{path}: its name is not step-<8 digits>; name a checkpoint directory")
    return int(match[1])


def committed(root: Path) -> list[Path]:
    """List the checkpoint directories by step, oldest first."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(path for path in root.iterdir() if STEP_DIR.fullmatch(path.name))
    return []


def newest_complete(root: Path) -> Path | None:
    """Return the newest checkpoint that looks complete; it is not verified."""
    return next((path for path in reversed(committed(root)) if (path / MANIFEST).exists()), None)
