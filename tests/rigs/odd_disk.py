"""A filesystem that passes all on to a directory, but for what it is told to refuse or to say wrong. A program: FUSE in user space.

python odd_disk.py DIRECTORY MOUNTPOINT  and then, at any time, the names of ODDS in DIRECTORY.odd
"""

import contextlib
import errno
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import fuse

ODDS = {
    "no links": "link and symlink say EPERM (exFAT, some of SMB)",
    "no append": "O_APPEND says ENOTSUP (gcsfuse, goofys)",
    "no rename": "rename says ENOSYS",
    "no rename of directories": "that says ENOTSUP (object stores)",
    "no fsync of directories": "that says EINVAL (CIFS, many of FUSE)",
    "no O_DIRECT": "that says EINVAL",
    "no chmod": "chmod and chown say EPERM (CIFS)",
    "no size": "statvfs has zeros",
    "no inodes left": "statvfs says so, and files can be made (rclone)",
    "stale": "what is in a checkpoint says ESTALE",
    "quota": "write says EDQUOT",
    "full": "write says ENOSPC after the first 1 MiB of a file",
    "read-only": "what writes says EROFS",
    "two hours ahead": "times are",
    "strangers' files": "each new directory has some that are not ours, and one of them cannot be deleted",
}


REAL = {  # filesystems as they are
    "exFAT": "of 200 MB, as exfat-fuse mounts it",
    "overlay": "as containers have it",
    "tmpfs of 24 MB": "less than a checkpoint",
    "tmpfs of 90 files": "fewer than a run makes",
}
STRANGERS = (".nfs000000000001", ".DS_Store", "._manifest.json", "@eaDir", "Thumbs.db")


class OddDisk(fuse.Operations):
    """See ODDS."""

    def __init__(self, root):
        self.root = root
        self.odd = Path(f"{root}.odd")

    def is_odd(self, name):
        with contextlib.suppress(OSError):
            return name in self.odd.read_text().splitlines()
        return False

    def refuse(self, name, number):
        if self.is_odd(name):
            raise fuse.FuseOSError(number)

    def at(self, path):
        return os.path.join(self.root, path.lstrip("/"))

    def access(self, path, mode):
        if not os.access(self.at(path), mode):
            raise fuse.FuseOSError(errno.EACCES)

    def getattr(self, path, _file=None):
        if "/step-" in path and path.count("/") > 1:
            self.refuse("stale", errno.ESTALE)
        info = os.lstat(self.at(path))
        names = ("st_atime", "st_ctime", "st_gid", "st_mode", "st_mtime", "st_nlink", "st_size", "st_uid")
        found = {name: getattr(info, name) for name in names}
        if self.is_odd("two hours ahead"):
            found["st_mtime"] += 7200
            found["st_ctime"] += 7200
        return found

    def readdir(self, path, _file):
        return [".", "..", *os.listdir(self.at(path))]

    def readlink(self, path):
        return os.readlink(self.at(path))

    def mkdir(self, path, mode):
        self.refuse("read-only", errno.EROFS)
        os.mkdir(self.at(path), mode)
        if self.is_odd("strangers' files"):
            for name in STRANGERS:
                Path(self.at(path), name).write_bytes(b"x")

    def rmdir(self, path):
        self.refuse("read-only", errno.EROFS)
        os.rmdir(self.at(path))

    def unlink(self, path):
        self.refuse("read-only", errno.EROFS)
        if path.endswith(STRANGERS[0]):
            self.refuse("strangers' files", errno.EBUSY)
        os.unlink(self.at(path))

    def statfs(self, path):
        info = os.statvfs(self.at(path))
        names = (
            "f_bavail",
            "f_bfree",
            "f_blocks",
            "f_bsize",
            "f_favail",
            "f_ffree",
            "f_files",
            "f_frsize",
            "f_namemax",
        )
        found = {name: getattr(info, name) for name in names}
        if self.is_odd("no size"):
            found |= dict.fromkeys(("f_bavail", "f_bfree", "f_blocks", "f_files", "f_ffree", "f_favail"), 0)
        if self.is_odd("no inodes left"):
            found |= {"f_files": 10**9, "f_ffree": 0, "f_favail": 0}
        return found

    def symlink(self, name, target):
        self.refuse("no links", errno.EPERM)
        os.symlink(target, self.at(name))

    def link(self, name, target):
        self.refuse("no links", errno.EPERM)
        os.link(self.at(target), self.at(name))

    def rename(self, old, new):
        self.refuse("read-only", errno.EROFS)
        self.refuse("no rename", errno.ENOSYS)
        if stat.S_ISDIR(os.lstat(self.at(old)).st_mode):
            self.refuse("no rename of directories", errno.ENOTSUP)
        os.rename(self.at(old), self.at(new))

    def utimens(self, path, times=None):
        os.utime(self.at(path), times)

    def chmod(self, path, mode):
        self.refuse("no chmod", errno.EPERM)
        os.chmod(self.at(path), mode)

    def chown(self, path, user, group):
        self.refuse("no chmod", errno.EPERM)
        os.chown(self.at(path), user, group)

    def open(self, path, flags):
        if flags & os.O_APPEND:
            self.refuse("no append", errno.ENOTSUP)
        if flags & os.O_DIRECT:
            self.refuse("no O_DIRECT", errno.EINVAL)
        if flags & (os.O_WRONLY | os.O_RDWR):
            self.refuse("read-only", errno.EROFS)
        return os.open(self.at(path), flags & ~(os.O_DIRECT | os.O_APPEND))

    def create(self, path, mode, _info=None):
        self.refuse("read-only", errno.EROFS)
        return os.open(self.at(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

    def read(self, _path, size, offset, file):
        return os.pread(file, size, offset)

    def write(self, _path, data, offset, file):
        self.refuse("read-only", errno.EROFS)
        self.refuse("quota", errno.EDQUOT)
        if offset + len(data) > 1 << 20:
            self.refuse("full", errno.ENOSPC)
        return os.pwrite(file, data, offset)

    def truncate(self, path, length, _file=None):
        self.refuse("read-only", errno.EROFS)
        os.truncate(self.at(path), length)

    def flush(self, _path, _file):
        pass

    def release(self, _path, file):
        os.close(file)

    def fsync(self, _path, _data_only, file):
        os.fsync(file)

    def fsyncdir(self, _path, _data_only, _file):
        self.refuse("no fsync of directories", errno.EINVAL)


@contextlib.contextmanager
def real_disk(place, name):
    """Mount one of REAL at a new directory; yields a function that changes nothing, as odd_disk's has a meaning."""
    beside = [place.with_name(f".{place.name}.{part}") for part in ("lower", "upper", "work")]
    image = place.with_name(f".{place.name}.image")
    place.mkdir()
    if name == "exFAT":
        image.write_bytes(b"")
        os.truncate(image, 200 << 20)
        subprocess.run(["mkfs.exfat", image], check=True, capture_output=True)
        loop = subprocess.run(
            ["losetup", "-f", "--show", image], check=True, capture_output=True, text=True
        ).stdout.strip()
        mount = ["mount.exfat-fuse", loop, place]
    elif name == "overlay":
        for directory in beside:
            directory.mkdir()
        layers = ",".join(f"{part}dir={at}" for part, at in zip(("lower", "upper", "work"), beside, strict=True))
        mount = ["mount", "-t", "overlay", "overlay", "-o", layers, place]
    else:
        limit = "size=24m" if name.endswith("MB") else "nr_inodes=90"
        mount = ["mount", "-t", "tmpfs", "-o", limit, "tmpfs", place]
    try:
        subprocess.run(mount, check=True, capture_output=True)
        yield lambda *_: None
    finally:
        if subprocess.run(["umount", place], check=False, capture_output=True).returncode:
            subprocess.run(["umount", "-l", place], check=False, capture_output=True)
        if name == "exFAT":
            subprocess.run(["losetup", "-d", loop], check=False)


@contextlib.contextmanager
def odd_disk(place, *odds):
    """Mount one at a new directory; yields a function that changes what is odd about it."""
    real = place.with_name(f".{place.name}.real")
    real.mkdir()
    place.mkdir()

    def become(*odds):
        assert set(odds) <= ODDS.keys()
        Path(f"{real}.odd").write_text("\n".join(odds))

    become(*odds)
    child = subprocess.Popen([sys.executable, __file__, real, place])
    try:
        deadline = time.monotonic() + 30
        while not os.path.ismount(place):
            assert child.poll() is None, "no FUSE here"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield become
    finally:
        become()
        subprocess.run(["umount", "-l", place], check=False)
        child.terminate()  # whoever still has something open there
        child.wait(20)


if __name__ == "__main__":
    fuse.FUSE(OddDisk(sys.argv[1]), sys.argv[2], foreground=True, allow_other=True, attr_timeout=0, entry_timeout=0)
