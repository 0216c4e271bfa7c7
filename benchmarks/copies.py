"""Copying checkpoints to the next host: ours, which verifies, beside plain sockets and files, over one link.

Both ends are processes of their own. As root they are in two network namespaces, whose link can be shaped (``tc tbf``). ``plain``:
``sendfile`` into a socket, and its bytes written to a file. Both flush to the disk. Memory is the peak, less the value at the start.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from llama405b.contract.errors import RunError
from llama405b.contract.hashes import BlockHasher
from llama405b_tools.agent import transfer
from llama405b_tools.agent.transfer import (
    ACCEPT_TIMEOUT_S,
    CHUNK_BYTES,
    DirectorySource,
    NextHost,
    Receiver,
    list_files,
)
from llama405b_tools.text.figures import format_columns

PORT, TOKEN = 29_417, "bench"
N_FILES = 4
ADDRESS = "10.254.254.1"  # of the receiver, in its namespace
WAIT_S = 600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """What one end used."""

    seconds: float
    cpu_s: float
    extra_bytes: int  # of memory


def copies(gb: float, mbit: int, repeat: int, directory: Path | None) -> int:
    """Run the benchmark; ``mbit``: shape the link, 0: as it is.

    Raises:
        RunError: An end failed.
    """
    with tempfile.TemporaryDirectory(prefix="llama405b-bench-", dir=directory) as scratch, _link(mbit) as (at, address):
        source = Path(scratch) / "source"
        write_files(source, int(gb * 1e9))
        tries: dict[str, list[tuple[Ended, Ended]]] = {"ours": [], "plain": []}
        for number in range(repeat):
            for form in sorted(tries, reverse=number % 2 == 1):
                target = Path(scratch) / "target"
                tries[form].append(_measure(form, source, target, at, address))
                if [path.read_bytes() for path in sorted(source.iterdir())] != [
                    (target / path.name).read_bytes() for path in sorted(source.iterdir())
                ]:
                    raise RunError(f"copies: {form} arrived changed")
                shutil.rmtree(target)
    rows = []
    for form, found in tries.items():
        seconds = statistics.median(receiver.seconds for _, receiver in found)
        cpu = [statistics.median(pair[end].cpu_s for pair in found) / gb for end in (0, 1)]
        memory = max(each.extra_bytes for pair in found for each in pair)
        rows.append(
            (
                form,
                f"{seconds:.2f}",
                f"{gb / seconds:.3f}",
                f"{cpu[0]:.2f}",
                f"{cpu[1]:.2f}",
                f"{memory / (1 << 20):.0f}",
            )
        )
    print(format_columns(("form", "seconds", "GB/s", "sender: CPU s/GB", "receiver: CPU s/GB", "extra MiB"), rows))
    ours, plain = (float(row[2]) for row in rows)
    print(f"ours / plain: {ours / plain:.2f}")
    if mbit:
        print(f"ours / link of {mbit} Mbit/s: {ours * 8000 / mbit:.2f}")
    return 0


def write_files(directory: Path, n_bytes: int) -> None:
    """Write a few files of bytes that cannot be compressed, and flush them."""
    directory.mkdir()
    piece = secrets.token_bytes(CHUNK_BYTES)
    for number in range(N_FILES):
        with (directory / f"weights-0-{number}.safetensors").open("wb") as file:
            for _ in range(n_bytes // N_FILES // CHUNK_BYTES):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def _link(mbit: int) -> Iterator[tuple[dict[str, list[str]], str]]:
    """How each end is started, and where the receiver listens: two namespaces for root, else the loopback."""
    if os.getuid() != 0:
        if mbit:
            raise RunError("copies: --mbit shapes a link between network namespaces, which needs root")
        yield {"send": [], "receive": []}, "127.0.0.1"
        return
    names = {end: f"l4bench-{os.getpid()}-{end}" for end in ("send", "receive")}
    lines = [f"ip netns add {name}" for name in names.values()]
    lines += [f"ip link add l4b0 netns {names['send']} type veth peer name l4b1 netns {names['receive']}"]
    for end, device, address in (("send", "l4b0", "10.254.254.2"), ("receive", "l4b1", ADDRESS)):
        lines += [f"ip -n {names[end]} addr add {address}/30 dev {device}", f"ip -n {names[end]} link set {device} up"]
    if mbit:
        lines += [f"tc -n {names['send']} qdisc add dev l4b0 root tbf rate {mbit}mbit burst 1mb latency 50ms"]
    try:
        for line in lines:
            subprocess.run(line.split(), check=True)
        yield {end: ["ip", "netns", "exec", name] for end, name in names.items()}, ADDRESS
    except subprocess.CalledProcessError as error:
        raise RunError(f"copies: `{' '.join(error.cmd)}` failed; it needs iproute2") from None
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def _measure(form: str, source: Path, target: Path, at: dict[str, list[str]], address: str) -> tuple[Ended, Ended]:
    def start(end: str, path: Path) -> "subprocess.Popen[str]":
        command = [*at[end], sys.executable, "-m", __name__, form, end, str(path), address]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    ends: list[subprocess.Popen[str]] = []
    try:
        ends.append(start("receive", target))
        assert ends[0].stdout
        ends[0].stdout.readline()  # it listens
        ends.append(start("send", source))
        said = [end.communicate(timeout=WAIT_S)[0] for end in reversed(ends)]
    except subprocess.TimeoutExpired:
        raise RunError(f"copies: {form} took more than {WAIT_S:.0f} s") from None
    finally:
        for end in ends:
            end.kill()  # one that has ended does not mind
            end.wait()
    if any(end.returncode for end in ends):
        raise RunError(f"copies: {form} failed; see above")
    sent, received = (Ended(**json.loads(lines.splitlines()[-1])) for lines in said)
    return sent, received


def _end(form: str, end: str, path: Path, address: str) -> Ended:
    """One end, in its own process."""
    known = _hashes(path) if end == "send" else {}  # as a manifest has them
    listener = socket.create_server((address, PORT)) if end == "receive" else None
    print("ready", flush=True)
    cpu, memory = time.process_time(), _memory_bytes("VmRSS")
    if form == "ours" and listener:
        receiver = Receiver(path, TOKEN, listener)
        link = receiver.accept()
        began = time.monotonic()
        receiver.receive(link, None)
        if receiver.faults:
            raise SystemExit(receiver.faults)
    elif form == "ours":
        began = time.monotonic()
        with transfer.connect_to_host(NextHost((address,), PORT, TOKEN)) as link:
            transfer.send_files(
                DirectorySource(path, list_files(path)[0], known_blocks=known.get), TOKEN, link, lambda _: None
            )
    elif listener:
        path.mkdir()
        listener.settimeout(ACCEPT_TIMEOUT_S)
        link = listener.accept()[0]
        began = time.monotonic()
        _receive_plainly(link, path)
    else:
        began = time.monotonic()
        with socket.create_connection((address, PORT)) as link:
            for file in sorted(path.iterdir()):
                with file.open("rb") as opened:
                    link.sendall(f"{file.name} {file.stat().st_size}".encode().ljust(64))
                    link.sendfile(opened)
    return Ended(time.monotonic() - began, time.process_time() - cpu, _memory_bytes("VmHWM") - memory)


def _receive_plainly(link: socket.socket, path: Path) -> None:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while header := link.recv(64, socket.MSG_WAITALL):
        name, size = header.decode().split()
        left = int(size)
        with (path / name).open("wb", buffering=0) as file:
            while left:
                count = link.recv_into(buffer[: min(CHUNK_BYTES, left)])
                if not count:
                    raise SystemExit("the sender stopped")
                file.write(buffer[:count])
                left -= count
            os.fsync(file.fileno())


def _hashes(path: Path) -> dict[str, tuple[str, ...]]:
    found = {}
    for file in path.iterdir():
        hasher = BlockHasher()
        with file.open("rb") as opened:
            while chunk := opened.read(CHUNK_BYTES):
                hasher.update(chunk)
        found[file.name] = hasher.blocks
    return found


def _memory_bytes(kind: str) -> int:
    """VmRSS (resident) or VmHWM (its peak), from /proc/self/status (proc(5): in kB)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:"))


def main(argv: Sequence[str]) -> None:
    """One end, as its own process."""
    form, end, path, address = argv
    print(json.dumps(dataclasses.asdict(_end(form, end, Path(path), address))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
