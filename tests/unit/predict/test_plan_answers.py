"""``llama405b plan``: other machines, what a search tries, what saves and failures cost, and what JSON says beside the numbers."""

import json
import re

import pytest

from conftest import ROOT
from llama405b.contract.errors import EXIT_OK, EXIT_UNFIT, UserError
from llama405b.predict.hardware import GIB
from llama405b.settings import command, config
from llama405b.settings.config import PRESET_DIR
from llama405b_tools.verbs import predict

pytestmark = pytest.mark.slow
LARGE = ["--preset", "llama3.1-405b", "--nodes", "8"]


def asked(capsys, *words):
    code = predict.main([*words, "--verbose"])
    return code, capsys.readouterr().out


def record(capsys, *words):
    return json.loads(asked(capsys, *words, "--json")[1])


def line(out, begins):
    return next(each for each in out.splitlines() if each.startswith(begins))


def test_other_machines_hold_the_batch_or_say_what_it_became(capsys):
    words = [*LARGE, "--what-if", "nodes=4,12,16"]
    found = record(capsys, *words)["what_if"]
    assert [each["inputs"]["global_batch_size"] for each in found.values()] == [64, 96, 128]
    out = asked(capsys, *words)[1]
    assert line(out, "  nodes=16: ") == (
        "  nodes=16: --training.global_batch_size 128, as 64 sequences do not divide into micro-batches of 1 on its 128 ranks"
    )
    assert "  nodes=4: " not in out
    typed = record(capsys, *LARGE[:2], "--nodes", "12", "--training.global_batch_size", "96")
    assert found["nodes=12"] == {name: typed[name] for name in found["nodes=12"]}


def test_other_machines_are_shown_with_ranges_and_cost(capsys):
    words = [*LARGE, "--tokens", "1e9", "--price", "2.5"]
    out = asked(capsys, *words, "--what-if", "nodes=4")[1]
    row = line(out, "  nodes=4 ")
    alone = asked(capsys, *LARGE[:2], "--nodes", "4", *words[4:])[1]
    sizes = re.search(r"^GPU memory +([\d.]+) GiB allocated / ([\d.]+) reserved", alone, re.MULTILINE).groups()
    assert f"  {float(sizes[0]):.0f} / {float(sizes[1]):.0f}  " in row
    for title in ("step", "1,000,000,000 tokens:"):
        shown = line(alone, title).removeprefix(title).strip().partition(")")[0]
        assert f"{shown})" in row
    cost = line(alone, "1,000,000,000 tokens:").partition("GPU-hours, ")[2].partition(" at ")[0]
    assert cost in row


def test_a_directory_is_a_model(capsys, tmp_path):
    shape = json.loads((PRESET_DIR / "architectures.json").read_text())["llama3.1-8b"]
    (tmp_path / "config.json").write_text(json.dumps(shape | {"model_type": "llama"}))
    found = record(capsys, "--model.path", str(tmp_path))
    assert found["gpu_bytes"] == record(capsys, "--preset", "llama3.1-8b", "--optimizer.lr", "1e-4")["gpu_bytes"]
    with pytest.raises(UserError, match=r"--model.path: /nowhere has no config\.json"):
        predict.main(["--model.path=/nowhere"])


@pytest.mark.parametrize(("short", "name"), [("h100", "h100-80"), ("H200", "h200-141"), ("gb200", "gb200-186")])
def test_a_short_name_is_that_of_the_usual_gpu(capsys, short, name):
    out = asked(capsys, *LARGE, "--gpu", short)[1]
    assert f"assumed      --gpu {short} is {name}" in out
    with pytest.raises(UserError, match=r"--gpu: 'h10-80' is not known \(did you mean 'h100-80'\?\); use one of "):
        predict.main([*LARGE, "--gpu", "h10-80"])
    compared = record(capsys, *LARGE, "--what-if", f"gpu={short}")["what_if"]
    assert compared[f"gpu={name}"]["inputs"]["gpu"] == name


def test_another_gpu_is_compared_with_its_own_best_settings(capsys):
    """P5: with the settings of an H100, an H200 was worth 2 %."""
    words = [*LARGE, "--nodes", "8", "--what-if", "gpu=h200-141", "ram=3000GiB"]
    found = record(capsys, *words)
    there = found["what_if"]["gpu=h200-141"]
    assert (found["settings"]["offload"], there["settings"]["offload"], there["fits"]) == ("all", "none", "yes")
    assert 1.02 < there["tokens_per_s"] / found["tokens_per_s"] < 1.2
    assert found["what_if"]["ram=3000GiB"]["settings"] == found["settings"]
    assert "\n  gpu=h200-141: 8 x 8, no offload" in asked(capsys, *words)[1]


def test_hosts_have_as_many_gpus_as_such_hosts_have(capsys, tmp_path):
    words = [*LARGE, "--gpu", "gb200-186"]
    found = record(capsys, *words)["inputs"]
    assert (found["slots"], found["nic_bytes_per_s"]) == (4, 4 * 50e9)
    assert record(capsys, *words, "--slots", "8")["inputs"]["slots"] == 8
    compared = record(capsys, *LARGE, "--what-if", "gpu=gb200-186")["what_if"]["gpu=gb200-186"]
    assert compared["inputs"] == found
    own = tmp_path / "own.toml"
    text = "[gpu.mine]\nmemory_gib = 80\ntflops = 989\nhbm_gb_s = 1\nnvlink_gb_s = 1\npcie_gb_s = 1\n"
    own.write_text(f"{text}gpus_per_host = 2\n")
    mine = [*LARGE, "--hardware", str(own), "--gpu", "mine"]
    assert record(capsys, *mine)["inputs"]["slots"] == 2
    own.write_text(f"{text}gpus_per_host = 0\n")
    with pytest.raises(UserError, match="gpus_per_host is 0; write"):
        predict.main(mine)


def test_a_search_tries_every_micro_batch_that_divides_the_step(capsys):
    found = record(capsys, *LARGE, "--training.global_batch_size", "1152", "--search")["search"]
    assert {each["settings"]["micro_batch_size"] for each in found if not is_untried(each)} == {1, 2, 3, 6, 9, 18}


@pytest.mark.parametrize(("beta", "moments"), [("0.95", {"fp32", "bf16"}), ("0.999", {"fp32"})])
def test_a_search_tries_moments_that_the_trainer_takes(capsys, beta, moments):
    found = record(capsys, *LARGE, "--optimizer.betas", f"0.9,{beta}", "--search")["search"]
    assert {each["settings"].get("moments") for each in found} == moments
    assert {each["settings"]["offload"] for each in found if each["settings"].get("moments") == "bf16"} <= {
        "optimizer",
        "all",
    }


def is_untried(found):
    settings = found["settings"]
    return (
        found["mesh"]["dp_shard"] < 64
        or settings["strategy"] != "fsdp2"
        or settings["activation_checkpointing"] != "full"
    )


def test_of_settings_as_fast_the_one_with_most_room_is_first(capsys):
    words = [*LARGE, "--ram", "2000GiB", "--search"]
    ranked = record(capsys, *words)["search"]
    fits = [each for each in ranked if each["fits"] == "yes" and not is_untried(each)]
    fastest = max(each["tokens_per_s"] for each in fits)
    near = [each for each in fits if each["tokens_per_s"] >= 0.967 * fastest]
    assert fits[: len(near)] == near
    rounded = [each["settings"]["moments"] == "bf16" for each in near]
    assert rounded == sorted(rounded)
    plain = [
        max(each["gpu_reserved_bytes"] / (80 * GIB), each["host_bytes"] / (2000 * GIB))
        for each in near[: rounded.count(False)]
    ]
    assert plain == sorted(plain)
    assert plain[0] < plain[-1]
    assert fits[0]["tokens_per_s"] < fastest
    unseen = record(capsys, "--preset", "llama3.1-8b", "--search")["search"]
    assert unseen[0]["settings"]["offload"] == "none"  # nobody knows whether a host has room
    note = asked(capsys, *words)[1].splitlines()[-2]
    assert note.startswith(
        f"  the first {len(near)} are within 3.3% of the fastest, too close for a prediction to tell apart"
    )


def test_copies_take_what_is_free_and_the_rest_waits(capsys):
    roomy, tight = (record(capsys, *LARGE, "--ram", ram) for ram in ("2000GiB", "1000GiB"))
    wanted = roomy["saving"]["staged_bytes"]
    free = 0.8 * (1000 * GIB - tight["host_bytes"])
    assert tight["saving"]["staged_bytes"] == pytest.approx(free)
    assert tight["saving"]["waits_s"] - roomy["saving"]["waits_s"] == pytest.approx((wanted - free) / 5e9)
    said = line(asked(capsys, *LARGE, "--ram", "1000GiB")[1], "saving")
    assert "host memory has room for 167 of the 442 GiB of copies (80% of what is free)" in said


def test_copies_of_a_size_that_was_set_are_counted(capsys):
    words = [*LARGE, "--ram", "1000GiB", "--checkpoint.staging"]
    code, out = asked(capsys, *words, "400GB")
    assert (code, "of 1,000 GiB: DOES NOT FIT" in out) == (EXIT_UNFIT, True)
    assert "copies while saving 372.5" in line(out, "host memory")
    found = record(capsys, *words, "0")
    assert (found["fits"], found["saving"]["staged_bytes"]) == ("yes", 0)
    assert found["saving"]["waits_s"] > record(capsys, *words, "auto")["saving"]["waits_s"]


def test_days_and_cost_include_saves_and_failures(capsys):
    words = [*LARGE, "--tokens", "1e9", "--price", "2"]
    often, rarely = (record(capsys, *words, "--checkpoint.mtbf", hours) for hours in ("100", "100000"))
    assert often["tokens_per_s"] == rarely["tokens_per_s"]
    assert often["gpu_hours"] > 1.2 * rarely["gpu_hours"]
    assert often["cost"] == pytest.approx(2 * often["gpu_hours"])
    assert often["gpu_hours"] == pytest.approx(64 * 1e9 / often["tokens_per_s"] / often["goodput"]["share"] / 3600)
    best = record(capsys, *words, "--checkpoint.mtbf", "100", "--checkpoint.every", "auto")
    assert best["goodput"]["share"] > often["goodput"]["share"]
    out = asked(capsys, *words, "--checkpoint.mtbf", "100", "--checkpoint.every", "10m")[1]
    assert line(out, "goodput").endswith("failures, one in 93.8 min (checkpoint.mtbf), 10.6%")
    assert "saves, every 10.0 min of training, take 2.0%" in line(out, "goodput")


def test_a_run_that_gets_nowhere_is_said_so(capsys):
    words = [*LARGE, "--tokens", "1e9", "--price", "2", "--checkpoint.every"]
    code, out = asked(capsys, *words, "0", "--checkpoint.mtbf", "100")
    assert (code, line(out, "1,000,000,000 tokens")) == (
        EXIT_OK,
        "1,000,000,000 tokens: never: failures undo steps as fast as they are made",
    )
    assert record(capsys, *words, "0", "--checkpoint.mtbf", "1e-6")["gpu_hours"] is None
    unsaved = record(capsys, *words, "0")
    assert unsaved["goodput"]["interval_s"] == pytest.approx(1e9 / unsaved["tokens_per_s"])


def test_a_price_without_tokens_is_that_of_a_day_and_a_step(capsys):
    out = asked(capsys, *LARGE, "--price", "2.5")[1]
    assert line(out, "cost") == "cost         3,840 a day, 1.2 (1.0 to 1.7) a step, at 2.5 a GPU-hour"
    assert record(capsys, *LARGE, "--price", "2.5")["cost_per_day"] == 3840


@pytest.mark.slow
def test_the_page_shows_what_is_printed(capsys):
    text = (ROOT / "docs/plan.md").read_text()
    blocks = re.findall(r"^```\n\$ llama405b plan (.*?)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    for words, shown in blocks:
        predict.main(words.split())
        assert shown == capsys.readouterr().out


def test_the_questions_of_the_page_are_commands(capsys):
    text = (ROOT / "docs/plan.md").read_text().partition("## Questions")[2].partition("\n## ")[0]
    commands = re.findall(r"^\| .* \| `llama405b plan (.*?)` \|$", text, re.MULTILINE)
    assert len(commands) == 10
    for words in commands:
        settings, rest = config.split_flags(words.split())
        args = predict.plan_parser("").parse_args(rest)
        command.parse([*settings, "--preset", args.preset, "--data.paths=stdlib"])


def test_json_says_what_it_is_of_and_in_which_units(capsys):
    counts = {"schema", "nodes", "slots", "parameters", "layers", "keep", "tokens"}
    found = record(capsys, *LARGE, "--tokens", "1e9", "--price", "2", "--search", "--what-if", "nodes=4")
    units = found.pop("units")

    def bare(record, unit=False):
        """Names of numbers without a unit."""
        for name, value in record.items():
            has = unit or any(name.endswith(end) for end in units)
            if isinstance(value, dict):
                yield from bare(value, has)
            elif isinstance(value, list):
                yield from (each for item in value if isinstance(item, dict) for each in bare(item))
            elif isinstance(value, int | float) and not isinstance(value, bool) and not has:
                yield name

    assert {*bare(found)} <= counts
    assert found["schema"] == 2
    inputs = found["inputs"]
    assert [inputs[name] for name in ("nodes", "slots", "gpu", "seq_len", "tokens", "price")] == [
        8,
        8,
        "h100-80",
        4096,
        1e9,
        2,
    ]
    assert found["what_if"]["nodes=4"]["inputs"]["nodes"] == 4
    assert all(each["inputs"] for each in found["search"])


def test_the_step_of_405b_is_as_the_page_says(capsys):
    text = (ROOT / "docs/memory.md").read_text().partition("## The step of 405B")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| ([\d.]+) s \| (\d+) / (\S+) GiB \| (\d+) GiB \|$", text, re.MULTILINE)
    assert len(rows) == 5
    settings = {}
    for added, step, allocated, kept, host in rows:
        words = re.findall(r"--(\S+) ([^\s`]+)", added)
        settings = dict(words) if "alone" in added else settings | dict(words)
        found = record(
            capsys,
            "--preset",
            "llama3.1-405b",
            "--nodes",
            "8",
            *(f"--{name}={value}" for name, value in settings.items()),
        )
        gib = 1 << 30
        told = f"{found['time']['step_s']:.1f}", f"{found['gpu_bytes'] / gib:.0f}", f"{found['host_bytes'] / gib:.0f}"
        assert told == (step, allocated, host), added
        assert kept == (f"{found['gpu_reserved_bytes'] / gib:.0f}" if found["gpu_reserved_bytes"] else "?"), added


def test_what_adapters_take_is_as_the_page_says(capsys):
    text = (ROOT / "docs/lora.md").read_text().partition("## Memory and time")[2].partition("\n## ")[0]
    rows = re.findall(
        r"^\| (\S+) \| (\d+) \| `(.+?)` \| (\d+) / (\d+) GiB(.*?) \| (\d+|-).*? \| ([\d.]+) s \|$", text, re.MULTILINE
    )
    assert len(rows) == 6
    gib = 1 << 30
    for model, gpus, words, allocated, kept, misfit, host, step in rows:
        slots = min(8, int(gpus))
        split = ("--nodes", str(int(gpus) // slots), "--slots", str(slots), "--adapter.kind", "lora")
        found = record(capsys, "--preset", model, *split, *words.split())
        told = (f"{found[name] / gib:.0f}" for name in ("gpu_bytes", "gpu_reserved_bytes", "host_bytes"))
        assert (*told, f"{found['time']['step_s']:.1f}") == (allocated, kept, host.replace("-", "0"), step), words
        assert (found["fits"] == "yes") == (not misfit)
        assert found["inputs"]["adapter"].startswith("lora of rank 16")
