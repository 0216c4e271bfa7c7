"""Each rank's threads belong on the NUMA node of its GPU."""

import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from llama405b.distributed import host_memory, ranks
from llama405b.parallel import load_weights
from llama405b.spec.tensors import read_tensors


@pytest.fixture
def sys(tmp_path):
    """Two sockets of four physical cores with two threads each: CPU i and i + 8 are one core; GPUs 0, 1 on node 1, 2 on 0."""
    for cpu in range(16):
        node = tmp_path / f"devices/system/node/node{cpu % 8 // 4}"
        (node / f"cpu{cpu}").mkdir(parents=True)
        topology = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    for bus, node in (("0000:1b:00.0", 1), ("0000:3d:00.0", 1), ("0001:01:00.0", 0), ("0002:01:00.0", -1)):
        device = tmp_path / "bus/pci/devices" / bus
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    return tmp_path


def test_the_node_is_that_of_the_gpu(sys):
    assert ranks.numa_node("0000:1b:00.0", sys) == 1
    assert ranks.numa_node("0002:01:00.0", sys) == -1
    assert ranks.numa_node("0009:01:00.0", sys) == -1


def cores(*cpus):
    return frozenset(thread for cpu in cpus for thread in (cpu, cpu + 8))


def test_ranks_of_one_node_have_physical_cores_of_their_own(sys):
    everything = range(16)
    assert ranks.choose_binding([1, 1, 0], 0, everything, sys) == ranks.CpuBinding(1, cores(4, 5), 2)
    assert ranks.choose_binding([1, 1, 0], 1, everything, sys) == ranks.CpuBinding(1, cores(6, 7), 2)
    assert ranks.choose_binding([1, 1, 0], 2, everything, sys) == ranks.CpuBinding(0, cores(0, 1, 2, 3), 4)
    assert [ranks.choose_binding([1] * 3, rank, everything, sys).cpus for rank in range(3)] == [
        cores(4),
        cores(5),
        cores(6, 7),
    ]


def test_a_cgroup_s_cpus_count(sys):
    assert ranks.choose_binding([1], 0, {0, 1, 6, 14}, sys) == ranks.CpuBinding(1, frozenset({6, 14}), 1)
    assert ranks.choose_binding([1], 0, {0, 1}, sys) == ranks.CpuBinding(-1, frozenset({0, 1}), 2)  # none of its node's


def test_where_the_node_is_unknown_ranks_share_all_physical_cores(sys, tmp_path_factory):
    """As in most virtual machines: with threads as many as CPUs, each rank would have all of them, and twice where cores have two."""
    machine = [ranks.choose_binding([-1] * 4, rank, range(16), sys) for rank in range(4)]
    assert [each.cpus for each in machine] == [cores(0, 1), cores(2, 3), cores(4, 5), cores(6, 7)]
    assert {each.cores for each in machine} == {2}
    assert ranks.choose_binding([-1], 0, range(4), tmp_path_factory.mktemp("nothing")) == ranks.CpuBinding(
        -1, frozenset(range(4)), 4
    )


def test_more_ranks_than_cores_may_run_on_any(sys):
    assert ranks.choose_binding([1] * 8, 7, range(16), sys) == ranks.CpuBinding(1, cores(4, 5, 6, 7), 1)


def test_a_rank_without_a_gpu_is_not_bound(monkeypatch):
    from llama405b.distributed.ranks import Rank

    monkeypatch.setattr(ranks.os, "sched_setaffinity", lambda *_: pytest.fail("bound"))
    assert ranks.bind_cores(Rank(0, 1, 0, "a", ranks.torch.device("cpu"))) == ""


@pytest.mark.parametrize("own", [True, False])
def test_the_users_number_of_threads_is_kept(monkeypatch, own):
    from llama405b.distributed.ranks import Rank
    from llama405b.spec.plan import OWN_THREADS

    monkeypatch.delenv(OWN_THREADS, raising=False)
    if own:
        monkeypatch.setenv(OWN_THREADS, "1")
    threads = []
    monkeypatch.setattr(ranks.torch, "set_num_threads", threads.append)
    monkeypatch.setattr(ranks.torch, "get_num_threads", lambda: (threads or [3])[-1])
    monkeypatch.setattr(ranks.os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(ranks, "bus_id", lambda _: "0")
    monkeypatch.setattr(ranks, "choose_binding", lambda *_: ranks.CpuBinding(0, frozenset({0, 1}), 8))
    said = ranks.bind_cores(Rank(0, 1, 0, "a", ranks.torch.device("cuda", 0)))
    assert threads == ([] if own else [8])
    assert said.startswith("cores: bound to 8 cores (2 CPUs) of NUMA node 0 of its GPU; ")
    assert said.endswith("; 3 threads (OMP_NUM_THREADS)" if own else "; 8 threads")


MAPS = """\
55d0c0a00000 default file=/usr/bin/python3 mapped=12 N0=12 kernelpagesize_kB=4
7f0000000000 prefer:1 anon=2048 dirty=2048 N0=512 N1=1536 kernelpagesize_kB=2048
7f1000000000 prefer:1 anon=3 dirty=3 N1=3 kernelpagesize_kB=4
7f2000000000 default file=/models/a.safetensors mapped=9 N0=9 kernelpagesize_kB=4
7ffc00000000 default stack anon=3 dirty=3 N0=3
"""


def test_memory_is_counted_by_node_without_files():
    assert host_memory.bytes_by_numa_node(MAPS) == {
        0: 512 * (2 << 20) + 3 * 4096,
        1: 1536 * (2 << 20) + 3 * 4096,
    }
    own = host_memory.bytes_by_numa_node(Path("/proc/self/numa_maps").read_text())
    assert sum(own.values()) > 1 << 20


@pytest.mark.parametrize(
    ("node", "far", "words"),
    [(1, 0.25, "WARNING: 25% of the 4 GiB of rank 0 is on another NUMA node than its GPU"), (0, 0.75, "75%")],
)
def test_memory_far_from_the_gpu_is_told(monkeypatch, tmp_path, node, far, words):
    (tmp_path / "maps").write_text(MAPS)
    rank = ranks.Rank(0, 1, 0, "host", torch.device("cuda", 0))
    monkeypatch.setattr(ranks, "bus_id", lambda _: "0000:1b:00.0")
    monkeypatch.setattr(ranks, "numa_node", lambda _: node)
    monkeypatch.setattr(ranks.collectives, "all_gather_objects", lambda value: [value])
    assert words in ranks.describe_memory_nodes(rank, tmp_path / "maps")
    near = MAPS.replace("N0=512 N1=1536", "N1=2048")
    (tmp_path / "maps").write_text(near)
    expected = "memory: at least 100% of each rank's is on the NUMA node of its GPU"
    assert (ranks.describe_memory_nodes(rank, tmp_path / "maps") == expected) == (node == 1)


def test_the_policy_is_asked_of_the_kernel(monkeypatch):
    asked = []

    class Libc:
        def syscall(self, number, mode, mask, bits):
            asked.append((number, mode, list(mask), bits))
            return 0

    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda *_, **__: Libc())
    monkeypatch.setattr(host_memory.os, "uname", lambda: SimpleNamespace(machine="x86_64"))
    host_memory.prefer_numa_node(1)
    host_memory.prefer_numa_node(66)
    assert asked == [(238, 1, [2], 65), (238, 1, [0, 4], 129)]


def test_what_was_read_leaves_the_page_cache(monkeypatch, tmp_path):
    rows, columns = 4096, 64
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)}, path)
    dropped = []
    monkeypatch.setattr(host_memory.os, "posix_fadvise", lambda _, *rest: dropped.append(rest))
    for share, box, ranges in ((1.0, (0, rows), 0), (0.0, (0, rows), 1), (0.0, (7, 3000), 1)):
        monkeypatch.setattr(load_weights, "MIN_CACHED_SHARE", share)
        files, dropped[:] = load_weights._MappedWeights(read_tensors(tmp_path)), []
        files.reads_alone = False
        values = files.read("a", (box, (0, columns)))
        files.read("a", ((0, rows), (0, 3)))  # of which other ranks read the other columns
        files.drop_read()
        files.drop_read()
        assert len(dropped) == ranges
        for begin, n_bytes, advice in dropped:
            first = files.layout["a"].offset + box[0] * columns * 4
            assert (begin % mmap.PAGESIZE, n_bytes % mmap.PAGESIZE, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
            assert first <= begin < first + mmap.PAGESIZE
            assert 0 <= first + (box[1] - box[0]) * columns * 4 - begin - n_bytes < mmap.PAGESIZE
        assert values[0, 0] == box[0] * columns  # read again from the file
