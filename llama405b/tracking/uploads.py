"""Start the processes that feed a run's trackers, on rank 0, and wait for them at the end of the run."""

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

from llama405b.contract.errors import UserError
from llama405b.contract.files import read_record
from llama405b.contract.paths import RunDir
from llama405b.contract.software import module_argv
from llama405b.settings.schema import Tracking
from llama405b.tracking.feed import SentState

CLOSE_TIMEOUT_S = 30.0  # to send pending data, at the end of a run
PROGRAM = "llama405b.commands.track"


def check_packages(tracking: Tracking) -> None:
    """Raise an error for trackers whose packages are not installed on this host."""
    for name in tracking.to:
        if not importlib.util.find_spec(name):
            raise UserError(
                f"--tracking.to: the package {name} is not installed on rank 0's host; run `pip install {name}` there"
            )


class TrackerProcesses:
    """One process for each tracker of a run; they end when their pipe closes, even if this process dies."""

    def __init__(
        self, names: Sequence[str], run: RunDir, say: Callable[[str], None], resume_step: int | None = None
    ) -> None:
        """``resume_step``: the step that the user has chosen to resume from."""
        self.run, self.say = run, say
        read_fd, self.write_fd = os.pipe()
        os.set_inheritable(read_fd, True)
        python_path = os.pathsep.join(filter(None, sys.path))
        self.pids = {}
        for name in names:
            sent = read_record(SentState, run.sent(name))
            # The state in a copied run belongs to the original: the copy is sent from the start.
            is_its_own = sent and sent.directory in ("", str(run.path.resolve()))
            if resume_step is not None and sent and is_its_own and sent.step > resume_step:
                say(
                    f"tracking {name}: it keeps steps {resume_step + 1}-{sent.step} as they are and gets only later ones; "
                    f"`llama405b track --run {run.name} --again` sends all steps as a new run"
                )
            argv = [*module_argv(PROGRAM), "--run", str(run.path), "--only", name, "--until-closed", str(read_fd)]
            pid = os.spawnve(os.P_NOWAIT, sys.executable, argv, os.environ | {"PYTHONPATH": python_path})
            self.pids[pid] = name
        os.close(read_fd)

    def close(self) -> None:
        """Let the processes send pending data, and kill those that take too long."""
        os.close(self.write_fd)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while self.pids and time.monotonic() < deadline:
            for pid in [pid for pid in self.pids if os.waitpid(pid, os.WNOHANG)[0]]:
                del self.pids[pid]
            time.sleep(0.05)
        for pid, name in self.pids.items():
            self.say(
                f"tracking {name}: not all was sent within {CLOSE_TIMEOUT_S:.0f} s; `llama405b track --run {self.run.name}` sends the rest"
            )
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
