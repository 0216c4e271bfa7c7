"""A whole first night with the demo's model on two hosts. Run by ``tests/run.sh --soak`` alone; it takes some minutes."""

import json
import os
import re
import subprocess
import tarfile

import pytest

import hosts_rig
from conftest import ONE_THREAD, ROOT

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
N_HOSTS = 2
STEPS = ["doctor", "links", "files", "rehearse", "train", "kill", "save", "resume", "export", "hang"]


def _night(hosts, operator):
    return subprocess.run(
        ["bash", ROOT / "scripts/first_night.sh", "hosts", "--tiny", "--out", "sent", "--", *ONE_THREAD],
        cwd=operator.path, env=os.environ | hosts.env(), capture_output=True, text=True, timeout=3000, check=False,
    )  # fmt: skip


def _steps(host, run):
    lines = map(json.loads, (host / "runs" / run / "metrics.jsonl").read_text().splitlines())
    return {each["step"]: each["attempt"] for each in lines if "loss" in each}


def test_a_night_on_two_hosts_and_its_bundle(hosts, operator):
    done = _night(hosts, operator)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"(?m)^(\w+) +passed +\d+ s  expected: ", done.stdout) == STEPS
    assert "dry run on CPUs: proves the script, not the GPU path\n" in done.stdout
    assert "no leftovers on 2 hosts\n" in done.stdout
    assert [hosts_rig.processes(hosts, i) for i in (1, 2)] == [[], []]
    with tarfile.open(operator.path / "sent.tar.gz") as bundle:
        bundle.extractall(operator.path / "got", filter="data")
    got = operator.path / "got/sent"
    assert [(got / step / "code").read_text() for step in STEPS] == ["0\n"] * len(STEPS)
    said = {step: (got / step / "output").read_text() for step in STEPS}
    stamp = (got / "stamp").read_text().strip()
    night, hang = f"night-{stamp}", f"hang-{stamp}"

    assert re.search(r"rank 1 was killed by SIGKILL \(restart 1, from \S+/step-00000050\)", said["kill"])
    assert "copied to the next host: step 60\n" in said["save"]
    first, other = (got / "collected" / name for name in ("node-1", "node-2"))
    assert _steps(first, night)[55] == 3  # again, after the kill
    assert (got / "resume/hosts").read_text() == "sent/other\n"
    assert (got / "other").read_text().startswith("node-2 ")
    assert f"resumed from runs/{night}/checkpoints/step-00000060\n" in said["resume"]
    assert "on 1 rank of 1 host\n" in said["resume"]
    assert list(_steps(other, night)) == list(range(61, 71))
    assert re.search(rf"node-2: read back 1 file of {night}-exported: as written", said["export"])
    [report] = (got / "collected/runs" / hang / "autopsy").glob("*/report.txt")
    assert re.search(r"(?m)^HANGS  node-2: rank 1 cannot continue: it is stopped by a signal", report.read_text())
    assert list(_steps(first, hang).items())[-1] == (10, 2)
    for host, step in ((first, 60), (other, 70)):
        manifest = host / "runs" / night / f"checkpoints/step-{step:08d}/manifest.json"
        assert json.loads(manifest.read_text().splitlines()[0])["step"] == step
    assert "torch==" in (other / "machine.txt").read_text()
    assert list(json.loads((got / "collected/doctor.json").read_text())["facts"]) == ["node-1", "node-2"]
    assert sorted((path.name for path in got.glob("collected/*.html")), reverse=True) == [
        "report.html",
        "report-resumed.html",
    ]
    assert [path for path in got.rglob("*") if path.suffix in (".distcp", ".safetensors", ".secrets")] == []
    assert max(path.stat().st_size for path in got.rglob("*")) < 8 << 20

    again = _night(hosts, operator)
    assert again.returncode == 0, again.stdout + again.stderr
    assert re.findall(r"(?m)^(\w+): (.*)$", again.stdout)[: len(STEPS)] == [
        (step, "has passed before") for step in STEPS
    ]
    assert (got / "kill/output").read_text() == (operator.path / "sent/kill/output").read_text()
