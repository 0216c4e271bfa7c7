"""What an autopsy saw is kept for its owner alone, and read again."""

from llama405b_tools.machine.stacks import Frame, Thread
from llama405b_tools.remote.messages.autopsy import HostEvidence, RankEvidence
from llama405b_tools.run.autopsy import Autopsy, keep_autopsy, last_stacks
from llama405b_tools.run.diagnose import diagnose

MAIN = Thread("main", (Frame("/w/llama405b/data/tables.py", 88, "rows", "file.read(n)"),), is_main=True)


def test_what_was_seen_of_each_rank_is_read_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert last_stacks("r") == ("", {})
    ranks = (RankEvidence(3, pid=7, state="S", threads=(MAIN,), source="signal"), RankEvidence(4))
    hosts = {"gpu-1": HostEvidence("gpu-1", 10.0, 1, alive=True, window_s=1.5, ranks=ranks)}
    place = keep_autopsy(Autopsy("r", 1, hosts, {}, diagnose(hosts, {}), 1.0))
    assert place.stat().st_mode & 0o777 == 0o700
    when, stacks = last_stacks("r")
    assert when == place.name
    assert {*stacks} == {3, 4}
    assert [line for rank in (3, 4) for line in stacks[rank]] == (place / "stacks.txt").read_text().splitlines()
    assert any("tables.py:88" in line for line in stacks[3])


def test_where_nothing_can_be_written_the_finding_still_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("")
    hosts = {"gpu-1": HostEvidence("gpu-1", 10.0)}
    found = Autopsy("r", 1, hosts, {}, diagnose(hosts, {}), 1.0)
    assert keep_autopsy(found) is None
    assert found.report()
