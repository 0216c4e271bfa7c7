import dataclasses

import pytest

from llama405b.contract import rungs
from llama405b.contract.command import OneLineParser
from llama405b.contract.errors import UserError
from llama405b.contract.rungs import Figure, Rung, RungResult

ON_GPU = RungResult(Rung.EXACT, 1, 1, "NVIDIA H200", "2.11", 31.6, (Figure("runs that agree", 5, ""),))


def test_rungs_are_climbed_in_their_order():
    assert rungs.chosen("exact,start,,start") == [Rung.START, Rung.EXACT]
    for text, words in (("strat", "'strat' is not a test"), ("", "none is named"), (",", "none is named")):
        with pytest.raises(UserError, match=words):
            rungs.chosen(text)


def test_every_rung_is_described():
    assert set(rungs.ABOUT_S) == set(rungs.REMEDIES) == set(rungs.PROVES) == set(Rung)


def test_a_result_is_one_line_with_cause_and_remedy():
    assert rungs.line_of(ON_GPU) == "exact         passed, 32 s: runs that agree 5"
    failed = dataclasses.replace(ON_GPU, fault="full, hidden differs from step 3")
    assert "FAILED after 32 s: full, hidden differs from step 3; use --parallel.overlap false" in rungs.line_of(failed)
    assert "--tests exact" in rungs.line_of(dataclasses.replace(ON_GPU, skipped=True))


def test_a_ladder_is_climbed_in_parts(tmp_path):
    rungs.Log(tmp_path / "out").add(ON_GPU)
    log = rungs.Log(tmp_path / "out")
    log.add(dataclasses.replace(ON_GPU, rung=Rung.START, ranks=16, hosts=2))
    log.add(dataclasses.replace(ON_GPU, rung=Rung.COPIES, skipped=True))
    log.add(dataclasses.replace(ON_GPU, rung=Rung.START))
    again = dataclasses.replace(ON_GPU, fault="it differs")
    log.add(again)
    assert [(each.hosts, each.rung) for each in log.results()] == [(1, Rung.START), (1, Rung.EXACT), (2, Rung.START)]
    assert log.results()[1] == again
    text = log.block("2026-01-01")
    assert "1 host, 1 x NVIDIA H200, torch 2.11" in text
    assert "2 hosts, 16 x NVIDIA H200" in text
    assert f"| {rungs.PROVES[Rung.START]} | | 2026-01-01 (NVIDIA H200) | 2026-01-01 (2 hosts) |" in text
    assert rungs.PROVES[Rung.EXACT] not in text  # it failed


def test_a_cpu_proves_nothing_for_gpus(tmp_path):
    log = rungs.Log(tmp_path)
    log.add(dataclasses.replace(ON_GPU, device="cpu"))
    assert "no GPU" in log.block("2026-01-01")


def test_a_directory_that_cannot_be_written_is_refused_before_anything(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--out: .*file cannot be written"):
        rungs.Log(tmp_path / "file")


def test_results_that_cannot_be_read_are_named_before_anything_is_climbed(tmp_path):
    (tmp_path / "001-0001-start.json").write_text("x")
    with pytest.raises(UserError, match=r"--out: .*001-0001-start.json is not JSON .*; delete that file"):
        rungs.Log(tmp_path)


def test_a_disk_that_fills_up_is_said(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    log = rungs.Log(tmp_path)
    monkeypatch.setattr(rungs, "write_json", full)
    with pytest.raises(UserError, match=r"--out: .* cannot be written \(No space left on device\)"):
        log.add(ON_GPU)


def test_the_time_is_one():
    parser = OneLineParser(prog="x")
    rungs.add_options(parser)
    assert parser.parse(["--within", "9m"]).within == parser.parse([]).within == 540
    for text in ("nan", "0x", "-1"):
        with pytest.raises(UserError, match="--within"):
            parser.parse([f"--within={text}"])
