"""How much CPU memory is free, and how much memory this rank has held at most."""

import resource
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """Return how much memory this machine, or this container, can still give."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit, used = ((CGROUP / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        caches = dict(line.split() for line in (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
    except OSError:  # another version of cgroups, or the machine's own
        return free
    if limit == "max":
        return free
    return max(0, min(free, int(limit) - int(used) + int(caches.get("inactive_file", 0))))


def peak_bytes(*, on_gpu: bool) -> int:
    """Return the most that this rank held so far: of its GPU, with what the allocator keeps; else of CPU memory."""
    if on_gpu:
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
