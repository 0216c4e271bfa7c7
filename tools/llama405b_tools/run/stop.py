"""End a run for good: no guard brings it back."""

import getpass
import socket
from pathlib import Path

from llama405b.contract.paths import RunDir
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.remote.messages import Ended, EndRequest
from llama405b_tools.run import jobs
from llama405b_tools.run.query import ask

STOP_TIMEOUT_S = 60.0  # beside the grace


def who() -> str:
    """This user, on this machine."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def stop(fleet: Fleet, run: str, grace_s: float) -> dict[str, Ended | HostError]:
    """End the run on every host at once."""
    requests = {name: EndRequest(run, name, by=who(), grace_s=grace_s) for name in fleet.hosts}
    return fleet.ask_all("stop", requests, Ended, STOP_TIMEOUT_S + grace_s)


def stop_job(fleet: Fleet, run: str, grace_s: float) -> dict[str, Ended | HostError]:
    """End the job that a run is."""
    ends = jobs.end_job(RunDir(Path.cwd() / "runs" / run), jobs.job_of(run), fleet.hosts, who(), grace_s)
    seen = ask(fleet, run)[1]
    return {name: jobs.with_node(end, seen[name]) for name, end in ends.items()}
