"""Names of the tmux server of a run, and of a host's session in it. Pure."""

import re


def tmux_socket(run: str) -> str:
    """The name of the run's own tmux server."""
    return f"llama405b-{run}"


def tmux_session(host: str) -> str:
    """The session of a host; tmux takes no '.' or ':' in a name."""
    return re.sub(r"[.:]", "_", host)
