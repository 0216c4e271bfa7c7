"""The tests of `bench` run; so do the benchmarks, and the memory that one reports is within the bound that loading promises."""

import contextlib
import dataclasses
import json
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import load as bench_load
from benchmarks.pairs import ratio_of
from conftest import ROOT
from llama405b.bench import open_questions
from llama405b.bench.runs import compare_losses
from llama405b.spec.probes import (
    BENCH_PROBES,
    FULL_RUN_PROBES,
    KNOB_PROBES,
    MANY_RANKS_ONLY,
    MESH_PROBES,
    OPEN_QUESTIONS,
    PROBE_INFO,
    Probe,
)
from ops_rig import benchmark, wait_for
from ranks_rig import run_ranks


def test_streaming_needs_less_than_two_units_above_the_shards(tmp_path):
    largest = bench_load.largest_unit(bench_load.write_random(tmp_path, 0.1)) * 4  # FP32
    streamed, baseline = (bench_load._measure(form, tmp_path, 2, "fp32") for form in ("streamed", "baseline"))
    assert streamed["shard_bytes"] == baseline["shard_bytes"] >= 0.08e9
    assert streamed["peak_above_shards_bytes"] <= 2 * largest
    assert streamed["peak_above_shards_bytes"] < baseline["peak_above_shards_bytes"] / 2


@pytest.mark.soak
def test_every_way_of_loading_a_gigabyte_is_measured(tmp_path):
    done = benchmark(tmp_path, "load", "--repeat", "1", "--json", timeout=280)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["checkpoint_bytes"] >= 1e9
    streamed, baseline = report["forms"]["streamed"], report["forms"]["baseline"]
    assert streamed["peak_above_shards_bytes"] <= 2 * report["largest_unit_bytes"]
    assert streamed["peak_above_shards_bytes"] < baseline["peak_above_shards_bytes"] / 4
    assert streamed["shard_bytes"] == baseline["shard_bytes"] == report["forms"]["careful"]["shard_bytes"]
    assert streamed["shard_bytes"] == 2 * report["forms"]["plain"]["shard_bytes"]  # FP32, read in BF16
    assert set(report["ratios"]) == {"streamed/baseline", "streamed/careful", "local/plain", "local/dcp"}


BY_PROCESS = (Probe.START, Probe.COPIES)
BY_HAND = (
    Probe.PACKED_FAST,
    Probe.STREAMS,
    Probe.HANG,
)  # which start the trainer, or PyTorch, within limits of an idle machine


def test_each_test_of_a_host_passes_in_a_process_of_its_own(tmp_path, cli):
    done = cli(tmp_path, "bench", "--tests", ",".join(BY_PROCESS), "--bundle", "bundle.json")
    assert done.returncode == 0, done.stdout + done.stderr
    bundle = json.loads((tmp_path / "bundle.json").read_text())
    assert [(each["probe"], each["software"]["node"]) for each in bundle["results"]] == [
        (str(probe), "host-1") for probe in BY_PROCESS
    ]
    assert {each["software"]["python"] for each in bundle["results"]} == {platform.python_version()}
    assert bundle["without_result"] == []
    lines = [line.split()[:2] for line in done.stdout.partition("---")[0].splitlines()]
    assert lines == [[str(probe), "passed,"] for probe in BY_PROCESS]
    results = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "bench").glob("*.json")}
    assert {result["probe"] for result in results.values()} == set(BY_PROCESS)
    named = {figure["name"] for result in results.values() for figure in result["figures"]}
    assert {"pinned to device", "registered to host"} <= named


def _measured(me, probes):
    from llama405b.bench import program

    return [program._run_probe(probe, me, 1, program.Options(), 600.0) for probe in probes]


def test_one_rank_passes_every_other_test(tmp_path):
    [results] = run_ranks(
        1,
        _measured,
        [
            test
            for test in (*BENCH_PROBES, *KNOB_PROBES, *OPEN_QUESTIONS)
            if test not in (*BY_PROCESS, *BY_HAND, *FULL_RUN_PROBES, *MANY_RANKS_ONLY)
        ],
    )
    assert [(result.probe, result.fault) for result in results if result.fault] == []
    named = {figure.name for result in results for figure in result.figures}
    expected = {
        "runs that agree",
        "hidden / bound",
        "forward",
        "down",
        "fsdp2, all of them: step",
        "fsdp2, fused: step",
    }
    assert expected | {"copy out", "cpu bf16-stochastic", "fused 64: forward", "0 busy", "beside / alone"} <= named


def test_a_part_of_a_test_runs_in_a_process_of_its_own():
    [step] = open_questions.measure_streams("cpu")
    assert step.name == "8 queues: step"
    assert step.value > 0


def test_a_rank_that_hangs_is_looked_at_by_py_spy():
    pipes, stack = open_questions.measure_hang("cpu")
    assert (pipes.name, pipes.value) == ("pipes", 0)  # gloo has no flight recorder
    assert re.fullmatch(r"py-spy: in \w+, line \d+", stack.name)
    assert stack.value >= 2


def test_two_ranks_learn_the_same_on_each_axis():
    for results in run_ranks(2, _measured, MESH_PROBES):
        assert [(result.probe, result.fault) for result in results if result.fault] == []
        assert {figure.name for result in results for figure in result.figures} == {
            "losses apart by",
            "step",
            "step by FSDP",
        }


def test_a_mesh_that_learns_something_else_is_told(monkeypatch):
    from llama405b.bench import steps

    losses = iter([([2.0, 1.0], 0.1), ([2.0, 1.1], 0.1), ([2.0, 1.0], 0.1), ([2.0, float("nan")], 0.1)])
    monkeypatch.setattr(steps, "_take_mesh_steps", lambda *_: next(losses))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"the losses are \[2.0, "):
            steps.tp(None)


def test_whole_runs_agree_with_those_that_do_without(tmp_path, cli):
    """All but FSDP1, which needs a GPU; the others run on the stand-in for CUDA."""
    tests = ("resume", "packed", "fsdp1")
    done = cli(tmp_path, "bench", "--tests", ",".join(tests))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^(\w+) +passed, .*: runs that agree (\d)", done.stdout, re.MULTILINE) == [
        ("resume", "2"),
        ("packed", "3"),
    ]


@pytest.mark.parametrize(
    "forks", [True, False]
)  # an import may have initialized CUDA, which then is of no use in a fork
def test_a_whole_run_ends_with_its_probe(tmp_path, forks):
    """Which is killed when its time is over."""
    (tmp_path / "sleeper.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)\n")
    program = "from pathlib import Path; from llama405b.bench import runs"
    program += "" if forks else "; runs.torch.cuda.is_initialized = lambda: True"
    program += "; runs._run_module(['sleeper'], Path('log'))"
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    probe = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=env)
    log = tmp_path / "log"
    run = int(wait_for(lambda: log.exists() and log.read_text().strip()))
    probe.kill()
    probe.wait()
    try:
        wait_for(lambda: not Path(f"/proc/{run}").exists() or "Z" in Path(f"/proc/{run}/stat").read_text(), 20)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(run, signal.SIGKILL)


def test_runs_that_differ_or_end_early_are_told():
    assert compare_losses({"a": {1: 2.0, 2: 1.0}, "b": {2: 1.0005}}, 1e-3)[0].value == 2
    with pytest.raises(RuntimeError, match=r"step 2 has loss 1\.100000 with b, but 1\.000000 with a"):
        compare_losses({"a": {1: 2.0, 2: 1.0}, "b": {1: 2.0, 2: 1.1}}, 1e-3)
    with pytest.raises(RuntimeError, match="step 2 has loss nan"):
        compare_losses({"a": {2: 1.0}, "b": {2: float("nan")}}, 1e-3)
    with pytest.raises(RuntimeError, match="b ended after step 1, a after 2"):
        compare_losses({"a": {1: 2.0, 2: 1.0}, "b": {1: 2.0}}, 1e-3)


def test_all_tests_of_a_gpu_fit_into_their_time():
    assert sum(PROBE_INFO[test].usual_s for test in BENCH_PROBES if test not in MANY_RANKS_ONLY) <= 0.95 * 540


def test_one_whose_process_dies_or_takes_too_long_has_failed(tmp_path, cli):
    late = cli(tmp_path, "bench", "--tests", "exact", "--time-limit", "0.2")
    assert late.returncode == 1
    assert "exact         FAILED after 0 s: no result after 0 s; use --parallel.overlap false" in late.stdout
    command = [sys.executable, "-m", "llama405b_tools.cli", "bench", "--tests", "exact,hiding"]
    running = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tools"},
        stdout=subprocess.PIPE,
        text=True,
    )
    os.kill(child_of(running.pid), signal.SIGKILL)
    assert "hiding        FAILED" in running.stdout.readline()
    second = wait_for(lambda: (child := child_of(running.pid)) and has_joined(child) and child)
    os.kill(second, signal.SIGSTOP)  # or it would end by itself, in time
    try:
        running.kill()
        running.communicate(timeout=60)
        wait_for(lambda: not Path(f"/proc/{second}").exists() or "Z" in Path(f"/proc/{second}/stat").read_text(), 20)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(second, signal.SIGKILL)


def test_a_device_that_cannot_be_used_is_said_and_nothing_else_is_tried(tmp_path, cli):
    done = cli(tmp_path, "bench", "--tests", "start,copies", env={"GLOO_SOCKET_IFNAME": "nosuch0"})
    assert done.returncode == 1
    assert re.search("start         FAILED after .* s: .*nosuch0.*; run `llama405b doctor`", done.stdout)
    assert "copies" not in done.stdout


def _collectives(me):
    from llama405b.bench import host

    return [figure.name for figure in host.measure_collectives(me, [1 << 27])]


def test_collectives_are_right_on_any_number_of_ranks():
    assert run_ranks(3, _collectives)[0][2:] == ["reduce-scatter", "all-reduce"]  # whose sum is beyond FP32's integers


def _host_links(me):
    from llama405b.bench import host

    me = dataclasses.replace(me, host="ab"[me.index // 2])  # two ranks on a, one on b
    return host.measure_products(me), host.measure_host_links(me)


def test_every_rank_knows_all_devices_and_links():
    for devices, [link] in run_ranks(3, _host_links):
        assert [device.name for device in devices] == [f"rank {i} (cpu {i})" for i in range(3)]
        assert [device.hosts for device in devices] == [("a",), ("a",), ("b",)]
        assert (link.name, link.hosts) == ("a - b", ("a", "b"))
        assert link.value > 0


def child_of(pid):
    """The process in which a test runs, once it has loaded torch: not multiprocessing's own, which does so for a moment."""

    def tests(child):
        of = Path(f"/proc/{child}")
        return "spawn_main" in (of / "cmdline").read_text() and "torch_cpu" in (of / "maps").read_text()

    children = Path(f"/proc/{pid}/task/{pid}/children")
    return wait_for(lambda: next((int(child) for child in children.read_text().split() if tests(child)), 0))


def has_joined(pid):
    """Whether a test's process is connected to its group's store: its pipes are no sockets."""
    with contextlib.suppress(OSError):
        return any(str(fd.readlink()).startswith("socket:") for fd in Path(f"/proc/{pid}/fd").iterdir())


def test_an_update_delays_no_unit_before_it(tmp_path):
    done = benchmark(tmp_path, "overlap", "--unit-ms", "2", "--steps", "1", "--trace", "t.json", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [(case["backward"], case["update"]) for case in report["cases"][-1:]] == [(3.0, 2.0)]
    assert all(case["step_ratio"] > 0 for case in report["cases"])
    spans = {kind: [[] for _ in range(report["units"])] for kind in ("forward", "backward", "update")}
    for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]:
        spans[event["cat"]][event["args"]["unit"]].append((event["ts"], event["ts"] + event["dur"]))
    updated = [updates[0][1] for updates in spans["update"]]  # when each unit's first update had ended
    began = [forwards[1][0] for forwards in spans["forward"]]  # when its forward in the next step began
    assert all(update <= forward for update, forward in zip(updated, began, strict=True))
    before_the_next = sum(forward < later for forward, later in zip(began, updated[1:], strict=False))
    assert before_the_next > len(began) / 2  # a busy machine may be late; who waits for later updates always is


@pytest.mark.parametrize(
    ("what", "ratio"), [(["step"], "ours / by hand"), (["optimizer", "--elements", "65536"], "update / triad")]
)
def test_a_step_and_the_optimizer_are_measured_beside_their_baselines(tmp_path, what, ratio):
    done = benchmark(tmp_path, *what, "--pairs", "1", timeout=120)
    assert done.returncode == 0, done.stderr
    assert ratio in done.stdout


def test_what_saves_cost_is_measured_beside_training_and_in_turn(tmp_path):
    done = benchmark(tmp_path, "checkpoint", "--gb", "0.02", "--saves", "1", "--dir", tmp_path, "--json", timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert [case["share"] for case in report["cases"]] == [0.5, 4.0]
    assert all(case["step_s"] > 0 for case in report["cases"])
    assert all({"in_turn_s", "beside_s"} <= set(case) for case in report["cases"])  # one save's may be below the noise
    assert report["bytes_per_s"] > 0
    assert [path for path in tmp_path.iterdir() if "bench-checkpoint" in path.name] == []


@pytest.mark.parametrize(
    "args",
    [["overlap", "--unit-ms", "0"], ["optimizer", "--pairs", "0"], ["step", "--pairs", "-1"]],
)
def test_a_number_out_of_range_is_refused(tmp_path, args):
    done = benchmark(tmp_path, *args)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert args[1] in done.stderr


def test_the_interval_of_a_median_is_of_order_statistics():
    found = ratio_of([float(i) for i in range(1, 21)], [1.0] * 20)
    assert (found.median, found.low, found.high) == (10.5, 6, 15)
