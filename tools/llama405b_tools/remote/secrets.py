"""Secrets on their way to the ranks or a guard: a short-lived file that only its owner may read. Standard library."""

import json
import os
from pathlib import Path


def write_secrets(path: Path, secrets: dict[str, str]) -> None:
    """Write secrets for the node runner."""
    write_private(path, json.dumps(secrets))


def write_private(path: Path, text: str) -> None:
    """Write a new file that is readable only by this user, from its first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def read_secrets(path: Path) -> dict[str, str]:
    """Read the secrets; {} if there is no file."""
    try:
        secrets = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return {str(name): str(value) for name, value in secrets.items()}
