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
from llama405b.contract.errors import UserError, and_more, format_size, printable_name, reason_of
from llama405b.contract.files import walk
from llama405b.contract.hashes import BLOCK_BYTES, BlockHasher, Blocks, DirectFile, HashStore, n_blocks
from llama405b.spec.models import small_file_names
from llama405b.spec.tensors import INDEX_FILE, HostShard, Layout, compute_fingerprint, cut_host_shard, read_tensors

CHECK_CANARIES = "look\n"  # sent to the hosts of a chain once all have left their marks


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
class RelayCanaries:
    """The hosts whose canary files are in the directory: they share it."""

    sees: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class NextHost:
    """The host after this one."""

    addresses: tuple[str, ...]
    port: int
    token: str


@dataclasses.dataclass(frozen=True, slots=True)
class Downstream:
    """The next host of the chain; None at its end."""

    below: NextHost | None


@dataclasses.dataclass(frozen=True, slots=True)
class SendRequest:
    """Send files of this host to the first host of a chain."""

    path: str
    below: NextHost
    part: HostShard | None = None  # of the checkpoint there; None: all of it
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


CHUNK_BYTES = 4 << 20
FileList = list[tuple[str, int]]  # path below the root, bytes


class FileSource(Protocol):
    """A source of files to send."""

    files: FileList
    programs: tuple[str, ...]  # those that may be executed
    notes: tuple[str, ...]  # what is not sent, for the user

    def blocks(self, name: str) -> Blocks | None:
        """Return the hashes of a file's blocks, if they are known without reading it."""

    def read(self, name: str, offset: int) -> Iterator[bytes]:
        """Yield the content of a file from a byte on.

        Raises:
            OSError: It cannot be read, or is not what was noted.
        """


def open_files(root: Path, part: HostShard | None, names: Sequence[str] = ()) -> FileSource:
    """Return a source for a file, a directory or some of its files, or a host's part of a checkpoint.

    Raises:
        UserError: A part is requested, but the directory does not have a whole checkpoint.
    """
    if part:
        return ShardSource(root, part)
    return DirectorySource(root, *((tuple(names), ()) if names else list_files(root)))


def list_files(root: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the files below a directory (or of the file itself), and notes on omissions.

    Follows links.

    Raises:
        UserError: A link is dangling or circular, or something is unreadable: it is not known what was meant to be sent.
    """
    if root.is_file():
        return (root.name,), ()
    names, hidden_names, empty_directories, special_names = list[str](), list[str](), list[str](), list[str]()

    for folder, subfolders, files in walk(root):
        hidden_names += [
            str((folder / name).relative_to(root)) for name in (*subfolders, *files) if name.startswith(".")
        ]
        empty_directories += [str(folder.relative_to(root))] * (not subfolders and not files)
        for path in [folder / name for name in files if not name.startswith(".")]:
            if path.is_file() and not os.access(path, os.R_OK):
                raise UserError(
                    f"{printable_name(str(path))}: cannot be read (Permission denied); give this user the right"
                )
            (names if path.is_file() else special_names).append(str(path.relative_to(root)))
    omissions = (
        ("hidden", hidden_names),
        ("empty directories", empty_directories),
        ("neither files nor directories", special_names),
    )
    notes = [
        f"left out, {kind}: {', '.join(map(printable_name, omitted[:5]))}{and_more(omitted, 5)}"
        for kind, omitted in omissions
        if omitted
    ]
    return tuple(sorted(names, key=lambda name: Path(name).parts)), tuple(notes)


class DirectorySource:
    """Files as they are, by name; ``known``: what is known of their blocks."""

    def __init__(
        self,
        root: Path,
        names: Sequence[str],
        notes: tuple[str, ...] = (),
        known_blocks: Callable[[str], Blocks | None] | None = None,
    ) -> None:
        self.root = root if root.is_dir() else root.parent
        stats = {name: (self.root / name).stat() for name in names}
        self.sizes = {name: info.st_size for name, info in stats.items()}
        self.files = list(self.sizes.items())
        self.programs = tuple(name for name, info in stats.items() if info.st_mode & 0o111)
        self.notes = notes
        self.blocks = known_blocks or HashStore(self.root).find_blocks

    def read(self, name: str, offset: int) -> Iterator[bytes]:
        """Yield the content of a file from a byte on."""
        with (self.root / name).open("rb") as file:
            yield from _read_range(file, offset, self.sizes[name] - offset)


@dataclasses.dataclass(frozen=True, slots=True)
class _ShardFile:
    """A file of a part: its header, and the pieces (offset, bytes) of a source file that follow."""

    header: bytes
    pieces: Sequence[tuple[int, int]] = ()
    source: Path | None = None

    @property
    def size(self) -> int:
        return len(self.header) + sum(size for _, size in self.pieces)


class ShardSource:
    """One host's part of the weights, as files of their own, and the small files next to the weights.

    A block whose hash is known is always read in full and verified, however little of it is needed.
    """

    programs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __init__(self, root: Path, part: HostShard) -> None:
        """Plan the files; the index comes last, since it makes the part complete."""
        tensors = read_tensors(root)
        if any(info.slices for info in tensors.values()):
            raise UserError(f"{root}: has only part of the weights; push parts from a directory that has all of them")
        self.small_files = DirectorySource(root, small_file_names(root))
        self.hashes = HashStore(root)
        by_file: dict[Path, Layout] = {}
        for name, info in tensors.items():
            by_file.setdefault(info.file, {})[name] = info
        fingerprint, slices = (
            compute_fingerprint(tensors),
            part.slices({name: info.shape for name, info in tensors.items()}),
        )
        self.shard_files = {
            f"{part.name}/{path.name}": _ShardFile(*cut_host_shard(layout, slices, fingerprint), path)
            for path, layout in by_file.items()
            if layout.keys() & slices.keys()
        }
        weight_map = {name: info.file.name for name, info in tensors.items() if name in slices}
        self.shard_files[f"{part.name}/{INDEX_FILE}"] = _ShardFile(
            json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
        )
        self.files = [
            *self.small_files.files,
            *((name, shard_file.size) for name, shard_file in self.shard_files.items()),
        ]

    def blocks(self, name: str) -> Blocks | None:
        """Return the known hashes of a small file; a part's blocks are not those of the whole file."""
        return None if name in self.shard_files else self.small_files.blocks(name)

    def read(self, name: str, offset: int) -> Iterator[bytes]:
        """Yield the content of a file from a byte on."""
        if name not in self.shard_files:
            yield from self.small_files.read(name, offset)
            return
        for chunk in self._read_shard_file(self.shard_files[name]):
            yield chunk[offset:]
            offset = max(0, offset - len(chunk))

    def _read_shard_file(self, shard_file: _ShardFile) -> Iterator[bytes]:
        yield shard_file.header
        if not shard_file.source:
            return
        with shard_file.source.open("rb") as file:
            verified_reader = _HashCheckedReader(file, self.hashes)
            for offset, size in shard_file.pieces:
                yield from verified_reader.read(offset, size)


class _HashCheckedReader:
    """Reads ranges of a file. If block hashes are known, reads each block once and verifies it."""

    def __init__(self, file: IO[bytes], hashes: HashStore) -> None:
        self.file = file
        self.blocks = hashes.find_blocks(Path(file.name).name)
        self.number, self.block = -1, memoryview(b"")

    def read(self, offset: int, size: int) -> Iterator[bytes]:
        if self.blocks is None:
            yield from _read_range(self.file, offset, size)
            return
        end = offset + size
        while offset < end:
            number, start = divmod(offset, BLOCK_BYTES)
            if number != self.number:
                self._load(number)
            piece = bytes(self.block[start : start + min(CHUNK_BYTES, end - offset)])
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


def _read_range(file: IO[bytes], offset: int, size: int) -> Iterator[bytes]:
    file.seek(offset)
    while size:
        chunk = file.read(min(CHUNK_BYTES, size))
        if not chunk:
            raise OSError(f"{file.name} shrank while it was being sent")
        size -= len(chunk)
        yield chunk


def n_equal_blocks(blocks: Blocks, other: Blocks) -> int:
    """Return how many blocks are equal before the first difference."""
    return next(
        (number for number, pair in enumerate(zip(blocks, other, strict=True)) if pair[0] != pair[1]), len(blocks)
    )


CONNECT_TIMEOUT_S, STALL_TIMEOUT_S = 3.0, 120.0


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """The files to come: path below the root and size in bytes of each."""

    files: tuple[tuple[str, int], ...]
    block_bytes: int  # of each block but a file's last that has a hash
    programs: tuple[str, ...]  # the files that may be executed


@dataclasses.dataclass(frozen=True, slots=True)
class PresentSizes:
    """How many bytes of each file this host and all downstream hosts already have."""

    sizes: tuple[int, ...]


class ByteStream(Protocol):
    """A socket, or a channel through SSH."""

    def sendall(self, data: bytes, /) -> object:
        """Send everything."""

    def recv(self, size: int, /) -> bytes:
        """Receive at most ``size`` bytes."""

    def close(self) -> object:
        """Close it."""


class BrokenLinkError(Exception):
    """The connection to the previous or next host is broken."""


def send_files(source: FileSource, token: str, link: ByteStream, on_progress: Callable[[int], None]) -> None:
    """Send all files down the chain; bytes that all hosts have are not read if their hashes are known.

    Raises:
        BrokenLinkError: The first host is gone.
        OSError: A file cannot be read.
    """
    sent_bytes = 0
    for (name, size), offset in zip(
        source.files, offer_files(link, token, Offer(tuple(source.files), BLOCK_BYTES, source.programs)), strict=True
    ):
        blocks, hasher = source.blocks(name), BlockHasher()
        if blocks and len(blocks) != n_blocks(size):  # the file is not what they were noted of
            blocks = None
        position = offset if blocks else 0
        sent_bytes += position
        for chunk in source.read(name, position):
            if blocks is None:
                hasher.update(chunk)
            send_bytes(link, chunk[max(0, offset - position) :])
            position += len(chunk)
            sent_bytes += len(chunk)
            on_progress(sent_bytes)
        send_bytes(link, "".join(blocks or hasher.blocks).encode())


def offer_files(link: ByteStream, token: str, file_offer: Offer) -> Sequence[int]:
    """Offer files to the next host; return how many bytes of each it and all below it already have."""
    send_bytes(link, f"{token}\n{reader.dumps(file_offer)}\n".encode())
    sizes = reader.loads(PresentSizes, receive_line(link), "what the next host has").sizes
    if len(sizes) != len(file_offer.files):
        raise reader.MalformedError("what the next host has: not one number per file")
    return sizes


def connect_to_host(next_host: NextHost) -> socket.socket:
    """Connect to the first address of a host that answers.

    Raises:
        BrokenLinkError: No address answers.
    """
    reason = "it has no address"
    for address in next_host.addresses:
        try:
            link = socket.create_connection((address, next_host.port), CONNECT_TIMEOUT_S)
        except OSError as error:
            reason = f"{address}:{next_host.port}: {reason_of(error)}"
        else:
            link.settimeout(STALL_TIMEOUT_S)
            return link
    raise BrokenLinkError(reason)


def send_bytes(link: ByteStream, data: bytes) -> None:
    """Send everything."""
    try:
        link.sendall(data)
    except OSError as error:
        raise BrokenLinkError(reason_of(error)) from None


def receive_line(link: ByteStream, limit: int = 1 << 24) -> str:
    """Receive a line of at most ``limit`` bytes, with its end."""
    data = bytearray()
    while not data.endswith(b"\n"):
        piece = link.recv(1)
        if not piece or len(data) > limit:
            raise BrokenLinkError("the other end closed the connection")
        data += piece
    return data.decode()


def receive_exactly(link: ByteStream, size: int) -> bytes:
    """Receive exactly ``size`` bytes."""
    data = b""
    while len(data) < size:
        piece = link.recv(size - len(data))
        if not piece:
            raise BrokenLinkError("the previous host closed the connection")
        data += piece
    return data


P = ParamSpec("P")
QUEUE_SIZE = 6  # buffers queued for the disk, the hashes or the next host
ACCEPT_TIMEOUT_S = 15.0
RECEIVE_BYTES = 1 << 20  # at a time
DIGEST_HEX_CHARS = 64  # digits of a SHA-256


class Receiver:
    """Receives files into a directory, and forwards them to the next host, if there is one."""

    def __init__(self, root: Path, token: str, listener: socket.socket | None = None) -> None:
        self.root, self.token = root, token
        self.listener = listener or socket.create_server(("", 0))
        self.listener.settimeout(ACCEPT_TIMEOUT_S)
        self.port = self.listener.getsockname()[1]
        self.received_bytes = self.total_bytes = 0
        self.file = ""
        self.faults: list[str] = []
        self.n_verified = 0  # files that were verified here earlier, and are not read again
        self.notes: tuple[str, ...] = ()
        self.programs = frozenset[str]()
        self.next_socket: socket.socket | None = None
        self.hashes = HashStore(root)
        # In turns: what has been put into full queues, with one chunk in work, no longer uses the one that is next.
        self.buffers = [memoryview(bytearray(RECEIVE_BYTES)) for _ in range(QUEUE_SIZE + 2)]

    def run(self, next_host: NextHost | None) -> None:
        """Receive everything; ``next_host``: the next host's addresses, port and token."""
        with contextlib.closing(self.accept()) as link:
            self.receive(link, next_host)

    def receive(self, link: socket.socket, next_host: NextHost | None) -> None:
        """Receive everything over a connection that ``accept`` returned; see ``run``."""
        file_offer = reader.loads(Offer, receive_line(link), "what is to come")
        if file_offer.block_bytes != BLOCK_BYTES:
            raise OSError("the source runs another version; install the same version on both")
        files, self.programs = list(file_offer.files), frozenset(file_offer.programs)
        _refuse_outside(files)
        local_sizes = [self._present_bytes(name, size) for name, size in files]
        self._check_space(sum(size - local_size for (_, size), local_size in zip(files, local_sizes, strict=True)))
        downstream_sizes = self._connect_next(next_host, file_offer) if next_host else local_sizes
        min_sizes = [min(pair) for pair in zip(local_sizes, downstream_sizes, strict=True)]
        send_bytes(link, f"{reader.dumps(PresentSizes(tuple(min_sizes)))}\n".encode())
        self.total_bytes = sum(size for _, size in files)
        for (name, size), local_size, downstream_size in zip(files, local_sizes, downstream_sizes, strict=True):
            self.file = name
            self._receive_file(link, name, size, local_size, downstream_size)
        if self.next_socket:
            self.next_socket.close()

    def _check_space(self, n_bytes: int) -> None:
        """Check that the missing bytes fit on the disk."""
        self.root.mkdir(parents=True, exist_ok=True)
        free_bytes = disk_free_bytes(str(self.root))
        if free_bytes is not None and n_bytes > free_bytes:
            raise OSError(
                f"{self.root} has {format_size(free_bytes)} free, but needs {format_size(n_bytes)}; make room"
            )

    def accept(self) -> socket.socket:
        """Accept the connection of the host that sends the token."""
        while True:
            link, _ = self.listener.accept()
            link.settimeout(STALL_TIMEOUT_S)
            with contextlib.suppress(OSError, ValueError, BrokenLinkError):
                # In constant time: the token cannot be guessed byte by byte.
                if hmac.compare_digest(receive_line(link, limit=200).strip().encode(), self.token.encode()):
                    return link
            link.close()

    def _connect_next(self, next_host: NextHost, file_offer: Offer) -> Sequence[int]:
        """Connect to the next host, and return what all downstream hosts have.

        If that fails, the chain ends here.
        """
        for address in next_host.addresses:
            try:
                self.next_socket = socket.create_connection((address, next_host.port), CONNECT_TIMEOUT_S)
                self.next_socket.settimeout(STALL_TIMEOUT_S)
                return offer_files(self.next_socket, next_host.token, file_offer)
            except (OSError, BrokenLinkError, ValueError):
                self.next_socket = None
        return [size for _, size in file_offer.files]

    def _present_bytes(self, name: str, size: int) -> int:
        """Return how many bytes of a file are here already, complete or partial."""
        path = self.root / name
        if path.is_dir():
            raise OSError(
                f"{printable_name(str(path))} is a directory there, not a file; delete it, or choose another directory"
            )
        if path.is_file() and path.stat().st_size == size:
            return size
        partial = _partial_path(path)
        if partial.is_file() and partial.stat().st_size <= size:
            return partial.stat().st_size
        return 0

    def _receive_file(self, link: socket.socket, name: str, size: int, local_size: int, downstream_size: int) -> None:
        """Receive what this or a downstream host lacks; write and forward as needed."""
        target = _Target(self.root / name, size, local_size, self._verified_blocks(name, size))
        position = min(local_size, downstream_size)
        self.received_bytes += position
        buffers = itertools.cycle(self.buffers)
        with contextlib.closing(target), _Worker() as forwarder, _Worker() as disk_writer, _Worker() as hash_worker:
            try:
                while position < size:
                    chunk = _receive_into(link, next(buffers)[: size - position])
                    if not chunk:
                        raise BrokenLinkError(f"the previous host stopped at byte {position} of {printable_name(name)}")
                    if new_data := chunk[max(0, local_size - position) :]:
                        disk_writer.submit(target.write, new_data)
                        hash_worker.submit(target.hasher.update, new_data)
                    forwarder.submit(self._forward, chunk[max(0, downstream_size - position) :])
                    position += len(chunk)
                    self.received_bytes += len(chunk)
                digests = receive_exactly(link, n_blocks(size) * DIGEST_HEX_CHARS)
                forwarder.submit(self._forward, digests)
                disk_writer.wait()
                hash_worker.wait()
            except (TimeoutError, ConnectionError) as error:
                raise BrokenLinkError(str(error)) from None
        self._finish_file(name, target, tuple(re.findall(f".{{{DIGEST_HEX_CHARS}}}", digests.decode())))

    def _finish_file(self, name: str, target: "_Target", source_blocks: Blocks) -> None:
        """Rename a file to its name if its content is right; else keep the bytes before the first bad block."""
        n_good_blocks = n_equal_blocks(source_blocks, target.blocks)
        if n_good_blocks < len(source_blocks):
            target.truncate(n_good_blocks * BLOCK_BYTES)
            self.faults.append(f"{printable_name(name)} differs from the source (SHA-256 of block {n_good_blocks})")
            return
        target.write_path.replace(target.path)
        if not _set_executable(target.path, name in self.programs):
            self.notes = ("the execute bits of some files could not be set",)
        self.n_verified += target.known_blocks is not None
        self.hashes.add(name, source_blocks)

    def _verified_blocks(self, name: str, size: int) -> Blocks | None:
        """Return the hashes of a file that was verified here and not changed since."""
        record = self.hashes.find(name)
        return record.blocks if record and record.bytes == size else None

    def _forward(self, chunk: bytes | memoryview) -> None:
        if self.next_socket:
            try:
                self.next_socket.sendall(chunk)
            except OSError:
                self.next_socket = None


class _Target:
    """An incoming file: written as ``.<name>.part`` until it is verified, unless all of it is here."""

    def __init__(self, path: Path, size: int, present_bytes: int, known_blocks: Blocks | None) -> None:
        """Check what is here: ``present_bytes`` bytes, whose hashes may be known."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.write_path = _partial_path(path)
        self.known_blocks = known_blocks
        self.hasher = BlockHasher()
        # By `have`, too: a file may have come since that was asked.
        if present_bytes == size and path.is_file() and path.stat().st_size == size:
            self.write_path = path
        if present_bytes and not known_blocks:
            self._hash_present(present_bytes)
        self.partial_file: DirectFile | None = None
        if self.write_path != path:
            self.partial_file = DirectFile(self.write_path, present_bytes)

    def _hash_present(self, size: int) -> None:
        with self.write_path.open("rb") as file:
            while size:
                chunk = file.read(min(CHUNK_BYTES, size))
                if not chunk:
                    raise OSError(f"{self.write_path} shrank while it was being read")
                self.hasher.update(chunk)
                size -= len(chunk)

    def write(self, chunk: memoryview) -> None:
        """Append a chunk; another thread hashes it."""
        assert self.partial_file
        self.partial_file.write(chunk)

    def close(self) -> None:
        """Flush the file to disk and close it."""
        if self.partial_file:
            with contextlib.closing(self.partial_file):
                self.partial_file.flush()

    def truncate(self, n_bytes: int) -> None:
        """Keep only the first bytes, as a partial file."""
        partial = _partial_path(self.path)
        self.write_path.replace(partial)
        os.truncate(partial, n_bytes)

    @property
    def blocks(self) -> Blocks:
        """The hashes of the bytes that are here."""
        return self.known_blocks or self.hasher.blocks


class _Worker:
    """A thread that runs queued calls in order; the first error is raised in the caller."""

    def __init__(self) -> None:
        self.calls: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUE_SIZE)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "_Worker":
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.drain()

    def submit(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Queue a call."""
        self._raise_error()
        self.calls.put(functools.partial(call, *args, **kwargs))

    def wait(self) -> None:
        """Wait until all calls are done."""
        self.drain()
        self._raise_error()

    def drain(self) -> None:
        """End the thread, after the calls in the queue."""
        if self.thread.is_alive():
            self.calls.put(None)
            self.thread.join()

    def _raise_error(self) -> None:
        if self.error:
            raise self.error

    def _run(self) -> None:
        while (job := self.calls.get()) is not None:
            if self.error is None:
                try:
                    job()
                except Exception as error:  # noqa: BLE001 - raised where it is waited for
                    self.error = error


def _receive_into(link: socket.socket, buffer: memoryview) -> memoryview:
    """Receive until the buffer is full or the other end stops: few large chunks cost less than many."""
    n_received = 0
    while n_received < len(buffer) and (n_bytes := link.recv_into(buffer[n_received:])):
        n_received += n_bytes
    return buffer[:n_received]


def _set_executable(path: Path, is_executable: bool) -> bool:
    """Let users who may read a file execute it, or nobody; return whether the mode is right now."""
    mode = path.stat().st_mode
    new_mode = mode | (mode & 0o444) >> 2 if is_executable else mode & ~0o111
    if bool(mode & 0o111) != is_executable:
        with contextlib.suppress(OSError):
            path.chmod(stat.S_IMODE(new_mode))
    return bool(path.stat().st_mode & 0o111) == is_executable


def _partial_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _refuse_outside(files: FileList) -> None:
    """Refuse names that lead out of the directory."""
    for name, _ in files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise OSError(f"{name!r} points outside the directory")
