"""One writer per directory of checkpoints, on any filesystem that creates a file exclusively.

Leases are numbered, and the highest number counts. To take the directory over is to create the next number, which only one
process can; whoever held the one before finds out when it next asks. A holder that neither renews nor ends its lease
within ``STALE_S`` is taken for dead: by watching it, because clocks differ. flock would be simpler, but NFS does not keep it.

A holder also knows its directory by its lease. Where that is gone, so is the directory, or what was mounted there: nothing is written below
a mount point then.
"""

import contextlib
import dataclasses
import errno
import re
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from llama405b.contract.checkpoints import Lease
from llama405b.contract.errors import UserError
from llama405b.contract.files import read_record, write_json

RENEW_S = 15.0
STALE_S = 90.0  # more than NFS caches a directory (60 s) and a renewal takes
FILE = re.compile(r"lease-(\d{8})\.json")


class Holder:
    """This process, as the one that writes into a directory."""

    def __init__(self, root: Path, run: str, where: str, attempt: int) -> None:
        self.root, self.number = root, 0  # 0: nothing held
        self.lease = Lease(run, where, attempt, uuid.uuid4().hex)
        self.mount = ""  # where its filesystem is mounted
        self.say: Callable[[str], None] = print
        self.leaving = threading.Event()
        self.renewer = threading.Thread(target=self._renew, name="lease", daemon=True)

    def take(self, say: Callable[[str], None]) -> None:
        """Hold the directory from now on; waits while it is unclear whether another holder lives.

        Raises:
            UserError: Another run is writing there.
            OSError: The directory cannot be read or written.
        """
        while True:
            newest = self._newest()
            self._wait_for(newest, say)
            if self._create(newest + 1):
                break
        self.mount, self.say = mount_of(self.root), say
        for path in self.root.iterdir():
            if _number_of(path) in range(1, self.number):
                path.unlink(missing_ok=True)
        self.renewer.start()

    def check(self) -> None:
        """Raise if another process has taken the directory over; make it anew if it was removed.

        Raises:
            UserError: It has.
            OSError: The directory cannot be read, or its filesystem is not mounted.
        """
        if not self.number:
            return
        lost = self._is_lost()
        if lost and mount_of(self.root) != self.mount:
            raise OSError(errno.ENODEV, f"the filesystem on {self.mount} is not mounted any more")
        newest = self._newest()
        if newest > self.number or (lost and newest and not self._is_free(self._read(newest))):
            raise UserError(
                f"{self.root}: {_named(self._read(newest))} has taken over this directory, as this run was silent for "
                f"{STALE_S:.0f} s or was launched again; this attempt saves nothing more"
            )
        if lost:
            self._take_again(newest)

    def _take_again(self, newest: int) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        if not self._create(max(newest + 1, self.number)):
            self.check()  # another process was faster
            return
        self.say(f"{self.root}: was removed or emptied while this run held it; the run goes on saving there")

    def _is_lost(self) -> bool:
        """Whether the lease is not in the directory."""
        found = self._read(self.number)
        return not self._path(self.number).exists() if found is None else found.token != self.lease.token

    def end(self) -> None:
        """Let the next run have the directory at once."""
        if self.number and not self.leaving.is_set():
            self.leaving.set()
            self.renewer.join(RENEW_S)
            with contextlib.suppress(OSError):
                if not self._is_lost():
                    self._write(self.number, ended=True)

    def _wait_for(self, number: int, say: Callable[[str], None]) -> None:
        """Return once the directory is free to take; see ``take``."""
        known = self._read(number)
        if number == 0 or self._is_free(known):
            return
        say(f"{self.root}: {_named(known)} used this directory and may be alive; watching it for {STALE_S:.0f} s")
        deadline = time.monotonic() + STALE_S
        while time.monotonic() < deadline:
            time.sleep(min(1.0, STALE_S / 10))
            newest = self._newest()
            now = self._read(newest)
            if self._is_free(now):
                return
            if (newest, now) != (number, known):
                raise UserError(
                    f"--checkpoint.dir: {_named(now)} is writing checkpoints into {self.root}; stop it, or give this run its own"
                )

    def _is_free(self, held: Lease | None) -> bool:
        mine = self.lease
        return held is not None and (
            held.ended or ((held.run, held.where) == (mine.run, mine.where) and held.attempt < mine.attempt)
        )

    def _renew(self) -> None:
        while not self.leaving.wait(RENEW_S):
            with contextlib.suppress(OSError):  # the next time will do
                if self._newest() > self.number:
                    return
                if not self._is_lost():
                    self._write(self.number)

    def _newest(self) -> int:
        paths = self.root.iterdir() if self.root.exists() else ()
        return max(map(_number_of, paths), default=0)

    def _path(self, number: int) -> Path:
        return self.root / f"lease-{number:08d}.json"

    def _read(self, number: int) -> Lease | None:
        return read_record(Lease, self._path(number))

    def _create(self, number: int) -> bool:
        try:
            self._path(number).touch(exist_ok=False)
        except FileExistsError:
            return False
        try:
            self._write(number)
        except OSError:
            self._path(number).unlink(missing_ok=True)  # nobody is to wait for it
            raise
        self.number = number
        return True

    def _write(self, number: int, *, ended: bool = False) -> None:
        write_json(self._path(number), dataclasses.replace(self.lease, renewed=time.time(), ended=ended))


def mount_of(path: Path) -> str:
    """Return where the filesystem of a path is mounted, whether or not the path exists; '' if unknown (proc(5), mountinfo)."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    points = [re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), line.split()[4]) for line in lines]
    real = path.resolve()
    return max((point for point in points if real.is_relative_to(point)), key=len, default="")


def _number_of(path: Path) -> int:
    match = FILE.fullmatch(path.name)
    return int(match[1]) if match else 0


def _named(lease: Lease | None) -> str:
    if lease is None:
        return "another run"
    return f"run '{lease.run}' (attempt {lease.attempt}, {lease.where})"
