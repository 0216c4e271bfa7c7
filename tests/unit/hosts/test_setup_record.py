"""What setup found is noted per host and user: every hosts file that names the same host uses it."""

import stat

import pytest

from llama405b.contract.errors import RunError, UserError
from llama405b_tools.hosts.fleet import Installation, read_hosts, setup_path, write_installations

FOUND = Installation("/home/me/llama405b/.venv/bin/python", "~/llama405b", "module load cuda")


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    """Write a hosts file, and read it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)

    def read(text, name="hosts"):
        (tmp_path / name).write_text(text)
        return read_hosts(tmp_path / name)

    return read


def pythons(hosts):
    return [host.python for host in hosts]


def test_a_second_hosts_file_with_the_same_hosts_works(hosts):
    write_installations([(host, FOUND) for host in hosts("gpu-1\nme@gpu-2:2222\n")])
    again = hosts("me@gpu-2:2222 slots=8\ngpu-1\n", "another")
    assert pythons(again) == [FOUND.python, FOUND.python]
    assert [(host.workdir, host.prefix) for host in again] == [("~/llama405b", "module load cuda")] * 2
    assert pythons(hosts("you@gpu-2:2222\ngpu-3\nme@gpu-1\n")) == ["", "", ""]  # another user, port or host
    assert stat.S_IMODE(setup_path().stat().st_mode) & 0o022 == 0


def test_a_line_takes_precedence_and_directories_are_told_apart(hosts):
    write_installations([(hosts("gpu-1 workdir=/a\n")[0], Installation("/a/python", "/a", ""))])
    assert [(host.python, host.workdir) for host in hosts("gpu-1\n")] == [("/a/python", "/a")]
    write_installations([(hosts("gpu-1\n")[0], FOUND)])
    write_installations([(hosts("gpu-1 workdir=/c\n")[0], Installation("/c/python", "/c", ""))])
    assert pythons(hosts("gpu-1\n")) == [FOUND.python]
    assert pythons(hosts("gpu-1 workdir=/a\n")) == ["/a/python"]
    assert pythons(hosts("gpu-1 workdir=/b\n")) == [""]
    assert pythons(hosts("gpu-1 python=/mine\n")) == ["/mine"]


def test_this_machine_is_set_up_for_each_checkout(hosts, tmp_path, monkeypatch):
    here = hosts("node-a address=localhost\n")[0]
    write_installations([(here, Installation("/x/python", str(tmp_path), ""))])
    assert pythons(hosts("other-name address=127.0.0.1\n")) == ["/x/python"]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert pythons(hosts("node-a address=localhost\n")) == [""]


def test_a_record_that_cannot_be_trusted_or_written_is_named(hosts, tmp_path):
    host = hosts("gpu-1\n")[0]
    write_installations([(host, FOUND)])
    setup_path().chmod(0o666)
    with pytest.raises(UserError, match="is writable by everyone"):
        hosts("gpu-1\n")
    setup_path().unlink()
    setup_path().parent.rmdir()
    setup_path().parent.touch()
    with pytest.raises(RunError, match=r"setup.json: cannot be written \(.*\); make it writable"):
        write_installations([(host, FOUND)])
