"""How a connection begins, with a server in this process that drops some of them."""

import shutil

import pytest

from llama405b_tools.hosts import ssh
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.ssh import Ssh
from llama405b_tools.hosts.transport import HostError

pytestmark = pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="NOT RUN: needs ssh-keygen and ssh")
A = Host("a", "hosts:1")


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(ssh, "RETRY_DELAYS_S", (0.01, 0.02, 0.02, 0.04), raising=False)


@pytest.mark.parametrize("words", [b"", b"Exceeded MaxStartups\r\n"], ids=["in silence", "with a word"])
def test_a_connection_that_is_dropped_is_tried_again(ssh_server, words):
    busy = ssh_server("a", drops=3, words=words)
    connection = Ssh(A)
    assert connection.run("echo here", "", 10.0).out == "here\n"
    connection.close()
    assert busy.seen == 4


def test_a_server_that_drops_every_connection_is_told_as_that(ssh_server):
    busy = ssh_server("a", drops=99, words=b"Exceeded MaxStartups\r\n")
    with pytest.raises(HostError) as told:
        Ssh(A)
    words = "its sshd closed the connection before login (Exceeded MaxStartups), 5 times; raise MaxStartups in its"
    assert str(told.value).startswith(words)
    assert str(told.value).endswith("try `ssh -v a`")
    assert (told.value.kind, busy.seen) == ("REFUSED", 5)


def test_a_jump_host_that_drops_connections_is_named(ssh_server):
    ssh_server("hop", drops=99)
    ssh_server("a", more="  ProxyJump hop\n")
    with pytest.raises(
        HostError, match=r"^its jump host hop: its sshd closed the connection before login, 5 times; .*hop`$"
    ):
        Ssh(A)


def test_a_host_that_drops_connections_behind_a_jump_host_is_named(ssh_server):
    ssh_server("hop")
    ssh_server("a", more="  ProxyJump hop\n")
    with pytest.raises(HostError, match=r"^its sshd closed the connection before login, 5 times; .* try `ssh -v a`$"):
        Ssh(A)


@pytest.mark.parametrize("error", [EOFError(), ConnectionResetError(104, "Connection reset by peer")])
def test_a_connection_that_ends_while_it_begins_is_dropped_whichever_side_notices(error):
    assert isinstance(ssh._explain_failure(error, "a", ""), ssh.DroppedError)
