"""``llama405b stop``: let the trainer save, end every process of a run on every host, and verify that none is left."""

import getpass
import socket
from pathlib import Path

from llama405b.contract.paths import RunDir
from llama405b_tools.hosts.fleet import Fleet, Outcome
from llama405b_tools.run import jobs
from llama405b_tools.run.query import ask
from llama405b_tools.run.start import slurm_end

STOP_TIMEOUT_S = 60.0  # beside the grace


def stop(fleet: Fleet, run: str, grace_s: float) -> dict[str, Outcome]:
    """End the run on every host at once, for good: no guard brings it back."""
    by = f"{getpass.getuser()}@{socket.gethostname()}"
    requests = {name: {"run": run, "host": name, "by": by, "grace_s": grace_s} for name in fleet.hosts}
    return fleet.ask_all("stop", requests, STOP_TIMEOUT_S + grace_s)


def stop_job(fleet: Fleet, run: str, grace_s: float) -> dict[str, Outcome]:
    """End the job that a run is."""
    by = f"{getpass.getuser()}@{socket.gethostname()}"
    gone = jobs.stop(RunDir(Path.cwd() / "runs" / run), jobs.job_of(run), fleet.hosts, by, grace_s)
    seen = ask(fleet, run)[1]
    return {name: slurm_end(gone=gone) | {"node": seen[name]} for name in fleet.hosts}
