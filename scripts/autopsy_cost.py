"""Time an autopsy of many ranks: those of tests/rigs/fake_trainer, without torch, on network namespaces with an sshd each.

PYTHONPATH=tests:tests/rigs .venv/bin/python scripts/autopsy_cost.py [--ranks 64] [--hosts 8] [--times 3]
One rank is stopped. Their heartbeats and the memory that they show are those of real ranks; their stacks are small. Needs root.
Prints what each autopsy said, and how long it took: the hosts' part, and the whole command with its connections. Ends with 1 if a
wrong rank was named, or it took longer than 10 s.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from conftest import ROOT
from hosts_rig import Hosts
from llama405b.data.demo_model import make_demo
from ops_rig import FAKE_TRAINER, wait_for

GOAL_S = 10.0
SILENT_S = 24.0  # then it counts as a hang; ranks of the fake trainer give up after 60


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--times", type=int, default=3)
    args = parser.parse_args()
    slots = args.ranks // args.hosts
    with tempfile.TemporaryDirectory(prefix="l4-autopsy-cost-") as directory:
        place = Path(directory)
        place.chmod(0o755)
        make_demo(place / "demo", layers=2, hidden=192)
        (place / "corpus").mkdir()
        (place / "corpus/a.py").write_text(Path(argparse.__file__).read_text())
        with Hosts(args.hosts, users=("root",)) as hosts:
            lines = [
                f"node-{i} slots={slots} workdir=~/train_dir python={sys.executable}\n"
                for i in range(1, args.hosts + 1)
            ]
            (place / "hosts").write_text("".join(lines))
            outcomes = [measured(place, hosts, slots, f"r{n}") for n in range(args.times)]
    return int(not all(outcomes))


def measured(place, hosts, slots, run):
    """Launch a run, stop a rank, and look; returns whether it was named in time."""
    world = slots * hosts.count
    victim = world - 1 - slots // 2  # of the last host
    batch = ("--data.seq_len", 64, "--training.global_batch_size", world, "--training.micro_batch_size", 1)
    done = cli(
        place, hosts, "launch", "--run", run, "--preset", "demo", "--model.path", place / "demo", "--data.paths", place / "corpus",
        *batch, "--training.max_steps", 1_000_000, "--checkpoint.every", 100_000, "--checkpoint.storage", "local",
        "--parallel.numa", "off", *FAKE_TRAINER,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    try:
        beat = f"{hosts.workdir(hosts.count)}/runs/{run}/heartbeat/rank-{victim}.json"
        pid = wait_for(lambda: stepping(hosts, beat), 120)
        hosts.exec(hosts.count, "kill", f"-{signal.SIGSTOP}", str(pid))
        time.sleep(SILENT_S)
        began = time.monotonic()
        done = cli(place, hosts, "autopsy", "--run", run, "--json")
        whole_s = time.monotonic() - began
        if not done.stdout:
            print(done.stderr)
            return False
        found = json.loads(done.stdout)
        print(
            f"{world} ranks on {hosts.count} hosts: {whole_s:.1f} s, of which the hosts {found['took_s']:.1f} s; "
            f"{found['verdict'].upper()}  {found['words']}; lost: {found['lost'] or 'none'}",
            flush=True,
        )
        culprit = found["culprit"] or {}
        return whole_s <= GOAL_S and found["verdict"] == "hangs" and culprit.get("ranks") == [victim]
    finally:
        cli(place, hosts, "stop", "--run", run, "--grace", "0")


def stepping(hosts, beat):
    """Return a rank's process once it takes steps."""
    found = hosts.exec(hosts.count, "cat", beat, check=False).stdout
    record = json.loads(found) if found.strip().endswith("}") else {"step": 0}
    return record["pid"] if record["step"] > 2 else None


def cli(place, hosts, *args):
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"} | hosts.env()
    command = [sys.executable, "-m", "llama405b_tools.cli", *map(str, args)]
    return subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=300, check=False)


if __name__ == "__main__":
    sys.exit(main())
