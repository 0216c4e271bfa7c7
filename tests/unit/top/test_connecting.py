"""Connecting is fair: hosts that do not answer take no turn from those that do."""

import socket

import pytest

from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import parse_hosts
from llama405b_tools.top.event_sources import LiveSource

DEAD = 130


@pytest.mark.slow
@pytest.mark.parametrize("accepts", [False, True])
def test_dead_hosts_at_the_head_of_the_file_delay_nobody(tmp_path, monkeypatch, accepts):
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen(1000 if accepts else 0)
        port, me = server.getsockname()[1], socket.gethostname()
        queue = [socket.socket() for _ in range(3)]  # where it is full, the kernel drops who comes next
        for client in queue:
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        config = "".join(f"Host dead-{i}\n  HostName 127.0.1.{i}\n  Port {port}\n" for i in range(1, DEAD + 1))
        (tmp_path / "config").write_text(config)
        monkeypatch.setenv("LLAMA405B_SSH_CONFIG", str(tmp_path / "config"))
        names = [*(f"dead-{i}\n" for i in range(1, DEAD + 1)), f"{me}\n"]
        with Fleet(parse_hosts("".join(names), "hosts")) as fleet:
            live, seen = LiveSource(fleet, None, 1.0), []
            while not any(event.host == me and event.frame is not None for event in seen):
                seen += live.events(live.now() + 1)
            live.close()
        assert {event.host for event in seen} == {me}  # none of the others has even failed
        for client in queue:
            client.close()
