"""A complete run on this machine: two nodes, two torchrun agents, real tmux. No sshd."""

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import HOSTS, ONE_HOST, ROOT
from llama405b.contract.hashes import HashStore
from llama405b.contract.paths import RunDir
from llama405b_tools.agent import hostprobe
from llama405b_tools.agent.processes import tmux_socket
from ops_rig import FAKE_TRAINER, Terminal, fake_trainer, heartbeat, metrics, settings, train, wait_for


def test_kill_a_rank_then_stop_then_resume_to_the_same_losses(work, cli, demo, corpus):
    steps = 32
    base = [*settings(demo, corpus, steps), "--checkpoint.every", 4, "--parallel.numerics", "fp32-master"]
    sequential = ["--parallel.offload", "all", "--parallel.overlap", "false"]
    whole = train(work, "whole", *base, *sequential, "--checkpoint.every", "1s", world=2)
    assert len(re.findall("^saved ", whole.stdout, re.MULTILINE)) >= 2
    assert f"saved runs/whole/checkpoints/step-{steps:08}" in whole.stdout
    straight = metrics(work, "whole")
    assert list(straight) == list(range(1, steps + 1))
    assert straight[steps]["loss"] < straight[1]["loss"]
    assert straight[12]["tokens"] == 12 * 4 * 64
    parts = ("data_s", "forward_s", "backward_s", "optimizer_s")
    assert straight[5]["step_s"] == pytest.approx(sum(straight[5][part] for part in parts))

    hidden = [*base, "--parallel.offload", "optimizer"]  # whose updates a forward hides
    follower = subprocess.Popen(
        [sys.executable, "-m", "llama405b_tools.cli", "launch", "--run", "cut", "--follow", *map(str, hidden)],
        cwd=work, env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tools"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(lambda: (work / "runs/cut/checkpoints/step-00000004").exists())
    os.kill(heartbeat(work, "cut", 1)["pid"], signal.SIGKILL)
    out, err = follower.communicate(timeout=90)
    assert follower.returncode == 1, out
    assert "FAILED  node-b: exited 1: rank 1 was killed by SIGKILL" in err
    state = cli(work, "status", "--run", "cut")
    assert state.returncode == 1
    assert re.fullmatch(
        r"node-b: exited 1: rank 1 was killed by SIGKILL; `\S+ logs --run cut --rank 1` shows its log",
        state.stdout.splitlines()[-1],
    )

    assert cli(work, "launch", "--run", "cut", "--resume", "auto", *hidden).returncode == 0
    before = heartbeat(work, "cut", 0)["step"]
    wait_for(lambda: heartbeat(work, "cut", 0)["step"] not in (0, before))
    assert cli(work, "stop", "--run", "cut", "--grace", "60").returncode == 0
    stopped = max(metrics(work, "cut"))
    assert stopped < steps
    assert (work / f"runs/cut/checkpoints/step-{stopped:08}").exists()

    again = cli(work, "launch", "--run", "cut", "--resume", "auto", "--follow", *base, "--parallel.offload", "all")
    assert again.returncode == 0, again.stderr
    assert f"resumed from runs/cut/checkpoints/step-{stopped:08}" in again.stdout
    assert f"cut: steps 1-{steps}, loss " in again.stdout
    resumed = metrics(work, "cut")
    assert {step: m["loss"] for step, m in resumed.items()} == {step: m["loss"] for step, m in straight.items()}
    assert resumed[steps]["tokens"] == straight[steps]["tokens"]
    assert straight[steps].get("update_s") is None
    for summed in ("update_s", "update_bytes"):  # each update counted in its own step or in the next
        assert sum(m[summed] for m in resumed.values()) > 0
    [exporting] = re.findall(r"next: `.*? (export cut OUT)`", again.stdout)
    exported = cli(work, *exporting.split(), "--try", "def ")
    assert exported.returncode == 0, exported.stderr
    assert "exported runs/cut/checkpoints/step-00000032 to OUT: 1 file" in exported.stdout
    assert (work / "OUT/tokenizer.json").read_bytes() == (demo / "tokenizer.json").read_bytes()
    last = resumed[steps]
    assert last["up_bytes"] > last["down_bytes"] > 0


@pytest.mark.usefixtures("shadowed")
def test_a_resume_that_would_learn_other_things_needs_consent(work, cli, demo, corpus):
    (work / "hosts").write_text(ONE_HOST)
    of = settings(demo, corpus, 4)
    train(work, "same", *of)
    flags = ["launch", "--run", "same", "--follow", *of, "--data.workers", 1]
    flags += ["--resume", "auto", "--training.max_steps", 6, "--training.global_batch_size", 8]
    before = sorted((work / "runs/same/checkpoints").rglob("*"))
    refused = cli(work, *flags)
    assert refused.returncode == 2, refused.stdout
    changes = "training.global_batch_size 4 -> 8"
    assert f"step-00000004 was saved with other settings ({changes})" in refused.stderr
    assert "--checkpoint.allow_changes training.global_batch_size" in refused.stderr
    assert [path for path in sorted((work / "runs/same/checkpoints").rglob("*")) if "lease" not in path.name] == [
        path for path in before if "lease" not in path.name
    ]
    accepted = cli(work, *flags, "--checkpoint.allow_changes", "training.global_batch_size")
    assert accepted.returncode == 0, accepted.stderr
    assert f"({changes})" in accepted.stdout
    assert sorted(metrics(work, "same")) == list(range(1, 7))


def test_two_runs_do_not_write_into_one_directory(work, cli, demo, corpus):
    (work / "hosts").write_text(ONE_HOST)
    flags = ["--checkpoint.dir", work / "shared", *settings(demo, corpus, 100_000)]
    assert cli(work, "launch", "--run", "first", *flags).returncode == 0
    wait_for(lambda: (work / "shared/step-00000004").exists())
    second = cli(work, "launch", "--run", "second", "--follow", "--resume", "auto", *flags)
    assert second.returncode == 1, second.stdout
    assert "run 'first' (attempt 1, node-a:" in second.stderr
    assert f"is writing checkpoints into {work / 'shared'}" in second.stderr
    stopped = cli(work, "stop", "--run", "first")
    assert stopped.returncode == 0, stopped.stderr
    of_first = set((work / "shared").glob("step-*"))
    third = cli(work, "launch", "--run", "third", "--resume", "auto", *flags)  # the first has ended: at once
    assert third.returncode == 0, third.stderr
    wait_for(lambda: len(set((work / "shared").glob("step-????????")) - of_first) > 1)
    assert cli(work, "stop", "--run", "third").returncode == 0
    assert of_first <= set((work / "shared").glob("step-*"))  # a run deletes only its own


def test_a_run_outlives_commands_that_are_not_meant_for_it(work, cli):
    (work / "sleeper.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(900)\n")
    launch = ("launch", "--run", "r", *FAKE_TRAINER, "--", "sleeper.py")
    assert cli(work, *launch).returncode == 0
    other = work / "other"
    other.mkdir()
    (work / "elsewhere").write_text("".join(f"{line} workdir={other}\n" for line in HOSTS.splitlines()))
    refused = cli(work, "stop", "elsewhere", "--run", "r")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"no host has 'r' in {other}/runs" in refused.stderr
    failed = cli(
        work,
        "launch",
        "elsewhere",
        "--run",
        "r",
        "--setup-line",
        "false",
        "--follow",
        *FAKE_TRAINER,
        "--",
        "sleeper.py",
    )
    assert failed.returncode != 0
    assert cli(work, "status").stdout.count("running") == 2

    (work / "tail").write_text("node-x address=localhost slots=1\n" + HOSTS.splitlines()[1] + "\n")
    stopped = cli(work, "stop", "tail", "--run", "r", "--grace", "0")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    told = {line.split()[0]: line for line in stopped.stdout.splitlines()}
    assert told["node-x"].endswith("not a host of this run")
    assert "running" in told["node-a"]
    assert "no process left" in told["node-a"]
    assert cli(work, "status").stdout.count("stopped") == 2


def test_launch_status_logs_attach_stop(work, cli, demo, corpus):
    started = cli(work, "launch", "--run", "r", *fake_trainer(demo, corpus, steps=100_000))
    assert started.returncode == 0, started.stderr
    assert "llama405b stop --run r" in started.stdout
    wait_for(lambda: heartbeat(work, "r", 1)["step"] >= 2)
    taken = cli(work, "launch", "--run", "r", *fake_trainer(demo, corpus))
    assert taken.returncode == 2
    assert "--run: 'r' is running on node-a" in taken.stderr

    state = cli(work, "status", "--json")
    assert state.returncode == 0, state.stdout
    report = json.loads(state.stdout)
    assert report["run"] == "r"
    assert [
        beat["phase"]
        for host in report["hosts"].values()
        for beat in host["heartbeats"]
        if beat["phase"] in ("train", "checkpoint")
    ] != []
    assert "running" in cli(work, "status").stdout

    server = tmux_socket(RunDir(work / "runs" / "r"))
    sessions = subprocess.run(["tmux", "-L", server, "ls", "-F", "#S"], capture_output=True, text=True, check=True)
    assert sessions.stdout.split() == ["node-a", "node-b"]
    pane = wait_for(lambda: "step" in (text := _capture(server, "node-a")) and text)
    assert "loss" in pane

    built = cli(work, "attach", "--no-attach")
    assert built.returncode == 0, built.stderr
    try:
        windows = subprocess.run(
            ["tmux", "-L", f"{server}-attach", "lsw", "-F", "#W"], capture_output=True, text=True, check=True
        )
        assert windows.stdout.split() == ["node-a", "node-b"]
        wait_for(lambda: "loss" in _capture(f"{server}-attach", "r:node-a"))
        clients = subprocess.run(
            ["tmux", "-L", server, "lsc", "-F", "#{client_readonly}"], capture_output=True, text=True, check=True
        )
        assert clients.stdout.split() == ["1", "1"]
    finally:
        subprocess.run(["tmux", "-L", f"{server}-attach", "kill-server"], check=False)

    logs = cli(work, "logs")
    assert logs.returncode == 0
    assert "node-a r0 out │ step 1/100000" in logs.stdout
    none = cli(work, "logs", "--rank", "1,9")
    assert (none.returncode, none.stderr) == (2, "llama405b: --rank: run r has 2 ranks, from 0 to 1, and no 9\n")

    stopped = cli(work, "stop")
    assert stopped.returncode == 0, stopped.stdout
    assert stopped.stdout.count("no process left") == 2
    assert stopped.stdout.count("running") == 2
    after = cli(work, "status")
    assert after.returncode == 0
    assert after.stdout.count("stopped") == 2
    assert subprocess.run(["tmux", "-L", server, "ls"], capture_output=True, check=False).returncode != 0
    typo = cli(work, "stop", "--run", "typo")
    assert typo.returncode == 2
    assert f"--run: no host has 'typo' in {work}/runs; there are r" in typo.stderr
    for verb in (["status"], ["logs"], ["attach"], ["top", "--once"]):
        typo = cli(work, *verb, "--run", "typo")
        assert typo.returncode == 2, typo.stdout
        assert f"--run: no host has 'typo' in {work}/runs; there are r; `" in typo.stderr
    assert "r    2" in cli(work, "status", "--all").stdout
    assert cli(work, "status", "--all", "--run", "r").returncode == 2
    again = cli(work, "stop", "--run", "r")  # idempotent
    assert again.returncode == 0
    assert again.stdout.count("not running") == 2


def test_a_followed_run_has_one_live_line_on_a_terminal(work, demo, corpus):
    argv = [
        sys.executable,
        "-m",
        "llama405b_tools.cli",
        "launch",
        "--run",
        "t",
        "--follow",
        *fake_trainer(demo, corpus, 45),
    ]
    top = Terminal(argv, work, {"PYTHONPATH": f"{ROOT}:{ROOT}/tools"}, size=(100, 40))
    try:
        shown = top.shows(r"^━.* \d+/45  ETA 0:0\d  loss \d\.\d+  2,560 tokens/s$", 30)
        assert shown.count("ETA") == 1
        shown = top.shows(r"^rc=0$", 30)
    finally:
        top.close()
    assert re.findall(r"^step (\d+)/45", shown, re.MULTILINE) == ["1", "10", "20", "30", "40", "45"]
    assert "ETA" not in shown
    assert "t: steps 1-45, loss" in shown


def test_ctrl_c_only_stops_following(work, cli, demo, corpus):
    follower = subprocess.Popen(
        [
            *("env", "--default-signal=INT"),  # which a test run in the background has ignored
            sys.executable,
            "-m",
            "llama405b_tools.cli",
            "launch",
            "--run",
            "r",
            "--follow",
            *map(str, fake_trainer(demo, corpus, 99_999)),
        ],
        cwd=work,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tools"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: heartbeat(work, "r", 1)["step"] >= 1)
    os.killpg(follower.pid, signal.SIGINT)
    out, _ = follower.communicate(timeout=20)
    assert follower.returncode == 130
    assert "Detached; the run keeps going" in out
    before = heartbeat(work, "r", 1)["step"]
    wait_for(lambda: heartbeat(work, "r", 1)["step"] > before)
    assert cli(work, "status").returncode == 0


def _capture(server, target):
    return subprocess.run(
        ["tmux", "-L", server, "capture-pane", "-p", "-t", target], capture_output=True, text=True, check=False
    ).stdout


@pytest.mark.parametrize("victim", ["node runner", "torchrun"])
def test_nothing_outlives_a_sigkill_of_its_parent(work, cli, demo, corpus, victim):
    assert cli(work, "launch", "--run", "r", *fake_trainer(demo, corpus, steps=100_000)).returncode == 0
    wait_for(lambda: heartbeat(work, "r", 1)["step"] >= 1)
    worker = heartbeat(work, "r", 1)["pid"]
    torchrun = int(Path(f"/proc/{worker}/stat").read_text().rpartition(") ")[2].split()[1])
    runner = json.loads((work / "runs/r/status/node-b.json").read_text())["pid"]
    os.kill(runner if victim == "node runner" else torchrun, signal.SIGKILL)
    wait_for(
        lambda: not Path(f"/proc/{worker}").exists() or "Z" in Path(f"/proc/{worker}/stat").read_text().split()[2], 20
    )
    state = wait_for(
        lambda: (s := json.loads((work / "runs/r/status/node-b.json").read_text()))["state"] == "killed" and s, 20
    )
    assert state["signal"] == signal.SIGKILL
    assert state["cause"]["kind"] == {"node runner": "runner killed", "torchrun": "torchrun killed"}[victim]


def test_a_secret_reaches_the_ranks_and_nothing_else(work, cli):
    canary = "canary-7f3a9c-secret"
    (work / "show.py").write_text(
        "import os, sys, time\nassert os.environ['HF_TOKEN'] == open('expected').read(), 'no secret'\n"
        "assert sys.argv[1:] == ['a b', '$HOME', 'semi;', \"it's\"], sys.argv\nprint('got it', flush=True); time.sleep(600)\n"
    )
    (work / "expected").write_text(canary)
    env = {"HF_TOKEN": canary, "NOT_FOR_THEM": canary}
    done = cli(
        work,
        "launch",
        "--run",
        "s",
        "--secret",
        "HF_TOKEN",
        *FAKE_TRAINER,
        "--",
        "show.py",
        "a b",
        "$HOME",
        "semi;",
        "it's",
        env=env,
    )
    assert done.returncode == 0, done.stderr
    wait_for(lambda: cli(work, "logs").stdout.count("got it") == 2)
    (work / "expected").unlink()
    hits = subprocess.run(["grep", "-rl", canary, str(work)], capture_output=True, text=True, check=False).stdout
    assert hits == ""
    assert canary not in subprocess.run(["ps", "axww"], capture_output=True, text=True, check=True).stdout
    server = tmux_socket(RunDir(work / "runs" / "s"))
    shown = subprocess.run(["tmux", "-L", server, "show-environment", "-g"], capture_output=True, text=True, check=True)
    assert canary not in shown.stdout
    holders = set()
    for pid in [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
        try:
            if canary.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                holders.add(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    assert holders
    assert all("torch.distributed.run" in holder or "show.py" in holder for holder in holders), holders


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["none", "--preset", "demo"], "none: cannot be read"),
        (["--preset", "demmo"], "--preset: 'demmo' is not a preset"),
        (["--preset", "demo", "--run", "a/b"], "--run: 'a/b' is not a valid run name"),
        (["--preset", "demo", "--model.path", "nowhere"], "nowhere: no such directory"),
        (
            ["--preset", "demo", "--training.global_batch_size", "7"],
            "7 sequences cannot be divided into micro-batches of 4; use --training.global_batch_size 4 or 8",
        ),
        (["--preset", "demo", "--secret", "LLAMA405B_NODE"], "--secret: LLAMA405B_NODE is set by the run itself"),
        (["--preset", "demo", "--resume", "x"], "--resume: 'x' is not a checkpoint"),
        (["--preset", "demo", "--secret", "NO_SUCH_VARIABLE"], "--secret: NO_SUCH_VARIABLE is not set here"),
        (["--preset", "demo", "--", "x.py"], "settings are for the trainer"),
        (
            ["--preset", "demo", "--data.seq_len", "100000", "--model.path", "{demo}"],
            "exceeds the model's limit of 1024 positions",
        ),
        (
            ["--preset", "demo", "--data.paths", "nowhere/*"],
            "node-a: --data.paths: 'nowhere/*' matches no file; check the path",
        ),
        (
            ["--preset", "demo", "--data.paths", "{demo}/*.safetensors"],
            ".safetensors: neither text nor JSON Lines (plain or in gzip) nor Parquet;",
        ),
        (
            ["--", "nosuch.py", "an argument"],
            "nosuch.py: no host has it in its working directory; correct the name",
        ),
        (["--", "-m", "no_such.module"], "-m no_such.module: no host has it in its working directory"),
        (["--port", "{port}", "--preset", "demo"], "--port: {port} is in use on the head"),
        (["--preset", "demo", "--run", "old"], "--run: 'old' exists on node-a"),
    ],
)
def test_bad_input_starts_nothing(work, cli, demo, args, words):
    (work / "runs/old").mkdir(parents=True)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        fill = {"demo": demo, "port": held.getsockname()[1]}
        done = cli(work, "launch", *[arg.format(**fill) for arg in args])
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert words.format(**fill) in done.stderr
    assert [p.name for p in (work / "runs").iterdir()] == ["old"]


@pytest.mark.soak
def test_the_demo_fits_four_hosts(work, cli, demo):
    (work / "hosts").write_text("".join(f"node-{i} address=localhost slots=1\n" for i in range(4)))
    small = ["--data.max_bytes", 300_000, "--data.seq_len", 64, "--training.max_steps", 2]
    done = cli(work, "launch", "--run", "d", "--follow", "--preset", "demo", "--model.path", demo, *small)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 steps of 16 x 64 tokens (1 micro-batch on each of 4 ranks)" in done.stdout


def test_what_transformers_does_not_know_is_one_sentence_before_anything_is_read(work, cli, demo, corpus):
    (work / "hosts").write_text(ONE_HOST)
    shutil.copytree(demo, work / "model")
    record = json.loads((demo / "config.json").read_text())
    (work / "model" / "config.json").write_text(json.dumps(record | {"hidden_act": "gelux"}))
    done = cli(work, "launch", "--run", "g", "--follow", *settings(demo, corpus), "--model.path", "model")
    assert done.returncode == 1
    assert (
        "rank 0 exited with 2: model/config.json: transformers has no activation 'gelux' (hidden_act);" in done.stderr
    )
    assert "tokenizing" not in done.stdout


def test_the_ranks_own_sentence_is_the_last_line(work, cli, demo, corpus):
    (work / "hosts").write_text(ONE_HOST)
    flags = settings(demo, corpus)
    (work / "bad.jsonl").write_text('{"text": "x"}\n{"txt": "y"}\n')
    done = cli(work, "launch", "--run", "b", "--follow", *flags, "--data.paths", "bad.jsonl")
    assert done.returncode == 1
    assert "FAILED  node-a: exited 1: rank 0 exited with 2: bad.jsonl:2: not {" in done.stderr
    import torch

    if not torch.cuda.is_available():  # before the ranks have met
        done = cli(work, "launch", "--run", "c", "--follow", *flags, "--parallel.device", "cuda")
        assert done.returncode == 1
        assert "exited with 2: --parallel.device: cuda was requested, but torch sees no GPU" in done.stderr


def test_a_directory_that_is_not_there_is_never_a_success(work, cli):
    (work / "hosts").write_text("localhost workdir=/nowhere/at/all\n")
    for _ in range(4):
        done = cli(work, "launch", "--preset", "demo")
        assert done.returncode == 1
        assert "there is no directory /nowhere/at/all" in done.stderr


def test_going_back_and_stopping(work, cli, demo, corpus):
    (work / "hosts").write_text(ONE_HOST)
    train(work, "b", *settings(demo, corpus, 8))
    flags = [*settings(demo, corpus, 100_000), "--checkpoint.every", 1000]
    assert cli(work, "launch", "--run", "b", "--resume", 4, *flags).returncode == 0
    wait_for(lambda: heartbeat(work, "b", 0)["step"] >= 5)
    state = cli(work, "status", "--run", "b")
    assert "newest checkpoint: " in state.stdout
    assert state.stdout.splitlines()[-1].endswith("step-00000004")
    assert cli(work, "stop", "--run", "b", "--grace", "0").returncode == 0


def test_a_file_that_is_no_plan_breaks_no_verb(work, cli):
    (work / "runs/bad").mkdir(parents=True)
    (work / "runs/bad/plan.json").write_text('{"nodes": 3}')
    done = cli(work, "status")
    assert done.returncode == 2
    assert "no run on these hosts yet" in done.stderr
    (work / "runs/bad/plan.json").unlink()


def test_no_tmux_is_said(work, cli, tmp_path_factory):
    programs = tmp_path_factory.mktemp("bin")
    for name in ("sh", "ip", "env"):
        (programs / name).symlink_to(f"/usr/bin/{name}")
    done = cli(work, "launch", "--preset", "demo", env={"PATH": str(programs)})
    assert done.returncode == 1
    assert "2 of 2 hosts are not fit: node-a,node-b: tmux is not installed; install it" in done.stderr


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("unshare"), reason="NOT RUN: needs root and unshare")
def test_local_nodes_meet_at_127_0_0_1_whatever_etc_hosts_says(work):
    (work / "etc-hosts").write_text("203.0.113.9 localhost\n")
    (work / "p.py").write_text("import os; print('met at', os.environ['MASTER_ADDR'], flush=True)")
    launch = f"{sys.executable} -m llama405b_tools.cli launch --run met --follow -- p.py"
    inside = ["unshare", "--mount", "sh", "-c", f"mount --bind {work}/etc-hosts /etc/hosts && exec {launch}"]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"}
    done = subprocess.run(inside, cwd=work, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "rendezvous at 127.0.0.1:" in done.stdout
    assert "met at 127.0.0.1" in done.stdout


def test_dry_run_opens_nothing(work, cli):
    done = cli(work, "launch", "--preset", "demo", "--run", "x", "--dry-run")
    assert done.returncode == 0
    assert done.stdout.count("torch.distributed.run") == 2
    assert not (work / "runs").exists()


@pytest.mark.parametrize(
    ("file", "text", "verb", "code", "words"),
    [
        ("llama405b/setup.json", '{"hosts": 3}', ["status"], 2, "setup.json: not written by setup; delete it"),
        (
            "llama405b/setup.json",
            '{"hosts": {"@a:22": [{"python": "/x"}]}}',
            ["doctor"],
            2,
            "setup.json: not written by",
        ),
        ("runs/r/slurm.json", "{}", ["status", "--run", "r"], 2, "no host has 'r' in "),
        ("runs/r/guard.json", '{"run": "r"}', ["stop", "--run", "r"], 2, "no host has 'r' in "),
        ("runs/r/guard.json", "[]", ["logs", "--run", "r"], 2, "there are none yet"),
    ],
)
def test_records_that_are_none_break_no_verb(work, cli, monkeypatch, file, text, verb, code, words):
    monkeypatch.setenv("XDG_STATE_HOME", str(work))
    (work / file).parent.mkdir(parents=True, exist_ok=True)
    (work / file).write_text(text)
    done = cli(work, *verb)
    assert done.returncode == code, done.stdout + done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_hosts_file_from_windows(work, cli):
    (work / "hosts").write_bytes(b"\xef\xbb\xbfnode-a address=localhost slots=1\r\n")
    assert "no run on these hosts yet" in cli(work, "status").stderr


def test_cache_and_scratch_reach_the_ranks(work, cli):
    (work / "places.py").write_text("import os, tempfile; print('at', os.environ['HF_HOME'], tempfile.gettempdir())\n")
    (work / "hosts").write_text(f"node-a address=localhost slots=1 cache={work}/hf scratch={work}/a/b\n")
    done = cli(work, "launch", "--run", "p", "--follow", *FAKE_TRAINER, "--", "places.py")
    assert done.returncode == 0, done.stderr
    assert f"at {work}/hf {work}/a/b" in done.stdout
    (work / "hosts").write_text(f"node-a address=localhost slots=1 scratch={work}/places.py/x\n")
    refused = cli(work, "launch", "--run", "q", *FAKE_TRAINER, "--", "places.py")
    assert refused.returncode == 1
    assert f"node-a: scratch={work}/places.py/x cannot be created or written" in refused.stderr
    assert not (work / "runs/q").exists()


def test_deep_looks_into_the_weights(work, cli, demo, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(demo, model)
    files = sorted(model.glob("*.safetensors"))
    (work / "hosts").write_text("node-a address=localhost slots=1\n")
    assert hostprobe.check_weights(str(model), check_hashes=True)["unhashed"] == len(files)
    hashes = HashStore(model)
    for path in files:
        hashes.add(path.name, (hashlib.sha256(path.read_bytes()).hexdigest(),))
    known = hostprobe.check_weights(str(model), check_hashes=True)
    assert (known["unhashed"], known["faults"]) == (0, [])
    data = bytearray(files[0].read_bytes())
    data[-1] ^= 1
    files[0].write_bytes(data)
    done = cli(
        work, "doctor", "--deep", "--json", "--model.path", model, "--parallel.device", "cpu"
    )  # loads nothing then
    (found,) = [f for f in json.loads(done.stdout)["findings"] if str(model) in f["what"]]
    assert (found["level"], found["what"]) == (
        "bad",
        f"{model}: {files[0].name} has changed since it was verified (SHA-256 of block 0)",
    )


def test_a_program_of_the_users_own_is_shown_as_it_is(work, cli):
    (work / "mine.py").write_text(
        "import pathlib, sys, time\n"
        "print('a warning', file=sys.stderr, flush=True)\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.1)\n"
        "{}['x']\n"
    )
    started = cli(work, "launch", "--run", "mine", *FAKE_TRAINER, "--", "mine.py")
    assert started.returncode == 0, started.stderr
    assert "# end it on every host" in started.stdout
    shown = cli(work, "top", "--run", "mine", "--once")
    assert re.search(r"(?m)^mine RUNNING ", shown.stdout), shown.stdout
    assert "checkpoint" not in cli(work, "status", "--run", "mine").stdout
    cli(work, "stop", "--grace", "0", "--run", "mine")
    (work / "go").touch()
    failed = cli(work, "launch", "--run", "mine2", "--follow", *FAKE_TRAINER, "--", "mine.py")
    assert failed.returncode == 1
    for name in ("node-a", "node-b"):
        assert f"{name} │ a warning\n" in failed.stdout
    assert re.search(r"^node-[ab] │ Traceback \(most recent call last\):$", failed.stdout, re.MULTILINE)
    assert re.search(r"^node-[ab] │ KeyError: 'x'$", failed.stdout, re.MULTILINE)
    assert "--resume" not in failed.stdout + failed.stderr
