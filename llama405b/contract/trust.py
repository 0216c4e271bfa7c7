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
    if not stat.S_ISREG(info.st_mode):
        return
    if info.st_uid not in (os.getuid(), 0):
        raise UserError(f"{path}: belongs to another user ({user_of(info.st_uid)}); copy it to a file of your own")
    if info.st_mode & stat.S_IWOTH:
        raise UserError(f"{path}: everyone can write it, and so run commands as you; run: chmod o-w {path}")
    if info.st_mode & stat.S_IWGRP and not _private_group(info.st_gid, info.st_uid):
        raise UserError(f"{path}: its group can write it, and so run commands as you; run: chmod g-w {path}")


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
