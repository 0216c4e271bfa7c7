"""What cluster-top makes of time that passed without it."""

import json
import queue
import types

import pytest

from llama405b.contract.accounting import Account, Incident
from llama405b.contract.causes import Cause, CauseKind
from llama405b_tools.top import event_sources
from llama405b_tools.top.event_sources import Live, SourceEvent
from llama405b_tools.top.session import Session, guard_shown
from llama405b_tools.top.state import simulate, thresholds
from llama405b_tools.top.state.picture import GuardShown, HostState, Level, Verdict
from llama405b_tools.verbs import top

FRAME = json.dumps(next(simulate.incident(1))["frame"])
T0 = 1_800_000_000.0


class Quiet(Live):
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

    def stay(self, run):
        pass


@pytest.fixture
def session():
    return Session(Quiet(), None, 60.0)


def test_time_without_a_look_is_time_away(session):
    for _ in range(200):
        session.advance(session.source.now() + 0.5)
    assert session.picture(logs=False).why == "hosts that have not answered: 2"
    woken = session.source.now() + 92
    frame = SourceEvent(woken, "a", frame=json.loads(FRAME))  # it waited in a socket
    session.source.waking = [frame, SourceEvent(woken, "a", link=("DOWN", "the sampler ended"))]
    session.advance(session.source.now())
    pic = session.picture(logs=False)
    assert (pic.verdict, pic.exit_code, pic.why) == (Verdict.CONNECTING, 1, "away 92 s; reconnecting")
    assert {row.state for row in pic.hosts} == {HostState.CONNECTING}
    assert [event.level for event in pic.events] == [Level.NOTE]
    for _ in range(int(2 * thresholds.RECONNECT_S)):
        session.advance(session.source.now() + 0.5)
    assert session.picture(logs=False).hosts[0].state is HostState.DOWN


def test_to_wait_for_hosts_is_not_to_be_away():
    session = Session(Quiet(60.0), None, 60.0)
    top._await_all(session, watches=False)
    assert session.source.now() > T0 + thresholds.SLEPT_S
    top._pass(session, 60.0)
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
    fleet = types.SimpleNamespace(hosts={"a": None}, forgotten=[], workdir=lambda name: "/w")
    fleet.connection = lambda name: Frozen()
    fleet.forget = lambda name, unless_open=False: fleet.forgotten.append((name, unless_open))
    live, links = Live(fleet, None, 2.0), []
    try:
        while len(links) < 5:
            links += [event.link for event in live.events(live.now() + 10) if event.link]
    finally:
        live.close()
    assert [state for state, _ in links[:5]] == ["OK", "TIMEOUT", "OK", "TIMEOUT", "OK"]
    assert "sent nothing for" in links[1][1]
    assert fleet.forgotten[0] == ("a", False)  # its connection too: it may be what is frozen


def test_a_host_is_given_longer_each_time_until_it_is_heard():
    quiet = event_sources._Quiet(2.0)
    now, waits = T0, []
    for _ in range(7):
        quiet.opened(now)
        while not quiet.gives_up(now):
            now += 1.0
        waits.append(quiet.gave_up_after_s)
    assert waits == [31, 61, 121, 241, 481, 601, 601]
    quiet.opened(now)
    quiet.heard(now)
    assert (quiet.gives_up(now + 30), quiet.gives_up(now + 31)) == (False, True)


@pytest.mark.parametrize(("silent_s", "shown"), [(5.0, GuardShown.WATCHING), (600.0, GuardShown.GONE)])
def test_a_guard_on_another_machine_is_known_by_what_it_told_the_hosts(session, tmp_path, monkeypatch, silent_s, shown):
    monkeypatch.chdir(tmp_path)
    frame = next(each["frame"] for each in simulate.incident(10) if each.get("frame") and each["frame"]["run"])
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
    assert guard_shown(session.cluster.run, session.cluster.guards_heard(T0)) is shown
    assert guard_shown(session.cluster.run, []) is GuardShown.NONE


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
        session._tell_incidents(T0 + 9000)
        return [event.text for event in session.cluster.events if "next step after" in event.text]

    assert told(T0 + 1300, None) == []  # over before anybody looked; and one that is not over
    [line] = told(T0 + 1300, T0 + 2240)
    assert "attempt 2" in line
    assert "next step after 4m" in line
    assert "0.5 rank-h" in line
    assert told(T0 + 1300, T0 + 2240) == [line]
    assert told(T0 + 1, run="another") == [line]
