"""What a prediction learns of hosts from their facts."""

import re

import pytest

from llama405b.contract.errors import UserError
from llama405b.predict.hardware import GIB, match_gpu, read_gpus
from llama405b_tools.hosts.inventory import parse_hosts
from llama405b_tools.launch.host_facts import HostFacts, Memory, machines_of
from llama405b_tools.parsers import Rdma, RdmaPort, SmiAnswer

GPUS = read_gpus()
HOSTS = parse_hosts("a\nb\n", "hosts")


def facts(name="NVIDIA H100 80GB HBM3", mib=81559, count=8, ram=2 << 40, gbit=("400 Gb/sec", "200 Gb/sec")):
    lines = "".join(f"{i}, {name}, {mib}, 570.1\n" for i in range(count))
    ports = tuple(RdmaPort(f"mlx{i}", 1, "4: ACTIVE", rate, "InfiniBand", (), ()) for i, rate in enumerate(gbit))
    ports += (RdmaPort("mlx9", 1, "1: DOWN", "400 Gb/sec", "InfiniBand", (), ()),)
    return HostFacts(
        gpus=SmiAnswer(lines, ("index", "name", "memory.total", "driver_version")),
        memory=Memory(ram, ram, 0),
        rdma=Rdma(ports),
    )


def test_the_least_of_the_hosts_counts():
    found = machines_of(HOSTS, {"a": facts(), "b": facts(ram=1 << 40, gbit=["400 Gb/sec"])}, GPUS)
    assert (found.nodes, found.slots, found.gpu.name) == (2, 8, "h100-80")
    assert (found.ram_bytes, found.nic_bytes_per_s) == (1 << 40, 50e9)
    none = facts(count=0, gbit=())
    found = machines_of(HOSTS, {"a": none, "b": none}, GPUS)
    assert (found.slots, found.gpu, found.nic_bytes_per_s) == (1, None, 0)


def test_hosts_that_differ_are_refused():
    with pytest.raises(
        UserError, match=r"hosts differ in their GPU \(h100-80 on a; a100-80 on b\); predict each kind separately"
    ):
        machines_of(HOSTS, {"a": facts(), "b": facts("NVIDIA A100-SXM4-80GB", 81920)}, GPUS)
    with pytest.raises(UserError, match=r"hosts differ in their number of ranks \(8 on a; 4 on b\)"):
        machines_of(HOSTS, {"a": facts(), "b": facts(count=4)}, GPUS)
    odd = facts("NVIDIA RTX 9", 24576)
    with pytest.raises(
        UserError, match=re.escape("a: its GPU (NVIDIA RTX 9, 24 GiB) is not in the table; describe it with ")
    ):
        machines_of(HOSTS, {"a": odd, "b": odd}, GPUS)


@pytest.mark.parametrize(
    ("name", "gib", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", 79.6, "h100-80"), ("NVIDIA H200", 140.4, "h200-141"), ("NVIDIA B200", 179, "b200-180"),
        ("NVIDIA GB200", 185, "gb200-186"), ("NVIDIA A100-SXM4-40GB", 40, "a100-40"), ("NVIDIA L40S", 45, "l40s-48"),
        ("NVIDIA H100 NVL", 94, None), ("NVIDIA GH200 480GB", 95, None),
    ],
)  # fmt: skip
def test_names_of_nvidia_smi(name, gib, kind):
    found = match_gpu(name, gib * GIB, GPUS)
    assert (found.name if found else None) == kind


def test_divided_gpus_are_refused_and_unknown_memory_is_not_none():
    divided = HostFacts(
        gpus=SmiAnswer("0, A100, 40960, Enabled\n", ("index", "name", "memory.total", "mig.mode.current"))
    )
    with pytest.raises(
        UserError,
        match=r"a: MIG is on, so a rank would get only a slice of the GPU; .*, or set slots=1 to use one device of it",
    ):
        machines_of(HOSTS, {"a": divided, "b": divided}, GPUS)
    unknown = facts("NVIDIA GB10", "[N/A]")
    with pytest.raises(UserError, match=re.escape("a: its GPU (NVIDIA GB10, memory unknown) is not in the table")):
        machines_of(HOSTS, {"a": unknown, "b": unknown}, GPUS)
