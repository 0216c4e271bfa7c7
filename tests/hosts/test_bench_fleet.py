"""The operator's benchmarks on a few hosts: they run and count; how fast is not tested."""

import re
import subprocess

import pytest

from hosts_rig import nothing_stays
from ops_rig import benchmark


@pytest.mark.soak
def test_fleet(hosts, operator):
    done = benchmark(operator.path, "fleet", "--repeat", "1", env=hosts.env())
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("bare paramiko, true", "llama405b status", "llama405b launch, all checks"):
        assert re.search(rf"^{re.escape(name)} +\d+\.\d\d +\d+\.\d +\d+\.\d\d$", done.stdout, re.MULTILINE), done.stdout
    for i in (1, 2, 3):
        assert nothing_stays(hosts, i)


@pytest.mark.soak
def test_top(hosts, operator):
    done = benchmark(operator.path, "top", "--repeat", "1", "--seconds", "5", env=hosts.env())
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("ssh host nvidia-smi, one process each", "cluster-top, its screen", "cluster-top --json --watch 2"):
        assert re.search(rf"^{re.escape(name)} +\d+\.\d +\d+ ", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"from a change on a host to the screen: median \d\.\d s, at most \d\.\d s of 9", done.stdout)
    for i in (1, 2, 3):
        assert nothing_stays(hosts, i)


@pytest.mark.soak
def test_logs(hosts, operator):
    done = benchmark(operator.path, "logs", "--repeat", "1", "--lines", "3000", env=hosts.env())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 hosts, 9,000 lines" in done.stdout
    assert len(re.findall(r"^llama405b logs.*\d\.\d\d$", done.stdout, re.MULTILINE)) == 3
    shown = operator("logs", "--run", "bench-fleet", "-o", "raw")
    assert shown.stdout.count("step ") == 9000


def test_copies(tmp_path):
    done = benchmark(tmp_path, "copies", "--gb", "0.04", "--mbit", "1000", "--repeat", "1", "--dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ours / plain: \d\.\d\d\nours / link of 1000 Mbit/s: [01]\.\d\d$", done.stdout, re.MULTILINE)
    assert "l4bench" not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert list(tmp_path.iterdir()) == []
