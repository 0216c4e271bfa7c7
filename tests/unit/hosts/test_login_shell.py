"""Start-up files of a login shell that let no command run, or leave something running, with a server in this process."""

import shutil

import pytest

from llama405b_tools.hosts import ssh, transport
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.ssh import Ssh
from llama405b_tools.hosts.transport import HostError

pytestmark = pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="NOT RUN: needs ssh-keygen and ssh")
A = Host("a", "hosts:1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shell", "limits", "words"),
    [
        ("exec yes", {}, r"start-up files \(such as ~/.bashrc\) print without end; let them do that only in"),
        (
            "while echo; do sleep 0.01; done",
            {"SHELL_TIMEOUT_S": 1.2, "SHELL_PROBE_TIMEOUT_S": 0.5},
            "read input or take more than 1 s",
        ),
        ("exec sh", {}, "start another shell, so no command can run; let them do that only in interactive"),
        ("cd /; exec bash --norc", {}, "start another shell, so no command can run"),
        ('read answer; exec sh -c "$0"', {"SHELL_TIMEOUT_S": 1.2}, "read input or take more than 1 s"),
    ],
    ids=["yes", "slow", "exec sh", "exec bash", "read"],
)
def test_start_up_files_that_let_no_command_run_are_told(ssh_server, monkeypatch, shell, limits, words):
    """By what they do, however long that takes here; where they go on for ever, once their time is over."""
    for name, value in (
        {"SHELL_TIMEOUT_S": 60.0, "SLOW_STARTUP_S": 0.5, "MAX_STARTUP_BYTES": 1 << 11, "SHELL_PROBE_TIMEOUT_S": 60.0}
        | limits
    ).items():
        monkeypatch.setattr(ssh if name == "SHELL_PROBE_TIMEOUT_S" else transport, name, value)
    ssh_server("a", shell=("sh", "-c", shell))
    connection = Ssh(A)
    with pytest.raises(HostError, match=words):
        connection.run("echo here", "", 60.0)
    connection.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left", "within_s", "words"),
    [
        ("while sleep 0.02; do echo y; done", 1.0, "did not answer within 1 s"),
        ("sleep 0.2; exec yes", 60.0, "its output does not end; check what its start-up files"),
    ],
    ids=["slowly", "fast"],
)
def test_what_start_up_files_leave_running_does_not_keep_a_command_for_ever(
    ssh_server, monkeypatch, left, within_s, words
):
    monkeypatch.setattr(ssh, "MAX_OUTPUT_BYTES", 1 << 16)
    ssh_server("a", shell=("sh", "-c", f'({left}) & exec sh -c "$0"'))
    connection = Ssh(A)
    with pytest.raises(HostError, match=words):
        connection.run("echo here", "", within_s)
    connection.close()


def test_a_command_that_was_killed_is_not_told_as_a_lost_connection(ssh_server):
    ssh_server("a")
    connection = Ssh(A)
    with pytest.raises(HostError, match="the command was killed on the host; run `dmesg"):
        connection.run("kill -TERM $$", "", 10.0)
    assert connection.run("echo here", "", 10.0).out == "here\n"
    connection.close()


def test_what_start_up_files_print_is_no_part_of_an_error(ssh_server):
    ssh_server("a", shell=("sh", "-c", 'echo noise; echo noise >&2; exec sh -c "$0"'))
    connection = Ssh(A)
    done = connection.run("echo out; echo wrong >&2; exit 3", "", 10.0)
    assert (done.code, done.out, done.err) == (3, "out\n", "wrong\n")
    connection.close()
