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
from llama405b.contract.checkpoints import CopiedStep, Endpoint, Ring, step_of
from llama405b.contract.errors import UserError, fmt_if, pluralize, reason_of
from llama405b.contract.files import read_record, write_json
from llama405b.contract.paths import RunDir
from llama405b.distributed import collectives

ENDPOINT_TIMEOUT_S = 30.0


class Replication:
    """The copies of a run's checkpoints: each host's part is copied to the next host."""

    def __init__(self, store: Store) -> None:
        """Join the ring; there must be another host.

        Raises:
            UserError: On every rank: the process that copies is not running on one of the hosts.
        """
        self.store, owners = store, store.owners
        self.replicated_step = self.step = self.resume_step = 0
        self.ring: Ring | None = None
        endpoints = collectives.all_gather_objects(
            self._wait_for_endpoint() if store.is_owner else None, Endpoint | None
        )
        with collectives.raise_on_all_ranks():
            if store.is_owner and endpoints[store.rank.index] is None:
                raise UserError(
                    f"--checkpoint.replicas: no process copies checkpoints on {store.rank.host}; start the run with llama405b launch, "
                    "or use --checkpoint.replicas 0"
                )
        if store.is_owner:
            index = owners.index(store.rank.index)
            next_endpoint = endpoints[owners[(index + 1) % len(owners)]]
            assert next_endpoint
            previous_host = store.hosts[owners[index - 1]]
            self.ring = Ring(
                store.rank.attempt, previous_host, next_endpoint, str(store.root.resolve()), store.run.name, store.keep
            )

    def begin(self, resume_step: int) -> None:
        """Request copies from now on; ``resume_step``: the step that the run resumed from (0: none), which may have copies."""
        self.resume_step = resume_step
        self._publish_ring()

    @property
    def protected_steps(self) -> set[int]:
        """The steps that must not be deleted: the newest that was copied, and the one that is being copied."""
        return {self.replicated_step or self.resume_step, self.step}

    def request_copies(self, step: int, group: dist.ProcessGroup | None = None) -> None:
        """Request a copy of this step from all hosts, once they have copied the previous one.

        All hosts copy the same step: if each chose its own, no copied step might be complete when a host is lost.
        """
        if self.update_replicated_step(group) == self.step:
            self.step = step
        self._publish_ring()

    def update_replicated_step(self, group: dist.ProcessGroup | None = None) -> int:
        """Return the newest step that every host has copied to the next one; 0 if there is none. A collective."""
        local_record = None
        if self.store.is_owner:
            record = read_record(CopiedStep, self.store.run.copied(self.store.rank.host))
            local_record = record if record and record.attempt == self.store.rank.attempt else CopiedStep()
        newest = min(
            (
                host_record.step
                for host_record in collectives.all_gather_objects(local_record, CopiedStep | None, group)
                if host_record
            ),
            default=0,
        )
        if newest > self.replicated_step:
            self.replicated_step = newest
            self._publish_ring()
        return self.replicated_step

    def _publish_ring(self) -> None:
        if self.ring:
            self.ring = dataclasses.replace(self.ring, step=self.step, everywhere=self.replicated_step)
            with contextlib.suppress(OSError):  # it is written again after the next save
                write_json(self.store.run.ring(self.store.rank.host), self.ring)

    def _wait_for_endpoint(self) -> Endpoint | None:
        """Wait until this host's copying process has published its endpoint; None after a timeout."""
        deadline = time.monotonic() + ENDPOINT_TIMEOUT_S
        while True:
            endpoint = read_record(Endpoint, self.store.run.spot(self.store.rank.host))
            if endpoint and endpoint.attempt == self.store.rank.attempt:
                return endpoint
            if time.monotonic() > deadline:
                return None
            time.sleep(0.1)


RETRY_S = (5.0, 30.0, 120.0, 600.0)  # between tries; the last value repeats
MAX_QUEUED = 2  # checkpoints, including the one that it runs for; with more, the command does not keep up
MAX_FINAL_FAILURES = 3  # of the command after the last step
JOIN_TIMEOUT_S = 5.0  # to wait after closing, after SIGTERM, and after SIGKILL

LogFunction = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class AfterSaveRecord:
    """The checkpoints for which the command has succeeded: ``status/HOST.after-save``."""

    digests: Mapping[str, str]  # of manifests, by name


class AfterSave:
    """Runs the user's command for each checkpoint, in a thread that ``begin`` starts."""

    def __init__(self, command: str, run: RunDir, host: str, say: LogFunction, limit_s: float) -> None:
        """``limit_s``: how long the command may take for one checkpoint."""
        self.command, self.run, self.host, self.say, self.limit_s = command, run, host, say, limit_s
        record = read_record(AfterSaveRecord, run.after_save(host))
        self.succeeded_digests = dict(record.digests) if record else {}
        self.queue = collections.deque[tuple[Path, str]]()  # with the digest of its manifest, oldest first
        self.successes = collections.deque[tuple[int, float]]()  # steps and seconds, not reported yet
        self.fault = ""  # why the command failed for the oldest checkpoint, or that it is too slow; "": neither
        self.tries, self.failures = 0, 0  # failed tries: for the oldest checkpoint, and in all
        self.is_final, self.max_failures = False, math.inf  # no more steps: retry at once, up to this many failures
        self.pid, self.start_s = 0, 0.0  # of the running command; 0: none runs
        self.wake_up, self.is_closed = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run_queue, name="after-save", daemon=True)

    @property
    def pending_steps(self) -> frozenset[int]:
        """The steps of the checkpoints for which the command has not succeeded yet."""
        return frozenset(step_of(path) for path, _ in list(self.queue))

    def begin(self, checkpoint_digests: Mapping[Path, str]) -> None:
        """Start the thread, with the checkpoints that exist already and the digests of their manifests."""
        self.succeeded_digests = {
            path.name: digest
            for path, digest in checkpoint_digests.items()
            if self.succeeded_digests.get(path.name) == digest
        }
        self.queue.extend(entry for entry in checkpoint_digests.items() if entry[0].name not in self.succeeded_digests)
        self.thread.start()

    def enqueue(self, path: Path, digest: str) -> None:
        """Queue a checkpoint for the command."""
        self.queue.append((path, digest))
        if self.pid and len(self.queue) > MAX_QUEUED and not self.fault:
            elapsed_s, n_behind = time.monotonic() - self.start_s, len(self.queue) - 1
            self.fault = f"still running after {elapsed_s:.0f} s, and {pluralize(n_behind, 'checkpoint')} wait for it"
        self.wake_up.set()

    def pop_successes(self) -> list[tuple[int, float]]:
        """Return the step and the seconds of each success since the last call."""
        return [self.successes.popleft() for _ in range(len(self.successes))]

    def retry_now(self) -> None:
        """Retry at once, and soon after each failure: training is over and waits for this alone."""
        self.max_failures, self.is_final = self.failures + MAX_FINAL_FAILURES, True
        self.wake_up.set()

    @property
    def has_work(self) -> bool:
        """Whether checkpoints are waiting, and the command has not failed too often since ``retry_now``."""
        return bool(self.queue) and self.failures < self.max_failures and self.thread.is_alive()

    def describe_pending(self) -> str:
        """Describe for which checkpoints the command has not run, and why."""
        more = fmt_if(" and {} more", len(self.queue) - 1)
        return f"{self.queue[0][0]}{more} on {self.host}{fmt_if(' ({})', self.fault)}"

    def close(self) -> None:
        """End the thread; kill the running command if it does not end soon."""
        self.is_closed.set()
        self.wake_up.set()
        if not self.thread.ident:
            return
        for signal_number in (0, signal.SIGTERM, signal.SIGKILL):
            if signal_number and (pid := self.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal_number)
            self.thread.join(JOIN_TIMEOUT_S)
            if not self.thread.is_alive():
                return

    def _run_queue(self) -> None:
        while not self.is_closed.is_set():
            if not self.queue:
                self.wake_up.wait()
                self.wake_up.clear()
            elif not self._try_command(*self.queue[0]):
                self.wake_up.wait(RETRY_S[0 if self.is_final else min(self.tries, len(RETRY_S)) - 1])
                self.wake_up.clear()  # a new checkpoint, or the end, also ends the wait

    def _try_command(self, path: Path, digest: str) -> bool:
        """Run the command for a checkpoint; return whether it succeeded. A filesystem error is a failure too."""
        try:
            self.fault = self._run_command(path, digest)
        except OSError as error:
            self.fault = reason_of(error)
        if not self.fault:
            self.queue.popleft()
            self.tries = 0
            return True
        self.tries, self.failures = self.tries + 1, self.failures + 1
        if not self.is_closed.is_set():
            with contextlib.suppress(OSError):  # the disk behind standard output may be full
                self.say(f"after-save: {path.name} on {self.host}: {self.fault}; will retry")
        return False

    def _run_command(self, path: Path, digest: str) -> str:
        """Run the command, unless the checkpoint was deleted; return why it failed, or ''."""
        if not path.exists():
            return ""
        start_s, step = time.monotonic(), step_of(path)
        env = {
            "LLAMA405B_CHECKPOINT": str(path.absolute()),
            "LLAMA405B_STEP": str(step),
            "LLAMA405B_RUN": self.run.name,
        }
        if fault := self._run_shell(os.environ | env):
            return fault
        self.succeeded_digests[path.name] = digest
        with contextlib.suppress(OSError):  # then it runs twice, rather than never
            write_json(self.run.after_save(self.host), AfterSaveRecord(self.succeeded_digests))
        self.successes.append((step, time.monotonic() - start_s))
        return ""

    def _run_shell(self, env: Mapping[str, str]) -> str:
        """Run the command in its own process group; return why it failed, or ''."""
        null_stdin = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
        self.start_s = time.monotonic()
        argv = ["/bin/sh", "-c", self.command]  # under Slurm, SIGTERM is blocked in this process, but not there
        self.pid = os.posix_spawn(argv[0], argv, env, file_actions=null_stdin, setpgroup=0, setsigmask=())
        kill_timer = threading.Timer(self.limit_s, os.killpg, (self.pid, signal.SIGKILL))
        kill_timer.start()
        # WNOWAIT leaves a zombie, so that the timer cannot kill another process that got the same pid
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        kill_timer.cancel()
        kill_timer.join()
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGKILL and time.monotonic() - self.start_s >= self.limit_s:
            return f"killed after {self.limit_s:g} s (checkpoint.after_save_limit)"
        if code < 0:
            return f"killed by signal {-code}"
        return fmt_if("exit code {}", code)
