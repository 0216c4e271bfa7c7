"""Processes that end with the one they work for, however it ends. Knows processes alone."""

import os
import select
import threading


def end_with(pid: int, _worker: int = 0) -> None:
    """End this process when another ends; call it in a process that this one started, directly or through a server.

    What Python and torch have for this looks at the parent, which for a fork server's children is the server, and they keep it alive.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=lambda: (select.select([process], [], []), os._exit(1)), daemon=True).start()
