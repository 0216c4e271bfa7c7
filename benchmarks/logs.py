"""Compare ``logs`` with ``ssh … tail``."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rig import RUN, SETTLE_S, checked, least, ssh_argv, stub_launch
from llama405b.contract.errors import UserError
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.text.figures import format_columns


def logs(hosts: Sequence[Host], path: Path, lines: int, repeat: int) -> int:
    """Measure reading a log of ``lines`` lines from every host."""
    stub_launch(hosts, path, str(lines))
    time.sleep(SETTLE_S)
    total = lines * len(hosts)
    argv = [sys.executable, "-m", "llama405b_tools.cli", "logs", str(path), "--run", RUN]
    rows = [
        ("ssh … tail, one process each", least(lambda: _tails(hosts), repeat)),
        ("llama405b logs -o raw", least(lambda: checked([*argv, "-o", "raw"]), repeat)),
        ("llama405b logs", least(lambda: checked(argv), repeat)),
        ("llama405b logs --fold", least(lambda: checked([*argv, "--fold"]), repeat)),
    ]
    shown = [(name, f"{cost.wall_s:.2f}", f"{total / cost.wall_s:,.0f}", f"{cost.cpu_s:.2f}") for name, cost in rows]
    print(
        format_columns((f"{len(hosts)} hosts, {total:,} lines", "wall s", "lines/s", "CPU s here"), shown), flush=True
    )
    return 0


def _tails(hosts: Sequence[Host]) -> None:
    """Do what people type: one ssh per host, each with tail on its files."""
    children = []
    for host in hosts:
        files = f"{host.workdir or Path.cwd()}/runs/{RUN}/logs/{host.name}/{RUN}-*/attempt_0/0/stdout.log"
        newest = f"tail -q -n +1 $(ls -td {files} | head -1)"
        children.append(subprocess.Popen([*ssh_argv(), host.name, newest], stdout=subprocess.DEVNULL))
    for child in children:
        if child.wait():
            raise UserError("ssh failed; check that `ssh HOST` works for every host")
