"""Whether a file says only what its owner wrote. Standard library; knows permissions, not contents."""

import grp
import os
import pwd
import stat
from pathlib import Path

from llama405b.contract.errors import UserError


def refuse_others_writing(path: Path) -> None:
    """Refuse a file that others than its owner (and root) may write: what it says would be run on every host.

    A group of the owner's alone, as Ubuntu makes one for every user, may write.

    Raises:
        UserError: Others may write it, or it belongs to a stranger.
        OSError: There is no such file.
    """
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        return
    if info.st_uid not in (os.getuid(), 0):
        raise UserError(f"{path}: it belongs to another user ({_user(info.st_uid)}); copy it to a file of your own")
    if info.st_mode & stat.S_IWOTH:
        raise UserError(f"{path}: everybody may write it, and so run commands as you; type: chmod o-w {path}")
    if info.st_mode & stat.S_IWGRP and not _private_group(info.st_gid, info.st_uid):
        raise UserError(f"{path}: its group may write it, and so run commands as you; type: chmod g-w {path}")


def _private_group(gid: int, uid: int) -> bool:
    try:
        group, owner = grp.getgrgid(gid), pwd.getpwuid(uid)
    except KeyError:
        return False
    return group.gr_name == owner.pw_name and owner.pw_gid == gid and set(group.gr_mem) <= {owner.pw_name}


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
