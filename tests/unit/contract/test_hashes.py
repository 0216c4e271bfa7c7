"""What is noted of files, and when it still counts."""

import concurrent.futures
import os

from llama405b.contract import hashes as of_hashes
from llama405b.contract.hashes import HashStore


def test_files_that_arrive_at_once_are_all_noted(tmp_path):
    names = [f"f{i}" for i in range(24)]
    for name in names:
        (tmp_path / name).write_text(name)
    hashes = HashStore(tmp_path)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda name: hashes.add(name, ("d",)), names * 10))
    assert sorted(HashStore(tmp_path).files) == sorted(names)


def test_the_largest_model_can_be_noted(tmp_path, monkeypatch):
    blocks = tuple(f"{n:064x}" for n in range(70))
    hashes, names = HashStore(tmp_path), [f"model-{n:05}-of-00191.safetensors" for n in range(1, 192)]
    for name in names:
        (tmp_path / name).touch()
        with monkeypatch.context() as patch:
            if name != names[-1]:
                patch.setattr(of_hashes, "write_json", lambda *_: None)  # each writes them all: the last one does
            hashes.add(name, blocks)
    assert all(HashStore(tmp_path).find(name).blocks == blocks for name in (names[0], names[-1]))


def test_a_file_that_was_touched_or_is_gone_is_not_known(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text("x")
        HashStore(tmp_path).add(name, ("d",), "whole")
    os.utime(tmp_path / "a", (1, 1))
    (tmp_path / "b").unlink()
    hashes = HashStore(tmp_path)
    assert [hashes.find(name) and hashes.find(name).sha256 for name in "abcd"] == [None, None, "whole", None]
    assert sorted(hashes.files) == ["a", "c"]
    (tmp_path / ".llama405b-hashes.json").write_text("{}garbage")
    assert HashStore(tmp_path).files == {}
