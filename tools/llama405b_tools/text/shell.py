"""Words of a shell line. Pure."""

import shlex


def shell_path(path: str) -> str:
    """A path for a shell line, with ``~/`` left to the host."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)
