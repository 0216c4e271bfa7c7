"""tune: settings tried on real hosts, the fastest written into the settings file, and what was measured kept for plan and launch."""

import dataclasses
import re
import signal
import subprocess
import sys
import time
import tomllib

import pytest

import hosts_rig
from ops_rig import wait_for
from ranks_rig import ROOT

N_HOSTS = 4
HOST_USERS = ("root",)
MY_TOML = """# of the team
[model]
path = "{model}"

[data]
paths = ["stdlib"]
max_bytes = 200_000
seq_len = 64  # short

[training]
global_batch_size = 8
micro_batch_size = 1  # as before
max_steps = 4

[parallel]
device = "cpu"

[checkpoint]
every = 0
"""
# A loss of a user's own with two faults: it is wrong for two sequences at once, and fails for four.
OWN_LOSS = """
from torch.nn.functional import cross_entropy


def loss(logits_TV, targets_T):
    if len(targets_T) == 4 * 64:
        raise ValueError("four at once")
    return cross_entropy(logits_TV.float(), targets_T, reduction="sum") * (1.5 if len(targets_T) == 2 * 64 else 1)
"""


@pytest.fixture
def settings(hosts, operator):
    from llama405b.data.demo_model import make_demo

    if not (hosts.shared / "m").exists():
        make_demo(hosts.shared / "m", layers=4, hidden=192)
    path = operator.path / "my.toml"
    path.write_text(MY_TOML.format(model=hosts.shared / "m"))
    return path


ONE_THREAD = ("--env", "OMP_NUM_THREADS=1")


@pytest.mark.timeout(400)
def test_the_fastest_settings_go_into_the_file_and_are_launched(hosts, operator, settings):
    words = ("--config", "my.toml")
    found = operator("tune", "hosts", *words, *ONE_THREAD, "--minutes", "1")
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert re.match(r"up to 12 of \d+ settings, each with few layers and random weights, in 1 min:", lines[0])
    times = {
        label: float(seconds) for seconds, label in re.findall(r"^ +\d+ +([\d.]+) s a step; (.*)$", found.stdout, re.M)
    }
    assert next(iter(times)) == "as set"
    assert len(times) >= 3
    assert "left out" not in found.stdout
    assert "failed" not in found.stdout
    [best, best_s] = re.search(r"^fastest with room: (.*): ([\d.]+) s a step", found.stdout, re.M).groups()
    assert float(best_s) <= times[best] * 1.01
    assert times[best] == pytest.approx(min(times.values()), rel=0.05)
    text = settings.read_text()
    written = tomllib.loads(text)
    before = tomllib.loads(MY_TOML.format(model=hosts.shared / "m"))
    changed = {
        f"{section}.{key}"
        for section, table in written.items()
        for key in table
        if table[key] != before.get(section, {}).get(key)
    }
    assert changed == set(re.findall(r"--(\S+) ", best) if best != "as set" else [])
    assert "# of the team" in text
    assert "seq_len = 64  # short" in text
    assert text.count("# tuned 20") == len(changed)

    planned = operator("plan", "hosts", *words, "--verbose")
    assert planned.returncode == 0, planned.stderr
    assert re.search(r"^measured +on these hosts on 20", planned.stdout, re.M), planned.stdout
    again = operator("launch", "hosts", "--run", "tuned", *words, "--tune", "--follow")
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("tuned on 20")
    assert "4/4" in again.stdout
    assert settings.read_text() == text
    for i in range(1, N_HOSTS + 1):
        hosts_rig.nothing_stays(hosts, i)
        assert not list(hosts.shared.glob("**/step-*"))


def test_ctrl_c_ends_all_and_changes_nothing(hosts, operator, settings):
    text = settings.read_text()
    env = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root", "PYTHONUNBUFFERED": "1"} | hosts.env()
    command = [sys.executable, "-m", "llama405b_tools", "tune", "hosts", "--config", "my.toml", *ONE_THREAD]
    program = subprocess.Popen(
        [ROOT / ".venv/bin/llama405b", *command[3:]] if (ROOT / ".venv/bin/llama405b").exists() else command,
        cwd=operator.path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(lambda: any("llama405b.bench" in line for line in hosts_rig.processes(hosts, 4)))
    time.sleep(2)
    program.send_signal(signal.SIGINT)
    program.communicate(timeout=60)
    assert program.returncode == 130
    for i in range(1, N_HOSTS + 1):
        hosts_rig.nothing_stays(hosts, i)
    assert settings.read_text() == text
    assert not (operator.path / "hosts.calibration.json").exists()


def test_what_fails_or_computes_something_else_is_left_out_by_name(work, demo, capsys):
    from llama405b_tools.hosts.fleet import read_hosts
    from llama405b_tools.launch.request import parse_launch
    from llama405b_tools.verbs import tune

    (work / "my.toml").write_text(MY_TOML.format(model=demo))
    (work / "own.py").write_text(OWN_LOSS)
    words = ["--config", str(work / "my.toml"), "--extend", str(work / "own.py"), *ONE_THREAD]
    request = parse_launch([str(work / "hosts"), *words], time.time())
    hosts = [dataclasses.replace(host, workdir=str(work / host.name)) for host in read_hosts(work / "hosts")]
    for host in hosts:
        (work / host.name).mkdir()
    asked, prediction = tune.predict_asked(request, tune.detect_machines(request, hosts))
    chosen = []
    for change in ({}, {"micro_batch": 4}, {"micro_batch": 2}, {"fsdp_unit": "sublayer"}):
        changed = prediction.with_run(dataclasses.replace(prediction.run, **change))
        option = tune.make_option(changed, request.settings, asked, prediction, 2)
        in_order = dataclasses.replace(option.candidate, predicted_s=0.0)
        chosen.append(dataclasses.replace(option, candidate=in_order))
    outcomes = tune.try_options(request, hosts, chosen, 200.0)
    wrong, right = "--training.micro_batch_size 2", "--parallel.fsdp_unit sublayer"
    assert [outcome.label for outcome in outcomes] == ["as set", wrong, right]
    assert tune.keep_best(request, outcomes)
    said = capsys.readouterr().out.splitlines()
    assert re.match(
        r"  2  failed: .*loss\(\) raised ValueError: four at once; .* shows every rank; --training", said[2]
    )
    [left_out] = [line for line in said if line.startswith("left out: ")]
    assert left_out.endswith(f"are not those of the others; {wrong}")
    [best] = [line for line in said if line.startswith("fastest with room: ")]
    assert wrong not in best
    assert "micro_batch_size = 1  # as before" in (work / "my.toml").read_text()
