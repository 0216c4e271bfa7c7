"""Start what feeds a run's trackers, and end it: rank 0 does, and waits for it only when the run has ended."""

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable

from llama405b.contract.errors import UserError
from llama405b.contract.paths import RunDir
from llama405b.contract.schema import Tracking

END_S = 30.0  # for what is still to be sent, at the end of a run
PROGRAM = "llama405b.commands.track"


def check_packages(tracking: Tracking) -> None:
    """Refuse trackers whose packages are not installed here.

    Raises:
        UserError: One is not.
    """
    for name in tracking.to:
        if not importlib.util.find_spec(name):
            raise UserError(
                f"--tracking.to: the package {name} is not installed on rank 0's host; run `pip install {name}` there"
            )


class Tracker:
    """The process that feeds a run's trackers. It ends when the pipe that it is given closes: with this process, however that ends."""

    def __init__(self, run: RunDir, say: Callable[[str], None]) -> None:
        self.run, self.say = run, say
        read, self.write = os.pipe()
        os.set_inheritable(read, True)
        words = [sys.executable, "-m", PROGRAM, str(run.path), "--until-closed", str(read)]
        places = os.pathsep.join(filter(None, sys.path))
        self.pid = os.spawnve(os.P_NOWAIT, sys.executable, words, os.environ | {"PYTHONPATH": places})
        os.close(read)

    def close(self) -> None:
        """Have it send what is left, and end it if that takes too long."""
        os.close(self.write)
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline:
            if os.waitpid(self.pid, os.WNOHANG)[0]:
                return
            time.sleep(0.05)
        self.say(f"tracking: not all was sent within {END_S:.0f} s; `llama405b track {self.run.name}` sends the rest")
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
