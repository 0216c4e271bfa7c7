"""From blank hosts to the first step: they have sshd, sh and a Python, but neither this checkout nor its environment."""

import json
import re

import pytest

from hosts_rig import nothing_stays

pytestmark = pytest.mark.timeout(900)
N_HOSTS, BLANK = 3, True
HOST_USERS = ("root", "alice", "root")
DEMO = [
    "--preset",
    "demo",
    "--training.global_batch_size",
    "8",
    "--training.micro_batch_size",
    "2",
    "--data.seq_len",
    "64",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """One directory for the whole story, as the operator would have it."""
    return tmp_path_factory.mktemp("operator")


@pytest.fixture
def type_in(hosts, place, cli):
    sharing = f"workdir={hosts.shared}/project"
    (place / "hosts").write_text(f"node-1 slots=1 {sharing}\nnode-2 slots=1\nnode-3 slots=1 {sharing}\n")

    def call(*args, timeout=600):
        return cli(place, *args, env=hosts.env(), timeout=timeout)

    return call


@pytest.fixture
def project(hosts):
    """Where each host has the project: the first and the third in one directory, the second in its user's home."""
    return {1: f"{hosts.shared}/project", 2: "/home/alice/llama405b", 3: f"{hosts.shared}/project"}


def test_three_commands_to_the_first_step(hosts, project, type_in):
    for i, directory in project.items():
        assert hosts.exec(i, "test", "-e", directory, check=False).returncode == 1
    before = type_in("doctor")
    assert before.returncode == 3
    assert "llama405b setup" in before.stdout
    hosts.speak(2, "de_DE")  # for all that follows
    done = type_in("setup", "--offline")
    assert done.returncode == 0, done.stdout + done.stderr
    for i, directory in project.items():
        assert re.search(rf"^node-{i} +set up: torch 2\.\S+, {directory}/.venv/bin/python$", done.stdout, re.MULTILINE)
    assert re.search(r"^node-3 .*the same directory as on node-1$", done.stdout, re.MULTILINE), done.stdout
    fit = type_in("doctor")
    assert fit.returncode == 0, fit.stdout
    run = type_in("launch", "--run", "first", *DEMO, "--training.max_steps", 2, "--checkpoint.every", 0, "--follow")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "step 1/2" in run.stdout
    for i, directory in project.items():
        assert nothing_stays(hosts, i)
        status = json.loads(hosts.exec(i, "cat", f"{directory}/runs/first/status/node-{i}.json").stdout)
        assert status["exit_code"] == 0


def test_a_second_hosts_file_with_the_same_hosts_works(place, type_in):
    (place / "second").write_text("node-2 slots=8\nnode-1\n")
    done = type_in("status", "second")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("run first\n")


def test_again_does_nothing_and_says_so(hosts, type_in):
    again = type_in("setup", "--offline")
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("was set up already") == 3
    assert again.stdout.count("0 files sent, 0 deleted") == 3
    assert "installing packages" not in again.stdout


def test_hosts_that_share_their_directory_save_into_it(place, type_in):
    (place / "sharing").write_text("".join((place / "hosts").read_text().splitlines(keepends=True)[::2]))
    flags = [*DEMO, "--training.max_steps", 1, "--checkpoint.every", 1]
    run = type_in("launch", "sharing", "--run", "sharing", *flags, "--follow")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "saved runs/sharing/checkpoints/step-00000001" in run.stdout


def test_a_package_is_built_on_the_first_host_alone(hosts, project, type_in):
    source = hosts.shared / "tiny"
    source.mkdir(mode=0o755)
    (source / "setup.py").write_text(
        "import pathlib, socket, setuptools\n"
        "pathlib.Path('tiny_built.py').write_text(f'WHERE = {socket.gethostname()!r}')\n"
        "setuptools.setup(name='tiny-built', version='1', py_modules=['tiny_built'])\n"
    )
    done = type_in("setup", "--offline", "--build", source)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"building {source}") == 1
    for i, directory in project.items():
        python = f"cd {directory} && .venv/bin/python -c 'import tiny_built; print(tiny_built.WHERE)'"
        assert hosts.exec(i, "sh", "-c", python).stdout == "node-1\n"
    missing = type_in("setup", "--offline", "--build", "/no/such/package")
    assert missing.returncode == 1
    assert "node-1  FAILED: building /no/such/package failed" in missing.stdout
    assert missing.stdout.count("/no/such/package could not be built on node-1") == 2


def test_what_cannot_be_set_up_is_named_and_the_others_go_on(hosts, type_in):
    hosts.exec(2, "mv", "/usr/bin/tmux", "/usr/bin/tmux.away")
    try:
        done = type_in("setup", "--offline")
    finally:
        hosts.exec(2, "mv", "/usr/bin/tmux.away", "/usr/bin/tmux")
    assert done.returncode == 1
    assert re.search(
        r"node-2 +FAILED: tmux missing, and this user cannot install; run there as root: apt-get update && apt-get install -y tmux",
        done.stdout,
    )
    assert done.stdout.count("was set up already") == 2
    hosts.exec(
        2, "sh", "-c", "mv /home/alice/llama405b /home/alice/away; chmod 755 /home/alice; chown root /home/alice"
    )
    try:
        done = type_in("setup", "--offline")
    finally:
        hosts.exec(2, "sh", "-c", "chown alice /home/alice; mv /home/alice/away /home/alice/llama405b")
    assert (done.returncode, done.stdout.count("was set up already")) == (1, 2)
    assert re.search(r"node-2 +FAILED: ~/llama405b cannot be created or written", done.stdout)
    broken = type_in("setup", "--python", "/no/python")
    assert broken.returncode == 1
    assert broken.stdout.count("--python: /no/python is missing; use 3.11 or newer") == 3
