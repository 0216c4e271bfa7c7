"""The agent, in a process of its own, as hosts run it."""

import subprocess
import sys
import textwrap

from llama405b.contract import reader
from llama405b_tools.agent.messages import MachineRequest


def test_an_agent_outlives_a_connection_that_broke():
    program = """
        import socket, sys
        from llama405b_tools.agent import agent
        from llama405b_tools.agent.messages import MachineRequest

        def act(request):
            here, there = socket.socketpair()
            there.close()
            here.send(b"to nobody")

        agent.load_action = lambda name: (act, MachineRequest)
        sys.argv = ["agent", "identify"]
        agent.main()
    """
    order = reader.dumps(MachineRequest()) + "\n"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], input=order, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (1, "Broken pipe\n")


def test_it_reads_no_settings_to_tell_a_runs_state():
    """Their schema took a sixth of its start."""
    code = (
        "import sys; from llama405b_tools.agent import describe; assert 'llama405b.settings.schema' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
