"""``llama405b plan``: the three questions that users ask, bad input, and what it writes."""

import json
import math
import re
import subprocess
import sys

import pytest

from llama405b.contract.errors import EXIT_FAILED, EXIT_OK, EXIT_UNFIT, UserError
from llama405b.settings import config
from llama405b_tools import plan
from llama405b_tools.verbs import predict

LARGE = ["--preset", "llama3.1-405b"]


def asked(capsys, *words):
    code = predict.main([*words, "--verbose"])
    return code, capsys.readouterr().out


def record(capsys, *words):
    code, out = asked(capsys, *words, "--json")
    return code, json.loads(out)


@pytest.mark.slow
def test_which_settings_on_four_hosts(capsys, tmp_path):
    file = tmp_path / "best.toml"
    words = [*LARGE, "--nodes", "4", "--ram", "2000GiB", "--search"]
    code, out = asked(capsys, *words, "--write", str(file))
    assert code == EXIT_OK
    table = [line.split() for line in out.partition("\n\n")[2].splitlines() if line.startswith("  ")]
    assert table[0][:2] == ["offload", "moments"]
    on_meshes = table.pop()
    ties = int(table.pop()[2]) if table[-1][:2] == ["the", "first"] else 1
    assert on_meshes[:3] == ["fastest", "is", "dp_shard"] or on_meshes[:3] == ["nothing", "tested", "on"]
    table = [row for row in table if "fits," not in row]  # but with a mesh
    assert {row[1] for row in table[1:]} == {"fp32", "bf16"}
    verdicts = [" ".join(row[10:]) for row in table[1:]]
    assert verdicts == sorted(verdicts, key=[*plan.FIT_LABELS.values()].index)
    rates = [
        float(row[9].replace(",", "")) for row, verdict in zip(table[1:], verdicts, strict=True) if verdict == "fits"
    ]
    assert min(rates[:ties]) > 0.967 * max(rates)
    assert rates[ties:] == sorted(rates[ties:], reverse=True)
    written = config.read_toml(file)
    assert set(written) == {*predict.ALWAYS_WRITTEN}  # and no data
    config.resolve(config.read_preset("llama3.1-405b") | written | config.read_flags(["--data.paths=x"]))
    with pytest.raises(UserError, match=r"--write: .*best\.toml exists; name another file"):
        predict.main([*words, "--write", str(file)])
    none = tmp_path / "none.toml"
    assert asked(capsys, *words[:4], "--ram", "100GiB", "--search", "--write", str(none))[0] == EXIT_UNFIT
    assert not none.exists()
    again = record(capsys, "--config", str(file), *words)[1]
    assert [again["settings"]["offload"], str(again["settings"]["micro_batch_size"])] == [table[1][0], table[1][3]]
    assert again["settings"] == again["search"][0]["settings"]


def test_a_model_that_does_not_fit_is_said_so(capsys):
    words = ["--preset", "llama3.1-70b", "--nodes", "2", "--gpu", "a100-40"]
    code, out = asked(capsys, *words)
    assert (code, "of 39.4 GiB: DOES NOT FIT" in out) == (EXIT_UNFIT, True)
    assert record(capsys, *words)[1]["fits"] == "no"
    assert record(capsys, *words, "--parallel.offload", "optimizer", "--ram", "1TiB")[0] == EXIT_OK
    assert record(capsys, *words, "--parallel.offload", "optimizer", "--ram", "300GiB")[0] == EXIT_UNFIT


@pytest.mark.slow
def test_between_allocated_and_reserved_it_is_slower(capsys, tmp_path):
    words = ["--preset", "llama3.1-70b", "--nodes", "4", "--gpu", "a100-80"]
    found = record(capsys, *words)[1]
    gib = 1 << 30
    allocated, reserved = (found[name] / gib for name in ("gpu_bytes", "gpu_reserved_bytes"))
    assert sum(found["gpu_reserved_by_pool_bytes"].values()) == found["gpu_reserved_bytes"] - 2 * gib
    own = tmp_path / "own.toml"

    def on(has):
        sheet = "tflops = 312\nhbm_gb_s = 2000\nnvlink_gb_s = 300\npcie_gb_s = 32\n"
        own.write_text(f"[gpu.mine]\nmemory_gib = {has}\n{sheet}")
        return asked(capsys, *words[:-2], "--hardware", str(own), "--gpu", "mine")

    assert on(reserved + 0.1)[0] == EXIT_OK
    code, out = on(reserved - 0.1)
    assert (code, "GiB: RUNS SLOWER, WITH ALLOCATOR RETRIES" in out, plan.RETRIES_NOTE in out) == (
        EXIT_FAILED,
        True,
        True,
    )
    assert on(allocated + 0.1)[0] == EXIT_FAILED
    code, out = on(allocated - 0.1)
    assert (code, "DOES NOT FIT" in out, plan.RETRIES_NOTE in out) == (EXIT_UNFIT, True, False)


def test_without_a_number_of_hosts_it_is_the_smallest_that_fits(capsys):
    code, out = asked(capsys, "--preset", "llama3.1-405b")
    fewer, fewer_out = asked(capsys, "--preset", "llama3.1-405b", "--nodes", "4")
    assert (code, fewer) == (EXIT_OK, EXIT_OK)
    assert "on 5 x 8 h100-80" in out.splitlines()[0]
    assert "hosts        5, the fewest that fit; on 4: MAY NOT FIT" in out.splitlines()
    assert re.search(r"^host memory  .* of 2,048 GiB: MAY NOT FIT", fewer_out, re.MULTILINE)
    assert "2,048 GiB of RAM a host (--ram)" in fewer_out
    code, out = asked(capsys, "--preset", "llama3.1-405b", "--data.seq_len", "65536", "--gpu", "a100-40")
    assert (code, "hosts        1 assumed; on 64, with these settings: DOES NOT FIT" in out) == (EXIT_UNFIT, True)
    out = asked(capsys, "--preset", "llama3.1-405b", "--ram", "4TiB", "--slots", "4")[1]
    assert "on 3 x 4 h100-80" in out.splitlines()[0]
    assert "RAM a host" not in out
    out = asked(capsys, "--preset", "llama3.1-405b", "--parallel.tp", "8", "--parallel.pp", "3", "--ram", "10GiB")[1]
    assert "hosts        3 assumed; on 63, with these settings: DOES NOT FIT" in out  # which pp divides
    out = asked(capsys, "--preset", "llama3.1-70b", "--search")[1]
    assert "on 1 x 8 h100-80" in out.splitlines()[0]
    assert re.search(r"^  all .* fits$", out, re.MULTILINE)


def test_other_machines_have_their_own_mesh_and_as_many_ranks_the_same_batch(capsys):
    compared = record(capsys, "--preset", "llama3.1-405b", "--what-if", "nic=3200Gb/s")[1]
    [same] = compared["what_if"].values()
    assert (same["mesh"]["dp_shard"], same["time"]) == (40, compared["time"])
    words = ("--preset", "llama3.1-405b", "--gpu", "l40s-48", "--parallel.strategy", "auto", "--nodes", "5")
    compared = record(capsys, *words, "--what-if", "nodes=6")[1]
    meshes = [compared["mesh"], compared["what_if"]["nodes=6"]["mesh"]]
    assert [math.prod(mesh.values()) for mesh in meshes] == [40, 48]
    compared = record(capsys, "--preset", "llama3.1-405b", "--gpus", "64", "--what-if", "nodes=4")[1]
    assert compared["what_if"]["nodes=4"]["mesh"]["dp_shard"] == 32
    words = ("--preset", "llama3.1-8b", "--gpus", "64", "--what-if", "gpu=gb200-186", "slots=4")
    assert {each["mesh"]["dp_shard"] for each in record(capsys, *words)[1]["what_if"].values()} == {64}


def test_adapters_of_large_ranks_take_time(capsys):
    words = ("--preset", "llama3.1-8b", "--nodes", "1", "--adapter.kind", "lora", "--adapter.rank")
    found = {rank: record(capsys, *words, str(rank))[1] for rank in (16, 64, 2048, 4096)}
    steps = {rank: each["time"]["step_s"] for rank, each in found.items()}
    assert steps[64] == pytest.approx(steps[16], rel=0.01)
    assert steps[4096] > 1.4 * steps[2048] > 1.8 * steps[16]
    assert all(each["mfu"] < 0.4 for each in found.values())
    with pytest.raises(UserError, match=r"--adapter.rank: 4,097 is above the model's hidden size, 4,096; lower it"):
        asked(capsys, *words, "4097")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ("12", "not as predicted: 2.69 of"),
        ("5", "as predicted: 1.12 of"),
        ("3", "not as predicted: 0.67 of"),
        ("1", ""),
    ],
)
def test_a_measured_step_is_compared_with_the_range(capsys, seconds, words):
    out = asked(capsys, "--preset", "llama3.1-8b", "--nodes", "1", "--measured", seconds)[1]
    [line] = [line for line in out.splitlines() if line.startswith(("compared", "IMPOSSIBLE"))]
    assert line.startswith(f"compared     {seconds} s a step, {words} 4.5 (" if words else "IMPOSSIBLE   a step of 1 s")


@pytest.mark.parametrize(
    ("tokens", "took"),
    [
        ("1e6", r"[\d.]+ \(.*\) s"),
        ("4e7", r"[\d.]+ \(.*\) min"),
        ("3e9", r"[\d.]+ \(.*\) h"),
        ("1e11", r"[\d.]+ \(.*\) days"),
    ],
)
def test_a_total_is_told_in_the_unit_that_suits_it(capsys, tokens, took):
    out = asked(capsys, "--preset", "llama3.1-8b", "--nodes", "1", "--tokens", tokens)[1]
    assert re.search(rf"^{float(tokens):,.0f} tokens: {took}, [\d,]+ GPU-hours", out, re.MULTILINE)


def test_what_is_reserved_in_fp32_is_not_known(capsys):
    words = ["--preset", "llama3.1-8b", "--nodes", "1", "--parallel.numerics", "fp32"]
    assert record(capsys, *words)[1]["gpu_reserved_bytes"] is None
    [line] = [line for line in asked(capsys, *words)[1].splitlines() if line.startswith("GPU memory")]
    assert re.match(
        r"GPU memory   [\d.]+ \([\d.]+ to [\d.]+\) allocated of 79.1 GiB: fits, 44.0 to spare; ", line
    )  # 1.3 x 27.0


@pytest.mark.slow
def test_what_a_billion_tokens_cost(capsys):
    words = [*LARGE, "--nodes", "8", "--tokens", "1e9"]
    found = record(capsys, *words)[1]
    hours = 64 * 1e9 / found["tokens_per_s"] / 3600
    assert found["gpu_hours"] == pytest.approx(hours / found["goodput"]["share"])
    out = asked(capsys, *words, "--price", "2")[1]
    [line] = [line for line in out.splitlines() if line.startswith("1,000,000,000 tokens: ")]
    cost = float(line.partition("GPU-hours, ")[2].split()[0].replace(",", ""))
    assert cost == pytest.approx(2 * found["gpu_hours"], rel=0.01)


@pytest.mark.parametrize("name", sorted({*config.preset_names()} - {"demo"}))
def test_the_comments_of_presets_are_predictions(capsys, name):
    comment = (config.PRESET_DIR / f"{name}.toml").read_text().splitlines()[1]
    words = re.match(r"# `llama405b plan (--preset \S+ --nodes (\d+))`: ", comment)
    found, gib = record(capsys, *words[1].split())[1], 1 << 30
    ram = f", {found['host_bytes'] / gib:,.0f} GiB of each host's memory" if found["host_bytes"] else ""
    sizes = f"{found['gpu_bytes'] / gib:,.0f} GiB allocated and {found['gpu_reserved_bytes'] / gib:,.0f} reserved"
    told = f"{sizes} of each of {8 * int(words[2])} H100s{ram}"
    assert comment == f"{words[0]}{told}, about {found['time']['step_s']:.0f} s a step."


def test_what_is_impossible_is_named(capsys):
    words = [*LARGE, "--nodes", "8", "--measured"]
    assert "a step of 4.1 s: the model's FLOPs take 10.2 s" in asked(capsys, *words, "4.1")[1]
    assert "IMPOSSIBLE" not in asked(capsys, *words, "30")[1]


def test_more_of_a_machine_is_never_slower_or_smaller(capsys):
    def found(*more):
        return record(capsys, *LARGE, "--nodes", "8", *more)[1]

    slow, fast = found("--nic", "400Gb/s"), found("--nic", "400GB/s")
    assert slow["time"]["step_s"] > fast["time"]["step_s"]
    assert found("--gpu", "h200-141")["time"]["step_s"] < found()["time"]["step_s"]
    assert found("--data.seq_len", "8192")["gpu_bytes"] > found()["gpu_bytes"]
    quick, plain = (found("--disk", disk) for disk in ("50GB/s", "5GB/s"))
    assert plain["loading"]["local_s"] == 10 * quick["loading"]["local_s"]
    assert plain["loading"]["rank0_s"] > quick["loading"]["rank0_s"]
    assert plain["saving"]["staged_bytes"] > quick["saving"]["staged_bytes"] == 0
    assert plain["saving"]["best_interval_s"] > quick["saving"]["best_interval_s"]


def test_smaller_units_take_more_and_smaller_collectives(capsys):
    few, many = (
        record(capsys, *LARGE, "--nodes", "64", "--training.global_batch_size", "512", "--parallel.fsdp_unit", unit)[1][
            "time"
        ]
        for unit in ("layer", "sublayer")
    )
    assert few["communication_s"] < many["communication_s"] < 1.2 * few["communication_s"]


@pytest.mark.slow
def test_what_helps_most_is_said_first(capsys):
    words = [*LARGE, "--nodes", "8", "--parallel.offload", "none", "--parallel.numerics", "pure-bf16"]
    lines = asked(capsys, *words)[1].splitlines()
    [first] = [line for line in lines if line.startswith("try ")]
    assert first == "try          --parallel.offload all: +0% a GPU, 42 / 57 GiB, 396 a host"
    wrap = ["--parallel.wrap", "LlamaAttention,LlamaMLP,Embedding"]
    code, found = record(capsys, *words, *wrap)
    sizes = [round(found[name] / (1 << 30)) for name in ("gpu_bytes", "gpu_reserved_bytes")]
    assert (code, found["fits"], sizes) == (EXIT_FAILED, "retries", [69, 83])
    small = ["--preset", "llama3.1-70b", "--nodes", "2", "--gpu", "a100-40"]
    [other] = [line for line in asked(capsys, *small)[1].splitlines() if "--parallel.offload all: " in line]
    away, there = (record(capsys, *small, "--parallel.offload", place)[1]["tokens_per_s"] for place in ("all", "none"))
    assert f"offload all: {round(100 * (away / there - 1)):+d}% a GPU, " in other
    large = [*LARGE, "--nodes", "4", "--ram", "4000GiB", "--gpu", "h200-141"]
    change = "--training.micro_batch_size 2"
    [best] = [line for line in asked(capsys, *large)[1].splitlines() if f"{change}: " in line]
    gain = int(re.search(rf"{change}: \+(\d+)% a GPU, ", best)[1])
    one, two = (record(capsys, *large, *more)[1]["tokens_per_s"] for more in ([], change.split()))
    assert round(100 * (two / one - 1)) == gain


@pytest.mark.slow
def test_a_larger_batch_has_a_line_of_its_own(capsys):
    [line] = [line for line in asked(capsys, *LARGE, "--nodes", "8")[1].splitlines() if line.startswith("batch 128 ")]
    flags, step_s, gain = re.fullmatch(
        r"batch 128    (--.*): ([\d.]+) s per 262,144 tokens \(\+(\d+)%\)", line
    ).groups()
    before = record(capsys, *LARGE, "--nodes", "8")[1]
    code, larger = record(capsys, *LARGE, "--nodes", "8", "--training.global_batch_size", "128", *flags.split())
    assert (code, larger["fits"]) == (EXIT_OK, "yes")
    assert float(step_s) == pytest.approx(larger["time"]["step_s"] / 2, abs=0.05)
    assert int(gain) == round(100 * (larger["tokens_per_s"] / before["tokens_per_s"] - 1))
    # A rank with several micro-batches needs no larger batch, and one whose memory is full has no room.
    for more in (["--training.global_batch_size", "128"], ["--parallel.offload", "none"]):
        assert "\nbatch " not in asked(capsys, *LARGE, "--nodes", "8", *more)[1]


@pytest.mark.slow
def test_other_machines_are_compared(capsys):
    batch = ["--training.global_batch_size", "768"]
    words = [*LARGE, *batch, "--nodes", "8", "--what-if", "nodes=12,16", "gpu=h200-141"]
    found = record(capsys, *words)[1]
    assert list(found["what_if"]) == ["nodes=12", "nodes=16", "gpu=h200-141"]
    assert (
        found["what_if"]["nodes=16"]["tokens_per_s"]
        > found["what_if"]["nodes=12"]["tokens_per_s"]
        > found["tokens_per_s"]
    )
    rows = [line.split() for line in asked(capsys, *words)[1].partition("\n\n")[2].splitlines()]
    assert [row[0] for row in rows] == ["what", "as", "nodes=12", "nodes=16", "gpu=h200-141", "gpu=h200-141:", "days"]
    assert (
        record(capsys, *LARGE, *batch, "--nodes", "12")[1]["tokens_per_s"]
        == found["what_if"]["nodes=12"]["tokens_per_s"]
    )


def test_a_gpu_of_the_users_own(capsys, tmp_path):
    file = tmp_path / "own.toml"
    file.write_text("[gpu.mine]\nmemory_gib = 1000\ntflops = 989\nhbm_gb_s = 3350\nnvlink_gb_s = 450\npcie_gb_s = 55\n")
    own = ["--hardware", str(file), "--gpu", "mine", "--parallel.offload", "none"]
    assert record(capsys, *LARGE, "--nodes", "8", *own)[0] == EXIT_OK
    file.write_text("[gpu.mine]\nmemory_gib = 1000\n")
    with pytest.raises(UserError, match=r"--hardware: .*own\.toml: 'tflops'; write \[gpu\.NAME\] with the fields of "):
        predict.main([*LARGE, *own])


@pytest.mark.parametrize("number", ["0", "-1", "nan", "inf", '"fast"', "[1]"])
def test_hardware_that_cannot_be(tmp_path, number):
    file = tmp_path / "own.toml"
    file.write_text(f"[gpu.mine]\nmemory_gib = 80\ntflops = {number}\nhbm_gb_s = 1\nnvlink_gb_s = 1\npcie_gb_s = 1\n")
    with pytest.raises(UserError, match=r"--hardware: .*own\.toml: .*write \[gpu\.NAME\] with the fields of "):
        predict.main([*LARGE, "--hardware", str(file), "--gpu", "mine"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "plan: which model\\? add --preset, --model.path, or --config"),
        ([*LARGE, "--gpu", "a100"], "--gpu: 'a100' is ambiguous; use a100-80 or a100-40"),
        ([*LARGE, "--ram", "lots"], "--ram: 'lots' is not a number with GiB or TiB or GB or TB; correct it"),
        ([*LARGE, "--nic", "400"], "--nic: '400' is not a number with Gb/s or GB/s; correct it"),
        ([*LARGE, "--nodes", "0"], "--nodes: 0 is out of range; use 1 to 99999"),
        ([*LARGE, "--tokens", "-1"], "--tokens: '-1' is not a number of tokens; write 1e9, 500M or 1.5B"),
        ([*LARGE, "--tokens", "1 apple"], "--tokens: '1 apple' is not a number of tokens"),
        ([*LARGE, "--gpus", "12"], "--gpus: 12 is not 1 host of 8; correct --gpus, --nodes or --slots"),
        (
            [*LARGE, "--gpus", "64", "--nodes", "7"],
            "--gpus: 64 is not 7 hosts of 9; correct --gpus, --nodes or --slots",
        ),
        ([*LARGE, "--gpus", "0"], "--gpus: 0 is out of range"),
        ([*LARGE, "--write", "a.toml"], "--write needs --search; add it"),
        ([*LARGE, "--training.micro_batch_size", "3"], "global_batch_size: 64 sequences cannot be divided"),
        ([*LARGE, "--what-if", "hosts=3"], "--what-if: 'hosts=3' is not a change; use nodes=N, "),
        ([*LARGE, "--what-if", "nodes=0"], "--what-if: 'nodes=0' is not a change; use nodes=N, "),
        (["--preset", "llama3.1-70b", "--serach"], "--serach"),
        (
            ["--preset", "llama3.1-8b", "--parallel.strategy", "fsdp1"],
            "--parallel.strategy: plan does not predict fsdp1; use fsdp2",
        ),
        ([*LARGE, "--calibrate"], "--calibrate: measures on hosts; name a hosts file"),
        (
            ["--preset", "llama3.1-8b", "--parallel.device", "cpu"],
            "no data sheet tells how fast a CPU trains; measure it",
        ),
        ([*LARGE, "--disk", "fast"], "--disk: 'fast' is not a number with Gb/s or GB/s; correct it"),
        ([*LARGE, "--disk", "9" * 400 + "GB/s"], "--disk: '9+GB/s' is not a number"),
        ([*LARGE, "--ram", ".GiB"], "--ram: '.GiB' is not a number with GiB or TiB or GB or TB; correct it"),
        ([*LARGE, "--nodes", "9" * 400], "--nodes: 9+ is out of range; use 1 to 99999"),
        ([*LARGE, "--tokens", "1e308"], "--tokens: 1e\\+308 is out of range"),
        ([*LARGE, "--what-if", "nodes=" + "9" * 5000], "--what-if: 'nodes=9+' is not a change; use nodes=N, "),
        (
            [*LARGE, "--model.layers", "1000000"],
            "--model.layers: 1000000, but llama3.1-405b has 126; lower it, or omit it",
        ),
        ([*LARGE, "--search", "--write", f"{__file__}/a.toml"], "--write: .*.py is no directory; make it, or name"),
        pytest.param(
            [*LARGE, "--search", "--write", "a" * 300], "--write: a+ cannot be written", marks=pytest.mark.slow
        ),
        ([*LARGE, "--what-if", "gpu=a100"], "--gpu: 'a100' is ambiguous; use a100-80 or a100-40"),
    ],
)
def test_bad_input(words, message):
    with pytest.raises(UserError, match=message):
        predict.main(words)


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (["--gpus", "64"], ["--nodes", "8"]),
        (["--gpus", "4"], ["--nodes", "1", "--slots", "4"]),
        (["--gpus", "16", "--nodes", "4"], ["--nodes", "4", "--slots", "4"]),
        (["--gpus", "16", "--slots", "4"], ["--nodes", "4", "--slots", "4"]),
        (["--gpus", "16", "--gpu", "gb200"], ["--nodes", "4", "--gpu", "gb200"]),
        (["--tokens", "1.5B"], ["--tokens", "1.5e9"]),
        (["--tokens", "2t"], ["--tokens", "2_000_000_000_000"]),
        (["--ram", "2TB"], ["--ram", "2000GB"]),
    ],
)
def test_machines_and_tokens_as_they_are_called(capsys, words, same):
    small = ["--preset", "llama3.1-8b"]
    assert record(capsys, *small, *words) == record(capsys, *small, *same)


@pytest.mark.slow
def test_it_needs_no_torch():
    code = f"import sys; from llama405b_tools.verbs import predict; predict.main({LARGE!r}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


@pytest.mark.slow
def test_a_plan_tells_what_is_known_to_go_wrong_with_the_versions(capsys, monkeypatch):
    monkeypatch.setattr(
        predict, "package_version", lambda package: {"torch": "2.15.0"}.get(package, "missing"), raising=False
    )
    out = asked(capsys, *LARGE, "--nodes", "8", "--parallel.offload", "optimizer")[1]
    assert (
        "\nknown bug    torch 2.15.0 keeps the FP32 gradients of every unit on the GPU until the backward ends: " in out
    )
    assert "FP32 gradients of every unit" not in asked(capsys, *LARGE, "--nodes", "8", "--parallel.offload", "all")[1]


def test_a_model_of_the_hub_that_is_not_here_is_answered_with_its_download():
    with pytest.raises(
        UserError, match=r"run `llama405b download o/m`, which writes models/m, or add the --preset of its"
    ):
        predict.main(["--model.path", "o/m", "--nodes", "1"])


@pytest.mark.parametrize("more", [[], ["--search"]])
def test_sequences_beyond_the_model_s_positions_are_refused(more):
    with pytest.raises(UserError, match=r"--data\.seq_len: 131073 exceeds the model's limit of 131072 positions"):
        predict.main(["--preset", "llama3.2-1b", "--nodes", "1", "--data.seq_len", "131073", *more])
