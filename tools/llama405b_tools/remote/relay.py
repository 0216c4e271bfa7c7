"""The agent's part in a chain of hosts: receive and pass on, or send what is here; reports progress. Standard library."""

import contextlib
import hashlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from llama405b.contract import reader
from llama405b.contract.errors import UserError
from llama405b.contract.phrases import reason_of
from llama405b_tools.remote import chain_protocol
from llama405b_tools.remote.chain_protocol import BrokenLinkError
from llama405b_tools.remote.file_sources import open_files
from llama405b_tools.remote.launch_facts import addresses
from llama405b_tools.remote.messages.transfer import (
    LOOK,
    Hop,
    NextHop,
    RelayProgress,
    RelayReady,
    RelayRequest,
    RelaySees,
    SendRequest,
)
from llama405b_tools.remote.receiver import ACCEPT_S, Receiver


def relay(request: RelayRequest) -> None:
    """A host's part: report where it listens, learn which host is next, receive, and report progress once per second.

    Before that, every host leaves a mark and reports whose it sees: hosts that share a directory must not all write to it.
    """
    root = Path(request.to).expanduser()
    receiver = Receiver(root, request.token)
    mark = f".llama405b-{hashlib.sha256(request.token.encode()).hexdigest()[:16]}-"  # the token itself is a secret
    try:
        root.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # a full disk is reported once it is known what is to come
            (root / f"{mark}{request.host}").touch()
    except OSError as error:
        _say(RelayReady(fault=f"{root} cannot be created ({reason_of(error)})"))
        return
    _say(RelayReady(receiver.port, tuple(entry.address for entry in addresses())))
    if sys.stdin.readline() == LOOK:
        _say(RelaySees(tuple(path.name.removeprefix(mark) for path in root.glob(f"{mark}*"))))
    line = sys.stdin.readline()
    with contextlib.suppress(OSError):
        (root / f"{mark}{request.host}").unlink(missing_ok=True)
    if not line:  # the operator is gone
        return
    hop = reader.loads(Hop, line, "the next hop")
    threading.Thread(target=_end_with_input, daemon=True).start()
    with _Telling(lambda: RelayProgress(receiver.done, receiver.total)):
        fault, lasting = _receive(receiver, hop.below)
    _say(RelayProgress(receiver.done, receiver.total, end=True, fault=fault, own=lasting))


def _receive(receiver: Receiver, below: NextHop | None) -> tuple[str, bool]:
    """Receive everything; returns what went wrong, and whether that is this host's fault and would recur."""
    try:
        receiver.run(below)
    except TimeoutError:
        return f"nobody sent anything within {ACCEPT_S:.0f} s", False
    except (BrokenLinkError, ValueError) as error:
        return str(error), False
    except OSError as error:
        return reason_of(error), True
    return "; ".join(receiver.bad), False


def _end_with_input() -> None:
    """Exit once the operator is gone: what arrived is kept, and the same command continues from there."""
    while sys.stdin.readline():
        pass
    os._exit(1)


def send(request: SendRequest) -> None:
    """The source's part, if a host has the files: send them to the first host of the chain."""
    root, done = Path(request.path).expanduser(), 0
    fault = ""

    def progress(position: int) -> None:
        nonlocal done
        done = position

    try:
        source = open_files(root, request.part, request.names)
    except UserError as error:
        _say(RelayProgress(end=True, fault=str(error)))
        return
    total = sum(size for _, size in source.files)
    with _Telling(lambda: RelayProgress(done, total)):
        try:
            with contextlib.closing(chain_protocol.connect_to(request.below)) as link:
                chain_protocol.send_files(source, request.below.token, link, progress)
        except (OSError, BrokenLinkError) as error:
            fault = str(error)
    _say(RelayProgress(done, total, end=True, fault=fault))


def _say(message: RelayReady | RelaySees | RelayProgress) -> None:
    print(reader.dumps(message), flush=True)


class _Telling:
    """Reports progress once per second."""

    def __init__(self, state: Callable[[], RelayProgress]) -> None:
        self.state, self.over = state, threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *exc: object) -> None:
        self.over.set()
        self.thread.join()

    def _run(self) -> None:
        while not self.over.wait(1.0):
            _say(self.state())
