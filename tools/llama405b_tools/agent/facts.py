"""Facts of this machine that several programs need. Sent before the sampler and doctor's probe: any Python from 3.6 on, nothing of ours."""

import glob
import os
import re
import socket
from typing import Dict, Iterator, List, Optional, Tuple

MAX_FILE_BYTES = 2 << 20  # the kernel gives nothing of /proc/sys to who asks for more than 4 MiB
MARKER = "LLAMA405B_NODE"  # in the environment of a run's processes: <run directory>:<host>
CGROUP = "/sys/fs/cgroup/"


def read_text(path: str, default: str = "") -> str:
    """Return a small file's text."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(MAX_FILE_BYTES)
    except (OSError, ValueError):
        return default


def machine_name() -> str:
    """Return what is equal for two names of one machine, and new after a boot."""
    return read_text("/proc/sys/kernel/random/boot_id").strip() + socket.gethostname()


def memory_sizes() -> Dict[str, int]:
    """Return the sizes in /proc/meminfo in bytes, by name; {} if it cannot be read."""
    sizes = {}
    for line in read_text("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if rest.endswith(" kB"):
            sizes[name] = int(rest.split()[0]) * 1024
    return sizes


def memory() -> Tuple[Optional[int], Optional[int]]:
    """Return bytes of memory in total and available, within the limit of a container; None: unknown.

    What a container uses includes files in the page cache; those not used lately count as available, as the kernel does.
    """
    sizes = memory_sizes()
    total, available = sizes.get("MemTotal"), sizes.get("MemAvailable")
    limit = read_text(CGROUP + "memory.max").strip()
    if total is None or not limit.isdigit() or int(limit) >= total:
        return total, available
    total = int(limit)
    if available is None:
        return total, None
    used = read_text(CGROUP + "memory.current").strip()
    cached = re.search(r"^inactive_file (\d+)$", read_text(CGROUP + "memory.stat"), re.M)
    if used.isdigit() and cached:
        available = min(available, max(0, total - int(used) + int(cached.group(1))))
    return total, min(available, total)


def disk_space(path: str) -> Optional[Tuple[int, int]]:
    """Return free and total bytes of the disk of a directory; None if it cannot be queried, or does not say."""
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    return (stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize) if stat.f_blocks else None


def rdma_ports() -> Iterator[Tuple[str, Dict[str, str]]]:
    """Yield each port of the RDMA devices: its directory, and its device, number, state and rate as the kernel writes them."""
    for path in sorted(glob.glob("/sys/class/infiniband/*/ports/*")):
        device, _, port = path.split("/")[-3:]
        state, rate = (read_text(path + "/" + name).strip() for name in ("state", "rate"))
        yield path, {"device": device, "port": port, "state": state, "rate": rate}


def pids() -> List[int]:
    """Return all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def environment(pid: int) -> List[bytes]:
    """Return a process's variables, as NAME=VALUE; [] if it is gone, or this user may not see them."""
    try:
        with open("/proc/%d/environ" % pid, "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def marked_processes() -> Dict[str, List[int]]:
    """Return the processes of every run here that this user may inspect, by <run directory>:<host>."""
    prefix = MARKER.encode() + b"="
    marked = {}  # type: Dict[str, List[int]]
    for pid in pids():
        for item in environment(pid):
            if item.startswith(prefix):
                marked.setdefault(os.fsdecode(item[len(prefix) :]), []).append(pid)
    return marked
