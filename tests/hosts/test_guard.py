"""Unattended runs: restarts, hangs, stops that save, terminals that die. On this machine, with real parts."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from conftest import ONE_HOST, ROOT
from llama405b_tools.agent import processes
from ops_rig import FAKE_TRAINER, PACED, fake_trainer, freeze, heartbeat, metrics, own_disk, settings, train, wait_for


def guard_log(work, run):
    path = work / "runs" / run / "guard.log"
    return path.read_text() if path.exists() else ""


def saved(work, run):
    return any(work.glob(f"runs/{run}/checkpoints/step-*/manifest.json"))


def status(work, run, host):
    try:
        return json.loads((work / "runs" / run / "status" / f"{host}.json").read_text())
    except OSError:  # between two attempts
        return {"attempt": 0, "state": "", "pid": 0}


def test_a_guarded_run_comes_back_to_the_same_losses(work, cli, demo, corpus):
    """Though it is a peer of tensor parallelism that is lost, in the middle of what it computes with the other."""
    flags = [*settings(demo, corpus), "--parallel.tp", 2, "--parallel.tp_across_hosts", "true"]
    train(work, "whole", *flags, world=2)
    notify = "printf '%s %s\\n' $LLAMA405B_EVENT $LLAMA405B_RUN >>notes"
    done = cli(work, "launch", "--run", "g", "--restart", 2, "--notify", notify, *flags, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "guard running as pid" in done.stdout
    killed = []
    for after, host in ((4, "node-b"), (8, "node-a")):
        wait_for(lambda after=after: (work / f"runs/g/checkpoints/step-{after:08d}").exists())
        attempt = status(work, "g", host)["attempt"]
        rank = ("node-a", "node-b").index(host)
        killed.append(int(time.time()))
        os.kill(heartbeat(work, "g", rank)["pid"], signal.SIGKILL)
        wait_for(lambda attempt=attempt, host=host: status(work, "g", host)["attempt"] > attempt)
    wait_for(lambda: "ended: the run finished successfully" in guard_log(work, "g"))
    assert {s: m["loss"] for s, m in metrics(work, "g").items()} == {
        s: m["loss"] for s, m in metrics(work, "whole").items()
    }
    logs = r"`\S+ logs --run g --attempt 1 --rank 1` shows its log"
    assert re.search(rf"recovering: node-b: exited 1: rank 1 was killed by SIGKILL; {logs}\n", guard_log(work, "g"))
    wait_for(lambda: "end " in (work / "notes").read_text())  # told after the log was written
    events = [line.split()[0] for line in (work / "notes").read_text().splitlines()]
    assert events == ["incident", "recovery", "incident", "recovery", "end"]
    state = cli(work, "status", "--run", "g")
    assert state.returncode == 0
    assert "guard: ended, 2 restarts" in state.stdout
    report = cli(work, "report", "--run", "g", "--price", 2)
    assert report.returncode == 0, report.stderr
    assert len(re.findall(r"attempt \d: node-[ab]: .*SIGKILL; next step after", report.stdout)) == 2
    page = (work / "runs/g/report.html").read_text()
    assert page.count('class="band bad"') >= 2 * 6  # on each axis of time
    assert "saved step-" in page
    assert state.stdout.startswith("run g, ranks as tp 2\n")
    told = re.search(r"^goodput (\d+\.\d)% of \S+: .* trained, .* lost to 2 failures", state.stdout, re.MULTILINE)
    assert 0 < float(told[1]) < 100
    lines = re.findall(
        r"^  \d{4}-\S+ \S+  attempt (\d): .*rank \d was killed by SIGKILL; next step after \S+, ", state.stdout, re.M
    )
    assert lines == ["1", "2"]
    when = re.findall(
        r"^  (\S+ \S+)  attempt \d: .*SIGKILL; ", state.stdout, re.M
    )  # one kill has one time, wherever it is told
    assert re.findall(r"^  (\S+ \S+)  attempt \d: .*SIGKILL; ", report.stdout, re.M) == when
    assert [page.count(f"<td>{each}</td>") >= 2 for each in when] == [True, True]
    blames = [json.loads(line) for line in (work / "runs/g/status/node-a.blames.jsonl").read_text().splitlines()]
    ends = [json.loads(line) for line in (work / "runs/g/status/node-a.ends.jsonl").read_text().splitlines()]
    assert when == [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(blame["time"])) for blame in blames]
    for at, blame, end in zip(killed, blames, ends, strict=False):  # as soon as it was seen, and not when all had ended
        assert at <= blame["time"] <= end["time"]
    account = json.loads(cli(work, "status", "--run", "g", "--json").stdout)["account"]
    assert [incident["attempt"] for incident in account["incidents"]] == [1, 2]
    kept = sum(each["step_s"] for each in metrics(work, "g").values())
    assert account["seconds"]["training"] == pytest.approx(kept)
    assert sum(account["seconds"].values()) <= account["until"] - account["began"] + 0.1


def test_a_hung_run_is_ended_and_resumed_and_a_stop_ends_the_guard(work, cli, demo, corpus):
    flags = fake_trainer(demo, corpus, steps=100_000)
    assert cli(work, "launch", "--run", "h", "--restart", 3, "--hang-after", "4s", *flags).returncode == 0
    wait_for(lambda: saved(work, "h"))
    os.kill(heartbeat(work, "h", 1)["pid"], signal.SIGSTOP)
    words = "node-b: hung: rank 1 is silent for"
    wait_for(lambda: words in guard_log(work, "h"))
    assert "it is stopped by a signal" in guard_log(work, "h")
    assert re.search(
        r"autopsy: HANGS  node-b: rank 1 cannot continue: it is stopped by a signal.* full report in runs/h/autopsy/\S+",
        guard_log(work, "h"),
    )
    [report] = work.glob("runs/h/autopsy/*/report.txt")
    assert "rank 1" in report.read_text()
    wait_for(lambda: "watching: running again" in guard_log(work, "h"))
    wait_for(lambda: heartbeat(work, "h", 1)["step"] > 5)
    first = cli(work, "logs", "--run", "h", "--first-error").stdout  # whichever host's part ended first
    assert first.startswith(f"run h, attempt 1: {words}"), first
    guard = json.loads((work / "runs/h/guard.json").read_text())
    stopped = cli(work, "stop", "--run", "h")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert not processes.is_same_process(
        guard["pid"], guard["pid_start"]
    )  # a zombie counts as gone: PID 1 may not reap
    assert "guard: stopped" in cli(work, "status", "--run", "h").stdout


@pytest.mark.soak
@pytest.mark.skipif(os.getuid() != 0, reason="NOT RUN: a disk of its own needs root")
def test_a_save_on_a_disk_that_is_frozen_is_told_everywhere_until_it_ends(work, cli, demo, corpus):
    (work / "hosts").write_text(ONE_HOST)
    with own_disk(work / "disk", 256 << 20) as disk:
        flags = [*settings(demo, corpus, steps=100_000), "--checkpoint.every", 40, "--checkpoint.dir", disk / "c"]
        notify = "echo $LLAMA405B_EVENT $LLAMA405B_MESSAGE >>notes"
        assert cli(work, "launch", "--run", "f", "--restart", 1, "--notify", notify, *flags).returncode == 0
        wait_for(lambda: len(saves := list(disk.glob("c/step-*/manifest.json"))) > 1 and saves, 120)
        freeze(disk)
        try:
            words = r"for \d+ s, (usually every \d+ s|in a save that usually takes \d+\.\d s)"
            told = wait_for(
                lambda: (out := cli(work, "status", "--run", "f").stdout) and re.search(words, out) and out, 120
            )
            assert re.search(f"^NOT SAVED: {words}$", told, re.MULTILINE), told
            since = heartbeat(work, "f", 0)["save_since"]
            screen = cli(work, "top", "--run", "f", "--once").stdout
            assert re.search(rf"DEGRADED.* not saved: {words}", screen), screen
            seen = cli(work, "autopsy", "--run", "f").stdout
            assert re.search(rf"^MOVES  .*; not saved: {words}", seen, re.MULTILINE), seen
            wait_for(
                lambda: re.search(f"^not saved no checkpoint {words}$", (work / "notes").read_text(), re.MULTILINE)
            )
            assert heartbeat(work, "f", 0)["save_since"] == since
        finally:
            freeze(disk, "-u")
        wait_for(lambda: heartbeat(work, "f", 0)["save_since"] != since)
        wait_for(lambda: "NOT SAVED" not in cli(work, "status", "--run", "f").stdout)
        kept = max(path.parent.name for path in disk.glob("c/step-*/manifest.json"))
        newest = re.search(
            r"^newest checkpoint: .*/(step-\d+)$", cli(work, "status", "--run", "f").stdout, re.MULTILINE
        )
        assert newest[1] >= kept
        assert "not saved" not in cli(work, "top", "--run", "f", "--once").stdout
        assert cli(work, "stop", "--run", "f").returncode == 0


def test_a_restart_saves_and_is_its_guards(work, cli, demo, corpus):
    flags = [*fake_trainer(demo, corpus, steps=100_000), "--checkpoint.every", 90_000]
    assert cli(work, "launch", "--run", "alone", *flags).returncode == 0
    wait_for(lambda: heartbeat(work, "alone", 0)["step"] > 2)
    refused = cli(work, "ask", "restart", "--run", "alone")
    assert refused.returncode == 2, refused.stdout
    assert len(refused.stderr.splitlines()) == 1
    assert cli(work, "stop", "--run", "alone", "--grace", 0).returncode == 0

    (work / "hosts").write_text(ONE_HOST)
    flags = [*settings(demo, corpus, steps=100_000), *PACED, "--checkpoint.every", 90_000]
    assert cli(work, "launch", "--run", "again", "--restart", 3, *flags).returncode == 0
    wait_for(lambda: heartbeat(work, "again", 0)["step"] > 2)
    done = cli(work, "ask", "restart", "--run", "again")
    assert done.returncode == 0, done.stderr
    step = int(re.match(r"attempt 1 is ended after step (\d+), which is saved: ", done.stdout)[1])
    wait_for(lambda: status(work, "again", "node-a")["attempt"] == 2)
    wait_for(lambda: heartbeat(work, "again", 0)["step"] > step)
    of = metrics(work, "again")
    assert min(each for each, m in of.items() if m["attempt"] == 2) == step + 1
    assert max(each for each, m in of.items() if m["attempt"] == 1) == step  # none was lost
    told = cli(work, "status", "--run", "again").stdout
    assert "failure" not in told, told
    record = json.loads((work / "runs/again/guard.json").read_text())
    assert (record["state"], record["restarts"], record["in_vain"]) == ("watching", 1, 0)
    assert f"step-{step:08d}" in record["checkpoint"]


def test_a_guard_gives_up_on_what_never_gets_further(work, cli):
    (work / "hosts").write_text(ONE_HOST)
    (work / "bad.py").write_text("print('here we go'); raise SystemExit(3)\n")
    done = cli(work, "launch", "--run", "v", "--restart", 2, "--follow", *FAKE_TRAINER, "--", "bad.py", timeout=200)
    assert done.returncode == 1
    assert "gave up: " in done.stdout
    assert "after 2 restarts without a newer checkpoint" in done.stdout
    assert done.stdout.count("watching: running again") == 2
    record = json.loads((work / "runs/v/guard.json").read_text())
    assert (record["state"], record["restarts"]) == ("gave up", 2)


def test_what_the_trainer_refuses_is_not_tried_again(work, cli, demo, corpus):
    (work / "hosts").write_text(ONE_HOST)
    (work / "bad.jsonl").write_text('{"text": "x"}\n{"txt": "y"}\n')
    flags = [*settings(demo, corpus), "--data.paths", "bad.jsonl"]
    done = cli(work, "launch", "--run", "x", "--restart", 5, "--follow", *flags)
    assert done.returncode == 1
    assert "the trainer refused its input and would refuse it again" in done.stdout
    assert "running again" not in done.stdout


def kill_guard(work, run):
    path = work / f"runs/{run}/guard.json"
    guard = json.loads(wait_for(lambda: path.exists() and path.read_text()))
    notes = list((work / f"runs/{run}/status").glob("*.guard"))
    wait_for(
        lambda: all(json.loads(note.read_text())["pid"] == guard["pid"] for note in notes)
    )  # its hosts have heard it
    os.kill(guard["pid"], signal.SIGKILL)
    wait_for(lambda: not processes.is_same_process(guard["pid"], guard["pid_start"]))


def type_what_status_says(work, cli, run):
    """Status reports that the guard is gone, since when, and a command, which is typed as it is."""
    state = cli(work, "status", "--run", run)
    assert state.returncode == 1, state.stdout
    said = re.search(
        r"guard: GONE, last heard at \S+ \S+ \(.*\); to guard the run again, use `(.*)`",
        state.stdout,
    )
    assert said, state.stdout
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tools"}
    return subprocess.run(["sh", "-c", said[1]], cwd=work, env=env, capture_output=True, text=True, check=False)


def test_a_dead_guard_is_said_with_a_command_that_guards_the_run_again(work, cli, demo, corpus):
    flags = [*fake_trainer(demo, corpus, 100_000), "--env", "A=b c", "--notify", "echo $LLAMA405B_EVENT >>notes"]
    assert cli(work, "launch", "--run", "d", "--restart", 1, "--notify-every", "1s", *flags).returncode == 0
    wait_for(lambda: (work / "notes").exists() and "heartbeat" in (work / "notes").read_text())
    kill_guard(work, "d")
    (work / "runs/d/guard.json").unlink()  # as on another machine: its own, which is a host, knows that it is gone
    again = type_what_status_says(work, cli, "d")
    assert again.returncode == 0, again.stderr
    assert "its guard is gone; guarding it" in again.stdout
    assert cli(work, "status", "--run", "d").returncode == 0
    wait_for(lambda: "guard: watching" in cli(work, "status", "--run", "d").stdout)
    assert cli(work, "stop", "--run", "d", "--grace", "0").returncode == 0
    assert "GONE" not in cli(work, "status", "--run", "d").stdout


def test_a_guard_that_died_before_it_brought_the_run_back_is_said_with_a_command_that_does(work, cli, demo, corpus):
    assert cli(work, "launch", "--run", "d", "--restart", 1, *fake_trainer(demo, corpus, 100_000)).returncode == 0
    wait_for(lambda: saved(work, "d"))
    kill_guard(work, "d")
    os.kill(heartbeat(work, "d", 1)["pid"], signal.SIGKILL)
    wait_for(lambda: all(status(work, "d", host)["state"] == "exited" for host in ("node-a", "node-b")), 90)
    again = type_what_status_says(work, cli, "d")
    assert again.returncode == 0, again.stderr
    wait_for(lambda: heartbeat(work, "d", 1)["step"] >= 5)
    assert "guard: watching" in cli(work, "status", "--run", "d").stdout


def test_a_run_that_lost_its_guard_is_guarded_again(work, cli, demo, corpus):
    flags = [*fake_trainer(demo, corpus, 100_000), "--checkpoint.every", 5]
    assert cli(work, "launch", "--run", "w", *flags).returncode == 0
    first = cli(work, "launch", "--run", "w", "--restart", 1, *flags)  # as if its terminal had died before the guard
    assert first.returncode == 0, first.stderr
    assert "w: its guard is gone; guarding it from now on" in first.stdout
    guard = work / "runs/w/guard.json"
    wait_for(guard.exists)
    twice = cli(work, "launch", "--run", "w", "--restart", 1, *flags)
    assert twice.returncode == 2
    assert "--run: 'w' already has a guard (process " in twice.stderr
    record = json.loads(guard.read_text())
    os.kill(record["pid"], signal.SIGKILL)
    rebooted = record | {"machine": " ".join([*record["machine"].split()[:-1], "another-boot"]), "pid": os.getpid()}
    for path in (guard, *(work / "runs/w/status").glob("*.guard")):  # a pid that lives again means nothing
        path.write_text(json.dumps(rebooted))
    wait_for(lambda: "GONE" in cli(work, "status", "--run", "w").stdout)
    other = cli(work, "launch", "--run", "w", "--restart", 1, *flags, "--optimizer.lr", "0.01")
    assert other.returncode == 2
    wait_for(lambda: saved(work, "w"))
    attempt = status(work, "w", "node-a")["attempt"]
    assert cli(work, "launch", "--run", "w", "--restart", 1, *flags).returncode == 0
    os.kill(heartbeat(work, "w", 1)["pid"], signal.SIGKILL)
    wait_for(lambda: status(work, "w", "node-a")["attempt"] > attempt, 90)
    assert cli(work, "stop", "--run", "w").returncode == 0


def test_a_stop_right_after_the_launch_waits_until_it_is_heard(work, cli, demo, corpus):
    flags = [*fake_trainer(demo, corpus, steps=100_000), "--checkpoint.every", "50000"]
    assert cli(work, "launch", "--run", "early", *flags).returncode == 0
    stopped = cli(work, "stop", "--run", "early", "--grace", "90s")
    assert stopped.returncode == 0, stopped.stdout
    assert re.search(r"last step: (\d+); newest checkpoint: \S+/step-0*\1$", stopped.stdout, re.MULTILINE), (
        stopped.stdout
    )


def test_a_stop_with_other_hosts_changes_nothing(work, cli, demo, corpus):
    flags = fake_trainer(demo, corpus, steps=100_000)
    assert cli(work, "launch", "--run", "here", "--restart", 1, *flags).returncode == 0
    (work / "others").write_text("node-x\n")
    for verb in ("stop", "status", "logs"):
        done = cli(work, verb, "others", "--run", "here")
        assert done.returncode == 2, done.stdout + done.stderr
        assert "--run: 'here' was launched on node-a,node-b; name the hosts file that has them" in done.stderr
    assert "guard: watching" in cli(work, "status", "--run", "here").stdout
    assert cli(work, "stop", "--run", "here").returncode == 0


def test_a_launch_during_another_s_stop_is_refused(work, cli, demo, corpus):
    flags = fake_trainer(demo, corpus, steps=100_000)
    assert cli(work, "launch", "--run", "b", *flags).returncode == 0
    wait_for(lambda: heartbeat(work, "b", 1)["step"] >= 1)
    frozen = heartbeat(work, "b", 1)["pid"]
    os.kill(frozen, signal.SIGSTOP)  # so that the stop takes as long as it may
    stop = subprocess.Popen(
        [sys.executable, "-m", "llama405b_tools.cli", "stop", "--run", "b", "--grace", "90s"],
        cwd=work, env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tools"}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_for(lambda: all((work / f"runs/b/status/{host}.stop").exists() for host in ("node-a", "node-b")))
        done = cli(work, "launch", "--run", "b", "--restart", 1, *flags)
        assert done.returncode == 2, done.stdout
        assert "'b' is being stopped by " in done.stderr
        assert not (work / "runs/b/guard.json").exists()
    finally:
        os.kill(frozen, signal.SIGCONT)
        stop.communicate(timeout=120)


def test_a_launch_onto_another_s_checkpoints_is_refused_before_it_starts(work, cli, demo, corpus):
    flags = [*fake_trainer(demo, corpus, steps=4), "--checkpoint.dir", work / "shared"]
    assert cli(work, "launch", "--run", "one", "--follow", *flags).returncode == 0
    done = cli(work, "launch", "--run", "two", "--restart", 1, *flags)
    assert done.returncode == 2, done.stdout
    assert f"--checkpoint.dir: {work / 'shared'} holds checkpoints up to step-00000004; use another" in done.stderr
    assert not (work / "runs/two").exists()


def test_stop_lets_the_trainer_save(work, cli, demo, corpus):
    flags = [*fake_trainer(demo, corpus, steps=100_000), "--checkpoint.every", "50000"]
    follower = subprocess.Popen(
        [sys.executable, "-m", "llama405b_tools.cli", "launch", "--run", "s", "--follow", *map(str, flags)],
        cwd=work, env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tools"}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(lambda: heartbeat(work, "s", 1)["step"] >= 3)
    stopped = cli(work, "stop", "--run", "s")
    assert stopped.returncode == 0, stopped.stdout
    last = max(metrics(work, "s"))
    saved = work / f"runs/s/checkpoints/step-{last:08d}"
    assert f"last step: {last}; newest checkpoint: {saved}" in stopped.stdout
    assert "steps earlier" not in stopped.stdout
    out, _ = follower.communicate(timeout=30)
    assert follower.returncode == 1
    assert "stopped by " in out
    state = cli(work, "status", "--run", "s")
    assert state.returncode == 0
    assert "stopped" in state.stdout
    assert status(work, "s", "node-b")["state"] == "stopped"
    again = cli(work, "launch", "--run", "s", "--resume", "auto", *flags)
    assert again.returncode == 0, again.stderr
    wait_for(lambda: max(metrics(work, "s"), default=0) > last)
    now = cli(work, "stop", "--run", "s", "--grace", "0")
    assert now.returncode == 0
    assert "steps earlier)\n" in now.stdout


def test_variables_and_a_setup_line_reach_the_ranks(work, cli):
    (work / "show.py").write_text(
        "import os; print('seen', os.environ['A'], os.environ['B'], os.environ['C'], flush=True)\n"
    )
    (work / "run.env").write_text("B=from file\n")
    env = ["--env", "A=x y;$HOME", "--env-file", "run.env", "--setup-line", "export C=setup"]
    done = cli(work, "launch", "--run", "e", "--follow", *env, "--", "show.py")
    assert done.returncode == 0, done.stderr
    assert "seen x y;$HOME from file setup" in done.stdout
    bad = cli(work, "launch", "--run", "f", "--follow", "--setup-line", "false", *env[:4], "--", "show.py")
    assert bad.returncode == 1
    assert "the setup line failed with exit code 1: false" in bad.stderr


def test_leftovers_of_a_run_whose_launcher_is_gone(work, cli, demo, corpus):
    assert cli(work, "launch", "--run", "o", *fake_trainer(demo, corpus, 100_000)).returncode == 0
    wait_for(lambda: heartbeat(work, "o", 1)["step"] >= 1)
    runner = status(work, "o", "node-b")["pid"]
    kin = subprocess.run(
        ["pgrep", "-P", str(runner), "-f", "llama405b_tools.agent.node"], capture_output=True, text=True, check=True
    )
    for pid in (*map(int, kin.stdout.split()), runner):  # the guardian first
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: cli(work, "stop", "--orphans").returncode == 1)
    shown = cli(work, "stop", "--orphans")
    assert "node-b" in shown.stdout
    assert "run the same command with --end to end them" in shown.stdout
    assert "LEFTOVERS" in cli(work, "status", "--run", "o").stdout
    ended = cli(work, "stop", "--orphans", "--end")
    assert ended.returncode == 0, ended.stdout
    assert "ended" in ended.stdout
    assert "no leftovers on 2 hosts" in wait_for(
        lambda: (o := cli(work, "stop", "--orphans").stdout) and "no left" in o and o
    )


def test_a_rehearsal_goes_the_whole_way_and_leaves_nothing(work, cli, demo, corpus):
    (work / "hosts").write_text(ONE_HOST.replace("slots=1", "slots=2"))
    done = cli(work, "launch", "--run", "r", "--rehearse", *settings(demo, corpus, steps=500), "--parallel.pp", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "each rank made its own random weights" in done.stdout
    assert re.search(r"resumed from runs/r-rehearsal/checkpoints/step-\d{8}", done.stdout)
    assert "rehearsal: passed" in done.stdout
    assert not (work / "runs/r-rehearsal/checkpoints").exists()
    assert not (work / "runs/r").exists()


def test_a_rehearsal_names_phase_and_host(work, cli, demo, corpus):
    (work / "hosts").write_text(ONE_HOST)
    (work / "bad.jsonl").write_text('{"text": "x"}\n{"txt": "y"}\n')
    done = cli(work, "launch", "--rehearse", *settings(demo, corpus), "--data.paths", "bad.jsonl")
    assert done.returncode == 1
    assert re.search(r"rehearsal: FAILED after \d+ s: node-a: .*bad.jsonl:2: not .* \(in phase data\)", done.stdout)


@pytest.mark.parametrize("names", [("hosts", "hosts"), ("hosts", "aliases")], ids=["alike", "by another name"])
def test_of_two_launches_at_once_one_wins(work, cli, demo, corpus, names):
    (work / "aliases").write_text((work / "hosts").read_text().replace("node-", "alias-"))
    both = {}
    for number, hosts in enumerate(names):
        flags = map(str, ["--run", "two", *fake_trainer(demo, corpus, 100_000)])
        both[number] = subprocess.Popen(
            [sys.executable, "-m", "llama405b_tools.cli", "launch", hosts, *flags], cwd=work,
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tools"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    ends = {number: (process.communicate(timeout=200), process.returncode) for number, process in both.items()}
    assert sorted(code for _, code in ends.values()) == [0, 2], ends
    [(_, err)] = [texts for texts, code in ends.values() if code]
    assert "was just started by" in err or "is running on" in err or "exists on" in err, err
    wait_for(lambda: heartbeat(work, "two", 1)["step"] >= 1)  # the winner trains
    [winner] = [names[number] for number, (_, code) in ends.items() if not code]
    assert cli(work, "status", winner, "--run", "two").returncode == 0
    assert cli(work, "stop", winner, "--run", "two").returncode == 0


def test_a_launch_that_dies_midway_leaves_nothing(work, cli, demo, corpus, tmp_path_factory):
    programs = tmp_path_factory.mktemp("bin")
    slow = programs / "tmux"
    slow.write_text("""#!/bin/sh
case "$*" in *node-b*new-session*|*new-session*node-b*) touch "$0.asked"; until [ -e "$0.go" ]; do sleep 0.1; done;; esac
exec /usr/bin/tmux "$@"
""")
    slow.chmod(0o755)
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tools", "PATH": f"{programs}:{os.environ['PATH']}"}
    launch = subprocess.Popen(
        [sys.executable, "-m", "llama405b_tools.cli", "launch", "--run", "m", *map(str, fake_trainer(demo, corpus, 100_000))],
        cwd=work, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    wait_for(
        lambda: (work / "runs/m/status/node-a.json").exists() and status(work, "m", "node-a")["state"] == "running"
    )
    wait_for((programs / "tmux.asked").exists)
    launch.kill()
    launch.communicate()
    (programs / "tmux.go").touch()
    for host in ("node-a", "node-b"):
        wait_for(lambda host=host: status(work, "m", host)["state"] == "killed")
        wait_for(lambda host=host: processes.start_time(status(work, "m", host)["pid"]) is None)
    again = cli(work, "launch", "--run", "m", "--resume", "auto", *fake_trainer(demo, corpus, 100_000))
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(
    ("screen", "code"),
    [pytest.param(">&-", 0, marks=pytest.mark.soak), ("2>&1 | head -1", 0), (">/dev/full", 1), (">&- 2>&-", 0)],
)  # 1: what was said is lost
def test_a_screen_that_is_gone_leaves_no_run_unguarded(work, cli, demo, corpus, screen, code):
    flags = shlex.join(map(str, fake_trainer(demo, corpus, 100_000)))
    front = f"{sys.executable} -m llama405b_tools.cli"
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tools"}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{front} launch --run dark --restart 1 {flags} {screen}"],
        cwd=work, env=env, stdin=subprocess.DEVNULL, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == code
    wait_for((work / "runs/dark/guard.json").exists)
    guarded = json.loads((work / "runs/dark/guard.json").read_text())
    assert guarded["state"] == "watching"
    os.kill(guarded["pid"], 0)
    assert cli(work, "status", "--run", "dark").returncode == 0
    assert cli(work, "stop", "--run", "dark", "--grace", 0).returncode == 0


def test_following_ends_when_nobody_reads_and_the_run_continues(work, cli, demo, corpus):
    flags = shlex.join(map(str, fake_trainer(demo, corpus, 100_000)))
    front = f"{sys.executable} -m llama405b_tools.cli"
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tools"}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{front} launch --run lit --follow {flags} | head -1"],
        cwd=work, env=env, stdin=subprocess.DEVNULL, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 130
    assert cli(work, "status", "--run", "lit").returncode == 0
    assert cli(work, "stop", "--run", "lit", "--grace", 0).returncode == 0
