"""Keep on this host what its run's guard last said, and when. Standard library."""

import dataclasses
import time

from llama405b.contract.files import write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.plan import read_plan
from llama405b.contract.records import GuardState
from llama405b_tools.remote.locks import run_of
from llama405b_tools.remote.messages.guard import GuardNote, Noted


def take_note(request: GuardNote) -> Noted:
    """Write the guard's note, unless the run is not the guard's any more, or somebody has stopped both."""
    run = run_of(request.run)
    if read_plan(run).rdzv_id == request.only and not run.stop(request.host).exists():
        note_guard(run, request.host, request.state)
    return Noted()


def note_guard(run: RunDir, host: str, state: GuardState | None) -> None:
    """Write what the guard said, with the time by this host's clock; None: no guard was asked for."""
    if state is None:
        run.guarded(host).unlink(missing_ok=True)
    else:
        write_json(run.guarded(host), dataclasses.replace(state, time=time.time()))
