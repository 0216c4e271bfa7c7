"""A verb in a directory without a hosts file, but with the plan of a run."""

import dataclasses
from pathlib import Path

import pytest
from run_rig import plan

from llama405b.contract.errors import UserError
from llama405b.contract.files import write_json
from llama405b.contract.paths import RunDir
from llama405b_tools.run.backends import HostsBackend


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, created in (("old", 1.0), ("new", 2.0)):
        made = plan("-m", "mine", name=name, created=created, addresses={"a": "10.0.0.1"})
        write_json(
            RunDir.from_name(name).plan, made if name == "new" else dataclasses.replace(made, nodes=made.nodes[:1])
        )
    return tmp_path


@pytest.mark.parametrize(("run", "names"), [(None, ["a", "b"]), ("new", ["a", "b"]), ("old", ["a"])])
def test_the_hosts_of_the_plan_are_asked(here, capsys, run, names):
    found = HostsBackend(run, Path("hosts")).hosts()
    assert [host.name for host in found] == names
    assert (found[0].address, found[0].workdir, found[0].python) == ("10.0.0.1", "/w", "/py")
    assert "there is no hosts file here; asking" in capsys.readouterr().err


def test_a_file_that_was_named_or_is_here_counts(here):
    with pytest.raises(UserError, match="mine: cannot be read"):
        HostsBackend("new", Path("mine")).hosts()
    (here / "hosts").write_text("c\n")
    assert [host.name for host in HostsBackend("new", Path("hosts")).hosts()] == ["c"]


def test_without_either_the_hosts_file_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="hosts: cannot be read"):
        HostsBackend(None, Path("hosts")).hosts()
