"""Files and parts of checkpoints over a real connection: what arrives, what is read for it, and what is refused."""

import contextlib
import itertools
import os
import random
import re
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from llama405b.contract.errors import UserError
from llama405b.contract.hashes import BLOCK_BYTES, BlockHasher, HashStore
from llama405b.settings.axes import Axes
from llama405b.spec.tensors import HostShard, ShardLayout, count_elements, read_layouts, read_tensors
from llama405b_tools.agent import transfer
from llama405b_tools.agent.transfer import DirectorySource, NextHost, Receiver, list_files, open_files
from tiny_models import write_llama

TOKEN = "secret"


class _Counting(DirectorySource):
    """Counts the bytes that are read."""

    n_read = 0

    def read(self, name, begin):
        for chunk in super().read(name, begin):
            self.n_read += len(chunk)
            yield chunk


def _send(source, root, below=None):
    """Send to a receiver, which passes it on; returns what it says is bad, and how many bytes crossed."""
    receiver, crossed = Receiver(root, TOKEN), []

    def receive():
        with contextlib.suppress(transfer.BrokenLinkError):
            receiver.run(below)

    ends = threading.Thread(target=receive)
    ends.start()
    with transfer.connect_to_host(NextHost(("127.0.0.1",), receiver.port, TOKEN)) as link:

        class Counted:
            recv = link.recv

            @staticmethod
            def sendall(data):
                crossed.append(len(data))
                link.sendall(data)

        try:
            transfer.send_files(source, TOKEN, Counted, lambda _: None)
        finally:
            link.close()
            ends.join(20)
    return receiver.faults, sum(crossed)


def _note(root, name):
    hasher = BlockHasher()
    hasher.update((root / name).read_bytes())
    HashStore(root).add(name, hasher.blocks)


@pytest.fixture
def big(tmp_path):
    root = tmp_path / "source"
    root.mkdir()
    (root / "big").write_bytes(random.Random(0).randbytes(1 << 20) * 140)
    return root


@pytest.mark.slow
def test_what_differs_is_sent_again_from_its_block_on(big, tmp_path):
    to = tmp_path / "to"
    to.mkdir()
    content = bytearray((big / "big").read_bytes())
    content[BLOCK_BYTES + 5] ^= 1
    (to / "big").write_bytes(content)
    bad, crossed = _send(open_files(big, None), to)
    assert bad == ["big differs from the source (SHA-256 of block 1)"]
    assert crossed < 1 << 20
    assert not (to / "big").exists()
    assert (to / ".big.part").stat().st_size == BLOCK_BYTES
    bad, crossed = _send(open_files(big, None), to)
    assert bad == []
    assert 76 << 20 <= crossed < 77 << 20
    assert (to / "big").read_bytes() == (big / "big").read_bytes()


def test_what_is_known_is_neither_read_nor_sent(big, tmp_path):
    _note(big, "big")
    assert _send(_Counting(big, list_files(big)[0]), tmp_path / "to")[0] == []
    again = _Counting(big, list_files(big)[0])
    assert _send(again, tmp_path / "to")[1] < 1000
    assert again.n_read == 0
    os.utime(big / "big", ns=(0, 0))  # changed since, for all that is known
    again = _Counting(big, list_files(big)[0])
    assert _send(again, tmp_path / "to")[0] == []
    assert again.n_read == 140 << 20


def test_a_file_that_changed_after_it_was_noted_does_not_arrive(big, tmp_path):
    _note(big, "big")
    info = (big / "big").stat()
    with (big / "big").open("r+b") as file:
        file.seek(BLOCK_BYTES * 2)
        file.write(b"x")
    os.utime(big / "big", ns=(info.st_atime_ns, info.st_mtime_ns))
    assert _send(open_files(big, None), tmp_path / "to")[0] == ["big differs from the source (SHA-256 of block 2)"]
    assert not (tmp_path / "to/big").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(0, 140 << 20), (0, 90 << 20), (90 << 20, 0), (30 << 20, 90 << 20)])
def test_a_host_passes_on_what_the_next_one_lacks(big, tmp_path, first, second):
    content = (big / "big").read_bytes()
    for name, size in (("one", first), ("two", second)):
        (tmp_path / name).mkdir()
        if size:
            (tmp_path / name / ("big" if size == len(content) else ".big.part")).write_bytes(content[:size])
    two = Receiver(tmp_path / "two", TOKEN)
    below = threading.Thread(target=two.run, args=(None,))
    below.start()
    bad, _ = _send(open_files(big, None), tmp_path / "one", NextHost(("127.0.0.1",), two.port, TOKEN))
    below.join(20)
    assert (bad, two.faults, below.is_alive()) == ([], [], False)
    assert all((tmp_path / name / "big").read_bytes() == content for name in ("one", "two"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "each", "chunks"),
    [
        (Axes(1), 1, 1), (Axes(4), 2, 1), (Axes(6), 3, 1), (Axes(5), 1, 1), (Axes(64), 8, 1), (Axes(2, dp_replicate=2), 1, 1),
        (Axes(3, tp=2), 2, 1), (Axes(3, tp=2), 3, 1), (Axes(2, pp=2), 2, 1), (Axes(1, pp=2, tp=2), 1, 2), (Axes(2, cp=2), 2, 1),
    ],
)  # fmt: skip
def test_the_parts_of_all_hosts_are_the_whole(tmp_path, axes, each, chunks):
    world, model = axes.world_size, write_llama(tmp_path / "m", dtype=torch.bfloat16)
    whole = read_tensors(model)
    bits = {}
    for file in model.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            bits |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    seen = {name: torch.zeros(info.shape, dtype=torch.int32) for name, info in whole.items()}
    holdings = ShardLayout.from_shapes({name: info.shape for name, info in whole.items()}, axes, chunks)
    for first in range(0, world, each):
        part = HostShard(first, first + each - 1, axes, chunks)
        assert _send(open_files(model, part), tmp_path / part.name)[0] == []
        [layout] = read_layouts(tmp_path / part.name)
        ranks = range(first, first + each)
        assert layout.keys() == {name for name in whole if any(holdings.has_tensor(name, rank) for rank in ranks)}
        for name, info in layout.items():
            assert (info.shape, info.dtype) == (whole[name].shape, whole[name].dtype)
            content = info.file.read_bytes()
            for piece in info.slices:
                inside = tuple(slice(*each) for each in piece.box)
                expected = bits[name][inside].contiguous().view(torch.uint8).numpy().tobytes()
                assert content[piece.offset :][: info.slice_bytes(piece.box)] == expected
                seen[name][inside] += 1
            boxes = [holdings.slice_of(name, info.shape, rank) for rank in ranks if holdings.has_tensor(name, rank)]
            assert all(info.find_slice(box) for box in boxes)
            assert info.stored_bytes <= 2 * sum(map(count_elements, boxes)), "no more than its ranks need"
        assert (tmp_path / part.name / "config.json").is_file()
    assert all((count > 0).all() for count in seen.values())


@pytest.mark.slow
def test_a_part_is_verified_by_the_blocks_of_the_whole(tmp_path):
    model = tmp_path / "m"
    model.mkdir()
    save_file({"a": torch.arange(40 << 20, dtype=torch.float32).view(-1, 1024)}, model / "model.safetensors")
    _note(model, "model.safetensors")
    info = (model / "model.safetensors").stat()
    assert info.st_size > 2 * BLOCK_BYTES
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(2 * BLOCK_BYTES + 100)  # of the last rank alone
        file.write(b"x")
    os.utime(model / "model.safetensors", ns=(info.st_atime_ns, info.st_mtime_ns))
    assert _send(open_files(model, HostShard(0, 0, Axes(3))), tmp_path / "to")[0] == []
    with pytest.raises(OSError, match=r"model.safetensors is damaged \(SHA-256 of block 2\); delete it"):
        _send(open_files(model, HostShard(2, 2, Axes(3))), tmp_path / "other")
    assert not list(Path(tmp_path / "other").rglob("*.safetensors"))


def test_hashes_do_not_depend_on_how_the_stream_comes():
    data = random.Random(1).randbytes(1000)
    for size in (0, 1, 99, 100, 101, 200, 1000):
        whole, pieces = BlockHasher(100), BlockHasher(100)
        whole.update(data[:size])
        for begin, end in itertools.pairwise([*range(0, size, 7), size]):
            pieces.update(data[begin:end])
        assert whole.blocks == pieces.blocks
        assert len(whole.blocks) == max(1, -(-size // 100))


def test_what_data_cannot_be_sent_is_refused_and_what_is_left_out_is_named(tmp_path):
    for name in ("a/model.bin", "a/.cache/x", ".hidden", "blobs/dir/1.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a/shards").symlink_to("../blobs/dir")
    os.mkfifo(tmp_path / "pipe")
    names, notes = list_files(tmp_path)
    assert names == ("a/model.bin", "a/shards/1.bin", "blobs/dir/1.bin")
    assert notes == (
        "left out, hidden: .hidden, a/.cache", "left out, empty directories: empty", "left out, neither files nor directories: pipe",
    )  # fmt: skip
    for target, words in (
        ("missing", "which does not exist; add the missing file"),
        ("..", "a directory that it is in"),
    ):
        (tmp_path / "a/link").symlink_to(target)
        with pytest.raises(UserError, match=f"a/link: is a link to {re.escape(target)}, {words}"):
            list_files(tmp_path)
        (tmp_path / "a/link").unlink()


def test_a_file_that_appears_while_it_is_sent_is_written_over(tmp_path, monkeypatch):
    source, to = tmp_path / "source", tmp_path / "to"
    source.mkdir()
    to.mkdir()
    (source / "Thumbs.db").write_text("right")
    look = Receiver._present_bytes

    def present(self, name, size):
        here = look(self, name, size)
        (to / name).write_text("wrong")  # of the same length, by a file server
        return here

    monkeypatch.setattr(Receiver, "_present_bytes", present)
    assert _send(open_files(source, None), to)[0] == []
    assert (to / "Thumbs.db").read_text() == "right"


def test_programs_stay_programs_and_a_directory_in_the_way_is_named(tmp_path):
    source, to = tmp_path / "source", tmp_path / "to"
    source.mkdir()
    (source / "run.sh").write_text("x")
    for mode in (0o755, 0o644, 0o755):  # a change of it alone, too
        (source / "run.sh").chmod(mode)
        assert _send(open_files(source, None), to)[0] == []
        assert bool((to / "run.sh").stat().st_mode & 0o111) == bool(mode & 0o111)
    (to / "run.sh").unlink()
    (to / "run.sh").mkdir()
    receiver = Receiver(to, TOKEN)
    with pytest.raises(
        OSError, match=r"to/run\.sh is a directory there, not a file; delete it, or choose another directory"
    ):
        receiver._present_bytes("run.sh", 1)
    assert sorted(path.name for path in to.iterdir()) == [".llama405b-hashes.json", "run.sh"]
