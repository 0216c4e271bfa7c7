"""The guard: when it restarts a run, when it gives up, and what it leaves on record when it dies itself."""

import dataclasses
import json
import os
import shlex
import threading
import types

import pytest
from fakes import FakeFleet, over

from llama405b.contract import reader
from llama405b.contract.errors import UserError
from llama405b.contract.files import write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.records import Cause, CauseKind, EventKind, FailureRecord, GuardStage, GuardState, RunEvent
from llama405b.settings.schema import Checkpoint, Config
from llama405b.spec.plan import Plan
from llama405b_tools.agent import processes
from llama405b_tools.agent.messages import StreamMessage
from llama405b_tools.guard import guard
from llama405b_tools.guard.guard import Guard, GuardInput
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.launch.request import parse_launch
from llama405b_tools.launch.start import launch
from llama405b_tools.run import follow, query
from llama405b_tools.run.query import HostMessage
from llama405b_tools.verbs import status
from ops_rig import wait_for

KILLED = Cause(CauseKind.RANK_KILLED, "b", 1, signal=9)
ODD = "\x1b]0;title\x07\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b\r"
LOST = Cause(CauseKind.LOST_PEER, "a", 0, exit_code=1, phase="train")


@pytest.fixture
def fleet(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(guard, "RETRY_S", (0.01, 0.01))
    monkeypatch.setattr(follow, "POLL_S", 0.01)
    with FakeFleet(("a", "b")) as found:
        yield found


def request(*more):
    return parse_launch(["--run", "r", "--restart", "2", *more, "--", "-m", "mine"], 0.0)


def guarded(fleet, *lives, checkpoints=(), more=()):
    """Launch, and guard it; ``lives``: how each attempt ends on a and on b. Returns the exit code and the record."""
    for name in ("a", "b"):
        fleet.fakes[name].lives = [[life[name]] for life in lives]
    asked, hosts = request(*more), list(fleet.hosts.values())
    plan = launch(asked, hosts, fleet)
    watchman = Guard(asked, hosts, plan, fleet)
    saved = iter(checkpoints)
    real = watchman.restart

    def restart():
        stopped = real()
        fleet.fakes["a"].checkpoint = next(saved, fleet.fakes["a"].checkpoint)
        return stopped

    watchman.restart = restart
    code = watchman.main()
    return code, reader.loads(GuardState, RunDir.from_name("r").guard.read_text(), "guard.json")


def events():
    path = RunDir.from_name("r").events("guard")
    return [reader.loads(RunEvent, line, "event") for line in path.read_text().splitlines()] if path.exists() else []


ASKED = FailureRecord(1, "a", Cause(CauseKind.STOPPED, "a", by="ann@desk"))
FAILS = {"a": over("a", LOST), "b": over("b", KILLED)}
WELL = {"a": over("a"), "b": over("b")}


def test_a_failed_run_is_brought_back_and_ends_well(fleet):
    code, record = guarded(fleet, FAILS, WELL)
    assert (code, record.state, record.restarts, record.cause) == (0, GuardStage.ENDED, 1, KILLED)
    assert [event.kind for event in events()] == [EventKind.FAILED, EventKind.RESTARTED]
    assert fleet.fakes["a"].plan.attempt == 2
    starts = [asked for action, asked in fleet.fakes["b"].heard if action == "start"]
    assert [start.again for start in starts] == [False, True]


def restarted(host):
    """The news that a host's part has ended for a restart that somebody asked for."""
    cause = Cause(CauseKind.SIGNAL, host, signal=15)
    return StreamMessage(node=dataclasses.replace(over(host, cause).node, blame=ASKED))


def test_a_restart_that_was_asked_for_is_neither_failure_nor_try(fleet, monkeypatch):
    told = []
    monkeypatch.setattr(guard, "run_notify_command", lambda command, event, run, message: told.append(event) or "")
    asked = {"a": restarted("a"), "b": over("b", LOST)}
    code, record = guarded(fleet, asked, WELL, more=("--notify", "cat"))
    assert (code, record.state, record.restarts, record.in_vain) == (0, GuardStage.ENDED, 1, 0)
    assert [event.kind for event in events()] == [EventKind.RESTARTED]
    assert "incident" not in told
    assert fleet.fakes["a"].plan.attempt == 2


LOST_HOST = HostError("b: no route to host")


def test_a_run_goes_on_without_a_host_that_stays_lost_and_takes_it_back(fleet, monkeypatch):
    monkeypatch.setattr(guard, "RETURN_CHECK_S", 0.01)
    a, b = (fleet.fakes[name] for name in ("a", "b"))
    real, runs_on, grown = Guard.relaunch, [], []

    def relaunch(watchman):
        real(watchman)
        runs_on.append([node.name for node in watchman.plan.nodes])
        if len(runs_on) == 1:
            b.faults.clear()  # it comes back while a trains alone

    def alone():
        wait_for(lambda: grown)
        yield dataclasses.replace(restarted("a"), node=dataclasses.replace(restarted("a").node, blame=grown[0][2]))

    def end_to_grow(fleet, plan, back):
        cause = Cause(CauseKind.STOPPED, "a", by=f"its guard, as {back} is back")
        grown.append(([*fleet.hosts], back, FailureRecord(plan.attempt, "a", cause)))

    monkeypatch.setattr(Guard, "relaunch", relaunch)
    monkeypatch.setattr(guard, "stop_to_grow", end_to_grow)
    a.lives, b.lives = [[over("a", LOST)], alone(), [WELL["a"]]], [[over("b", KILLED)], [WELL["b"]]]
    asked, hosts = dataclasses.replace(request("--shrink"), shrink_after_s=0.05), list(fleet.hosts.values())
    watchman = Guard(asked, hosts, launch(asked, hosts, fleet), fleet)
    b.faults = dict.fromkeys(("stop", "probe", "true", "note"), LOST_HOST)
    assert watchman.main() == 0
    assert runs_on == [["a"], ["a", "b"]]
    assert grown[0][:2] == (["a"], "b")
    assert (watchman.record.restarts, watchman.record.in_vain) == (2, 1)


@pytest.mark.parametrize(
    ("every", "unsaved", "grows"),
    [("10", "", True), (None, "", True), ("0", "", False), ("10", "the disk is full", False)],
)
def test_a_host_that_is_back_waits_while_ending_would_lose_steps(fleet, monkeypatch, every, unsaved, grows):
    grown = []
    monkeypatch.setattr(guard, "RETURN_CHECK_S", 0.01)
    monkeypatch.setattr(guard, "find_returned", lambda everywhere, roster: "b")
    monkeypatch.setattr(guard, "stop_to_grow", lambda fleet, plan, back: (grown.append(back), watchman.is_over.set()))
    asked, hosts = request("--shrink"), list(fleet.hosts.values())
    watchman = Guard(asked, hosts, launch(asked, hosts, fleet), fleet)
    config = None if every is None else Config(checkpoint=Checkpoint(every=every))
    watchman.request, watchman.unsaved = dataclasses.replace(asked, config=config), unsaved
    watchman.roster = types.SimpleNamespace(excluded=["b"])
    end = threading.Timer(120 if grows else 0.3, watchman.is_over.set)
    end.start()
    watchman.watch_for_returns()
    end.cancel()
    assert grown == (["b"] if grows else [])


def test_restarts_without_progress_come_to_an_end(fleet):
    code, record = guarded(fleet, FAILS, FAILS, FAILS, FAILS)
    assert (code, record.state, record.restarts, record.in_vain) == (1, GuardStage.GAVE_UP, 2, 2)
    assert not fleet.fakes["a"].alive


def test_a_newer_checkpoint_is_progress(fleet):
    saved = ["/c/step-00000010", "/c/step-00000020", "/c/step-00000030"]
    code, record = guarded(fleet, FAILS, FAILS, FAILS, FAILS, WELL, checkpoints=saved)
    assert (code, record.state, record.restarts) == (0, GuardStage.ENDED, 4)
    assert record.checkpoint == "/c/step-00000030"


def test_what_the_trainer_refuses_is_not_tried_again(fleet):
    refused = Cause(CauseKind.REFUSED, "a", 0, exit_code=2)
    followed = Cause(CauseKind.FOLLOWED, "b", 1, peer=0, exit_code=2)
    code, record = guarded(fleet, {"a": over("a", refused, code=2), "b": over("b", followed, code=2)}, WELL)
    assert (code, record.state, record.restarts) == (1, GuardStage.GAVE_UP, 0)


def test_a_stop_is_not_undone(fleet):
    stopped = {name: over(name, Cause(CauseKind.STOPPED, by="me@here"), stopped_by="me@here") for name in "ab"}
    for life in stopped.values():
        object.__setattr__(life.node.status, "state", "stopped")
    code, record = guarded(fleet, stopped)
    assert (code, record.state, record.restarts) == (1, GuardStage.STOPPED, 0)


def test_a_stop_in_the_middle_of_a_recovery_is_heard(fleet):
    fleet.fakes["b"].stopped_by = "me@here"
    fleet.fakes["b"].lives = []
    code, record = guarded(fleet, {"a": over("a", LOST), "b": over("b", KILLED, stopped_by="me@here")}, WELL)
    assert (record.state, record.restarts, code) == (GuardStage.STOPPED, 0, 1)


def test_hosts_that_are_away_are_waited_for(fleet):
    away, tries = HostError("no route"), []
    host = fleet.fakes["b"]
    real = host.stop

    def stop(**asked):
        tries.append(asked)
        if len(tries) < 4:
            raise away
        return real(**asked)

    host.stop = stop
    code, record = guarded(fleet, FAILS, WELL)
    assert (code, record.restarts, len(tries)) == (0, 1, 4)


def test_a_gpu_that_is_away_is_waited_for(fleet):
    fleet.fakes["a"].gpus, fleet.fakes["b"].gpus = [2], [2, 1, 1, 2]
    code, record = guarded(fleet, FAILS, WELL)
    assert (code, record.state, record.restarts) == (0, GuardStage.ENDED, 1)
    assert [node.slots for node in fleet.fakes["b"].plan.nodes] == [2, 2]
    assert fleet.fakes["b"].gpus == [2]  # it was asked four times


def test_a_gpu_that_two_hosts_on_one_machine_miss_is_waited_for(fleet):
    fleet.fakes["a"].machine = fleet.fakes["b"].machine = "one machine"
    for name in ("a", "b"):
        fleet.hosts[name] = dataclasses.replace(fleet.hosts[name], slots=1)
        fleet.fakes[name].gpus = [2, 1, 1, 2]
    code, record = guarded(fleet, FAILS, WELL)
    assert (code, record.state, record.restarts) == (0, GuardStage.ENDED, 1)
    assert fleet.fakes["b"].gpus == [2]


def test_a_malformed_answer_is_a_host_that_is_away(fleet):
    host, real = fleet.fakes["b"], fleet.fakes["b"].answer
    odd = ['{"known": "yes"}', "[]", '{"known": true}', ""]

    def answer(action, asked):
        return [odd.pop()] if action == "stop" and odd else real(action, asked)

    host.answer = answer
    code, record = guarded(fleet, FAILS, WELL)
    assert (code, record.restarts, odd) == (0, 1, [])


@pytest.mark.parametrize("said", ["/c/none", "/c/step-1", "/c\n/step-00000020/x"])
def test_an_odd_checkpoint_is_its_hosts_fault_and_not_the_guards_end(fleet, said):
    fleet.fakes["a"].checkpoint = "/c/step-00000010"
    fleet.fakes["b"].status_reply = lambda _: {
        "runs": [json.loads(reader.dumps(fleet.fakes["b"].run())) | {"checkpoint": said}]
    }
    code, record = guarded(fleet, FAILS, WELL)
    assert (code, record.state, record.checkpoint) == (0, GuardStage.ENDED, "/c/step-00000010")


def test_what_hosts_say_reaches_log_and_command_without_their_escapes(fleet, tmp_path, capsys):
    odd = f"{ODD}\nguard  forged"
    saved = fleet.fakes["a"].checkpoint = f"/c{odd}/step-00000010"
    for name, host in fleet.fakes.items():
        news = StreamMessage(events=(RunEvent(0.0, "rank-0", EventKind.SAVED, 2, 8, saved),))
        host.lives = [[over(name, dataclasses.replace(LOST, detail=odd))], [news, over(name, stopped_by=f"ann{odd}")]]
    asked, hosts = request("--notify", "cat >>notes"), list(fleet.hosts.values())
    assert Guard(asked, hosts, launch(asked, hosts, fleet), fleet).main() == 1
    for text in (capsys.readouterr().out, (tmp_path / "notes").read_text(), RunDir.from_name("r").guard.read_text()):
        assert "forged" in text
        assert not set(text) & {"\x1b", "\x07", "\x9b", "\r"}
        assert not any(line.startswith("guard  forged") for line in text.splitlines())


def test_a_guard_that_died_is_known_to_be_gone_and_its_run_can_be_guarded_again(fleet):
    plan = launch(request(), list(fleet.hosts.values()), fleet)
    for stage in (GuardStage.WATCHING, GuardStage.RECOVERING):
        dead = GuardState("r", 2**22 + 1, 1, processes.machine_id(), 2, stage)
        write_json(RunDir.from_name("r").guard, dead)
        assert query.local_guard("r").is_gone
        fleet.fakes["a"].noted = dead  # as it was last heard there, at the same moment
        said = dataclasses.replace(dead, time=900.0)
        write_json(RunDir.from_name("r").guard, said)
        found = query.guard_of_hosts("r", query.guard_reports([fleet.fakes["a"].run()]), 800.0)
        assert (found.state, found.is_gone, found.heard_at) == (said, True, 900.0)
        assert not query.is_guarded("r")
        assert guard.adopt_run(request(), fleet) == plan
    assert guard.adopt_run(parse_launch(["--run", "r", "--restart", "2", "--", "-m", "other"], 0.0), fleet) is None


def test_a_guard_is_begun_again_whatever_characters_the_program_and_its_setup_line_have(fleet):
    odd = "\ta\r\x1b[0mb"
    flags = ["--run", "r", "--restart", "2", "--env", f"A={odd}", "--setup-line", "true;\ttrue"]
    asked = parse_launch([*flags, "--", "-m", "mine", odd], 0.0)
    plan = launch(asked, list(fleet.hosts.values()), fleet)
    assert plan.program[-1] == plan.nodes[0].env["A"] == odd
    write_json(
        RunDir.from_name("r").guard, GuardState("r", 2**22 + 1, 1, processes.machine_id(), 2, GuardStage.WATCHING)
    )
    assert guard.adopt_run(asked, fleet) == plan


def test_what_follows_the_end_is_a_part_of_the_run_that_another_guard_takes_up(fleet, tmp_path):
    asked, hosts = request("--when-done", "echo done >>notes; test -e well"), list(fleet.hosts.values())
    plan = launch(asked, hosts, fleet)
    for name, host in fleet.fakes.items():
        host.alive, host.node_status = False, over(name).node.status
    dead = GuardState(
        "r", 2**22 + 1, 1, processes.machine_id(), 2, GuardStage.FINISHING, command=asked.resume_arguments
    )
    write_json(RunDir.from_name("r").guard, dead)
    guard.send_guard_note(fleet, plan, dead)
    told = [host.run() for host in fleet.fakes.values()]
    assert status.find_needed_guard("r", told, is_needed=False).is_gone
    assert guard.adopt_run(asked, fleet) == plan
    RunDir.from_name("r").guard.unlink()
    for name, host in fleet.fakes.items():
        host.lives = [[over(name)]]
    (tmp_path / "well").touch()
    stages, watchman = [], Guard(asked, hosts, plan, fleet)
    watchman.write_record = lambda stage, message, real=watchman.write_record: (
        stages.append(stage),
        real(stage, message),
    )
    assert watchman.main() == 0
    assert stages == [GuardStage.WATCHING, GuardStage.FINISHING, GuardStage.ENDED]
    assert paged(tmp_path) == ["done"]
    assert (fleet.fakes["b"].noted.state, guard.adopt_run(asked, fleet)) == (GuardStage.ENDED, None)


def test_a_guard_adopts_a_run_whose_mesh_was_chosen(fleet):
    def asked(strategy):
        return parse_launch(["--run", "r", "--restart", "2", "--preset", "demo", "--parallel.strategy", strategy], 0.0)

    plan = launch(request(), list(fleet.hosts.values()), fleet)
    program = dataclasses.replace(asked("3d"), resume="no").training_program()
    chosen = dataclasses.replace(plan, program=(*program, "--parallel.tp=2", "--parallel.pp=2"))
    for host in fleet.fakes.values():
        host.plan = chosen
    assert guard.adopt_run(asked("3d"), fleet) == chosen
    assert guard.adopt_run(asked("auto"), fleet) is None


def test_a_guard_adopts_a_run_whose_settings_are_in_another_order(fleet):
    """As those of an earlier version are, once they have their present names."""
    asked = parse_launch(
        ["--run", "r", "--restart", "2", "--preset", "demo", "--model.loss", "chunked", "--parallel.tp", "2"], 0.0
    )
    plan = launch(request(), list(fleet.hosts.values()), fleet)
    *program, loss, tp = dataclasses.replace(asked, resume="no").training_program()
    assert (loss, tp) == ("--model.loss=chunked", "--parallel.tp=2")
    for words, adopted in (((tp, loss), True), ((tp,), False), ((tp, loss, loss), False)):
        for host in fleet.fakes.values():
            host.plan = dataclasses.replace(plan, program=(*program, *words))
        assert (guard.adopt_run(asked, fleet) is not None) is adopted


def test_a_guard_elsewhere_is_known_by_what_it_tells_the_hosts(fleet):
    plan = launch(request(), list(fleet.hosts.values()), fleet)
    asked = fleet.fakes["a"].noted
    assert (asked.pid, asked.limit, asked.command) == (0, 2, "--restart 2 --run r --resume auto -- -m mine")
    other = GuardState("r", 1, 1, "elsewhere x y", 2)
    write_json(RunDir.from_name("r").guard, other)
    guard.send_guard_note(fleet, plan, other)
    told = query.guard_reports(host.run() for host in fleet.fakes.values())
    assert query.guard_of_hosts("r", told, 1000.0).is_guarding
    with pytest.raises(UserError):
        guard.adopt_run(request(), fleet)
    for host in fleet.fakes.values():
        host.now += 2 * query.SILENT_AFTER_S
    told = query.guard_reports(host.run() for host in fleet.fakes.values())
    found = query.guard_of_hosts("r", told, 1000.0)
    assert (found.is_gone, found.heard_at) == (True, 1000.0 - 2 * query.SILENT_AFTER_S)
    assert guard.adopt_run(request(), fleet) == plan
    assert fleet.fakes["b"].noted.machine == processes.machine_id()  # it is asked for here, now


def test_a_guard_that_ended_here_says_nothing_of_one_elsewhere(fleet):
    plan = launch(request(), list(fleet.hosts.values()), fleet)
    write_json(RunDir.from_name("r").guard, GuardState("r", 5, 1, processes.machine_id(), 2, GuardStage.ENDED))
    guard.send_guard_note(fleet, plan, GuardState("r", 1, 1, "elsewhere x y", 2))
    found = query.guard_of_hosts("r", query.guard_reports([fleet.fakes["a"].run()]), 1000.0)
    assert (found.is_guarding, found.state.machine) == (True, "elsewhere x y")


def test_a_guard_that_never_began_is_gone(fleet):
    launch(request(), list(fleet.hosts.values()), fleet)
    for now, gone in ((1.0, False), (2 * query.BEGINS_WITHIN_S, True)):
        for host in fleet.fakes.values():
            host.now = now
        found = query.guard_of_hosts("r", query.guard_reports([host.run() for host in fleet.fakes.values()]), 1000.0)
        assert (found.is_guarding, found.is_gone) == (False, gone)


def test_the_hosts_hear_how_the_guard_ended(fleet):
    guarded(fleet, FAILS, WELL)
    assert {host.noted.state for host in fleet.fakes.values()} == {GuardStage.ENDED}
    assert {host.noted.pid for host in fleet.fakes.values()} == {os.getpid()}


def test_a_heartbeat_comes_when_it_is_due_and_not_from_a_guard_that_hangs(fleet, tmp_path):
    asked = request("--notify", "echo $LLAMA405B_EVENT >>notes", "--notify-every", "1h")
    hosts = list(fleet.hosts.values())
    watchman = Guard(asked, hosts, launch(asked, hosts, fleet), fleet)
    watchman.send_heartbeat()
    assert not (tmp_path / "notes").exists()
    watchman.notified_at -= 3600
    watchman.progress_at -= 2 * guard.STUCK_S
    fleet.fakes["a"].noted = None
    watchman.send_heartbeat()
    assert (fleet.fakes["a"].noted, (tmp_path / "notes").exists()) == (None, False)
    watchman.note_progress()
    for _ in range(2):
        watchman.send_heartbeat()
    assert (tmp_path / "notes").read_text() == "heartbeat\n"
    assert fleet.fakes["a"].noted.pid == os.getpid()


@pytest.mark.parametrize("resume", ["no", "auto", "40"])
def test_what_it_says_to_type_guards_the_same_run_again(fleet, resume):
    argv = [
        "--run=r",
        "--restart",
        "2",
        "--preset",
        "demo",
        "--resume",
        resume,
        "--env",
        "A=b c",
        "--training.seed",
        "1",
    ]
    asked = parse_launch(argv, 0.0)
    plan = launch(asked, list(fleet.hosts.values()), fleet)
    assert guard.adopt_run(parse_launch(shlex.split(asked.resume_arguments), 0.0), fleet) == plan


def test_a_run_that_is_being_stopped_is_not_guarded_again(fleet):
    launch(request(), list(fleet.hosts.values()), fleet)
    fleet.fakes["b"].stopped_by = "you@there"
    assert guard.adopt_run(request(), fleet) is None
    with pytest.raises(UserError, match="you@there"):
        launch(request(), list(fleet.hosts.values()), fleet)


def test_its_order_crosses_as_json(fleet):
    asked = parse_launch(["--run", "r", "--preset", "demo", "--restart", "2", "--env", "A=b"], 0.0)
    plan = Plan("r", 1, 0.0, "x", "a:1", asked.training_program(), (), ())
    order = GuardInput(asked, tuple(fleet.hosts.values()), plan)
    text = reader.dumps(order)
    assert json.loads(text)["request"]["run"] == "r"
    assert reader.loads(GuardInput, text, "the order") == order


def paged(tmp_path):
    notes = tmp_path / "notes"
    return notes.read_text().splitlines() if notes.exists() else []


def watchman(fleet):
    asked = request("--notify", "echo $LLAMA405B_EVENT: $LLAMA405B_MESSAGE >>notes")
    hosts = list(fleet.hosts.values())
    return Guard(asked, hosts, launch(asked, hosts, fleet), fleet)


@pytest.mark.parametrize("reasons", [["no route"], ["no route", "no answer", "no route"]], ids=["the same", "changing"])
def test_a_run_that_does_not_come_back_is_paged_once(fleet, tmp_path, monkeypatch, reasons):
    monkeypatch.setattr(guard, "WAITING_AFTER_S", 0.0, raising=False)
    tries = [why for why in reasons for _ in range(4)]

    real = fleet.fakes["b"].stop

    def stop(**asked):
        found.send_heartbeat()  # as its thread does meanwhile
        if tries:
            raise HostError(tries.pop())
        return real(**asked)

    found, fleet.fakes["b"].stop = watchman(fleet), stop
    found.set_stage(GuardStage.RECOVERING, "a: hung")
    found.restart()
    assert paged(tmp_path) == ["waiting: a: hung"]


def test_saves_that_fail_in_a_row_are_paged_once_until_one_succeeds(fleet, tmp_path):
    found, watch = watchman(fleet), follow.RunMonitor(fleet.fakes["a"].plan)

    def saves(*kinds):
        for step, kind in enumerate(kinds, 1):
            event = RunEvent(0.0, "rank-0", kind, 1, step, detail="No space left on device")
            watch.handle(HostMessage("a", StreamMessage(events=(event,)), 0.0))
            found.note_progress(watch)
            found.send_heartbeat()
        return paged(tmp_path)

    assert saves(EventKind.NOT_SAVED, EventKind.SAVED, EventKind.NOT_SAVED) == []
    assert len(told := saves(EventKind.NOT_SAVED, EventKind.NOT_SAVED)) == 1
    assert told[0].startswith("not saved: ")
    again = saves(EventKind.SAVED, EventKind.NOT_SAVED, EventKind.NOT_SAVED)
    assert again == [*told, told[0].replace(" 1: No space", " 3: No space")]


def test_what_happened_once_is_paged_once_even_if_it_has_passed_meanwhile(fleet, tmp_path):
    found, watch = watchman(fleet), follow.RunMonitor(fleet.fakes["a"].plan)
    kinds = (EventKind.AFTER_SAVE_FAILED, EventKind.AFTER_SAVE, EventKind.BUDGET)
    events = tuple(RunEvent(0.0, "rank-0", kind, 1, 8, detail=f"why of {kind}") for kind in kinds)
    watch.handle(HostMessage("a", StreamMessage(events=events), 0.0))
    found.note_progress(watch)
    for _ in range(2):
        found.send_heartbeat()
    assert paged(tmp_path) == ["after save failed: why of after save failed", "budget: why of budget"]


def test_a_disk_that_fills_is_paged_once_until_there_is_room(fleet, tmp_path, monkeypatch):
    found = watchman(fleet)
    run = RunDir.from_name("r")
    run.path.mkdir(parents=True, exist_ok=True)
    write_json(run.plan, fleet.fakes["a"].plan)
    for free in (1 << 40, 1 << 28, 1 << 28, 1 << 40, 1 << 28):
        disk = types.SimpleNamespace(f_frsize=1, f_bavail=free, f_blocks=4 << 40)
        monkeypatch.setattr(os, "statvfs", lambda _, disk=disk: disk)
        disks = processes.note("r", "a", "x", found.record)  # as the agent on a would
        fleet.fakes["a"].disks = disks
        found.send_heartbeat()
    told = paged(tmp_path)
    assert len(told) == 2
    assert all(each.startswith("disk full: ") and str(run.path.absolute()) in each for each in told)
