"""Step times of other layouts than FSDP over all GPUs: HSDP, DDP, without prefetching; each against what it comes down to."""

import dataclasses
import json

import pytest

from llama405b.capacity.coefficients import Rates
from llama405b.capacity.hardware import read_gpus
from llama405b.capacity.setting import Setting, Shape
from llama405b.capacity.step_time import reduce_s, ring_s, step_time
from llama405b.contract.config import PRESET_DIR
from llama405b.contract.weights import parse_llama

SHAPE = Shape.of(parse_llama(json.loads((PRESET_DIR / "architectures.json").read_text())["llama3.1-8b"], "8b"))
FSDP = Setting(SHAPE, read_gpus()["h100-80"], 64, 8, 400e9, 4096)
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
