"""Memory for copies of what is saved: never more than its limit, whatever sizes come and go, and not in splinters."""

import random

import pytest
import torch

from llama405b.checkpoint.copy_on_update import Staging
from llama405b.distributed import host_memory

CPU = torch.device("cpu")


def staging(sizes, limit):
    return Staging(sizes, limit, CPU, lambda *_: None)


def held(staging):
    return sum(slab.memory.numel() for slab in staging.slabs)


def test_all_that_is_saved_fits_where_there_is_room():
    sizes = [4, 1000, 4, 70_000, 0, 4]
    room = staging(sizes, 1 << 20)
    assert all(room.allocate(size) is not None for size in sizes)
    assert held(room) == sum(-(-size // 256) * 256 for size in sizes)  # not a power of two, as torch pins


@pytest.mark.parametrize("limit", [0, 100, 256, 1000, 4096, 5000])
def test_it_holds_no_more_than_its_limit(monkeypatch, limit):
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 2048)
    assert held(staging([1000] * 4, limit)) == min(limit, 4 * 1024) // 256 * 256


def test_what_is_given_back_is_whole_again(monkeypatch):
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 40_000)
    chance = random.Random(0)
    room = staging([10_000] * 8, 80_000)
    first = [slab.gaps.copy() for slab in room.slabs]
    taken = []
    refused = 0
    for number in range(2000):
        if taken and chance.random() < 0.5:
            buffer, content = taken.pop(chance.randrange(len(taken)))
            assert bool((buffer == content).all())  # no other has written into it
            room.free(buffer)
        elif (buffer := room.allocate(chance.choice([4, 256, 3000, 12_345]))) is None:
            refused += 1
        else:
            taken.append((buffer.fill_(number % 251), number % 251))
    assert refused
    for buffer, _ in taken:
        room.free(buffer)
    assert [slab.gaps for slab in room.slabs] == first
