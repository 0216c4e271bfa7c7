"""What is deleted in a directory of checkpoints, and what an error there means. The disk is the test's."""

import contextlib
import errno
import functools
import os
import shutil
import types
from pathlib import Path

import pytest
from manifests import hash_file

from llama405b.checkpoint import replication, store
from llama405b.checkpoint.store import CheckpointDirectory, Store
from llama405b.contract.checkpoints import Manifest, write_manifest
from llama405b.contract.errors import UserError
from llama405b.contract.paths import RunDir


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "c").mkdir()
    return CheckpointDirectory(tmp_path / "c", RunDir(tmp_path / "r"), "node", 1)


def _checkpoint(directory, step):
    path = directory.root / f"step-{step:08d}"
    path.mkdir()
    for name in ("index.json", "weights-0-0.safetensors"):
        (path / name).touch()
    files = {name: hash_file(path / name, 0) for name in ("index.json", "weights-0-0.safetensors")}
    (path / "manifest.json").write_bytes(write_manifest(Manifest(3, step, files, 1, run="r"))[0])
    return path


@pytest.fixture
def in_use(monkeypatch):
    """Directories with a file that is in use, as on NFS: they lose all else, and stay."""
    names, rmtree = set(), shutil.rmtree

    def delete(path, ignore_errors=False, **more):
        if not any(path.name.startswith(name) for name in names):
            rmtree(path, ignore_errors, **more)
            return
        rmtree(path)
        path.mkdir()
        (path / ".nfs0001").touch()
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(shutil, "rmtree", delete)
    return names


def _steps(directory):
    return sorted(path.name[:13] for path in directory.root.iterdir())


def test_what_cannot_be_deleted_is_named_and_all_else_is_deleted(directory, in_use):
    for step in (1, 2, 3, 4):
        _checkpoint(directory, step)
    in_use.add("step-00000001")
    with pytest.raises(OSError, match="step-00000001: Directory not empty"):
        directory.delete_old(4, 2, set())
    assert _steps(directory) == ["step-00000001", "step-00000003", "step-00000004"]
    assert not (directory.root / "step-00000001").exists()  # nothing that is half-deleted looks complete
    with pytest.raises(OSError, match=r"step-00000001.r.tmp-old-\w+: Directory not empty"):
        directory.delete_old(4, 2, set())
    in_use.clear()
    directory.delete_old(4, 2, set())
    assert _steps(directory) == ["step-00000003", "step-00000004"]


def test_manifests_are_read_once_and_again_where_another_stands(directory, monkeypatch):
    read, opened = [], store.open_manifest
    monkeypatch.setattr(store, "open_manifest", lambda path: (read.append(path.name), opened(path))[1])
    paths = [_checkpoint(directory, step) for step in (1, 2, 3)]
    assert [*directory.own_checkpoints()] == [*directory.own_checkpoints()] == paths
    (paths[2] / "manifest.json").unlink()  # by hand: what is left is not counted among those that are kept
    (paths[1] / "manifest.json").write_bytes(
        (paths[1] / "manifest.json").read_bytes().replace(b'"run":"r"', b'"run":"s"')
    )
    directory.delete_old(4, 1, set())
    assert [*directory.own_checkpoints()] == paths[:1]
    assert read[:3] == [path.name for path in paths]
    assert {*read[3:]} == {path.name for path in paths[1:]}


@pytest.mark.parametrize("ending", ["tmp", "tmp-old", "tmp-read"])
def test_a_save_begins_beside_what_cannot_be_deleted(directory, in_use, ending):
    left = directory.root / f"step-00000004.r.{ending}"
    left.mkdir()
    (left / "old").touch()
    in_use.add("step-00000004")
    final = directory.root / "step-00000004"
    directory.begin(final, {"index.json": b"{}"})
    assert sorted(path.name for path in directory.partial_path(final).iterdir()) == ["index.json", "model"]
    directory.begin(directory.root / "step-00000005", {"index.json": b"{}"})  # nor later
    _checkpoint(directory, 4)
    in_use.clear()
    directory.delete_old(5, 1, set())
    directory.begin(directory.root / "step-00000006", {"index.json": b"{}"})
    assert _steps(directory) == ["step-00000004", "step-00000006"]


@pytest.fixture
def owner(monkeypatch):
    """A store's rank 0, alone."""
    monkeypatch.setattr(store.collectives, "raise_on_all_ranks", lambda *_: contextlib.nullcontext())
    found = types.SimpleNamespace(
        root=Path("/c"),
        is_owner=True,
        holder=types.SimpleNamespace(check=lambda: None),
        _host_clause=lambda: " on node",
    )
    found.run_on_owners = functools.partial(Store.run_on_owners, found)
    return found


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOTEMPTY, ""),
        (errno.EACCES, "; give this user permission"),
        (errno.EROFS, "; its filesystem is read-only: mount it writable again, or see dmesg there if a disk failed"),
        (errno.EIO, "; its disk is failing: see dmesg there"),
        (errno.ENOENT, "; it was removed, or its filesystem is not mounted"),
    ],
)
def test_room_is_asked_for_where_it_helps(owner, number, words):
    def fails():
        raise OSError(number, os.strerror(number))

    with pytest.raises(UserError) as refused:
        owner.run_on_owners(fails, Path("/c/step-1"))
    assert str(refused.value) == f"/c/step-1: cannot be written ({os.strerror(number)}) on node{words}"


def test_a_directory_that_cannot_be_listed_is_not_called_unwritable(owner, monkeypatch):
    def closed(_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(store, "list_committed", closed)
    with pytest.raises(UserError, match=r"^/c: cannot be listed \(Permission denied\) on node; give"):
        Store.list_checkpoints(owner)


def test_a_disk_whose_room_cannot_be_told_is_refused_in_a_sentence(owner, monkeypatch):
    def broken(_):
        raise OSError(errno.EIO, "Input/output error")

    owner.rank = types.SimpleNamespace(index=0, world_size=1)
    owner.owners, owner.owner_of, owner.keep, owner.keep_best = [0], (0,), 2, False
    owner.directory, owner.run = types.SimpleNamespace(own_checkpoints=dict), RunDir(Path("/r"))
    monkeypatch.setattr(store, "disk_free_bytes", broken)
    with pytest.raises(UserError, match=r"^/c: cannot be checked \(Input/output error\) on node; its disk is failing"):
        Store.check_disk_space(owner, 1)


def test_a_copy_that_cannot_be_asked_for_fails_no_save(monkeypatch):
    told = []

    def write(_path, record):
        told.append(record.step)
        if len(told) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    ring = object.__new__(replication.Replication)
    ring.step, ring.replicated_step, ring.resume_step = 0, 0, 0
    ring.ring = replication.Ring(1, "b", replication.Endpoint(1, "a", 1, "t"), "/c", "r", 2)
    ring.store = types.SimpleNamespace(run=RunDir(Path("/r")), rank=types.SimpleNamespace(host="a"))
    ring.update_replicated_step = lambda _: 0
    monkeypatch.setattr(replication, "write_json", write)
    ring.request_copies(4)
    ring.request_copies(8)  # it is told again what to copy
    assert told == [4, 4]
