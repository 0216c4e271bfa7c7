"""What a step computes and copies, by what it is: nothing is counted twice, and the sum is what was fitted."""

import dataclasses
import json

import pytest

from llama405b.predict.estimate import Cluster, training_setup
from llama405b.predict.hardware import Rates, TrainingSetup, read_gpus
from llama405b.predict.run_shape import PredictedRun
from llama405b.predict.step_time import fsdp_copies_s, host_copies_s, step_time
from llama405b.settings.axes import Recompute
from llama405b.settings.config import PRESET_DIR
from llama405b.spec.models import parse_llama

SHAPES = json.loads((PRESET_DIR / "architectures.json").read_text())
RATES, HBM = Rates.read(), 3350e9


def setting(model="llama3.1-405b", world=64, offload="all", **change) -> TrainingSetup:
    load = PredictedRun(parse_llama(SHAPES[model], model), "fp32-master", offload, world, global_batch=world)
    return dataclasses.replace(training_setup(load, Cluster()), **change)


@pytest.mark.parametrize(("model", "world"), [("llama3.1-405b", 64), ("llama3.1-8b", 8), ("llama3.2-1b", 1)])
@pytest.mark.parametrize("recompute", ["none", "operators", "operators:5", "every:2", "full"])
def test_parts_are_all_of_the_compute_and_none_twice(model, world, recompute):
    found = step_time(setting(model, world, recompute=Recompute.parse(recompute), accumulate=3), RATES)
    without = step_time(
        setting(model, world, recompute=Recompute.parse(recompute), accumulate=3),
        dataclasses.replace(RATES, copies=0.0),
    )
    assert sum(found.compute_parts_s.values()) == pytest.approx(found.compute_s)
    assert found.compute_s == pytest.approx(without.compute_s)  # FSDP's copies are in what was fitted
    assert found.step_s == without.step_s
    assert (found.compute_parts_s["recomputation"] == 0) == (recompute == "none")
    assert min(found.compute_parts_s.values()) >= 0


def test_parts_of_405b_are_those_that_were_counted():
    large = setting()
    parts, shape = step_time(large, RATES).compute_parts_s, large.shape
    moved = shape.parameters * (
        4 + 4 + 2 + 4
    )  # gathered units read and written twice; gradients read in BF16, written in FP32
    assert parts["FSDP's copies"] == pytest.approx(moved / (0.9 * HBM)) == pytest.approx(1.9, abs=0.05)
    once = 126 * 4096 * (80 * 16384 + 10 * 53248) / (0.75 * HBM)  # of unfused norms, activations and residuals
    assert parts["norms and activations"] == pytest.approx(3 * once)
    assert 1.1 < 3 * once < 4 * once < 1.55  # the fourth is in what is computed again
    flops = 6 * 4096 * (126 * shape.matrices + shape.head)
    assert parts["matrix products"] + parts["FSDP's copies"] == pytest.approx(flops / (0.5938 * 989e12))
    kept = step_time(dataclasses.replace(large, recompute=Recompute("none")), RATES).compute_parts_s
    assert {**parts, "recomputation": 0} == kept


def test_attention_of_long_sequences_is_faster_with_the_kernel_that_is_named():
    """P7: FlashAttention 3 explains published runs of 65,536 tokens and more, FlashAttention 2 does not."""
    usual, third = (
        step_time(setting("llama3.1-8b", 8, "none", seq_len=131_072, attention=name), RATES).compute_parts_s[
            "attention"
        ]
        for name in ("flash_attention_2", "flash_attention_3")
    )
    assert usual / third == pytest.approx(0.65 / 0.40)


def test_a_b200_is_worth_what_was_published_of_it():
    """P4: 8 B parameters at 8,192 tokens ran 1.69 times as fast as on an H200, and 2.21 times was predicted."""
    changes = {"seq_len": 8192, "recompute": Recompute("none"), "reshard": False}
    step_s = [
        step_time(setting("llama3.1-8b", 8, "none", gpu=read_gpus()[name], **changes), RATES).step_s
        for name in ("h200-141", "b200-180")
    ]
    assert step_s[0] / step_s[1] == pytest.approx(1.69, rel=0.08)


def test_fsdp_copies_what_it_gathers_and_reduces():
    whole, kept, rounded = (
        setting(), setting(reshard=False), setting(reduce_bytes=2)
    )  # fmt: skip
    copies = [fsdp_copies_s(each, RATES, 1e9) * 0.9 * HBM / 1e9 for each in (whole, kept, rounded)]
    assert copies == pytest.approx([14, 10, 12])
    assert fsdp_copies_s(setting(world=1), RATES, 1e9) == 0


def test_copies_of_both_ways_share_a_link_and_all_of_a_host_its_memory():
    unit = setting().shape.parameters / setting().shape.layers / 64
    wide = dataclasses.replace(read_gpus()["h100-80"], ram_bytes_per_s=1e15)
    up, both = (host_copies_s(setting(gpu=wide), RATES, backward=each) / unit for each in (False, True))
    assert (up, both) == pytest.approx((4 / 55e9, 8 / (1.4 * 55e9)))
    down = host_copies_s(setting(gpu=wide, copied_up=0.0), RATES, backward=True) / unit
    assert down == pytest.approx(4 / 55e9)
    assert host_copies_s(setting(), RATES, backward=True) / unit == pytest.approx(8 / (0.75 * 614.4e9 / 8))
    alone = setting(gpus_per_host=1)  # a host's memory for one GPU
    assert host_copies_s(alone, RATES, backward=True) / unit == pytest.approx(8 / (1.4 * 55e9))


def test_an_input_leaves_in_the_forward_and_comes_back_in_the_backward():
    entry = 2 * 4096 * setting().shape.hidden
    kept = setting(copied_up=0.0, copied_down=0.0, offloads_inputs=True)
    for each in (False, True):
        assert host_copies_s(kept, RATES, backward=each) == pytest.approx(
            max(entry / 55e9, 8 * entry / (0.75 * 614.4e9))
        )


def test_what_a_host_keeps_gathered_needs_no_network_in_the_backward():
    slow = setting(nic_bytes_per_s=10e9)
    one, two = (step_time(each, RATES) for each in (slow, dataclasses.replace(slow, reshard_group_size=8)))
    gathered = slow.shape.parameters * 2
    saved = gathered * 63 / 64 / (10e9 * RATES.network) - gathered * 7 / 8 / (slow.gpu.peers_bytes_per_s * RATES.peers)
    assert one.forward_s == two.forward_s
    assert one.backward_s - two.backward_s == pytest.approx(saved, rel=0.05)


def test_the_copies_of_a_forward_delay_the_update_under_it():
    short = {"seq_len": 256}  # whose forward does not hide the update
    update, both = (step_time(setting(offload=place, **short), RATES) for place in ("optimizer", "all"))
    held = setting().shape.parameters / 8
    more = 4 * held / (0.75 * 614.4e9) - 2 * held / (0.3255 * 614.4e9)  # copies; less what publishes BF16 weights
    assert both.optimizer_s + both.forward_s - update.optimizer_s - update.forward_s == pytest.approx(more)


def test_an_update_in_a_host_s_memory_takes_what_that_memory_gives():
    between = {"norm_bytes": 0.0}
    a100, h100 = (
        step_time(setting(gpu=read_gpus()[name], **between), RATES).optimizer_s for name in ("a100-80", "h100-80")
    )
    assert a100 == pytest.approx(1.5 * h100)  # 409.6 of 614.4 GB/s
    assert h100 == pytest.approx(28 * setting().shape.parameters / 8 / 200e9, rel=1e-3)  # Lambda's rate


@pytest.mark.parametrize(("change", "gain"), [({"compiled": True}, 0.008), ({"fp8": True, "compiled": True}, 0.32)])
def test_a_layer_gains_what_an_h200_measured(change, gain):
    """docs/measurements/gpu-bench.md: a layer of 405B with 8,192 words, of 8,192 tokens."""
    llama = parse_llama(SHAPES["llama3.1-405b"] | {"num_hidden_layers": 1, "vocab_size": 8192}, "one")
    load = PredictedRun(llama, "fp32-master", "none", 1, global_batch=1, seq_len=8192)
    plain = training_setup(load, Cluster(gpu=read_gpus()["h200-141"]))
    without, found = (step_time(each, RATES) for each in (plain, dataclasses.replace(plain, **change)))
    passes = (found.forward_s + found.backward_s) / (without.forward_s + without.backward_s)
    assert passes == pytest.approx(1 - gain, abs=0.005)


def test_the_norm_waits_for_the_last_unit_alone():
    hides = setting(seq_len=16384)
    assert step_time(hides, RATES).optimizer_s == pytest.approx(4 * hides.shape.parameters / 8 / 200e9 / 126, rel=1e-3)
