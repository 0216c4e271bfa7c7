"""What the operator's machine asks of a host: one short-lived process a question. Standard library alone.

``python -m llama405b_tools.remote.agent ACTION`` reads one line of JSON from standard input and prints JSON, so that no
argument or value ever passes through a shell. What goes on (``stream``, ``relay``) ends when its standard input closes: when
the operator's terminal dies, so does it.
"""

import importlib
import os
import signal
import sys

from llama405b.contract import reader
from llama405b.contract.paths import UMASK

ACTIONS = {  # action: module, function, type of its request; imported when asked for: most of an agent's time is Python's start
    "start": ("starting", "start", "StartRequest"),
    "status": ("describe", "status", "StatusRequest"),
    "stop": ("ending", "end", "EndRequest"),
    "orphans": ("ending", "orphans", "OrphansRequest"),
    "ask": ("ending", "ask", "AskRequest"),
    "stream": ("streaming", "stream", "StreamRequest"),
    "probe": ("facts", "probe", "ProbeRequest"),
    "relay": ("relay", "relay", "RelayRequest"),
    "send": ("relay", "send_from_here", "SendRequest"),
}


def main() -> int:
    """Entry point of ``python -m llama405b_tools.remote.agent ACTION``."""
    os.umask(UMASK)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if len(sys.argv) != 2 or sys.argv[1] not in ACTIONS:
        raise SystemExit(f"{sys.argv[1:]}: not an action of the agent")
    module, name, kind = ACTIONS[sys.argv[1]]
    act = getattr(importlib.import_module(f"llama405b_tools.remote.{module}"), name)
    messages = importlib.import_module("llama405b_tools.remote.messages")
    try:
        request = reader.loads(getattr(messages, kind), sys.stdin.readline(), "the request")
    except reader.MalformedError as error:
        raise SystemExit(f"{sys.argv[1]}: {error}; are both ends of one version?") from None
    reply = act(request)
    if reply is not None:
        print(reader.dumps(reply), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
