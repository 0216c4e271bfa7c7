"""Diagnoses of a rank, on request: a profile of some steps, its memory, its threads' stacks. Files in the run's directory."""

import json
import resource
import sys
import threading
import traceback
from pathlib import Path

import torch

from llama405b.contract.paths import RunDir
from llama405b.distributed.ranks import Rank


def write_stacks(run: RunDir, me: Rank, step: int) -> Path:
    """Write the stack of every thread of this process; returns the file."""
    path = _place(run.diagnosis("stacks", me.rank, step, "txt"))
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = ((names.get(ident, ident), traceback.format_stack(top)) for ident, top in sys._current_frames().items())
    path.write_text("\n".join(f"{name}:\n{''.join(lines)}" for name, lines in stacks), encoding="utf-8")
    return path


def write_memory(run: RunDir, me: Rank, step: int) -> Path:
    """Write what this rank's memory holds; returns the file.

    On CUDA this is torch's snapshot (open it with https://pytorch.org/memory_viz), else the process's counts, in bytes.
    """
    if me.on_gpu:
        path = _place(run.diagnosis("memory", me.rank, step, "pickle"))
        torch.cuda.memory._dump_snapshot(str(path))
        return path
    path = _place(run.diagnosis("memory", me.rank, step, "json"))
    fields = (line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    counts = {name: int(rest.split()[0]) * 1024 for name, rest in fields if rest.rstrip().endswith(" kB")}
    counts["most_resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    path.write_text(json.dumps(counts) + "\n", encoding="utf-8")
    return path


class Profile:
    """Records a trace of this rank for Perfetto, from now until ``finish``."""

    def __init__(self, run: RunDir, me: Rank, request: str, first_step: int, steps: int) -> None:
        self.request, self.last_step = request, first_step + steps - 1
        self.path = run.diagnosis("profile", me.rank, first_step, "json")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if me.on_gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler = torch.profiler.profile(activities=activities)
        self.profiler.start()

    def finish(self) -> Path:
        """Write the trace, first under another name: torch reports no failure, so its end is looked for.

        Raises:
            OSError: It is not there, or cut short.
        """
        self.profiler.stop()
        part = _place(self.path.with_suffix(".part"))
        part.unlink(missing_ok=True)
        self.profiler.export_chrome_trace(str(part))
        if not _last_bytes(part).rstrip().endswith(b"}"):
            part.unlink(missing_ok=True)
            raise OSError("torch did not write the whole trace")
        return part.replace(self.path)


def _last_bytes(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 100))
        return file.read()


def _place(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
