"""What doctor concludes from facts: every day-one fault of a host, with its remedy. GPU hardware is text in tests/data."""

import copy
import dataclasses
import json
import re
from pathlib import Path

import pytest

from conftest import ROOT
from llama405b.contract import reader
from llama405b.settings import command
from llama405b.spec.probes import Figure, Probe, ProbeResult
from llama405b_tools import parsers
from llama405b_tools.hosts.fleet import command_to_type, program_name
from llama405b_tools.hosts.inventory import parse_hosts
from llama405b_tools.launch import doctor, host_rules
from llama405b_tools.launch.doctor import Survey, estimate_requirements
from llama405b_tools.launch.findings import BAD, NOTE, WARN
from llama405b_tools.launch.host_facts import HostFacts, PeerReach
from llama405b_tools.launch.host_rules import Peers, Requirements

DATA = ROOT / "tests/data/doctor"
FIELDS = [
    "index", "name", "memory.total", "memory.used", "ecc.errors.uncorrected.volatile.total", "retired_pages.pending",
    "remapped_rows.pending", "clocks.max.sm", "clocks.sm", "power.limit", "power.max_limit", "clocks_event_reasons.active",
    "pcie.link.width.current", "pcie.link.width.max", "pcie.link.gen.current", "pcie.link.gen.max", "temperature.gpu",
    "driver_version",
]  # fmt: skip


READ_ONLY = "/w cannot be written: the filesystem of /w is read-only (after an I/O error, dmesg says why)"
INFOROM = "WARNING: infoROM is corrupted at gpu 0000:43:00.0\n"


def rdma(name):
    return reader.loads(parsers.Rdma, (DATA / name).read_text(), name)


def smi(name):
    return {
        "smi": (DATA / name).read_text(),
        "fields": FIELDS,
        "apps": "",
        "nvlink": "",
        "xid": [],
        "dmesg_readable": True,
    }


def good():
    packages = {"python": "3.12.3", "torch": "2.13.0", "transformers": "5.23.0", "flash-attn": "missing",
                "llama405b": "0.1.0", "nccl": "2.29.1", "cuda": "12.8"}  # fmt: skip
    return {
        "identity": {
            "hostname": "h", "os": "Ubuntu 24.04", "kernel": "6.8.0", "user": "ubuntu",
            "tools": {"tmux": True, "ip": True, "git": True, "nvidia-smi": True, "srun": False},
        },
        "environment": {"workdir": "/w", "workdir_exists": True, "packages": packages, "code": "abc"},
        "gpus": smi("good.csv"),
        "rdma": json.loads((DATA / "infiniband.json").read_text())
        | {"ports": json.loads((DATA / "infiniband.json").read_text())["ports"][:2]},
        "network": {"addresses": [{"interface": "eth0", "address": "10.0.0.5", "mbit": "100000"}], "default": "eth0"},
        "tmux": {"memlock_kib": "unlimited", "open_files": "1048576"},
        "memory": {"total": 2 << 40, "available": 2 << 40, "shm_free": 64 << 30},
        "disks": {"filesystems": [{"path": "/w", "free": 1 << 40, "writable": True}], "unmounted_nvme": []},
        "weights": {"path": "/m", "present": True, "files": 191, "bytes": 812, "faults": []},
        "leftovers": {},
        "kill_user_processes": False,
    }  # fmt: skip


def peers(*hosts, faults=None, chosen=None, candidates=None):
    candidates = candidates or {host: ["10.0.0.5"] for host in hosts}
    reach = {}
    for a in hosts:
        reach[a] = {}
        for b in hosts:
            if a != b:
                reached = {
                    f"{address}:{port}": {
                        "fault": (fault := (faults or {}).get((a, b, address), "")),
                        "unresolved": "known" in fault,
                    }
                    for address in candidates[b]
                    for port in (29400, 40000)
                }
                reach[a][b] = reader.build_record(PeerReach, {"resolves": ["10.0.0.5", 0.01], "reached": reached}, b)
    return Peers(
        reach, candidates, {host: [29400, 40000] for host in hosts}, {h: (chosen or {}).get(h, "") for h in hosts}
    )


def diagnose(facts, needs=None, skew=None, lost=None, links=None):
    read = {host: reader.build_record(HostFacts, each, host) for host, each in facts.items()}
    return host_rules.list_findings(read, lost or {}, skew or {}, links or peers(*facts), needs or Requirements())


def test_good_hosts_have_nothing_to_be_said():
    assert diagnose({"a": good(), "b": good()}) == []


@pytest.mark.parametrize(
    ("settings", "shared"),
    [
        ((), "runs"),
        (("--checkpoint.dir", "/c"), "/c"),
        (("--checkpoint.storage", "local"), ""),
        (("--checkpoint.every", "0"), ""),
    ],
)
def test_a_run_needs_a_directory_that_all_hosts_see_if_it_saves_there(settings, shared):
    asked = command.parse(["--preset", "demo", *settings]).config
    needs = estimate_requirements(asked, "demo", parse_hosts("a\nb\nc\n", "hosts"))
    assert (needs.settings, needs.shared_directory) == (asked, shared)
    unshared = dataclasses.replace(peers("a", "b", "c"), unshared=["b", "c"])
    [found] = diagnose({"a": good() | {"marked": "/w/runs"}, "b": good(), "c": good()}, needs, links=unshared)
    assert (found.level, found.hosts) == (BAD, ("b", "c"))
    assert found.what == "it does not see what a writes in /w/runs, the checkpoint directory"


def test_a_disk_that_cannot_be_written_is_one_fault_with_one_remedy():
    facts = good()
    facts["environment"]["writable"] = False
    facts["disks"]["filesystems"][0] |= {"writable": False, "read_only": True}
    assert [(f.what, f.level) for f in diagnose({"a": facts})] == [(READ_ONLY, BAD)]


@pytest.mark.parametrize(
    ("cuda", "driver", "fits"), [("13.0", "580.65.06", True), ("13.0", "579.99", False), ("12.8", "525.60.13", True)]
)
def test_the_oldest_driver_that_cuda_takes_is_not_too_old(cuda, driver, fits):
    facts = good()
    facts["environment"]["packages"]["cuda"] = cuda
    facts["gpus"]["smi"] = facts["gpus"]["smi"].replace("570.124.06", driver)
    assert (diagnose({"a": facts}) == []) is fits


def put(*path):
    *keys, last, value = path

    def change(facts):
        part = facts
        for key in keys:
            part = part[key]
        part[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "level", "what", "remedy"),
    [
        (put("identity", "tools", "tmux", False), BAD, "tmux is not installed", "apt-get update && apt-get install tmux"),
        (put("identity", "tools", "ip", False), BAD, "ip (iproute2) is not installed", "apt-get install iproute2"),
        (put("environment", "workdir_exists", False), BAD, "there is no directory /w", "llama405b setup"),
        (put("disks", "filesystems", [{"path": "/w", "free": 1 << 40, "writable": False}]), BAD, "/w cannot be written: permission denied", "change its owner, or choose another directory"),
        (put("environment", "packages", None), BAD, "its python cannot be run", "set python="),
        (put("environment", "packages", "torch", "missing"), BAD, "torch is not installed for its python", "llama405b setup"),
        (put("environment", "packages", "torch", "2.8.0"), BAD, "torch is 2.8.0", "at least 2.11"),
        (put("environment", "packages", "python", "3.9.2"), BAD, "python is 3.9.2", "at least 3.11"),
        (put("environment", "packages", "cuda", "13.0"), BAD, "driver 570.124.06 is too old for torch's CUDA 13.0", "580 or newer"),
        (put("environment", "packages", "cuda", "none"), BAD, "its torch was built without CUDA", "fits the driver"),
        (put("kill_user_processes", True), BAD, "KillUserProcesses=yes", "loginctl enable-linger"),
        (put("tmux", {"memlock_kib": "8192", "open_files": "1024"}), BAD, "only 8192 KiB may be locked inside tmux", "tmux kill-server"),
        (put("tmux", {"memlock_kib": "unlimited", "open_files": "1024"}), WARN, "1024 open files", "nofile"),
        (put("tmux", {"failed": "open terminal failed"}), BAD, "its tmux does not work (open terminal failed)", "tmux new"),
        (put("environment", "max_connections", "1"), WARN, "sets CUDA_DEVICE_MAX_CONNECTIONS to 1", "unset it"),
        (put("memory", "shm_free", 64 << 20), WARN, "/dev/shm has 0.1 GiB free", "--shm-size"),
        (put("disks", "filesystems", [{"path": "/w", "free": 10 << 20, "writable": True}]), BAD, "its disk is full (10 MiB free at /w)", "make room"),
        (put("disks", "filesystems", [{"path": "/w", "free": 1 << 40, "writable": True, "free_files": 3}]), BAD, "its disk is out of inodes (3 more files can be created at /w)", "delete files"),
        (put("disks", "filesystems", [{"path": "/w", "free": 1 << 40}, {"path": "/c", "free": 10 << 20}]), BAD, "its disk is full (10 MiB free at /c)", "choose a directory on another disk"),
        (put("disks", "unmounted_nvme", [{"device": "/dev/nvme1n1", "size": 3_840_000_000_000}]), NOTE, "/dev/nvme1n1 (3.8 TB) is not mounted", "scratch="),
        (put("disks", "filesystems", [{"path": "/w", "free": 1 << 40, "writable": True}, {"mount": "/data", "type": "xfs", "free": 7 << 40}]), NOTE, "/data (xfs) has 7,697 GB free, the working directory 1,100 GB", "cache= and scratch= below /data"),
        (put("disks", "filesystems", [{"path": "/w", "free": 1 << 40, "writable": True}, {"mount": "/fs", "type": "lustre", "free": 9 << 40}]), NOTE, "/fs is a network filesystem (lustre)", "--checkpoint.dir /fs/"),
        (put("weights", "unhashed", 3), NOTE, "/m: no SHA-256 is known for 3 of 191 files", "download and push record one"),
        (put("leftovers", {"/w/runs/r:a": [1, 2]}), WARN, "2 processes left of /w/runs/r", "stop --orphans"),
        (put("weights", "present", False), BAD, "/m does not hold a model", "llama405b download"),
        (put("weights", "faults", ["a is missing", "b"]), BAD, "/m: a is missing and 1 more", "delete these files"),
        (put("network", "addresses", [{"interface": "eth0", "address": "8.8.4.4", "mbit": ""}]), WARN, "listen on 8.8.4.4 (eth0), a public address", "iptables -A INPUT -i eth0"),
        (put("gpus", smi("lost.txt")), BAD, "nvidia-smi: Unable to determine the device handle for GPU1", "reboot"),
        (put("gpus", {"smi": "TIMEOUT"}), BAD, "nvidia-smi does not answer", "reboot"),
        (put("gpus", {"smi": "", "fields": FIELDS}), BAD, "nvidia-smi: nvidia-smi lists no GPU", "reboot"),
        (put("gpus", {"smi": "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 570.133\n"}), BAD, "Driver/library version mismatch", "reboot it, to load the driver"),
        (put("gpus", "smi", smi("good.csv")["smi"] + INFOROM), WARN, "nvidia-smi: WARNING: infoROM is corrupted at gpu 0000:43:00.0", "have the GPU checked"),
        (put("gpus", {"smi": "0, A100, Enabled\n", "fields": ["index", "name", "mig.mode.current"]}), BAD, "GPU 0: MIG is on, so a rank would get only a slice of the GPU", "-mig 0, then reset it, or set slots=1"),
        (put("slots", 8), BAD, "it has 2 GPUs, but slots=8", "check nvidia-smi"),
        (put("identity", "upgraded_by", "unattended-upgrades"), WARN, "unattended-upgrades installs upgrades by itself", "systemctl disable --now unattended-upgrades"),
        (put("identity", "must_reboot", True), WARN, "a reboot is pending", "reboot it before the run"),
        (put("gpus", "xid", (DATA / "dmesg.txt").read_text().splitlines()), BAD, "Xid 79 at PCI:0000:43:00: the GPU has fallen off the bus", "reset"),
        (put("gpus", "nvlink", (DATA / "nvlink.txt").read_text()), BAD, "NVLink is down: GPU 3: link 5", "reset the GPUs"),
        (put("gpus", "apps", "4711, 61000, /usr/bin/python3\n"), WARN, "process 4711 (/usr/bin/python3) holds GPU memory", "end it"),
        (put("gpus", "dmesg_readable", False), NOTE, "Xid errors are unknown", "dmesg"),
        (put("rdma", {"ports": json.loads((DATA / "infiniband.json").read_text())["ports"], "peermem": True}), WARN, "mlx5_2 port 1 is not active", "cable"),
        (put("rdma", "peermem", False), NOTE, "nvidia_peermem is not loaded", "modprobe"),
        (put("failed", {"rdma": "TypeError: x"}), WARN, "rdma unknown", "by hand"),
        (put("disks", "filesystems", [{"path": "/w", "free": 1 << 40, "writable": False, "read_only": True}]), BAD, READ_ONLY, "mend it, or set workdir= on another disk"),
    ],
)  # fmt: skip
def test_a_fault_of_a_host(change, level, what, remedy):
    facts = good()
    change(facts)
    found = [f for f in diagnose({"a": facts}) if what in f.what]
    assert found, diagnose({"a": facts})
    assert found[0].level == level
    assert remedy in found[0].remedy
    assert found[0].hosts == ("a",)
    assert "\n" not in found[0].what + found[0].remedy


def test_a_gpu_that_is_ill_in_many_ways():
    facts = good() | {"gpus": smi("bad.csv")}
    said = "; ".join(f.what for f in diagnose({"a": facts}))
    for words in (
        "GPU 0: 3 uncorrected ECC errors",
        "GPU 0: memory rows are waiting to be remapped",
        "GPU 0: slowed down: hardware slowdown, hardware thermal slowdown",
        "GPU 0: power limit 500 of 700 W",
        "GPU 0: PCIe x8 of x16",
        "GPU 1: ERR! (memory.used and 4 more cannot be read)",
    ):
        assert words in said, said


LOST = ", ".join(["1", "[GPU is lost]", *["[GPU is lost]"] * 4, *["[GPU is lost]"] * 11, "570.124.06"])


@pytest.mark.parametrize("value", ["GPU is lost", "GPU requires reset", "Unknown Error", "Timeout"])
def test_a_value_that_no_working_gpu_has_is_a_fault_and_tells_nothing_else(value):
    facts = good()
    first = smi("good.csv")["smi"].partition("\n")[0]
    facts["gpus"]["smi"] = f"{first}\n{LOST.replace('GPU is lost', value)}\n"
    found = [finding for finding in diagnose({"a": facts}) if "GPU 1" in finding.what]
    assert [(finding.level, finding.what) for finding in found] == [
        (BAD, f"GPU 1: {value} (name and 15 more cannot be read)")
    ]
    assert [gpu.index for gpu in reader.build_record(HostFacts, facts, "a").devices] == [0]


def test_names_with_commas_are_read():
    [gpu], fault = parsers.parse_smi("0, Tesla V100, SXM2, 32510", ("index", "name", "memory.total"))
    assert (gpu.name, gpu.memory_mib, fault) == ("Tesla V100, SXM2", 32510, "")
    assert parsers.parse_gpu_processes("4711, 610, /opt/a, b/python3\n") == [(4711, "/opt/a, b/python3")]


@pytest.mark.parametrize("value", ["N/A", "Not Supported", "Requested functionality has been deprecated"])
def test_what_a_driver_does_not_tell_is_no_fault(value):
    [gpu], fault = parsers.parse_smi(f"0, H100, [{value}]", ("index", "name", "clocks.sm"))
    assert (gpu.clock_mhz, gpu.fault, fault) == (None, "", "")


def test_unknown_is_unknown():
    [gpu] = parsers.parse_smi(smi("unknown.csv")["smi"], FIELDS)[0]
    assert (gpu.used_mib, gpu.ecc_errors, gpu.power_limit_w, gpu.pages_pending) == (None, None, None, None)
    assert gpu.memory_mib == 24564
    assert not gpu.fault


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", False),
        ("expandable_segments:True", False),
        ("max_split_size_mb:512, expandable_segments: True", False),
        ("max_split_size_mb:512", True),
        ("expandable_segments:False", True),
    ],
)
def test_an_allocator_without_expandable_segments_keeps_more(words, told):
    facts = good()
    put("environment", "allocator", words)(facts)
    found = diagnose({"a": facts})
    assert [(each.level, repr(words) in each.what) for each in found] == [(WARN, True)] * told
    assert all("add expandable_segments:True" in each.remedy for each in found)
    assert diagnose({"a": facts}, Requirements(uses_gpus=False)) == []


def test_a_numa_node_full_of_files_is_told_where_the_run_needs_it():
    full, free = ({"number": n, "total": 1 << 40, "cached": cached} for n, cached in ((0, 800 << 30), (1, 0)))
    needs = Requirements(ram_bytes=1 << 40)
    for memory, names in (
        ({"nodes": [full, free]}, ["NUMA node 0 has 800 of its 1024 GiB in the page cache"]),
        ({"nodes": [full, free], "zone_reclaim": True}, []),
        ({"nodes": [full]}, []),
        ({"nodes": [free, free]}, []),
    ):
        facts = good()
        facts["memory"] |= memory
        assert [finding.what for finding in diagnose({"a": facts}, needs)] == names
        assert diagnose({"a": facts}, Requirements(ram_bytes=100 << 30)) == []


def test_what_a_run_needs():
    found = diagnose({"a": good()}, Requirements(ram_bytes=3 << 40))
    assert "2048 GiB of RAM, but the run needs 3072" in found[0].what
    found = diagnose({"a": good()}, Requirements(gpu_bytes=94 << 30))
    assert "GPU 0: 79 GiB, but each rank's state takes 94" in found[0].what
    assert diagnose({"a": good() | {"gpus": smi("bad.csv")}}, Requirements(uses_gpus=False)) == []


def test_what_a_run_would_need_at_its_peak_is_an_estimate_and_a_warning():
    hosts = parse_hosts("node[01-08] slots=8", "hosts")
    flags = ["--preset", "llama3.1-405b", "--data.paths", "x", "--parallel.numerics", "pure-bf16"]
    resident = estimate_requirements(
        command.parse([*flags, "--parallel.offload", "none"]).config, "llama3.1-405b", hosts
    )
    assert resident.gpu_bytes < 48 << 30  # which fits, but its peak does not fit 40
    assert 75 << 30 < resident.gpu_peak_bytes < 80 << 30
    assert resident.mesh == ""
    found = diagnose({"a": good()}, resident)
    assert (found[0].level, "79 GiB, but PyTorch reserves about 92" in found[0].what) == (WARN, True)
    assert "slower, with allocator retries" in found[0].remedy
    assert diagnose({"a": good()}, dataclasses.replace(resident, gpu_reserved_bytes=79 << 30)) == []
    unknown = dataclasses.replace(resident, gpu_reserved_bytes=0)
    assert {found.level for found in diagnose({"a": good()}, unknown)} == {WARN}
    assert "may reserve 91" in diagnose({"a": good()}, dataclasses.replace(unknown, gpu_peak_bytes=70 << 30))[0].what
    assert diagnose({"a": good()}, dataclasses.replace(unknown, gpu_peak_bytes=60 << 30)) == []
    found = diagnose({"a": good()}, dataclasses.replace(resident, gpu_peak_bytes=81 << 30))
    assert (found[0].level, "allocates about 81 at its peak" in found[0].what) == (BAD, True)
    offloaded = estimate_requirements(command.parse(flags).config, "llama3.1-405b", hosts)
    assert offloaded.ram_bytes < offloaded.ram_peak_bytes < 1.1 * offloaded.ram_bytes  # pinned blocks are rounded up
    found = diagnose({"a": good()}, dataclasses.replace(offloaded, ram_peak_bytes=3 << 40))
    assert "takes about 3072 with pinning" in found[0].what


@pytest.mark.parametrize("split", [("tp", "8", "pp", "2"), ("strategy", "3d")])
def test_the_mesh_that_the_ranks_make_is_said(split):
    hosts = parse_hosts("node[01-08] slots=8", "hosts")
    words = [word for name, size in zip(split[::2], split[1::2], strict=True) for word in (f"--parallel.{name}", size)]
    needs = estimate_requirements(
        command.parse(["--preset", "llama3.1-405b", "--data.paths", "x", *words]).config, "llama3.1-405b", hosts
    )
    assert " x tp " in needs.mesh
    assert needs.mesh.startswith("pp ")


def test_versions_that_are_known_to_go_wrong_are_told_with_the_planned_settings():
    facts = good()
    put("environment", "packages", "torch", "2.15.0")(facts)
    states = command.parse(["--preset", "llama3.1-405b", "--data.paths", "x", "--parallel.offload", "optimizer"]).config
    found = diagnose({"a": facts}, Requirements(settings=states))
    assert [each.level for each in found] == [WARN, WARN]
    assert [each.what.partition(" 2.15.0 ")[2][:25] for each in found] == [
        "is newer than what this w",
        "keeps the FP32 gradients ",
    ]
    assert "https://github.com/pytorch/pytorch/pull/179443" in found[1].remedy
    [newer] = diagnose({"a": facts}, Requirements())
    assert newer.remedy.startswith("use 2.13, or run")


def test_remedies_can_be_typed():
    facts = good()
    put("environment", "packages", "torch", "missing")(facts)
    [found] = diagnose({"a": facts}, Requirements(command_format=command_to_type("{}", Path("my {} hosts"))))
    assert found.remedy == f"run `{program_name()} setup 'my {{}} hosts'`, or install it there"


def test_who_differs():
    odd = copy.deepcopy(good())
    odd["environment"]["packages"]["nccl"] = "2.27.3"
    odd["environment"]["packages"]["llama405b"] = "0.1.0+1234"  # a release with a change
    odd["identity"]["kernel"] = "5.15.0"
    found = diagnose({"a": good(), "b": odd, "c": good()})
    assert [(f.level, f.hosts) for f in found] == [(BAD, ("b",)), (BAD, ("b",)), (NOTE, ("b",))]
    assert found[0].what == "nccl is 2.29.1 on most hosts, but b has 2.27.3"
    assert found[1].what == "llama405b is 0.1.0 on most hosts, but b has 0.1.0+1234"


def test_clocks_and_dead_hosts():
    found = diagnose({"a": good(), "b": good()}, skew={"b": -61.0}, lost={"c": "no answer"})
    assert [(f.hosts, f.what) for f in found] == [(("c",), "cannot be reached"), (("b",), "its clock is 61 s behind")]


def test_a_clock_that_agrees_is_not_behind_by_nothing():
    facts = {"a": reader.build_record(HostFacts, good(), "a")}
    visit = Survey(facts, {}, {"a": -0.01}, {"a": 1.0}, peers("a"), {})
    assert doctor._row("a", visit, ())[3] == "+0.0 s"


def test_how_hosts_reach_each_other():
    facts = {"a": good(), "b": good(), "c": good()}
    one_way = {("b", "a", "10.0.0.5"): "No route to host"}
    [found] = diagnose(facts, links=peers(*facts, faults=one_way))
    assert (found.level, found.hosts) == (BAD, ("a",))
    assert found.what == "b cannot reach it on the training network (10.0.0.5:29400: No route to host)"
    assert found.remedy.endswith("or give a an address= that all of them reach")
    unknown = {("b", "a", "10.0.0.5"): "Name or service not known"}
    [found] = diagnose(facts, links=peers(*facts, faults=unknown))
    assert found.remedy == "put the name into /etc/hosts on all hosts, or give a an IP address in address="
    both = {host: ["10.0.0.5"] for host in facts} | {"a": ["172.17.0.1", "10.0.0.5"]}
    docker = {(host, "a", "172.17.0.1"): "another program answers on this port" for host in "bc"}
    [found] = diagnose(facts, links=peers(*facts, faults=docker, candidates=both))
    assert (found.level, found.remedy) == (WARN, "set address=10.0.0.5 in the hosts file")
    [found] = diagnose(facts, links=peers(*facts, faults=docker, candidates=both, chosen={"a": "172.17.0.1"}))
    assert (found.level, found.remedy) == (BAD, "set address=10.0.0.5")


def test_the_same_fault_of_many_hosts_is_said_once():
    facts = {f"gpu-{i:02d}": good() for i in range(1, 9)}
    for each in facts.values():
        each["tmux"] = {"memlock_kib": "64", "open_files": "1048576"}
    [found] = diagnose(facts)
    assert len(found.hosts) == 8


def test_hosts_that_differ_in_their_own_name_alone_are_one_line(capsys):
    lost = {f"gpu-{i}": f"no answer from 10.0.0.{i}:22; try `ssh -v gpu-{i}`" for i in range(1, 9)} | {
        "x-1": "it ended (x-1)"
    }
    facts = {host: reader.build_record(HostFacts, good(), host) for host in ("a-1", "a-2")}
    found = diagnose({"a-1": good(), "a-2": good()}, lost=lost)
    assert [(f.hosts, f.remedy) for f in found] == [
        (tuple(lost)[:8], "no answer from HOST:22; try `ssh -v HOST`"), (("x-1",), "it ended (x-1)"),
    ]  # fmt: skip
    visit = Survey(facts, lost, dict.fromkeys(facts, 0.0), dict.fromkeys(facts, 1.0), peers(*facts), {})
    doctor.print_report(visit, found, [*facts, *lost], deep=True)
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[5:-2]]
    assert rows == [["host", "fit"], ["a-[1-2]", "yes"], ["gpu-[1-8],x-1", "NO"]]


def test_what_nccl_is_told():
    ports = rdma("infiniband.json").ports
    env = parsers.nccl_env(ports, "eth0")
    assert env["NCCL_IB_HCA"] == ("=mlx5_0:1,mlx5_1:1", "2 InfiniBand ports of 400 Gb/s are up; slower: mlx5_3")
    assert env["NCCL_SOCKET_IFNAME"][0] == "eth0"
    assert "NCCL_IB_GID_INDEX" not in env
    roce = parsers.nccl_env(rdma("roce.json").ports, "eth0")
    assert roce["NCCL_IB_HCA"][0] == "=mlx5_0:1,mlx5_1:1"
    assert roce["NCCL_IB_GID_INDEX"][0] == "3"
    assert set(parsers.nccl_env([], "eth0")) == {"NCCL_SOCKET_IFNAME"}
    assert not parsers.has_rdma([])


def test_the_line_by_which_nccl_falls_back():
    fallen = "h:1:1 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.5<0>"
    assert parsers.find_socket_line(f"x\n{fallen}\ny") == fallen
    assert (
        parsers.find_socket_line("h:1:1 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.5<0>") == ""
    )


def test_the_odd_one_out():
    from llama405b_tools.launch.doctor import judge_results

    devices = tuple(
        Figure(f"rank {i} (cuda {i % 2})", 610.0 if i == 5 else 700.0, "TFLOP/s", (f"h{i // 2}",)) for i in range(8)
    )
    links = tuple(
        Figure(f"h{a} - h{b}", 9.0 if 3 in (a, b) else 40.0, "GB/s", (f"h{a}", f"h{b}"))
        for b in range(4)
        for a in range(b)
    )
    rates = tuple(Figure(name, rate, "GB/s") for rate in (1.0, 30.0) for name in ("all-gather", "all-reduce"))
    figures = {Probe.PRODUCTS: devices, Probe.HOST_LINKS: links, Probe.COLLECTIVES: rates}
    found = list(
        judge_results([ProbeResult(probe, 8, 4, "NVIDIA H200", figures=each) for probe, each in figures.items()])
    )
    assert [f.hosts for f in found if f.level == WARN] == [("h2",), ("h3",), ("h3",), ("h3",)]
    assert re.search(r"rank 5 \(cuda 1\): 610 TFLOP/s where the median is 700", found[0].what)
    assert found[-1].level == NOTE
    assert found[-1].what.endswith(", all-gather 30.00 GB/s, all-reduce 30.00 GB/s (bus bandwidth)")


def test_one_machine_under_several_names_is_said_unless_all_are_loopback():
    facts = {"a": good(), "alias": good(), "c": good()}
    for host, machine in {"a": "m1", "alias": "m1", "c": "m2"}.items():
        facts[host]["identity"]["machine"] = machine
    [found] = diagnose(facts)
    assert (found.level, found.hosts) == (WARN, ("a", "alias"))
    assert found.what == "are the same machine under several names"
    here = {host: ["127.0.0.1"] for host in facts}
    assert diagnose(facts, links=peers(*facts, candidates=here)) == []


def test_odd_facts_cost_no_other():
    facts = good()
    facts["kill_user_processes"] = True
    facts |= {"identity": None, "failed": {"identity": "no answer in time"}}
    said = [f.what for f in diagnose({"a": facts})]
    assert "identity unknown: no answer in time" in said
    twice = good()
    twice["gpus"]["xid"] = (DATA / "dmesg.txt").read_text().splitlines()[:1] * 2
    assert [f.hosts for f in diagnose({"a": twice, "b": good()})] == [("a",)]


def test_a_private_address_is_taken_before_a_public_one_without_a_word():
    facts = {"a": good(), "b": good()}
    both = {"a": ["8.8.4.4", "10.0.0.5"], "b": ["10.0.0.6"]}
    assert diagnose(facts, links=peers(*facts, candidates=both)) == []
    assert peers(*facts, candidates=both).training_address("a") == "10.0.0.5"


def test_hosts_that_have_no_ipv4_address_are_told_that_alone():
    facts = {"a": good(), "b": good()}
    facts["b"]["network"] = {"addresses": [], "default": ""}
    links = peers(
        "a",
        "b",
        candidates={"a": ["10.0.0.5"], "b": ["fd99::12"]},
        faults={("a", "b", "fd99::12"): "Connection refused"},
    )
    found = [finding for finding in diagnose(facts, links=links) if finding.level == BAD]
    assert [(finding.hosts, finding.what) for finding in found] == [
        (("b",), "has no IPv4 address, but hosts meet over IPv4")
    ]
    links = peers("a", "b", candidates={"a": ["10.0.0.5"], "b": []})  # nothing of it could be tried
    found = [finding for finding in diagnose(facts, links=links) if finding.level == BAD]
    assert [(finding.hosts, finding.what) for finding in found] == [
        (("b",), "has no IPv4 address, but hosts meet over IPv4")
    ]
    assert not any(finding.level == BAD for finding in diagnose({"b": facts["b"]}))


def test_one_device_of_a_divided_gpu_may_be_meant():
    facts = good() | {
        "gpus": {"smi": "0, A100, Enabled\n", "fields": ["index", "name", "mig.mode.current"]},
        "slots": 1,
    }
    assert not any("MIG" in finding.what for finding in diagnose({"a": facts}))
