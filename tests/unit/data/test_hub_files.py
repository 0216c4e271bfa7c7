"""Reading a file of the Hub: whatever its client raises is an error of the file, and parts are parts."""

import types

import pytest

from llama405b.data import hub


class Broken:
    size, cache = 10, types.SimpleNamespace(end=10)

    def __init__(self, error):
        self.error = error

    def read(self, n):
        raise self.error


@pytest.mark.parametrize("name", ["ReadTimeout", "RemoteProtocolError", "ConnectError"])
def test_what_the_client_raises_is_an_error_of_the_file(name):
    error = type(name, (Exception,), {"__module__": "httpx2._exceptions"})("")
    with pytest.raises(OSError, match=name):
        hub._RangeFile(Broken(error)).readinto(bytearray(4))
    with pytest.raises(ZeroDivisionError):
        hub._RangeFile(Broken(ZeroDivisionError())).readinto(bytearray(4))


def test_a_whole_file_in_place_of_a_part_is_refused():
    file = types.SimpleNamespace(size=10, cache=types.SimpleNamespace(end=14), read=lambda n: b"abcd")
    with pytest.raises(OSError, match="sends whole files"):
        hub._RangeFile(file).readinto(bytearray(4))
