"""Login shells as users have them: other shells than sh's kin, and start-up files that print or read."""

import os
import shutil
import socket
import subprocess
import sys

import pytest

from hosts_rig import BRIDGE
from ops_rig import FAKE_TRAINER, wait_for

N_HOSTS = 2
BASHRC = "/home/alice/.bashrc"


@pytest.fixture
def login(hosts):
    """Give the user of node-2 a shell and a .bashrc."""

    def give(shell, bashrc):
        if not shutil.which(shell):
            if os.environ.get("LLAMA405B_NOTHING_SKIPPED"):
                pytest.fail(f"NOT RUN: needs {shell}")
            pytest.skip(f"NOT RUN: needs {shell}")
        hosts.exec(2, "usermod", "-s", shutil.which(shell), "alice")
        hosts.exec(2, "sh", "-c", f"cat >{BASHRC} <<'EOF'\n{bashrc}\nEOF\nchown alice {BASHRC}")

    yield give
    hosts.exec(2, "usermod", "-s", "/bin/bash", "alice")
    hosts.exec(2, "rm", "-f", BASHRC)


@pytest.mark.parametrize(
    ("shell", "bashrc"),
    [
        ("tcsh", ""),
        pytest.param("csh", "", marks=pytest.mark.soak),
        ("bash", "echo '{\"a\": 1}'; echo '{\"a\": 1}' >&2; printf 'welcome to node-2'"),
    ],
    ids=["tcsh", "csh", "JSON, and no newline"],
)
def test_every_verb_works_whatever_the_login_shell_does(hosts, operator, login, tmp_path, shell, bashrc):
    for i in (1, 2):
        where = f"{hosts.workdir(i)}/p.py"
        hosts.exec(i, "sh", "-c", f"echo 'print(\"it\\047s here!\", flush=True)' >{where}; chmod 644 {where}")
    login(shell, bashrc)
    done = operator("launch", "--run", "shells", "--resume", "auto", "--follow", *FAKE_TRAINER, "--", "p.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert operator("logs", "--run", "shells").stdout.count("it's here!") >= 2
    said = operator("doctor", "--json").stdout
    assert '"lost": {}' in said
    assert "behind" not in said  # its clock
    assert "node-2 OK" in operator("top", "--once").stdout
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "it's new!.txt").write_text("x")
    pushed = operator("push", tmp_path / "code", "--to", "~/pushed")
    assert pushed.returncode == 0, pushed.stdout + pushed.stderr
    assert hosts.exec(2, "cat", "/home/alice/pushed/it's new!.txt").stdout == "x"


@pytest.mark.parametrize(
    "language", ["de_DE", "zh_CN", *(pytest.param(other, marks=pytest.mark.soak) for other in ("fr_FR", ""))]
)
@pytest.mark.usefixtures("login")
def test_a_host_may_speak_any_language(hosts, operator, tmp_path, language):
    hosts.speak(2, language)
    code = tmp_path / "code"
    code.mkdir()
    subprocess.run(["git", "init", "-q", code], check=True)
    for text in (f"print('{language} first')", f"print('{language} second')"):
        (code / "p.py").write_text(text)
        (code / "é.txt").write_text(text)
        pushed = operator("push", code)
        assert pushed.returncode == 0, pushed.stdout + pushed.stderr
        for i in (1, 2):
            assert hosts.exec(i, "cat", f"{hosts.workdir(i)}/p.py").stdout == text
            assert f"node-{i}" in pushed.stdout
        assert pushed.stdout.count("2 files sent, ") == 2
    assert operator("push", code).stdout.count("0 files sent, 0 deleted") == 2
    assert '"lost": {}' in operator("doctor", "--json").stdout
    done = operator("launch", "--run", "speaks", "--resume", "auto", "--follow", *FAKE_TRAINER, "--", "p.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert operator("logs", "--run", "speaks").stdout.count("second") >= 2
    assert operator("stop", "--run", "speaks").returncode == 0
    for i in (1, 2):
        hosts.exec(i, "su", hosts.user(i), "-c", f"cd {hosts.workdir(i)} && git init -q .")
    doctor = operator("doctor").stdout
    assert "the project's commit" not in doctor  # neither has one
    for was, odd, words in (
        (sys.executable, "/no/python", "node-2: /no/python cannot be run; run `"),
        ("workdir=~/train_dir", "workdir=/nowhere", "node-2: there is no directory /nowhere; run `"),
    ):
        first, second = (hosts.hosts_file(tmp_path / "hosts").read_text()).splitlines()
        (tmp_path / "hosts").write_text(f"{first}\n{second.replace(was, odd)}\n")
        assert words in operator("launch", "--run", "odd", "--resume", "auto", *FAKE_TRAINER, "--", "p.py").stderr


def test_a_bashrc_that_reads_is_named(operator, login):
    login("bash", "read answer")
    done = operator("launch", "--run", "reads", "--", "p.py")
    assert done.returncode == 1
    assert "node-2: its login shell's start-up files (such as ~/.bashrc) read input or take more than" in done.stderr
    assert "Nothing was started" in done.stderr


def test_a_login_that_runs_no_command_is_named(operator, login):
    login("bash", "echo maintenance; exit")
    done = operator("launch", "--run", "ends", "--", "p.py")
    assert done.returncode == 1
    assert "start-up files (such as ~/.bashrc) exit before the command runs (maintenance)" in done.stderr


@pytest.mark.parametrize(
    ("bashrc", "words"),
    [
        ("yes", "print without end; let them do that only in interactive shells"),
        ("exec bash", "start another shell, so no command can run; let them do that only in interactive shells"),
    ],
)
def test_start_up_files_that_let_no_command_run_end_a_verb_before_their_time_limit(operator, login, bashrc, words):
    login("bash", bashrc)
    done = operator("launch", "--run", "odd", "--", "-c", "x")
    assert done.returncode == 1
    assert f"node-2: its login shell's start-up files (such as ~/.bashrc) {words}" in done.stderr


@pytest.fixture
def ipv6_alone(hosts):
    """Take the hosts' IPv4 addresses away for a while."""
    config, names = hosts.state / "ssh_config", {}
    before = config.read_text()
    text = before + "".join(f"{line}\n" for line in ["Host *", "  AddressFamily inet6"])
    known = (hosts.state / "known_hosts").read_text()
    prefix = "fd00:213"
    subprocess.run(["ip", "-6", "addr", "add", f"{prefix}::1/64", "dev", BRIDGE, "nodad"], check=True)
    for i in range(1, hosts.count + 1):
        names[i] = f"{prefix}::{10 + i}"
        text = text.replace(f"HostName {hosts.address(i)}\n", f"HostName {names[i]}\n")
        known = known.replace(f"{hosts.address(i)} ", f"{names[i]} ")
        hosts.exec(i, "ip", "-6", "addr", "add", f"{names[i]}/64", "dev", "eth0", "nodad")
        hosts.exec(i, "ip", "-4", "addr", "flush", "dev", "eth0")
    (hosts.state / "known_hosts").write_text(known)
    config.write_text(text)
    lists = {i: hosts.exec(i, "cat", "/etc/hosts").stdout for i in names}
    for i, was in lists.items():
        now = "".join(line for line in was.splitlines(keepends=True) if not line.startswith("10."))
        now += "".join(f"{address} node-{n}\n" for n, address in names.items())
        _write(hosts, i, "/etc/hosts", now)
    yield
    for i, was in lists.items():
        _write(hosts, i, "/etc/hosts", was)
        hosts.exec(i, "ip", "-6", "addr", "del", f"{names[i]}/64", "dev", "eth0")
        hosts.exec(i, "ip", "addr", "add", f"{hosts.address(i)}/24", "dev", "eth0")
        known = known.replace(f"{names[i]} ", f"{hosts.address(i)} ")
    (hosts.state / "known_hosts").write_text(known)
    config.write_text(before)


def _write(hosts, i, path, text):
    hosts.exec(i, "sh", "-c", f"cat >{path} <<'EOF'\n{text}EOF")


@pytest.mark.usefixtures("ipv6_alone")
def test_hosts_with_ipv6_alone_are_refused_before_a_port_is_tried(operator):
    advice = "give it an address that all of them reach"
    unfit = operator("doctor")
    assert unfit.returncode == 3
    assert f"BAD  all hosts: has no IPv4 address, but hosts meet over IPv4\n     → {advice}" in unfit.stdout
    assert "cannot reach" not in unfit.stdout
    refused = operator("launch", "--run", "six", "--resume", "auto", *FAKE_TRAINER, "--", "p.py")
    assert refused.returncode == 1
    assert f"node-[1-2]: has no IPv4 address, but hosts meet over IPv4; {advice}" in refused.stderr
    assert "Nothing was started" in refused.stderr
    assert "node-2 OK" in operator("top", "--once").stdout  # ssh goes over IPv6


@pytest.mark.parametrize(
    "settings",
    [
        ["RemoteCommand tmux new -A -s main", "RequestTTY force"],
        pytest.param(["SessionType none", "StdinNull yes", "ForkAfterAuthentication yes"], marks=pytest.mark.soak),
        pytest.param(["LocalForward 22 127.0.0.1:1", "ExitOnForwardFailure yes"], marks=pytest.mark.soak),
        ["ControlMaster auto", "ControlPath DIR/dead", "RequestTTY no"],
    ],
    ids=lambda settings: settings[0].split()[0],
)
def test_every_verb_works_whatever_an_ssh_config_says(hosts, operator, tmp_path, settings):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead"))
    config = tmp_path / "config"
    text = (hosts.state / "ssh_config").read_text() + "".join(f"  {line}\n" for line in settings)
    config.write_text(text.replace("DIR", str(tmp_path)))

    def call(*args):
        done = operator(*args, env={"LLAMA405B_SSH_CONFIG": str(config)})
        assert done.returncode == 0, (args, done.stdout, done.stderr)
        return done.stdout

    code = tmp_path / "code"
    code.mkdir()
    subprocess.run(["git", "init", "-q", code], check=True)
    (code / "p.py").write_text(f"import time; print('it ran', flush=True); time.sleep(600)  # {settings}")
    assert call("push", code).count("1 file sent, ") == 2
    assert '"lost": {}' in call("doctor", "--json")
    call("launch", "--run", "odd", "--resume", "auto", *FAKE_TRAINER, "--", "p.py")
    wait_for(lambda: call("logs", "--run", "odd").count("it ran") == 2)
    assert "node-2 OK" in call("top", "--once")
    assert '"run": "odd"' in call("status", "--run", "odd", "--json")
    call("stop", "--run", "odd", "--grace", "0")
    assert call("push", code / "p.py", "--to", "/var/tmp/odd").count("every file verified") == 2
