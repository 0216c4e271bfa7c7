"""A shell line on a host that takes long, and whose output is wanted while it runs."""

from collections.abc import Callable

from llama405b_tools.hosts.transport import Connection
from llama405b_tools.text.clean import clean

END = "llama405b-exit-code "  # after the output


def run_telling(connection: Connection, line: str, seen: Callable[[str], object]) -> str:
    """Run a shell line, however long it takes while the connection holds; returns its exit code, '' if that broke.

    ``seen``: gets each line of its output that is not empty, cleaned.

    Raises:
        HostError: It cannot be run.
    """
    code = ""
    for each in connection.stream(f"({line}) 2>&1 </dev/null; code=$?; echo; echo {END}$code", ""):
        text = clean(each.rstrip())
        if text.startswith(END):
            code = text.removeprefix(END)
        elif text:
            seen(text)
    return code
