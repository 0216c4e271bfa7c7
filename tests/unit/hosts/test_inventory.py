import pytest

from llama405b.contract.errors import UserError
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "hosts: contains no hosts"),
        ("# only a comment\n", "hosts: contains no hosts"),
        ("a\nb\na\n", "hosts:3: 'a' repeats line 1; delete one"),
        ("node[1-3]\nnode2\n", "hosts:2: 'node2' repeats line 1"),
        ("-oProxyCommand=touch${IFS}x\n", "hosts:1: '-oProxyCommand=touch${IFS}x' is not a valid host"),
        ("a b\n", "hosts:1: 'b' is not a valid option"),
        ("a slot=8\n", "hosts:1: 'slot=8' is not a valid option; use slots=, address=, workdir=, python="),
        ("a slots=0\n", "hosts:1: slots=0 is not a valid number of ranks"),
        ("a slots=²\n", "hosts:1: slots=² is not a valid number of ranks"),
        ("a slots=" + "9" * 5000, "is not a valid number of ranks"),
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
    assert "\n" not in str(caught.value)
