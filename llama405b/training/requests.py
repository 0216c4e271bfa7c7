"""Requests to a live run: stop, save, or diagnose all ranks (a profile of some steps, memory, stacks of threads).

A request is a file that the operator's tools write and rank 0 finds between steps (``contract.records.RunRequest``); a stop is a signal.
Diagnoses are files in the run's directory. Knows files and signals; not how a run saves or trains.
"""

import dataclasses
import enum
import functools
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import resource_tracker
from pathlib import Path

import torch

from llama405b.contract.errors import reason_of
from llama405b.contract.files import read_record
from llama405b.contract.paths import RunDir
from llama405b.contract.records import MAX_PROFILED_STEPS, EventKind, RequestKind, RunRequest
from llama405b.distributed import collectives
from llama405b.distributed.ranks import Rank
from llama405b.training.context import RankContext


def write_stacks(run: RunDir, rank: Rank, step: int) -> Path:
    """Write the stacks of all threads of this process; return the file."""
    path = _make_parent(run.diagnosis("stacks", rank.index, step, "txt"))
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = (
        (names.get(ident, ident), traceback.format_stack(frame)) for ident, frame in sys._current_frames().items()
    )
    path.write_text("\n".join(f"{name}:\n{''.join(lines)}" for name, lines in stacks), encoding="utf-8")
    return path


def write_memory(run: RunDir, rank: Rank, step: int) -> Path:
    """Write the memory use of this rank; return the file.

    On CUDA this is torch's snapshot (open it with https://pytorch.org/memory_viz), else counters of the process in bytes.
    """
    if rank.on_gpu:
        path = _make_parent(run.diagnosis("memory", rank.index, step, "pickle"))
        torch.cuda.memory._dump_snapshot(str(path))
        return path
    path = _make_parent(run.diagnosis("memory", rank.index, step, "json"))
    fields = (line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    counts = {name: int(rest.split()[0]) * 1024 for name, rest in fields if rest.rstrip().endswith(" kB")}
    counts["most_resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    path.write_text(json.dumps(counts) + "\n", encoding="utf-8")
    return path


class Profile:
    """A trace of this rank for Perfetto, recorded from now until ``finish``."""

    def __init__(self, run: RunDir, rank: Rank, request: str, first_step: int, n_steps: int) -> None:
        self.request, self.last_step = request, first_step + n_steps - 1
        self.path = run.diagnosis("profile", rank.index, first_step, "json")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if rank.on_gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler = torch.profiler.profile(activities=activities)
        self.profiler.start()

    def finish(self) -> Path:
        """Write the trace under a temporary name, check that it is complete (torch reports no failure), and rename it."""
        self.profiler.stop()
        partial = _make_parent(self.path.with_suffix(".part"))
        partial.unlink(missing_ok=True)
        self.profiler.export_chrome_trace(str(partial))
        if not _last_bytes(partial).rstrip().endswith(b"}"):
            partial.unlink(missing_ok=True)
            raise OSError("torch did not write the whole trace")
        return partial.replace(self.path)


def _last_bytes(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 100))
        return file.read()


def _make_parent(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


POLL_INTERVAL_S = 1.0  # listing a directory on a network disk is slow


class StopSignal:
    """Whether the node runner asked this rank to save and stop.

    The node runner sends SIGUSR1. SIGTERM must end a rank without waiting for a step: torchrun sends it to the survivors of a failure.
    Slurm also sends SIGTERM, to every process of a job that it preempts, and then leaves some time to save. So under Slurm the node
    runner starts all ranks with SIGTERM blocked, and a thread checks who sent it; a Python handler could not run while the rank waits
    in a collective.
    """

    def __init__(self) -> None:
        self.is_received = False
        signal.signal(signal.SIGUSR1, self._receive)
        if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
            resource_tracker.ensure_running()  # its start unblocks SIGTERM: start it now, and not with the first worker
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_end_with_torchrun, name="sigterm", daemon=True).start()

    def _receive(self, *_: object) -> None:
        self.is_received = True


def _end_with_torchrun() -> None:
    """End this process on a SIGTERM from torchrun; ignore other senders."""
    torchrun = os.getppid()
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != torchrun:
        pass
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.kill(os.getpid(), signal.SIGTERM)


class Stop(enum.IntEnum):
    """Whether to stop after this step; the maximum over all ranks counts."""

    NO = 0
    REQUESTED = 1
    BUDGET_SPENT = 2  # the budget is


@dataclasses.dataclass(frozen=True, slots=True)
class AfterStepActions:
    """Actions that one rank requests after a step; all ranks do the maximum of each field over all ranks."""

    stop: int = 0  # ``Stop``
    save: int = 0  # a save is due or requested
    still_saving: int = 0  # the previous save is not finished
    after_save_failed_rank: int = 0  # number, from 1, of the rank whose ``checkpoint.after_save`` fails
    save_best: int = 0  # save: the evaluation loss is the lowest so far
    profile: int = 0  # number of steps
    memory: int = 0
    stacks: int = 0


class Requests:
    """Reads the requests of this attempt (earlier ones are ignored), and runs the diagnoses that they ask for."""

    def __init__(self, context: RankContext, stop: StopSignal) -> None:
        self.context, self.stop = context, stop
        self.seen = set(self._paths())
        self.last_poll_s = 0.0
        self.profile: Profile | None = None

    def poll(self) -> list[RunRequest]:
        """Return the requests since the last call, on rank 0; skip files that are not requests."""
        if not self.context.rank.is_rank0 or time.monotonic() < self.last_poll_s + POLL_INTERVAL_S:
            return []
        self.last_poll_s = time.monotonic()
        paths = [path for path in self._paths() if path not in self.seen]
        self.seen.update(paths)
        records = [(path, read_record(RunRequest, path)) for path in paths]
        return [request for path, request in records if request and request.id == path.stem]

    def _paths(self) -> list[Path]:
        try:
            return sorted(path for path in self.context.run.requests.iterdir() if path.suffix == ".json")
        except OSError:
            return []

    def requested_actions(self, requests: Iterable[RunRequest]) -> AfterStepActions:
        """Return the actions that these requests ask for."""
        values = dict.fromkeys(RequestKind, 0)
        for request in requests:
            values[request.kind] = max(values[request.kind], 1, min(request.steps, MAX_PROFILED_STEPS))
        return AfterStepActions(stop=int(self.stop.is_received), **{kind.value: n for kind, n in values.items()})

    def after_step(self, step: int, actions: AfterStepActions, requests: Sequence[RunRequest], *, ending: bool) -> None:
        """Write the requested diagnoses on all ranks and answer; ``requests``: the new ones, on rank 0."""
        run, rank = self.context.run, self.context.rank
        for kind, is_requested, write in (
            (RequestKind.STACKS, actions.stacks, write_stacks),
            (RequestKind.MEMORY, actions.memory, write_memory),
        ):
            if is_requested:
                path, reason = _write_on_all_ranks(functools.partial(write, run, rank, step))
                for request in [request for request in requests if request.kind is kind]:
                    self._answer(request.id, step, path, reason)
        self._finish_profile(step, ending=ending)
        self._begin_profile(requests, actions.profile, step)

    def _finish_profile(self, step: int, *, ending: bool) -> None:
        """Write the profile if this was its last step, or the run ends."""
        if self.profile and (ending or step >= self.profile.last_step):
            path, reason = _write_on_all_ranks(self.profile.finish)
            request_id, self.profile = self.profile.request, None
            self._answer(request_id, step, path, reason)

    def _begin_profile(self, requests: Sequence[RunRequest], n_steps: int, step: int) -> None:
        """Start a requested profile; only one runs at a time."""
        ids = [request.id for request in requests if request.kind is RequestKind.PROFILE]
        if n_steps and not self.profile:
            profile_ids, ids = ids[:1], ids[1:]
            self.profile = Profile(self.context.run, self.context.rank, "".join(profile_ids), step + 1, n_steps)
        for request in ids:
            self._answer(request, step, None, "another profile is being taken")

    def _answer(self, request_id: str, step: int, path: Path | None, reason: str) -> None:
        self.context.journal.write_event(EventKind.ANSWERED, step=step, path=path, request=request_id, detail=reason)


def _write_on_all_ranks(write: Callable[[], Path]) -> tuple[Path | None, str]:
    """Write a file on every rank; when all are done return (path, "") or (path or None, reason why one is missing).

    A full disk must not end the run.
    """
    path, reason = None, ""
    try:
        path = write()
    except OSError as error:
        reason = f"the file could not be written ({reason_of(error)})"
    [is_missing] = collectives.all_reduce_max([int(path is None)])
    if is_missing and path:
        reason = "another rank could not write its file"
    return path, reason
