"""Write files atomically, read records, walk directories, and check who can write a file.

Readers never see a half-written file. Knows names and permissions; not contents.
"""

import contextlib
import dataclasses
import errno
import grp
import json
import os
import pwd
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from llama405b.contract import reader
from llama405b.contract.errors import UserError, printable_name, reason_of, remedy_of
from llama405b.contract.paths import UMASK
from llama405b.contract.reader import Json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")


UNLIMITED = 1 << 62  # no limit on the bytes that ``read_records`` reads


USERS_UMASK = "LLAMA405B_UMASK"  # environment variable: the user's umask, for the programs that we start


def set_private_umask() -> None:
    """Set the umask of this process and its children so that only the owner can read a run's files."""
    os.environ.setdefault(USERS_UMASK, f"{os.umask(UMASK):o}")


def restore_users_umask() -> None:
    """Restore the user's own umask, whoever started this process: exported models are meant to be shared."""
    current = os.umask(UMASK)
    is_ours = current == UMASK and re.fullmatch("[0-7]{1,4}", value := os.environ.get(USERS_UMASK, ""))
    os.umask(int(value, 8) if is_ours else current)  # otherwise the user's setup line has set another


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace a file atomically: a reader sees either the old content or the new.

    Raises:
        OSError: The directory cannot be created or written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with add_path_to_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(content.encode() if isinstance(content, str) else content)
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """Add the file's path to an OSError: the OS names it for open(), but not for write()."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def write_json(path: Path, record: "DataclassInstance | dict[str, Json]") -> None:
    """Write a dataclass or plain value atomically, as one line of JSON.

    On a full disk an existing file is overwritten in place, reusing its blocks, so that a status is still written.

    Raises:
        OSError: The directory cannot be created or written.
    """
    text = json.dumps(record, default=dataclasses.asdict) + "\n"
    try:
        write_atomic(path, text)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not path.exists():
            raise
        with path.open("r+", encoding="utf-8") as file:
            # pad to the old length, so that nothing of the old text remains
            file.write(text.rstrip().ljust(path.stat().st_size - 1) + "\n")


def read_record(kind: type[T], path: Path) -> T | None:
    """Return the record in a file; None if it does not exist (yet) or cannot be parsed."""
    try:
        return reader.loads(kind, path.read_bytes(), path.name)
    except (OSError, reader.MalformedError):
        return None


def read_records(kind: type[T], path: Path, last: int, last_bytes: int = UNLIMITED) -> list[T]:
    """Return the last records of a file with one per line; lines that do not parse are skipped."""
    records: list[T] = []
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - last_bytes))
            lines = file.read().splitlines()[-last:]
    except OSError:
        return records
    for line in lines:
        with contextlib.suppress(reader.MalformedError):
            records.append(reader.loads(kind, line, path.name))
    return records


SYSTEM_NAMES = (  # that file servers and systems create in directories, besides hidden files
    "lost+found", "@eaDir", "Thumbs.db", "desktop.ini", "System Volume Information", "$RECYCLE.BIN",
)  # fmt: skip


def is_hidden_or_system(name: str) -> bool:
    """Whether a name is hidden or a system's: ``walk`` skips such directories, its callers such files."""
    return name.startswith(".") or name in SYSTEM_NAMES


def walk(root: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield each directory below a root, with the names of its directories and files; follow links.

    System directories are skipped, and hidden ones are not entered. The caller may remove names of directories to skip them.

    Raises:
        UserError: A link is broken or circular, or a directory cannot be read, so the content is unknown.
    """

    def fail(error: OSError) -> NoReturn:
        filename = printable_name(str(error.filename))
        raise UserError(f"{filename}: cannot be read ({reason_of(error)}){remedy_of(error)}") from None

    for folder, subdirectories, files in os.walk(root, followlinks=True, onerror=fail):
        directory = Path(folder)
        subdirectories[:] = [name for name in subdirectories if name not in SYSTEM_NAMES]
        for path in [directory / name for name in (*subdirectories, *files) if not name.startswith(".")]:
            if path.is_symlink():
                check_link(path)
        yield directory, subdirectories, files
        subdirectories[:] = [name for name in subdirectories if not name.startswith(".")]


def check_link(path: Path) -> None:
    """Refuse a broken link, and one to a directory that contains it.

    Raises:
        UserError: The link is one of these.
    """
    prefix = f"{printable_name(str(path))}: is a link to {printable_name(str(path.readlink()))}, "
    if not path.exists():
        raise UserError(f"{prefix}which does not exist; add the missing file, or delete the link")
    if path.is_dir() and path.resolve() in path.parent.resolve().joinpath("-").parents:
        raise UserError(f"{prefix}a directory that it is in; delete the link")


def append_line(path: Path, line: str) -> None:
    """Append a line to a file; if the disk is full, the file is cut back to its old length.

    Raises:
        OSError: The directory cannot be created or written.
    """
    remaining = memoryview(f"{line}\n".encode())
    with add_path_to_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        previous_size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("ab", buffering=0) as file:
                while remaining:
                    remaining = remaining[file.write(remaining) :]
        except OSError:
            with contextlib.suppress(OSError):
                # remove what was written of the line
                os.truncate(path, previous_size)
            raise


def check_only_owner_writes(path: Path) -> None:
    """Refuse a file that others than its owner (and root) can write: its commands run on every host.

    The owner's private group, as Ubuntu creates it for every user, may write it.

    Raises:
        UserError: Others can write it, or it belongs to another user.
        OSError: The file does not exist.
    """
    info = path.stat()
    reason = write_access_problem(info)
    if not reason or not stat.S_ISREG(info.st_mode):
        return
    if _belongs_to_other_user(info):
        raise UserError(f"{path}: {reason}; copy it to a file of your own")
    mode_class = "o" if info.st_mode & stat.S_IWOTH else "g"
    raise UserError(
        f"{path}: {reason}, who could then run commands as you; run: chmod {mode_class}-w {path} (on a disk without "
        f"modes, keep it elsewhere)"
    )


def write_access_problem(info: os.stat_result) -> str:
    """Return which others can write a file, as ``is writable by everyone``; '' if none can."""
    if _belongs_to_other_user(info):
        return f"belongs to another user ({user_name(info.st_uid)})"
    if info.st_mode & stat.S_IWOTH:
        return "is writable by everyone"
    if info.st_mode & stat.S_IWGRP and not _is_private_group(info.st_gid, info.st_uid):
        return "is writable by its group"
    return ""


def _belongs_to_other_user(info: os.stat_result) -> bool:
    return info.st_uid not in (os.getuid(), 0)


def _is_private_group(gid: int, uid: int) -> bool:
    try:
        group, owner = grp.getgrgid(gid), pwd.getpwuid(uid)
    except KeyError:
        return False
    return group.gr_name == owner.pw_name and owner.pw_gid == gid and set(group.gr_mem) <= {owner.pw_name}


def user_name(uid: int) -> str:
    """Return a user's name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
