"""The protocol of a chain of hosts: how two neighbors connect, and what goes over the connection. Standard library.

The source sends down the chain a one-time token and the list of files; back comes how many bytes of each file all hosts
below have already; then each file follows from that byte on, with the SHA-256 of the whole.

Bytes are sent in the clear: the training network is trusted with them, and the token only keeps strangers out.
"""

import dataclasses
import hashlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from llama405b.contract import reader
from llama405b.contract.phrases import reason_of
from llama405b_tools.remote.messages.chain import NextHop

CHUNK = 4 << 20
CONNECT_S, STALL_S = 3.0, 120.0
FileList = list[tuple[str, int]]  # path below the root, bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """The files to come: path below the root and size in bytes of each."""

    files: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Present:
    """How many bytes of each file this host and all below it have already."""

    sizes: tuple[int, ...]


class Link(Protocol):
    """A socket, or a channel through SSH."""

    def sendall(self, data: bytes, /) -> object:
        """Send everything."""

    def recv(self, size: int, /) -> bytes:
        """Receive at most ``size`` bytes."""

    def close(self) -> object:
        """Close it."""


class BrokenLinkError(Exception):
    """The host before or after this one is gone."""


def list_files(root: Path) -> FileList:
    """Regular files below a directory (or the file itself), by name, without hidden ones."""
    if root.is_file():
        return [(root.name, root.stat().st_size)]
    found = [path for path in sorted(root.rglob("*")) if path.is_file()]
    names = [path.relative_to(root) for path in found]
    visible = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    return [(str(name), (root / name).stat().st_size) for name in visible]


def source(root: Path, files: FileList, token: str, link: Link, progress: Callable[[int], None]) -> None:
    """Send files down the chain.

    Raises:
        BrokenLinkError: The first host is gone.
        OSError: A file cannot be read.
    """
    base = root if root.is_dir() else root.parent
    send(link, f"{token}\n{reader.dumps(Offer(tuple(files)))}\n".encode())
    have = reader.loads(Present, line(link), "what the next host has").sizes
    done = 0
    for (name, size), begin in zip(files, have, strict=True):
        digest = hashlib.sha256()
        with (base / name).open("rb") as file:
            position = 0
            while position < size:
                chunk = file.read(min(CHUNK, size - position, begin - position if position < begin else CHUNK))
                if not chunk:
                    raise OSError(f"{base / name} shrank while it was being sent")
                digest.update(chunk)
                if position >= begin:
                    send(link, chunk)
                position += len(chunk)
                done += len(chunk)
                progress(done)
        send(link, digest.hexdigest().encode())


def connect(below: NextHop) -> socket.socket:
    """Connect to the first address of a host that answers.

    Raises:
        BrokenLinkError: No address answers.
    """
    why = "it has no address"
    for address in below.addresses:
        try:
            link = socket.create_connection((address, below.port), CONNECT_S)
        except OSError as error:
            why = f"{address}:{below.port}: {reason_of(error)}"
        else:
            link.settimeout(STALL_S)
            return link
    raise BrokenLinkError(why)


def send(link: Link, data: bytes) -> None:
    """Send everything.

    Raises:
        BrokenLinkError: The other end is gone.
    """
    try:
        link.sendall(data)
    except OSError as error:
        raise BrokenLinkError(reason_of(error)) from None


def line(link: Link, limit: int = 1 << 24) -> str:
    """Receive a line of at most ``limit`` bytes, with its end.

    Raises:
        BrokenLinkError: The other end is gone, or the line is longer.
    """
    data = bytearray()
    while not data.endswith(b"\n"):
        piece = link.recv(1)
        if not piece or len(data) > limit:
            raise BrokenLinkError("the other end closed the connection")
        data += piece
    return data.decode()


def exactly(link: Link, size: int) -> bytes:
    """Receive exactly ``size`` bytes.

    Raises:
        BrokenLinkError: The other end is gone.
    """
    data = b""
    while len(data) < size:
        piece = link.recv(size - len(data))
        if not piece:
            raise BrokenLinkError("the previous host closed the connection")
        data += piece
    return data
