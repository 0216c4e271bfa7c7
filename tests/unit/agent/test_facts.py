"""Facts that doctor, cluster-top and the agent read in one place."""

import os
from pathlib import Path

import pytest

from llama405b_tools.agent import facts, hostprobe, sampler
from ops_rig import wait_for

GIB = 1 << 30


@pytest.mark.parametrize(
    ("limit", "used", "cached", "expected"),
    [
        (None, None, None, (64 * GIB, 40 * GIB)),  # no container
        ("max", f"{9 * GIB}", "0", (64 * GIB, 40 * GIB)),
        (f"{16 * GIB}", f"{9 * GIB}", "0", (16 * GIB, 7 * GIB)),
        (f"{16 * GIB}", f"{16 * GIB}", f"{10 * GIB}", (16 * GIB, 10 * GIB)),  # files that were read, such as weights
        (f"{60 * GIB}", f"{1 * GIB}", "0", (60 * GIB, 40 * GIB)),  # others use the rest
        (f"{16 * GIB}", f"{17 * GIB}", "0", (16 * GIB, 0)),
        (f"{16 * GIB}", f"{1 * GIB}", f"{9 * GIB}", (16 * GIB, 16 * GIB)),
        (f"{16 * GIB}", f"{9 * GIB}", None, (16 * GIB, 16 * GIB)),  # how much of that are files is unknown
        (f"{80 * GIB}", f"{1 * GIB}", "0", (64 * GIB, 40 * GIB)),
    ],
)
def test_memory_within_a_containers_limit_is_what_doctor_and_cluster_top_see(
    tmp_path, monkeypatch, limit, used, cached, expected
):
    stat = None if cached is None else f"anon 1\ninactive_file {cached}\nactive_file 5"
    for name, text in (("memory.max", limit), ("memory.current", used), ("memory.stat", stat)):
        if text is not None:
            (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(facts, "CGROUP", f"{tmp_path}/")
    monkeypatch.setattr(facts, "memory_sizes", lambda: {"MemTotal": 64 * GIB, "MemAvailable": 40 * GIB})
    assert facts.memory() == expected
    assert tuple(hostprobe.read_memory()[name] for name in ("total", "available")) == expected
    assert tuple(sampler.sample_memory()[name] for name in ("total", "available")) == expected


def test_sizes_are_the_kernels():
    text = Path("/proc/meminfo").read_text()
    total_kib = int(text.split()[1])
    assert facts.memory_sizes()["MemTotal"] == total_kib * 1024


def test_a_disk_that_cannot_be_queried_is_unknown(tmp_path):
    free, total = facts.disk_space(str(tmp_path))
    assert 0 <= free <= total
    assert facts.disk_space("/proc") is None  # it has no size
    assert facts.disk_space(str(tmp_path / "missing")) is None


def test_processes_are_found_by_their_mark(tmp_path, monkeypatch):
    pid = os.posix_spawn("/bin/sleep", ["sleep", "600"], {facts.MARKER: f"{tmp_path}:a"})
    try:
        wait_for(lambda: f"{tmp_path}:a" in facts.marked_processes())  # in its exec it shows no environment yet
        assert facts.marked_processes()[f"{tmp_path}:a"] == [pid]
        [row] = sampler.sample_processes(f"{tmp_path}:a".encode())
        assert (row[0], row[5]) == (pid, "sleep 600")
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert f"{tmp_path}:a" not in facts.marked_processes()
