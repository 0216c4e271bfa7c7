"""Step times of other layouts than FSDP over all GPUs: HSDP, DDP, without prefetching; each against what it comes down to."""

import dataclasses
import json

import pytest

from llama405b.predict.hardware import ModelShape, Rates, TrainingSetup, read_gpus
from llama405b.predict.run_shape import layers_per_stage
from llama405b.predict.step_time import (
    BACKWARD_COLLECTIVES,
    FORWARD_COLLECTIVES,
    exchange_s,
    gather_s,
    layer_communication_s,
    reduce_s,
    ring_s,
    step_time,
)
from llama405b.settings.config import PRESET_DIR
from llama405b.spec.models import parse_llama

LLAMA = parse_llama(json.loads((PRESET_DIR / "architectures.json").read_text())["llama3.1-8b"], "8b")
SHAPE = ModelShape.from_llama(LLAMA)
FSDP = TrainingSetup(SHAPE, read_gpus()["h100-80"], 64, 8, 400e9, 4096)
RATES = dataclasses.replace(Rates.read(), hop_s=0.0)
LINK, PEERS = 400e9 * RATES.network, 450e9 * RATES.peers


def layout(**change):
    return dataclasses.replace(FSDP, **change)


def test_one_copy_of_the_weights_is_fsdp():
    assert step_time(layout(sharded_over=64), RATES) == step_time(FSDP, RATES)


def test_hsdp_gathers_within_hosts_and_sums_between_them():
    hsdp = layout(sharded_over=8)
    assert ring_s(hsdp, RATES, 8e9, 8) == pytest.approx(7e9 / PEERS)
    between = 2 * 8e9 * 7 / 8 / LINK  # eight rings of an eighth each, through one host's links
    assert reduce_s(hsdp, RATES, 8e9) == pytest.approx(7e9 / PEERS + between)
    slow, all_of_it = (layout(sharded_over=n, nic_bytes_per_s=50e9, reduce_bytes=2) for n in (8, 0))
    assert step_time(slow, RATES).communication_s < step_time(all_of_it, RATES).communication_s
    assert step_time(hsdp, RATES).communication_s > step_time(FSDP, RATES).communication_s  # FP32 sums over fast links
    two_hosts = layout(sharded_over=16)
    assert reduce_s(two_hosts, RATES, 16e9) == pytest.approx(15e9 / min(LINK, PEERS) + 2 * 8e9 * 3 / 4 / LINK)


def test_ddp_gathers_nothing_and_sums_everything():
    ddp = layout(sharded_over=1, reshard=False)
    assert reduce_s(ddp, RATES, 8e9) == pytest.approx(2 * 8e9 * 63 / 64 / min(LINK, PEERS))
    found = step_time(ddp, RATES)
    unit = ddp.reduce_bytes * SHAPE.parameters
    assert found.communication_s == pytest.approx(2 * unit * 63 / 64 / min(LINK, PEERS))
    assert found.optimizer_s == pytest.approx(64 * step_time(FSDP, RATES).optimizer_s)


def test_without_prefetching_nothing_is_hidden():
    found = step_time(layout(prefetches=False), RATES)
    assert found.exposed_s == pytest.approx(found.communication_s)
    assert step_time(FSDP, RATES).exposed_s < found.exposed_s


def test_tp_splits_the_work_and_sends_hidden_states():
    tp = layout(tp=8)
    assert tp.shards == 8
    found, alone = step_time(tp, RATES), step_time(FSDP, RATES)
    assert found.compute_parts_s["matrix products"] == pytest.approx(
        alone.compute_parts_s["matrix products"] / 8, rel=0.1
    )
    whole = 2 * 4096 * SHAPE.hidden * 7 / 8 / PEERS  # of a gather, in BF16
    assert layer_communication_s(tp, RATES, FORWARD_COLLECTIVES) == pytest.approx(4 * whole)
    assert layer_communication_s(tp, RATES, BACKWARD_COLLECTIVES["full"]) == pytest.approx(7 * whole)
    assert found.exposed_s >= SHAPE.layers * 11 * whole
    assert gather_s(tp, RATES, 8e9) == pytest.approx(8e9 * 7 / 8 / (LINK / 8))  # eight rings share a host's links
    assert found.optimizer_s == pytest.approx(alone.optimizer_s)


def test_cp_exchanges_heads_within_a_host_or_between():
    near, far = layout(cp=8), layout(cp=16)
    assert near.shards == far.shards == 64
    heads = 2 * 4096 / 8 * 2 * (SHAPE.width + SHAPE.kv_width)  # queries and outputs, keys and values
    assert layer_communication_s(near, RATES, FORWARD_COLLECTIVES) == pytest.approx(heads * 7 / 8 / PEERS)
    assert exchange_s(far, RATES, 1e9) == pytest.approx(1e9 * 15 / 16 / (LINK / 8))


def test_a_pipeline_waits_for_its_first_and_last_micro_batch():
    stages, halves = layers_per_stage(LLAMA, 4), layers_per_stage(LLAMA, 8)
    found = step_time(layout(stages=stages, accumulate=8), RATES)
    assert found.bubble_s == pytest.approx((found.forward_s + found.backward_s) * 3 / 8)
    interleaved = step_time(layout(stages=halves, chunks=2, accumulate=8), RATES)
    assert interleaved.bubble_s == pytest.approx((interleaved.forward_s + interleaved.backward_s) * 3 / 16)
    one = step_time(layout(accumulate=8), RATES)
    assert found.compute_s == pytest.approx(one.compute_s / 4, rel=0.1)  # of the slowest of four
    assert found.optimizer_s == pytest.approx(one.optimizer_s)
