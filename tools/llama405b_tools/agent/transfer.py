"""Files down a chain of hosts: the files that are sent, the protocol, and the receiver, which forwards them at the same time.

The source sends a one-time token and the list of files down the chain. Back comes how many bytes of each file all downstream hosts
already have. Then each file follows from that byte on, with the SHA-256 of each of its blocks, starting with the first. A host
writes to ``.<name>.part``, verifies, and renames. Bytes are sent in the clear: the training network is trusted, and the token only
keeps strangers out.
"""

import contextlib
import dataclasses
import functools
import hashlib
import hmac
import itertools
import json
import os
import queue
import re
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, ParamSpec, Protocol

from llama405b.contract import reader
from llama405b.contract.disk import disk_free_bytes
from llama405b.contract.errors import UserError, and_more, reason_of, shown_name, size_words
from llama405b.contract.files import walk
from llama405b.contract.hashes import BLOCK_BYTES, BlockHasher, Blocks, DirectFile, Hashes, n_blocks
from llama405b.spec.models import small_names
from llama405b.spec.tensors import INDEX, Layout, Part, fingerprint_of, part_file, read_tensors

LOOK = "look\n"  # sent to the hosts of a chain once all have left their marks


@dataclasses.dataclass(frozen=True, slots=True)
class RelayRequest:
    """Receive files into a directory, and forward them."""

    to: str
    token: str
    host: str


@dataclasses.dataclass(frozen=True, slots=True)
class RelayReady:
    """The port the host listens on, or why it cannot receive."""

    port: int = 0
    addresses: tuple[str, ...] = ()
    fault: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class RelaySees:
    """The hosts whose canary files are in the directory: they share it."""

    sees: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class NextHop:
    """The host after this one."""

    addresses: tuple[str, ...]
    port: int
    token: str


@dataclasses.dataclass(frozen=True, slots=True)
class Hop:
    """The next host of the chain; None at its end."""

    below: NextHop | None


@dataclasses.dataclass(frozen=True, slots=True)
class SendRequest:
    """Send files of this host to the first host of a chain."""

    path: str
    below: NextHop
    part: Part | None = None  # of the checkpoint there; None: all of it
    names: tuple[str, ...] = ()  # of the files there; (): all


@dataclasses.dataclass(frozen=True, slots=True)
class RelayProgress:
    """The progress of a host of the chain."""

    done: int = 0  # bytes
    total: int = 0
    end: bool = False
    fault: str = ""
    own: bool = False  # the fault is this host's, and would recur
    known: int = 0  # files that were verified here earlier, and are not read again
    notes: tuple[str, ...] = ()  # for the user


CHUNK = 4 << 20
FileList = list[tuple[str, int]]  # path below the root, bytes


class FileSource(Protocol):
    """A source of files to send."""

    files: FileList
    programs: tuple[str, ...]  # those that may be executed
    notes: tuple[str, ...]  # what is not sent, for the user

    def blocks(self, name: str) -> Blocks | None:
        """Return the hashes of a file's blocks, if they are known without reading it."""

    def read(self, name: str, begin: int) -> Iterator[bytes]:
        """Yield the content of a file from a byte on.

        Raises:
            OSError: It cannot be read, or is not what was noted.
        """


def open_files(root: Path, part: Part | None, names: Sequence[str] = ()) -> FileSource:
    """Return a source for a file, a directory or some of its files, or a host's part of a checkpoint.

    Raises:
        UserError: A part is requested, but the directory does not have a whole checkpoint.
    """
    if part:
        return PartSource(root, part)
    return DirectorySource(root, *((tuple(names), ()) if names else list_files(root)))


def list_files(root: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the files below a directory (or of the file itself), and notes on omissions.

    Follows links.

    Raises:
        UserError: A link is dangling or circular, or something is unreadable: it is not known what was meant to be sent.
    """
    if root.is_file():
        return (root.name,), ()
    names, hidden, empty, odd = list[str](), list[str](), list[str](), list[str]()

    for here, below, files in walk(root):
        hidden += [str((here / name).relative_to(root)) for name in (*below, *files) if name.startswith(".")]
        empty += [str(here.relative_to(root))] * (not below and not files)
        for path in [here / name for name in files if not name.startswith(".")]:
            if path.is_file() and not os.access(path, os.R_OK):
                raise UserError(
                    f"{shown_name(str(path))}: cannot be read (Permission denied); give this user the right"
                )
            (names if path.is_file() else odd).append(str(path.relative_to(root)))
    why = (("hidden", hidden), ("empty directories", empty), ("neither files nor directories", odd))
    notes = [
        f"left out, {what}: {', '.join(map(shown_name, found[:5]))}{and_more(found, 5)}" for what, found in why if found
    ]
    return tuple(sorted(names, key=lambda name: Path(name).parts)), tuple(notes)


class DirectorySource:
    """Files as they are, by name; ``known``: what is known of their blocks."""

    def __init__(
        self,
        root: Path,
        names: Sequence[str],
        notes: tuple[str, ...] = (),
        known: Callable[[str], Blocks | None] | None = None,
    ) -> None:
        self.root = root if root.is_dir() else root.parent
        stats = {name: (self.root / name).stat() for name in names}
        self.sizes = {name: info.st_size for name, info in stats.items()}
        self.files = list(self.sizes.items())
        self.programs = tuple(name for name, info in stats.items() if info.st_mode & 0o111)
        self.notes = notes
        self.blocks = known or Hashes(self.root).blocks_of

    def read(self, name: str, begin: int) -> Iterator[bytes]:
        """Yield the content of a file from a byte on."""
        with (self.root / name).open("rb") as file:
            yield from _range(file, begin, self.sizes[name] - begin)


@dataclasses.dataclass(frozen=True, slots=True)
class _Cut:
    """A file of a part: its header, and the pieces (offset, bytes) of a source file that follow."""

    header: bytes
    pieces: Sequence[tuple[int, int]] = ()
    whole: Path | None = None

    @property
    def size(self) -> int:
        return len(self.header) + sum(size for _, size in self.pieces)


class PartSource:
    """One host's part of the weights, as files of their own, and the small files next to the weights.

    A block whose hash is known is always read in full and verified, however little of it is needed.
    """

    programs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __init__(self, root: Path, part: Part) -> None:
        """Plan the files; the index comes last, since it makes the part complete."""
        tensors = read_tensors(root)
        if any(info.pieces for info in tensors.values()):
            raise UserError(f"{root}: has only part of the weights; push parts from a directory that has all of them")
        self.small = DirectorySource(root, small_names(root))
        self.hashes = Hashes(root)
        by_file: dict[Path, Layout] = {}
        for name, info in tensors.items():
            by_file.setdefault(info.file, {})[name] = info
        whole, boxes = fingerprint_of(tensors), part.boxes({name: info.shape for name, info in tensors.items()})
        self.cuts = {
            f"{part.name}/{path.name}": _Cut(*part_file(held, boxes, whole), path)
            for path, held in by_file.items()
            if held.keys() & boxes.keys()
        }
        listed = {name: info.file.name for name, info in tensors.items() if name in boxes}
        self.cuts[f"{part.name}/{INDEX}"] = _Cut(json.dumps({"metadata": {}, "weight_map": listed}).encode())
        self.files = [*self.small.files, *((name, cut.size) for name, cut in self.cuts.items())]

    def blocks(self, name: str) -> Blocks | None:
        """Return the known hashes of a small file; a part's blocks are not those of the whole file."""
        return None if name in self.cuts else self.small.blocks(name)

    def read(self, name: str, begin: int) -> Iterator[bytes]:
        """Yield the content of a file from a byte on."""
        if name not in self.cuts:
            yield from self.small.read(name, begin)
            return
        for chunk in self._read_cut(self.cuts[name]):
            yield chunk[begin:]
            begin = max(0, begin - len(chunk))

    def _read_cut(self, cut: _Cut) -> Iterator[bytes]:
        yield cut.header
        if not cut.whole:
            return
        with cut.whole.open("rb") as file:
            verified = _Verified(file, self.hashes)
            for offset, size in cut.pieces:
                yield from verified.read(offset, size)


class _Verified:
    """Reads ranges of a file. If block hashes are known, reads each block once and verifies it."""

    def __init__(self, file: IO[bytes], hashes: Hashes) -> None:
        self.file = file
        self.blocks = hashes.blocks_of(Path(file.name).name)
        self.number, self.block = -1, memoryview(b"")

    def read(self, offset: int, size: int) -> Iterator[bytes]:
        if self.blocks is None:
            yield from _range(self.file, offset, size)
            return
        end = offset + size
        while offset < end:
            number, begin = divmod(offset, BLOCK_BYTES)
            if number != self.number:
                self._load(number)
            piece = bytes(self.block[begin : begin + min(CHUNK, end - offset)])
            yield piece
            offset += len(piece)

    def _load(self, number: int) -> None:
        assert self.blocks
        self.file.seek(number * BLOCK_BYTES)
        block = self.file.read(BLOCK_BYTES)
        if hashlib.sha256(block).hexdigest() != self.blocks[number]:
            raise OSError(
                f"{self.file.name} is damaged (SHA-256 of block {number}); delete it, and download or push it again"
            )
        self.number, self.block = number, memoryview(block)


def _range(file: IO[bytes], offset: int, size: int) -> Iterator[bytes]:
    file.seek(offset)
    while size:
        chunk = file.read(min(CHUNK, size))
        if not chunk:
            raise OSError(f"{file.name} shrank while it was being sent")
        size -= len(chunk)
        yield chunk


def blocks_before(blocks: Blocks, other: Blocks) -> int:
    """Return how many blocks are equal before the first difference."""
    return next(
        (number for number, pair in enumerate(zip(blocks, other, strict=True)) if pair[0] != pair[1]), len(blocks)
    )


CONNECT_S, STALL_S = 3.0, 120.0


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """The files to come: path below the root and size in bytes of each."""

    files: tuple[tuple[str, int], ...]
    block_bytes: int  # of each block but a file's last that has a hash
    programs: tuple[str, ...]  # the files that may be executed


@dataclasses.dataclass(frozen=True, slots=True)
class Present:
    """How many bytes of each file this host and all downstream hosts already have."""

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
    """The connection to the previous or next host is broken."""


def send_files(source: FileSource, token: str, link: Link, progress: Callable[[int], None]) -> None:
    """Send all files down the chain; bytes that all hosts have are not read if their hashes are known.

    Raises:
        BrokenLinkError: The first host is gone.
        OSError: A file cannot be read.
    """
    done = 0
    for (name, size), begin in zip(
        source.files, offer(link, token, Offer(tuple(source.files), BLOCK_BYTES, source.programs)), strict=True
    ):
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


def offer(link: Link, token: str, offered: Offer) -> Sequence[int]:
    """Offer files to the next host; return how many bytes of each it and all below it already have."""
    send_bytes(link, f"{token}\n{reader.dumps(offered)}\n".encode())
    have = reader.loads(Present, line(link), "what the next host has").sizes
    if len(have) != len(offered.files):
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
    """Send everything."""
    try:
        link.sendall(data)
    except OSError as error:
        raise BrokenLinkError(reason_of(error)) from None


def line(link: Link, limit: int = 1 << 24) -> str:
    """Receive a line of at most ``limit`` bytes, with its end."""
    data = bytearray()
    while not data.endswith(b"\n"):
        piece = link.recv(1)
        if not piece or len(data) > limit:
            raise BrokenLinkError("the other end closed the connection")
        data += piece
    return data.decode()


def exactly(link: Link, size: int) -> bytes:
    """Receive exactly ``size`` bytes."""
    data = b""
    while len(data) < size:
        piece = link.recv(size - len(data))
        if not piece:
            raise BrokenLinkError("the previous host closed the connection")
        data += piece
    return data


P = ParamSpec("P")
AHEAD = 6  # buffers queued for the disk, the hashes or the next host
ACCEPT_S = 15.0
RECEIVE_BYTES = 1 << 20  # at a time
HEX = 64  # digits of a SHA-256


class Receiver:
    """Receives files into a directory, and forwards them to the next host, if there is one."""

    def __init__(self, root: Path, token: str, listener: socket.socket | None = None) -> None:
        self.root, self.token = root, token
        self.listener = listener or socket.create_server(("", 0))
        self.listener.settimeout(ACCEPT_S)
        self.port = self.listener.getsockname()[1]
        self.done = self.total = 0
        self.file = ""
        self.bad: list[str] = []
        self.known = 0  # files that were verified here earlier, and are not read again
        self.notes: tuple[str, ...] = ()
        self.programs = frozenset[str]()
        self.next: socket.socket | None = None
        self.hashes = Hashes(root)
        # In turns: what has been put into full queues, with one chunk in work, no longer uses the one that is next.
        self.buffers = [memoryview(bytearray(RECEIVE_BYTES)) for _ in range(AHEAD + 2)]

    def run(self, below: NextHop | None) -> None:
        """Receive everything; ``below``: the next host's addresses, port and token."""
        with contextlib.closing(self.accept()) as link:
            self.receive(link, below)

    def receive(self, link: socket.socket, below: NextHop | None) -> None:
        """Receive everything over a connection that ``accept`` returned; see ``run``."""
        offered = reader.loads(Offer, line(link), "what is to come")
        if offered.block_bytes != BLOCK_BYTES:
            raise OSError("the source runs another version; install the same version on both")
        files, self.programs = list(offered.files), frozenset(offered.programs)
        _refuse_outside(files)
        mine = [self._present(name, size) for name, size in files]
        self._check_space(sum(size - have for (_, size), have in zip(files, mine, strict=True)))
        theirs = self._connect(below, offered) if below else mine
        least = [min(pair) for pair in zip(mine, theirs, strict=True)]
        send_bytes(link, f"{reader.dumps(Present(tuple(least)))}\n".encode())
        self.total = sum(size for _, size in files)
        for (name, size), have, below_have in zip(files, mine, theirs, strict=True):
            self.file = name
            self._receive(link, name, size, have, below_have)
        if self.next:
            self.next.close()

    def _check_space(self, n_bytes: int) -> None:
        """Check that the missing bytes fit on the disk."""
        self.root.mkdir(parents=True, exist_ok=True)
        free = disk_free_bytes(str(self.root))
        if free is not None and n_bytes > free:
            raise OSError(f"{self.root} has {size_words(free)} free, but needs {size_words(n_bytes)}; make room")

    def accept(self) -> socket.socket:
        """Accept the connection of the host that sends the token."""
        while True:
            link, _ = self.listener.accept()
            link.settimeout(STALL_S)
            with contextlib.suppress(OSError, ValueError, BrokenLinkError):
                # In constant time: the token cannot be guessed byte by byte.
                if hmac.compare_digest(line(link, limit=200).strip().encode(), self.token.encode()):
                    return link
            link.close()

    def _connect(self, below: NextHop, offered: Offer) -> Sequence[int]:
        """Connect to the next host, and return what all downstream hosts have.

        If that fails, the chain ends here.
        """
        for address in below.addresses:
            try:
                self.next = socket.create_connection((address, below.port), CONNECT_S)
                self.next.settimeout(STALL_S)
                return offer(self.next, below.token, offered)
            except (OSError, BrokenLinkError, ValueError):
                self.next = None
        return [size for _, size in offered.files]

    def _present(self, name: str, size: int) -> int:
        """Return how many bytes of a file are here already, complete or partial."""
        path = self.root / name
        if path.is_dir():
            raise OSError(
                f"{shown_name(str(path))} is a directory there, not a file; delete it, or choose another directory"
            )
        if path.is_file() and path.stat().st_size == size:
            return size
        partial = _partial(path)
        if partial.is_file() and partial.stat().st_size <= size:
            return partial.stat().st_size
        return 0

    def _receive(self, link: socket.socket, name: str, size: int, have: int, below_have: int) -> None:
        """Receive what this or a downstream host lacks; write and forward as needed."""
        target = _Target(self.root / name, size, have, self._known(name, size))
        position = min(have, below_have)
        self.done += position
        buffers = itertools.cycle(self.buffers)
        with contextlib.closing(target), _Worker() as onward, _Worker() as disk, _Worker() as hashing:
            try:
                while position < size:
                    chunk = _fill(link, next(buffers)[: size - position])
                    if not chunk:
                        raise BrokenLinkError(f"the previous host stopped at byte {position} of {shown_name(name)}")
                    if fresh := chunk[max(0, have - position) :]:
                        disk.do(target.write, fresh)
                        hashing.do(target.hasher.update, fresh)
                    onward.do(self._pass_on, chunk[max(0, below_have - position) :])
                    position += len(chunk)
                    self.done += len(chunk)
                said = exactly(link, n_blocks(size) * HEX)
                onward.do(self._pass_on, said)
                disk.wait()
                hashing.wait()
            except (TimeoutError, ConnectionError) as error:
                raise BrokenLinkError(str(error)) from None
        self._settle(name, target, tuple(re.findall(f".{{{HEX}}}", said.decode())))

    def _settle(self, name: str, target: "_Target", said: Blocks) -> None:
        """Rename a file to its name if its content is right; else keep the bytes before the first bad block."""
        good = blocks_before(said, target.blocks)
        if good < len(said):
            target.cut(good * BLOCK_BYTES)
            self.bad.append(f"{shown_name(name)} differs from the source (SHA-256 of block {good})")
            return
        target.at.replace(target.path)
        if not _make_program(target.path, name in self.programs):
            self.notes = ("the execute bits of some files could not be set",)
        self.known += target.known is not None
        self.hashes.add(name, said)

    def _known(self, name: str, size: int) -> Blocks | None:
        """Return the hashes of a file that was verified here and not changed since."""
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
        # By `have`, too: a file may have come since that was asked.
        if have == size and path.is_file() and path.stat().st_size == size:
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
        """Append a chunk; another thread hashes it."""
        assert self.part
        self.part.write(chunk)

    def close(self) -> None:
        """Flush the file to disk and close it."""
        if self.part:
            with contextlib.closing(self.part):
                self.part.flush()

    def cut(self, n_bytes: int) -> None:
        """Keep only the first bytes, as a partial file."""
        partial = _partial(self.path)
        self.at.replace(partial)
        os.truncate(partial, n_bytes)

    @property
    def blocks(self) -> Blocks:
        """The hashes of the bytes that are here."""
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
    """Receive until the buffer is full or the other end stops: few large chunks cost less than many."""
    got = 0
    while got < len(buffer) and (count := link.recv_into(buffer[got:])):
        got += count
    return buffer[:got]


def _make_program(path: Path, yes: bool) -> bool:
    """Let users who may read a file execute it, or nobody; return whether the mode is right now."""
    mode = path.stat().st_mode
    wanted = mode | (mode & 0o444) >> 2 if yes else mode & ~0o111
    if bool(mode & 0o111) != yes:
        with contextlib.suppress(OSError):
            path.chmod(stat.S_IMODE(wanted))
    return bool(path.stat().st_mode & 0o111) == yes


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _refuse_outside(files: FileList) -> None:
    """Refuse names that lead out of the directory."""
    for name, _ in files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise OSError(f"{name!r} points outside the directory")
