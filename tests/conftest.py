import collections
import contextlib
import os
import signal
from pathlib import Path

import pytest

import hosts_rig
from ranks_rig import ROOT, run_program

HOSTS = "node-a address=localhost slots=1\nnode-b address=localhost slots=1\n"
ONE_HOST = HOSTS.splitlines()[0]  # for what two ranks would not show better: each takes seconds to import torch
ONE_THREAD = ("--env", "OMP_NUM_THREADS=1")  # for launch: a host of a test would take all cores for its ranks' own
TESTS = ROOT / "tests"

# Where tests run in the background of a script, Ctrl-C is ignored, and their programs would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """A test's kind is the folder it is in: unit, ranks, hosts or standin."""
    for item in items:
        item.add_marker(item.path.relative_to(TESTS).parts[0])


def pytest_terminal_summary(terminalreporter):
    """Where the minutes went, if it were some."""
    seconds = collections.Counter()
    for report in (each for reports in terminalreporter.stats.values() for each in reports):
        if isinstance(report, pytest.TestReport):  # of setup, call or teardown
            seconds[report.nodeid.partition("::")[0]] += report.duration
    if seconds.total() > 300:
        lines = [f"{took:6.0f} s  {file}" for file, took in seconds.most_common(40)]
        terminalreporter.section("slowest files")
        terminalreporter.write_line("\n".join([*lines, f"{seconds.total():6.0f} s  in all"]))


@pytest.fixture(scope="session", autouse=True)
def _state_home(tmp_path_factory):
    """What setup recorded on this machine is no test's, and the other way round; nor is the size of a terminal."""
    for name in ("COLUMNS", "LINES"):  # pytest-xdist's workers have some
        os.environ.pop(name, None)
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True)
def _same_umask():
    """Verbs that run within a test make the files of this process private: those of a later test's hosts are for their users."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    from tiny_models import write_llama

    return write_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_tied(tmp_path_factory):
    from tiny_models import write_llama

    return write_llama(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    """The demo's checkpoint, smaller: real tokenizer, real shards."""
    from llama405b.data.demo_model import make_demo

    directory = tmp_path_factory.mktemp("models") / "demo"
    make_demo(directory, layers=2, hidden=192)
    return directory


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Some real text."""
    directory = tmp_path_factory.mktemp("corpus")
    (directory / "a.py").write_text((Path(os.__file__)).read_text())
    (directory / "b.md").write_text((ROOT / "LICENSE").read_text())
    return directory


@pytest.fixture(scope="session")
def standin(demo, tmp_path_factory):
    """The stand-in for a GPU: trains the demo's model on it, and on the CPU."""
    if not os.environ.get("STANDIN_CHECK"):
        pytest.skip("NOT RUN: start with bash tests/run.sh --standin")
    from standin_rig import Standin

    return Standin(demo, tmp_path_factory.mktemp("standin"))


@pytest.fixture
def ssh_server(tmp_path, monkeypatch):
    """Make SSH servers in this process, which the SSH configuration knows by name."""
    from ssh_rig import Server

    made = []

    def make(name, more="", **how):
        made.append(Server(tmp_path, name, **how))
        with (tmp_path / "config").open("a") as config:
            config.write(f"{made[-1].config}{more}\n")
        return made[-1]

    monkeypatch.setenv("LLAMA405B_SSH_CONFIG", str(tmp_path / "config"))
    yield make
    for each in made:
        each.close()


@pytest.fixture
def shadowed(tmp_path):
    """A directory whose modules, named like Python's own and numpy, end every program that imports one."""
    for name in ("random", "types", "queue", "numpy", "tempfile"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(__file__)\n")
    return tmp_path


@pytest.fixture
def cli():
    """Run ``llama405b`` in a directory, in a process that has imported its modules; returns the completed process."""

    def run(cwd, *args, timeout=240, env=None):
        more_args = ONE_THREAD if args[:1] == ("launch",) else ()
        env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"} | (env or {})
        words = (*args[:1], *more_args, *args[1:])
        return run_program("llama405b_tools.cli:main", *words, cwd=cwd, env=env, timeout_s=timeout)

    return run


@pytest.fixture
def work(tmp_path, cli):
    """A working directory with a hosts file; whatever runs in it is stopped at the end."""
    (tmp_path / "hosts").write_text(HOSTS)
    yield tmp_path
    if _processes_of(tmp_path):
        for run in (tmp_path / "runs").glob("*/plan.json"):
            cli(tmp_path, "stop", "--grace", "0", "--run", run.parent.name)
        left = [pid for pid, is_of_run in _processes_of(tmp_path).items() if is_of_run]
        assert left == [], f"processes left: {left}"


def _processes_of(directory):
    """Those of runs in a directory, and whatever else runs there, such as a guard: whether it is of a run, by pid."""
    found = {}
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_of_run = f"LLAMA405B_NODE={directory}".encode() in (each / "environ").read_bytes()
            if is_of_run or str((each / "cwd").readlink()).startswith(str(directory)):
                found[each.name] = is_of_run
    return found


@pytest.fixture(scope="module")
def hosts(request):
    """Real hosts with an sshd each: as many as the module's ``N_HOSTS`` says, with its ``HOST_USERS``; ``BLANK``."""
    if why := hosts_rig.missing():
        if os.environ.get("LLAMA405B_NOTHING_SKIPPED"):
            pytest.fail(f"NOT RUN: real hosts: {why}")
        pytest.skip(f"NOT RUN: real hosts: {why}")
    module = request.module
    users, blank = getattr(module, "HOST_USERS", hosts_rig.USERS), getattr(module, "BLANK", False)
    with hosts_rig.Hosts(getattr(module, "N_HOSTS", 3), users, blank) as found:
        yield found


@pytest.fixture
def operator(hosts, tmp_path, cli):
    """Run the front door as the operator; afterwards no host may have a process of a run."""
    hosts.hosts_file(tmp_path / "hosts")
    names = []

    def call(*args, env=None, timeout=240):
        names.extend(str(args[i + 1]) for i, arg in enumerate(args) if arg == "--run")
        return cli(tmp_path, *args, env=hosts.env() | (env or {}), timeout=timeout)

    call.path = tmp_path
    yield call
    everywhere = range(1, hosts.count + 1)
    if _processes_of(tmp_path) or any(hosts_rig.processes(hosts, i) for i in everywhere):  # its guard, or of a run
        for name in set(names):
            call("stop", "--grace", "0", "--run", name)
        from ops_rig import wait_for

        def left():
            return [found for i in everywhere if (found := hosts_rig.processes(hosts, i))]

        wait_for(lambda: not left(), says=lambda: left())  # an agent ends once its connection has
