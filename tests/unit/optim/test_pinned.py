import pytest
import torch

from llama405b.contract.errors import UserError
from llama405b.optim import pinned


def test_blocks_have_their_sizes_and_do_not_overlap(monkeypatch):
    monkeypatch.setattr(pinned, "PIECE_BYTES", 1100)
    told = []
    blocks = pinned.allocate([300, 300, 300, 5000, 4, 0], torch.device("cpu"), lambda *seen: told.append(seen))
    assert [block.nbytes for block in blocks] == [300, 300, 300, 5000, 4, 0]
    for number, block in enumerate(blocks):
        block.fill_(number)
    assert all(bool((block == number).all()) for number, block in enumerate(blocks))
    assert all(block.data_ptr() % pinned.ALIGNED == 0 for block in blocks)
    assert told[-1] == (5904, 5904)
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert len(told) == 4  # two pieces of two, one of its own, one of the rest


def test_few_pieces_and_little_waste():
    unit = 3_188_000_000 // 64 * 4  # of a 405B layer on 64 ranks
    sizes = [unit] * 126 + [unit // 2] * 3
    grouped = pinned.pieces(sizes)
    assert [size for piece in grouped for size in piece] == sizes
    assert len(grouped) < 10
    taken = sum(-(-size // pinned.ALIGNED) * pinned.ALIGNED for size in sizes)
    assert taken < 1.03 * sum(sizes)


def test_cuda_that_refuses_is_said(monkeypatch):
    class Refusing:
        def cudaHostRegister(self, pointer, n_bytes, flags):
            assert (n_bytes, flags) == (2 << 30, 1)
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    piece = torch.empty(2 << 30, dtype=torch.uint8)
    with pytest.raises(UserError, match=r"CUDA pinned 1\.0 of 8\.0 GiB .* raise the limit"):
        pinned.register(piece, 1 << 30, 8 << 30)
