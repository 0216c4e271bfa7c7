"""One host of a chain: receive files, write them, and pass them on at the same time. Standard library.

A host writes to ``.<name>.part``, verifies, and renames; an interrupted file resumes at the byte where it stopped.
"""

import contextlib
import functools
import hmac
import itertools
import os
import queue
import re
import shutil
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec

from llama405b.contract import reader
from llama405b.contract.direct import DirectFile
from llama405b.contract.hashes import BLOCK_BYTES, BlockHasher, Blocks, Hashes, n_blocks
from llama405b.contract.units import size_words
from llama405b_tools.remote import chain_protocol
from llama405b_tools.remote.file_sources import CHUNK, FileList, blocks_before
from llama405b_tools.remote.messages.transfer import NextHop

P = ParamSpec("P")
AHEAD = 6  # buffers queued for the disk, the hashes or the next host
ACCEPT_S = 15.0
RECEIVE_BYTES = 1 << 20  # at a time
HEX = 64  # digits of a SHA-256


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
        self.hashes = Hashes(root)
        # In turns: what has been put into full queues, with one chunk in work, no longer uses the one that is next.
        self.buffers = [memoryview(bytearray(RECEIVE_BYTES)) for _ in range(AHEAD + 2)]

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
        offer = reader.loads(chain_protocol.Offer, chain_protocol.line(link), "what is to come")
        if offer.block_bytes != BLOCK_BYTES:
            raise OSError("the source runs another version; install the same version on both")
        files = list(offer.files)
        _refuse_outside(files)
        mine = [self._present(name, size) for name, size in files]
        self._check_space(sum(size - have for (_, size), have in zip(files, mine, strict=True)))
        theirs = self._connect(below, files) if below else mine
        least = [min(pair) for pair in zip(mine, theirs, strict=True)]
        chain_protocol.send_bytes(link, f"{reader.dumps(chain_protocol.Present(tuple(least)))}\n".encode())
        self.total = sum(size for _, size in files)
        for (name, size), have, below_have in zip(files, mine, theirs, strict=True):
            self.file = name
            self._receive(link, name, size, have, below_have)
        if self.next:
            self.next.close()

    def _check_space(self, n_bytes: int) -> None:
        """Check that what is lacking has room here."""
        self.root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.root).free
        if n_bytes > free:
            raise OSError(f"{self.root} has {size_words(free)} free, but needs {size_words(n_bytes)}; make room")

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

    def _connect(self, below: NextHop, files: FileList) -> Sequence[int]:
        """Connect to the next host, and return what all hosts below have; if that fails, the chain ends here."""
        for address in below.addresses:
            try:
                self.next = socket.create_connection((address, below.port), chain_protocol.CONNECT_S)
                self.next.settimeout(chain_protocol.STALL_S)
                return chain_protocol.offer(self.next, below.token, files)
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

    def _receive(self, link: socket.socket, name: str, size: int, have: int, below_have: int) -> None:
        """Receive what is not here or not below, write the one, and pass on the other."""
        target = _Target(self.root / name, size, have, self._known(name, size))
        position = min(have, below_have)
        self.done += position
        buffers = itertools.cycle(self.buffers)
        with contextlib.closing(target), _Worker() as onward, _Worker() as disk, _Worker() as hashing:
            try:
                while position < size:
                    chunk = _fill(link, next(buffers)[: size - position])
                    if not chunk:
                        raise chain_protocol.BrokenLinkError(f"the previous host stopped at byte {position} of {name}")
                    if fresh := chunk[max(0, have - position) :]:
                        disk.do(target.write, fresh)
                        hashing.do(target.hasher.update, fresh)
                    onward.do(self._pass_on, chunk[max(0, below_have - position) :])
                    position += len(chunk)
                    self.done += len(chunk)
                said = chain_protocol.exactly(link, n_blocks(size) * HEX)
                onward.do(self._pass_on, said)
                disk.wait()
                hashing.wait()
            except (TimeoutError, ConnectionError) as error:
                raise chain_protocol.BrokenLinkError(str(error)) from None
        self._settle(name, target, tuple(re.findall(f".{{{HEX}}}", said.decode())))

    def _settle(self, name: str, target: "_Target", said: Blocks) -> None:
        """Give a file its name if its content is right; else keep what comes before the first block that is not."""
        good = blocks_before(said, target.blocks)
        if good < len(said):
            target.cut(good * BLOCK_BYTES)
            self.bad.append(f"{name} differs from the source (SHA-256 of block {good})")
            return
        target.at.replace(target.path)
        self.hashes.add(name, said)

    def _known(self, name: str, size: int) -> Blocks | None:
        """The hashes of a file that was verified here and not touched since."""
        known = self.hashes.of(name)
        return known.blocks if known and known.bytes == size else None

    def _pass_on(self, chunk: bytes | memoryview) -> None:
        if self.next:
            try:
                self.next.sendall(chunk)
            except OSError:
                self.next = None


class _Target:
    """An incoming file: written as ``.<name>.part`` until it is verified, unless all of it is here."""

    def __init__(self, path: Path, size: int, have: int, known: Blocks | None) -> None:
        """Check what is here: ``have`` bytes, whose hashes may be known."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.at = _partial(path)
        self.known = known
        self.hasher = BlockHasher()
        if path.is_file() and path.stat().st_size == size:
            self.at = path
        if have and not known:
            self._hash_first(have)
        self.part: DirectFile | None = None
        if self.at != path:
            self.part = DirectFile(self.at, have)

    def _hash_first(self, size: int) -> None:
        with self.at.open("rb") as file:
            while size:
                chunk = file.read(min(CHUNK, size))
                if not chunk:
                    raise OSError(f"{self.at} shrank while it was being read")
                self.hasher.update(chunk)
                size -= len(chunk)

    def write(self, chunk: memoryview) -> None:
        """Append a chunk; it is hashed apart, in another thread."""
        assert self.part
        self.part.write(chunk)

    def close(self) -> None:
        """Flush the file to disk, and close it.

        Raises:
            OSError: The disk fails.
        """
        if self.part:
            with contextlib.closing(self.part):
                self.part.flush()

    def cut(self, n_bytes: int) -> None:
        """Keep the first bytes alone, as a file that is not complete."""
        partial = _partial(self.path)
        self.at.replace(partial)
        os.truncate(partial, n_bytes)

    @property
    def blocks(self) -> Blocks:
        """The hashes of what is here."""
        return self.known or self.hasher.blocks


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


def _fill(link: socket.socket, buffer: memoryview) -> memoryview:
    """Receive until the buffer is full, or the other end stops: few large pieces cost less than many small ones."""
    got = 0
    while got < len(buffer) and (count := link.recv_into(buffer[got:])):
        got += count
    return buffer[:got]


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _refuse_outside(files: FileList) -> None:
    """Refuse names that lead out of the directory."""
    for name, _ in files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise OSError(f"{name!r} points outside the directory")
