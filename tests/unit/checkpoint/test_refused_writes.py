"""A write of a tensor that the disk refuses, at any place: the disk's own error is told, not what torch says as it unwinds."""

import errno
import os
import types

import pytest
import torch

from llama405b.checkpoint.saving import _HashingFile


class Disk:
    path = types.SimpleNamespace(name="__0_0.distcp")

    def __init__(self, room):
        self.room, self.written = room, 0

    def write(self, piece):
        self.written += len(piece)
        if self.written > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def save(room):
    file = _HashingFile(Disk(room))
    file.add(types.SimpleNamespace(index=None), torch.zeros(100))
    return file.hasher.n_bytes


def test_whatever_write_the_disk_refuses_its_error_is_told():
    length = save(10**9)
    for room in range(0, length, 7):
        with pytest.raises(OSError, match=r"^\[Errno 28\] No space left on device$"):
            save(room)
