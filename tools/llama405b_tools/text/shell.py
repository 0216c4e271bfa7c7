"""Quoting for shell lines. Pure."""

import shlex


def shell_path(path: str) -> str:
    """Quote a path for a shell line; the host expands ``~/``."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)
