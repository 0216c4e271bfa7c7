"""doctor on four real hosts: first fit, then with faults, and finally with --deep."""

import json
import re
import shlex
import sys

from hosts_rig import nothing_stays
from llama405b.spec.probes import decode_results
from ops_rig import wait_for

N_HOSTS = 4


def doctor(operator, *args, code):
    done = operator("doctor", *args)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_plan_asks_the_hosts_what_they_are_and_launch_refuses_what_cannot_fit(hosts, operator, demo):
    gpus = [
        f"{i}, NVIDIA H100 80GB HBM3, 81559, 4, 0, No, No, 1980, 700, 700, 0x1, 16, 16, 31, Disabled, 570.1"
        for i in (0, 1)
    ]
    answers = {
        r"*=index,name,memory.total,mig.mode.current\ --*": [
            f"{i}, NVIDIA H100 80GB HBM3, 81559, Disabled" for i in (0, 1)
        ],
        "*query-gpu=index*": gpus,
    }
    cases = "".join(f'{words}) printf "%s\\n" {shlex.join(lines)} ;;\n' for words, lines in answers.items())
    smi = shlex.quote(f'#!/bin/sh\ncase "$*" in\n{cases}esac\n')
    bin_ = "/usr/local/bin/nvidia-smi"
    try:
        for i in range(1, N_HOSTS + 1):
            hosts.exec(i, "sh", "-c", f"printf %s {smi} >{bin_}; chmod 755 {bin_}; cp -r {demo} {hosts.workdir(i)}/m")
        done = operator("plan", "hosts", "--preset", "llama3.1-8b")
        assert done.returncode == 0, done.stdout + done.stderr
        first, *others = done.stdout.splitlines()
        assert re.match(r"fits: 8\.0 B parameters on 4 x \d h100-80 \(\d+ GPUs\); ", first)
        assert others[-1] == "assumed      3,200 Gbit/s a host (no active RDMA link was found)"
        large = [
            "--checkpoint.every",
            "0",
            "--training.micro_batch_size",
            "10000000",
            "--training.global_batch_size",
            "0",
        ]
        refused = operator(
            "launch", "--run", "big", "--model.path", "m", "--data.paths", "stdlib", "--data.seq_len", "64", *large
        )
        assert refused.returncode == 2, refused.stdout + refused.stderr
        assert re.match(
            r"llama405b: a GPU has [\d.]+ GiB, but a rank would allocate about [\d,.]+ at the loss; ", refused.stderr
        )
        assert refused.stderr.endswith("--force-fit starts it anyway. Nothing was started\n")
        assert hosts.exec(1, "ls", f"{hosts.workdir(1)}/runs", check=False).stdout == ""
    finally:
        for i in range(1, N_HOSTS + 1):
            hosts.exec(i, "rm", "-rf", bin_, f"{hosts.workdir(i)}/m")
    bare = operator("plan", "hosts", "--preset", "llama3.1-8b")
    assert bare.returncode == 2
    assert "nvidia-smi reports no GPU on these hosts; name the kind to predict for with --gpu" in bare.stderr


def test_four_good_hosts(hosts, operator):
    shown = doctor(operator, code=0)
    assert "4 hosts: fit;" in shown
    record = json.loads(doctor(operator, "--json", code=0))
    # this machine's own disks may be worth a note (a roomier one elsewhere), and nothing else is but what they do not share
    [found] = [found for found in record["findings"] if " free, the working directory " not in found["what"]]
    assert (found["level"], found["hosts"]) == ("note", ["node-2", "node-3", "node-4"])
    assert found["what"] == "it does not see what node-1 writes in /root/train_dir/runs, the checkpoint directory"
    for i in range(1, 5):
        facts = record["facts"][f"node-{i}"]
        assert facts["identity"]["user"] == hosts.user(i)
        assert facts["environment"]["packages"]["torch"] != "missing"
        assert facts["tmux"]["open_files"].isdigit()
        assert re.search(rf"node-{i} +yes +{hosts.address(i)} ", shown)
        reached = record["peers"]["reach"][f"node-{i}"]
        assert len(reached) == 3
        assert all(found["fault"] == "" for peer in reached.values() for found in peer["reached"].values())
        assert all(len(peer["reached"]) == 2 for peer in reached.values())  # the rendezvous port, and an ephemeral one
        assert nothing_stays(hosts, i)  # nothing stays, tmux neither
        assert hosts.exec(i, "sh", "-c", f"ls -A {hosts.workdir(i)}").stdout == ""
        probing = "ls /tmp | grep -c llama405b-doctor || true"  # hosts of another test may share /tmp, for a moment
        wait_for(lambda i=i, line=probing: hosts.exec(i, "sh", "-c", line).stdout.strip() == "0", 30)


def test_faults_of_hosts_side_by_side(hosts, operator):
    packages = hosts.exec(2, "sh", "-c", f"ls -d {sys.prefix}/lib/python*/site-packages").stdout.strip()
    metadata = f"{packages}/torch-2.99.0.dist-info"
    hosts.exec(1, "ip", "route", "add", "blackhole", f"{hosts.address(4)}/32")
    hosts.exec(
        2,
        "sh",
        "-c",
        f"mv {packages}/torch-*.dist-info /tmp/away; mkdir {metadata}; printf 'Name: torch\\nVersion: 2.99.0\\n' >{metadata}/METADATA",
    )
    hosts.exec(3, "mv", "/usr/bin/tmux", "/usr/bin/tmux.away")
    (operator.path / "hosts").write_text(
        (operator.path / "hosts")
        .read_text()
        .replace("node-4 slots=1 workdir=~/train_dir", "node-4 slots=1 workdir=/nowhere/at/all")
    )
    try:
        shown = doctor(operator, code=3)
    finally:
        hosts.exec(1, "ip", "route", "del", "blackhole", f"{hosts.address(4)}/32")
        hosts.exec(2, "sh", "-c", f"rm -r {metadata}; mv /tmp/away {packages}/torch-2.0.0.dist-info")
        hosts.exec(3, "mv", "/usr/bin/tmux.away", "/usr/bin/tmux")
    assert "node-3: tmux is not installed" in shown
    assert "node-4: there is no directory /nowhere/at/all" in shown
    assert re.search(r"node-2: torch is 2\.\S+ on most hosts, but node-2 has 2\.99\.0", shown)
    assert "node-[1,4] cannot reach" not in shown
    assert re.search(r"node-1 cannot reach it on the training network", shown)  # node-4, from node-1
    assert re.search(r"node-4 cannot reach it on the training network", shown)  # node-1: no way back
    first_table_line = shown.index("host ")
    assert shown.rindex("BAD") < first_table_line
    for line in re.findall(r"^(?:BAD|warning|note) .*\n(.*)", shown, re.MULTILINE):
        assert line.startswith("     → ")


def test_hosts_with_neither_project_nor_python(hosts, operator):
    (operator.path / "hosts").write_text("node-2 python=/nowhere/python\nnode-3 workdir=/tmp\n")
    hosts.exec(3, "sh", "-c", "for p in /usr/bin/python3 /usr/local/bin/python3; do [ ! -e $p ] || mv $p $p.away; done")
    try:
        shown = doctor(operator, code=3)
    finally:
        hosts.exec(
            3,
            "sh",
            "-c",
            "for p in /usr/bin/python3 /usr/local/bin/python3; do [ ! -e $p.away ] || mv $p.away $p; done",
        )
    assert "node-2: its python cannot be run" in shown
    assert "node-3: cannot be reached" in shown
    assert "there is no python3; run there: apt-get update && apt-get install python3" in shown


def test_deep_measures_devices_and_links(hosts, operator):
    hosts.hosts_file(operator.path / "hosts", indices=(1, 2, 3))
    done = operator("doctor", "--deep", timeout=200)
    assert done.returncode in (0, 1), done.stdout  # shared cores: a host may be slower than the others
    assert re.search(
        r"measured: [\d.]+ to [\d.]+ TFLOP/s, links [\d.]+ to [\d.]+ GB/s, all-gather [\d.]+ GB/s", done.stdout
    )
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["products", "host-links", "collectives"]
    out = hosts.exec(1, "sh", "-c", f"cat $(find {hosts.workdir(1)}/runs/doctor-* -name stdout.log)").stdout
    devices, links, _ = decode_results(out.splitlines())
    assert [device.hosts for device in devices.figures] == [(f"node-{i}",) for i in (1, 2, 3)]
    pairs = {frozenset((f"node-{a}", f"node-{b}")) for a, b in ((1, 2), (1, 3), (2, 3))}
    assert {frozenset(link.hosts) for link in links.figures} == pairs
    for i in (1, 2, 3):
        assert nothing_stays(hosts, i)


def test_a_dead_host_does_not_hide_the_others(hosts, operator):
    """Last: the host is gone for a while."""
    hosts.crash(4)
    shown = doctor(operator, code=3)
    assert re.search(r"BAD  node-4: cannot be reached", shown)
    assert shown.count(" yes ") == 3
    hosts.boot(4)
    hosts._wait()
