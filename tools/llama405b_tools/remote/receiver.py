"""One host of a chain: receive files, write them, and pass them on at the same time. Standard library.

A host writes to ``.<name>.part``, verifies, and renames; an interrupted file resumes at the byte where it stopped.
"""

import contextlib
import dataclasses
import functools
import hashlib
import hmac
import json
import os
import queue
import shutil
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, ParamSpec

from llama405b.contract import reader
from llama405b_tools.remote import chain_protocol
from llama405b_tools.remote.messages.chain import NextHop

P = ParamSpec("P")
AHEAD = 8  # chunks queued for the disk or the next host
ACCEPT_S = 15.0
RECORD = ".llama405b-pushed.json"  # what was verified here: name -> [bytes, mtime_ns, sha256]


class Receiver:
    """Receives files into ``root``, and passes them on to the next host, if there is one."""

    def __init__(self, root: Path, token: str, listener: socket.socket | None = None) -> None:
        self.root, self.token = root, token
        self.listener = listener or socket.create_server(("", 0))
        self.listener.settimeout(ACCEPT_S)
        self.port = self.listener.getsockname()[1]
        self.done = self.total = 0
        self.file = ""
        self.bad: list[str] = []
        self.next: socket.socket | None = None
        self.verified = _read_record(root)

    def run(self, below: NextHop | None) -> None:
        """Receive everything; ``below``: the next host's addresses, port and token.

        Raises:
            chain_protocol.BrokenLinkError: The previous host is gone; what arrived is kept.
            OSError: This host's disk fails.
        """
        with contextlib.closing(self.accept()) as link:
            self.receive(link, below)

    def receive(self, link: socket.socket, below: NextHop | None) -> None:
        """Receive everything over a connection that ``accept`` returned; see ``run``."""
        files: chain_protocol.FileList = list(
            reader.loads(chain_protocol.Offer, chain_protocol.line(link), "what is to come").files
        )
        for name, _ in files:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise OSError(f"{name!r} points outside the directory")
        mine = [self._present(name, size) for name, size in files]
        lacking = sum(size - have for (_, size), have in zip(files, mine, strict=True))
        self.root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.root).free
        if lacking > free:
            raise OSError(f"{self.root} has {free / 1e9:.1f} GB free, but needs {lacking / 1e9:.1f} GB; make room")
        least = mine
        if below:
            least = [min(pair) for pair in zip(mine, self._connect(below, files), strict=True)]
        chain_protocol.send(link, f"{reader.dumps(chain_protocol.Present(tuple(least)))}\n".encode())
        self.total = sum(size for _, size in files)
        for (name, size), have, begin in zip(files, mine, least, strict=True):
            self.file = name
            self._receive(link, name, size, have, begin)
        if self.next:
            self.next.close()

    def accept(self) -> socket.socket:
        """Accept the connection of the host that knows the token.

        Raises:
            TimeoutError: None has come.
        """
        while True:
            link, _ = self.listener.accept()
            link.settimeout(chain_protocol.STALL_S)
            with contextlib.suppress(OSError, ValueError, chain_protocol.BrokenLinkError):
                if hmac.compare_digest(chain_protocol.line(link, limit=200).strip().encode(), self.token.encode()):
                    return link
            link.close()

    def _connect(self, below: NextHop, files: chain_protocol.FileList) -> list[int]:
        """Connect to the next host, and return what all hosts below have; if that fails, the chain ends here."""
        for address in below.addresses:
            try:
                self.next = socket.create_connection((address, below.port), chain_protocol.CONNECT_S)
                self.next.settimeout(chain_protocol.STALL_S)
                chain_protocol.send(
                    self.next, f"{below.token}\n{reader.dumps(chain_protocol.Offer(tuple(files)))}\n".encode()
                )
                return list(
                    reader.loads(chain_protocol.Present, chain_protocol.line(self.next), "what the next host has").sizes
                )
            except (OSError, chain_protocol.BrokenLinkError, ValueError):
                self.next = None
        return [size for _, size in files]

    def _present(self, name: str, size: int) -> int:
        """How many bytes of a file are here already, whole or as a part."""
        path = self.root / name
        if path.is_file() and path.stat().st_size == size:
            return size
        partial = _partial(path)
        if partial.is_file() and partial.stat().st_size <= size:
            return partial.stat().st_size
        return 0

    def _receive(self, link: chain_protocol.Link, name: str, size: int, have: int, begin: int) -> None:
        """Receive a file from ``begin`` on, and pass it on; the ``have`` bytes already here are not written again."""
        target = _Target(self.root / name, size, have, self._known(name, size))
        self.done += begin
        with contextlib.closing(target), _Worker() as onward, _Worker() as disk:
            try:
                position = begin
                while position < size:
                    chunk = link.recv(min(chain_protocol.CHUNK, size - position))
                    if not chunk:
                        raise chain_protocol.BrokenLinkError(f"the previous host stopped at byte {position} of {name}")
                    if fresh := chunk[max(0, have - position) :]:
                        disk.do(target.write, fresh)
                    onward.do(self._pass_on, chunk)
                    position += len(chunk)
                    self.done += len(chunk)
                said = chain_protocol.exactly(link, 64)
                onward.do(self._pass_on, said)
                disk.wait()
            except (TimeoutError, ConnectionError) as error:
                raise chain_protocol.BrokenLinkError(str(error)) from None
        self._settle(name, target, said.decode())

    def _settle(self, name: str, target: "_Target", said: str) -> None:
        """Give a file its name if its content is right; else delete it."""
        if said != target.sha256:
            target.at.unlink(missing_ok=True)
            self.bad.append(f"{name} has another SHA-256 than the source, and was deleted")
            return
        target.at.replace(target.path)
        info = target.path.stat()
        self.verified[name] = (info.st_size, info.st_mtime_ns, said)
        _write_record(self.root, self.verified)

    def _known(self, name: str, size: int) -> str:
        """The SHA-256 of a file that was verified here and not touched since."""
        path, (_, mtime, digest) = self.root / name, self.verified.get(name, (0, 0, ""))
        if path.is_file() and (path.stat().st_size, path.stat().st_mtime_ns) == (size, mtime):
            return digest
        return ""

    def _pass_on(self, chunk: bytes) -> None:
        if self.next:
            try:
                self.next.sendall(chunk)
            except OSError:
                self.next = None


class _Target:
    """An incoming file: written as ``.<name>.part`` until it is verified, unless all of it is here."""

    def __init__(self, path: Path, size: int, have: int, known: str) -> None:
        """Check what is here: ``have`` bytes, with the SHA-256 ``known`` ('' if unknown)."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.at, self.known = path, _partial(path), known
        self.digest = hashlib.sha256()
        if path.is_file() and path.stat().st_size == size:
            self.at = path
        if have and not known:
            _hash_into(self.digest, self.at, have)
        self.part: IO[bytes] | None = None
        if self.at != path:
            self.at.touch()
            self.part = self.at.open("r+b")
            self.part.truncate(have)
            self.part.seek(have)

    def write(self, chunk: bytes) -> None:
        """Append a chunk."""
        assert self.part
        self.part.write(chunk)
        self.digest.update(chunk)

    def close(self) -> None:
        """Flush the file to disk, and close it.

        Raises:
            OSError: The disk fails.
        """
        if self.part:
            self.part.flush()
            os.fsync(self.part.fileno())
            self.part.close()

    @property
    def sha256(self) -> str:
        """The SHA-256 of what is here."""
        return self.known or self.digest.hexdigest()


class _Worker:
    """A thread that runs queued calls in order; the first error is raised in the caller."""

    def __init__(self) -> None:
        self.work: queue.Queue[Callable[[], None] | None] = queue.Queue(AHEAD)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "_Worker":
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.drain()

    def do(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Queue a call."""
        self._raise()
        self.work.put(functools.partial(call, *args, **kwargs))

    def wait(self) -> None:
        """Wait until all calls are done."""
        self.drain()
        self._raise()

    def drain(self) -> None:
        """End the thread, after the calls in the queue."""
        if self.thread.is_alive():
            self.work.put(None)
            self.thread.join()

    def _raise(self) -> None:
        if self.error:
            raise self.error

    def _run(self) -> None:
        while (job := self.work.get()) is not None:
            if self.error is None:
                try:
                    job()
                except Exception as error:  # noqa: BLE001 - raised where it is waited for
                    self.error = error


def _hash_into(digest: "hashlib._Hash", path: Path, size: int) -> None:
    with path.open("rb") as file:
        left = size
        while left:
            chunk = file.read(min(chain_protocol.CHUNK, left))
            if not chunk:
                raise OSError(f"{path} shrank while it was being read")
            digest.update(chunk)
            left -= len(chunk)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


@dataclasses.dataclass(frozen=True, slots=True)
class _Verified:
    files: Mapping[str, tuple[int, int, str]]  # name -> bytes, mtime_ns, SHA-256


def _read_record(root: Path) -> dict[str, tuple[int, int, str]]:
    try:
        text = (root / RECORD).read_text(encoding="utf-8")
        return dict(reader.loads(_Verified, f'{{"files": {text}}}', RECORD).files)
    except (OSError, ValueError):
        return {}


def _write_record(root: Path, record: dict[str, tuple[int, int, str]]) -> None:
    partial = root / f"{RECORD}.{os.getpid()}"
    partial.write_text(json.dumps(record), encoding="utf-8")
    partial.replace(root / RECORD)
