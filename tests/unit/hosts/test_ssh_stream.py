"""How a channel begins after the login shell's start-up files, and a stream with bytes that are not text or without a message."""

import io

import pytest

from llama405b_tools.hosts import transport
from llama405b_tools.hosts.ssh import _SshStream
from llama405b_tools.hosts.transport import READY_LINE, HostError, wait_for_shell


class Channel:
    """As much of paramiko's as a stream needs."""

    def __init__(self, data=b"", err=b"", *, silent=False):
        self.data, self.err, self.silent = io.BytesIO(data), err, silent

    def settimeout(self, seconds):
        pass

    def recv(self, size):
        if not (data := self.data.read(size)) and self.silent:
            raise TimeoutError
        return data

    def makefile(self, mode):
        assert mode == "rb"
        return self.data

    def recv_stderr(self, size):
        return self.err

    def sendall(self, data):
        raise EOFError


def test_bytes_that_are_not_text_do_not_end_a_stream():
    assert list(_SshStream(Channel(b"\xff before\nafter\n"))) == ["\ufffd before\n", "after\n"]


def test_an_error_without_words_is_named_by_its_type():
    with pytest.raises(HostError, match=r"the connection was lost \(EOFError\)"):
        _SshStream(Channel()).send("x")


@pytest.mark.parametrize("noise", [b"", b"welcome\n", b"no newline", b'{"a": 1}\n', b"\xff\n{"])
def test_what_start_up_files_print_is_not_part_of_the_output(noise):
    channel = Channel(noise + READY_LINE + b"{1}\n")
    wait_for_shell(channel, "a", lambda text: b"")
    assert list(_SshStream(channel)) == ["{1}\n"]


@pytest.mark.parametrize(
    ("channel", "said"),
    [
        (Channel(b"hello", silent=True), r"start-up files \(such as ~/.bashrc\) read input or take more than 30 s"),
        (
            Channel(b"this account is not available\n"),
            r"exit before the command runs \(this account is not available\)",
        ),
        (Channel(err=b"nologin"), r"exit before the command runs \(nologin\); try `ssh a true`"),
    ],
)
def test_start_up_files_that_never_let_a_command_run_are_named(channel, said):
    with pytest.raises(HostError, match=said):
        wait_for_shell(channel, "a", lambda text: b"")
    assert transport.SHELL_TIMEOUT_S == 30.0
