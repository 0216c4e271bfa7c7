"""How a stream handles bytes that are not text, and errors without a message."""

import io

import pytest

from llama405b_tools.hosts.ssh import _SshStream
from llama405b_tools.hosts.transport import HostError


class Channel:
    """As much of paramiko's as a stream needs."""

    def __init__(self, data=b""):
        self.data = data

    def makefile(self, mode):
        assert mode == "rb"
        return io.BytesIO(self.data)

    def sendall(self, data):
        raise EOFError


def test_bytes_that_are_not_text_do_not_end_a_stream():
    assert list(_SshStream(Channel(b"\xff before\nafter\n"))) == ["\ufffd before\n", "after\n"]


def test_an_error_without_words_is_named_by_its_type():
    with pytest.raises(HostError, match=r"the connection was lost \(EOFError\)"):
        _SshStream(Channel()).send("x")
