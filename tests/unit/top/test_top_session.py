"""What cluster-top makes of time that passed without it."""

import functools
import json
import queue
import re
import sys
import types

import pytest
import simulate
from fakes import FakeFleet
from situations import as_sent

from llama405b.contract.accounting import Account, Incident
from llama405b.contract.errors import UserError
from llama405b.contract.records import Cause, CauseKind
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.top import event_sources
from llama405b_tools.top import session as sessions
from llama405b_tools.top.event_sources import LiveSource, SourceEvent
from llama405b_tools.top.session import Session, current_guard
from llama405b_tools.top.state import thresholds
from llama405b_tools.top.state.cluster import ClusterState
from llama405b_tools.top.state.picture import ClusterVerdict, GuardShown, HostState, Severity
from llama405b_tools.verbs import top
from ops_rig import wait_for

FRAME = json.dumps(next(simulate.simulate_incident(1))["frame"])
T0 = 1_800_000_000.0


class Quiet(LiveSource):
    """Live hosts of which nothing is heard; its clock stands until somebody waits."""

    def __init__(self, interval_s=2.0):
        self.hosts, self.interval_s, self.badge, self.clock = ["a", "b"], interval_s, "", T0
        self.waking = []  # events that come when it wakes

    def now(self):
        return self.clock

    def events(self, until):
        self.clock = until
        if self.waking:
            self.clock += 92
        while self.waking:
            yield self.waking.pop(0)

    def follow_run(self, run):
        pass


@pytest.fixture
def session():
    return Session(Quiet(), None, 60.0)


def test_time_without_a_look_is_time_away(session):
    for _ in range(200):
        session.advance(session.source.now() + 0.5)
    assert session.make_view(logs=False).why == "hosts that have not answered: 2"
    woken = session.source.now() + 92
    frame = SourceEvent(woken, "a", frame=json.loads(FRAME))  # it waited in a socket
    session.source.waking = [frame, SourceEvent(woken, "a", link=("DOWN", "the sampler ended"))]
    session.advance(session.source.now())
    pic = session.make_view(logs=False)
    assert (pic.verdict, pic.exit_code, pic.why) == (ClusterVerdict.CONNECTING, 1, "away 92 s; reconnecting")
    assert {row.state for row in pic.hosts} == {HostState.CONNECTING}
    assert [event.level for event in pic.events] == [Severity.NOTE]
    for _ in range(int(2 * thresholds.RECONNECT_S)):
        session.advance(session.source.now() + 0.5)
    assert session.make_view(logs=False).hosts[0].state is HostState.DOWN


def test_to_wait_for_hosts_is_not_to_be_away():
    session = Session(Quiet(60.0), None, 60.0)
    top._await_first_frames(session, watches=False)
    assert session.source.now() > T0 + thresholds.SLEPT_S
    top._advance_for(session, 60.0)
    assert not session.cluster.events


class Frozen:
    """A connection whose stream brings one frame, then nothing, and never ends by itself."""

    def __init__(self):
        self.lines = queue.Queue()
        self.lines.put(FRAME)

    def stream(self, command, stdin):
        return self

    def __iter__(self):
        yield from iter(self.lines.get, None)

    def send(self, text):
        pass

    def close(self):
        self.lines.put(None)


def test_a_host_that_sends_nothing_more_is_connected_again(monkeypatch):
    for module, name, value in (
        (thresholds, "QUIET_S", 0.3), (thresholds, "QUIET_FRAMES", 0), (thresholds, "PING_S", 0.02), (event_sources, "RETRY_S", 0.01),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    fleet = types.SimpleNamespace(
        hosts={"a": None}, forgotten=[], workdir=lambda name: "/w", expected_gpus=lambda name: 0
    )
    fleet.stream = lambda name, function, request: Frozen()
    fleet.keep_listening = functools.partial(Fleet.keep_listening, fleet)
    fleet.forget = lambda name, unless_open=False: fleet.forgotten.append((name, unless_open))
    live, links = LiveSource(fleet, None, 2.0), []
    try:
        while len(links) < 5:
            links += [event.link for event in live.events(live.now() + 10) if event.link]
    finally:
        live.close()
    assert [state for state, _ in links[:5]] == ["OK", "TIMEOUT", "OK", "TIMEOUT", "OK"]
    assert "sent nothing for" in links[1][1]
    assert fleet.forgotten[0] == ("a", False)  # its connection too: it may be what is frozen


def test_a_host_is_given_longer_each_time_until_it_is_heard():
    quiet = event_sources._SilenceWatch(2.0)
    now, waits = T0, []
    for _ in range(7):
        quiet.on_open(now)
        while not quiet.gives_up(now):
            now += 1.0
        waits.append(quiet.gave_up_after_s)
    assert waits == [31, 61, 121, 241, 481, 601, 601]
    quiet.on_open(now)
    quiet.on_frame(now, of_agent=False)  # the sampler, which starts at once
    assert not quiet.gives_up(now + 600)
    quiet.on_frame(now, of_agent=True)
    assert (quiet.gives_up(now + 30), quiet.gives_up(now + 31)) == (False, True)


@pytest.mark.parametrize(("silent_s", "shown"), [(5.0, GuardShown.WATCHING), (600.0, GuardShown.GONE)])
def test_a_guard_on_another_machine_is_known_by_what_it_told_the_hosts(session, tmp_path, monkeypatch, silent_s, shown):
    monkeypatch.chdir(tmp_path)
    frame = next(each["frame"] for each in simulate.simulate_incident(10) if each.get("frame") and each["frame"]["run"])
    heard = {
        "run": frame["run"]["name"],
        "pid": 7,
        "pid_start": 1,
        "machine": "far x y",
        "limit": 3,
        "time": frame["now"] - silent_s,
    }
    session.take(SourceEvent(T0, "a", frame=frame | {"run": frame["run"] | {"guard": heard}}))
    session.cluster.advance(T0)
    assert current_guard(session.cluster.run, session.cluster.guard_reports(T0)) is shown
    assert current_guard(session.cluster.run, []) is GuardShown.NONE


def test_an_incident_is_one_line_once_its_run_goes_on(session):
    def account(*resumed):
        each = [
            Incident(
                n,
                T0 + 1000 * n,
                T0 + 1000 * n + 60,
                at,
                Cause(CauseKind.HUNG, "a", 3, age_s=60.0, phase="train", step=7),
            )
            for n, at in enumerate(resumed, 1)
        ]
        return Account(T0, T0 + 9000, 8, {}, each)

    def told(*resumed, run="r"):
        session.cluster.account = run, account(*resumed)
        session._note_incidents(T0 + 9000)
        return [event.text for event in session.cluster.events if "next step after" in event.text]

    assert told(T0 + 1300, None) == []  # over before anybody looked; and one that is not over
    [line] = told(T0 + 1300, T0 + 2240)
    assert "attempt 2" in line
    assert "next step after 4m" in line
    assert "0.5 rank-h" in line
    assert told(T0 + 1300, T0 + 2240) == [line]
    assert told(T0 + 1, run="another") == [line]


def incident(began, failed, resumed):
    return Incident(1, began, failed, resumed, Cause(CauseKind.HUNG, "gpu-3", 21, age_s=60.0, phase="train", step=7))


def test_an_incident_names_the_xid_that_it_began_with(session):
    """By the clocks of its hosts, which differ: that of gpu-3 is two minutes ahead."""
    names, ahead_s = simulate.host_names(4), 120.0
    session.cluster = ClusterState(names, 2.0)
    lines = {12.0: 31, 20.0: 79, 22.0: 79, 40.0: 48}  # seconds after the beginning, and the number
    for event in simulate.simulate_incident(4, seconds=60):
        if "frame" not in event:
            continue
        frame, since = as_sent(event["frame"]), event["t"] - simulate.BEGIN
        if event["host"] == "gpu-3":
            frame["now"] += ahead_s
            new = [at for at in lines if since - 2 < at <= since]
            frame["kernel"] = [f"NVRM: Xid (PCI:0000:20:00): {lines[at]}, pid=1, x" for at in new]
            frame["kernel_times"] = [simulate.BEGIN + ahead_s + at for at in new]
        session.cluster.take_frame(event["host"], frame, event["t"])
        session.cluster.advance(event["t"])
    head = session.cluster.snapshot.head_host
    begin = simulate.BEGIN + head.clock(event["t"]) - event["t"]
    run = session.cluster.run

    def told(*incidents):
        session.cluster.account = run, Account(begin, begin + 60, 8, {}, incidents)
        session._note_incidents(event["t"])
        return [each.text for each in session.cluster.events if each.text.startswith("incident")]

    assert told(incident(begin + 15, begin + 30, None)) == []
    [line] = told(incident(begin + 15, begin + 30, begin + 58))
    said = "attempt 1: gpu-3: Xid 79: the GPU has fallen off the bus → gpu-3: hung: rank 21 is silent for 60 s"
    assert said in line
    assert "; next step after 43s, 0.1 GPU-h" in line
    assert line.count("Xid") == 1
    [_, plain] = told(incident(begin + 15, begin + 30, begin + 58), incident(begin + 23, begin + 24, begin + 59))
    assert "Xid" not in plain


def test_the_account_is_asked_for_again_when_an_attempt_begins_steps_or_ends(session, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, asked = simulate.host_names(2), []
    session.cluster = ClusterState(names, 2.0)
    session.fleet = types.SimpleNamespace(hosts=dict.fromkeys(names))
    session.source.hosts = names
    session.start_history()
    monkeypatch.setattr(sessions, "account_of_head", lambda *_: asked.append(1))
    monkeypatch.setattr(sessions, "ACCOUNT_SOON_S", 0.0)
    frames, nodes = {}, None
    for each in simulate.simulate_incident(2, seconds=80):
        if "frame" in each:
            frames[each["host"]] = each["frame"]
            nodes = nodes or (each["frame"]["run"] or {}).get("nodes")
    moment = [frames[names[0]]["now"]]

    def looks(**new):
        """How often it was asked for in three looks, after such news of the run."""
        asked.clear()
        for _ in range(3):
            moment[0] += 2
            session.source.clock = moment[0]
            for name in names:
                run = frames[name]["run"] | {"nodes": nodes, "metrics": []} | new
                session.take(SourceEvent(moment[0], name, frame=frames[name] | {"now": moment[0], "run": run}))
            session.make_view(logs=False)
            wait_for(lambda: session.account_at < float("inf"), 10)
        return len(asked)

    step = {"loss": 2.0, "step_s": 6.0, "time": moment[0]}
    node = {"host": "h", "state": "exited", "attempt": 1, "pid": 1, "pid_start": 1, "exit_code": 1}
    killed = node | {"cause": {"kind": "rank killed", "rank": 9, "signal": 9}}
    assert looks(attempt=1) == 1
    assert looks(attempt=1) == 0
    assert looks(attempt=1, metrics=[step | {"step": 1, "attempt": 1}]) == 1
    assert looks(attempt=1, alive=False, status=killed) == 1
    assert looks(attempt=2) == 1
    assert looks(attempt=2, metrics=[step | {"step": 1, "attempt": 2}]) == 1
    assert looks(attempt=2, metrics=[step | {"step": 2, "attempt": 2}]) == 0


def test_what_serving_needs_is_installed_by_the_pip_of_the_python_that_runs(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "llama405b_tools.verbs.top", raising=False)
    with pytest.raises(UserError, match=re.escape(f"{sys.executable} -m pip install textual-serve")):
        top._serve("8405", ["hosts"])


@pytest.mark.parametrize("requested", ["", "big"])
def test_runs_that_no_agent_can_read_are_unknown_and_not_none(requested, monkeypatch):
    session = Session(Quiet(), None, 60.0)
    frame = json.loads(FRAME) | {"run": None, "runs": [], "run_fault": "/py cannot be run; run `setup`"}
    for name in "ab":
        session.take(SourceEvent(T0, name, frame=frame))
    view = session.make_view(logs=False)
    assert (view.verdict, view.exit_code) == (ClusterVerdict.DEGRADED, 1)
    assert all("its runs are unknown: /py cannot be run; run `setup`" in row.notes for row in view.hosts)
    session.cluster.requested_run, session.fleet = requested, FakeFleet(("a", "b"))
    monkeypatch.setattr(top, "_await_hosts", lambda *_: None)
    monkeypatch.setattr(session, "make_view", lambda *, logs: view)
    if requested:
        with pytest.raises(UserError, match=r"\(a,b could not be queried: /py cannot be run; run `setup`\)"):
            top._await_run(session)
    else:
        top._await_run(session)
