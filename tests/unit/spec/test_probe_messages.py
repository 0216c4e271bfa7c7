import dataclasses

import pytest

from conftest import ROOT
from llama405b.contract.errors import UserError
from llama405b.settings.parser import OneLineParser
from llama405b.spec import probes
from llama405b.spec.probes import Figure, Probe, ProbeResult

ON_GPU = ProbeResult(Probe.EXACT, 1, 1, "NVIDIA H200", "2.11", 31.6, (Figure("runs that agree", 5, ""),))


def test_tests_run_in_their_order():
    assert probes.select_tests("exact,start,,start") == [Probe.START, Probe.EXACT]
    for text, words in (("strat", "'strat' is not a test"), ("", "no test is named"), (",", "no test is named")):
        with pytest.raises(UserError, match=words):
            probes.select_tests(text)


def test_what_is_open_is_asked_in_its_order_and_told_beside_what_was_expected():
    assert (
        probes.select_tests("open")
        == list(probes.OPEN_QUESTIONS)
        == probes.select_tests(",".join(probes.OPEN_QUESTIONS))
    )
    assert probes.select_tests("hang,start,hog") == [Probe.START, Probe.HOG, Probe.HANG]
    found = dataclasses.replace(ON_GPU, probe=Probe.HOG, figures=(Figure("8 busy", 14.4, "ms"),))
    asked = probes.OPEN_QUESTIONS[Probe.HOG]
    assert probes.format_result(found) == (
        f"hog           passed, 32 s: 8 busy 14.4 ms; expected: {asked.expected}; decides: {asked.decides}"
    )
    on_cpu = probes.format_result(dataclasses.replace(found, device="cpu"))
    assert on_cpu.endswith("8 busy 14.4 ms; a CPU does not show: anything busy")
    assert probes.format_result(dataclasses.replace(found, fault="no Triton")).endswith("no Triton; report it")


def test_every_probe_is_described():
    assert set(probes.PROBE_INFO) == set(Probe)
    proving = {probe for probe, about in probes.PROBE_INFO.items() if about.proves}
    assert proving == {*probes.BENCH_PROBES, *probes.KNOB_PROBES}
    assert {probe for probe, about in probes.PROBE_INFO.items() if about.advice != "report it"} == proving


def test_a_result_is_one_line_with_cause_and_advice():
    assert probes.format_result(ON_GPU) == "exact         passed, 32 s: runs that agree 5"
    failed = dataclasses.replace(ON_GPU, fault="full, hidden differs from step 3")
    assert "FAILED after 32 s: full, hidden differs from step 3; use --parallel.overlap false" in probes.format_result(
        failed
    )
    assert "--tests exact" in probes.format_result(dataclasses.replace(ON_GPU, skipped=True))


def test_tests_may_run_in_parts(tmp_path):
    probes.ResultDirectory(tmp_path / "out").add(ON_GPU)
    log = probes.ResultDirectory(tmp_path / "out")
    log.add(dataclasses.replace(ON_GPU, probe=Probe.START, ranks=16, hosts=2))
    log.add(dataclasses.replace(ON_GPU, probe=Probe.COPIES, skipped=True))
    log.add(dataclasses.replace(ON_GPU, probe=Probe.START))
    again = dataclasses.replace(ON_GPU, fault="it differs")
    log.add(again)
    assert [(each.hosts, each.probe) for each in log.results()] == [
        (1, Probe.START),
        (1, Probe.EXACT),
        (2, Probe.START),
    ]
    assert log.results()[1] == again
    text = log.format_report("2026-01-01")
    assert "1 host, 1 x NVIDIA H200, torch 2.11" in text
    assert "2 hosts, 16 x NVIDIA H200" in text
    row = f"| {probes.PROBE_INFO[Probe.START].proves} | | | 2026-01-01 (NVIDIA H200) | 2026-01-01 (2 hosts) |"
    assert row in text
    [head] = [line for line in (ROOT / "docs/proof.md").read_text().splitlines() if line.startswith("| feature")]
    assert row.count("|") == head.count("|")
    assert probes.PROBE_INFO[Probe.EXACT].proves not in text  # it failed


def test_a_cpu_proves_nothing_for_gpus(tmp_path):
    log = probes.ResultDirectory(tmp_path)
    log.add(dataclasses.replace(ON_GPU, device="cpu"))
    assert "no GPU" in log.format_report("2026-01-01")


def test_a_directory_that_cannot_be_written_is_refused_before_anything(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--out: .*file cannot be written"):
        probes.ResultDirectory(tmp_path / "file")


def test_results_that_cannot_be_read_are_named_before_anything_runs(tmp_path):
    (tmp_path / "001-0001-start.json").write_text("x")
    with pytest.raises(UserError, match=r"--out: .*001-0001-start.json is not JSON .*; delete that file"):
        probes.ResultDirectory(tmp_path)


def test_a_disk_that_fills_up_is_said(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    log = probes.ResultDirectory(tmp_path)
    monkeypatch.setattr(probes, "write_json", full)
    with pytest.raises(UserError, match=r"--out: .* cannot be written \(No space left on device\)"):
        log.add(ON_GPU)


def test_the_time_is_one():
    parser = OneLineParser(prog="x")
    probes.add_options(parser)
    assert parser.parse(["--time-limit", "9m"]).time_limit == parser.parse([]).time_limit == 540
    for text in ("nan", "0x", "-1"):
        with pytest.raises(UserError, match="--time-limit"):
            parser.parse([f"--time-limit={text}"])


def test_a_result_of_many_figures_is_whole_only_with_its_last_line():
    many = dataclasses.replace(
        ON_GPU, figures=tuple(Figure(f"a - {i}", 1.0, "GB/s", ("a", f"{i}")) for i in range(1200))
    )
    lines = [*probes.encode_result(many), "NCCL INFO", *probes.encode_result(ON_GPU)]
    assert len(lines) == 5
    assert list(probes.decode_results(lines)) == [many, ON_GPU]
    assert list(probes.decode_results(lines[:2])) == []


def test_knobs_are_a_table_to_paste_in_halves_that_fit_a_short_lease():
    assert probes.select_tests("knobs") == [Probe.KNOBS, Probe.KNOBS_2]
    assert probes.select_tests("knobs-2") == [Probe.KNOBS_2]
    assert [probes.PROBE_INFO[half].usual_s for half in probes.KNOB_PROBES] == [150, 150]
    figures = (
        Figure("fsdp2, offload: step", 1.25, "s"),
        Figure("fsdp2, offload: peak", 9.0, "GB"),
        Figure("fsdp1, offload: step", 2.0, "s"),
    )
    half = probes.format_result(dataclasses.replace(ON_GPU, probe=Probe.KNOBS_2, figures=figures))
    assert half == "\n".join(["knobs-2       passed, 32 s", "", *probes.format_figure_table(figures), ""])
    assert probes.format_figure_table(figures) == [
        "| setting | step, s | peak, GB |",
        "| --- | --- | --- |",
        "| fsdp2, offload | 1.25 | 9 |",
        "| fsdp1, offload | 2 | — |",
    ]
