"""What launch.sh prints and runs before Python does, on machines made of stand-ins for their programs."""

import contextlib
import fcntl
import os
import re
import subprocess

import pytest

from conftest import ROOT

TOOLS = (
    "bash",
    "cat",
    "grep",
    "id",
    "sha256sum",
    "sleep",
    "stat",
    "mkdir",
    "chmod",
    "mktemp",
    "tail",
    "tr",
    "cut",
    "rm",
)


@pytest.fixture
def machine(tmp_path):
    """A machine with these tools and a Python, and what `has` adds; everything that runs is noted in `ran`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in TOOLS:
        (programs / name).symlink_to(f"/usr/bin/{name}")

    class Machine:
        ran = tmp_path / "ran"

        def has(self, name, line=":"):
            (programs / name).unlink(missing_ok=True)
            (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{self.ran}\n{line}\n')
            (programs / name).chmod(0o755)

        def start(self, line, **streams):
            """Run a line after sourcing setup.sh."""
            script = f"source {ROOT}/tools/setup.sh; apt_lock={tmp_path}/lock gpu_device={tmp_path}/gpu; {line}"
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | streams
            return subprocess.Popen(["bash", "-uc", script], cwd=tmp_path, env={"PATH": str(programs)}, **pipes)

        def type(self, line):
            with self.start(line) as child:
                said, _ = child.communicate(timeout=60)
            return child.returncode, said

    there = Machine()
    there.has("python3")
    there.ran.write_text("")
    (tmp_path / "lock").touch()
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    return there


def test_the_printed_command_updates_the_lists_and_uses_sudo_only_where_there_is_one(machine):
    machine.has("id", "echo 1000")
    machine.has("apt-get")
    needs = "need_programs no-such-program:tmux"
    assert machine.type(needs) == (2, "missing: tmux; run as root: apt-get update && apt-get install -y tmux\n")
    machine.has("sudo")
    assert machine.type(needs) == (2, "missing: tmux; run: sudo apt-get update && sudo apt-get install -y tmux\n")


def test_a_mac_is_told_how_to_operate_hosts_elsewhere(machine):
    machine.has("uname", "echo Darwin")
    code, said = machine.type("need_linux")
    assert (code, "runs Darwin, and training needs Linux; for hosts elsewhere: uv tool install ." in said) == (2, True)
    machine.has("uname", "echo Linux")
    assert machine.type("need_linux") == (0, "")


def test_a_system_without_apt_is_told_what_is_missing(machine):
    said = "missing: tmux; install them with this system's package manager\n"
    assert machine.type("need_programs no-such-program:tmux") == (2, said)


def test_apts_own_words_are_shown(machine):
    machine.has("id", "echo 0")
    machine.has("apt-get", "echo 'E: the mirror is down' >&2; exit 100")
    code, said = machine.type("need_programs no-such-program:tmux")
    assert code == 2
    assert "E: the mirror is down\napt-get could not install tmux; see its output above\n" in said


@pytest.mark.slow
def test_another_apt_is_waited_for(machine, tmp_path):
    machine.has("apt-get")
    with (tmp_path / "lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        child = machine.start("apt_install tmux")
        assert child.stdout.readline() == "waiting for another apt to finish\n"
        assert machine.ran.read_text() == ""
    assert child.communicate(timeout=60) == ("", None)
    update, install = machine.ran.read_text().splitlines()
    assert update == "apt-get update -qq"
    assert "-o DPkg::Lock::Timeout=" in install  # dpkg's lock apt waits for by itself


def test_where_no_apt_ever_ran_nothing_is_waited_for(machine, tmp_path):
    machine.has("apt-get")
    (tmp_path / "lock").unlink()
    with (tmp_path / "other").open("w") as other:
        fcntl.lockf(other, fcntl.LOCK_EX)  # of somebody else
        assert machine.type("apt_install tmux") == (0, "")


@pytest.fixture
def venv(machine, tmp_path):
    """A .venv whose pip only notes its arguments."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name in ("python", "pip"):
        (tmp_path / ".venv/bin" / name).write_text(f'#!/bin/sh\necho "pip $*" >>{machine.ran}\n')
        (tmp_path / ".venv/bin" / name).chmod(0o755)
    return machine


def test_without_a_gpu_the_small_pytorch_is_taken_and_its_size_said(venv):
    code, said = venv.type("need_venv train")
    assert code == 0
    assert "PyTorch for CPU (there is no GPU) and its packages, 0.3 GB to download;" in said
    pip, tried = venv.ran.read_text().splitlines()[-2:]
    assert "--extra-index-url https://download.pytorch.org/whl/cpu " in pip
    assert re.fullmatch("pip -I -c .*import .*llama405b.train.*", tried)
    assert " -q" not in pip  # its progress is shown
    venv.ran.write_text("")
    assert venv.type("need_venv train") == (0, "")


def test_where_the_small_one_cannot_be_had_that_is_said_with_what_to_set(venv):
    venv.has("python3", "case $3 in *urlopen*) exit 1;; esac")
    _, said = venv.type("need_venv train")
    assert "does not answer; if you know another index with PyTorch for CPU, set PIP_EXTRA_INDEX_URL" in said
    assert "0.3 GB to download (2.7 GB, and 5 GB of disk, if pip finds only PyTorch for CUDA);" in said
    assert "--extra-index-url" not in venv.ran.read_text()


def test_what_pip_installed_must_be_importable(venv, tmp_path):
    python = tmp_path / ".venv/bin/python"
    python.write_text(f"{python.read_text()}case $3 in *import*) echo no libgomp.so.1; exit 1;; esac\n")
    code, said = venv.type("need_venv train")
    assert code == 2
    assert "no libgomp.so.1\nwhat pip installed cannot be imported; see the output above\n" in said
    assert not (tmp_path / ".venv/.set-up").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ends", "code", "left"),
    [("exit 0", 0, ""), ("exit 1", 2, "Collecting torch\r\nDownloading\r\npip could not install the packages;")],
)
def test_a_terminal_shows_one_line_while_pip_works_and_all_if_it_fails(venv, tmp_path, ends, code, left):
    pip = "case $* in *install*) echo Collecting torch; echo Downloading; sleep 0.5; %s;; esac"
    (tmp_path / ".venv/bin/python").write_text(f"#!/bin/sh\n{pip % ends}\n")
    ours, theirs = os.openpty()
    with venv.start("need_venv train", stdout=theirs, stderr=theirs) as child:
        os.close(theirs)
        said = b""
        with contextlib.suppress(OSError):  # the terminal is closed
            while more := os.read(ours, 1000):
                said += more
    os.close(ours)
    assert child.returncode == code
    line, _, after = said.decode().partition("unpacking takes minutes")[2].rpartition("\r\x1b[K")
    assert re.search(r"\r\x1b\[K +\d s  Downloading(\r\x1b\[K)?(\r\x1b\[K +\d s  )*$", line)
    assert after.startswith(left)


def test_with_a_gpu_pytorch_for_cuda_is_taken(venv, tmp_path):
    (tmp_path / "gpu").touch()
    _, said = venv.type("need_venv train")
    assert "PyTorch for CUDA and its packages, 2.7 GB to download;" in said
    assert "--extra-index-url" not in venv.ran.read_text()


def test_too_little_disk_is_told_before_pip_fills_it(venv, tmp_path):
    python = tmp_path / ".venv/bin/python"
    script = python.read_text()
    python.write_text(f"{script}case $2 in *venv_room.py) echo 7.9 GB more, 1.0 GB are free; exit 1;; esac\n")
    assert venv.type("need_venv train") == (2, "7.9 GB more, 1.0 GB are free; make room there\n")
    assert "install" not in venv.ran.read_text()
    (tmp_path / "gpu").touch()
    venv.type("need_venv train")
    [small, large] = [line.split()[3:] for line in venv.ran.read_text().splitlines() if "venv_room" in line]
    assert (float(small[1]) < float(large[1]), len(small)) == (True, 2)
