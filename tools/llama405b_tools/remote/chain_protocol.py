"""The protocol of a chain of hosts: how two neighbors connect, and what goes over the connection. Standard library.

The source sends down the chain a one-time token and the list of files; back comes how many bytes of each file all hosts
below have already; then each file follows from that byte on, with the SHA-256 of each of its blocks, from the first on.

Bytes are sent in the clear: the training network is trusted with them, and the token only keeps strangers out.
"""

import dataclasses
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from llama405b.contract import reader
from llama405b.contract.hashes import BLOCK_BYTES, BlockHasher, n_blocks
from llama405b.contract.phrases import reason_of
from llama405b_tools.remote.file_sources import FileSource
from llama405b_tools.remote.messages.transfer import NextHop

CONNECT_S, STALL_S = 3.0, 120.0


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """The files to come: path below the root and size in bytes of each."""

    files: tuple[tuple[str, int], ...]
    block_bytes: int  # of each block but a file's last that has a hash


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


def send_files(source: FileSource, token: str, link: Link, progress: Callable[[int], None]) -> None:
    """Send everything down the chain; what all hosts below have is not read if its hashes are known.

    Raises:
        BrokenLinkError: The first host is gone.
        OSError: A file cannot be read.
    """
    done = 0
    for (name, size), begin in zip(source.files, offer(link, token, source.files), strict=True):
        blocks, hasher = source.blocks(name), BlockHasher()
        if blocks and len(blocks) != n_blocks(size):  # the file is not what they were noted of
            blocks = None
        position = begin if blocks else 0
        done += position
        for chunk in source.read(name, position):
            if blocks is None:
                hasher.update(chunk)
            send_bytes(link, chunk[max(0, begin - position) :])
            position += len(chunk)
            done += len(chunk)
            progress(done)
        send_bytes(link, "".join(blocks or hasher.blocks).encode())


def offer(link: Link, token: str, files: Sequence[tuple[str, int]]) -> Sequence[int]:
    """Offer files to the next host; returns how many bytes of each it and all below it have already.

    Raises:
        BrokenLinkError: It is gone.
        reader.MalformedError: It answers something else.
    """
    send_bytes(link, f"{token}\n{reader.dumps(Offer(tuple(files), BLOCK_BYTES))}\n".encode())
    have = reader.loads(Present, line(link), "what the next host has").sizes
    if len(have) != len(files):
        raise reader.MalformedError("what the next host has: not one number per file")
    return have


def connect_to(below: NextHop) -> socket.socket:
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


def send_bytes(link: Link, data: bytes) -> None:
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
