"""A safetensors file that is written and hashed as it grows: what any reader finds in it, and what a disk does to it."""

import contextlib
import hashlib
import os

import pytest
import torch
from safetensors.torch import load_file

from llama405b.checkpoint import saving
from llama405b.checkpoint.index import DTYPE_NAMES, FileKind, Part
from llama405b.checkpoint.saving import SafetensorsFile
from llama405b.spec.tensors import full_slice

TENSORS = {
    "a": torch.arange(700.0).view(70, 10),
    "b": torch.arange(9, dtype=torch.uint8),
    "c": torch.tensor(3.0),
    "d": torch.arange(5000).bfloat16(),
    "e": torch.arange(24.0).view(4, 6)[:, ::2],
}


def _written(path, names):
    parts = {
        name: Part(name, DTYPE_NAMES[t.dtype], t.shape, full_slice(t.shape), name, FileKind.OPTIMIZER, t.nbytes)
        for name, t in TENSORS.items()
    }
    with contextlib.closing(SafetensorsFile(path, [*parts.values()])) as file:
        for name in names:
            file.add(parts[name], TENSORS[name])
        return file.finish()


@pytest.mark.parametrize("block_bytes", [64 << 20, 10_000, 5_000, 4096, 1_000])
@pytest.mark.parametrize("names", ["", "c", "dba", "edcba"])
def test_any_reader_finds_what_was_written_and_the_hashes_are_of_the_file(tmp_path, monkeypatch, block_bytes, names):
    monkeypatch.setattr(saving, "BLOCK_BYTES", block_bytes)
    digest = _written(tmp_path / "x.safetensors", names)
    found = load_file(tmp_path / "x.safetensors")
    assert sorted(found) == sorted(names)
    assert all(torch.equal(found[name], TENSORS[name]) and found[name].dtype == TENSORS[name].dtype for name in names)
    content = (tmp_path / "x.safetensors").read_bytes()
    assert len(content) == digest.bytes
    pieces = [content[begin : begin + block_bytes] for begin in range(0, len(content), block_bytes)]
    assert digest.blocks == tuple(hashlib.sha256(piece).hexdigest() for piece in pieces)


def test_a_disk_that_takes_a_part_of_the_header_gets_the_rest(tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, content, begin: pwrite(file, content[:100], begin))
    _written(tmp_path / "x.safetensors", "ab")
    assert sorted(load_file(tmp_path / "x.safetensors")) == ["a", "b"]
