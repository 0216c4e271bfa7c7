"""What a filesystem does of the calls that a run makes. Python 3.6 and the standard library: it travels with the doctor's probe."""

import errno
import os
import shutil
import uuid
from typing import Optional


def refused_call(directory: str, saves: bool = True, appends: bool = True) -> str:
    """Try the calls of a run in a directory; returns what it cannot do there, and why, or ''.

    Nothing is left there, but for what others put into it and keep.

    ``saves``: also those of a save, which renames directories; ``appends``: those of logs, which an export has not.
    """
    place = os.path.join(directory, ".llama405b-trial-" + uuid.uuid4().hex)
    file, other = os.path.join(place, "file"), os.path.join(place, "other")
    renamed = place + "-renamed"
    what = "make directories"
    try:
        os.mkdir(place, 0o700)
        what = "write and fsync files"
        _write(file, os.O_CREAT | os.O_EXCL)
        _write(other, os.O_CREAT)
        if appends:
            what = "append to files"
            _write(file, os.O_APPEND)
        what = "rename files over others"
        os.replace(other, file)
        what = "fsync directories"
        sync_directory(place)
        if saves:
            what = "rename directories"
            os.rename(place, renamed)
        what = "delete files"
        os.unlink(os.path.join(renamed if saves else place, "file"))
        what = "delete directories"
        os.rmdir(renamed if saves else place)
    except OSError as error:
        if what == "delete directories" and error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
            return ""  # others put files into it, as some file servers do
        return "%s (%s)" % (what, error.strerror or error)
    finally:
        for left in (place, renamed):
            shutil.rmtree(left, ignore_errors=True)
    return ""


def _write(path: str, flags: int) -> None:
    handle = os.open(path, os.O_WRONLY | flags, 0o600)
    try:
        os.write(handle, b"llama405b\n")
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_directory(path: str) -> None:
    """Flush a directory to its disk; a filesystem that cannot (CIFS, some of FUSE) says EINVAL, and is taken at that."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(handle)


def disk_free_bytes(path: str) -> Optional[int]:
    """Return what a user may still write there; None where the filesystem does not say how large it is."""
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else None


def disk_free_files(path: str) -> Optional[int]:
    """Return how many files may still be made; None if that has no limit, or is not known.

    A count of none is not believed: rclone's is that, of a disk that takes files. Whether one can be made is tried.
    """
    return os.statvfs(path).f_favail or None
