"""The agent on a host: handles one request from the operator's machine, then exits. Needs msgspec; a guard also needs paramiko.

``python -m llama405b_tools.agent.agent ACTION`` reads one line of JSON from standard input and prints JSON, so no
argument or value ever passes through a shell. Long-running actions (``stream``, ``relay``) end when their standard
input closes, so they die with the operator's terminal.
"""

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if sys.version_info < (3, 11):  # noqa: UP036 - the host's: it can read this file, but not those that follow
    sys.exit(f"LLAMA405B_PYTHON_TOO_OLD {sys.version_info[0]}.{sys.version_info[1]}")

from llama405b.contract import reader
from llama405b.contract.errors import fmt_if, reason_of
from llama405b.contract.files import set_private_umask

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ACTIONS = {  # action: the module of the function of that name, imported on demand: most of an agent's time is Python's startup
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
    "probe": "agent.launch_facts",
    "planned": "agent.describe",
    "identify": "agent.processes",
    "connect": "guard.process",  # these two need paramiko, for the host's own connections
    "begin": "guard.process",
    "relay": "agent.relay",
    "parts": "agent.describe",
    "send": "agent.relay",
}


def load_action(name: str) -> tuple[Callable[..., "DataclassInstance | None"], "type[DataclassInstance]"]:
    """Return the function for an action and the type of its request."""
    function = getattr(importlib.import_module(f"llama405b_tools.{ACTIONS[name]}"), name)
    return function, function.__annotations__["request"]


def main() -> int:
    """Entry point of ``python -m llama405b_tools.agent.agent ACTION``."""
    set_private_umask()
    if sys.platform != "linux":
        raise SystemExit(f"hosts must run Linux; this one runs {sys.platform}")
    if len(sys.argv) != 2 or sys.argv[1] not in ACTIONS:
        raise SystemExit(f"{sys.argv[1:]}: unknown agent action")
    function, request_type = load_action(sys.argv[1])
    try:
        request = reader.loads(request_type, sys.stdin.readline(), "the request")
    except reader.MalformedError as error:
        raise SystemExit(f"{sys.argv[1]}: {error}; do both ends run the same version?") from None
    try:
        reply = function(request)
    except OSError as error:
        raise SystemExit(f"{fmt_if('{}: ', error.filename)}{reason_of(error)}") from None
    if reply is not None:
        print(reader.dumps(reply), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
