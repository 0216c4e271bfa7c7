"""The agent on a host: handles one request from the operator's machine, then exits. Needs msgspec; a guard also needs paramiko.

``python -m llama405b_tools.agent.agent FUNCTION`` reads its arguments, one line of JSON, from standard input and prints JSON, so no
argument or value ever passes through a shell. Long-running functions (``stream``, ``relay``) end when their standard
input closes, so they die with the operator's terminal.
"""

import importlib
import sys
from collections.abc import Callable

if sys.version_info < (3, 11):  # noqa: UP036 - the host's: it can read this file, but not those that follow
    sys.exit(f"LLAMA405B_PYTHON_TOO_OLD {sys.version_info[0]}.{sys.version_info[1]}")

from llama405b.contract import reader
from llama405b.contract.errors import fmt_if, reason_of
from llama405b.contract.files import set_private_umask
from llama405b_tools.hosts import calls

MODULES = {  # of each function that can be called, imported on demand: most of an agent's time is Python's startup
    "start": "agent.starting",
    "status": "agent.describe",
    "stop": "agent.starting",
    "tether": "agent.starting",
    "orphans": "agent.starting",
    "note": "agent.processes",
    "ask": "agent.describe",
    "answer": "agent.describe",
    "account_of": "agent.reports",
    "report_of": "agent.reports",
    "evidence": "agent.evidence",
    "stream": "agent.streaming",
    "watch": "agent.watching",
    "probe": "agent.launch_facts",
    "probe_head": "agent.launch_facts",
    "planned": "agent.describe",
    "machine_id": "agent.processes",
    "connect": "guard.process",  # these two need paramiko, for the host's own connections
    "begin": "guard.process",
    "relay": "agent.relay",
    "parts": "agent.describe",
    "send": "agent.relay",
}


def load_function(name: str) -> Callable[..., object]:
    """Return the function of this name."""
    function: Callable[..., object] = getattr(importlib.import_module(f"llama405b_tools.{MODULES[name]}"), name)
    return function


def main() -> int:
    """Entry point of ``python -m llama405b_tools.agent.agent FUNCTION``."""
    set_private_umask()
    if sys.platform != "linux":
        raise SystemExit(f"hosts must run Linux; this one runs {sys.platform}")
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    if name not in MODULES:
        raise SystemExit(f"{calls.MALFORMED} {name}: there is no such function")
    function = load_function(name)
    try:
        arguments = calls.decode_arguments(function, sys.stdin.buffer.readline().decode(errors="replace"))
    except reader.MalformedError as error:
        raise SystemExit(f"{calls.MALFORMED} {error}") from None
    try:
        result = function(**arguments)
    except OSError as error:
        raise SystemExit(f"{fmt_if('{}: ', error.filename)}{reason_of(error)}") from None
    if not calls.prints_messages(function):
        print(calls.encode_result(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
