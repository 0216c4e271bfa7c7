"""Names of the system calls that a process may wait in, by the number that ``/proc/PID/syscall`` tells. Pure."""

from collections.abc import Mapping

X86_64 = {
    0: "read", 1: "write", 2: "open", 3: "close", 7: "poll", 8: "lseek", 16: "ioctl", 17: "pread64", 18: "pwrite64", 19: "readv",
    20: "writev", 23: "select", 35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg",
    47: "recvmsg", 61: "wait4", 73: "flock", 74: "fsync", 75: "fdatasync", 82: "rename", 87: "unlink", 202: "futex",
    230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 257: "openat", 262: "newfstatat", 270: "pselect6", 271: "ppoll",
    281: "epoll_pwait", 306: "syncfs", 332: "statx",
}  # fmt: skip
AARCH64 = {
    22: "epoll_pwait", 29: "ioctl", 32: "flock", 35: "unlink", 56: "openat", 57: "close", 62: "lseek", 63: "read", 64: "write",
    65: "readv", 66: "writev", 67: "pread64", 68: "pwrite64", 72: "pselect6", 73: "ppoll", 79: "newfstatat", 82: "fsync",
    83: "fdatasync", 95: "waitid", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 202: "accept", 203: "connect",
    206: "sendto", 207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 260: "wait4", 267: "syncfs", 276: "rename", 291: "statx",
}  # fmt: skip
TABLES: Mapping[str, Mapping[int, str]] = {"x86_64": X86_64, "aarch64": AARCH64}
OF_A_FILE = frozenset(
    (
        "read",
        "write",
        "pread64",
        "pwrite64",
        "readv",
        "writev",
        "fsync",
        "fdatasync",
        "flock",
        "ioctl",
        "lseek",
        "syncfs",
        "sendto",
        "recvfrom",
        "sendmsg",
        "recvmsg",
        "connect",
        "accept",
    )
)  # fmt: skip - the first argument is a file's number


def syscall_of(text: str, machine: str) -> tuple[str, int | None]:
    """Return the name of the call that ``/proc/PID/syscall`` tells, and the number of the file that it is of.

    ("", None) where the process runs, or the file is empty.
    """
    words = text.split()
    if not words or not words[0].isdigit():
        return "", None
    number = int(words[0])
    name = TABLES.get(machine, {}).get(number, f"system call {number}")
    return name, int(words[1], 16) if name in OF_A_FILE and len(words) > 1 else None
