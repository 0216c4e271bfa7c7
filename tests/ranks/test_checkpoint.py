"""Checkpoints are complete or absent, and restore everything."""

import contextlib
import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import tempfile
import time
import types
from pathlib import Path

import pytest
import torch

from ranks_rig import run_ranks
from update_rig import data_file, flip, save


def _trainer(me, directory, load_weights=True):
    from llama405b.model import llama
    from llama405b.model.llama import checkpoint_activations
    from llama405b.optim.build_updater import build_updater
    from llama405b.parallel import fsdp, load_weights
    from llama405b.settings.schema import Optimizer, Parallel

    module = llama.build_on_meta(llama.read_hf_config(directory), "sdpa", torch.float32)
    fsdp.shard_model(module, Parallel(numerics="fp32"), me.device)
    if load_weights:
        load_weights.load(module, directory, "auto", me, lambda *_: None)
    else:
        load_weights.materialize(module, me)
    checkpoint_activations(module)
    return module, build_updater(module, Optimizer(lr=1e-2), Parallel(), me.device)


def _step(me, module, updater, number):
    from llama405b.data.batch import Batch
    from llama405b.optim.step import train_step
    from llama405b.parallel.passes import MicrobatchLoop

    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 131, (6, 17), generator=generator)
    each = 6 // me.world_size
    x, y = ids[me.index * each :][:each, :-1], ids[me.index * each :][:each, 1:]
    return train_step(MicrobatchLoop(module, me.dp.size), updater, [Batch(x, y)], max_norm=1.0).loss


IDENTITY = ("a model", "some data", 16, 6, "fp32", 0, 0)


def _store(me, root, keep=3, run="run"):
    from llama405b.checkpoint.store import Store
    from llama405b.contract.paths import RunDir

    return Store(Path(root), keep, me, run=RunDir(Path(root).parent / run))


def _save_four(me, directory, root, tear_at=None, keep=3, run="run"):
    from llama405b.checkpoint import saving as of_write

    module, updater = _trainer(me, directory)
    store = _store(me, root, keep, run)
    store.acquire()
    losses = []
    for number in range(1, 9):
        losses.append(_step(me, module, updater, number))
        if number % 2 == 0:
            if number == tear_at and me.index == 1:
                of_write.SafetensorsFile.finish = lambda _: os.kill(os.getpid(), signal.SIGKILL)
            save(store, number, updater)
    store.close()
    return losses, torch.get_rng_state().sum().item()


def _resume(me, directory, root, resume="auto"):
    from llama405b.checkpoint.format import DamagedError
    from llama405b.checkpoint.resume import Resume
    from llama405b.contract.errors import UserError

    module, updater = _trainer(me, directory, load_weights=False)
    torch.manual_seed(99 + me.index)
    done = None
    with contextlib.closing(_store(me, root)) as store:
        try:
            chosen = Resume(store, resume)
            while done is None and chosen.checkpoint:
                path = chosen.checkpoint.path
                with contextlib.suppress(DamagedError):
                    done = chosen.load(module, updater, lambda *_: None)
        except UserError as error:
            return str(error)
        if done is None:
            return None, [], []
        losses = [_step(me, module, updater, number) for number in range(done + 1, 9)]
        return path.name, [str(each) for each in chosen.rejected], losses


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("saved") / "checkpoints"
    return root, run_ranks(2, _save_four, tiny, root)[0][0]


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "checkpoints")
    return tmp_path / "checkpoints", saved[1]


def _steps(root):
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def test_manifest_and_retention(saved):
    root, _ = saved
    assert _steps(root) == ["step-00000004", "step-00000006", "step-00000008"]
    manifest = json.loads((root / "step-00000006" / "manifest.json").read_text().splitlines()[0])
    assert manifest["step"] == 6
    assert manifest["world_size"] == 2
    assert set(manifest["files"]) == {p.name for p in (root / "step-00000006").iterdir() if p.is_file()} - {
        "manifest.json"
    }
    assert {"index.json", "weights-0-0.safetensors", "optimizer-1-3.safetensors"} <= set(manifest["files"])


def test_resumed_losses_are_identical(tiny, copy):
    root, losses = copy
    shutil.rmtree(root / "step-00000008")
    shutil.rmtree(root / "step-00000006")
    for extra in (
        "weights-7-0.safetensors",
        "weights-0-9.safetensors",
        "notes.txt",
    ):  # which the manifest does not name
        (root / "step-00000004" / extra).write_bytes(b"x")
    for name, passed_over, resumed in run_ranks(2, _resume, tiny, root):
        assert (name, passed_over) == ("step-00000004", [])
        assert resumed == losses[4:]  # exactly


def test_another_world_size_resumes(tiny, copy):
    root, losses = copy
    for name, _, resumed in run_ranks(3, _resume, tiny, root, "4"):
        assert name == "step-00000004"
        assert resumed == pytest.approx(losses[4:], abs=1e-3)


def _of_the_step_before(step):
    bad = data_file(step, 1)
    shutil.copyfile(step.with_name("step-00000006") / bad.name, bad)


def _swap(one, other):
    one.rename(one.with_name("x"))
    other.rename(one)
    one.with_name("x").rename(other)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: flip(data_file(d, 1)), r"\w+-1-\d.safetensors: its content does not match its checksum"),
        (lambda d: os.truncate(data_file(d), 1000), r"\w+-0-\d.safetensors: 1000 bytes, but the manifest says"),
        (lambda d: data_file(d, 1).unlink(), r"\w+-1-\d.safetensors: missing"),
        (
            lambda d: _swap(data_file(d), data_file(d, 1)),
            r"\w+-\d-\d.safetensors: (\d+ bytes, but|its content does not match)",
        ),
        (_of_the_step_before, r"\w+-1-\d.safetensors: (\d+ bytes, but the manifest|its content does not match)"),
        (lambda d: (d / "index.json").unlink(), "index.json: missing"),
        (lambda d: (d / "manifest.json").write_text("{"), r"its manifest does not verify \(manifest.json: its content"),
    ],
    ids=["bit", "truncated", "deleted", "swapped", "another step's", "missing", "manifest"],
)
def test_damage_is_passed_over_and_named(tiny, copy, damage, words):
    root, losses = copy
    damage(root / "step-00000008")
    named = run_ranks(1, _resume, tiny, root, "8")[0]
    assert named.startswith("--resume: ")
    assert re.search(words, named)
    name, passed_over, resumed = run_ranks(2, _resume, tiny, root)[0]
    assert name == "step-00000006"
    assert len(passed_over) == 1
    assert re.search(words, passed_over[0])
    assert resumed == losses[6:]
    assert not (root / "step-00000008").exists()  # its name is free for what is saved next
    assert [p.name[:19] for p in root.iterdir() if "aside" in p.name] == ["step-00000008.aside"]


def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before(tiny, tmp_path):
    root = tmp_path / "checkpoints"
    outcomes = run_ranks(2, _save_four, tiny, root, 6, may_fail=True)
    assert outcomes[1] == ("gone", -signal.SIGKILL)
    assert (root / "step-00000006.run.tmp").is_dir()
    assert not (root / "step-00000006").exists()
    assert run_ranks(2, _resume, tiny, root)[0][0] == "step-00000004"


def _contents(root):
    return {path.relative_to(root): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_auto_refuses_where_checkpoints_exist_and_none_verifies(tiny, copy):
    root, _ = copy
    for name in _steps(root):
        flip(data_file(root / name))
    before = _contents(root)
    words = run_ranks(2, _resume, tiny, root)
    assert words[1].startswith(f"--resume auto: {root} has 3 checkpoints, but none verifies (")
    for step in (4, 6, 8):
        assert re.search(rf"step-0000000{step}/\w+-0-\d.safetensors: its content does not match", words[0])
    assert _contents(root) == before


def _resume_with_a_bad_disk(me, directory, root, bad):
    from llama405b.checkpoint import format as verified

    true_hashes = verified.block_hashes

    def broken(path, blocks, block_bytes):
        if bad in path.name and "step-00000008" in str(path):
            raise OSError(5, "Input/output error")
        return true_hashes(path, blocks, block_bytes)

    verified.block_hashes = broken
    return _resume(me, directory, root)


@pytest.mark.parametrize("cause", ["-1-", "index.json"])
def test_a_newer_checkpoint_that_cannot_be_read_is_neither_passed_over_nor_renamed(tiny, copy, cause):
    root, _ = copy
    found = run_ranks(2, _resume_with_a_bad_disk, tiny, root, cause)
    why = "cannot be read (Input/output error) on host-"
    assert all("--resume auto: " in words and why in words and "--resume STEP" in words for words in found)
    assert _steps(root) == ["step-00000004", "step-00000006", "step-00000008"]


def test_a_committed_step_is_never_replaced(tiny, copy):
    root, _ = copy
    for step in (4, 6):
        shutil.rmtree(root / f"step-0000000{step}")
    before = _contents(root / "step-00000008")
    with pytest.raises(AssertionError, match="step-00000008: already exists, and checkpoints are never replaced"):
        run_ranks(2, _save_four, tiny, root)
    assert _contents(root / "step-00000008") == before


def test_only_its_own_half_written_directories_are_deleted(tiny, tmp_path):
    root = tmp_path / "checkpoints"
    others = ["step-00000001.tmp", "step-00000001.other.tmp", "step-00000001.b.a.tmp", "step-00000003.xa.tmp"]
    for name in [*others, "step-00000001.a.tmp"]:
        (root / name).mkdir(parents=True)
    run_ranks(1, _save_four, tiny, root, None, 3, "a")
    master = _steps(root)
    assert master == sorted([*others, "step-00000004", "step-00000006", "step-00000008"])


def _find(me, root, resume):
    from llama405b.checkpoint.resume import Resume
    from llama405b.contract.errors import UserError

    with contextlib.closing(_store(me, root)) as store:
        try:
            chosen = Resume(store, resume)
            chosen.set_aside_rejected()
            return [str(chosen.checkpoint and chosen.checkpoint.path), str(chosen.rejected)]
        except UserError as error:
            return str(error)


def test_a_fresh_run_does_not_touch_another_ones_checkpoints(copy, tmp_path):
    root, _ = copy
    assert "holds checkpoints up to step-00000008; use another directory" in run_ranks(2, _find, root, "no")[1]
    shutil.copytree(root / "step-00000004", tmp_path / "fork" / "step-00000004")
    assert "of another run" in run_ranks(1, _find, root, str(tmp_path / "fork" / "step-00000004"))[0]
    assert len(_steps(root)) == 3


def test_auto_starts_no_run_anew_whose_checkpoints_are_not_there(tmp_path):
    from llama405b.contract import reader
    from llama405b.contract.files import append_line
    from llama405b.contract.paths import RunDir
    from llama405b.contract.records import EventKind, RunEvent

    root = tmp_path / "c"
    for name in ("c/step-00000004", "c/step-00000008", "before/step-00000009"):
        event = RunEvent(0.0, "rank-0", EventKind.SAVED, 1, path=str(tmp_path / name), digest="d")
        append_line(RunDir(tmp_path / "run").events("rank-0"), reader.dumps(event))
    [said] = run_ranks(1, _find, root, "auto")
    assert said.startswith(
        f"--resume auto: {root} is empty, but this run saved step-00000008 there; is its filesystem mounted?"
    )


def test_going_back_keeps_what_was_saved_later_out_of_the_way(tiny, copy):
    root, losses = copy
    name, notes, resumed = run_ranks(2, _resume, tiny, root, "4")[0]
    assert (name, resumed) == ("step-00000004", losses[4:])
    assert len(notes) == 2
    names = _steps(root)
    assert names[0] == "step-00000004"
    assert [n.split(".aside-")[0] for n in names[1:]] == ["step-00000006", "step-00000008"]
    assert run_ranks(1, _find, root, "auto")[0][0].endswith("step-00000004")


def _settings_after_resume(me, directory, root):
    from update_rig import restore

    module, updater = _trainer(me, directory, load_weights=False)
    for group in updater.optimizer.param_groups:
        group.update(weight_decay=0.5, betas=(0.8, 0.9))
    restore(Path(root) / "step-00000008", module, updater, me)
    return [(group["weight_decay"], group["betas"], len(group["params"])) for group in updater.optimizer.param_groups]


def test_optimizer_settings_are_those_of_now(tiny, saved):
    found = run_ranks(2, _settings_after_resume, tiny, saved[0])[0]
    assert [group[:2] for group in found] == [(0.5, (0.8, 0.9))] * 2
    assert all(group[2] for group in found)


def _prove(me, root):
    from llama405b.checkpoint import store as checkpoint
    from llama405b.contract.errors import UserError

    checkpoint.VISIBILITY_TIMEOUT_S = 1.0
    store = _store(me, Path(root) / ("shared" if me.is_rank0 else "elsewhere"))
    try:
        store.acquire()
    except UserError as error:
        return str(error)
    return "shared"


def _prove_as_another_user(me, root):
    import torch.distributed as dist

    from llama405b.contract.errors import UserError

    os.umask(0o077)
    store = _store(me, root / "shared")
    if me.is_rank0:
        store.root.mkdir()
    dist.barrier()
    if not me.is_rank0:
        os.setresuid(65534, 65534, 0)
    try:
        store.acquire()
    except UserError as error:
        return str(error)
    finally:
        os.setresuid(0, 0, 0)
    return "shared"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_a_rank_that_may_not_read_the_directory_refuses_it():
    with tempfile.TemporaryDirectory() as place:  # pytest's own is closed to other users
        Path(place).chmod(0o755)
        words = run_ranks(2, _prove_as_another_user, Path(place))
    assert words[1].startswith(f"{place}/shared: cannot be written (it belongs to root) on host-1")
    assert words[0] == f"rank 1 failed: {words[1]}"


def _prove_where_it_is_mounted_read_only(me, root):
    from llama405b.contract.errors import UserError

    access, statvfs = os.access, os.statvfs  # a real mount would need a namespace for each rank

    def mounted(path):
        return types.SimpleNamespace(f_flag=statvfs(path).f_flag | os.ST_RDONLY)

    os.statvfs, os.access = mounted, lambda path, mode: access(path, mode) and not mode & os.W_OK
    try:
        _store(me, root).acquire()
    except UserError as error:
        return str(error)
    return "taken"


def test_a_read_only_directory_is_not_told_as_its_owners(tmp_path):
    [said] = run_ranks(1, _prove_where_it_is_mounted_read_only, tmp_path)
    assert "cannot be written (Read-only file system)" in said


def test_a_directory_that_is_not_shared_is_refused(tmp_path):
    words = run_ranks(2, _prove, tmp_path)
    assert words[1].startswith("--checkpoint.dir: rank 1 on host-1 does not see")
    assert words[0] == f"rank 1 failed: {words[1]}"


def test_a_manifest_that_was_written_anew_is_not_the_one_that_was_saved(tmp_path, tiny):
    from llama405b.checkpoint.format import open_manifest
    from llama405b.contract.checkpoints import read_manifest, write_manifest

    root = tmp_path / "checkpoints"
    run_ranks(1, _save_four, tiny, root)
    path = root / "step-00000008"
    manifest, digest = read_manifest((path / "manifest.json").read_bytes())
    assert open_manifest(path, {str(path): digest}) == (manifest, digest)
    edited, other = write_manifest(dataclasses.replace(manifest, sequences=1))
    (path / "manifest.json").write_bytes(edited)
    assert other != digest
    assert open_manifest(path, {str(path): digest}).why == f"{path}: its manifest is not the one that was saved"


def test_the_block_that_was_changed_is_named(tmp_path):
    from manifests import hash_file

    from llama405b.checkpoint.format import CheckpointReader, DamagedError
    from llama405b.contract.checkpoints import Manifest

    (tmp_path / "weights-0-0.safetensors").write_bytes(bytes(950))
    (tmp_path / "index.json").write_bytes(b"")
    files = {name: hash_file(tmp_path / name, 0, 100) for name in ("weights-0-0.safetensors", "index.json")}
    manifest = Manifest(3, 4, files, 1, 100)
    CheckpointReader(tmp_path, manifest).check("weights-0-0.safetensors", 0, 950)
    with (tmp_path / "weights-0-0.safetensors").open("r+b") as file:
        file.seek(720)
        file.write(b"x")
    CheckpointReader(tmp_path, manifest).check("weights-0-0.safetensors", 0, 700)
    with pytest.raises(
        DamagedError, match=r"weights-0-0.safetensors: its content does not match its checksum \(block 8 of 10\)"
    ):
        CheckpointReader(tmp_path, manifest).check("weights-0-0.safetensors", 650, 60)


def test_only_its_own_checkpoints_are_retired(tiny, tmp_path):
    root = tmp_path / "checkpoints"
    run_ranks(1, _save_four, tiny, root)
    for name, step in (("step-00000004", 1), ("step-00000006", 3)):  # of another run, and of no known one
        (root / name).rename(root / f"step-{step:08d}")
    (root / "step-00000003/manifest.json").write_text("{")
    (root / "step-00000008").rename(tmp_path / "later")
    run_ranks(1, _save_four, tiny, root, None, 1, "other")
    assert _steps(root) == ["step-00000001", "step-00000003", "step-00000008"]


def _sealed_while_writing(me, directory, root, fails):
    from llama405b.checkpoint import format as of_seal
    from llama405b.checkpoint import saving as of_saving
    from llama405b.checkpoint import saving as of_write
    from llama405b.contract.errors import UserError

    of_write.BLOCK_BYTES = 10_000
    _, updater = _trainer(me, directory)
    add, write, blocks, pauses = of_write.SafetensorsFile.add, of_saving.CheckpointSaver._write, [], [0.5]

    def full(written, *args):
        if written.path.name.endswith("-0.safetensors"):
            time.sleep(pauses.pop() if pauses else 0)  # so that the other threads have something to write, too
        elif me.index == 1:
            raise fails
        return add(written, *args)

    def compared(saving, partial, *args):
        for name, sealed in write(saving, partial, *args).items():
            read = tuple(of_seal.block_hashes(partial / name, range(len(sealed.blocks)), 10_000))
            assert (sealed.blocks, sealed.bytes) == (read, (partial / name).stat().st_size)
            blocks.append(len(read))
        return {}  # their blocks are not those of a manifest

    if fails:
        of_write.SafetensorsFile.add = full
    else:
        of_saving.CheckpointSaver._write = compared
    with contextlib.closing(_store(me, root)) as store:
        store.acquire()
        try:
            save(store, 1, updater)
        except (UserError, ValueError) as error:
            return str(error), blocks
    return "saved", blocks


def test_files_are_hashed_as_they_are_written(tiny, tmp_path):
    for _, blocks in run_ranks(2, _sealed_while_writing, tiny, tmp_path / "c", None):
        assert len(blocks) > 1  # several threads, each with its file
        assert max(blocks) > 1


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (MemoryError("no more"), "no more"),
    ],
)
def test_a_writer_threads_error_is_not_lost(tiny, tmp_path, error, words):
    for said, _ in run_ranks(2, _sealed_while_writing, tiny, tmp_path / "c", error):
        assert f"the checkpoint could not be written (rank 1: {words})" in said
    assert [name for name in _steps(tmp_path / "c") if not name.endswith(".tmp")] == []


def _room(me, root, keep, free, each):
    from llama405b.checkpoint import store as of_store
    from llama405b.contract.errors import UserError

    of_store.disk_free_bytes = lambda _: free
    try:
        _store(me, root, keep).check_disk_space(each)
    except UserError as error:
        return str(error)
    return ""


def test_a_disk_that_cannot_hold_what_is_kept_is_refused_at_the_start(saved, tmp_path):
    root, _ = saved  # it has three of this run
    GB = 10**9
    assert run_ranks(1, _room, tmp_path, 2, 30 * GB, 10 * GB) == [""]
    [said] = run_ranks(1, _room, tmp_path, 3, 39 * GB, 10 * GB)
    assert "has 39.00 GB free, but a checkpoint takes 10.00 GB, 3 are kept, and one more is being written" in said
    assert said.endswith("use --checkpoint.keep 2, or another directory")
    [said] = run_ranks(1, _room, tmp_path, 2, 29 * GB, 10 * GB)
    assert said.endswith("; use another directory")
    assert run_ranks(2, _room, root, 3, 10 * GB, 10 * GB) == ["", ""]
    alone, together = run_ranks(2, _room, root, 4, 19 * GB, 10 * GB)
    assert alone.endswith("use --checkpoint.keep 3, or another directory")
    assert "rank 0 failed" in together
