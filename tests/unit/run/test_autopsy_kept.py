"""What an autopsy saw is kept for its owner alone, and read again."""

import pytest
from fakes import FakeFleet
from run_rig import metrics

from llama405b.contract import reader
from llama405b.contract.files import append_line
from llama405b.contract.paths import RunDir
from llama405b.spec.plan import Node, Plan
from llama405b_tools.agent.evidence import HostEvidence, RankEvidence, _check_disks, _read_progress
from llama405b_tools.parsers import StackFrame, Thread
from llama405b_tools.run.diagnosis import Autopsy, diagnose_run, last_stacks, save_autopsy, take_autopsy

MAIN = Thread("main", (StackFrame("/w/llama405b/data/documents.py", 88, "rows", "file.read(n)"),), is_main=True)


def test_what_was_seen_of_each_rank_is_read_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert last_stacks("r") == ("", {})
    ranks = (RankEvidence(3, pid=7, state="S", threads=(MAIN,), source="signal"), RankEvidence(4))
    hosts = {"gpu-1": HostEvidence("gpu-1", 10.0, 1, alive=True, window_s=1.5, ranks=ranks)}
    place = save_autopsy(Autopsy("r", 1, hosts, {}, diagnose_run(hosts, {}), 1.0))
    assert place.stat().st_mode & 0o777 == 0o700
    when, stacks = last_stacks("r")
    assert when == place.name
    assert {*stacks} == {3, 4}
    assert [line for rank in (3, 4) for line in stacks[rank]] == (place / "stacks.txt").read_text().splitlines()
    assert any("documents.py:88" in line for line in stacks[3])


def test_a_host_with_much_to_do_is_waited_for():
    fleet = FakeFleet(["a", "b", "c"])
    fleet.fakes["b"].load, fleet.fakes["c"].load = "5.00 9.00 9.00 9/99 7\n2\n", "300.00 9.00 9.00 9/99 7\n2\n"
    plan = Plan(
        "r", 1, 5.0, "", "", (), (), tuple(Node(name, 1, n, "/w", "/py", "", "", {}) for n, name in enumerate("abc"))
    )
    assert take_autopsy(fleet, plan).unreachable == {}
    assert [fleet.fakes[name].waits["evidence"] for name in "abc"] == [9.0, 22.5, 60.0]


def test_a_host_says_how_long_its_run_may_take_to_load(tmp_path):
    plan = Plan("r", 1, 5.0, "", "", (), (), (), load_s=7.0)
    run = RunDir(tmp_path / "runs/r")
    assert _read_progress(run, plan).load_s == 7.0
    append_line(run.metrics, reader.dumps(metrics(1, 5.0, 1)))
    assert _read_progress(run, plan).load_s == 7.0


@pytest.mark.parametrize("name", ["there", "not there"])
def test_what_is_free_in_a_directory_that_is_not_there_is_unknown(tmp_path, name):
    (tmp_path / "there").mkdir()
    (found,) = _check_disks([tmp_path / name])
    assert (found.answers, bool(found.free_bytes)) == (True, name == "there")
    assert found.free_bytes != 0


def test_where_nothing_can_be_written_the_finding_still_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("")
    hosts = {"gpu-1": HostEvidence("gpu-1", 10.0)}
    found = Autopsy("r", 1, hosts, {}, diagnose_run(hosts, {}), 1.0)
    assert save_autopsy(found) is None
    assert found.report()
