"""Calibrations: lines through two measurements, rates for other settings, and to which runs they apply."""

import dataclasses
import json

import pytest

from llama405b.contract import reader
from llama405b.predict.calibration import (
    Calibration,
    Evidence,
    MeasuredStep,
    StandaloneRates,
    TimeRange,
    layers_to_measure,
)
from llama405b.predict.estimate import RUNTIME_BYTES, Cluster, estimate
from llama405b.predict.hardware import Gpu, Rates, read_gpus
from llama405b.predict.run_shape import PredictedRun
from llama405b.predict.search import Fit, Prediction, rank_variants, remedies
from llama405b.spec.models import Llama
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.launch import start

LLAMA = Llama(12, 256, 704, 4, 2, 64, 2048, False, False, False, 1024)
LOAD = PredictedRun(LLAMA, "fp32", "none", 2, 256, 4, 8, ranks_per_host=1)
MIB = 1 << 20
ALONE = StandaloneRates(0.2, 30e9, 20e9, 12e9, 1e9, 0.5e9, 1e-4, 2e9)
BIG = PredictedRun(
    Llama(80, 8192, 28672, 64, 8, 128, 128256, False, False, False, 8192), "fp32-master", "optimizer", 32, 4096, 1, 32
)


def calibration(few=(0.01, 0.1, 0.2, 0.01, 600 * MIB), more=(0.01, 0.2, 0.5, 0.02, 700 * MIB)):
    return Calibration(
        LOAD, MeasuredStep(1, 4, 8, *few), MeasuredStep(3, 4, 8, *more), None, ALONE, ("a", "b"), "cpu", "today"
    )


RATES = StandaloneRates(0.12, 2e12, 150e9, 40e9, 150e9, 120e9, 2e-5, 4e9)


def measured(load=BIG, layer_s=0.2, delay_s=0.0, alone=RATES):
    """Of a run on H100s whose layers take ``layer_s`` and ``delay_s``: points that the rates explain but for the delay."""

    def point(layers, micro):
        step_s = layers * (micro * (layer_s - delay_s) + delay_s)
        return MeasuredStep(layers, micro, micro * load.world, 0.0, step_s / 3, step_s * 2 / 3, 0.1, 30 << 30)

    return Calibration(load, point(1, 1), point(3, 1), point(3, 2), alone, ("a",), "h100-80", "today")


def outlook(load=LOAD, has=4096 * MIB):
    return Prediction.from_run(load, Cluster(Gpu.for_cpu(has)), 2 * has)


def test_all_layers_follow_from_a_few():
    found = outlook().with_calibration(calibration())
    time = found.needs.time
    assert time.forward_s == pytest.approx(0.1 + 11 * 0.05)
    assert time.backward_s == pytest.approx(0.2 + 11 * 0.15)
    assert time.optimizer_s == pytest.approx(0.01 + 11 * 0.005)
    assert time.data_s == pytest.approx(0.01)
    assert time.step_s == found.needs.step_s == pytest.approx(0.01 + 0.65 + 1.85 + 0.065)
    assert found.tokens_per_s == pytest.approx(8 * 256 / time.step_s)
    assert time.exposed_s is None
    shape = dataclasses.replace(LLAMA, layers=3)
    three = estimate(dataclasses.replace(LOAD, llama=shape)).peak.total
    assert found.needs.gpu_bytes == pytest.approx(700 * MIB + estimate(LOAD).peak.total - three)
    assert (found.evidence, found.time_range) == (Evidence.STEPS, TimeRange(0.9, 1.1))
    assert found.memory_spread < outlook().memory_spread


def test_more_layers_are_never_faster():
    noisy = calibration(more=(0.01, 0.09, 0.5, 0.02, 700 * MIB))
    assert outlook().with_calibration(noisy).needs.time.forward_s == 0.09


def test_what_fits_is_judged_by_what_was_measured():
    needs = outlook().with_calibration(calibration()).needs.gpu_bytes
    assert [outlook(has=needs * share).with_calibration(calibration()).gpu_fit for share in (0.94, 1.04, 1.06)] == [
        Fit.NO,
        Fit.MAYBE,
        Fit.YES,
    ]


def test_what_was_reserved_is_compared_with_what_is_predicted_to_be():
    found = measured(BIG)
    like = estimate(dataclasses.replace(BIG, llama=dataclasses.replace(BIG.llama, layers=3)))
    more = dataclasses.replace(found.more, peak_bytes=sum(like.reserved_by_pool.values()) + 1024 * MIB)
    needs = Prediction.from_run(BIG, Cluster()).with_calibration(dataclasses.replace(found, more=more)).needs
    plain = estimate(BIG)
    assert needs.gpu_bytes == plain.gpu_bytes + 1024 * MIB
    assert needs.gpu_reserved_bytes == plain.gpu_reserved_bytes + 1024 * MIB


def test_it_is_used_for_the_run_that_it_was_made_for_alone():
    found = calibration()
    assert outlook().with_calibration(found).calibration == found
    for change in ({"keep": 9}, {"mtbf_s": 9.0}):
        assert (
            outlook(dataclasses.replace(LOAD, **change)).with_calibration(found).needs.time
            == found.with_measured_steps(estimate(LOAD)).time
        )
    for change in ({"micro_batch": 2}, {"world": 4}, {"fsdp_unit": "sublayer"}):
        other = outlook(dataclasses.replace(LOAD, **change)).with_calibration(found)
        assert other.calibration == found
        assert other.needs.time.data_s == 0
        assert (other.evidence, other.time_range) == (Evidence.RATES, TimeRange(0.85, 1.15))
        assert other.memory_spread == outlook().memory_spread
    for change in ({"seq_len": 128}, {"numerics": "pure-bf16"}, {"llama": dataclasses.replace(LLAMA, layers=13)}):
        other = outlook(dataclasses.replace(LOAD, **change))
        assert other.with_calibration(found) == other
    other = Prediction.from_run(LOAD, Cluster())
    assert other.with_calibration(found) == other  # another GPU


def step(load, found, **change):
    cluster = found.with_measured_rates(Cluster())
    return estimate(dataclasses.replace(load, **change), cluster).time


def test_rates_give_the_layer_that_was_measured():
    found = measured().with_measured_rates(Cluster())
    alone = dataclasses.replace(found.rates, whole=1.0, delay_s=0.0)
    computed = estimate(BIG, dataclasses.replace(found, rates=alone)).time.compute_s
    head = 3 * 2 * 128256 * 8192 * 4096 / found.attained.flops
    assert computed == pytest.approx(80 * 0.12 + head, rel=0.02)


@pytest.mark.parametrize(("whole", "delay_s"), [(1.0, 0.0), (0.9, 0.03), (1.3, 0.0), (1.1, 0.2)])
def test_steps_of_two_micro_batches_tell_a_share_from_a_delay(whole, delay_s):
    truth = measured().with_measured_rates(Cluster())
    truth = dataclasses.replace(truth, rates=dataclasses.replace(truth.rates, whole=whole, delay_s=delay_s))

    def point(layers, micro):
        shape = dataclasses.replace(BIG.llama, layers=layers)
        time = estimate(dataclasses.replace(BIG, llama=shape, micro_batch=micro, global_batch=32 * micro), truth).time
        return MeasuredStep(layers, micro, 32 * micro, 0.0, time.forward_s, time.backward_s, 0.1, 30 << 30)

    found = dataclasses.replace(measured(), few=point(1, 1), more=point(3, 1), other=point(3, 2))
    rates = found.with_measured_rates(Cluster()).rates
    assert (rates.whole, rates.delay_s) == pytest.approx((whole, delay_s), abs=1e-9)
    once = dataclasses.replace(found, other=None).with_measured_rates(Cluster()).rates
    assert once.delay_s == 0
    assert once.whole > whole if delay_s else once.whole == pytest.approx(whole)


def test_noise_is_not_taken_for_a_delay():
    found = measured()
    for took in (0.1, 3.0):  # twice the tokens, faster; and four times as slow
        other = dataclasses.replace(found.other, forward_s=took, backward_s=took)
        rates = dataclasses.replace(found, other=other).with_measured_rates(Cluster()).rates
        assert rates == dataclasses.replace(found, other=None).with_measured_rates(Cluster()).rates


def test_other_settings_follow_from_the_rates():
    found = measured()
    planned = step(BIG, found)
    twice = step(BIG, found, micro_batch=2, global_batch=64)
    assert 1 < (twice.forward_s + twice.backward_s) / (planned.forward_s + planned.backward_s) <= 2
    assert twice.compute_s == pytest.approx(2 * planned.compute_s)
    assert twice.communication_s == pytest.approx(planned.communication_s)
    full = step(BIG, found, offload="all")
    shared = 0.75 * 150e9 / Rates.read().update / 8  # of a host's memory, where copies go both ways
    seconds = 4 / 40e9 + (4 + 4) / shared  # weights up in the forward; in the backward weights up, gradients down
    assert full.copies_s == pytest.approx(seconds * BIG.llama.parameters / 32, rel=0.01)
    between = step(BIG, found, overlap=False)
    assert between.optimizer_s == pytest.approx(BIG.update_bytes_per_parameter * BIG.llama.parameters / 4 / 150e9)
    on_gpu = step(BIG, found, offload="none")
    assert on_gpu.optimizer_s == pytest.approx(28 * BIG.llama.parameters / 32 / 2e12)


@pytest.mark.parametrize(
    ("change", "slower"),
    [
        ("gather", "communication_s"),
        ("scatter", "communication_s"),
        ("hop_s", "communication_s"),
        ("copies", "copies_s"),
    ],
)
def test_a_slower_part_is_slower(change, slower):
    usual = measured().alone
    worse = dataclasses.replace(usual, **{change: getattr(usual, change) * (10 if change == "hop_s" else 0.1)})
    assert getattr(step(BIG, measured(alone=worse)), slower) > getattr(step(BIG, measured()), slower)


def test_links_between_hosts_and_within_one_are_told_apart():
    assert measured().with_measured_rates(Cluster()).nic_bytes_per_s == 150e9
    one_host = dataclasses.replace(BIG, world=8, global_batch=8)
    found = measured(one_host).with_measured_rates(Cluster())
    assert found.nic_bytes_per_s == Cluster().nic_bytes_per_s
    assert found.attained.peers_bytes_per_s == 150e9
    one_rank = dataclasses.replace(BIG, world=1, global_batch=1, ranks_per_host=1)
    found = measured(
        one_rank, alone=dataclasses.replace(measured().alone, gather=0.0, scatter=0.0, hop_s=0.0)
    ).with_measured_rates(Cluster())
    assert found.nic_bytes_per_s == Cluster().nic_bytes_per_s
    assert found.attained.peers_bytes_per_s == pytest.approx(0.75 * read_gpus()["h100-80"].peers_bytes_per_s)
    assert estimate(one_rank, found).time.communication_s == 0


def test_a_search_where_it_was_measured_compares_what_cpus_can_do():
    found = outlook().with_calibration(calibration())
    ranked = rank_variants(found)
    assert {each.run.offload for each in ranked} == {"none"}
    assert all(each.needs.step_s > 0 for each in ranked)
    assert len({each.run.micro_batch for each in ranked}) > 1
    words = " ".join(words for words, _ in remedies(found))
    assert "offload" not in words
    assert "numerics" not in words


@pytest.mark.parametrize(("layers", "measured"), [(126, (1, 3)), (4, (1, 3)), (3, (1, 2)), (2, (1, 2)), (1, (1, 1))])
def test_fewer_layers_are_measured_than_the_run_has(layers, measured):
    assert layers_to_measure(layers) == measured


def test_it_survives_being_kept():
    assert reader.loads(Calibration, reader.dumps(calibration()), "it") == calibration()


def test_waiting_for_updates_is_not_taken_for_the_forward():
    found = measured()
    waits = [
        dataclasses.replace(point, forward_s=point.forward_s + 0.5, waited_s=0.5) for point in (found.more, found.other)
    ]
    waited = dataclasses.replace(found, more=waits[0], other=waits[1])
    assert waited.with_measured_rates(Cluster()).rates == found.with_measured_rates(Cluster()).rates


def test_it_is_kept_for_its_hosts(tmp_path):
    hosts, found = tmp_path / "hosts", calibration()
    assert start.read_calibration(hosts, [Host("a", "hosts:1")]) is None
    start.save_calibration(hosts, found)
    assert start.read_calibration(hosts, [Host("b", "hosts:2")]) == found
    assert start.read_calibration(hosts, [Host("a", "hosts:1"), Host("c", "hosts:3")]) is None
    (tmp_path / "hosts.calibration.json").write_text('{"load": 3}')
    assert start.read_calibration(hosts, [Host("a", "hosts:1")]) is None


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("alone", {"layer_s": 0.0}),
        ("alone", {"gather": 0.0}),
        ("alone", {"disk": -1.0}),
        ("few", {"layers": 0}),
        ("more", {"forward_s": -1.0}),
        ("more", {"backward_s": 0.0}),
    ],
)
def test_what_cannot_have_been_measured_is_not_read(tmp_path, part, change):
    start.save_calibration(tmp_path / "hosts", calibration())
    file = tmp_path / "hosts.calibration.json"
    kept = json.loads(file.read_text())
    kept[part] |= change
    file.write_text(json.dumps(kept))
    assert start.read_calibration(tmp_path / "hosts", [Host("a", "hosts:1")]) is None


def test_a_host_that_waits_while_its_gpu_computes_is_no_slower():
    found = measured()
    cluster = found.with_measured_rates(Cluster())
    forward_s = [estimate(found._run_at(point), cluster).time.forward_s for point in (found.more, found.other)]
    more, other = (
        dataclasses.replace(point, forward_s=s, backward_s=2 * s, waited_s=0.9 * s)
        for point, s in zip((found.more, found.other), forward_s, strict=True)
    )
    waits = dataclasses.replace(found, more=more, other=other)
    alone = dataclasses.replace(
        waits, more=dataclasses.replace(more, waited_s=0), other=dataclasses.replace(other, waited_s=0)
    )
    assert waits.with_measured_rates(Cluster()).rates.whole > 0.8 * alone.with_measured_rates(Cluster()).rates.whole


def test_cuda_and_nccl_are_counted_beside_what_the_allocator_held():
    assert measured().with_measured_rates(Cluster()).runtime_bytes >= RUNTIME_BYTES
    assert outlook().with_calibration(calibration()).cluster.runtime_bytes < 700 * MIB


def test_hosts_that_differ_and_batches_that_do_not_divide():
    uneven = dataclasses.replace(BIG, world=12, ranks_per_host=8, global_batch=12)
    assert uneven.host_bytes["moments"] == pytest.approx(8 * BIG.llama.parameters * 8 / 12)
    rest = dataclasses.replace(BIG, world=24, global_batch=64)
    assert Prediction.from_run(rest, Cluster()).step_tokens == 64 * 4096


def test_a_step_of_all_layers_is_measured_too():
    assert MeasuredStep(0, 4, 8, 0.0, 0.1, 0.2, 0.01, 600 * MIB).step_s == pytest.approx(0.31)
