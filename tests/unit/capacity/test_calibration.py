"""Calibrations: lines through two measurements, and to which runs they apply."""

import dataclasses

import pytest

from llama405b.capacity.calibration import Calibration, Point, measured_layers
from llama405b.capacity.estimate import Cluster, Load, estimate
from llama405b.capacity.hardware import Gpu
from llama405b.capacity.outlook import Fit, Outlook
from llama405b.contract import reader
from llama405b.contract.weights import Llama

LLAMA = Llama(12, 256, 704, 4, 2, 64, 2048, False, False, False, 1024)
LOAD = Load(LLAMA, "fp32", "none", 2, 256, 4, 8, ranks_per_host=1)
MIB = 1 << 20


def calibration(few=(0.01, 0.1, 0.2, 0.01, 600 * MIB), more=(0.01, 0.2, 0.5, 0.02, 700 * MIB)):
    return Calibration(LOAD, Point(1, *few), Point(3, *more), "today")


def outlook(load=LOAD, has=4096 * MIB):
    return Outlook.of(load, Cluster(Gpu.of_cpu(has)), 2 * has)


def test_all_layers_follow_from_a_few():
    found = outlook().calibrated(calibration())
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
    assert (found.time_spread, found.memory_spread) < (outlook().time_spread, outlook().memory_spread)


def test_more_layers_are_never_faster():
    noisy = calibration(more=(0.01, 0.09, 0.5, 0.02, 700 * MIB))
    assert outlook().calibrated(noisy).needs.time.forward_s == 0.09


def test_what_fits_is_judged_by_what_was_measured():
    needs = outlook().calibrated(calibration()).needs.gpu_bytes
    assert [outlook(has=needs * share).calibrated(calibration()).gpu for share in (0.94, 1.04, 1.06)] == list(Fit)


def test_it_is_used_for_the_run_that_it_was_made_for_alone():
    found = calibration()
    assert outlook().calibrated(found).calibration == found
    assert outlook(dataclasses.replace(LOAD, keep=9)).calibrated(found).calibration == found
    for change in (
        {"seq_len": 128},
        {"micro_batch": 2},
        {"world": 4},
        {"llama": dataclasses.replace(LLAMA, layers=13)},
    ):
        other = outlook(dataclasses.replace(LOAD, **change))
        assert other.calibrated(found) == other


@pytest.mark.parametrize(("layers", "measured"), [(126, (1, 3)), (4, (1, 3)), (3, (1, 2)), (2, (1, 2)), (1, (1, 1))])
def test_fewer_layers_are_measured_than_the_run_has(layers, measured):
    assert measured_layers(layers) == measured


def test_it_survives_being_kept():
    assert reader.loads(Calibration, reader.dumps(calibration()), "it") == calibration()
