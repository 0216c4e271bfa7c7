"""Check that only a file's owner can write it. Standard library only; knows permissions, not contents."""

import grp
import os
import pwd
import stat
from pathlib import Path

from llama405b.contract.errors import UserError


def refuse_others_writing(path: Path) -> None:
    """Refuse a file that anyone but its owner (and root) can write: its commands run on every host.

    The owner's private group, which Ubuntu creates for every user, may write it.

    Raises:
        UserError: Others can write it, or it belongs to another user.
        OSError: The file does not exist.
    """
    info = path.stat()
    why = others_in(info)
    if not why or not stat.S_ISREG(info.st_mode):
        return
    if _is_foreign(info):
        raise UserError(f"{path}: {why}; copy it to a file of your own")
    who = "o" if info.st_mode & stat.S_IWOTH else "g"
    raise UserError(f"{path}: {why}, who could then run commands as you; run: chmod {who}-w {path}")


def others_in(info: os.stat_result) -> str:
    """Say who but this user (and root) can write a file, as ``is writable by everyone``; '' if nobody can."""
    if _is_foreign(info):
        return f"belongs to another user ({user_of(info.st_uid)})"
    if info.st_mode & stat.S_IWOTH:
        return "is writable by everyone"
    if info.st_mode & stat.S_IWGRP and not _private_group(info.st_gid, info.st_uid):
        return "is writable by its group"
    return ""


def _is_foreign(info: os.stat_result) -> bool:
    return info.st_uid not in (os.getuid(), 0)


def _private_group(gid: int, uid: int) -> bool:
    try:
        group, owner = grp.getgrgid(gid), pwd.getpwuid(uid)
    except KeyError:
        return False
    return group.gr_name == owner.pw_name and owner.pw_gid == gid and set(group.gr_mem) <= {owner.pw_name}


def user_of(uid: int) -> str:
    """Return a user's name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
