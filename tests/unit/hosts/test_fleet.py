"""Why the agent did not run on a host, in one clause: from what sh or Python said, with the command that mends it."""

import re
import shlex
import shutil
import sys
import threading

import pytest

from conftest import ROOT
from llama405b.contract.software import code_version
from llama405b_tools.agent import describe
from llama405b_tools.agent.messages import StatusReply
from llama405b_tools.hosts import calls
from llama405b_tools.hosts import fleet as fleets
from llama405b_tools.hosts.fleet import Fleet, StreamEndedError
from llama405b_tools.hosts.inventory import Host, parse_hosts
from llama405b_tools.hosts.transport import HostError
from ops_rig import wait_for

WAYS = {
    "ask": lambda fleet: fleet.call("a", describe.status, 20, "a"),
    "dialogue": lambda fleet: fleet.open_session("a", describe.status, "a").receive(
        calls.reply_type(describe.status), 20
    ),
}


@pytest.fixture
def bare(tmp_path):
    """A Python that does not find the project."""
    path = tmp_path / "bare"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S -P "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def older(tmp_path):
    """A Python set up before this version needed msgspec, with our code."""
    (tmp_path / "older").mkdir()
    (tmp_path / "older/msgspec.py").write_text("""raise ModuleNotFoundError("No module named 'msgspec'")""")
    path = tmp_path / "older/python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/older:{ROOT}:{ROOT}/tools exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shell", ["dash", "bash"])
@pytest.mark.parametrize(
    ("python", "workdir", "said"),
    [
        ("", "/nowhere", "there is no directory /nowhere; run `llama405b setup rack`, or set workdir="),
        ("/no/python", "", "/no/python cannot be run; run `llama405b setup rack`, or set python="),
        ("/etc/passwd", "", "/etc/passwd cannot be run; run `llama405b setup rack`, or set python="),
        ("BARE", "", "BARE has no llama405b in WORK; run `llama405b setup rack`, or set workdir= or python="),
        ("OLDER", "", "OLDER has no msgspec; this version needs it: run `llama405b setup rack` again"),
    ],
)
def test_a_missing_environment_is_named_with_the_command_that_makes_it(
    tmp_path, monkeypatch, bare, older, way, shell, python, workdir, said
):
    monkeypatch.setattr(fleets, "_connect", lambda host: In(shell))
    monkeypatch.setattr("llama405b_tools.hosts.fleet.program_name", lambda: "llama405b")
    workdir = workdir or str(tmp_path)
    host = Host("a", "rack:1", workdir=workdir, python={"BARE": bare, "OLDER": older}.get(python, python))
    with Fleet([host]) as fleet, pytest.raises(HostError) as caught:
        WAYS[way](fleet)
    assert str(caught.value) == said.replace("BARE", bare).replace("OLDER", older).replace("WORK", workdir)


class In(fleets.Local):
    """This machine, with another sh."""

    def __init__(self, shell):
        self.shell = shell

    def run(self, command, stdin, timeout_s):
        return super().run(self.through(command), stdin, timeout_s)

    def stream(self, command, stdin):
        return super().stream(self.through(command), stdin)

    def through(self, command):
        return f"exec {self.shell} -c {shlex.quote(command)}"


class Homed(fleets.Local):
    """This machine, with a PYTHONHOME and a PYTHONPATH that are another Python's."""

    def run(self, command, stdin, timeout_s):
        return super().run(f"export PYTHONHOME=/nowhere PYTHONPATH=$PWD; {command}", stdin, timeout_s)


def test_neither_modules_in_the_working_directory_nor_another_pythons_home_reach_the_agent(shadowed, monkeypatch):
    monkeypatch.setattr(fleets, "_connect", lambda host: Homed())
    with Fleet([Host("a", "hosts:1", workdir=str(shadowed))]) as fleet:
        assert WAYS["ask"](fleet) == StatusReply(())


def test_the_agent_is_the_working_directorys_own_whatever_is_installed(tmp_path):
    for package in ("llama405b", "tools/llama405b_tools/agent"):
        (tmp_path / package).mkdir(parents=True)
    (tmp_path / "tools/llama405b_tools/__init__.py").touch()
    (tmp_path / "llama405b/__init__.py").write_text("__version__ = 'its own'")
    text = "import llama405b, sys; sys.exit(f'{llama405b.__version__} {sys.argv[1:]} {sys.path[-2:]}')"
    (tmp_path / "tools/llama405b_tools/agent/agent.py").write_text(text)
    with Fleet([Host("localhost", "hosts:1", workdir=str(tmp_path))]) as fleet, pytest.raises(HostError) as caught:
        fleet.call("localhost", describe.status, 20, "a")
    assert str(caught.value) == f"the agent failed (its own ['status'] {[str(tmp_path), str(tmp_path / 'tools')]})"


class Meeting(dict):
    """What is being opened; knows when three threads have asked."""

    def __init__(self):
        self.asked, self.all_asked = [], threading.Event()

    def setdefault(self, name, mine):
        found = super().setdefault(name, mine)
        self.asked.append(name)
        if self.asked.count(name) == 3:
            self.all_asked.set()
        return found


@pytest.mark.parametrize("fault", [None, HostError("no answer")])
def test_threads_that_need_a_host_share_its_connection_or_its_fault(monkeypatch, fault):
    made, meeting = [], Meeting()

    def connect(host):
        made.append(host)
        assert meeting.all_asked.wait(60)
        if fault:
            raise fault
        return fleets.Local()

    monkeypatch.setattr(fleets, "_connect", connect)
    with Fleet([Host("a", "hosts:1")]) as fleet:
        fleet.pending_connections = meeting
        asked = [fleet.pool.submit(fleet.connection, "a") for _ in range(3)]
        found = {each.exception() or each.result() for each in asked}
    assert (len(made), len(found), meeting) == (1, 1, {})
    assert found == {fault or fleet.connections["a"]}


def test_a_connection_that_its_sshd_closed_is_opened_again(ssh_server):
    server = ssh_server("a")
    with Fleet([Host("a", "hosts:1")]) as fleet:
        first = fleet.connection("a")
        assert fleet.connection("a") is first
        server.open[0].close()
        wait_for(lambda: not first.is_open())
        assert fleet.connection("a").run("echo again", "", 20).out == "again\n"


def test_the_last_words_of_an_agent_that_fails_are_told(tmp_path):
    wrapped = tmp_path / "py"
    wrapped.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT}:{ROOT}/tools exec {sys.executable} "$@"\n')
    wrapped.chmod(0o755)
    with Fleet([Host("localhost", "hosts:1", workdir=str(tmp_path), python=str(wrapped))]) as fleet:
        stream = fleet.stream("localhost", lambda: None)
        [line] = list(stream)
        assert line == f"{calls.MALFORMED} <lambda>: there is no such function\n"
        assert str(fleet.explain_fault("localhost", line.strip())) == "<lambda>: there is no such function"


def test_a_call_that_a_host_refuses_names_the_place_and_both_versions(tmp_path, monkeypatch):
    """A host with other code: whatever it lacks, the operator reads what to do; with the same code it is our own bug."""
    for package in ("llama405b", "tools"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost\n")
    malformed = r"status\.host: expected `str`, got `int`"

    def refusal(text=""):
        with (tmp_path / "tools/llama405b_tools/agent/describe.py").open("a") as file:
            file.write(text)
        with Fleet([Host("localhost", f"{hosts}:1", workdir=str(tmp_path), python=sys.executable)]) as fleet:
            with pytest.raises(HostError) as caught:
                fleet.call("localhost", describe.status, 60, 7)
            return str(caught.value)

    assert re.fullmatch(malformed, refusal())
    versions = rf"; it runs llama405b \S+, this machine {re.escape(code_version())}: run `\S*llama405b setup {hosts}`"
    assert re.fullmatch(malformed + versions, refusal("# other code\n"))
    refused = refusal("def status(host: int) -> str:\n    return ''\n")  # its answer is of another form
    assert re.fullmatch(r"its answer\.result: expected `object`, got `str`" + versions, refused)


@pytest.mark.parametrize(
    ("lines", "slots"),
    [("a slots=8\nb", 8), ("localhost slots=8", 8), ("a address=localhost slots=2\nb address=localhost", 0)],
)
def test_slots_are_gpus_unless_several_names_share_this_machine(lines, slots):
    assert Fleet(parse_hosts(lines, "hosts")).expected_gpus(lines.partition(" ")[0]) == slots


def test_a_host_is_listened_to_again_whatever_ended_it(monkeypatch):
    faults = [RuntimeError("odd"), HostError("no route", "TIMEOUT"), StreamEndedError("the agent ended"), None]
    forgotten, told, done = [], [], threading.Event()

    def listen(name):
        if fault := faults.pop(0):
            raise fault
        done.set()

    with Fleet([Host("a", "hosts:1")]) as fleet:
        monkeypatch.setattr(fleet, "forget", lambda name, *, unless_open=False: forgotten.append(unless_open))
        fleet.keep_listening("a", listen, lambda name, why: told.append((name, str(why), why.kind)), done, 0.0)
        wait_for(done.is_set)
    assert told == [("a", "odd", "DOWN"), ("a", "no route", "TIMEOUT"), ("a", "the agent ended", "DOWN")]
    assert forgotten == [False, True]
