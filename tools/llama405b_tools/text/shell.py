"""Quoting for shell lines. Pure."""

import re
import shlex


def shell_path(path: str) -> str:
    """Quote a path for a shell line; the host expands ``~/``."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)


def in_sh(line: str) -> str:
    """Return a command that runs a line in sh, whatever the login shell is that reads it: bash, zsh, csh, tcsh or fish.

    They agree on single quotes only where those hold no quote, backslash or '!'.
    """
    quoted = re.sub(r"['\\!]", r"'\\\g<0>'", line)
    return f"exec sh -c '{quoted}'"
