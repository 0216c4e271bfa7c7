import dataclasses

import pytest

from llama405b.contract import rungs
from llama405b.contract.errors import UserError
from llama405b.contract.rungs import Figure, Rung, RungResult

ON_GPU = RungResult(Rung.EXACT, 1, 1, "NVIDIA H200", "2.11", 31.6, (Figure("runs that agree", 5, ""),))


def test_rungs_are_climbed_in_their_order():
    assert rungs.chosen("exact,start,,start") == [Rung.START, Rung.EXACT]
    for text, words in (("strat", "'strat' is not a rung"), ("", "none is named"), (",", "none is named")):
        with pytest.raises(UserError, match=words):
            rungs.chosen(text)


def test_every_rung_is_described():
    assert set(rungs.ABOUT_S) == set(rungs.REMEDIES) == set(rungs.PROVES) == set(Rung)


def test_a_result_is_one_line_with_cause_and_remedy():
    assert rungs.line_of(ON_GPU) == "exact         good, 32 s: runs that agree 5"
    failed = dataclasses.replace(ON_GPU, fault="full, hidden differs from step 3")
    assert "FAILED after 32 s: full, hidden differs from step 3; use --parallel.overlap false" in rungs.line_of(failed)
    assert "--rungs exact" in rungs.line_of(dataclasses.replace(ON_GPU, skipped=True))


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
