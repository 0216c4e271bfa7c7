"""Where a run is: on hosts (over SSH, or this machine), or in a Slurm job whose files are on this machine."""

import dataclasses
from pathlib import Path
from typing import Protocol

from llama405b.contract.errors import UserError
from llama405b.contract.paths import RunDir
from llama405b.contract.plan import Plan
from llama405b.contract.records import Blame
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.hosts_file import read_hosts
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.outcomes import replies
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.remote import slurm
from llama405b_tools.remote.messages.stop_request import ANSWER_S, StopReply, StopRequest
from llama405b_tools.remote.stopping import record_blame
from llama405b_tools.run import jobs
from llama405b_tools.run.query import ask_hosts, host_of, plan_here
from llama405b_tools.run.screen import show
from llama405b_tools.text.fold import fold_names

Ends = dict[str, StopReply | HostError]  # what became of each host's part


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting:
    """A run that has no hosts to ask: not yet, or not any more."""

    words: str
    is_over: bool


class Backend(Protocol):
    """A way to find, query and end runs."""

    run: str | None  # its name, if known before any host is asked
    elsewhere: bool  # the hosts' files are on this machine, but the hosts are not: no tmux and no hardware to look at

    def hosts(self) -> tuple[Host, ...]:
        """Return the hosts to ask.

        Raises:
            UserError: There are none yet, or the hosts file cannot be read.
        """

    def waiting(self) -> Waiting | None:
        """Why no host can be asked; None if they can."""

    def stop(self, fleet: Fleet, run: str, by: str, grace_s: float) -> Ends:
        """End a run for good, after a grace period for the trainer to save."""

    def stop_launch(self, fleet: Fleet, plan: Plan, blame: Blame | None, grace_s: float = 0.0) -> Ends:
        """End the processes of one launch, and record why; another launch of the same name is not touched.

        ``grace_s``: for the trainer to save first.
        """

    def cancel(self) -> bool:
        """End a waiting run; returns whether it is gone."""


class OnHosts:
    """A run on the hosts of a hosts file."""

    elsewhere = False

    def __init__(self, run: str | None, hosts_file: Path) -> None:
        self.run, self.hosts_file = run, hosts_file

    def hosts(self) -> tuple[Host, ...]:
        """See ``Backend``; where there is no ./hosts, those of the run whose plan is in this directory."""
        if self.hosts_file == Path("hosts") and not self.hosts_file.exists() and (plan := plan_here(self.run)).nodes:
            names = fold_names(node.name for node in plan.nodes)
            show(f"there is no hosts file here; asking {names}, where run {plan.run} was launched", error=True)
            return tuple(host_of(node) for node in plan.nodes)
        return read_hosts(self.hosts_file)

    def waiting(self) -> Waiting | None:
        """Hosts can always be asked."""
        return None

    def stop(self, fleet: Fleet, run: str, by: str, grace_s: float) -> Ends:
        """See ``Backend``; on all hosts in parallel."""
        requests = {name: StopRequest(run, name, by=by, grace_s=grace_s) for name in fleet.hosts}
        return fleet.ask_all("stop", requests, StopReply, ANSWER_S + grace_s)

    def stop_launch(self, fleet: Fleet, plan: Plan, blame: Blame | None, grace_s: float = 0.0) -> Ends:
        """See ``Backend``."""
        names = [node.name for node in plan.nodes]
        requests = {
            name: StopRequest(plan.run, name, only=plan.rdzv_id, grace_s=grace_s, blame=blame) for name in names
        }
        return fleet.ask_all("stop", requests, StopReply, ANSWER_S + grace_s)

    def cancel(self) -> bool:
        """Runs on hosts never wait."""
        return True


class InJob:
    """A run that is a Slurm job."""

    elsewhere = True

    def __init__(self, run: str) -> None:
        self.run: str | None = run
        self.name = run
        self.directory = RunDir(Path.cwd() / "runs" / run)

    def hosts(self) -> tuple[Host, ...]:
        """See ``Backend``."""
        hosts = jobs.job_hosts(self.name)
        if not hosts:
            raise UserError(f"{jobs.words_of(self.name)}; it has no nodes to ask yet")
        return hosts

    def waiting(self) -> Waiting | None:
        """See ``Backend``."""
        if not jobs.waits(self.name):
            return None
        state = slurm.job_state(jobs.job_of(self.name))
        return Waiting(jobs.words_of(self.name), is_over=state in slurm.GONE)

    def stop(self, fleet: Fleet, run: str, by: str, grace_s: float) -> Ends:
        """See ``Backend``; Slurm then tells whether the job is gone, and the files how the run ended."""
        gone = jobs.stop_job(self.directory, jobs.job_of(run), fleet.hosts, by, grace_s)
        told = replies(ask_hosts(fleet, run)[1])
        return {name: StopReply(True, True, job_left=not gone, node=told.get(name)) for name in fleet.hosts}

    def stop_launch(self, fleet: Fleet, plan: Plan, blame: Blame | None, grace_s: float = 0.0) -> Ends:
        """See ``Backend``."""
        if blame:
            for node in plan.nodes:
                record_blame(self.directory, node.name, blame)
        gone = jobs.stop_job(self.directory, plan.slurm_job, fleet.hosts, "", grace_s)
        return {name: StopReply(known=True, was_alive=True, job_left=not gone) for name in fleet.hosts}

    def cancel(self) -> bool:
        """See ``Backend``."""
        return jobs.stop_job(self.directory, jobs.job_of(self.name), (), "", 0.0)


def backend_of(run: str | None, hosts_file: Path) -> Backend:
    """Return the backend of the run named, or of the newest job if there is no hosts file."""
    job = jobs.run_asked(run, hosts_file)
    return InJob(job) if job else OnHosts(run, hosts_file)


def backend_of_plan(plan: Plan) -> Backend:
    """Return the backend that a plan runs on."""
    return InJob(plan.run) if plan.slurm_job else OnHosts(plan.run, Path("hosts"))
