"""``llama405b plan``: its first screen, and machines and methods compared by time and money."""

import dataclasses
import json
import math
import re

import pytest

from llama405b.contract.errors import EXIT_FAILED, EXIT_OK, EXIT_UNFIT, UserError
from llama405b.predict import offers
from llama405b.predict.estimate import ASSUMED_RAM_BYTES, Cluster
from llama405b.predict.hardware import read_gpus
from llama405b.predict.offers import Offer, Timing
from llama405b.predict.run_shape import PredictedRun
from llama405b.predict.search import Fit, Prediction, remedies
from llama405b.settings.config import PRESET_DIR
from llama405b.spec.models import parse_llama
from llama405b_tools.plan import MAX_SUMMARY_LINES, WIDTH
from llama405b_tools.verbs import predict

SHAPES = json.loads((PRESET_DIR / "architectures.json").read_text())
LARGE, MIDDLE, SMALL = (["--preset", f"llama3.1-{size}"] for size in ("405b", "70b", "8b"))
PRICES = "h100-80=2.5,h200-141=3.2,b200-180=5"


def asked(capsys, *words):
    code = predict.main(words)
    return code, capsys.readouterr().out.splitlines()


def run_of(model, **changes):
    return PredictedRun(parse_llama(SHAPES[model], model), "fp32-master", **{"offload": "none", "world": 8} | changes)


def on(gpu, run):
    return Prediction.from_run(run, Cluster(read_gpus()[gpu]), ASSUMED_RAM_BYTES)


SCREENS = {
    "the fewest hosts": LARGE,
    "tokens and a price": [*LARGE, "--nodes", "8", "--tokens", "15e9", "--price", "2.25"],
    "a batch that leaves ranks idle": [*LARGE, "--nodes", "16", "--data.seq_len", "8192", "--tokens", "1e9", "--price", "2"],
    "too long": [*LARGE, "--nodes", "16", "--data.seq_len", "32768"],
    "too few hosts": [*LARGE, "--nodes", "2"],
    "host memory in question": [*LARGE, "--nodes", "4"],
    "retries": [*LARGE, "--nodes", "8", "--parallel.offload", "none", "--parallel.numerics", "pure-bf16"],
    "a mesh": [*LARGE, "--nodes", "16", "--parallel.tp", "8", "--parallel.pp", "2", "--parallel.pp_schedule", "interleaved"],
    "FP8 and a mesh of unknown memory": [*MIDDLE, "--nodes", "4", "--parallel.numerics", "fp8", "--parallel.cp", "2"],
    "LoRA": [*LARGE, "--nodes", "1", "--adapter.kind", "lora"],
    "one small GPU": ["--preset", "llama3.2-1b", "--gpus", "1", "--gpu", "l40s-48", "--tokens", "1e9", "--price", "0.9"],
    "many hosts": [*LARGE, "--nodes", "64", "--gpu", "b200-180", "--training.global_batch_size", "512", "--tokens", "1e9", "--price", "5"],
    "a claim": [*LARGE, "--nodes", "8", "--measured", "31", "--tokens", "1e9"],
    "numerics without a time": [*SMALL, "--nodes", "1", "--parallel.numerics", "fp32"],
}  # fmt: skip


@pytest.mark.parametrize("words", SCREENS.values(), ids=SCREENS)
def test_the_first_screen_is_twelve_lines_of_a_hundred_columns(capsys, words):
    code, lines = asked(capsys, *words)
    assert len(lines) <= MAX_SUMMARY_LINES
    assert max(map(len, lines)) <= WIDTH
    verdicts = {
        EXIT_OK: ("fits", "MAY NOT FIT"),
        EXIT_FAILED: ("RUNS SLOWER", "MAY RUN SLOWER"),
        EXIT_UNFIT: ("DOES NOT FIT",),
    }
    assert lines[0].partition(":")[0] in verdicts[code]
    [bar] = [line for line in lines if line.startswith("GPU memory")]
    filled, used, limit = re.search(r"\[(#*)\.*\] ([\d,.]+) of ([\d,.]+)", bar).groups()
    share = float(used.replace(",", "")) / float(limit.replace(",", ""))
    assert len(filled) == pytest.approx(min(24, 24 * share), abs=0.6)


def test_the_first_line_says_what_is_to_spare_or_missing(capsys):
    fits = asked(capsys, *LARGE, "--nodes", "8")[1][0]
    record = json.loads("".join(asked(capsys, *LARGE, "--nodes", "8", "--json")[1]))
    spare = (record["inputs"]["gpu_memory_bytes"] - record["gpu_reserved_bytes"]) / (1 << 30)
    assert fits.endswith(f"8 x 8 h100-80 (64 GPUs); {spare:.1f} GiB of each GPU to spare")
    assert "each host lacks" in asked(capsys, *LARGE, "--nodes", "2")[1][0]
    assert "each host may lack" in asked(capsys, *LARGE, "--nodes", "4")[1][0]
    assert "each GPU lacks" in asked(capsys, *MIDDLE, "--nodes", "2", "--gpu", "a100-40")[1][0]
    assert "PyTorch reserves" in asked(capsys, *SCREENS["retries"])[1][0]
    assert ", fewest as set)" in asked(capsys, *LARGE)[1][0]


def test_half_an_assumption_costs_what_it_says(capsys):
    [line] = [line for line in asked(capsys, *LARGE, "--nodes", "8")[1] if line.startswith("depends on")]
    said = int(re.search(r"network \+(\d+)%", line)[1])
    steps = [
        json.loads("".join(asked(capsys, *LARGE, "--nodes", "8", "--nic", nic, "--json")[1]))["time"]["step_s"]
        for nic in ("3200Gb/s", "1600Gb/s")
    ]
    assert said == round(100 * (steps[1] / steps[0] - 1))


def test_a_change_is_no_gain_where_only_its_batch_is_larger(capsys):
    words = [*LARGE, "--data.seq_len", "8192", "--nodes"]
    tries = [line for line in asked(capsys, *words, "8")[1] if "twice the hosts" in line]
    assert tries == []
    lines = asked(capsys, *words, "16")[1]
    assert any("--model.activations host: " in line for line in lines)
    assert any("--parallel.cp 4: " in line for line in asked(capsys, *SCREENS["too long"])[1])


def test_one_change_of_a_setting_is_named_and_hosts_and_network_are_two():
    run = run_of("llama3.1-405b", offload="all", world=32, global_batch=64, micro_batch=1)
    found = [
        label for label, _ in remedies(Prediction.from_run(run, Cluster(nic_bytes_per_s=200e9), 4 * ASSUMED_RAM_BYTES))
    ]
    assert {"twice the hosts", "twice the network"} <= {*found}
    assert len({label.partition(" ")[0] for label in found if label.startswith("--")}) == sum(
        label.startswith("--") for label in found
    )


def offer(hours, high=1.2, fits="YES", world=8, price=2.0, deadline_h=math.inf):
    """An offer whose prediction is no more than these numbers."""

    class Known:
        fit, time_range, run = Fit[fits], type("R", (), {"high": high}), type("W", (), {"world": world})

        def hours(self, tokens):
            return hours

    return Offer(Known(), 1e9, price, deadline_h)


def test_whether_a_deadline_is_met():
    assert [offer(h, deadline_h=48).timing for h in (40, 41, 48, 49)] == [
        Timing.IN_TIME, Timing.LIKELY, Timing.LIKELY, Timing.LATE,
    ]  # fmt: skip
    assert offer(None, deadline_h=48).timing is Timing.LATE


def test_what_comes_first():
    in_order = [
        offer(30, deadline_h=48), offer(31, world=16, deadline_h=48), offer(45, price=0.1, deadline_h=48),
        offer(49, deadline_h=48), offer(1, price=0.1, fits="RETRIES"), offer(1, fits="NO", price=0.1),
    ]  # fmt: skip
    shuffled = [in_order[i] for i in (3, 5, 1, 0, 4, 2)]
    assert sorted(shuffled, key=lambda one: one.rank)[:4] == in_order[:4]
    assert {one.prediction.fit for one in sorted(in_order, key=lambda one: one.rank)[4:]} == {Fit.RETRIES, Fit.NO}


@pytest.mark.parametrize(
    ("model", "gpu"), [("llama3.1-70b", "a100-40"), ("llama3.1-70b", "l40s-48"), ("llama3.1-8b", "h100-80")]
)
def test_the_fewest_hosts_are_the_first_of_all_that_fit(model, gpu):
    run = run_of(model, offload="all")

    def predict_on(hosts):
        return on(gpu, offers.on_hosts(run, hosts, 8))

    fewest = offers.fewest_hosts(predict_on)
    fits = [offers.best_settings(predict_on(hosts)).fit is Fit.YES for hosts in range(1, fewest + 2)]
    assert fits == [False] * (fewest - 1) + [True, True]


def test_the_batch_on_other_hosts_is_the_nearest_that_all_ranks_share():
    run = run_of("llama3.1-70b", world=64, global_batch=64, tp=2, micro_batch=4)
    sizes = {hosts: offers.on_hosts(run, hosts, 8).global_batch for hosts in (1, 3, 5, 8, 16)}
    assert sizes == {1: 64, 3: 72, 5: 80, 8: 64, 16: 128}
    assert offers.on_hosts(run, 3, 8).dp == 24


@pytest.mark.parametrize("gpu", ["h100-80", "h200-141"])
def test_the_best_settings_take_least_at_worst_of_all_that_fit_without_a_mesh(gpu):
    asked_for = on(gpu, run_of("llama3.1-70b", world=32, offload="all"))
    best = offers.best_settings(asked_for)
    others = [option for option in offers.variants(asked_for) if option.fit is Fit.YES]
    assert best.fit is Fit.YES
    assert best.run.moments == "fp32"  # BF16 rounds: only who asks for it gets it
    longest = [each.needs.step_s * each.time_range.high for each in (best, *others)]
    assert longest[0] == min(longest)


def test_where_nothing_fits_without_a_mesh_a_mesh_is_found():
    run = run_of("llama3.1-405b", world=48, ranks_per_host=4, seq_len=8192, global_batch=96, offload="all")
    best = offers.best_settings(on("a100-40", run))
    assert best.run.tp * best.run.cp * best.run.pp > 1
    assert best.fit >= Fit.RETRIES


def test_the_hosts_from_which_more_pay_no_more():
    speeds = {2: 100, 4: 199, 8: 350, 16: 600}
    found = [
        dataclasses.make_dataclass("Of", ["prediction"])(
            type("P", (), {"run": type("R", (), {"hosts": n}), "tokens_per_s": s})
        )
        for n, s in speeds.items()
    ]
    assert offers.worthwhile_hosts(found) == 4  # 350 / 199 is less than 1.8, and so are all after it
    assert offers.worthwhile_hosts(found[:2]) == 0
    found[-1].prediction.tokens_per_s = 700
    assert offers.worthwhile_hosts(found) == 0  # as 8 to 16 pays


@pytest.mark.slow
def test_the_cheapest_that_meets_a_deadline_comes_first(capsys):
    words = [*MIDDLE, "--tokens", "1e9", "--deadline", "3h", "--price", "a100-80=1.5,h200-141=3.2"]
    code, lines = asked(capsys, *words)
    assert code == EXIT_OK
    assert max(map(len, lines)) <= WIDTH + 4
    found = json.loads("".join(asked(capsys, *words, "--json")[1]))["offers"]
    prices = {"a100-80": 1.5, "h200-141": 3.2}
    assert {each["inputs"]["gpu"] for each in found} == {*prices}
    for each in found:
        assert each["cost"] == pytest.approx(each["gpu_hours"] * prices[each["inputs"]["gpu"]])
        longest = each["hours"] * each["time_range"]["high"]
        assert each["timing"] == ("in_time" if longest <= 3 else "likely" if each["hours"] <= 3 else "late")
    in_time = [each["cost"] for each in found if each["timing"] == "in_time"]
    assert in_time == sorted(in_time)
    assert [each["timing"] for each in found[: len(in_time)]] == ["in_time"] * len(in_time)
    late = [each["hours"] for each in found if each["timing"] == "late"]
    assert late == sorted(late)
    # With one host less than the fewest that are in time, a kind is not.
    hosts = {each["inputs"]["nodes"]: each["timing"] for each in found if each["inputs"]["gpu"] == "h200-141"}
    first = min(count for count, timing in hosts.items() if timing == "in_time")
    fewer = [*words[:-1], "h200-141=3.2", "--nodes", str(first - 1), "--json"]
    [other] = json.loads("".join(asked(capsys, *fewer)[1]))["offers"]
    assert other["timing"] != "in_time"


def offer_on(hosts, deadline_h, tokens=1e9):
    """A run that takes 100 h on one host, and less on more."""
    found = offer(100 / hosts, deadline_h=deadline_h, world=8 * hosts)
    found.prediction.run.hosts = hosts
    return dataclasses.replace(found, tokens=tokens)


@pytest.mark.parametrize("deadline_h", [119.9, 60, 40, 13, 7.1, 5, 2])
@pytest.mark.parametrize("first", [1, 3, 40])
def test_the_fewest_in_time_are_found_wherever_they_are(deadline_h, first):
    found = offers.offers_by_hosts(lambda hosts: offer_on(hosts, deadline_h), first)
    hosts = [one.prediction.run.hosts for one in found]
    by_hand = [n for n in range(first, offers.MAX_HOSTS + 1) if offer_on(n, deadline_h).timing is Timing.IN_TIME]
    in_time = [one.prediction.run.hosts for one in found if one.timing is Timing.IN_TIME]
    assert (hosts[0], in_time[:1]) == (first, by_hand[:1])
    assert by_hand or hosts[-1] == offers.MAX_HOSTS  # nothing is late before all were tried


def test_a_run_that_gets_nowhere_is_late_on_any_number_of_hosts():
    never = [dataclasses.replace(offer(None, deadline_h=48)) for _ in range(65)]
    for hosts, one in enumerate(never):
        one.prediction.run.hosts = hosts
    found = offers.offers_by_hosts(lambda hosts: never[hosts], 1)
    assert {one.timing for one in found} == {Timing.LATE}


def test_a_price_of_nothing_is_a_price():
    free, paid = offer(30, price=0.0, deadline_h=48), offer(1, price=0.01, deadline_h=48)
    assert free.cost == 0
    assert min([paid, free], key=lambda one: one.rank) is free
    assert offer(1, price=None).cost is None


@pytest.mark.slow
def test_a_mesh_that_fits_on_few_hosts_is_found(capsys):
    words = [*LARGE, "--tokens", "1e9", "--data.seq_len", "32768", "--deadline", "2d"]
    code, lines = asked(capsys, *words, "--gpu", "h100")
    assert code == EXIT_OK
    fewest = int(re.search(r"fits from (\d+) hosts on", lines[-1])[1])
    assert fewest < 8
    assert " cp " in lines[2]
    said = asked(capsys, *words, "--nodes", str(fewest))[1]
    assert "fits from" not in said[-1]  # who names the hosts is not told that they are the fewest


def test_nothing_in_time_or_nothing_that_fits_has_its_exit_code(capsys):
    one = [*SMALL, "--nodes", "1", "--tokens", "1e9", "--price", "h100-80=2"]
    assert asked(capsys, *one)[0] == EXIT_OK
    code, lines = asked(capsys, *one, "--deadline", "10m")
    assert (code, " late " in lines[2]) == (EXIT_UNFIT, True)
    code, lines = asked(capsys, *LARGE, "--tokens", "1e9", "--price", "a100-40=1", "--nodes", "1")
    assert code == EXIT_UNFIT
    assert "DOES NOT FIT on 1 host: " in lines[-1]
    assert lines[2].split()[4:6] == ["-", "-"]  # no time and no cost of what does not run


def test_what_is_set_by_hand_is_chosen_anew(capsys):
    words = [*SMALL, "--nodes", "1", "--tokens", "1e9", "--price", "h100-80=2", "--json"]
    by_hand = ["--parallel.pp", "64", "--training.micro_batch_size", "4", "--parallel.offload", "all"]
    assert asked(capsys, *words, *by_hand) == asked(capsys, *words)


@pytest.mark.slow
def test_methods_are_compared_on_the_same_hosts(capsys):
    words = [*LARGE, "--methods", "--tokens", "1e9", "--price", "2"]
    code, lines = asked(capsys, *words)
    assert code == EXIT_OK
    assert max(map(len, lines)) <= WIDTH
    found = json.loads("".join(asked(capsys, *words, "--json")[1]))["methods"]
    assert [*found] == ["full", "LoRA, rank 16", "FP8", "all BF16"]
    assert len({each["inputs"]["nodes"] for each in found.values()}) == 1
    assert found["LoRA, rank 16"]["fewest_hosts"] < found["full"]["fewest_hosts"]
    assert found["LoRA, rank 16"]["cost"] < found["full"]["cost"]
    assert {name: each["inputs"]["numerics"] for name, each in found.items()} == {
        "full": "fp32-master", "LoRA, rank 16": "fp32-master", "FP8": "fp8", "all BF16": "pure-bf16",
    }  # fmt: skip
    assert [line.split("  ")[0] for line in lines[2:]] == [*found]
    assert "FP8" not in "".join(asked(capsys, *words, "--gpu", "a100-80", "--nodes", "8")[1])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--deadline", "48h"], "--tokens: how many"),
        (["--deadline", "soon", "--tokens", "1e9"], "'soon' is no time"),
        (["--deadline", "0h", "--tokens", "1e9"], "'0h' is no time"),
        (["--deadline", "48", "--tokens", "1e9"], "'48' is no time; write 90m, 48h or 2d"),
        (["--price", "2,5", "--tokens", "1e9"], "'2,5' has no one price for each kind"),
        (["--price", "2,h200=3", "--tokens", "1e9"], "has no one price for each kind"),
        (["--price", "h100=2,h100-80=3", "--tokens", "1e9"], "--price: h100 and h100-80 name one kind twice"),
        (["--price", "h100=2,h100=3", "--tokens", "1e9"], "has no one price for each kind"),
        (["--price", "h100=2", "--gpu", "h200", "--tokens", "1e9"], "--gpu: the prices name the kinds"),
        (["--deadline", "48h", "--gpus", "32", "--tokens", "1e9"], "--gpus: a comparison is of whole hosts"),
        (["--deadline", "48h", "--tokens", "1e9", "--parallel.numerics", "fp32"], "no times are known with fp32"),
        (["--price", "h100=2,h300=3", "--tokens", "1e9"], "--price: 'h300' is not known"),
        (["--price", "h100-80=2,h200-141=-3", "--tokens", "1e9"], "--price: -3.0 is out of range"),
        (["--price", "h100-80=2,h200-141=nan", "--tokens", "1e9"], "--price: nan is out of range"),
        (["--price", "h100-80=x"], "'h100-80=x' is no price"),
        (["--methods", "--deadline", "48h", "--tokens", "1e9"], "--methods: compares on one kind of GPU"),
        (["--methods", "--tokens", "1e9", "--search"], "remove HOSTS and the other questions"),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_sentence(words, said):
    with pytest.raises((UserError, SystemExit)) as caught:
        predict.main([*LARGE, *words])
    assert said in str(caught.value)
