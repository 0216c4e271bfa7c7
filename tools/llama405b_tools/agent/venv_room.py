"""Check whether the packages of an environment fit on this machine's disks, before pip fills them. Standard library.

``python -m llama405b_tools.agent.venv_room DOWNLOAD_GB UNPACKED_GB`` (or ``… WHEELHOUSE``), run by the environment's own
Python, prints what is short and exits with 1. pip keeps downloads in its cache and, until everything is unpacked, in a
temporary directory.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

GB = 10**9
DiskNeed = tuple[Path, float]  # a directory, and bytes that will be in it


def main(args: Sequence[str]) -> int:
    """Print which disk has too little room; return the exit code."""
    if shortage := find_shortage(_wheel_needs(Path(*args)) if len(args) == 1 else _download_needs(*map(float, args))):
        print(shortage)
    return int(bool(shortage))


def _wheel_needs(wheelhouse: Path) -> list[DiskNeed]:
    newest_wheels = {path.name.split("-")[0]: path for path in sorted(wheelhouse.glob("*.whl"), key=os.path.getmtime)}
    sizes = [info.file_size for path in newest_wheels.values() for info in zipfile.ZipFile(path).infolist()]
    return [(Path(sys.prefix), sum(sizes))]


def _download_needs(download_gb: float, unpacked_gb: float) -> list[DiskNeed]:
    needs = [(Path(sys.prefix), unpacked_gb * GB), (Path(tempfile.gettempdir(), "pip-unpack"), download_gb * GB)]
    cache = subprocess.run(
        [sys.executable, "-I", "-m", "pip", "cache", "dir"], capture_output=True, text=True, check=False
    )
    if cache.stdout.startswith("/"):  # else it is disabled
        needs.append((Path(cache.stdout.strip()), download_gb * GB))
    return needs


def find_shortage(needs: Sequence[DiskNeed]) -> str:
    """Return which disk has too little room for its packages; '' if all have enough.

    Files that are already there, as after an interrupted setup, count.
    """
    disks: dict[int, list[DiskNeed]] = {}
    for path, size in needs:
        disks.setdefault(_nearest_existing(path).stat().st_dev, []).append((path, size))
    for group in disks.values():
        disk = os.statvfs(_nearest_existing(group[0][0]))
        free_bytes = disk.f_bavail * disk.f_frsize
        if not disk.f_blocks or sum(size for _, size in group) <= free_bytes:
            continue
        missing_bytes = sum(max(0, size - directory_bytes(path)) for path, size in group)
        if missing_bytes > free_bytes:
            names = ", ".join(str(_nearest_existing(path)) for path, _ in group)
            return f"the packages need {missing_bytes / GB:.1f} GB more in {names}, but only {free_bytes / GB:.1f} GB are free"
    return ""


def directory_bytes(folder: Path) -> int:
    """Return the bytes of the files below a directory; 0 if it does not exist."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a host that shares the directory may be at work
                total += os.lstat(os.path.join(root, name)).st_size  # noqa: PTH118 - of tens of thousands
    return total


def _nearest_existing(path: Path) -> Path:
    """Return the directory, or its nearest existing parent."""
    return next(parent for parent in (path, *path.parents) if parent.exists())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
