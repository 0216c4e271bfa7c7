"""The agent, in a process of its own, as hosts run it."""

import contextlib
import subprocess
import sys
import textwrap

import pytest

from llama405b.contract import reader
from llama405b_tools.agent import agent
from llama405b_tools.hosts import calls


def test_an_agent_outlives_a_connection_that_broke():
    program = """
        import socket, sys
        from llama405b_tools.agent import agent

        def act() -> None:
            here, there = socket.socketpair()
            there.close()
            here.send(b"to nobody")

        agent.load_function = lambda name: act
        sys.argv = ["agent", "machine_id"]
        agent.main()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], input="{}\n", capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (1, "Broken pipe\n")


def test_it_reads_no_settings_to_tell_a_runs_state():
    """Their schema took a sixth of its start."""
    code = (
        "import sys; from llama405b_tools.agent import describe; assert 'llama405b.settings.schema' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("name", agent.MODULES)
def test_every_function_can_be_called_by_its_name(name):
    function = agent.load_function(name)
    assert function.__name__ == name
    with contextlib.suppress(reader.MalformedError):  # most have arguments without defaults
        calls.decode_arguments(function, "{}")
    assert calls.prints_messages(function) or calls.reply_type(function)
