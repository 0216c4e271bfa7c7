"""Stands in for torchrun: starts this host's ranks, notes their output where torchrun does, and ends as it does.

Of the trainer it starts ``fake_trainer/train.py``; any other program is started as it is. It has no rendezvous of its own:
the ranks meet at the endpoint's port.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

TRAINER = Path(__file__).parents[2] / "train.py"
POLL_S = 0.05
GRACE_S = 30
SUMMARY = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
=====================================================
Failures:
  <NO_OTHER_FAILURES>
-----------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : {time}
  host      : {host}
  rank      : {rank} (local_rank: {local_rank})
  exitcode  : {code} (pid: {pid})
  error_file: <N/A>
====================================================="""


class SignalException(Exception):  # noqa: N818 - as torch calls it
    pass


def parse(argv):
    """This program's own options, and the program that it starts."""
    n_options = next(i for i, word in enumerate(argv) if word.startswith("--redirects")) + 1
    options = dict(word.removeprefix("--").split("=", 1) for word in argv[:n_options])
    program = [word for i, word in enumerate(argv[n_options:]) if word != "--" or i > 1]
    if program[0] == "--no-python":  # a module of ours, which Python is to start in our way
        program[: program.index("llama405b.train") + 1] = [str(TRAINER)]
    return options, [sys.executable, *program]


def start(options, program, local_rank):
    address, _, port = options["rdzv-endpoint"].rpartition(":")
    env = os.environ | {
        "LOCAL_RANK": str(local_rank),
        "RANK": str(first_rank() + local_rank),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    logs = Path(options["log-dir"], f"{options['rdzv-id']}_fake", "attempt_0", str(local_rank))
    logs.mkdir(parents=True)
    with (logs / "stdout.log").open("wb") as out, (logs / "stderr.log").open("wb") as err:
        return subprocess.Popen(program, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err)


def end(ranks):
    for rank in ranks:
        rank.terminate()
    deadline = time.monotonic() + GRACE_S
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.wait(max(0, deadline - time.monotonic()))
        rank.kill()


def main():
    options, program = parse(sys.argv[1:])

    def ended(number, _frame):
        raise SignalException(f"Process {os.getpid()} got signal: {number}")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, ended)
    ranks = [start(options, program, i) for i in range(int(options["nproc-per-node"]))]
    try:
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            time.sleep(POLL_S)
    finally:
        codes = [rank.poll() for rank in ranks]
        end(ranks)
    for i, code in enumerate(codes):
        if code:
            facts = {"time": time.strftime("%F_%T"), "host": "localhost", "rank": first_rank() + i, "local_rank": i}
            print(SUMMARY.format(**facts, code=code, pid=ranks[i].pid), file=sys.stderr)
            sys.exit(1)


def first_rank():
    return int(os.environ["LLAMA405B_FIRST_RANK"])


if __name__ == "__main__":
    main()
