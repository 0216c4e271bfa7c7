"""A sampler that is stopped is replaced, also on this machine, where no connection breaks."""

import os
import signal
import socket

import pytest

from llama405b_tools.agent import processes
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import parse_hosts
from llama405b_tools.top import event_sources
from llama405b_tools.top.event_sources import LiveSource
from llama405b_tools.top.state import thresholds
from ops_rig import Patience, wait_for


@pytest.mark.slow
def test_a_sampler_that_is_stopped_is_replaced(monkeypatch):
    for name, seconds in {"QUIET_S": 4.0, "QUIET_FRAMES": 0, "PING_S": 0.2}.items():
        monkeypatch.setattr(thresholds, name, seconds)
    monkeypatch.setattr(event_sources, "RETRY_S", 0.2)
    me = socket.gethostname()
    with Fleet(parse_hosts(f"{me} address=localhost\n", "hosts")) as fleet:
        live = LiveSource(fleet, None, 0.2)
        try:
            _until(live, lambda event: event.frame is not None)
            stopped = live.streams[me].child.pid
            os.kill(stopped, signal.SIGSTOP)
            link = _until(live, lambda event: event.link and event.link[0] == "TIMEOUT").link
            assert "reconnecting" in link[1]
            _until(live, lambda event: event.frame is not None)
            assert live.streams[me].child.pid != stopped
            wait_for(lambda: processes.start_time(stopped) is None)
        finally:
            live.close()


def _until(live, wanted):
    """Events, until one is as wanted."""
    patience = Patience()
    while patience.lasts():
        for event in live.events(live.now() + 1):
            if wanted(event):
                return event
    raise AssertionError("it did not come within a minute")
