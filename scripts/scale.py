"""Many hosts for a benchmark: runs ``benchmarks/run.py WHAT …`` with N host names.

    PYTHONPATH=tests:tests/rigs .venv/bin/python scripts/scale.py N WHAT …

The names are aliases of four real hosts (network namespaces with an sshd each), written to ``hosts`` in a new directory
where the command runs. With ``--gpus`` before WHAT, nvidia-smi on them reports eight H100s. Needs root.
``docs/measurements/`` has the results.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import hosts_rig
from conftest import ROOT

MACHINES = 4


def main():
    count, argv = int(sys.argv[1]), sys.argv[2:]
    gpus = argv[0] == "--gpus"
    with hosts_rig.Hosts(MACHINES, ("root",)) as hosts, tempfile.TemporaryDirectory(prefix="l4scale-") as here:
        for i in range(1, MACHINES + 1 if gpus else 1):
            hosts.exec(i, "install", "-m", "755", ROOT / "tests/data/shim/nvidia-smi", "/usr/local/bin/nvidia-smi")
        config = hosts.state / "ssh_config"
        names = [f"n{i:03d}" for i in range(count)]
        aliases = [
            f"Host {name}\n  HostName {hosts.address(1 + i % MACHINES)}\n  User root\n" for i, name in enumerate(names)
        ]
        config.write_text("".join(aliases) + config.read_text())
        lines = [f"{name} slots=1 workdir=~/train_dir python={sys.executable}\n" for name in names]
        (Path(here) / "hosts").write_text("".join(lines))
        env = os.environ | hosts.env() | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"}
        return subprocess.run(
            [sys.executable, ROOT / "benchmarks/run.py", *argv[gpus:]], cwd=here, env=env, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
