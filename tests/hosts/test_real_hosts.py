"""Launching over SSH on real hosts: namespaces with their own sshd, host name, users, root and tmux."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from conftest import ROOT
from hosts_rig import nothing_stays, processes
from llama405b.settings.config import DEMO_MODEL
from ops_rig import FAKE_TRAINER, PACED, wait_for

DEMO = ["--preset", "demo", "--training.global_batch_size", "12", "--data.max_bytes", "400000", "--data.seq_len", "64",
        "--evaluation.every", "0", "--evaluation.fraction", "0"]  # fmt: skip


def losses_of(done):
    return [line.split()[3] for line in done.stdout.splitlines() if line.startswith("step ")]


@pytest.fixture(scope="module")
def losses():
    """Of the run that the first test makes."""
    return []


def test_three_users_train_together(hosts, operator, losses):
    done = operator("launch", "--run", "t", *DEMO, "--training.max_steps", 5, "--checkpoint.every", 0, "--follow")
    assert done.returncode == 0, done.stderr
    losses += losses_of(done)
    assert "rank 0 read the weights and sent each rank its part" in done.stdout
    assert "3 ranks of 3 hosts" in done.stdout
    for i in (1, 2, 3):
        status = json.loads(hosts.exec(i, "cat", f"{hosts.workdir(i)}/runs/t/status/node-{i}.json").stdout)
        assert (status["state"], status["exit_code"]) == ("exited", 0)
        heartbeat = json.loads(hosts.exec(i, "cat", f"{hosts.workdir(i)}/runs/t/heartbeat/rank-{i - 1}.json").stdout)
        assert (heartbeat["host"], heartbeat["phase"], heartbeat["step"]) == (
            f"node-{i}",
            "done",
            5,
        )  # ranks in line order
        modes = hosts.exec(i, "find", f"{hosts.workdir(i)}/runs", "-perm", "/077").stdout
        assert modes == ""


def test_each_host_is_pushed_its_own_rows_and_loads_them(hosts, operator, losses):
    flags = [*DEMO, "--training.max_steps", 5, "--checkpoint.every", 0, "--follow"]
    pushed = operator("push", "--shards", f"node-1:{DEMO_MODEL}")
    assert pushed.returncode == 0, pushed.stdout + pushed.stderr
    assert "2 of 2 hosts" in pushed.stdout
    sizes = [
        int(
            hosts.exec(
                i, "sh", "-c", f"cat '{hosts.workdir(i)}/{DEMO_MODEL}'/*{'/*' * (i > 1)}.safetensors | wc -c"
            ).stdout
        )
        for i in (1, 2, 3)
    ]
    for i in (2, 3):
        assert f"ranks-{i - 1}-{i - 1}-of-3: every file verified" in pushed.stdout
        assert 0.32 < sizes[i - 1] / sizes[0] < 0.35
    own = operator("launch", "--run", "own", *flags)
    assert own.returncode == 0, own.stderr
    assert "each rank read its own part" in own.stdout
    assert losses_of(own) == losses != []
    assert operator("push", f"node-1:{DEMO_MODEL}", "--to", "/var/tmp/whole").returncode == 0
    needless = operator("push", "--shards", f"node-1:{DEMO_MODEL}", "--to", "/var/tmp/whole")
    assert needless.stdout.count("already has all weights") == 2
    assert hosts.exec(2, "ls", "/var/tmp/whole").stdout.count("ranks-") == 0
    hosts.hosts_file(operator.path / "hosts", indices=[2, 3, 1])
    moved = operator("launch", "--run", "moved", *flags)
    hosts.hosts_file(operator.path / "hosts")
    assert moved.returncode == 1
    assert f"{DEMO_MODEL}: has only parts of other ranks; push again with --shards, for dp_shard 3" in moved.stderr
    for i in (2, 3):
        hosts.exec(i, "rm", "-r", f"{hosts.workdir(i)}/{DEMO_MODEL}")


def test_status_logs_attach_stop_and_no_trace_of_a_secret(hosts, operator):
    canary = "-".join(("canary", "51d2e8", "secret"))  # in no source, of which there may be copies
    program = (
        "import os,time,sys; print('token', len(os.environ['HF_TOKEN']), sys.argv[1:], flush=True); time.sleep(900)"
    )
    for i in (1, 2, 3):
        hosts.exec(
            i,
            "sh",
            "-c",
            f"cat > '{hosts.workdir(i)}/p.py' <<'EOF'\n{program}\nEOF\nchmod 644 '{hosts.workdir(i)}/p.py'",
        )
    done = operator(
        "launch",
        "--run",
        "s",
        "--secret",
        "HF_TOKEN",
        *FAKE_TRAINER,
        "--",
        "p.py",
        "a b",
        "$(id)",
        env={"HF_TOKEN": canary},
    )
    assert done.returncode == 0, done.stderr
    wait_for(lambda: operator("logs").stdout.count(f"token {len(canary)} ['a b', '$(id)']") == 3)
    assert operator("status").returncode == 0
    for i in (1, 2, 3):
        everything = hosts.exec(
            i,
            "sh",
            "-c",
            "ps axww; su $(stat -c %U /proc/$(pgrep -f p.py | head -1)) -c 'tmux -L $(basename /tmp/tmux-*/llama405b-s-*) showenv -g'",
        ).stdout
        assert "p.py" in everything
        assert canary not in everything
        assert hosts.wrote(i, canary) == []
    built = operator("attach", "--no-attach")
    assert built.returncode == 0, built.stderr
    server = built.stdout.split()[2]  # tmux -L NAME attach …
    try:
        wait_for(
            lambda: (
                "token"
                in subprocess.run(
                    ["tmux", "-L", server, "capture-pane", "-p", "-t", "s:node-3"],
                    capture_output=True,
                    text=True,
                    check=False,
                ).stdout
            )
        )
    finally:
        subprocess.run(["tmux", "-L", server, "kill-server"], check=False)
    stopped = operator("stop")
    assert stopped.returncode == 0, stopped.stdout
    assert stopped.stdout.count("no process left") == 3


def test_logs_are_merged_in_time_though_a_clock_is_wrong(hosts, operator):
    packages = hosts.exec(2, "sh", "-c", f"ls -d {sys.prefix}/lib/python*/site-packages").stdout.strip()
    wrong = "import time as t, os; real = t.time; t.time = lambda: real() + 3600\n"  # the kernel's clock is everyone's
    hosts.exec(2, "sh", "-c", f"cat >{packages}/sitecustomize.py <<'EOF'\n{wrong}EOF\n")
    began = time.time() - 60  # which the program's times follow, but for what a busy machine takes to answer
    program = "import time\nfor i in range(6): print('beat', i, flush=True); time.sleep(1)"
    try:
        for i in (1, 2, 3):
            hosts.exec(
                i,
                "sh",
                "-c",
                f"cat >{hosts.workdir(i)}/b.py <<'EOF'\n{program}\nEOF\nchmod 644 {hosts.workdir(i)}/b.py",
            )
        assert operator("launch", "--run", "clock", "--follow", *FAKE_TRAINER, "--", "b.py").returncode == 0
        found = [json.loads(line) for line in operator("logs", "--run", "clock", "-o", "json").stdout.splitlines()]
        beats = [(int(r["text"].split()[1]), r["host"], r["time"]) for r in found if "beat" in r["text"]]
        assert len(beats) == 18
        times = [t for _, _, t in beats]
        assert began <= min(times) <= max(times) <= time.time()  # on the operator's clock
        positions = [[p for p, (i, _, _) in enumerate(beats) if i == n] for n in range(6)]
        assert max(positions[0]) < min(positions[3])  # interleaved, not one host after the other
        assert max(positions[2]) < min(positions[5])
    finally:
        hosts.exec(2, "rm", f"{packages}/sitecustomize.py")


def test_the_operator_dies_and_nothing_of_its_stays(hosts, operator):
    flags = [*DEMO, "--training.max_steps", 99999, "--checkpoint.every", 0, *FAKE_TRAINER]
    assert operator("launch", "--run", "d", *flags).returncode == 0
    follower = subprocess.Popen(
        [sys.executable, "-m", "llama405b_tools.cli", "logs", "-f", "--run", "d"],
        cwd=operator.path,
        env=os.environ | hosts.env() | {"PYTHONPATH": f"{ROOT}:{ROOT}/tools"},
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: any("agent stream" in p for p in processes(hosts, 2)))
    follower.send_signal(signal.SIGKILL)
    follower.wait(60)
    wait_for(lambda: not any("agent stream" in p for i in (1, 2, 3) for p in processes(hosts, i)), 5)
    assert operator("status").returncode == 0  # the run goes on


def refused(operator, *args, code=1):
    flags = [*DEMO, "--checkpoint.every", 0, *args]  # the hosts' users differ
    done = operator("launch", "--run", f"no-{time.monotonic_ns()}", *flags)
    assert done.returncode == code, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


def test_a_host_that_does_not_start_stops_the_others(hosts, operator):
    hosts.exec(
        3,
        "sh",
        "-c",
        "mv /usr/bin/tmux /usr/bin/tmux.away; printf '#!/bin/sh\n[ $1 = -V ] && echo tmux 3.3a\n' >/usr/bin/tmux; chmod +x /usr/bin/tmux",
    )
    try:
        words = refused(operator)
        assert "node-3: tmux could not start a session" in words
        assert "nothing is left running" in words
        for i in (1, 2, 3):
            assert nothing_stays(hosts, i)
    finally:
        hosts.exec(3, "mv", "/usr/bin/tmux.away", "/usr/bin/tmux")


def test_what_differs_between_hosts_is_named(hosts, operator):
    metadata = hosts.exec(
        2, "sh", "-c", f"ls -d {sys.prefix}/lib/python*/site-packages/transformers-*.dist-info/METADATA"
    ).stdout.strip()
    hosts.exec(2, "sed", "-i", "s/^Version: .*/Version: 5.17.0/", metadata)
    try:
        assert "transformers is" in (words := refused(operator))
        assert "but node-2 has 5.17.0" in words
    finally:
        hosts.exec(2, "sh", "-c", f"cp {metadata} /tmp/m")  # the overlay keeps its own copy: put the text back
        real = [line for line in open(metadata) if line.startswith("Version: ")][0].strip()  # noqa: SIM115, PTH123, RUF015
        hosts.exec(2, "sed", "-i", f"s/^Version: .*/{real}/", metadata)


def test_a_host_without_tmux_or_project_or_workdir(hosts, operator):
    hosts.exec(2, "mv", "/usr/bin/tmux", "/usr/bin/tmux.away")
    try:
        assert "node-2: tmux is not installed" in refused(operator)
    finally:
        hosts.exec(2, "mv", "/usr/bin/tmux.away", "/usr/bin/tmux")
    hosts.hosts_file(operator.path / "hosts", extra="", indices=[1, 2])
    text = (operator.path / "hosts").read_text()
    for old, new, words in (
        (sys.executable, "/usr/bin/python3", "/usr/bin/python3 has no llama405b"),
        (sys.executable, "/nowhere/python", "/nowhere/python cannot be run; run `"),
        ("~/train_dir", "/nowhere", "there is no directory /nowhere"),
    ):
        first, second = text.splitlines()
        (operator.path / "hosts").write_text(f"{first}\n{second.replace(old, new)}\n")
        assert f"node-2: {words}" in refused(operator)


def test_host_keys_are_checked(hosts, operator):
    known = hosts.state / "known_hosts"
    before = known.read_text()
    lines = before.splitlines(keepends=True)
    try:
        known.write_text("".join(line for line in lines if hosts.address(2) not in line))
        assert "node-2: its host key is not in known_hosts" in refused(operator)
        [line] = [line for line in lines if line.startswith(hosts.address(2) + " ")]
        known.write_text(before + f"@revoked * {line.split(' ', 1)[1]}")
        assert "node-2: its host key is revoked in known_hosts (@revoked)" in refused(operator)
        other = lines[-1].split(" ", 1)[1]  # node-3's key under node-2's address
        known.write_text("".join(f"{hosts.address(2)} {other}" if hosts.address(2) in line else line for line in lines))
        words = refused(operator)
        assert "node-2: its host key has CHANGED" in words
        assert "SHA256:" in words
    finally:
        known.write_text(before)


def test_login_refused_and_name_unknown(hosts, operator):
    path = operator.path / "hosts"
    text = path.read_text()
    path.write_text(text.replace("node-2", "nobody@node-2"))
    assert "login as nobody was refused" in refused(operator)
    path.write_text(text + "no-such-host.invalid\n")
    assert "no-such-host.invalid: the name 'no-such-host.invalid' does not resolve" in refused(operator)


def test_proxyjump_goes_through_and_checks_the_hop(hosts, operator):
    config, known = hosts.state / "ssh_config", hosts.state / "known_hosts"
    before, before_known = config.read_text(), known.read_text()
    try:
        config.write_text(f"Host node-3\n  ProxyJump node-1\n{before}")
        hosts.exec(3, "sh", "-c", ": > /var/log/rig_sshd.log")
        done = operator(
            "launch", "--run", "jump", *FAKE_TRAINER, "--", "-c", "x"
        )  # torchrun will fail: only the way there matters
        assert done.returncode == 0, done.stderr
        seen = hosts.exec(3, "cat", "/var/log/rig_sshd.log").stdout
        assert f"Accepted publickey for bob from {hosts.address(1)} " in seen
        known.write_text(
            "".join(line for line in before_known.splitlines(keepends=True) if hosts.address(1) not in line)
        )
        words = refused(operator)
        assert "node-1: its host key is not in known_hosts; run `ssh node-1` once" in words
        assert "node-3: its jump host node-1: its host key is not in known_hosts; run `ssh node-1` once" in words
    finally:
        config.write_text(before)
        known.write_text(before_known)


def test_a_cut_connection_does_not_end_a_healthy_run(hosts, operator):
    flags = [*map(str, DEMO), "--training.max_steps", "40", "--checkpoint.every", "0", *FAKE_TRAINER]
    follower = subprocess.Popen(
        [sys.executable, "-m", "llama405b_tools.cli", "launch", "--run", "cut", "--follow", *flags],
        cwd=operator.path,
        env=os.environ | hosts.env() | {"PYTHONPATH": f"{ROOT}:{ROOT}/tools"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(
        lambda: "step_s" in hosts.exec(1, "sh", "-c", f"cat {hosts.workdir(1)}/runs/cut/metrics.jsonl || true").stdout
    )
    for i in (1, 2):
        hosts.exec(i, "pkill", "-f", "llama405b_tools.agent.agent stream")
    out, err = follower.communicate(timeout=120)
    assert follower.returncode == 0, err
    steps = [line.split()[1] for line in out.splitlines() if line.startswith("step ")]
    assert steps == [f"{i}/40" for i in range(1, 41)]  # each once, none missing
    assert "node-2 │ reachable again" in out


def test_a_dead_host_means_nothing_is_started(hosts, operator):
    """Last: the host is gone afterwards."""
    hosts.crash(3)
    words = refused(operator)
    assert "node-3: " in words
    assert "Nothing was started" in words
    for i in (1, 2):
        assert nothing_stays(hosts, i)
        assert words.count(f"node-{i}") == 0
    state = operator("status")
    assert state.returncode == 1
    assert "UNREACHABLE" in state.stdout
    hosts.boot(3)
    hosts._wait()


def test_a_disk_that_fills_up_does_not_end_the_run(hosts, operator):
    flags = [*DEMO, *PACED, "--training.max_steps", 100000, "--checkpoint.every", 10, "--checkpoint.storage", "local"]
    flags += ["--checkpoint.max_failures", 0]
    hosts.hosts_file(operator.path / "hosts", indices=[1, 3])
    assert operator("launch", "--run", "full", *flags).returncode == 0

    def verdict():
        return json.loads(operator("top", "--json", "--run", "full").stdout)

    def step():
        beat = hosts.exec(3, "cat", f"{hosts.workdir(3)}/runs/full/heartbeat/rank-1.json", check=False).stdout
        return json.loads(beat)["step"] if beat.strip() else 0

    wait_for(lambda: step() > 2, 90)
    hosts.exec(3, "dd", "if=/dev/zero", "of=/var/tmp/fill", "bs=64k", check=False)
    try:
        assert hosts.exec(3, "sh", "-c", "echo more >/var/tmp/more", check=False).returncode
        before = step()
        wait_for(lambda: step() > before + 5, 60)
        wait_for(lambda: "not saved: step" in verdict()["why"], 60)
        said = operator("status", "--run", "full")
        assert said.returncode == 1  # it trains, and keeps nothing
        assert re.search(r"NOT SAVED: step \d+: .*No space left on device", said.stdout)
    finally:
        hosts.exec(3, "rm", "-f", "/var/tmp/fill", "/var/tmp/more")
    wait_for(lambda: "not saved" not in verdict()["why"], 60)
    place = f"{hosts.workdir(3)}/runs/full/checkpoints"
    hosts.exec(3, "mount", "-t", "tmpfs", "-o", "size=16k,mode=777", "other", place)
    try:
        operator("stop", "--run", "full")
        wait_for(lambda: verdict()["verdict"] != "FAILED", 30)
        lost = verdict()
        assert (lost["verdict"], lost["exit_code"]) == ("STOPPED, STEPS LOST", 1), lost["why"]
        assert re.search(
            r"after step [\d,]+: \d+ steps? lost; not saved: step \d+: .* on node-3; mount it again", lost["why"]
        )
    finally:
        hosts.exec(3, "umount", "-l", place)
