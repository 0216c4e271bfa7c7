"""cluster-top ends by a signal even if its own way to the end is blocked."""

import signal
import subprocess
import sys

import pytest

BUSY = "from llama405b_tools.top.remembered import handle_signals; handle_signals(print); print('on', flush=True)\nwhile True: pass"


@pytest.mark.slow
def test_any_signal_ends_a_program_that_does_not_react():
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    code = f"import signal; [signal.signal(end, signal.SIG_DFL) for end in {[*map(int, ends)]}]; {BUSY}"  # a shell's & ignores two
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in ends]
    try:
        for child, end in zip(children, ends, strict=True):
            assert child.stdout.readline() == "on\n"
            child.send_signal(end)
        for child, end in zip(children, ends, strict=True):
            child.communicate(timeout=60)
            assert child.returncode == 128 + end
    finally:
        for child in children:
            child.kill()


@pytest.mark.slow
def test_a_signal_that_is_ignored_stays_so():
    code = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); {BUSY}"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "on\n"
        child.send_signal(signal.SIGHUP)
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGTERM
