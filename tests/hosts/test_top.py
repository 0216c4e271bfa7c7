"""cluster-top in a real terminal, against real hosts that train: every fault is named, and nothing is left behind."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import pytest

import hosts_rig
from conftest import ROOT
from llama405b_tools.agent import processes
from ops_rig import FAKE_TRAINER, Terminal, wait_for

N_HOSTS = 4
INTERVAL_S = 1.0
DEMO = ["--preset", "demo", "--training.global_batch_size", "8", "--training.micro_batch_size", "2", "--data.seq_len", "64",
        "--data.max_bytes", "400000", "--training.max_steps", "100000", "--checkpoint.every", "0", *FAKE_TRAINER]  # fmt: skip


def samplers(hosts):
    found = [line for i in range(1, N_HOSTS + 1) for line in hosts_rig.processes(hosts, i)]
    ours = ("'sampler'", "agent watch", "agent stream", "nvidia-smi")
    return [line for line in found if any(words in line for words in ours)]


@pytest.fixture
def terminal(hosts, operator):
    opened = []

    def open_terminal(*args, waits=None, **more):
        """``waits``: thresholds that are not to be waited for in their full length."""
        env = hosts.env() | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}", "TZ": "UTC", "PATH": os.environ["PATH"]}
        code = f"from llama405b_tools.top.state import thresholds as t; t.__dict__.update({waits or {}})"
        program = [
            sys.executable,
            "-c",
            f"{code}; import sys; from llama405b_tools.cli import main; sys.exit(main())",
            "top",
            *args,
        ]
        opened.append(Terminal(program, operator.path, env, **more))
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.close()
    wait_for(lambda: samplers(hosts) == [], 10)


@pytest.fixture
def trains(request, hosts, operator):
    """The name of a run that trains."""
    name = request.function.__name__.removeprefix("test_")[:12]
    done = operator("launch", "--run", name, *DEMO)
    assert done.returncode == 0, done.stderr
    wait_for(lambda: beat(hosts, 1, name).get("step", -1) >= 3)
    yield name
    operator("stop", "--run", name, "--grace", "0s")
    for i in range(1, N_HOSTS + 1):  # a run that failed stays on the screen of the next test
        hosts.exec(i, "rm", "-rf", f"{hosts.workdir(i)}/runs/{name}")


def beat(hosts, i, run):
    path = f"{hosts.workdir(i)}/runs/{run}/heartbeat/rank-{i - 1}.json"
    return json.loads(hosts.exec(i, "sh", "-c", f"cat '{path}' || echo {{}}").stdout)


def test_nvidia_smi_and_its_faults(hosts, operator, terminal):
    for i in range(1, N_HOSTS + 1):
        hosts.exec(i, "install", "-m", "755", ROOT / "tests/data/shim/nvidia-smi", "/usr/local/bin/nvidia-smi")
        hosts.exec(i, "sh", "-c", "echo ok >/tmp/smi-mode; chmod 644 /tmp/smi-mode")
    try:
        top = terminal("--interval", INTERVAL_S, waits={"SMI_RETRY_S": 12.0})
        top.shows(r"no run │ hosts 4/4 │ GPU 32/32", 25)
        top.shows(r"node-2 ( +96){8}", 5)
        for mode, pattern in (
            ("na", r"temperature.gpu cannot be read(.|\n)*!node-2 ( +—!){8}"),
            ("hot", r"▲ DEGRADED +node-2: gpu 3: slowed by hardware thermal slowdown"),
            ("lost", r"node-2: 1 of 8 GPUs are lost(.|\n)*GPU 31/32(.|\n)*!node-2 "),
            ("old", r"node-2: gpu 5: slowed by hardware slowdown"),
            ("failed", r"node-2: NO-DRIVER .*couldn't communicate with the NVIDIA driver(.|\n)*!node-2 NO-DRIVER "),
            ("endless", r"node-2: NO-DRIVER nvidia-smi: printed more than 256 KiB(.|\n)*!node-2 NO-DRIVER "),
            ("hang", r"node-2: SMI-HUNG nvidia-smi has not answered for 1\d s(.|\n)*!node-2 SMI-HUNG "),
            ("ok", r"GPU 32/32(.|\n)* node-2 ( +96){8}"),
            ("failed", r"▲ DEGRADED +node-2: NO-DRIVER"),
        ):
            hosts.exec(2, "sh", "-c", f"echo {mode} >/tmp/smi-mode")
            shown = top.shows(pattern, 3 * INTERVAL_S + {"hang": 14, "ok": 35}.get(mode, 3))
            assert re.search(r" node-1 ( +96){8}", shown)
        top.keys("j", "Enter")
        top.shows(r"── PROCESSES", 5)
        top.keys("Escape", "o")
        top.shows(r"odd ones only", 5)
        top.run("resize-window", "-t", "t", "-x", "80", "-y", "24")
        top.shows(r"^ \[odd ones only\] 1-6 ↑↓ ⏎ Tab ← → / s m \+ - Space a e \? q", 5)
        top.run("resize-window", "-t", "t", "-x", "200", "-y", "50")
        top.shows(r"^ \[odd ones only\] 1-6 views .*  q quit$", 5)
        top.keys("q")
        top.shows(r"^rc=1$", 10)
        wait_for(lambda: samplers(hosts) == [], 5)
    finally:
        for i in range(1, N_HOSTS + 1):
            hosts.exec(i, "rm", "-f", "/usr/local/bin/nvidia-smi", "/tmp/smi-mode")


@pytest.mark.parametrize("end", ["TERM", "HUP", "INT", "the terminal is gone", "KILL"])
def test_however_it_ends_nothing_stays(hosts, operator, terminal, end):
    top = terminal("--interval", INTERVAL_S, size=(80, 24))
    top.shows(r"hosts 4/4", 25)
    pid = top.pid()
    assert samplers(hosts)
    if end == "the terminal is gone":
        top.close()
    else:
        os.kill(pid, getattr(signal, f"SIG{end}"))
    wait_for(lambda: samplers(hosts) == [], 5)
    wait_for(lambda: processes.start_time(pid) is None, 5)
    if end in ("TERM", "HUP", "INT"):
        top.shows(r"^rc=(143|129|130|0)$", 5)
        assert (
            top.run("display", "-p", "-t", "t", "#{alternate_on} #{cursor_flag} #{mouse_any_flag}").strip() == "0 1 0"
        )


def test_for_scripts(hosts, operator, trains, tmp_path):
    done = operator("top", "--once")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout
    assert re.search(r"node-4 +OK", done.stdout)
    found = operator("top", "node-1", "node-2", "--json", "--run", trains)
    record = json.loads(found.stdout)
    assert found.returncode == record["exit_code"]
    operator("top", "--once", "--record", tmp_path / "r.gz")
    replayed = operator("top", "--replay", tmp_path / "r.gz", "--json")
    record = json.loads(replayed.stdout)
    assert (record["badge"], record["fresh"], record["training"]["run"]) == ("RECORDED", 4, trains)
    assert record["hosts"][0]["cpu_pct"] is not None
    watched = operator("top", "--json", "--replay", tmp_path / "r.gz", "--watch", "0.5", "--speed", "5")
    assert [json.loads(line)["badge"] for line in watched.stdout.splitlines()]
    (operator.path / "wrong").write_text("node-1\nnode-2:4444\nnobody@node-3\nnode-9\n")
    bad = operator("top", "--once", "./wrong")
    assert bad.returncode == 3
    for host, state in (("node-2", "REFUSED"), ("node-3", "AUTH"), ("node-9", "DOWN")):
        assert re.search(rf"{host} +{state} ", bad.stdout), bad.stdout
    wait_for(lambda: samplers(hosts) == [], 5)


def test_faults_of_hosts_ranks_and_links_are_named(hosts, trains, terminal):
    top = terminal("--interval", INTERVAL_S, "--hang-after", "8s")
    within = 3 * INTERVAL_S + 3  # the screen is drawn once a second, on two cores that also train
    first = top.shows(r"^ ● HEALTHY", 50)  # as soon as two times ten seconds of steps can be compared
    assert re.search(rf"{trains} TRAINING \S+ │ hosts 4/4 │ no GPU │ net gloo", first)
    assert re.search(r"step \d+/100000 .*loss \d", first)
    for i in range(1, 5):
        assert re.search(rf"node-{i} +no GPU", first)
    top.keys("5", "f")
    top.shows(r"node-1 r0 step \d+/100000", 20)
    top.keys("1")

    hosts.exec(2, "pkill", "-STOP", "sshd")
    frozen = top.shows(r"node-2 +STALE", within)
    assert "hosts 3/4" in frozen
    assert re.search(r"node-1 +no GPU", frozen)  # nobody waits for it
    hosts.exec(2, "pkill", "-CONT", "sshd")
    top.shows(r"node-2 +no GPU", within)

    link = f"l4v{hosts_rig.KEY}-3"
    hosts_rig.run("ip", "link", "set", link, "down")
    try:
        top.shows(r"node-3 +STALE", within)
    finally:
        hosts_rig.run("ip", "link", "set", link, "up")
    top.shows(r"node-3 +no GPU", 20)
    top.shows(r"^ ● HEALTHY", 30)

    stopped = beat(hosts, 4, trains)["pid"]
    hosts.exec(4, "kill", "-STOP", str(stopped))
    top.shows(r"node-4 +HUNG", 8 + 2 * within)
    assert re.search(
        r"HUNG +node-4: rank 3 is silent for \d+ s at step \d+ in phase train; it is stopped by a signal", top.screen()
    )
    hosts.exec(4, "kill", "-CONT", str(stopped))
    top.shows(r"^ ● HEALTHY", 30)

    hosts.exec(2, "kill", "-KILL", str(beat(hosts, 2, trains)["pid"]))
    top.shows(r"node-2 +FAILED", within + 10)  # torchrun itself takes a moment to see it
    top.shows(r"✖ FAILED +node-2: exited 1: rank 1 was killed by SIGKILL", within + 20)

    top.keys("e")
    top.shows(r"FIRST ERROR", 5)
    top.shows(rf"run {trains}: node-2: exited 1: rank 1 was killed by SIGKILL", 20)
    top.keys("Escape")
    top.keys("q")
    top.shows(r"^rc=3$", 10)
    assert top.run("display", "-p", "-t", "t", "#{alternate_on} #{cursor_flag} #{mouse_any_flag}").strip() == "0 1 0"
    wait_for(lambda: samplers(hosts) == [], 5)


def test_hosts_and_runs_are_acted_on_from_the_screen(hosts, trains, terminal):
    top = terminal("--interval", INTERVAL_S, size=(160, 45))
    top.shows(rf"{trains} TRAINING", 50)
    top.keys("c")
    top.shows(rf"save a checkpoint of {trains} now\? y yes, any other key no", 5)
    top.keys("n")
    top.shows(r"\[nothing was done\]", 5)
    top.keys("c", "y")
    top.shows(rf"llama405b ask save --run {trains} hosts", 10)
    top.shows(rf"asked; run {trains} answers after its current step", 30)  # which this trainer does not
    asking = wait_for(lambda: children(top.pid()), 10)
    top.keys("q", "j", "!")
    top.shows(r"open a shell on node-2\?", 5)
    top.keys("y")
    wait_for(lambda: "hosts 4/4" not in top.screen(), 20)
    top.keys("echo in:$PWD:", "Enter")
    top.shows(rf"^in:{hosts.workdir(2)}:", 20)
    top.keys("exit", "Enter")
    top.shows(r"hosts 4/4", 20)
    top.keys("y")
    top.shows(rf"── COPIED(.|\n)*run {trains}, attempt 1: TRAINING; step \d+ of 100,000", 10)
    top.keys("q", "S")
    top.shows(rf"stop {trains} on every host; it saves first\?", 5)
    top.keys("y")
    top.shows(r"node-4 +running +no process left(.|\n)*exit code 0", 90)
    top.keys("q")
    top.shows(r"■ STOPPED", 20)
    top.keys("q")
    top.shows(r"^rc=0$", 10)
    wait_for(lambda: not any(processes.start_time(pid) for pid in asking), 10)


def children(pid):
    found = subprocess.run(["pgrep", "-P", str(pid), "-f", " ask "], capture_output=True, text=True, check=False)
    return [int(each) for each in found.stdout.split()]


def test_it_connects_again_to_what_froze_and_after_it_was_suspended(hosts, operator, terminal):
    waits = {"QUIET_S": 8.0, "DEAF_S": 10.0, "PING_S": 2.0, "SLEPT_S": 8.0}
    top = terminal("--interval", INTERVAL_S, waits=waits)
    top.shows(r"hosts 4/4", 25)
    hosts.exec(2, "pkill", "-STOP", "-f", "agent watch")
    try:
        top.shows(r"node-2 +STALE", 10)
        top.shows(r"TIMEOUT: sent nothing for \d+ s; reconnecting", 60)
        top.shows(r"hosts 4/4(.|\n)*node-2 +no GPU", 30)
    finally:
        hosts.exec(2, "pkill", "-CONT", "-f", "agent watch")
    pid = top.pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: samplers(hosts) == [], 90)  # nobody tells them to stay
    finally:
        os.kill(pid, signal.SIGCONT)
    shown = top.shows(r"CONNECTING +away \d+ s; reconnecting", 5)
    assert not re.search(r"node-\d +DOWN|✖", shown.split("EVENTS")[0])
    shown = top.shows(r"^ ■ NO RUN", 30)
    assert " ended: " not in shown
    for _ in range(3):  # a key that is typed while the terminal is being set up again may be lost
        top.keys("q")
        with contextlib.suppress(AssertionError):
            top.shows(r"^rc=0$", 5)
            break
    top.shows(r"^rc=0$", 1)


def test_a_run_that_no_host_has_is_refused_before_the_screen_opens(hosts, operator, terminal):
    top = terminal("--run", "nosuch")
    top.shows(r"--run: no host has 'nosuch' in (.|\n)*^rc=2$", 25)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--interval", "0"], "--interval: 0 s; use 0.2 to 60"),
        (["--replay", "/no/such"], "--replay: /no/such cannot be read (No such file or directory)"),
        (["--replay", "hosts"], "--replay: hosts is not a recording of cluster-top"),
        (["--replay", "demo", "--run", "x"], "--replay: a recording has its own hosts and run"),
        (["--record", "hosts", "--once"], "--record: hosts exists; use another name"),
        (["/no/hosts"], "/no/hosts: cannot be read"),
        (["a;b", "c"], "HOSTS:1: 'a;b' is not a valid host"),
        (["--hang-after", "soon"], "--hang-after: 'soon'"),
    ],
)
def test_bad_input_is_one_sentence(operator, args, words):
    done = operator("top", *args)
    assert done.returncode == 2, done.stdout + done.stderr
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
