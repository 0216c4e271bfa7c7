"""A guard on a host of the run, on real hosts: it outlives everything on the operator's machine."""

import json
import re
import shlex

import pytest

from hosts_rig import nothing_stays, processes
from ops_rig import FAKE_TRAINER, wait_for

N_HOSTS = 2
HOST_USERS = ("alice",)
DEMO = ["--preset", "demo", "--training.global_batch_size", "8", "--data.max_bytes", "400000", "--data.seq_len", "64",
        "--training.max_steps", "100000", "--checkpoint.every", "4", *FAKE_TRAINER]  # fmt: skip
GUARD = "llama405b_tools.guard.guard"


def give_key(hosts, i):
    """Let a host reach the others with a key of its own."""
    home = "/home/alice/.ssh"
    known = "".join(
        f"node-{j} {(hosts.state / f'node-{j}/host_key.pub').read_text()}" for j in range(1, hosts.count + 1)
    )
    key = (hosts.state / "key").read_text()
    line = f"umask 077; printf %s {shlex.quote(key)} >{home}/id_ed25519; printf %s {shlex.quote(known)} >{home}/known_hosts"
    hosts.exec(i, "su", "alice", "-c", line)


def read(hosts, i, name):
    found = hosts.exec(i, "cat", f"{hosts.workdir(i)}/runs/g/{name}", check=False).stdout
    return found if not name.endswith("json") else json.loads(found or "{}")


def guards(hosts, i):
    return [line for line in processes(hosts, i) if re.search(rf"{GUARD} \d+$", line) and not line.startswith("tmux ")]


def test_a_guard_on_a_host_brings_the_run_back_and_a_stop_ends_it(hosts, operator):
    launch = (
        "launch",
        "--run",
        "g",
        "--restart",
        2,
        "--guard-on",
        "node-1",
        "--checkpoint.dir",
        hosts.shared / "c",
        *DEMO,
    )
    refused = operator(*launch)
    assert refused.returncode == 2, refused.stdout
    assert re.search(r"--guard-on: from node-1, node-2: .*node-2.*known_hosts", refused.stderr), refused.stderr
    assert nothing_stays(hosts, 1)

    give_key(hosts, 1)
    hosts.exec(1, "sed", "-i.bak", f"s/.* node-2$/{hosts.address(1)} node-2/", "/etc/hosts")
    refused = operator(*launch)
    hosts.exec(1, "cp", "/etc/hosts.bak", "/etc/hosts")
    assert (refused.returncode, "node-2: it is another machine" in refused.stderr) == (2, True), refused.stderr
    done = operator(*launch)
    assert done.returncode == 0, done.stderr
    assert re.search(r"guard running on node-1 as pid \d+; you can switch this machine off", done.stdout)
    assert not (operator.path / "runs/g/guard.json").exists()
    wait_for(lambda: len(guards(hosts, 1)) == 1, 10)  # what it forks has its name until it is another program
    assert guards(hosts, 2) == []
    pid = read(hosts, 1, "guard.json")["pid"]
    assert (
        hosts.exec(1, "readlink", f"/proc/{pid}/fd/0").stdout.strip() == "/dev/null"
    )  # not the order, with its secrets
    wait_for(lambda: any(hosts.shared.glob("c/step-*/manifest.json")))
    hosts.exec(2, "kill", "-KILL", str(read(hosts, 2, "heartbeat/rank-1.json")["pid"]))
    wait_for(lambda: read(hosts, 1, "status/node-1.json").get("attempt") == 2)
    wait_for(lambda: "watching: running again" in read(hosts, 1, "guard.log"))
    wait_for(lambda: "guard on node-1: watching, 1 restart" in operator("status", "--run", "g").stdout, 10)
    assert "guard watching" in operator("top", "--once").stdout
    second = operator(*launch, "--resume", "auto")
    assert (second.returncode, "already has a guard" in second.stderr) == (2, True), second.stderr

    killed = read(hosts, 1, "guard.json")["pid"]
    hosts.exec(1, "kill", "-KILL", str(killed))
    state = operator("status", "--run", "g")
    assert state.returncode == 1, state.stdout
    typed = re.search(rf"process {killed} on node-1 died while watching\).*`.* (launch .*)`", state.stdout)
    assert typed, state.stdout
    done = operator(*shlex.split(typed[1]))
    assert done.returncode == 0, done.stderr
    assert "its guard is gone; guarding it from now on" in done.stdout
    wait_for(lambda: len(guards(hosts, 1)) == 1, 10)

    assert operator("stop", "--run", "g", "--grace", "0").returncode == 0
    assert nothing_stays(hosts, 1)
    assert "dismissed: the run was stopped" in read(hosts, 1, "guard.log")
    assert hosts.exec(1, "sh", "-c", "ls /tmp/tmux-*/ 2>/dev/null", check=False).stdout == ""
    assert not read(hosts, 1, "status/.node-1.guard-order")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--guard-on", "node-1"], "--guard-on needs --restart N"),
        (["--guard-on", "node-9", "--restart", "1"], "--guard-on: 'node-9' is not in hosts; name a host of the run"),
        (["--guard-on", "node-1", "--restart", "1", "--follow"], "--follow cannot follow a guard on another machine"),
    ],
)
def test_what_cannot_be_is_refused(hosts, operator, flags, words):
    done = operator("launch", "--run", "x", *flags, *DEMO)
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
