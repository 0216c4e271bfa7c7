"""What a stranger sends tells what was found, and not whose machines these are."""

import json

import pytest

from llama405b.contract.errors import UserError
from llama405b.contract.software import code_version
from llama405b.spec import probes
from llama405b.spec.probes import OPEN_QUESTIONS, Figure, Probe, ProbeResult, Software

FAULT = (
    "RuntimeError: gpu-1.example.org: connect to 10.1.2.3 and fe80::1:2:3:4%eth0 from bob@gpu-1 failed; /home/ann/model is not there; "
    "token=abc.def hf_ABCDEFGHIJKLMNOP"
)
RESULT = ProbeResult(
    Probe.START,
    16,
    2,
    "NVIDIA H100",
    "2.13.0",
    fault=FAULT,
    failed_on="gpu-1",
    figures=(Figure("gpu-1 - gpu-10", 3.5, "GB/s", ("gpu-1", "gpu-10")),),
    software=Software(node="real-name", driver="580.82", cuda="13.0"),
    allocator={"num_ooms": 1},
)


def _written(path, **how):
    hosts = ["gpu-1", "gpu-1.example.org", "gpu-10"]
    probes.write_bundle(path, [RESULT], [Probe.START, Probe.COPIES, Probe.HOG], "2026-11-25", hosts, **how)
    return json.loads(path.read_text())


def test_it_has_figures_versions_the_allocator_and_what_failed(tmp_path):
    found = _written(tmp_path / "b.json", keep_names=False)
    [result] = found["results"]
    assert (result["device"], result["torch"], result["software"]["driver"]) == ("NVIDIA H100", "2.13.0", "580.82")
    assert result["allocator"] == {"num_ooms": 1}
    assert result["figures"][0]["value"] == 3.5
    assert found["without_result"] == ["copies", "hog"]
    assert found["expected"] == {"hog": OPEN_QUESTIONS[Probe.HOG].expected}
    assert found["llama405b"] == code_version()
    assert "RuntimeError" in result["fault"]


def test_it_has_no_name_address_user_or_secret(tmp_path):
    text = json.dumps(_written(tmp_path / "b.json", keep_names=False))
    for word in ("gpu-1", "example.org", "real-name", "10.1.2.3", "fe80", "ann", "bob", "abc.def", "hf_"):
        assert word not in text, word
    [result] = json.loads(text)["results"]
    assert result["failed_on"] == "host-1"
    assert result["figures"][0]["hosts"] == ["host-1", "host-3"]
    assert "host-2: connect to [address]" in result["fault"]


def test_names_are_there_if_they_are_asked_for_and_secrets_never(tmp_path):
    text = json.dumps(_written(tmp_path / "b.json", keep_names=True))
    for word in ("gpu-1.example.org", "real-name", "10.1.2.3"):
        assert word in text
    for word in ("abc.def", "hf_ABC"):
        assert word not in text


def test_what_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--bundle: .*file/b.json cannot be written"):
        probes.check_bundle(tmp_path / "file" / "b.json", with_host_names=False)
    with pytest.raises(UserError, match="--with-host-names is for --bundle"):
        probes.check_bundle(None, with_host_names=True)
    probes.check_bundle(None, with_host_names=False)
