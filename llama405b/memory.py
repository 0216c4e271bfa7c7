"""How much CPU memory is free."""

from pathlib import Path

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
