"""Twenty faults of a first day, injected into real hosts: each is refused in one sentence before torchrun starts."""

import sys
import time

import pytest

from hosts_rig import processes
from ops_rig import FAKE_TRAINER

N_HOSTS = 2
DEMO = ["--preset", "demo", "--training.global_batch_size", "12", "--data.seq_len", "64", "--checkpoint.every", "0"]


@pytest.fixture
def refused(hosts, operator, demo):
    """Launch with these arguments; returns the one sentence."""

    def launch(*args, code=1, words=()):
        done = operator("launch", "--run", f"f-{time.monotonic_ns()}", *DEMO, *args)
        assert done.returncode == code, done.stdout + done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr
        for word in words:
            assert word in done.stderr, done.stderr
        for i in range(1, hosts.count + 1):
            assert not any("torch" in line for line in processes(hosts, i))
            logs = hosts.exec(i, "sh", "-c", f"ls -d {hosts.workdir(i)}/runs/f-*/logs 2>/dev/null || true")
            assert logs.stdout == ""
        return done.stderr

    return launch


def edit(operator, before, after):
    path = operator.path / "hosts"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


@pytest.fixture
def on(hosts):
    """Run a shell line on a host now, and another one afterwards."""
    undo = []

    def change(i, line, back):
        undo.append((i, back))
        hosts.exec(i, "sh", "-c", line)

    yield change
    for i, back in reversed(undo):
        hosts.exec(i, "sh", "-c", back)


def test_01_wrong_python(refused, operator):
    edit(
        operator,
        f"node-2 slots=1 workdir=~/train_dir python={sys.executable}",
        "node-2 workdir=~/train_dir python=python3",
    )
    refused(
        words=["node-2: python3 has no llama405b in ~/train_dir; run `", "llama405b setup`, or set workdir= or python="]
    )


def test_02_no_such_python(refused, operator):
    edit(
        operator,
        f"node-2 slots=1 workdir=~/train_dir python={sys.executable}",
        "node-2 slots=1 workdir=~/train_dir python=/no/python",
    )
    refused(words=["node-2: /no/python cannot be run; run `", "llama405b setup`, or set python="])


def test_03_another_torch(hosts, refused, on):
    packages = hosts.exec(2, "sh", "-c", f"ls -d {sys.prefix}/lib/python*/site-packages").stdout.strip()
    fake = f"{packages}/torch-2.99.0.dist-info"
    written = f"mkdir {fake}; printf 'Name: torch\\nVersion: 2.99.0\\n' >{fake}/METADATA"
    on(
        2,
        f"mv {packages}/torch-*.dist-info /tmp/away; {written}",
        f"rm -r {fake}; mv /tmp/away {packages}/torch-2.0.0.dist-info",
    )
    refused(words=["the hosts differ: torch is", "but node-2 has 2.99.0", "install the same versions"])


def test_04_firewall(hosts, refused, on):
    on(2, f"ip route add blackhole {hosts.address(1)}/32", f"ip route del blackhole {hosts.address(1)}/32")
    refused(words=["node-2: cannot reach node-1 on TCP port", "open TCP ports 20000-65535 between the hosts"])


def test_05_an_address_nobody_reaches(refused, operator):
    edit(operator, "node-1 slots=1", "node-1 slots=1 address=198.51.100.7")
    refused(words=["cannot reach node-1 on TCP port", "198.51.100.7", "address= that all of them reach"])


def test_06_full_disk(hosts, refused, on):
    place = hosts.workdir(2)
    on(
        2,
        f"mkdir -p {place}/runs && mount -t tmpfs -o size=1m,mode=777 full {place} && mkdir {place}/runs && chmod 777 {place}/runs",
        f"umount {place}; rm -rf {place}/runs",
    )
    refused(words=["node-2: its disk is full", "make room, or set workdir="])


def test_06_a_disk_too_small_for_the_checkpoints(refused, on, demo):
    on(
        2,
        "mkdir /small && mount -t tmpfs -o size=30m,mode=777 small /small; chmod 777 /small",
        "umount /small; rmdir /small",
    )
    on(1, "mkdir -m 777 /small", "rmdir /small")
    refused(
        *(
            "--model.path",
            demo,
            "--checkpoint.every",
            "2",
            "--checkpoint.storage",
            "local",
            "--checkpoint.dir",
            "/small",
        ),
        words=[
            "node-2: --checkpoint.dir: /small has 31.",
            " MB free, but a checkpoint takes ",
            " MB, 2 are kept, and one more is being written; use another directory",
        ],
    )


def test_07_missing_shard(hosts, refused, demo):
    hosts.exec(1, "sh", "-c", f"cp -r {demo} /root/torn && rm /root/torn/model-00002-of-00002.safetensors")
    refused(
        "--model.path",
        "/root/torn",
        code=2,
        words=["node-1: ", "model-00002-of-00002.safetensors: missing of 2 files", "download them"],
    )


def test_08_truncated_shard(hosts, refused, demo):
    hosts.exec(1, "sh", "-c", f"cp -r {demo} /root/cut && truncate -s -1 /root/cut/model-00002-of-00002.safetensors")
    refused("--model.path", "/root/cut", code=2, words=["bytes, but its header says", "download it again"])


def test_09_busy_port(hosts, refused):
    holder = "import socket, time; s = socket.socket(); s.bind((str(), 23456)); s.listen(); time.sleep(30)"
    hosts.exec(1, "sh", "-c", f"nohup {sys.executable} -c '{holder}' >/dev/null 2>&1 & sleep 1")
    try:
        refused("--port", 23456, code=2, words=["--port: 23456 is in use on the head; omit --port"])
    finally:
        hosts.exec(1, "pkill", "-f", "socket, time")


def test_10_leftover_processes(hosts, refused, operator):
    place = hosts.workdir(2)
    name = "f-left"
    left = f"LLAMA405B_NODE={place}/runs/{name}:node-2 nohup sleep 60 >/dev/null 2>&1 &"
    hosts.exec(2, "su", hosts.user(2), "-c", left)
    try:
        done = operator("launch", "--run", name, *DEMO)
        assert done.returncode == 1
        assert "node-2: 1 process of an earlier attempt left; run `" in done.stderr
        assert f"llama405b stop --run {name}` first" in done.stderr
        shown = operator("stop", "--orphans")
        assert shown.returncode == 1
        assert "sleep 60" in shown.stdout
        assert operator("stop", "--orphans", "--end").returncode == 0
    finally:
        hosts.exec(2, "pkill", "-f", "sleep 60", check=False)


def away(program):
    """Shell lines that hide a program wherever it is, and bring it back."""
    places = " ".join(f"{folder}/{program}" for folder in ("/usr/local/bin", "/usr/bin", "/usr/sbin", "/bin", "/sbin"))
    hide = f"for p in {places}; do [ ! -e $p ] || mv $p $p.away; done"
    return hide, f"for p in {places}; do [ ! -e $p.away ] || mv $p.away $p; done"


def test_11_no_tmux(refused, on):
    on(2, *away("tmux"))
    refused(words=["node-2: tmux is not installed; install it (apt-get update && apt-get install tmux)"])


def test_12_no_iproute(refused, on):
    on(2, *away("ip"))
    refused(words=["node-2: ip (iproute2) is not installed; install it (apt-get update && apt-get install iproute2)"])


def test_13_no_such_directory(refused, operator):
    edit(operator, "node-2 slots=1 workdir=~/train_dir", "node-2 slots=1 workdir=/nowhere")
    refused(words=["node-2: there is no directory /nowhere; run `", "llama405b setup`, or set workdir="])


def test_14_directory_that_cannot_be_written(hosts, refused, on):
    place = hosts.workdir(2)
    on(2, f"rm -rf {place}/runs; chown root {place}; chmod 755 {place}", f"chown {hosts.user(2)} {place}")
    refused(words=["/runs/f-", "train_dir belongs to root, and you cannot write it; fix that, or set workdir="])


def test_15_login_refused(refused, operator):
    edit(operator, "node-2", "nobody@node-2")
    refused(words=["node-2: login as nobody was refused; install your public key on it"])


def test_16_unknown_name(refused, operator):
    with (operator.path / "hosts").open("a") as file:
        file.write("no-such-host.invalid\n")
    refused(words=["does not resolve; correct it"])


def test_17_changed_host_key(hosts, refused):
    known = hosts.state / "known_hosts"
    before = known.read_text()
    lines = before.splitlines(keepends=True)
    try:
        [other] = [line.split(" ", 1)[1] for line in lines if line.startswith(hosts.address(1))]
        known.write_text("".join(f"{hosts.address(2)} {other}" if hosts.address(2) in line else line for line in lines))
        refused(words=["node-2: its host key has CHANGED", f"ssh-keygen -f {known} -R {hosts.address(2)}"])
    finally:
        known.write_text(before)


def test_18_bastion_down(hosts, refused):
    config = hosts.state / "ssh_config"
    before = config.read_text()
    try:
        config.write_text(f"Host node-2\n  ProxyJump bastion\nHost bastion\n  HostName {hosts.address(99)}\n{before}")
        refused(words=["node-2: "])
    finally:
        config.write_text(before)


def test_19_hosts_file_that_others_may_write(refused, operator):
    (operator.path / "hosts").chmod(0o666)
    refused(code=2, words=["hosts: is writable by everyone", "chmod o-w hosts"])


def test_20_somebody_runs_it_already(hosts, operator):
    (operator.path / "w.py").write_text("")
    for i in (1, 2):
        hosts.exec(
            i,
            "sh",
            "-c",
            f"printf 'import time; time.sleep(600)' >{hosts.workdir(i)}/w.py; chmod 644 {hosts.workdir(i)}/w.py",
        )
    assert operator("launch", "--run", "taken", *FAKE_TRAINER, "--", "w.py").returncode == 0
    done = operator("launch", "--run", "taken", *DEMO)
    assert done.returncode == 2
    assert "'taken' is running on node-1, launched by root@" in done.stderr
    assert "llama405b stop --run taken` ends it" in done.stderr


def test_21_wrong_clock(hosts, operator, on):
    """By doctor, as a warning: training works with it."""
    line = (
        "PATH=/usr/local/bin:/usr/bin:/bin python3 -c 'import site; print(site.getsitepackages()[0])'"  # as SSH has it
    )
    packages = hosts.exec(2, "sh", "-c", line).stdout.strip()
    wrong = "import time; time.time = (lambda real: lambda: real() - 61)(time.time)"  # the kernel's clock is everyone's
    on(2, f"mkdir -p {packages}; echo '{wrong}' >{packages}/wrong.pth", f"rm {packages}/wrong.pth")
    done = operator("doctor")
    assert done.returncode == 1, done.stdout
    assert "node-2: its clock is 61 s behind" in done.stdout
    assert "chrony" in done.stdout
