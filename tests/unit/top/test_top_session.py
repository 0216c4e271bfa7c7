"""What cluster-top makes of time that passed without it."""

import pytest

from llama405b_tools.top.session import Session
from llama405b_tools.top.sources import Live
from llama405b_tools.top.state import thresholds
from llama405b_tools.top.state.picture import HostState, Verdict
from llama405b_tools.verbs import top

T0 = 1_800_000_000.0


class Quiet(Live):
    """Live hosts of which nothing is heard; its clock stands until somebody waits."""

    def __init__(self, interval_s=2.0):
        self.hosts, self.interval_s, self.badge, self.clock = ["a", "b"], interval_s, "", T0

    def now(self):
        return self.clock

    def events(self, until):
        self.clock = until
        yield from ()

    def stay(self, run):
        pass


@pytest.fixture
def session():
    return Session(Quiet(), None, 60.0)


def test_time_without_a_look_is_time_away(session):
    for _ in range(200):
        session.advance(session.source.now() + 0.5)
    assert session.picture(logs=False).why == "hosts that have not answered: 2"
    session.source.clock += 92
    session.advance(session.source.now())
    pic = session.picture(logs=False)
    assert (pic.verdict, pic.exit_code, pic.why) == (Verdict.CONNECTING, 1, "away 92 s; reconnecting")
    assert {row.state for row in pic.hosts} == {HostState.CONNECTING}
    for _ in range(int(2 * thresholds.RECONNECT_S)):
        session.advance(session.source.now() + 0.5)
    assert session.picture(logs=False).why == "hosts that have not answered: 2"


def test_to_wait_for_hosts_is_not_to_be_away():
    session = Session(Quiet(60.0), None, 60.0)
    top._await_all(session, watches=False)
    assert session.source.now() > T0 + thresholds.SLEPT_S
    top._pass(session, 60.0)
    assert not session.cluster.events
