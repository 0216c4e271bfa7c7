"""~/.ssh/config as people have it: it says of a host what ssh itself makes of it, or is refused in one sentence."""

import getpass
import shutil

import pytest

from llama405b_tools.hosts.fleet import ssh_address, ssh_user
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import HostError

pytestmark = pytest.mark.skipif(not shutil.which("ssh"), reason="NOT RUN: needs ssh")
GPU_1 = Host("gpu-1", "hosts:1")


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Write the configuration; DIR stands for the directory of the files that it may include."""

    def write(text):
        (tmp_path / "config").write_text(text.replace("DIR", str(tmp_path)))
        (tmp_path / "config").chmod(0o600)

    (tmp_path / "plain").write_text("Host gpu-1\n  User ada\n  HostName 10.0.0.1\n")
    (tmp_path / "bare").write_text("User ada\nHostName 10.0.0.1\n")
    (tmp_path / "nested").write_text(f"Include {tmp_path}/none*\nInclude {tmp_path}/pl*n\n")
    monkeypatch.setenv("LLAMA405B_SSH_CONFIG", str(tmp_path / "config"))
    return write


@pytest.mark.parametrize(
    "text",
    [
        "Include DIR/plain\n",
        "Include DIR/nested\nHost gpu-1\n  User eve\n",
        "Host gpu-1\n  Include DIR/bare\nHost *\n  User eve\n",
        'Host gpu-2\n  User eve\nInclude "DIR/plain"\nHost *\n  Include DIR/plain\n',
        "CanonicalizeHostname yes\nInclude DIR/plain\nHost gpu-1\n  User ada\n  HostName 10.0.0.1\n",
        "Host gpu-1\n  User ada\n  HostName 10.0.0.1 # its address\nMatch final all\n  User eve\n",
        'Match exec "false"\n  User eve\nMatch Host GPU-1 Exec "test %n = gpu-1"\n  Include DIR/bare\n',
        "Match !exec true\n  User eve\nMatch localuser nobody,!root\n  User eve\nMatch all\n  Include DIR/bare\n",
    ],
    ids=["plain", "nested, glob", "in Host", "not in Host", "canonical", "final all", "exec", "negated"],
)
def test_a_configuration_says_what_ssh_makes_of_it(config, text):
    config(text)
    assert (ssh_user(GPU_1), ssh_address(GPU_1)) == ("ada", "10.0.0.1")


def test_what_is_included_in_another_hosts_block_is_not_this_ones(config):
    config("Host gpu-2\n  Include DIR/bare\nHost *\n  HostName %h.example\n  User eve\nInclude DIR/plain\n")
    found = [(ssh_user(host), ssh_address(host)) for host in (GPU_1, Host("gpu-2", "hosts:2"))]
    assert found == [("eve", "gpu-1.example"), ("ada", "10.0.0.1")]


def test_match_tagged_is_never_counted_as_true(config):
    config("Match tagged lab\n  User eve\n")
    try:
        assert ssh_user(GPU_1) == getpass.getuser()
    except HostError as error:  # this ssh is too old for it, and does not accept it either
        assert "line 1: Bad Match condition" in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Host gpu-1\n  Port abc\n", "line 2: Bad"),
        ("Host gpu-1\n  Bogus yes\n", "Bad configuration option: bogus"),
        ("Match final\n  User\n", "line 2: "),
    ],
)
def test_a_configuration_that_ssh_does_not_accept_is_refused_with_its_words(config, text, words):
    config(text)
    with pytest.raises(HostError, match=r"ssh does not accept \S+/config .*; correct it") as refused:
        ssh_address(GPU_1)
    assert words in str(refused.value)
    assert "terminating" not in str(refused.value)


def test_a_configuration_that_others_can_write_is_refused(config, tmp_path):
    config("Host *\n")
    (tmp_path / "config").chmod(0o666)
    with pytest.raises(HostError, match="is writable by everyone, who could then run commands as you; run: chmod o-w"):
        ssh_address(GPU_1)


def test_a_configuration_without_a_program_to_read_it_is_refused(config, monkeypatch):
    config("Host *\n")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(HostError, match="is read with `ssh`, but it is not installed on this machine"):
        ssh_address(GPU_1)
