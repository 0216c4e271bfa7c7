"""What a host tells of its runs, whatever it may not read."""

import os

import pytest

from llama405b.contract import reader
from llama405b.contract.files import append_line, write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.records import EventKind, NodeState, NodeStatus, RunEvent
from llama405b.spec.plan import Node, Plan
from llama405b_tools.agent import describe, processes


def test_checkpoints_of_another_user_do_not_hide_the_run(tmp_path, monkeypatch):
    def denied(root):
        raise PermissionError(13, "Permission denied", str(root))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(describe, "find_newest_complete", denied)
    nodes = (Node("a", 1, 0, "/w", "/py", "", "", {}),)
    write_json(RunDir.from_name("r").plan, Plan("r", 1, 0.0, "r-1-x", "a:1", ("-m", "llama405b.train"), (), nodes))
    [run] = describe.status("a").runs
    assert (run.run, run.checkpoint) == ("r", None)


def test_a_host_that_has_the_files_of_a_run_but_no_part_names_its_hosts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nodes = tuple(Node(name, 1, 0, "/w", "/py", "", "", {}) for name in "ab")
    write_json(RunDir.from_name("r").plan, Plan("r", 1, 0.0, "r-1-x", "a:1", (), (), nodes))
    reply = describe.status("10.0.0.1", "r")
    assert (reply.runs, reply.strangers) == ((), ("a", "b"))
    assert describe.status("10.0.0.1").strangers == ()


def _event(kind, step, **more):
    return reader.dumps(RunEvent(0.0, "rank-0", kind, 1, step, **more))


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ([], (0.0, "")),
        ([_event(EventKind.SAVED, 4, took_s=90.5), _event(EventKind.ANSWERED, 5)], (90.5, "")),
        (
            [
                _event(EventKind.SAVED, 4, took_s=90.5),
                _event(EventKind.NOT_SAVED, 8, detail="full"),
                _event(EventKind.NOT_SAVED, 12, detail="still full"),
            ],
            (90.5, "step 12: still full"),
        ),
        ([_event(EventKind.NOT_SAVED, 8, detail="full"), _event(EventKind.SAVED, 12, took_s=3.0)], (3.0, "")),
    ],
)
def test_what_the_last_save_took_and_which_failed_since(tmp_path, events, told):
    run = RunDir(tmp_path / "r")
    for event in events:
        append_line(run.events("rank-0"), event)
    saves = describe.read_save_state(run, 1, None)
    assert (saves.usual_s, saves.failure) == told


def test_a_save_that_failed_before_a_restart_is_not_told_of_the_attempt_since(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, nodes = RunDir.from_name("r"), (Node("a", 1, 0, "/w", "/py", "", "", {}),)
    append_line(run.events("rank-0"), _event(EventKind.NOT_SAVED, 8, detail="full"))
    for attempt, unsaved in ((1, "step 8: full"), (2, "")):
        write_json(run.plan, Plan("r", attempt, 0.0, "x", "a:1", ("-m", "llama405b.train"), (), nodes))
        assert describe.status("a").runs[0].unsaved == unsaved


def test_a_launch_that_is_under_way_is_told(tmp_path):
    run = RunDir(tmp_path / "r")
    plan = Plan("r", 1, 0.0, "r-1-x", "a:1", (), (), (Node("a", 1, 0, "/w", "/py", "", "", {}),))
    held = processes.take_lock(run.start_lock("a"))
    assert describe.describe_run(run, plan, "a").launching
    os.close(held)
    assert not describe.describe_run(run, plan, "a").launching


@pytest.mark.parametrize("copies", [True, False])
def test_a_node_runner_that_only_copies_counts_as_ended(tmp_path, copies):
    run = RunDir(tmp_path / "r")
    nodes = (Node("a", 1, 0, "/w", "/py", "", "", {}),)
    write_json(run.plan, Plan("r", 1, 0.0, "r-1-x", "a:1", (), (), nodes, replicates=copies))
    held = processes.take_lock(run.lock("a"))
    assert processes.is_run_active(run, "a")
    write_json(run.status("a"), NodeStatus("a", NodeState.RUNNING, 1, 5, 5))
    assert processes.is_run_active(run, "a")
    write_json(run.status("a"), NodeStatus("a", NodeState.EXITED, 1, 5, 5, exit_code=1))
    assert processes.is_run_active(run, "a") != copies
    os.close(held)
    assert not processes.is_run_active(run, "a")
