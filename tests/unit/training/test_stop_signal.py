"""What SIGTERM does to a rank under Slurm, where it is started with that blocked: a real process, and two senders."""

import signal
import subprocess
import sys

import pytest

from ops_rig import wait_for

RANK = """
import multiprocessing, sys, time
from llama405b.training.requests import StopSignal
stop = StopSignal()
worker = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,), daemon=True)
worker.start()  # as those that read the data
for _ in sys.stdin:
    print(stop.is_received, worker.is_alive(), flush=True)
"""


def answer(rank):
    rank.stdin.write("?\n")
    rank.stdin.flush()
    return rank.stdout.readline()


@pytest.mark.slow
def test_torchrun_ends_a_rank_at_once_and_slurm_does_not():
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    rank = subprocess.Popen([sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        assert answer(rank) == "False True\n"
        for _ in range(2):
            subprocess.run(["/bin/sh", "-c", f"kill -TERM {rank.pid}; sleep 0.2"], check=True)  # as slurmstepd does
            assert answer(rank) == "False True\n"  # the node runner decides
        rank.send_signal(signal.SIGUSR1)
        subprocess.run(["sleep", "0.2"], check=True)
        wait_for(lambda: answer(rank) == "True True\n")
        rank.terminate()  # its parent: torchrun
        assert rank.wait(60) == -signal.SIGTERM
    finally:
        rank.kill()
