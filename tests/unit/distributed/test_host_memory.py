from pathlib import Path

import pytest
import torch

from llama405b.contract.errors import UserError
from llama405b.distributed import host_memory


def test_blocks_have_their_sizes_and_do_not_overlap(monkeypatch):
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 1100)
    told = []
    blocks = host_memory.allocate_blocks(
        [300, 300, 300, 5000, 4, 0], torch.device("cpu"), lambda *seen: told.append(seen)
    )
    assert [block.nbytes for block in blocks] == [300, 300, 300, 5000, 4, 0]
    for number, block in enumerate(blocks):
        block.fill_(number)
    assert all(bool((block == number).all()) for number, block in enumerate(blocks))
    assert all(block.data_ptr() % host_memory.ALIGNMENT == 0 for block in blocks)
    assert told[-1] == (5904, 5904)
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert len(told) == 4  # two pieces of two, one of its own, one of the rest


def test_both_peaks_of_a_gpu_and_what_its_allocator_had_to_do(monkeypatch):
    stats = {"allocated_bytes.all.peak": 58, "reserved_bytes.all.peak": 69, "num_alloc_retries": 27, "num_ooms": 1}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    assert host_memory.peak_memory(on_gpu=True) == host_memory.PeakMemory(69, 58, 27, 1)
    monkeypatch.setattr(torch.cuda, "memory_stats", dict)  # without the caching allocator
    assert host_memory.peak_memory(on_gpu=True) == host_memory.PeakMemory(0)
    own = host_memory.peak_memory(on_gpu=False)
    assert own == host_memory.PeakMemory(own.peak_bytes)
    assert own.peak_bytes > 50 << 20


def test_few_pieces_and_little_waste():
    unit = 3_188_000_000 // 64 * 4  # of a 405B layer on 64 ranks
    sizes = [unit] * 126 + [unit // 2] * 3
    grouped = host_memory.group_blocks(sizes)
    assert [size for piece in grouped for size in piece] == sizes
    assert len(grouped) < 10
    taken = sum(-(-size // host_memory.ALIGNMENT) * host_memory.ALIGNMENT for size in sizes)
    assert taken < 1.03 * sum(sizes)


def test_cuda_that_refuses_is_said(monkeypatch):
    class Refusing:
        def cudaHostRegister(self, pointer, n_bytes, flags):
            assert (n_bytes, flags) == (2 << 30, 1)
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    piece = torch.empty(2 << 30, dtype=torch.uint8)
    with pytest.raises(UserError, match=r"cannot pin 8\.0 GiB .*stopped at 1\.0 GiB.* raise the limit"):
        host_memory.register_pinned(piece, 1 << 30, 8 << 30)


@pytest.mark.parametrize("staged", [False, True])
def test_bytes_come_to_where_they_begin_whatever_the_buffers_cut(staged, monkeypatch):
    monkeypatch.setattr(host_memory, "READ_BYTES", 7)
    generator = torch.Generator().manual_seed(0)
    sizes = [13, 0, 160, 1, 64]
    sources = [torch.randint(0, 99, (size,), generator=generator).to(torch.bfloat16) for size in sizes]
    begins = [4, 40, 40, 400, 406]
    target, stage = torch.zeros(540, dtype=torch.uint8), host_memory.DeviceStager(torch.device("cpu"))
    pairs = list(zip(begins, sources, strict=True))
    if staged:
        stage._copy_through_buffers([torch.zeros(50, dtype=torch.uint8) for _ in range(2)], target, pairs, None)
    else:
        stage.copy_to_device(target, pairs)
    for begin, source in pairs:
        assert torch.equal(target[begin : begin + source.nbytes], source.view(torch.uint8))


def test_what_is_pinned_may_be_in_huge_pages():
    piece = host_memory._map_pages(8 << 20)
    [line] = [
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if int(line.split("-")[0], 16) <= piece.data_ptr() < int(line.split("-")[1].split()[0], 16)
    ]
    assert line.split()[1] == "rw-p"  # shared memory gets them only if the administrator says so


def test_torch_that_cannot_pin_is_said_in_a_sentence(monkeypatch):
    from llama405b.optim.offload import pin_for_gradients

    def refuse(*_, **__):
        raise RuntimeError("CUDA error: out of memory\nmore words")

    monkeypatch.setattr(torch, "empty_like", refuse)
    with pytest.raises(UserError, match=r"CUDA error: out of memory\); raise the limit"):
        pin_for_gradients(torch.nn.Linear(4, 4), 1, lambda *_: None)
