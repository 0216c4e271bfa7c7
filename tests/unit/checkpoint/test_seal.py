"""What is seen of a damaged checkpoint before its tensors are read."""

import os

import pytest
from manifests import hash_file

from llama405b.checkpoint.format import CheckpointFault, RejectedCheckpoint, check_files, open_manifest
from llama405b.contract.checkpoints import Manifest, write_manifest


def _checkpoint(root, step):
    path = root / f"step-{step:08d}"
    (path / "model").mkdir(parents=True)
    for name in (
        "index.json",
        "weights-0-0.safetensors",
        "weights-1-0.safetensors",
        "config.toml",
        "model/config.json",
    ):
        (path / name).write_text(f"{name} of step {step}")
    files = {
        name: hash_file(path / name, rank)
        for rank, name in (
            (0, "index.json"),
            (0, "weights-0-0.safetensors"),
            (1, "weights-1-0.safetensors"),
            (0, "config.toml"),
            (0, "model/config.json"),
        )
    }
    content, _ = write_manifest(Manifest(3, step, files, 2))
    (path / "manifest.json").write_bytes(content)
    return path


def _copy(name):
    return lambda path: (path / name).write_bytes((path.with_name("step-00000004") / name).read_bytes())


def _edit(path):
    file = path / "manifest.json"
    file.write_bytes(
        file.read_bytes().replace(b'"world_size": 2', b'"world_size": 3').replace(b'"world_size":2', b'"world_size":3')
    )


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_copy("index.json"), "index.json: its content does not match its checksum"),
        (_copy("manifest.json"), "its manifest is for step 4"),
        (_copy("config.toml"), "config.toml: its content does not match its checksum"),
        (_edit, "its manifest does not verify"),
        (lambda path: os.truncate(path / "manifest.json", 100), "its manifest does not verify"),
        (lambda path: (path / "manifest.json").unlink(), "has no manifest"),
        (lambda path: (path / "model/config.json").unlink(), "model/config.json: missing"),
        (
            lambda path: (path / "weights-1-0.safetensors").write_text("longer than it was before"),
            "weights-1-0.safetensors: 25 bytes, but the manifest says",
        ),
    ],
)
def test_it_is_passed_over_and_named(tmp_path, damage, words):
    _checkpoint(tmp_path, 4)
    path = _checkpoint(tmp_path, 8)
    damage(path)
    found = open_manifest(path)
    if not isinstance(found, RejectedCheckpoint):
        _, found = check_files(path, found[0])
    assert found.fault is CheckpointFault.DAMAGED
    assert words in found.why


def test_what_was_saved_is_not_replaced_by_another_manifest_of_the_step(tmp_path):
    path = _checkpoint(tmp_path, 8)
    manifest, _ = open_manifest(path)
    assert check_files(path, manifest) == (list(manifest.files), None)
    (path / "extra.safetensors").touch()
    assert check_files(path, manifest)[1] is None
    assert "its manifest is not the one that was saved" in open_manifest(path, {str(path): "another digest"}).why
