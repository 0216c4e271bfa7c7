"""Names of checkpoints, and which are complete. Knows directories, not what is in the files."""

import contextlib
import re
from pathlib import Path

from llama405b.contract.errors import UserError

STEP_DIR = re.compile(r"step-(\d{8})")
MANIFEST = "manifest.json"  # written last: a directory without it is not a checkpoint


def step_of(path: Path) -> int:
    """The step a checkpoint was saved after.

    Raises:
        UserError: Its name is not ``step-<8 digits>``.
    """
    match = STEP_DIR.fullmatch(path.name)
    if not match:
        raise UserError(f"{path}: not named step-<8 digits>; name a checkpoint directory")
    return int(match[1])


def committed(root: Path) -> list[Path]:
    """Checkpoint directories by step, oldest first."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(path for path in root.iterdir() if STEP_DIR.fullmatch(path.name))
    return []


def newest_complete(root: Path) -> Path | None:
    """The newest checkpoint that was written to its end, as far as its files tell; it was not verified."""
    return next((path for path in reversed(committed(root)) if (path / MANIFEST).exists()), None)
