"""What is exported to Prometheus: every metric is documented, and nothing old or unknown is told."""

import dataclasses
import json
import re

import pytest
from shown import HOT, HUNG, played

from conftest import ROOT
from llama405b.contract.errors import UserError
from llama405b_tools.top.exporter import parse_listen_address
from llama405b_tools.top.state.picture import METRICS, HostState, metric_samples


def told(pic):
    return {(sample.name, *sample.labels): sample.value for sample in metric_samples(pic)}


def test_the_values_are_those_of_the_picture_in_base_units():
    pic = played(8, HOT).pic
    found = told(pic)
    gpu = pic.hosts[2].gpus[3]
    assert found["verdict", "DEGRADED"] == 1
    assert found["exit_code",] == 1
    assert found["step", "llama-405b"] == pic.training.step
    assert found["mfu_ratio", "llama-405b"] == pytest.approx(pic.training.mfu_pct / 100)
    assert found["gpu_power_watts", "gpu-3", "3", "19"] == gpu.power_w
    assert found["gpu_memory_used_bytes", "gpu-3", "3", "19"] == 70_112 * 2**20
    assert found["gpu_stands_out", "gpu-3", "3", "19"] == 1
    assert sum(value for (name, *_), value in found.items() if name == "gpu_stands_out") == 1
    assert {name for name, *_ in found} <= {*METRICS}
    assert {*METRICS} - {name for name, *_ in found} == {"evaluation_loss", "goodput_ratio"}  # not known there


def test_every_sample_has_the_labels_that_are_documented():
    for seconds in (HOT, HUNG):
        for sample in metric_samples(played(8, seconds).pic):
            assert len(sample.labels) == len(METRICS[sample.name][0].split()), sample


def test_a_host_that_is_not_heard_tells_nothing_but_that():
    pic = played(8, HOT).pic
    rows = [dataclasses.replace(row, state=HostState.STALE) if row.name == "gpu-3" else row for row in pic.hosts]
    found = told(dataclasses.replace(pic, hosts=tuple(rows)))
    assert {key: value for key, value in found.items() if "gpu-3" in key} == {
        ("host_up", "gpu-3"): 0, ("host_state", "gpu-3", "STALE"): 1
    }  # fmt: skip
    assert ("tokens_per_second", "llama-405b") not in told(played(8, HUNG).pic)


def test_the_documentation_and_the_dashboard_know_the_same_metrics():
    text = (ROOT / "docs/alerts.md").read_text()
    for name, (labels, words) in METRICS.items():
        assert f"| `llama405b_{name}` | {labels.replace(' ', ', ')} | {words} |" in text
    dashboard = json.loads((ROOT / "docs/grafana.json").read_text())
    used = set(re.findall(r"llama405b_(\w+)", json.dumps(dashboard["panels"])))
    assert used <= {*METRICS}
    assert len(used) > 15


@pytest.mark.parametrize(
    ("where", "found"),
    [("9405", ("127.0.0.1", 9405)), ("0.0.0.0:1", ("0.0.0.0", 1)), ("[::1]:65535", ("::1", 65535)), ("ops.lan:80", ("ops.lan", 80))],
)  # fmt: skip
def test_addresses(where, found):
    assert parse_listen_address("--metrics", where) == found


@pytest.mark.parametrize("where", ["", "0", "65536", "a:b", "::1:80", "1.2.3.4", "x y:9"])
def test_what_is_no_address_is_refused(where):
    with pytest.raises(UserError, match=r"--metrics: .* is not \[ADDR:\]PORT; use a port, such as 9405"):
        parse_listen_address("--metrics", where)
