"""Names of a run's tmux server and of a host's session on it. Pure."""

import re


def tmux_socket(run: str) -> str:
    """The name of the run's own tmux server."""
    return f"llama405b-{run}"


def tmux_session(host: str) -> str:
    """The name of a host's session; tmux allows no '.' or ':' in it."""
    return re.sub(r"[.:]", "_", host)
