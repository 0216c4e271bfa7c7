"""The steps of setup, run on this machine in a directory of the test's own."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from conftest import ROOT
from llama405b_tools.deliver import setup_plan
from llama405b_tools.deliver.chain import StepProgress
from llama405b_tools.deliver.install import Installer
from llama405b_tools.deliver.setup_plan import SetupOptions, SetupStep
from llama405b_tools.deliver.source_tree import SourceTree
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import HostError
from ops_rig import wait_for


@pytest.fixture
def work(tmp_path):
    with Fleet([Host("localhost", "hosts:1", workdir=str(tmp_path))]) as fleet:
        yield Installer(fleet, SourceTree(tmp_path, {}), SetupOptions(), "")


def test_a_long_step_is_said_again_with_the_last_line_of_its_output(work, tmp_path, capsys, monkeypatch):
    os.mkfifo(tmp_path / "go")
    work.progress = StepProgress(every_s=0.01)
    printed = work.progress._print

    def let_go(whose, what):
        printed(whose, what)
        if what.endswith("Downloading torch (2 GB)"):
            (tmp_path / "go").write_text("go\n")

    monkeypatch.setattr(work.progress, "_print", let_go)
    line = "echo Downloading torch '(2 GB)' >&2; read go <go; echo 2.13.0"
    assert (
        work.run_step("localhost", SetupStep("installing packages", line, "", "0.3 GB to download"), locked=False)
        == "2.13.0"
    )
    said = capsys.readouterr().out
    assert "localhost: installing packages (0.3 GB to download)\n" in said
    assert "localhost: still installing packages: Downloading torch (2 GB)\n" in said


@pytest.mark.parametrize(
    ("line", "why"),
    [("echo no disk >&2; exit 3", "no disk"), ("printf 'no end of line'; false", "no end of line")],
)
def test_a_step_that_fails_says_its_last_line_and_what_to_do(work, line, why):
    with pytest.raises(HostError) as failed:
        work.run_step("localhost", SetupStep("checking", line, "delete .venv"), locked=True)
    assert str(failed.value) == f"checking failed ({why}); delete .venv"


def test_a_step_whose_connection_breaks_has_failed(work, monkeypatch):
    monkeypatch.setattr(work.fleet.connection("localhost"), "stream", lambda line, stdin: iter(["half a li"]))
    with pytest.raises(HostError, match="the connection was lost"):
        work.run_step("localhost", SetupStep("checking", "", "delete .venv"), locked=False)


@pytest.mark.slow
def test_too_little_disk_is_told_with_the_numbers_before_pip_fills_it(work, tmp_path):
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    (tmp_path / ".llama405b-python").write_text(f"{sys.executable}\n")
    facts = {"arch": "x86_64", "python": "3.12", "venv": "yes", "has_tmux": "yes", "has_ip": "yes", "driver": "580.1"}
    steps = {step.name: step for step in setup_plan.plan_setup(facts, SetupOptions(), "")}
    assert list(steps).index("checking the disk") == list(steps).index("installing packages") - 1
    enough = steps["checking the disk"]
    work.run_step("localhost", SetupStep(enough.name, enough.line.replace(" 4.9", " 0.1"), enough.remedy), locked=True)
    with pytest.raises(HostError) as failed:  # 9 PB
        work.run_step(
            "localhost", SetupStep(enough.name, enough.line.replace(" 4.9", " 9000000"), enough.remedy), locked=True
        )
    assert "checking the disk failed (the packages need " in str(failed.value)
    assert f" GB more in {sys.prefix}" in str(failed.value)
    assert " GB are free); make room there, or set workdir= on a larger disk" in str(failed.value)


def _gone(pid):
    return wait_for(lambda: not Path(f"/proc/{pid}").exists())


def _written(path):
    wait_for(lambda: path.exists() and path.read_text().endswith("\n"))
    return path.read_text()


@pytest.mark.slow
def test_ctrl_c_ends_what_setup_started_and_says_so(tmp_path):
    fake, began = tmp_path / "python3.12", tmp_path / "began"
    wait = f"sleep 600 & echo $$ $! >{began}; wait"
    fake.write_text(f'#!/bin/sh\ncase "$1 $2" in "-m venv") {wait};; esac\nexec {sys.executable} "$@"\n')
    fake.chmod(0o755)
    (tmp_path / "hosts").write_text(f"localhost workdir={tmp_path}/work\n")
    interruptible = ["env", "--default-signal=INT"]  # which a shell's `&` has ignored
    command = [*interruptible, sys.executable, "-m", "llama405b_tools.cli", "setup", "hosts", "--python", str(fake)]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"}
    setup = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pids = [int(word) for word in _written(began).split()]
    try:
        setup.send_signal(signal.SIGINT)
        out, err = setup.communicate(timeout=120)
        assert (setup.returncode, all(map(_gone, pids))) == (130, True)
        assert "localhost: ending making .venv\n" in out
        assert err == "interrupted: nothing is left running on the hosts; run the same command to continue\n"
    finally:
        for pid in pids:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
        setup.kill()
        setup.communicate()


def test_a_package_manager_is_not_cut_off(work, tmp_path):
    facts = {"arch": "x86_64", "uid": "0", "python": "3.12", "venv": "yes", "has_dnf": "yes", "has_ip": "yes"}
    step = setup_plan.plan_setup(facts, SetupOptions(), "")[0]
    assert "dnf install -y tmux" in step.line
    stand_in = "echo $$ >pid; while [ ! -e go ]; do sleep 0.05; done; echo whole >done"
    step = SetupStep(step.name, step.line.replace("dnf install -y tmux", stand_in), step.remedy)
    taking = threading.Thread(target=lambda: work.fleet.call_each(lambda name: work.run_step(name, step, locked=True)))
    taking.start()
    try:
        _written(tmp_path / "pid")
        ending = threading.Thread(target=work.interrupt)
        ending.start()
        assert work.ending.wait(120)
        assert not (tmp_path / "done").exists()
    finally:
        (tmp_path / "go").touch()
        taking.join(120)
    ending.join(120)
    assert (tmp_path / "done").read_text() == "whole\n"
    with pytest.raises(HostError, match="setup was interrupted"):
        work.run_step("localhost", step, locked=True)


@pytest.mark.slow
def test_the_agent_gets_an_environment_before_it_receives_the_wheels(work, tmp_path):
    wheels = tmp_path / "wheels"
    fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", wheels, "-c", ROOT / "constraints.txt"]
    subprocess.run([*fetch, "msgspec"], check=True, timeout=100)
    for name in ("constraints.txt", "llama405b", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    work.wheel_python = f"{sys.version_info[0]}.{sys.version_info[1]} {os.uname().machine}"
    work.facts["localhost"] = {"python": work.wheel_python.split()[0], "arch": os.uname().machine, "venv": "yes"}
    work.options = SetupOptions(python=sys.executable)
    assert work.bring_wheels(wheels, ["localhost"]) == {}
    assert work.fleet.hosts["localhost"].python == str(tmp_path / ".venv/bin/python")
    [wheel] = (tmp_path / ".wheelhouse").glob("*.whl")
    assert wheel.name.startswith("msgspec-")
