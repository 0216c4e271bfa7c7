import os
from pathlib import Path

import pytest

from llama405b.contract.errors import UserError
from llama405b_tools.hosts import fleet
from llama405b_tools.hosts.fleet import read_hosts
from llama405b_tools.hosts.inventory import parse_hosts


def test_everything_a_line_can_say():
    hosts = parse_hosts(
        "# head first\r\nubuntu@gpu-01:2222 slots=8 address=10.0.0.1 workdir=/w python=/p cache=/nvme/hf scratch=~/s"
        "  # here\r\n\r\nnode[08-10].x slots=4\n",
        "hosts",
    )
    assert [host.name for host in hosts] == ["gpu-01", "node08.x", "node09.x", "node10.x"]
    head = hosts[0]
    assert (head.user, head.port, head.slots, head.address, head.workdir, head.python, head.where) == (
        "ubuntu",
        2222,
        8,
        "10.0.0.1",
        "/w",
        "/p",
        "hosts:2",
    )
    assert head.places == {"cache": "/nvme/hf", "scratch": "~/s"}
    assert hosts[1].places == {}
    assert all(host.slots == 4 for host in hosts[1:])


def test_a_directory_may_have_a_space_as_in_a_shell():
    [host] = parse_hosts("""a workdir='/w x/#1' python=/my\\ env/bin/python cache="~/my models" # 'here""", "hosts")
    assert (host.workdir, host.python, host.places) == ("/w x/#1", "/my env/bin/python", {"cache": "~/my models"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "hosts: contains no hosts"),
        ("# only a comment\n", "hosts: contains no hosts"),
        ("a\nb\na\n", "hosts:3: 'a' repeats line 1; delete one"),
        ("node[1-3]\nnode2\n", "hosts:2: 'node2' repeats line 1"),
        ("-oProxyCommand=touch${IFS}x\n", "hosts:1: '-oProxyCommand=touch${IFS}x' is not a valid host"),
        ("a workdir='/w x\n", "hosts:1: a quote is not closed"),
        ("gpu-01 gpu-02\n", "hosts:1: 'gpu-02' is not a valid option; write one host per line"),
        ("a 8\n", "hosts:1: '8' is not a valid option; for 8 ranks, write slots=8"),
        ("a slots\n", "hosts:1: 'slots' is not a valid option; use slots=, address=, workdir=, python="),
        ("10.0.0.1:8\n", "hosts:1: '10.0.0.1:8' names port 8; for 8 ranks, write '10.0.0.1 slots=8'"),
        ("me@gpu-[1-2]:16\n", "hosts:1: 'me@gpu-[1-2]:16' names port 16; for 16 ranks, write 'gpu-[1-2] slots=16'"),
        ("a slot=8\n", "hosts:1: 'slot=8' is not a valid option; use slots=, address=, workdir=, python="),
        ("a slots=0\n", "hosts:1: slots=0 is not a valid number of ranks"),
        ("a slots=²\n", "hosts:1: slots=² is not a valid number of ranks"),
        ("a slots=" + "9" * 500, "is not a valid number of ranks"),
        ("b" + "9" * 1000, "…' is too long (1001 characters); shorten it"),
        ("a\nb" + "9" * 1_000_000, "…' is too long (1000001 characters); shorten it"),
        ("a workdir=/\x1b[31mred\n", r"hosts:1: contains the control character '\x1b'; delete it"),
        ("a\na\0b\n", r"hosts:2: contains the control character '\x00'"),
        ("a workdir=/\u202egnp\n", r"hosts:1: contains the control character '\u202e'"),
        (
            "me@fd00::7\n",
            "'me@fd00::7' is an IPv6 address, but a hosts file takes only names and IPv4; write a name here, and add `Host <name>`",
        ),
        ("[fe80::1%eth0]\n", "`Host <name>` with `HostName fe80::1%eth0`"),
        (
            "a address=fd00::7\n",
            "address=fd00::7 is an IPv6 address, but the hosts meet over IPv4; write the host's IPv4",
        ),
        ("n[٠١-٠٢]\n", "hosts:1: 'n[٠١-٠٢]' is not a valid host"),
        ("n:٢٢\n", "hosts:1: 'n:٢٢' is not a valid host"),
        ("a slots=x\n", "hosts:1: slots=x is not a valid number of ranks"),
        ("a slots=1 slots=2\n", "hosts:1: slots= is given twice"),
        ("a:70000\n", "hosts:1: port 70000 is out of range"),
        ("a workdir=x\n", "hosts:1: workdir=x is relative"),
        ("a cache=hf\n", "hosts:1: cache=hf is relative; write a full path"),
        ("a address=;rm\n", "hosts:1: address=;rm is not a valid address"),
        ("n[5-1]\n", "hosts:1: range [5-1] is empty"),
        ("a;b\n", "hosts:1: 'a;b' is not a valid host"),
        ("a\nb address=localhost\n", "hosts:2: 'b' is at localhost, where the other hosts cannot reach it"),
    ],
)
def test_a_bad_line_is_named(text, words):
    with pytest.raises(UserError) as caught:
        parse_hosts(text, "hosts")
    assert words in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_a_hosts_files_own_name_and_size_are_checked(tmp_path):
    with pytest.raises(UserError, match=r"x1b\[31mred': the name of a hosts file cannot contain control characters"):
        read_hosts(tmp_path / "\x1b[31mred")
    (tmp_path / "zeros").write_bytes(bytes(fleet.MAX_CHARACTERS + 1))
    with pytest.raises(UserError, match="zeros: is too large for a hosts file"):
        read_hosts(tmp_path / "zeros")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["directory", "FIFO", "device"]
)
def test_a_hosts_file_that_is_no_file_is_refused_at_once(tmp_path, make):
    make(tmp_path / "it")
    with pytest.raises(UserError, match="it: is a directory, FIFO or device; name a file with"):
        read_hosts(tmp_path / "it")


def test_names_may_have_underscores():
    names = [host.name for host in parse_hosts("me@node_1:22 address=ib_1.x\ngpu_[08-09]_a\n", "hosts")]
    assert names == ["node_1", "gpu_08_a", "gpu_09_a"]
