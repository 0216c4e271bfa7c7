"""What one H200 with driver 580.159.04 printed on 2026-11-26, idle and in training: tests/data/h200. The uuid is made up."""

from conftest import ROOT
from llama405b.bench.runs import driver_version
from llama405b.contract import reader
from llama405b.predict.hardware import match_gpu, read_gpus
from llama405b_tools import parsers
from llama405b_tools.agent import sampler
from llama405b_tools.top.state.hostview import HostPrograms

DATA = ROOT / "tests/data/h200"
FIELDS = (*sampler.FIELDS.split(","), sampler.REASONS[0])
MIB = 1 << 20


def read(name):
    [gpu], fault = parsers.parse_smi((DATA / name).read_text(), FIELDS)
    assert not fault
    return gpu


def test_idle():
    gpu = read("idle.csv")
    assert (gpu.index, gpu.name, gpu.memory_mib, gpu.used_mib, gpu.driver) == (
        0,
        "NVIDIA H200",
        143_771,
        0,
        "580.159.04",
    )
    assert (gpu.utilization, gpu.temperature_c, gpu.power_w, gpu.power_limit_w, gpu.clock_mhz) == (
        0,
        32,
        79.51,
        700,
        345,
    )
    assert (gpu.ecc_errors, gpu.slowdowns, gpu.fault) == (0, (), "")


def test_at_its_power_limit_a_gpu_is_not_called_slowed():
    gpu = read("busy.csv")
    assert (gpu.utilization, gpu.power_w, gpu.clock_mhz, gpu.slowdowns) == (100, 698.35, 1500, ())


def test_its_process():
    programs = HostPrograms()
    programs.take_apps((DATA / "apps.csv").read_text())
    assert programs.apps == [(1737, read("busy.csv").uuid, 38_322)]


def test_what_doctor_and_plan_make_of_it():
    answer = reader.loads(parsers.SmiAnswer, (DATA / "probe.json").read_text(), "probe.json")
    [gpu], fault = parsers.parse_smi(answer.smi, answer.fields)
    assert (fault, gpu.fault, gpu.pages_pending, gpu.is_capped, gpu.is_narrow) == ("", "", False, False, False)
    assert (parsers.nvlinks_down(answer.nvlink), parsers.parse_gpu_processes(answer.apps)) == ([], [])
    assert match_gpu(gpu.name, gpu.memory_mib * MIB, read_gpus()).name == "h200-141"
    assert parsers.bf16_flops(gpu.name) == 989e12


def test_its_kernel_log_has_no_error():
    assert parsers.parse_xids((DATA / "dmesg.txt").read_text().splitlines()) == []
    assert driver_version(DATA / "driver.txt") == "580.159.04"
