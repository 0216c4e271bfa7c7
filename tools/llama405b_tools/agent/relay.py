"""Files from host to host: the agent's part in a chain, and the process that copies a run's checkpoints. Standard library.

In a chain, the agent receives and forwards files, or sends this host's files, and reports progress.

``python -m llama405b_tools.agent.relay RUN_DIR HOST`` copies this host's checkpoints to the next host and receives those of the previous
one, as a child of the node runner. It ends when its standard input does: at once if that closes without a message,
or, after ``LAST``, once its
newest checkpoint is copied and the previous host has said that nothing more comes. The trainer decides which host is next
(``checkpoints.Ring``).
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import secrets
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from llama405b.contract import reader
from llama405b.contract.checkpoints import MANIFEST, OF, Copied, Endpoint, Manifest, Ring, committed, step_of
from llama405b.contract.errors import UserError, reason_of
from llama405b.contract.files import append_line, keep_private, read_record, write_json
from llama405b.contract.hashes import BLOCK_BYTES, Blocks
from llama405b.contract.paths import RunDir
from llama405b.contract.records import EventKind, RunEvent
from llama405b.spec.plan import read_plan
from llama405b_tools.agent import transfer
from llama405b_tools.agent.describe import manifest_of
from llama405b_tools.agent.machine import addresses
from llama405b_tools.agent.processes import (
    write_private,
)
from llama405b_tools.agent.transfer import (
    ACCEPT_S,
    LOOK,
    BrokenLinkError,
    DirectorySource,
    Hop,
    NextHop,
    Receiver,
    RelayProgress,
    RelayReady,
    RelayRequest,
    RelaySees,
    SendRequest,
    open_files,
)

LAST = b"last\n"
LOOK_EVERY_S = 0.5
GIVE_UP_S = 60.0  # after LAST, on a host that cannot be reached, or says nothing
GOT = b"+"  # said when all files came, and are right
BYE = "nothing more"


class Replicator:
    """Copies the checkpoints of one attempt on one host."""

    def __init__(self, run: RunDir, host: str) -> None:
        self.run = run
        self.host = host
        self.plan = read_plan(run)
        spot = read_record(Endpoint, run.spot(host))
        if spot is None or spot.attempt != self.plan.attempt:  # else this process was killed: the others know its spot
            spot = Endpoint(self.plan.attempt, self.plan.node(host).address, 0, secrets.token_hex(16))
        self.listener = socket.create_server((spot.address, spot.port))
        self.spot = dataclasses.replace(spot, port=self.listener.getsockname()[1])
        self.last = False  # nothing more is saved here
        self.gone = False  # nothing more comes
        self.taking = False  # something is coming
        self.heard = time.monotonic()  # from the host before
        self.copied = 0
        self.farthest = ("", 0)  # the checkpoint, and bytes of it, that were sent
        self.moved = 0.0  # when that was

    def main(self) -> None:
        """Copy until nothing is left to copy."""
        write_private(self.run.spot(self.host), json.dumps(dataclasses.asdict(self.spot)))
        for act in (self._listen_to_runner, self._take):
            threading.Thread(target=_or_end, args=(act,), daemon=True).start()
        self.moved = time.monotonic()
        tries = 0  # since LAST: one may have stalled for longer than is waited
        while True:
            ring, last = self.ring(), self.last
            tries += last
            gave = ring is None or self._give(ring)
            if gave:
                self.moved = time.monotonic()
            if last and (gave or (tries > 1 and time.monotonic() - self.moved > GIVE_UP_S)):
                break
            time.sleep(LOOK_EVERY_S)
        if ring:
            with contextlib.suppress(OSError, BrokenLinkError, ValueError):
                self._send(ring, [], Path(BYE))
            while self.taking or not (self.gone or time.monotonic() - self.heard > GIVE_UP_S):
                time.sleep(LOOK_EVERY_S)

    def ring(self) -> Ring | None:
        """Return this host's place in the ring; None until the trainer has recorded it."""
        ring = read_record(Ring, self.run.ring(self.host))
        return ring if ring and ring.attempt == self.plan.attempt else None

    def _give(self, ring: Ring) -> bool:
        """Copy the newest checkpoint to the next host if it lacks it; return whether the next host has it now."""
        newest = next((path for path in reversed(committed(Path(ring.root))) if self._is_due(path, ring)), None)
        if newest is None or step_of(newest) == self.copied:
            return True
        manifest = manifest_of(newest)
        if manifest is None:  # it is being renamed
            return False
        names = [name for name in sorted(manifest.files) if (newest / name).is_file()]  # a part has some of them
        try:
            self._send(ring, [*names, MANIFEST], newest)  # which makes the copy complete
        except (OSError, BrokenLinkError, ValueError) as error:
            why = reason_of(error) if isinstance(error, OSError) else str(error)
            write_json(self.run.copied(self.host), Copied(self.copied, f"{newest.name}: {why}", ring.attempt))
            return False
        self.copied, writer = step_of(newest), f"copies-{self.host}"
        write_json(self.run.copied(self.host), Copied(self.copied, attempt=ring.attempt))
        event = RunEvent(time.time(), writer, EventKind.COPIED, ring.attempt, self.copied, str(newest))
        with contextlib.suppress(OSError):  # a full disk here must not end the copying
            append_line(self.run.events(writer), reader.dumps(event))
        return True

    def _is_due(self, path: Path, ring: Ring) -> bool:
        """Return whether a checkpoint is this run's and the one to copy.

        That is the step the ranks name, or at the end the newest one.
        """
        if not self.last and step_of(path) != ring.step:
            return False
        manifest = manifest_of(path)
        return manifest is not None and manifest.run == ring.run

    def _send(self, ring: Ring, names: Sequence[str], directory: Path) -> None:
        """Send files of a checkpoint; no files: tell the next host that nothing more comes."""
        after = ring.after
        hop = NextHop((after.address,), after.port, after.token)
        files = [f"{directory.name}/{name}" for name in names]
        source = DirectorySource(directory.parent, files, known=functools.partial(_sealed, manifest_of(directory)))
        with contextlib.closing(transfer.connect_to(hop)) as link:
            transfer.send_files(source, after.token, link, functools.partial(self._moved, directory.name))
            transfer.exactly(link, 1)  # it has all of them, and they are right

    def _moved(self, name: str, n_bytes: int) -> None:
        """Record when more was sent than in all earlier tries.

        A host whose disk is full accepts the same bytes again and again, which is no progress.
        """
        if (name, n_bytes) > self.farthest:
            self.farthest, self.moved = (name, n_bytes), time.monotonic()

    def _take(self) -> None:
        """Receive the previous host's checkpoints, one at a time."""
        while True:
            self.taking = False
            ring = self.ring()
            root = Path(ring.root) / f"{OF}{ring.before}" if ring else Path()
            receiver = Receiver(root, self.spot.token, self.listener)
            with (
                contextlib.suppress(OSError, BrokenLinkError, ValueError),
                contextlib.closing(receiver.accept()) as link,
            ):
                self.taking = True
                if ring is None:  # its trainer was faster than ours: it tries again
                    continue
                receiver.receive(link, None)
                self.heard = time.monotonic()
                if receiver.bad:
                    continue
                self.gone = receiver.total == 0
                link.sendall(GOT)
                _retire(root, self.ring() or ring)  # which may have changed meanwhile

    def _listen_to_runner(self) -> None:
        if sys.stdin.buffer.readline() == LAST:
            self.heard = self.moved = time.monotonic()
            self.last = True
            sys.stdin.buffer.read()
        os._exit(1)  # the node runner is gone


def _or_end(act: Callable[[], None]) -> None:
    """Run a thread's function; if it fails, exit this process, which the node runner then restarts."""
    try:
        act()
    except Exception:  # noqa: BLE001 - of any kind
        traceback.print_exc()
        os._exit(1)


def _retire(root: Path, ring: Ring) -> None:
    """Delete copies of checkpoints that the other hosts have deleted.

    Keeps the newest ones, and the newest step that is copied everywhere.
    """
    there = committed(root)
    whole = [path for path in there if (path / MANIFEST).is_file()]
    needed = {*whole[-ring.keep :], *there[-1:]}
    for old in there:
        if old not in needed and step_of(old) != ring.everywhere:
            shutil.rmtree(old, ignore_errors=True)
    for other in root.parent.glob(f"{OF}*"):  # of the hosts' order before
        for old in committed(other) if other != root else ():
            if step_of(old) < ring.everywhere:
                shutil.rmtree(old, ignore_errors=True)


def _sealed(manifest: Manifest | None, name: str) -> Blocks | None:
    """Return the hashes of a checkpoint's file from its manifest.

    The copy is thus compared with what was saved, not with what is on this disk now.
    """
    if manifest is None or manifest.block_bytes != BLOCK_BYTES:
        return None
    found = manifest.files.get(name.partition("/")[2])
    return found.blocks if found else None


def relay(request: RelayRequest) -> None:
    """Receive files and forward them; report progress every second.

    First it reports the port it listens on and reads which host is next. Before it reads that, every host writes a canary file and
    reports whose files it sees: hosts that share a directory must not all write to it.
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
    _say(
        RelayProgress(
            receiver.done,
            receiver.total,
            end=True,
            fault=fault,
            own=lasting,
            known=receiver.known,
            notes=receiver.notes,
        )
    )


def _receive(receiver: Receiver, below: NextHop | None) -> tuple[str, bool]:
    """Receive everything; return what went wrong, and whether it is this host's fault and would recur."""
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
    """Exit once the operator is gone. Received bytes are kept, and the same command continues from there."""
    while sys.stdin.readline():
        pass
    os._exit(1)


def send(request: SendRequest) -> None:
    """Send this host's files to the first host of the chain."""
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
    _say(RelayProgress(0, total, notes=source.notes))
    with _Telling(lambda: RelayProgress(done, total)):
        try:
            with contextlib.closing(transfer.connect_to(request.below)) as link:
                transfer.send_files(source, request.below.token, link, progress)
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


if __name__ == "__main__":
    keep_private()
    Replicator(RunDir(Path(sys.argv[1])), sys.argv[2]).main()
    os._exit(0)  # a thread still waits for the node runner
