"""Test which filesystem operations work, and measure free space. Python 3.6, standard library only: sent with the doctor's probe."""

import errno
import os
import shutil
import uuid
from typing import Optional


def refused_call(directory: str, saves: bool = True, appends: bool = True) -> str:
    """Try a run's file operations in a directory; return the first that fails, and why, or ''.

    The trial files are deleted.

    ``saves``: also try renaming directories, as saves do; ``appends``: also try appending, as logs do and exports do not.
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
            return ""  # some file servers put files of their own into a directory
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
    """Flush a directory to its disk; ignored on filesystems that do not support it (CIFS, some FUSE)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(handle)


def disk_free_bytes(path: str) -> Optional[int]:
    """Return the free bytes for a user; None if the filesystem does not report its size."""
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else None


def disk_free_files(path: str) -> Optional[int]:
    """Return how many files can still be created; None if unlimited or unknown.

    A count of 0 counts as unknown: rclone reports it for disks that do accept files. Try to create one instead.
    """
    return os.statvfs(path).f_favail or None
