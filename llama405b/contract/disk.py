"""Test which filesystem operations work, and measure free space. Python 3.6, standard library only: sent with the doctor's probe."""

import errno
import os
import shutil
import uuid
from typing import Optional


def unsupported_operation(directory: str, saves: bool = True, appends: bool = True) -> str:
    """Try a run's file operations in a directory; return the first that fails, and why, or ''.

    The trial files are deleted.

    ``saves``: also try renaming directories, as saves do; ``appends``: also try appending, as logs do and exports do not.
    """
    trial_dir = os.path.join(directory, ".llama405b-trial-" + uuid.uuid4().hex)
    file, other_file = os.path.join(trial_dir, "file"), os.path.join(trial_dir, "other")
    renamed = trial_dir + "-renamed"
    operation = "make directories"
    try:
        os.mkdir(trial_dir, 0o700)
        operation = "write and fsync files"
        _write(file, os.O_CREAT | os.O_EXCL)
        _write(other_file, os.O_CREAT)
        if appends:
            operation = "append to files"
            _write(file, os.O_APPEND)
        operation = "rename files over others"
        os.replace(other_file, file)
        operation = "fsync directories"
        sync(trial_dir)
        if saves:
            operation = "rename directories"
            os.rename(trial_dir, renamed)
        operation = "delete files"
        os.unlink(os.path.join(renamed if saves else trial_dir, "file"))
        operation = "delete directories"
        os.rmdir(renamed if saves else trial_dir)
    except OSError as error:
        if operation == "delete directories" and error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
            return ""  # some file servers put files of their own into a directory
        return "%s (%s)" % (operation, error.strerror or error)
    finally:
        for leftover in (trial_dir, renamed):
            shutil.rmtree(leftover, ignore_errors=True)
    return ""


def _write(path: str, flags: int) -> None:
    handle = os.open(path, os.O_WRONLY | flags, 0o600)
    try:
        os.write(handle, b"llama405b\n")
        os.fsync(handle)
    finally:
        os.close(handle)


def sync(path: str) -> None:
    """Flush a file or a directory to its disk; ignored on filesystems that do not support it (CIFS, some FUSE: directories)."""
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
