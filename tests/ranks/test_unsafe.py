"""A checkpoint from elsewhere runs nothing, although a manifest by the same hand vouches for it; and who can write it is said.

Only the form of the version before has pickles.
"""

import dataclasses
import io
import os
import pickle
import shutil

import pytest
import torch
from test_checkpoint import _resume, _save_four, _step, _trainer
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from llama405b.contract.errors import UserError
from llama405b_tools.verbs import export
from ranks_rig import run_ranks
from update_rig import dcp_save

STEP = "step-00000008"


class Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def _save_legacy(me, directory, root):
    """Save steps 6 and 8 in the form of the version before."""
    module, updater = _trainer(me, directory)
    for number in range(1, 9):
        _step(me, module, updater, number)
        if number in (6, 8):
            dcp_save(updater, me, root / f"step-{number:08d}")


def _copied(save, tiny, place):
    run_ranks(2, save, tiny, place / "saved")
    shutil.copytree(place / "saved", place / "checkpoints")
    return place / "checkpoints"


@pytest.fixture
def legacy(tiny, tmp_path):
    return _copied(_save_legacy, tiny, tmp_path)


@pytest.fixture
def root(tiny, tmp_path):
    return _copied(_save_four, tiny, tmp_path)


def _vouch(step, name):
    """Write the manifest anew, as whoever changed a file can."""
    from manifests import hash_file

    from llama405b.contract.checkpoints import read_manifest, write_manifest

    manifest, _ = read_manifest((step / "manifest.json").read_bytes())
    files = {**manifest.files, name: hash_file(step / name, manifest.files[name].rank)}
    (step / "manifest.json").write_bytes(write_manifest(dataclasses.replace(manifest, files=files))[0])


def _change(step, change):
    metadata = pickle.loads((step / ".metadata").read_bytes())
    change(metadata)
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    _vouch(step, ".metadata")


def _append(step, file, content):
    """Append what torch saves of something to a data file; returns its offset and length."""
    written = io.BytesIO()
    torch.save(content, written)
    offset = file.stat().st_size
    with file.open("ab") as opened:
        opened.write(written.getvalue())
    _vouch(step, file.name)
    return {"offset": offset, "length": len(written.getvalue())}


def _evil_bytes(step, name, content):
    """Append a pickle to a data file, and have the metadata say that an entry is there."""
    file = next(step.glob("__0_*.distcp"))
    place = _append(step, file, content) | {"relative_path": file.name}

    def point(metadata):
        place_of_one = next(iter(metadata.storage_data.values()))
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        metadata.storage_data = {i: where for i, where in metadata.storage_data.items() if i.fqn != name}
        metadata.storage_data[MetadataIndex(name)] = dataclasses.replace(place_of_one, **place)

    _change(step, point)


def _refused(tiny, root):
    """What resume and export say."""
    words = [words.removeprefix("rank 0 failed: ") for words in run_ranks(2, _resume, tiny, root)]
    with pytest.raises(UserError) as exported:
        export.main([str(root / STEP), str(root.parent / "out"), "--model", str(tiny)])
    assert words[0] == words[1]
    return words[0], str(exported.value)


def test_metadata_from_elsewhere_runs_nothing(tiny, legacy, tmp_path):
    root = legacy
    _change(root / STEP, lambda metadata: metadata.planner_data.update(x=Touches(tmp_path / "ran")))
    for said in _refused(tiny, root):
        assert said.startswith(f"{root}/{STEP}/.metadata: holds 'posix.mkdir', which DCP's metadata never contains")
    assert not (tmp_path / "ran").exists()


def test_settings_of_the_optimizer_from_elsewhere_are_not_read(tiny, legacy, tmp_path):
    root = legacy
    _evil_bytes(root / STEP, "optimizer.param_groups.0.lr", Touches(tmp_path / "ran"))
    shutil.rmtree(root / "step-00000006")
    for name, passed_over, _ in run_ranks(2, _resume, tiny, root):
        assert (name, passed_over) == (STEP, [])
    assert not (tmp_path / "ran").exists()


def test_what_should_be_a_tensor_and_is_not_runs_nothing(tiny, legacy, tmp_path):
    root = legacy
    _evil_bytes(root / STEP, "model.model.norm.weight", Touches(tmp_path / "ran"))
    resumed, exported = _refused(tiny, root)
    assert "does not hold model.model.norm.weight" in resumed
    assert "model.norm.weight is [], but" in exported
    assert not (tmp_path / "ran").exists()


def _look_at(me, root):
    from llama405b.checkpoint.store import Store
    from llama405b.contract.paths import RunDir

    said = []
    found = Store(root, 3, me, run=RunDir(root.parent / "run"), say=said.append).open_checkpoint(root / STEP)
    return str(found.path), said


def test_a_checkpoint_that_others_can_write_is_used_with_a_warning(tiny, root, capsys):
    file = root / STEP / "weights-0-0.safetensors"
    os.chown(file, 12345, -1)
    (root / STEP / "weights-1-0.safetensors").chmod(0o666)
    warning = (
        f"warning: {file}: belongs to another user (uid 12345); hashes prove that it is complete, not that it is safe"
    )
    for path, said in run_ranks(2, _look_at, root):
        assert path == str(root / STEP)
        assert [each[: len(warning)] for each in said] == [warning]
    assert export.main([str(root / STEP), str(root.parent / "out"), "--model", str(tiny)]) == 0
    assert capsys.readouterr().err.count(warning) == 1


def test_a_checkpoint_of_another_user_resumes(tiny, root):
    os.chown(root / STEP, 12345, -1)
    for name, passed_over, _ in run_ranks(2, _resume, tiny, root):
        assert (name, passed_over) == (STEP, [])


def _point(step, name, content):
    """Have the metadata say that a tensor is where something else was appended to its file."""

    def point(metadata):
        index = next(index for index in metadata.storage_data if index.fqn == name)
        info = metadata.storage_data[index]
        place = _append(step, step / info.relative_path, content)
        metadata.storage_data[index] = dataclasses.replace(info, **place)

    _change(step, point)


def test_a_chunk_that_is_a_pickle_of_something_else_runs_nothing(tiny, legacy, tmp_path):
    _point(legacy / STEP, "model.model.norm.weight", Touches(tmp_path / "ran"))
    for said in _refused(tiny, legacy):
        assert "holds something that is not a tensor and could run commands as you; do not use this checkpoint" in said
    assert not (tmp_path / "ran").exists()


def test_a_chunk_of_another_shape_is_not_spread_over_its_place(tiny, legacy):
    _point(legacy / STEP, "model.model.norm.weight", torch.full((1,), 7.0))
    with pytest.raises(UserError, match=r"has \[1\] where \[12\] should be"):
        export.main([str(legacy / STEP), str(legacy.parent / "out"), "--model", str(tiny)])
    for name, passed_over, _ in run_ranks(2, _resume, tiny, legacy):
        assert name == "step-00000006"
        assert "has [1] where [12] should be" in passed_over[0]
