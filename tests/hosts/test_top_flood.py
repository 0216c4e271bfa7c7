"""cluster-top while one rank writes as fast as it can: the screen lives, the quiet host is seen, and it ends when told to."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from conftest import ROOT
from llama405b_tools.agent import processes
from ops_rig import FAKE_TRAINER, Terminal, wait_for

FLOOD = """
import os, sys, time
loud = os.environ["LLAMA405B_FIRST_RANK"] == "0"
line = "node NCCL TRACE {} some words that are as long as a line of a log usually is, about a hundred characters\\n"
print("ready", flush=True)
n = 0
while not os.path.exists("over"):
    if loud and os.path.exists("go") and n < 3_000_000:
        sys.stdout.write("".join(line.format(i) for i in range(n, n + 1000)))
        n += 1000
    else:
        print("quiet", time.time(), flush=True)
        time.sleep(0.2)
"""


@pytest.fixture
def top(work, cli):
    (work / "flood.py").write_text(FLOOD)
    assert cli(work, "launch", "--run", "flood", *FAKE_TRAINER, "--", "flood.py").returncode == 0
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}", "PATH": os.environ["PATH"]}
    terminal = Terminal([sys.executable, "-m", "llama405b_tools.cli", "top"], work, env)
    yield terminal
    (work / "over").touch()
    terminal.close()


def resident_mb(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


@pytest.mark.parametrize(
    "end", ["q", "TERM", *(pytest.param(name, marks=pytest.mark.soak) for name in ("INT", "HUP", "QUIT"))]
)
def test_a_flood_of_lines_does_not_freeze_the_screen(top, work, end):
    top.shows(r"hosts 2/2", 60)
    top.shows(r"r0(-1)? ready", 60)
    (work / "go").touch()
    top.shows(r"node-a [\d,]+ lines came too fast to be shown", 60)
    pid = top.pid()
    assert resident_mb(pid) < 200
    if end == "q":
        top.keys("5")
        top.shows(r"── LOG.*\n(.*\n)+.*NCCL TRACE", 20)
        top.keys("1", "j", "Enter")
        # one line for both ranks where they printed it within the window in which equals are folded
        shown = top.shows(r"── PROCESSES(.|\n)*node-b r(0-)?1 quiet", 20)
        assert "NCCL" not in shown
        top.keys("q", "q")  # back, then out
    else:
        os.kill(pid, getattr(signal, f"SIG{end}"))
    wait_for(lambda: processes.start_time(pid) is None)
    code = 0 if end == "q" else 128 + getattr(signal, f"SIG{end}")
    top.shows(rf"^rc={code}$" if end != "q" else r"^rc=[01]$", 20)
    modes = "#{alternate_on} #{cursor_flag} #{mouse_any_flag}"
    assert top.run("display", "-p", "-t", "t", modes).strip() == "0 1 0"
