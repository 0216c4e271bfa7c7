"""The programs that are sent to hosts run under the oldest Python available, and import nothing of ours."""

import ast
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llama405b.contract import reader
from llama405b.contract.software import code_version
from llama405b_tools.agent import agent
from llama405b_tools.hosts import transport
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.launch.host_facts import HostFacts
from llama405b_tools.top.state.frames import HostFrame


def pythons():
    """Every Python here from 3.6 on, oldest first."""
    found = {}
    names = [f"python3.{minor}" for minor in range(6, 15)]
    places = [
        *Path("/root/.pyenv/versions").glob("3.*/bin/python"),
        *(Path(p) for n in names if (p := shutil.which(n))),
    ]
    for path in [*places, Path(sys.executable)]:
        said = subprocess.run(
            [path, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True, check=False
        )
        version = tuple(map(int, said.stdout.split()))
        if version >= (3, 6):
            found[version] = path
    return [found[version] for version in sorted(found)]


OLDEST = pythons()[0]


def say(name, request, shadowed):
    """The first line that a program prints there."""
    child = subprocess.Popen(
        ["sh", "-c", transport.standalone_command(name).replace("python3", str(OLDEST), 1)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=shadowed,
        env=os.environ | {"HOME": str(shadowed), "PYTHONHOME": "/nowhere", "PYTHONPATH": str(shadowed)},
    )  # fmt: skip
    child.stdin.write(transport.standalone_input(name, request))
    child.stdin.flush()
    try:
        line = child.stdout.readline()
    finally:
        child.stdin.close()
        child.wait(60)
    return line


def test_the_sampler_speaks_as_the_screen_reads(shadowed):
    line = say(
        "sampler",
        {"run": None, "interval_s": 1.0, "deaf_s": 60.0, "smi_retry_s": 30.0, "workdir": str(shadowed), "host": "a"},
        shadowed,
    )
    frame = reader.loads(HostFrame, line, "frame")
    assert frame.cpu.total > 0
    assert frame.run is None


def test_the_probe_speaks_as_doctor_reads(shadowed):
    request = {
        "port": 0, "token": "t", "workdir": str(shadowed), "python": sys.executable, "paths": [str(shadowed)], "within_s": 40,
    }  # fmt: skip
    facts = reader.loads(HostFacts, say("hostprobe", request, shadowed), "facts")
    assert facts.failed == {}
    assert facts.memory.total > 0
    assert facts.environment.packages["python"]
    assert facts.environment.packages["torch"] == importlib.metadata.version("torch")
    assert facts.environment.packages["llama405b"] == code_version()
    assert len(facts.ports) == 2


@pytest.mark.parametrize("name", ["sampler", "hostprobe"])
def test_it_imports_nothing_that_a_host_may_lack(name):
    tree = ast.parse(transport.program_text(name), feature_version=(3, 6))
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported <= sys.stdlib_module_names


def test_the_agent_tells_a_python_older_than_ours(tmp_path):
    source = Path(agent.__file__).read_text()
    ast.parse(source, feature_version=(3, 6))  # or Python would stop before the check, with a SyntaxError
    older = f"import sys; sys.version_info = (3, 10, 2); sys.argv[1:] = []; exec({source!r})"
    done = subprocess.run([sys.executable, "-c", older], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    fleet = Fleet([Host("a", "my hosts:1", workdir="/w", python="/py")])
    said = str(fleet.explain_fault("a", done.stderr.strip()))
    assert said.startswith("/py is Python 3.10, but llama405b needs 3.11 or newer; run `")
    assert said.endswith("llama405b setup 'my hosts'`, or set python=")
