"""Files from host to host: the agent's part in a chain, and the process that copies a run's checkpoints. Standard library.

In a chain, the agent receives and forwards files, or sends this host's files, and reports progress.

``python -m llama405b_tools.agent.relay RUN_DIR HOST`` copies this host's checkpoints to the next host and receives those of the previous
one, as a child of the node runner. It ends when its standard input does: at once if that closes without a message,
or, after ``FINISH``, once its
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
from llama405b.contract.checkpoints import (
    MANIFEST,
    REPLICA_PREFIX,
    CopiedStep,
    Endpoint,
    Manifest,
    Ring,
    list_committed,
    step_of,
)
from llama405b.contract.errors import UserError, reason_of
from llama405b.contract.files import append_line, read_record, set_private_umask, write_json
from llama405b.contract.hashes import BLOCK_BYTES, Blocks
from llama405b.contract.paths import RunDir
from llama405b.contract.records import EventKind, RunEvent
from llama405b.spec.plan import read_plan
from llama405b_tools.agent import transfer
from llama405b_tools.agent.describe import load_manifest
from llama405b_tools.agent.machine import list_addresses
from llama405b_tools.agent.processes import (
    write_private,
)
from llama405b_tools.agent.transfer import (
    ACCEPT_TIMEOUT_S,
    CHECK_CANARIES,
    BrokenLinkError,
    DirectorySource,
    Downstream,
    NextHost,
    Receiver,
    RelayCanaries,
    RelayProgress,
    RelayReady,
    RelayRequest,
    SendRequest,
    open_files,
)

FINISH = b"last\n"
RING_POLL_S = 0.5
GIVE_UP_S = 60.0  # after LAST, on a host that cannot be reached, or says nothing
ACK = b"+"  # said when all files came, and are right
END_OF_COPIES = "nothing more"


class Replicator:
    """Copies the checkpoints of one attempt on one host."""

    def __init__(self, run: RunDir, host: str) -> None:
        self.run = run
        self.host = host
        self.plan = read_plan(run)
        endpoint = read_record(Endpoint, run.spot(host))
        if (
            endpoint is None or endpoint.attempt != self.plan.attempt
        ):  # else this process was killed: the others know its spot
            endpoint = Endpoint(self.plan.attempt, self.plan.node(host).address, 0, secrets.token_hex(16))
        self.listener = socket.create_server((endpoint.address, endpoint.port))
        self.endpoint = dataclasses.replace(endpoint, port=self.listener.getsockname()[1])
        self.is_finishing = False  # nothing more is saved here
        self.is_upstream_done = False  # nothing more comes
        self.is_receiving = False  # something is coming
        self.last_received_at = time.monotonic()  # from the host before
        self.copied_step = 0
        self.furthest_sent = ("", 0)  # the checkpoint, and bytes of it, that were sent
        self.last_progress_at = 0.0  # when that was

    def main(self) -> None:
        """Copy until nothing is left to copy."""
        write_private(self.run.spot(self.host), json.dumps(dataclasses.asdict(self.endpoint)))
        for target in (self._listen_to_runner, self._receive_copies):
            threading.Thread(target=_run_or_exit, args=(target,), daemon=True).start()
        self.last_progress_at = time.monotonic()
        n_tries = 0  # since LAST: one may have stalled for longer than is waited
        while True:
            ring, is_finishing = self.read_ring(), self.is_finishing
            n_tries += is_finishing
            is_copied = ring is None or self._copy_newest(ring)
            if is_copied:
                self.last_progress_at = time.monotonic()
            if is_finishing and (is_copied or (n_tries > 1 and time.monotonic() - self.last_progress_at > GIVE_UP_S)):
                break
            time.sleep(RING_POLL_S)
        if ring:
            with contextlib.suppress(OSError, BrokenLinkError, ValueError):
                self._send(ring, [], Path(END_OF_COPIES))
            while self.is_receiving or not (
                self.is_upstream_done or time.monotonic() - self.last_received_at > GIVE_UP_S
            ):
                time.sleep(RING_POLL_S)

    def read_ring(self) -> Ring | None:
        """Return this host's place in the ring; None until the trainer has recorded it."""
        ring = read_record(Ring, self.run.ring(self.host))
        return ring if ring and ring.attempt == self.plan.attempt else None

    def _copy_newest(self, ring: Ring) -> bool:
        """Copy the newest checkpoint to the next host if it lacks it; return whether the next host has it now."""
        checkpoint = next(
            (path for path in reversed(list_committed(Path(ring.root))) if self._is_due(path, ring)), None
        )
        if checkpoint is None or step_of(checkpoint) == self.copied_step:
            return True
        manifest = load_manifest(checkpoint)
        if manifest is None:  # it is being renamed
            return False
        names = [name for name in sorted(manifest.files) if (checkpoint / name).is_file()]  # a part has some of them
        try:
            self._send(ring, [*names, MANIFEST], checkpoint)  # which makes the copy complete
        except (OSError, BrokenLinkError, ValueError) as error:
            reason = reason_of(error) if isinstance(error, OSError) else str(error)
            write_json(
                self.run.copied(self.host), CopiedStep(self.copied_step, f"{checkpoint.name}: {reason}", ring.attempt)
            )
            return False
        self.copied_step, writer = step_of(checkpoint), f"copies-{self.host}"
        write_json(self.run.copied(self.host), CopiedStep(self.copied_step, attempt=ring.attempt))
        event = RunEvent(time.time(), writer, EventKind.COPIED, ring.attempt, self.copied_step, str(checkpoint))
        with contextlib.suppress(OSError):  # a full disk here must not end the copying
            append_line(self.run.events(writer), reader.dumps(event))
        return True

    def _is_due(self, path: Path, ring: Ring) -> bool:
        """Return whether a checkpoint is this run's and the one to copy.

        That is the step the ranks name, or at the end the newest one.
        """
        if not self.is_finishing and step_of(path) != ring.step:
            return False
        manifest = load_manifest(path)
        return manifest is not None and manifest.run == ring.run

    def _send(self, ring: Ring, names: Sequence[str], directory: Path) -> None:
        """Send files of a checkpoint; no files: tell the next host that nothing more comes."""
        endpoint = ring.after
        next_host = NextHost((endpoint.address,), endpoint.port, endpoint.token)
        files = [f"{directory.name}/{name}" for name in names]
        source = DirectorySource(
            directory.parent, files, known_blocks=functools.partial(_manifest_blocks, load_manifest(directory))
        )
        with contextlib.closing(transfer.connect_to_host(next_host)) as link:
            transfer.send_files(source, endpoint.token, link, functools.partial(self._note_progress, directory.name))
            transfer.receive_exactly(link, 1)  # it has all of them, and they are right

    def _note_progress(self, name: str, n_bytes: int) -> None:
        """Record when more was sent than in all earlier tries.

        A host whose disk is full accepts the same bytes again and again, which is no progress.
        """
        if (name, n_bytes) > self.furthest_sent:
            self.furthest_sent, self.last_progress_at = (name, n_bytes), time.monotonic()

    def _receive_copies(self) -> None:
        """Receive the previous host's checkpoints, one at a time."""
        while True:
            self.is_receiving = False
            ring = self.read_ring()
            root = Path(ring.root) / f"{REPLICA_PREFIX}{ring.before}" if ring else Path()
            receiver = Receiver(root, self.endpoint.token, self.listener)
            with (
                contextlib.suppress(OSError, BrokenLinkError, ValueError),
                contextlib.closing(receiver.accept()) as link,
            ):
                self.is_receiving = True
                if ring is None:  # its trainer was faster than ours: it tries again
                    continue
                receiver.receive(link, None)
                self.last_received_at = time.monotonic()
                if receiver.faults:
                    continue
                self.is_upstream_done = receiver.total_bytes == 0
                link.sendall(ACK)
                _delete_old_copies(root, self.read_ring() or ring)  # which may have changed meanwhile

    def _listen_to_runner(self) -> None:
        if sys.stdin.buffer.readline() == FINISH:
            self.last_received_at = self.last_progress_at = time.monotonic()
            self.is_finishing = True
            sys.stdin.buffer.read()
        os._exit(1)  # the node runner is gone


def _run_or_exit(target: Callable[[], None]) -> None:
    """Run a thread's function; if it fails, exit this process, which the node runner then restarts."""
    try:
        target()
    except Exception:  # noqa: BLE001 - of any kind
        traceback.print_exc()
        os._exit(1)


def _delete_old_copies(root: Path, ring: Ring) -> None:
    """Delete copies of checkpoints that the other hosts have deleted.

    Keeps the newest ones, and the newest step that is copied everywhere.
    """
    copies = list_committed(root)
    complete_copies = [path for path in copies if (path / MANIFEST).is_file()]
    copies_to_keep = {*complete_copies[-ring.keep :], *copies[-1:]}
    for copy in copies:
        if copy not in copies_to_keep and step_of(copy) != ring.everywhere:
            shutil.rmtree(copy, ignore_errors=True)
    for other_root in root.parent.glob(f"{REPLICA_PREFIX}*"):  # of the hosts' order before
        for copy in list_committed(other_root) if other_root != root else ():
            if step_of(copy) < ring.everywhere:
                shutil.rmtree(copy, ignore_errors=True)


def _manifest_blocks(manifest: Manifest | None, name: str) -> Blocks | None:
    """Return the hashes of a checkpoint's file from its manifest.

    The copy is thus compared with what was saved, not with what is on this disk now.
    """
    if manifest is None or manifest.block_bytes != BLOCK_BYTES:
        return None
    seal = manifest.files.get(name.partition("/")[2])
    return seal.blocks if seal else None


def relay(request: RelayRequest) -> None:
    """Receive files and forward them; report progress every second.

    First it reports the port it listens on and reads which host is next. Before it reads that, every host writes a canary file and
    reports whose files it sees: hosts that share a directory must not all write to it.
    """
    root = Path(request.to).expanduser()
    receiver = Receiver(root, request.token)
    canary_prefix = (
        f".llama405b-{hashlib.sha256(request.token.encode()).hexdigest()[:16]}-"  # the token itself is a secret
    )
    try:
        root.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # a full disk is reported once it is known what is to come
            (root / f"{canary_prefix}{request.host}").touch()
    except OSError as error:
        _print_message(RelayReady(fault=f"{root} cannot be created ({reason_of(error)})"))
        return
    _print_message(RelayReady(receiver.port, tuple(entry.address for entry in list_addresses())))
    if sys.stdin.readline() == CHECK_CANARIES:
        _print_message(
            RelayCanaries(tuple(path.name.removeprefix(canary_prefix) for path in root.glob(f"{canary_prefix}*")))
        )
    line = sys.stdin.readline()
    with contextlib.suppress(OSError):
        (root / f"{canary_prefix}{request.host}").unlink(missing_ok=True)
    if not line:  # the operator is gone
        return
    downstream = reader.loads(Downstream, line, "the next hop")
    threading.Thread(target=_end_with_input, daemon=True).start()
    with _ProgressReporter(lambda: RelayProgress(receiver.received_bytes, receiver.total_bytes)):
        fault, is_own_fault = _receive(receiver, downstream.below)
    _print_message(
        RelayProgress(
            receiver.received_bytes,
            receiver.total_bytes,
            end=True,
            fault=fault,
            own=is_own_fault,
            known=receiver.n_verified,
            notes=receiver.notes,
        )
    )


def _receive(receiver: Receiver, next_host: NextHost | None) -> tuple[str, bool]:
    """Receive everything; return what went wrong, and whether it is this host's fault and would recur."""
    try:
        receiver.run(next_host)
    except TimeoutError:
        return f"nobody sent anything within {ACCEPT_TIMEOUT_S:.0f} s", False
    except (BrokenLinkError, ValueError) as error:
        return str(error), False
    except OSError as error:
        return reason_of(error), True
    return "; ".join(receiver.faults), False


def _end_with_input() -> None:
    """Exit once the operator is gone. Received bytes are kept, and the same command continues from there."""
    while sys.stdin.readline():
        pass
    os._exit(1)


def send(request: SendRequest) -> None:
    """Send this host's files to the first host of the chain."""
    root, sent_bytes = Path(request.path).expanduser(), 0
    fault = ""

    def on_progress(position: int) -> None:
        nonlocal sent_bytes
        sent_bytes = position

    try:
        source = open_files(root, request.part, request.names)
    except UserError as error:
        _print_message(RelayProgress(end=True, fault=str(error)))
        return
    total = sum(size for _, size in source.files)
    _print_message(RelayProgress(0, total, notes=source.notes))
    with _ProgressReporter(lambda: RelayProgress(sent_bytes, total)):
        try:
            with contextlib.closing(transfer.connect_to_host(request.below)) as link:
                transfer.send_files(source, request.below.token, link, on_progress)
        except (OSError, BrokenLinkError) as error:
            fault = str(error)
    _print_message(RelayProgress(sent_bytes, total, end=True, fault=fault))


def _print_message(message: RelayReady | RelayCanaries | RelayProgress) -> None:
    print(reader.dumps(message), flush=True)


class _ProgressReporter:
    """Reports progress once per second."""

    def __init__(self, read_progress: Callable[[], RelayProgress]) -> None:
        self.read_progress, self.stop_event = read_progress, threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *exc: object) -> None:
        self.stop_event.set()
        self.thread.join()

    def _run(self) -> None:
        while not self.stop_event.wait(1.0):
            _print_message(self.read_progress())


if __name__ == "__main__":
    set_private_umask()
    Replicator(RunDir(Path(sys.argv[1])), sys.argv[2]).main()
    os._exit(0)  # a thread still waits for the node runner
