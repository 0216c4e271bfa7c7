"""What cluster-top hears of a host's runs: of several, the one it was told to stay with, else the newest live one."""

import dataclasses
import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT
from llama405b.contract import reader
from llama405b.contract.files import append_line, write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.records import (
    Cause,
    CauseKind,
    EventKind,
    FailureRecord,
    GuardStage,
    GuardState,
    Heartbeat,
    Phase,
    RunEvent,
)
from llama405b.spec.plan import Node, Plan
from llama405b_tools.agent import describe, processes, sampler, watching
from llama405b_tools.agent.messages import RunFrame, WatchRequest
from llama405b_tools.agent.processes import machine_id, take_lock
from llama405b_tools.hosts import calls
from llama405b_tools.text.words import MAX_LINE_BYTES

WATCHED = WatchRequest("a", None, "", 1.0, 60.0, 30.0)


@pytest.fixture
def runs(tmp_path):
    """Makes runs of this host; the locks of those that live are held by this process."""
    held = []

    def make(name, created, *, alive, first_rank=0, **more):
        path = tmp_path / "runs" / name
        (path / "status").mkdir(parents=True)
        node = Node("a", 1, first_rank, "/w", "/py", "", "", {"NCCL_DEBUG": "INFO"})
        plan = Plan(name, 1, created, f"{name}-1-x", "a:1", ("-m", "llama405b.train"), (), (node,))
        write_json(path / "plan.json", dataclasses.replace(plan, **more))
        if alive:
            lock = (path / "status/a.lock").open("w")
            held.append(lock)
            fcntl.flock(lock, fcntl.LOCK_EX)

    yield make
    for lock in held:
        lock.close()


@pytest.fixture
def told(tmp_path):
    """Starts an agent; hands out what it tells of after hearing something: run and others that live."""
    children = []

    def start(also="", **more):
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "llama405b_tools.agent.agent", "watch"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=65536, cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tools"},
        )  # fmt: skip
        children.append(child)
        request = WatchRequest(more.get("host", "a"), more.get("run"), more.get("stay", ""), 0.05, 60.0, 30.0)
        child.stdin.write(f"{calls.encode_arguments(watching.watch, request)}\n{also}")
        child.stdin.flush()

        def hear(text="", of=lambda run: (run.name, [*run.others])):
            child.stdin.write(text)
            child.stdin.flush()
            for _ in range(4):  # what was under way, and a whole interval after
                frame = json.loads(child.stdout.readline())
            if not frame["run"]:
                return sorted(frame["runs"])
            return of(reader.build_record(RunFrame, frame["run"], "run"))

        return hear

    yield start
    for child in children:
        child.stdin.close()
        child.wait(20)


@pytest.mark.slow
def test_the_newest_that_lives_is_told_of_until_it_is_to_stay_with_another(runs, told):
    runs("old", 1.0, alive=False)
    runs("lives", 2.0, alive=True)
    runs("newest", 3.0, alive=False)
    hear = told()
    assert hear() == ("lives", [])
    assert hear('{"stay": "old"}\n') == ("old", ["lives"])
    assert hear("\n") == ("old", ["lives"])  # a ping changes nothing
    assert hear('{"stay": "gone"}\n{"st') == ("lives", [])  # a line may come in two parts
    assert hear('ay": "newest"}\n') == ("newest", ["lives"])
    assert hear('{"stay": ""}\n') == ("lives", [])


def test_a_run_that_is_asked_for_is_stayed_with_and_the_others_that_live_are_told(runs, told):
    runs("old", 1.0, alive=False)
    runs("ended", 3.0, alive=False)
    runs("lives", 2.0, alive=True)
    assert told(run="old")('{"stay": "lives"}\n') == ("old", ["lives"])
    assert told(run="lives")() == ("lives", [])
    assert told(run="old", host="b")() == ["ended", "lives", "old"]  # another host's locks are not this one's
    assert told(run="none")() == ["ended", "lives", "old"]  # those it could have been


def test_what_is_said_together_with_the_request_is_heard(runs, told):
    runs("old", 1.0, alive=True)
    runs("lives", 2.0, alive=True)
    assert told(also='{"stay": "old"}\n')() == ("old", ["lives"])


def test_a_connection_that_is_made_again_stays(runs, told):
    runs("old", 1.0, alive=False)
    runs("lives", 2.0, alive=True)
    assert told(stay="old")() == ("old", ["lives"])


def test_why_the_last_attempt_failed_is_told(runs, told, tmp_path):
    runs("r", 1.0, alive=False)
    hear = told()
    assert hear(of=lambda run: run.blame) is None
    first, last = (FailureRecord(attempt, "b", Cause(CauseKind.HUNG)) for attempt in (1, 2))
    (tmp_path / "runs/r/status/a.blames.jsonl").write_text(f"{reader.dumps(first)}\n{reader.dumps(last)}\n")
    assert hear(of=lambda run: run.blame) == last


def test_a_line_without_end_does_not_stop_the_metrics(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs("r", 1.0, alive=True)
    run, path = watching.WatchedRun(WATCHED), tmp_path / "runs/r/metrics.jsonl"

    def steps(text):
        with path.open("a") as file:
            file.write(text)
        return [metrics.step for metrics in run.frame(False).metrics]

    assert steps('{"step": 1}\n') == [1]
    assert steps("x" * (MAX_LINE_BYTES + 5)) == []
    assert steps('{"step": 2}\n{"step": 3}\n') == [2, 3]
    assert steps('{"step": 4}') == []  # it may not be complete
    assert steps("\n") == [4]
    runs_of_a_new_attempt = dataclasses.replace(run.plan, attempt=2, rdzv_id="r-2-x")
    write_json(tmp_path / "runs/r/plan.json", runs_of_a_new_attempt)
    assert steps('{"step": 5}\n') == [5]


def test_of_a_long_run_only_the_last_steps_are_read(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs("r", 1.0, alive=True)
    lines = "".join(f'{{"step": {step}}}\n' for step in range(200_000))
    (tmp_path / "runs/r/metrics.jsonl").write_text(lines)
    run = watching.WatchedRun(WATCHED)
    steps = [metrics.step for metrics in run.frame(False).metrics]
    assert steps == list(range(steps[0], 200_000))
    assert 10_000 < len(steps) < 20_000
    assert run.metrics.n_skipped <= 1  # it was not even counted


def test_why_the_newest_save_failed_and_how_long_they_take(tmp_path):
    run = RunDir(tmp_path / "runs/r")

    def look(attempt=2):
        saves = describe.read_save_state(run, attempt, None)
        return saves.failure, saves.usual_s or None

    assert look() == ("", None)
    events = run.events("rank-0")
    events.parent.mkdir(parents=True)
    full = {"kind": "not saved", "step": 30, "detail": "No space left on device"}
    for told, said in (
        ({"kind": "saved", "step": 20, "took_s": 9.0}, ("", 9.0)),
        (full, ("step 30: No space left on device", 9.0)),
        ({"kind": "skipped", "step": 35, "took_s": 1.0}, ("step 30: No space left on device", 9.0)),
        ({"kind": "saved", "step": 40, "took_s": 700.0}, ("", 700.0)),
        ({"kind": "saved", "step": 45, "took_s": 12.0, "attempt": 1}, ("", 12.0)),
        (full | {"step": 50}, ("step 50: No space left on device", 12.0)),
    ):
        with events.open("a") as file:
            file.write(json.dumps({"time": 1.0, "writer": "rank-0", "attempt": 2} | told) + "\n")
        assert look() == said
    with events.open("a") as file:
        file.write("no event\n[1]\n" + json.dumps({"kind": "started"}) + "\n" + '{"kind": "saved"')
    assert look() == ("step 50: No space left on device", 12.0)
    assert look(attempt=3) == ("", 12.0)  # which has not saved yet


@pytest.mark.parametrize(("since", "every_s", "times", "took_s", "said"), [
    (119.0, 50.0, (880.0, 940.0), 50.0, ""),
    (121.0, 50.0, (880.0, 940.0), 50.0, "for 121 s, usually every 60 s"),  # which it was, whatever was configured
    (14.0, 60.0, (940.0,), 5.0, ""),
    (31.0, 60.0, (940.0,), 5.0, "for 31 s, in a save that usually takes 5.0 s"),
    (119.0, 60.0, (940.0,), 40.0, ""),  # the one save of an earlier attempt
    (121.0, 60.0, (940.0,), 60.0, "for 121 s, usually every 60 s"),
    (121.0, 60.0, (), 0.0, "for 121 s, usually every 60 s"),  # the first save of a run
    (19.0, 1.0, (), 0.0, ""), (21.0, 1.0, (), 0.0, "for 21 s, usually every 1 s"),
    (900.0, 0.0, (), 0.0, ""), (None, 60.0, (880.0, 940.0), 5.0, ""),  # nothing to compare with; nothing is due
])  # fmt: skip
def test_a_save_that_takes_too_long_is_told_to_screen_status_and_autopsy(
    tmp_path, monkeypatch, since, every_s, times, took_s, said
):
    run, now = RunDir(tmp_path / "runs/r"), 2000.0
    for at in times:
        event = RunEvent(at, "rank-0", EventKind.SAVED, 1, int(at), took_s=took_s)
        append_line(run.events("rank-0"), reader.dumps(event))
    beat = Heartbeat(
        0, "a", os.getpid(), now, 50, Phase.TRAIN, 0.0, save_since=since and now - since, save_every_s=every_s
    )
    write_json(run.heartbeat(0), beat)
    monkeypatch.setattr(describe.time, "time", lambda: now)
    assert describe.read_save_state(run, 2, beat).failure == said
    assert describe.read_save_state(run, 2, None).failure == ""  # it does not live


@pytest.mark.parametrize("took_s", ["0.0", "-1.0", "NaN", "Infinity", "1e300", '"12"', "null"])
def test_a_save_that_took_no_time_that_can_be_true_is_not_counted(tmp_path, took_s):
    run = RunDir(tmp_path / "runs/r")
    line = '{{"time": 1.0, "writer": "rank-0", "kind": "saved", "took_s": {}}}'.format
    run.events("rank-0").parent.mkdir(parents=True)
    run.events("rank-0").write_text(line(took_s) + "\n")
    assert describe.read_save_state(run, 1, None).usual_s == 0.0
    append_line(run.events("rank-0"), line(3))
    assert describe.read_save_state(run, 1, None).usual_s == 3.0


def test_only_the_head_tells_how_long_saves_take(runs, told, tmp_path):
    for first_rank, name in enumerate(("head", "next")):
        runs(name, 1.0, alive=False, first_rank=first_rank)
        (tmp_path / f"runs/{name}/events").mkdir()
        event = {"time": 1.0, "writer": "rank-0", "kind": "saved", "took_s": 5.5, "attempt": 1}
        (tmp_path / f"runs/{name}/events/rank-0.jsonl").write_text(json.dumps(event) + "\n")
    assert told(run="head")(of=lambda run: run.usual_s) == {"checkpoint": 5.5}
    assert told(run="next")(of=lambda run: run.usual_s) == {}


def test_a_run_was_created_when_its_first_attempt_began_here(runs, told, tmp_path):
    runs("r", 2e9, alive=False, attempt=7)
    hear = told()
    assert hear(of=lambda run: run.run_created) is None  # it never ran here
    lock = take_lock(tmp_path / "runs/r/status/a.lock")
    os.close(lock)
    os.utime(tmp_path / "runs/r/status/a.lock", (5.0, 1e9))
    os.close(take_lock(tmp_path / "runs/r/status/a.lock"))  # the next attempt's node runner
    assert hear(of=lambda run: (run.created, run.run_created)) == (2e9, 1e9)


def test_every_host_tells_of_the_newest_whole_checkpoint(runs, told, tmp_path):
    shared = tmp_path / "shared"
    for name in ("step-00000010", "step-00000020", "step-00000030"):
        (shared / name).mkdir(parents=True)
    for name in ("step-00000010", "step-00000020"):
        (shared / name / "manifest.json").touch()
    for first_rank, name in enumerate("qr"):
        runs(name, 1.0 + first_rank, alive=True, first_rank=first_rank, checkpoint_dir=str(shared))
        assert told()(of=lambda run: (run.name, run.checkpoint_step)) == (name, 20)


def test_what_the_hosts_heard_of_a_guard_is_told(runs, told, tmp_path):
    runs("r", 1.0, alive=True)
    said = GuardState("r", 7, 1, "far x y", 3, GuardStage.WATCHING, time=9.0)
    noted = dataclasses.replace(said, command="x" * 9000, cause=Cause(CauseKind.HUNG))
    write_json(tmp_path / "runs/r/status/a.guard", noted)
    hear = told()
    assert hear(of=lambda run: run.guard) == said
    runs("newer", 2.0, alive=True)
    assert hear(of=lambda run: (run.name, run.guard)) == ("newer", None)


def test_two_machines_of_one_name_are_told_apart_by_their_boot():
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert sampler.Machine(None).name == boot + socket.gethostname()


def test_a_guard_that_died_on_this_host_is_told(runs, told, tmp_path):
    runs("r", 1.0, alive=True)
    lives = GuardState("r", os.getpid(), processes.start_time(os.getpid()), machine_id(), 3)
    for change, died in (({"pid_start": 1}, True), ({"pid": 0}, False), ({}, False)):
        write_json(tmp_path / "runs/r/status/a.guard", dataclasses.replace(lives, **change))
        assert told()(of=lambda run: run.guard.died) == died


def test_checkpoints_that_cannot_be_read_end_nothing(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs("r", 1.0, alive=True)

    def refuse(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(describe, "find_newest_complete", refuse)
    assert watching.WatchedRun(WATCHED).frame(True).checkpoint_step is None
    assert describe.status("a").runs[0].checkpoint is None
