"""A shell line on a host that takes long, and whose output is wanted while it runs."""

from collections.abc import Callable

from llama405b_tools.hosts.transport import Connection, Stream
from llama405b_tools.text.clean import clean

END = "llama405b-exit-code "  # after the output
# All that the line starts is in this shell's process group, whose other processes end with standard input. On one line, for csh.
WHILE_OPEN = (
    "trap : TERM; exec 3<&0 </dev/null 2>&1; {{ while read -r _; do :; done <&3; kill 0; }} >/dev/null 2>&1 & watcher=$!; "
    "({line}) 3<&-; code=$?; exec 2>/dev/null; kill $watcher; echo; echo {end}$code"
)


def run_telling(
    connection: Connection,
    line: str,
    seen: Callable[[str], object],
    began: Callable[[Stream], object] = lambda _stream: None,
) -> str:
    """Run a shell line, however long it takes while the connection holds; returns its exit code, '' if that broke.

    It ends, with all that it started and that heeds SIGTERM, when its standard input is closed or the connection breaks.

    ``seen``: gets each line of its output that is not empty, cleaned; ``began``: gets its stream.

    Raises:
        HostError: It cannot be run.
    """
    code = ""
    stream = connection.stream(WHILE_OPEN.format(line=line, end=END), "")
    began(stream)
    for each in stream:
        text = clean(each.rstrip())
        if text.startswith(END):
            code = text.removeprefix(END)
        elif text:
            seen(text)
    return code
