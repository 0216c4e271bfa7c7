"""Writing past the page cache: what is in the file, however it is written."""

import errno
import fcntl
import os
import random

import pytest

from llama405b.contract import hashes
from llama405b.contract.hashes import BUFFER_BYTES, DIRECT_ALIGNMENT, DirectFile, filesystem_type

CONTENT = random.Random(0).randbytes(2 * BUFFER_BYTES + 3 * DIRECT_ALIGNMENT + 17)


def _write(path, begin, sizes):
    file, at = DirectFile(path, begin), begin
    for size in sizes:
        file.write(memoryview(CONTENT)[at : at + size])
        at += size
    file.write(CONTENT[at:])
    file.flush()
    file.close()
    assert file.end == len(CONTENT)
    return file


@pytest.mark.parametrize(
    "begin", [0, 1, DIRECT_ALIGNMENT, BUFFER_BYTES - 1, BUFFER_BYTES + DIRECT_ALIGNMENT + 5, len(CONTENT)]
)
@pytest.mark.parametrize("past_the_cache", [True, False])
def test_the_file_is_what_was_written(tmp_path, monkeypatch, begin, past_the_cache):
    if not past_the_cache:
        monkeypatch.setattr(hashes, "LOCAL_FILESYSTEMS", set())
    path = tmp_path / "file"
    path.write_bytes(CONTENT[:begin] + b"of an earlier attempt" * (begin % 2))
    file = _write(path, begin, [0, 1, DIRECT_ALIGNMENT, 7, BUFFER_BYTES])
    assert path.read_bytes() == CONTENT
    if filesystem_type(tmp_path) in ("ext4", "xfs"):
        assert file.is_direct == past_the_cache


def test_a_filesystem_that_cannot_after_all(tmp_path, monkeypatch):
    calls, write = [], os.write

    def refuse(descriptor, data):
        calls.append(bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT))
        if calls[-1]:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, data)

    monkeypatch.setattr(hashes.os, "write", refuse)
    assert not _write(tmp_path / "file", 0, []).is_direct
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert calls[0] == (filesystem_type(tmp_path) in ("ext4", "xfs"))
    assert not any(calls[1:])


def test_what_was_written_before_an_error_is_not_written_again(tmp_path, monkeypatch):
    write, room = os.write, [BUFFER_BYTES // 2]

    def nearly_full(descriptor, data):
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[: room.pop()])

    file = DirectFile(tmp_path / "file")
    monkeypatch.setattr(hashes.os, "write", nearly_full)
    with pytest.raises(OSError, match="No space left on device"):
        file.write(CONTENT)
    monkeypatch.setattr(hashes.os, "write", write)  # something was deleted meanwhile
    file.flush()
    file.close()
    found = (tmp_path / "file").read_bytes()
    assert len(found) == BUFFER_BYTES
    assert CONTENT.startswith(found)


def test_mounts_with_odd_names(tmp_path, monkeypatch):
    device = tmp_path.stat().st_dev
    mine = f"{os.major(device)}:{os.minor(device)}"
    for lines, found in (
        ([f"1 2 {mine} / /a\x0bb rw shared:1 - xfs /dev/x rw"], "xfs"),
        (["", "1 2 0:99999 / / rw - ext4 /dev/x rw", f"3 2 {mine} / /b rw - nfs4 h:/x rw"], "nfs4"),
        (["", "odd"], ""),
    ):
        monkeypatch.setattr(hashes.Path, "read_text", lambda *_, lines=lines, **__: "\n".join(lines))
        assert filesystem_type(tmp_path) == found


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    file = DirectFile(tmp_path / "file")
    monkeypatch.setattr(hashes.os, "write", full)
    with pytest.raises(OSError, match="No space left on device"):
        file.write(CONTENT)
    file.close()
