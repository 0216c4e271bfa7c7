"""The autopsy, in real runs: causes, and runs that are merely slow, of which ``--soak`` has more (docs/measurements/autopsy.md has all)."""

import json
import re

import pytest
from causes import Case, is_right, stays_quiet, strikes

from llama405b_tools.agent.evidence import rank_processes
from ops_rig import FAKE_TRAINER, wait_for


def cases(first, *longer):
    return [first, *(pytest.param(case, marks=pytest.mark.soak) for case in longer)]


HANGS = cases(Case("gil_held", 2, 5, "backward"), Case("locked_file", 1, 6, "save"), Case("swallowed", 3, 4, "forward"))
SLOW = cases(Case("slow_disk", 2, 4, "save"), Case("slow", 1, 4, "forward"), Case("starting", 0, 4, "data"))


@pytest.mark.parametrize("case", HANGS, ids=lambda case: case.name)
def test_the_culprit_is_named(tmp_path, demo, corpus, case):
    found = strikes(tmp_path, demo, corpus, case)
    assert is_right(case, found), found
    for name in ("report.txt", "stacks.txt", "node-a.json", "node-b.json"):
        assert (tmp_path / case.name / found["kept"] / name).stat().st_size > 200


@pytest.mark.parametrize("case", SLOW, ids=lambda case: case.name)
def test_nobody_is_blamed_for_being_slow(tmp_path, demo, corpus, case):
    said = stays_quiet(tmp_path, demo, corpus, case, 20, every_s=3.0, least=3)
    assert {verdict for verdict, _ in said} <= {"moves", "unclear", "over"}, (
        said
    )  # the latter two: Python is still starting


FOREIGN = """
import signal, sys, time
if sys.argv[1:] == ["catches"]:
    signal.signal(39, lambda *_: sys.exit("signalled"))
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit("signalled"))
def wait_here():
    while True:
        time.sleep(0.2)
        print("still here", flush=True)
print("here", flush=True)
wait_here()
"""


@pytest.mark.parametrize("words", [[], ["catches"]])
def test_a_program_of_the_users_own_lives_on(work, cli, words):
    (work / "own.py").write_text(FOREIGN)
    assert cli(work, "launch", "--run", "own", *FAKE_TRAINER, "--", "own.py", *words).returncode == 0
    logs = wait_for(lambda: len(found := list(work.glob("runs/own/logs/*/*/*/0/stdout.log"))) == 2 and found)
    before = [rank_processes(f"{work}/runs/own:{host}") for host in ("node-a", "node-b")]
    done = cli(work, "autopsy", "--run", "own")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^UNCLEAR  .*report no steps", done.stdout, re.MULTILINE)
    assert "own.py:8 (wait_here): time.sleep(0.2)" in done.stdout  # from outside, by py-spy
    sizes = [log.stat().st_size for log in logs]
    wait_for(lambda: all(log.stat().st_size > size + 30 for log, size in zip(logs, sizes, strict=True)))
    assert [rank_processes(f"{work}/runs/own:{host}") for host in ("node-a", "node-b")] == before
    assert [len(each) for each in before] == [1, 1]


def test_it_is_refused_where_nothing_runs(work, cli):
    done = cli(work, "autopsy", "--run", "none")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    (work / "end.py").write_text("")
    assert cli(work, "launch", "--run", "over", "--follow", *FAKE_TRAINER, "--", "end.py").returncode == 0
    done = cli(work, "autopsy", "--run", "over")
    assert done.returncode == 2
    assert done.stderr.endswith("says how it ended\n")


def test_the_json_says_what_the_report_says(work, cli, demo, corpus):
    from ops_rig import fake_trainer, heartbeat

    assert cli(work, "launch", "--run", "j", *fake_trainer(demo, corpus, 100_000)).returncode == 0
    wait_for(lambda: heartbeat(work, "j", 1)["step"] > 2)
    plain = cli(work, "autopsy", "--run", "j")
    assert plain.returncode == 0, plain.stdout
    assert re.search(r"^MOVES  .*every rank advanced during the sample$", plain.stdout, re.MULTILINE), plain.stdout
    record = json.loads(cli(work, "autopsy", "--run", "j", "--json").stdout)
    assert (record["verdict"], record["culprit"], record["lost"]) == ("moves", None, {})
    assert heartbeat(work, "j", 1)["step"] > 2
