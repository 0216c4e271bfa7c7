"""``llama405b logs`` over complete runs on this machine: two nodes, two ranks each, real files, real torchrun."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from conftest import ROOT
from llama405b_tools.text.words import CUT_NOTE, MAX_LINE_BYTES
from ops_rig import FAKE_TRAINER, wait_for

TALK = """
import os, sys, time
rank = int(os.environ["LLAMA405B_FIRST_RANK"]) + int(os.environ["LOCAL_RANK"])
for i in range({n}):
    print(f"rank {{rank}} line {{i}} value {{rank * 10 + i}}", flush=True)
    print(f"same for all {{i}}, rate {{rank + 1}}.5", flush=True)
    time.sleep({pause})
print("\\x1b[2J\\x1b]0;evil\\x07 token hf_abcdefghijklmnopqrstuvwxyz", file=sys.stderr, flush=True)
{end}
"""


@pytest.fixture
def hosts2(work):
    (work / "hosts").write_text("node-a address=localhost slots=2\nnode-b address=localhost slots=2\n")
    return work


def talk(work, n=5, pause=0.3, end=""):
    (work / "talk.py").write_text(TALK.format(n=n, pause=pause, end=end))
    return ["--", "talk.py"]


def records(done):
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_rank_once_in_order_filtered_folded_and_saved(hosts2, cli):
    assert cli(hosts2, "launch", "--run", "t", "--follow", *talk(hosts2)).returncode == 0
    found = records(cli(hosts2, "logs", "-o", "json"))
    assert [r["time"] for r in found] == sorted(r["time"] for r in found)
    for rank in range(4):
        mine = [r["text"] for r in found if r["rank"] == rank and r["stream"] == "out"]
        assert mine[::2] == [f"rank {rank} line {i} value {rank * 10 + i}" for i in range(5)]
        assert {r["host"] for r in found if r["rank"] == rank} == {"node-a" if rank < 2 else "node-b"}
    text = cli(hosts2, "logs").stdout
    assert "\x1b" not in text
    assert "evil" not in text
    assert "hf_a…REDACTED" in text
    assert re.search(r"^\d\d:\d\d:\d\d node-b r3 out │ rank 3 line 0 value 30$", text, re.MULTILINE)
    folded = cli(hosts2, "logs", "--fold", "-i", "same for all").stdout.splitlines()
    assert len(folded) == 5
    assert "node-[a" not in folded[0]
    assert re.search(r"node-a,node-b r0-3 out │ same for all 0, rate 1.5–4.5$", folded[0])
    some = records(
        cli(hosts2, "logs", "-o", "json", "--rank", "1,3", "-e", "same", "-i", "line [12]", "--host", "node-b")
    )
    assert [r["text"] for r in some] == ["rank 3 line 1 value 31", "rank 3 line 2 value 32"]
    assert {r["stream"] for r in records(cli(hosts2, "logs", "-o", "json", "--stderr"))} == {"err"}
    assert len(records(cli(hosts2, "logs", "-o", "json", "--tail", "1", "-i", "same"))) == 4
    assert records(cli(hosts2, "logs", "-o", "json", "--since", "0.01s", "--rank", "0")) == []
    cli(hosts2, "logs", "--save", "out")
    assert (hosts2 / "out/node-b/rank-2.out.log").read_text().count("\n") == 10
    assert "torchrun" in cli(hosts2, "logs", "--agent").stdout
    assert "no failure on 2 hosts" in cli(hosts2, "logs", "--first-error").stdout


def test_the_first_error_with_its_traceback(hosts2, cli):
    end = "def f():\n    raise RuntimeError('out of luck')\nif rank == 3: f()\ntime.sleep(60)"
    assert cli(hosts2, "launch", "--run", "x", "--follow", *FAKE_TRAINER, *talk(hosts2, end=end)).returncode == 1
    done = cli(hosts2, "logs", "--first-error")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].startswith("run x: node-b: exited 1: rank 3 exited with 1")
    assert "Traceback (most recent call last):" in done.stdout
    assert "RuntimeError: out of luck" in done.stdout
    killed = "import signal\nif rank == 1: os.kill(os.getpid(), signal.SIGSEGV)\ntime.sleep(60)"
    assert cli(hosts2, "launch", "--run", "y", "--follow", *FAKE_TRAINER, *talk(hosts2, end=killed)).returncode == 1
    assert "node-a: exited 1: rank 1 was killed by SIGSEGV" in cli(hosts2, "logs", "--run", "y", "--first-error").stdout


LONG = """
import os, sys, time
out, err = sys.stdout, sys.stderr
print("start", flush=True)
for i in range(140_000):
    out.write(f"\\rLoading shards: {i // 1400:3}%|{'#' * 60:100}| {i}/140000")
    if i == 70_000:
        out.write("\\rWARNING: shard 10 is corrupt, skipping")
out.write("\\ndone\\n" + "x" * (17 << 20) + "\\nafter it\\n")
out.flush()
err.write("\\r".join(f"epoch {i:08} |{'=' * 90}|" for i in range(150_000)) + "\\n")
out.write("Overwrite /data/out? [y/N] ")
out.flush()
while not os.path.exists("answer"):
    time.sleep(0.1)
raise RuntimeError("the real reason")
"""


def test_bars_and_long_lines_hide_nothing_and_a_question_is_shown(work, cli):
    (work / "long.py").write_text(LONG)
    assert cli(work, "launch", "--run", "long", "--", "long.py").returncode == 0
    command = [sys.executable, "-P", "-m", "llama405b_tools.cli", "logs", "-f", "--rank", "0"]
    with (
        (work / "followed").open("wb") as out,
        subprocess.Popen(command, cwd=work, stdout=out, stderr=subprocess.STDOUT) as child,
    ):
        wait_for(
            lambda: "Overwrite /data/out? [y/N]  … (the line has not ended)" in (work / "followed").read_text("utf-8")
        )
        (work / "answer").touch()
        wait_for(lambda: child.poll() is not None)
    assert child.returncode == 0
    followed = (work / "followed").read_text("utf-8")
    assert "trying again" not in followed
    assert "RuntimeError: the real reason" in followed
    lines = [
        each["text"] for each in records(cli(work, "logs", "--rank", "0", "-o", "json")) if each["stream"] == "out"
    ]
    assert {"WARNING: shard 10 is corrupt, skipping", "done", "after it", "Overwrite /data/out? [y/N] "} < set(lines)
    assert [line for line in lines if line.startswith("xxx")] == ["x" * MAX_LINE_BYTES + CUT_NOTE]
    assert [line[:20] for line in lines if line.startswith("Loading")] == [
        "Loading shards:  50%",
        "Loading shards:  99%",
    ]
    assert cli(work, "logs", "-i", "corrupt").stdout.count("│") == 2
    assert cli(work, "logs", "-o", "raw", "--rank", "0").stdout.count("x") == 17 << 20
    first = cli(work, "logs", "--first-error").stdout
    assert "RuntimeError: the real reason" in first
    assert "Traceback (most recent call last):" in first


def test_following_goes_on_over_restarts_and_broken_connections(hosts2, cli):
    end = "raise SystemExit(3 if not os.path.exists('twice') and not open('twice', 'w').close() else 0)"
    started = cli(
        hosts2, "launch", "--run", "g", "--restart", 3, *FAKE_TRAINER, *talk(hosts2, n=30, pause=0.1, end=end)
    )
    assert started.returncode == 0, started.stderr
    follower = subprocess.Popen(
        [sys.executable, "-m", "llama405b_tools.cli", "logs", "-f", "-o", "json"],
        cwd=hosts2, env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tools"}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(lambda: "rank 0 line 5" in cli(hosts2, "logs", "--run", "g").stdout)
    mine = ("pgrep", "-P", str(follower.pid), "-f", "llama405b_tools.agent.agent stream")  # others run beside it
    streams = wait_for(
        lambda: (
            len(pids := subprocess.run(mine, capture_output=True, text=True, check=False).stdout.split()) == 2 and pids
        )
    )
    for pid in streams:
        os.kill(int(pid), signal.SIGKILL)
    out, _ = follower.communicate(timeout=120)
    assert follower.returncode == 0
    texts = [(r["rank"], r["text"]) for r in map(json.loads, out.splitlines()) if " line " in r["text"]]
    for rank in range(4):
        mine = [text for r, text in texts if r == rank]
        last = f"rank {rank} line 29 value {rank * 10 + 29}"
        assert mine.count(last) >= 1
        assert mine[-30:] == [
            f"rank {rank} line {i} value {rank * 10 + i}" for i in range(30)
        ]  # the last attempt: whole, once
        first = mine[:-30]
        assert first == [f"rank {rank} line {i} value {rank * 10 + i}" for i in range(len(first))]
    past = cli(hosts2, "logs", "--first-error")  # the run has ended well since
    assert past.returncode == 1
    assert re.match(r"run g, attempt 1: node-[ab]: exited 1: rank \d exited with 3", past.stdout), past.stdout
    assert "no failure on 2 hosts in attempt 2" in cli(hosts2, "logs", "--first-error", "--attempt", "2").stdout
    assert len(records(cli(hosts2, "logs", "--attempt", "1", "-i", "line 3 ", "-o", "json"))) == 4
    assert len(records(cli(hosts2, "logs", "--attempt", "all", "-i", "line 3 ", "-o", "json"))) == 8


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["-i", "("], "--include: '(' is not a valid regular expression"),
        (["--rank", "x"], "--rank: 'x' is not a valid rank list"),
        (["--since", "soon"], "--since: 'soon' is not a valid time"),
        (["--attempt", "first"], "--attempt: 'first' is not a valid attempt"),
        (["--tail", "-1"], "--tail: -1 is negative"),
        (["-f", "--first-error"], "--first-error cannot be used with -f"),
        (["--host", "node-z"], "--host: 'node-z' is not in hosts; use one of node-a, node-b"),
    ],
)
def test_bad_options(work, cli, args, words):
    done = cli(work, "logs", *args)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
