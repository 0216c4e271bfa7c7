"""Start what feeds a run's trackers, and end it: rank 0 does, and waits for it only when the run has ended."""

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

from llama405b.contract.errors import UserError
from llama405b.contract.files import read_record
from llama405b.contract.paths import RunDir
from llama405b.contract.software import own_argv
from llama405b.settings.schema import Tracking
from llama405b.tracking.feed import Sent

END_S = 30.0  # for what is still to be sent, at the end of a run
PROGRAM = "llama405b.commands.track"


def check_packages(tracking: Tracking) -> None:
    """Refuse trackers whose packages are not installed here."""
    for name in tracking.to:
        if not importlib.util.find_spec(name):
            raise UserError(
                f"--tracking.to: the package {name} is not installed on rank 0's host; run `pip install {name}` there"
            )


class Trackers:
    """A process for each of a run's trackers. They end when their pipe closes: with this process, however that ends."""

    def __init__(
        self, names: Sequence[str], run: RunDir, say: Callable[[str], None], back_to: int | None = None
    ) -> None:
        """``back_to``: the step that the user has chosen to resume from."""
        self.run, self.say = run, say
        read, self.write = os.pipe()
        os.set_inheritable(read, True)
        places = os.pathsep.join(filter(None, sys.path))
        self.pids = {}
        for name in names:
            sent = read_record(Sent, run.sent(name))
            # What a copied run brought with it is not its own: it is sent anew.
            is_its_own = sent and sent.directory in ("", str(run.path.resolve()))
            if back_to is not None and sent and is_its_own and sent.step > back_to:
                say(
                    f"tracking {name}: it keeps steps {back_to + 1}-{sent.step} as they were, and is sent only later ones; "
                    f"`llama405b track {run.name} --again` sends all as another run"
                )
            words = [*own_argv(PROGRAM), str(run.path), "--only", name, "--until-closed", str(read)]
            pid = os.spawnve(os.P_NOWAIT, sys.executable, words, os.environ | {"PYTHONPATH": places})
            self.pids[pid] = name
        os.close(read)

    def close(self) -> None:
        """Have them send what is left, and end those that take too long."""
        os.close(self.write)
        deadline = time.monotonic() + END_S
        while self.pids and time.monotonic() < deadline:
            for pid in [pid for pid in self.pids if os.waitpid(pid, os.WNOHANG)[0]]:
                del self.pids[pid]
            time.sleep(0.05)
        for pid, name in self.pids.items():
            self.say(
                f"tracking {name}: not all was sent within {END_S:.0f} s; `llama405b track {self.run.name}` sends the rest"
            )
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
