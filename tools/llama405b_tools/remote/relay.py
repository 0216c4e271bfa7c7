"""What the agent does in a chain of hosts: receive and pass on, or send what is here; tells how it goes. Standard library."""

import contextlib
import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llama405b_tools.remote import hostprobe, wire
from llama405b_tools.remote.receiver import ACCEPT_S, Receiver
from llama405b_tools.remote.wire import BrokenLinkError


def _say(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def relay(
    request: dict[str, Any], say: Callable[[dict[str, Any]], None] = _say, hear: Callable[[], str] = sys.stdin.readline
) -> None:
    """A host's part: say where it listens, hear who comes next, receive, and tell how it goes once a second.

    Before that every host leaves a mark, and says whose it sees: who shares a directory must not write it at once.
    """
    root = Path(request["to"]).expanduser()
    receiver = Receiver(root, request["token"])
    mark = f".llama405b-{hashlib.sha256(request['token'].encode()).hexdigest()[:16]}-"  # the token itself is a secret
    try:
        root.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # a full disk is said when it is known what is to come
            (root / f"{mark}{request['host']}").touch()
    except OSError as error:
        say({"end": True, "fault": f"{root} cannot be made ({error.strerror})", "own": True, "done": 0})
        return
    own = [entry["address"] for entry in hostprobe.network()["addresses"]]
    say({"port": receiver.port, "addresses": own})
    if hear():
        say({"sees": [path.name.removeprefix(mark) for path in root.glob(f"{mark}*")]})
    below = json.loads(hear() or "null")
    with contextlib.suppress(OSError):
        (root / f"{mark}{request['host']}").unlink(missing_ok=True)
    threading.Thread(target=_end_with_input, args=(hear,), daemon=True).start()
    lasting = False  # whether the fault is this host's, and would be again
    with _Telling(say, lambda: {"done": receiver.done, "total": receiver.total, "file": receiver.file}):
        try:
            receiver.run(below)
            fault = "; ".join(receiver.bad)
        except TimeoutError:
            fault = f"nobody sent anything within {ACCEPT_S:.0f} s"
        except (BrokenLinkError, ValueError) as error:
            fault = str(error)
        except OSError as error:
            fault, lasting = error.strerror or str(error), True
    say({"end": True, "fault": fault, "own": lasting, "done": receiver.done})


def _end_with_input(hear: Callable[[], str]) -> None:
    """The operator is gone: what came is kept, and the same command goes on from there."""
    while hear():
        pass
    os._exit(1)


def send_from_here(request: dict[str, Any], say: Callable[[dict[str, Any]], None] = _say) -> None:
    """The source's part, where a host has the files: send them to the first of the chain."""
    root, done = Path(request["path"]).expanduser(), 0
    fault = ""

    def progress(position: int) -> None:
        nonlocal done
        done = position

    files = wire.list_files(root)
    with _Telling(say, lambda: {"done": done, "total": sum(size for _, size in files)}):
        try:
            with contextlib.closing(wire.connect(request["below"])) as link:
                wire.source(root, files, request["below"]["token"], link, progress)
        except (OSError, BrokenLinkError) as error:
            fault = str(error)
    say({"end": True, "fault": fault, "done": done})


class _Telling:
    """Tells once a second how it goes."""

    def __init__(self, say: Callable[[dict[str, Any]], None], state: Callable[[], dict[str, Any]]) -> None:
        self.say, self.state, self.over = say, state, threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *exc: object) -> None:
        self.over.set()
        self.thread.join()

    def _run(self) -> None:
        while not self.over.wait(1.0):
            self.say(self.state())
