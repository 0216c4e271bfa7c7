"""push on four real hosts: a chain for big files, only the differences for code."""

import hashlib
import os
import random
import re
import signal
import subprocess
import sys

from conftest import ROOT
from hosts_rig import processes
from ops_rig import wait_for
from tiny_models import write_llama

N_HOSTS = 4
MB = 1 << 20
LONG = 350 * MB  # on its way for seconds


def checkpoint(path, sizes):
    (path / "sub").mkdir(parents=True)
    draw = random.Random(0)
    for i, size in enumerate(sizes):
        name = path / ("sub/" * (i % 2)) / f"model-{i}.safetensors"
        name.write_bytes(draw.randbytes(size) if size < MB else (draw.randbytes(MB) * (size // MB + 1))[:size])
    (path / ".hidden").write_text("x")
    return path


def sums(directory):
    return {
        str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in directory.rglob("*.safetensors")
    }


def sums_on(hosts, i, directory):
    out = hosts.exec(i, "sh", "-c", f"cd {directory} && find . -name '*.safetensors' -exec sha256sum {{}} +").stdout
    return {line.split()[1].removeprefix("./"): line.split()[0] for line in out.splitlines()}


def received(hosts, i):
    return int(hosts.exec(i, "cat", "/sys/class/net/eth0/statistics/rx_bytes").stdout)


def push(hosts, operator, *args, **more):
    return subprocess.Popen(
        [sys.executable, "-m", "llama405b_tools.cli", "push", *map(str, args)],
        cwd=operator.path, env=os.environ | hosts.env() | {"PYTHONPATH": f"{ROOT}:{ROOT}/tools"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more,
    )  # fmt: skip


def test_a_checkpoint_goes_down_the_chain(hosts, operator):
    model = checkpoint(operator.path / "m", [0, 1, 30 * MB + 7, 20 * MB, 9 * MB])
    before = [received(hosts, i) for i in range(1, 5)]
    done = operator("push", "m", "--to", "/var/tmp/m")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("every file verified") == 4
    assert "4 of 4 hosts: 0.06 GB" in done.stdout
    for i in range(1, 5):
        assert sums_on(hosts, i, "/var/tmp/m") == sums(model)
        assert hosts.exec(i, "sh", "-c", "ls -A /var/tmp/m | grep -e part -e hidden || true").stdout == ""
        took = received(hosts, i) - before[i - 1]
        assert 59 * MB < took < 75 * MB  # once, and from the host before: nobody sends it four times
    before = [received(hosts, i) for i in range(1, 5)]
    again = operator("push", "m", "--to", "/var/tmp/m")
    assert again.returncode == 0
    assert all(received(hosts, i) - before[i - 1] < 2 * MB for i in range(1, 5))
    assert again.stdout.count("every file verified, 5 of them earlier") == 4
    wait_for(lambda: not any(processes(hosts, i) for i in range(1, 5)))


def test_what_broke_off_goes_on_at_the_byte_and_what_is_wrong_is_fetched_again(hosts, operator):
    model = checkpoint(operator.path / "m", [40 * MB, 10 * MB])
    half = "head -c 20000000 /tmp/first >/var/tmp/r/.model-0.safetensors.part"
    for i in range(1, 5):
        hosts.exec(
            i,
            "sh",
            "-c",
            f"rm -rf /var/tmp/r; mkdir -p /var/tmp/r/sub; cp {model}/model-0.safetensors /tmp/first; {half}; chmod -R a+rwX /var/tmp/r",
        )
    hosts.exec(
        3, "sh", "-c", "head -c 10485760 /dev/zero >/var/tmp/r/sub/model-1.safetensors; chmod a+rw /var/tmp/r/sub/*"
    )
    before = received(hosts, 1)
    done = operator("push", "m", "--to", "/var/tmp/r")
    assert done.returncode == 0, done.stdout + done.stderr
    for i in range(1, 5):
        assert sums_on(hosts, i, "/var/tmp/r") == sums(model)
    assert received(hosts, 1) - before < 36 * MB  # 50 minus the 20 that were there, and the protocol


def test_a_broken_link_does_not_stop_the_rest(hosts, operator):
    model = checkpoint(operator.path / "m", [LONG])
    pushing = push(hosts, operator, "m", "--to", "/var/tmp/b")
    wait_for(
        lambda: (
            hosts.exec(
                2, "sh", "-c", "stat -c %s /var/tmp/b/.model-0.safetensors.part 2>/dev/null || echo 0"
            ).stdout.strip()
            > "5"
        )
    )
    hosts.exec(2, "pkill", "-KILL", "-f", "llama405b_tools.agent.agent relay")
    out, err = pushing.communicate(timeout=200)
    assert pushing.returncode == 0, out + err  # the next chain went on where this one broke
    for i in range(1, 5):
        assert sums_on(hosts, i, "/var/tmp/b") == sums(model)
        hosts.exec(i, "rm", "-rf", "/var/tmp/b")


def test_the_operator_dies_and_the_same_command_goes_on(hosts, operator):
    model = checkpoint(operator.path / "m", [LONG])
    pushing = push(hosts, operator, "m", "--to", "/var/tmp/d")

    def size():
        line = "stat -c %s /var/tmp/d/.model-0.safetensors.part 2>/dev/null || echo 0"
        return int(hosts.exec(1, "sh", "-c", line).stdout)

    wait_for(lambda: size() > 50 * MB)
    pushing.send_signal(signal.SIGKILL)
    pushing.communicate()
    wait_for(lambda: all(processes(hosts, i) == [] for i in range(1, 5)), 30)
    before, had = received(hosts, 1), size()
    done = operator("push", "m", "--to", "/var/tmp/d")
    assert done.returncode == 0, done.stdout + done.stderr
    assert received(hosts, 1) - before < (LONG - had * 0.5) + 40 * MB
    for i in range(1, 5):
        assert sums_on(hosts, i, "/var/tmp/d") == sums(model)
        hosts.exec(i, "rm", "-rf", "/var/tmp/d")


def test_hosts_that_share_the_directory_write_it_once(hosts, operator):
    model = checkpoint(operator.path / "m", [30 * MB, 5 * MB])
    hosts.exec(3, "sh", "-c", f"ln -sfn {hosts.shared} /var/tmp/by-another-name")
    to = hosts.shared / "m"
    for host, name in ((1, to), (2, to), (3, "/var/tmp/by-another-name/m")):
        hosts.exec(host, "sh", "-c", f"mkdir -p /var/tmp/p && ln -sfn {name} /var/tmp/p/m")
    hosts.exec(4, "sh", "-c", "mkdir -p -m 777 /var/tmp/p")
    hosts.shared.joinpath("m").mkdir(mode=0o777)
    hosts.shared.joinpath("m").chmod(0o777)
    before = [received(hosts, i) for i in (2, 3)]
    done = operator("push", "m", "--to", "/var/tmp/p/m")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("every file verified") == 2
    assert len(re.findall(r"^node-[23] .*the same directory as on node-1$", done.stdout, re.MULTILINE)) == 2
    assert sum(received(hosts, i) - had for i, had in zip((2, 3), before, strict=True)) < 2 * MB
    for i in (1, 4):
        assert sums_on(hosts, i, "/var/tmp/p/m/") == sums(model)
    assert [path.name for path in to.glob(".llama405b-*")] == [".llama405b-hashes.json"]
    assert list(to.glob(".*.part")) == []
    write_llama(operator.path / "llama")
    refused = operator("push", "--shards", "llama", "--to", "/var/tmp/p/m")
    assert refused.returncode == 2
    assert "node-2 and node-1 share /var/tmp/p/m; push all weights there, without --shards" in refused.stderr
    assert list(to.glob("ranks-*")) == []


def test_from_a_host_and_with_a_full_disk(hosts, operator):
    making = (
        "head -c 5000000 /dev/urandom >a.safetensors; touch .hidden; mkdir -p empty; ln -sf a.safetensors b.safetensors"
    )
    hosts.exec(1, "sh", "-c", f"mkdir -p /var/tmp/src; cd /var/tmp/src; {making}")
    hosts.exec(3, "sh", "-c", "mkdir -p /var/tmp/src && mount -t tmpfs -o size=1m,mode=777 full /var/tmp/src")
    try:
        done = operator("push", "node-1:/var/tmp/src")
        assert done.returncode == 1
        assert re.search(
            r"node-3 .*FAILED: /var/tmp/src has [01][.][0-9]+ MB free, but needs 10.00 MB; make room", done.stdout
        )
        for why in ("hidden: .hidden", "empty directories: empty"):
            assert done.stdout.count(f"node-1: left out, {why}") == 1, done.stdout
        for i in (2, 4):
            assert sums_on(hosts, i, "/var/tmp/src") == sums_on(hosts, 1, "/var/tmp/src")
    finally:
        hosts.exec(3, "umount", "/var/tmp/src")


def test_code_only_what_differs(hosts, operator):
    tree = operator.path / "tree"
    (tree / "a b").mkdir(parents=True)
    for name, text in {
        "x.py": "1\n",
        "a b/y.py": "2\n",
        "gone.py": "3\n",
        "big.bin": "no",
        ".gitignore": "*.bin\n",
        "run.sh": "#!/bin/sh\n",
    }.items():
        (tree / name).write_text(text)
    (tree / "run.sh").chmod(0o755)
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    first = operator("push", "tree", "--to", "~/tree")
    assert first.returncode == 0, first.stdout + first.stderr
    assert first.stdout.count("5 files sent, 0 deleted") == 4
    hosts.exec(2, "sh", "-c", "echo mine >~alice/tree/own.txt")
    (tree / "x.py").write_text("changed\n")
    (tree / "gone.py").unlink()
    second = operator("push", "tree", "--to", "~/tree")
    assert second.stdout.count("1 file sent, 1 deleted") == 4, second.stdout
    listing = hosts.exec(2, "sh", "-c", "cd ~alice/tree && find . -type f | sort && cat x.py && ls -l run.sh").stdout
    assert listing.splitlines()[:6] == [
        "./.gitignore",
        "./.llama405b-code",
        "./a b/y.py",
        "./own.txt",
        "./run.sh",
        "./x.py",
    ]
    assert "changed" in listing
    assert "-rwxr-xr-x" in listing
    assert operator("push", "tree", "--to", "~/tree").stdout.count("0 files sent, 0 deleted") == 4


def test_bad_input(hosts, operator):
    for args, words in (
        (["nowhere"], "nowhere: no such file or directory; name one"),
        (["hosts", "--to", "here"], "--to: 'here' is relative"),
        (["node-1:/no/such"], "node-1:/no/such: contains no files"),
    ):
        done = operator("push", *args)
        assert done.returncode == 2
        assert words in done.stderr
    done = operator("push", "hosts", "--to", "/proc/here", timeout=20)
    assert done.returncode == 1
    assert done.stdout.count("FAILED: /proc/here cannot be created (No such file or directory)") == 4, done.stdout
    assert "the same command again" not in done.stdout
    (operator.path / "empty").mkdir()
    assert "contains no files" in operator("push", "empty").stderr


def test_a_host_that_dies_is_named_and_the_others_have_everything(hosts, operator):
    """Last: the host is gone for a while."""
    model = checkpoint(operator.path / "m", [LONG])
    pushing = push(hosts, operator, "m", "--to", "/var/tmp/c")
    wait_for(lambda: hosts.exec(4, "sh", "-c", "ls /var/tmp/c/.model-0.safetensors.part 2>/dev/null || true").stdout)
    hosts.crash(3)
    out, _ = pushing.communicate(timeout=280)
    assert pushing.returncode == 1
    assert re.search(r"node-3 .*FAILED", out), out
    assert out.count("every file verified") == 3, out
    for i in (1, 2, 4):
        assert sums_on(hosts, i, "/var/tmp/c") == sums(model)
    hosts.boot(3)
    hosts._wait()
