"""Type every command of docs/first-day.md, then of docs/checkpoints.md, on four blank hosts, and print what they print.

    PYTHONPATH=tests:tests/rigs .venv/bin/python scripts/first_day.py

The hosts are network namespaces with an sshd each, so it needs root; /shared is a directory that they share. Before each
``status`` it waits for half a minute, in which the run gets somewhere. Exit code 1 if a command fails.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import hosts_rig
from conftest import ROOT

HOSTS = 4


def main() -> int:
    """Print the day; returns 1 if a command failed."""
    document = "\n".join((ROOT / "docs" / page).read_text() for page in ("first-day.md", "checkpoints.md"))
    commands = [line for block in re.findall(r"^```\n(.*?)^```", document, re.DOTALL | re.MULTILINE)
                for line in re.findall(r"^\$ (.*)$", block, re.MULTILINE)]  # fmt: skip
    [inventory] = re.findall(r"^\$ cat hosts\n(.*?)^```", document, re.DOTALL | re.MULTILINE)
    failed = []
    with hosts_rig.Hosts(HOSTS, ("root",), blank=True) as hosts, tempfile.TemporaryDirectory(prefix="l4day-") as here:
        (Path(here) / "hosts").write_text(inventory)
        programs = Path(here) / ".bin"
        programs.mkdir()
        for name, module in (("llama405b", "cli"), ("cluster-top", "verbs.top")):
            (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m llama405b_tools.{module} "$@"\n')
            (programs / name).chmod(0o755)
        env = os.environ | hosts.env()
        env |= {"PATH": f"{programs}:{env['PATH']}", "PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}", "COLUMNS": "120"}
        for command in commands:
            if command.startswith("llama405b status"):
                time.sleep(30)
            print(f"$ {command}", flush=True)
            typed = command.replace("/shared", str(hosts.shared)).replace(
                "ssh ", f"ssh -F {hosts.state / 'ssh_config'} "
            )
            done = subprocess.run(
                ["bash", "-c", typed], cwd=here, env=env, timeout=900, check=False, text=True, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
            print(done.stdout.replace(str(hosts.shared), "/shared"), flush=True)
            if done.returncode:
                failed.append(command)
                print(f"exit code {done.returncode}\n", flush=True)
    print(f"{len(commands)} commands, {len(failed)} failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
