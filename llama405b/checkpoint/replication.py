"""Act on a finished save: have it copied to the next host of the ring, and run the user's command.

A process of the node runner makes the copies. The owner of a directory runs the command there, once for each checkpoint, oldest first,
and records for which it has succeeded: the next attempt continues with the others. A command that fails is retried, and later
checkpoints wait for it. Knows owners and files.
"""

import collections
import contextlib
import dataclasses
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist

from llama405b.checkpoint.store import Store
from llama405b.contract.checkpoints import Copied, Endpoint, Ring, step_of
from llama405b.contract.errors import UserError, counted, given, reason_of
from llama405b.contract.files import read_record, write_json
from llama405b.contract.paths import RunDir
from llama405b.distributed import collectives

FOUND_WITHIN_S = 30.0


class Replication:
    """The copies of a run's checkpoints: each host's part is copied to the next host."""

    def __init__(self, store: Store) -> None:
        """Join the ring, unless there is no other host.

        Raises:
            UserError: On every rank: the process that copies is not running on one of the hosts.
        """
        self.store, owners = store, store.owners
        self.everywhere = self.step = self.resumed = 0
        self.ring: Ring | None = None
        self.active = len(owners) > 1
        if not self.active:
            return
        spots = collectives.all_gather_objects(self._spot() if store.is_owner else None, Endpoint | None)
        with collectives.raise_on_all_ranks():
            if store.is_owner and spots[store.me.rank] is None:
                raise UserError(
                    f"--checkpoint.replicas: no process copies checkpoints on {store.me.host}; start the run with llama405b launch, "
                    "or use --checkpoint.replicas 0"
                )
        if store.is_owner:
            at = owners.index(store.me.rank)
            after = spots[owners[(at + 1) % len(owners)]]
            assert after
            before = store.hosts[owners[at - 1]]
            self.ring = Ring(store.me.attempt, before, after, str(store.root.resolve()), store.run.name, store.keep)

    def begin(self, resumed: int) -> None:
        """Request copies from now on; ``resumed``: the step that the run resumed from (0: none), which may have copies."""
        self.resumed = resumed
        self._tell()

    @property
    def spared(self) -> set[int]:
        """The steps that must not be deleted: the newest that was copied, and the one that is being copied."""
        return {self.everywhere or self.resumed, self.step} if self.active else set()

    def after_save(self, step: int, group: dist.ProcessGroup | None = None) -> None:
        """Request a copy of this step from all hosts, once they have copied the previous one.

        All hosts copy the same step: if each chose its own, no copied step might be complete when a host is lost.
        """
        if not self.active:
            return
        if self.survey(group) == self.step:
            self.step = step
        self._tell()

    def survey(self, group: dist.ProcessGroup | None = None) -> int:
        """Return the newest step that every host has copied to the next one; 0 if there is none. A collective."""
        copied = None
        if self.store.is_owner:
            read = read_record(Copied, self.store.run.copied(self.store.me.host))
            copied = read if read and read.attempt == self.store.me.attempt else Copied()
        newest = min(
            (each.step for each in collectives.all_gather_objects(copied, Copied | None, group) if each), default=0
        )
        if newest > self.everywhere:
            self.everywhere = newest
            self._tell()
        return self.everywhere

    def _tell(self) -> None:
        if self.ring:
            self.ring = dataclasses.replace(self.ring, step=self.step, everywhere=self.everywhere)
            with contextlib.suppress(OSError):  # it is written again after the next save
                write_json(self.store.run.ring(self.store.me.host), self.ring)

    def _spot(self) -> Endpoint | None:
        """Wait until this host's copying process has published its endpoint; None after a timeout."""
        deadline = time.monotonic() + FOUND_WITHIN_S
        while True:
            spot = read_record(Endpoint, self.store.run.spot(self.store.me.host))
            if spot and spot.attempt == self.store.me.attempt:
                return spot
            if time.monotonic() > deadline:
                return None
            time.sleep(0.1)


RETRY_S = (5.0, 30.0, 120.0, 600.0)  # between tries; the last value repeats
MOST_WAITING = 2  # checkpoints, including the one that it runs for; with more, the command does not keep up
TRIES_AT_END = 3  # of the command after the last step
ENDS_WITHIN_S = 5.0  # to wait after closing, after SIGTERM, and after SIGKILL

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """The checkpoints for which the command has succeeded: ``status/HOST.after-save``."""

    digests: Mapping[str, str]  # of manifests, by name


class AfterSave:
    """Runs the user's command for each checkpoint, in a thread that ``begin`` starts."""

    def __init__(self, command: str, run: RunDir, host: str, say: Say, limit_s: float) -> None:
        """``limit_s``: how long the command may take for one checkpoint."""
        self.command, self.run, self.host, self.say, self.limit_s = command, run, host, say, limit_s
        record = read_record(Done, run.after_save(host))
        self.done = dict(record.digests) if record else {}
        self.waiting = collections.deque[tuple[Path, str]]()  # with the digest of its manifest, oldest first
        self.succeeded = collections.deque[tuple[int, float]]()  # steps and seconds, not reported yet
        self.fault = ""  # why the command failed for the oldest checkpoint, or that it is too slow; "": neither
        self.tries, self.failures = 0, 0  # failed tries: for the oldest checkpoint, and in all
        self.hurry, self.most = False, math.inf  # no more steps: retry at once, up to this many failures
        self.pid, self.began = 0, 0.0  # of the running command; 0: none runs
        self.news, self.is_over = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._work, name="after-save", daemon=True)

    @property
    def pending(self) -> frozenset[int]:
        """The steps of the checkpoints for which the command has not succeeded yet."""
        return frozenset(step_of(path) for path, _ in list(self.waiting))

    def begin(self, present: Mapping[Path, str]) -> None:
        """Start the thread, with the checkpoints that exist already and the digests of their manifests."""
        self.done = {path.name: digest for path, digest in present.items() if self.done.get(path.name) == digest}
        self.waiting.extend(entry for entry in present.items() if entry[0].name not in self.done)
        self.thread.start()

    def landed(self, path: Path, digest: str) -> None:
        """Queue a checkpoint for the command."""
        self.waiting.append((path, digest))
        if self.pid and len(self.waiting) > MOST_WAITING and not self.fault:
            took_s, behind = time.monotonic() - self.began, len(self.waiting) - 1
            self.fault = f"still running after {took_s:.0f} s, and {counted(behind, 'checkpoint')} wait for it"
        self.news.set()

    def results(self) -> list[tuple[int, float]]:
        """Return the step and the seconds of each success since the last call."""
        return [self.succeeded.popleft() for _ in range(len(self.succeeded))]

    def hasten(self) -> None:
        """Retry at once, and soon after each failure: training is over and waits for this alone."""
        self.most, self.hurry = self.failures + TRIES_AT_END, True
        self.news.set()

    @property
    def goes_on(self) -> bool:
        """Whether checkpoints are waiting, and the command has not failed too often since ``hasten``."""
        return bool(self.waiting) and self.failures < self.most and self.thread.is_alive()

    def left_words(self) -> str:
        """Describe for which checkpoints the command has not run, and why."""
        more = given(" and {} more", len(self.waiting) - 1)
        return f"{self.waiting[0][0]}{more} on {self.host}{given(' ({})', self.fault)}"

    def close(self) -> None:
        """End the thread; kill the running command if it does not end soon."""
        self.is_over.set()
        self.news.set()
        if not self.thread.ident:
            return
        for number in (0, signal.SIGTERM, signal.SIGKILL):
            if number and (pid := self.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, number)
            self.thread.join(ENDS_WITHIN_S)
            if not self.thread.is_alive():
                return

    def _work(self) -> None:
        while not self.is_over.is_set():
            if not self.waiting:
                self.news.wait()
                self.news.clear()
            elif not self._tried(*self.waiting[0]):
                self.news.wait(RETRY_S[0 if self.hurry else min(self.tries, len(RETRY_S)) - 1])
                self.news.clear()  # a new checkpoint, or the end, also ends the wait

    def _tried(self, path: Path, digest: str) -> bool:
        """Run the command for a checkpoint; return whether it succeeded. A filesystem error is a failure too."""
        try:
            self.fault = self._run(path, digest)
        except OSError as error:
            self.fault = reason_of(error)
        if not self.fault:
            self.waiting.popleft()
            self.tries = 0
            return True
        self.tries, self.failures = self.tries + 1, self.failures + 1
        if not self.is_over.is_set():
            with contextlib.suppress(OSError):  # the disk behind standard output may be full
                self.say(f"after-save: {path.name} on {self.host}: {self.fault}; will retry")
        return False

    def _run(self, path: Path, digest: str) -> str:
        """Run the command, unless the checkpoint was deleted; return why it failed, or ''."""
        if not path.exists():
            return ""
        began, step = time.monotonic(), step_of(path)
        env = {
            "LLAMA405B_CHECKPOINT": str(path.absolute()),
            "LLAMA405B_STEP": str(step),
            "LLAMA405B_RUN": self.run.name,
        }
        if fault := self._shell(os.environ | env):
            return fault
        self.done[path.name] = digest
        with contextlib.suppress(OSError):  # then it runs twice, rather than never
            write_json(self.run.after_save(self.host), Done(self.done))
        self.succeeded.append((step, time.monotonic() - began))
        return ""

    def _shell(self, env: Mapping[str, str]) -> str:
        """Run the command in its own process group; return why it failed, or ''."""
        silent = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
        self.began = time.monotonic()
        argv = ["/bin/sh", "-c", self.command]  # under Slurm, SIGTERM is blocked in this process, but not there
        self.pid = os.posix_spawn(argv[0], argv, env, file_actions=silent, setpgroup=0, setsigmask=())
        late = threading.Timer(self.limit_s, os.killpg, (self.pid, signal.SIGKILL))
        late.start()
        # WNOWAIT leaves a zombie, so that the timer cannot kill another process that got the same pid
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        late.cancel()
        late.join()
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGKILL and time.monotonic() - self.began >= self.limit_s:
            return f"killed after {self.limit_s:g} s (checkpoint.after_save_limit)"
        if code < 0:
            return f"killed by signal {-code}"
        return given("exit code {}", code)
