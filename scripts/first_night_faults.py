"""What befalls the last rank in scripts/first_night.sh, as an extension of the run: after a step it gets a signal, once.

FIRST_NIGHT is ``SIGNAL STEP ID``; a run in which it happened has a file with that ID.
"""

import os
import signal

from llama405b.extend import HookContext

EVERY = 1


def every(moment: HookContext) -> None:
    """After each step."""
    name, step, which = os.environ["FIRST_NIGHT"].split()
    done = moment.run / f"fault-{which}"
    if moment.step == int(step) and moment.rank == moment.world - 1 and not done.exists():
        done.touch()
        os.kill(os.getpid(), signal.Signals[name])
