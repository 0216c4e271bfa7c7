"""Find, query and end a run on hosts, or in a Slurm job.

Hosts are reached over SSH, or are this machine; the files of a job are on this machine.
A host can also be made to run a verb: to write a model from its checkpoint, or to send it.
"""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from llama405b.contract.errors import RunError, UserError
from llama405b.contract.files import read_record, write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.records import FailureRecord, StopMark
from llama405b.spec.plan import Plan, check_run_name, read_plan
from llama405b_tools.agent import processes, starting
from llama405b_tools.agent.messages import RUNNER_END_TIMEOUT_S, STOP_TIMEOUT_S, StopReply
from llama405b_tools.agent.processes import record_failure
from llama405b_tools.hosts.fleet import CLI, DEFAULT_HOSTS_FILE, Fleet, read_hosts, run_streaming
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.run.query import ask_hosts, host_of, plan_in_directory
from llama405b_tools.run.screen import show
from llama405b_tools.text.words import fold_names


def run_verb_on(
    fleet: Fleet, host: str, arguments: Sequence[str], on_line: Callable[[str], object], setup: str = ""
) -> None:
    """Run a verb on a host, in its working directory; ``on_line`` takes what it prints. ``setup``: a shell line to run before.

    Raises:
        UserError: The host refused it; its last lines say why.
        RunError: It failed, or the connection was lost; the same command resumes.
    """
    line = fleet.command(host, CLI, arguments, setup)
    code = run_streaming(fleet.connection(host), line, lambda output: on_line(f"{host}: {output}"))
    if code == "2":
        raise UserError(f"{host}: {arguments[0]} was refused; see above")
    if code != "0":
        why = f"{arguments[0]} ended with exit code {code}; see above" if code else "the connection was lost"
        raise RunError(f"{host}: {why}; run the same command to resume")


KILL_WAIT_S = 60.0  # for Slurm to end what did not end by itself
POLL_S = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class JobRecord:
    """The job of a run."""

    job: str
    options: str = ""


def stop_job(run: RunDir, job: str, hosts: Iterable[str], by: str, grace_s: float) -> bool:
    """End a job: through the node runners, which look for a stop file and let the trainer save, then through Slurm.

    The files come first in any case: node runners that find none take Slurm's SIGTERM for a preemption, and let it save.
    Returns whether the job is gone.
    """
    ask_to_stop(run, hosts, by, grace_s)
    if processes.is_job_alive(job) and grace_s:
        _wait_until_gone(job, grace_s + RUNNER_END_TIMEOUT_S)
    if processes.job_state(job) not in processes.JOB_END_STATES:
        processes.call_slurm(["scancel", job])
        _wait_until_gone(job, KILL_WAIT_S)
    return processes.job_state(job) in processes.JOB_END_STATES


def ask_to_stop(run: RunDir, hosts: Iterable[str], by: str, grace_s: float) -> None:
    """Write the stop files on which the node runners let the trainer save, and end."""
    for host in hosts:
        write_json(run.stop(host), StopMark(by, grace_s, time.time()))


def _wait_until_gone(job: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while processes.job_state(job) not in processes.JOB_END_STATES and time.monotonic() < deadline:
        time.sleep(POLL_S)


def is_job_waiting(run: str) -> bool:
    """Return whether the job of a run has no nodes: not yet, or not again after a requeue."""
    return not job_hosts(run) or processes.job_state(job_of(run)) == "PENDING"


def job_hosts(run: str) -> tuple[Host, ...]:
    """Return the nodes of a run's job, as hosts whose files are on this machine; () before the job has started."""
    source = f"job {job_of(run)}"
    nodes = read_plan(RunDir.from_name(run)).nodes
    return tuple(Host(node.name, source, address="localhost", python=sys.executable) for node in nodes)


def find_requested_job(run: str | None, hosts_file: Path) -> str | None:
    """Return the requested run if it is a job: the one named, or the newest if there is no hosts file."""
    if run and job_record(run):
        return run
    if run or hosts_file.exists() or hosts_file != DEFAULT_HOSTS_FILE:
        return None
    jobs = [path for path in Path("runs").glob("*/slurm.json") if job_record(path.parent.name)]
    jobs.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    return next((path.parent.name for path in jobs), None)


def job_of(run: str) -> str:
    """Return the job ID of a run."""
    record = job_record(run)
    assert record, f"{run} is not a job"
    return record.job


def job_record(run: str) -> JobRecord | None:
    """Return the job that a run was submitted as, if it was."""
    return read_record(JobRecord, RunDir.from_name(run).job)


def job_words(run: str) -> str:
    """Describe in one line a job that has no nodes yet, or none any more."""
    job = job_of(run)
    state = processes.job_state(job)
    why = ""
    if state == "PENDING":
        why = f" ({processes.pending_reason(job)})"
    return f"run {run}: job {job} is {state}{why}"


StopOutcomes = dict[str, StopReply | HostError]  # what became of each host's part


@dataclasses.dataclass(frozen=True, slots=True)
class WaitingRun:
    """A run that has no hosts to query: not yet, or no longer."""

    description: str
    is_over: bool


def stop_hosts(fleet: Fleet, run: str, names: Iterable[str], *, grace_s: float = 0.0, **options: Any) -> StopOutcomes:
    """End a run's processes on these hosts, in parallel. ``options``: of ``starting.stop``."""

    def stop_host(name: str) -> StopReply:
        return fleet.call(name, starting.stop, STOP_TIMEOUT_S + grace_s, run, name, grace_s=grace_s, **options)

    return fleet.call_each(stop_host, names)


class Backend(Protocol):
    """A way to find, query and end runs."""

    run: str | None  # its name, if known before any host is asked
    has_local_files: (
        bool  # the hosts' files are on this machine, but the hosts are not: no tmux and no hardware to look at
    )

    def hosts(self) -> tuple[Host, ...]:
        """Return the hosts to ask.

        Raises:
            UserError: There are none yet, or the hosts file cannot be read.
        """

    def waiting(self) -> WaitingRun | None:
        """Return why no host can be queried; None if they can."""

    def stop(self, fleet: Fleet, run: str, by: str, grace_s: float) -> StopOutcomes:
        """End a run for good, after a grace period for the trainer to save."""

    def stop_launch(self, fleet: Fleet, plan: Plan, blame: FailureRecord | None, grace_s: float = 0.0) -> StopOutcomes:
        """End the processes of one launch, and record why; another launch of the same name is not touched.

        ``grace_s``: for the trainer to save first.
        """

    def cancel(self) -> bool:
        """End a waiting run; returns whether it is gone."""


class HostsBackend:
    """A run on the hosts of a hosts file."""

    has_local_files = False

    def __init__(self, run: str | None, hosts_file: Path) -> None:
        self.run, self.hosts_file = run, hosts_file

    def hosts(self) -> tuple[Host, ...]:
        """See ``Backend``; where there is no ./hosts, those of the run whose plan is in this directory."""
        if (
            self.hosts_file == DEFAULT_HOSTS_FILE
            and not self.hosts_file.exists()
            and (plan := plan_in_directory(self.run)).nodes
        ):
            names = fold_names(node.name for node in plan.nodes)
            show(f"there is no hosts file here; asking {names}, where run {plan.run} was launched", error=True)
            return tuple(host_of(node) for node in plan.nodes)
        return read_hosts(self.hosts_file)

    def waiting(self) -> WaitingRun | None:
        """Hosts can always be asked."""
        return None

    def stop(self, fleet: Fleet, run: str, by: str, grace_s: float) -> StopOutcomes:
        """See ``Backend``; on all hosts in parallel."""
        return stop_hosts(fleet, run, fleet.hosts, by=by, grace_s=grace_s)

    def stop_launch(self, fleet: Fleet, plan: Plan, blame: FailureRecord | None, grace_s: float = 0.0) -> StopOutcomes:
        names = [node.name for node in plan.nodes]
        return stop_hosts(fleet, plan.run, names, only=plan.rdzv_id, grace_s=grace_s, blame=blame)

    def cancel(self) -> bool:
        """Runs on hosts never wait."""
        return True


class JobBackend:
    """A run that is a Slurm job."""

    has_local_files = True

    def __init__(self, run: str) -> None:
        self.run: str | None = run
        self.name = run
        self.directory = RunDir(Path.cwd() / "runs" / run)

    def hosts(self) -> tuple[Host, ...]:
        hosts = job_hosts(self.name)
        if not hosts:
            raise UserError(f"{job_words(self.name)}; it has no nodes to query yet")
        return hosts

    def waiting(self) -> WaitingRun | None:
        if not is_job_waiting(self.name):
            return None
        state = processes.job_state(job_of(self.name))
        return WaitingRun(job_words(self.name), is_over=state in processes.JOB_END_STATES)

    def stop(self, fleet: Fleet, run: str, by: str, grace_s: float) -> StopOutcomes:
        """See ``Backend``; Slurm then tells whether the job is gone, and the files how the run ended."""
        is_gone = stop_job(self.directory, job_of(run), fleet.hosts, by, grace_s)
        answers = ask_hosts(fleet, run).host_runs
        return {name: StopReply(True, True, job_left=not is_gone, node=answers.get(name)) for name in fleet.hosts}

    def stop_launch(self, fleet: Fleet, plan: Plan, blame: FailureRecord | None, grace_s: float = 0.0) -> StopOutcomes:
        if blame:
            for node in plan.nodes:
                record_failure(self.directory, node.name, blame)
        is_gone = stop_job(self.directory, plan.slurm_job, fleet.hosts, "", grace_s)
        return {name: StopReply(known=True, was_alive=True, job_left=not is_gone) for name in fleet.hosts}

    def cancel(self) -> bool:
        return stop_job(self.directory, job_of(self.name), (), "", 0.0)


def backend_of(run: str | None, hosts_file: Path) -> Backend:
    """Return the backend of the run named, or of the newest job if there is no hosts file.

    Raises:
        UserError: The name is not one that a run can have.
    """
    if run:
        check_run_name(run)
    job = find_requested_job(run, hosts_file)
    return JobBackend(job) if job else HostsBackend(run, hosts_file)


def backend_of_plan(plan: Plan) -> Backend:
    """Return the backend that a plan runs on."""
    return JobBackend(plan.run) if plan.slurm_job else HostsBackend(plan.run, Path("hosts"))


def stop_launch(plan: Plan, fleet: Fleet, blame: FailureRecord | None = None) -> dict[str, StopReply | HostError]:
    """End this launch's processes on every host; another launch of the same name is not touched.

    ``blame``: why it failed, to be recorded on every host.
    """
    return backend_of_plan(plan).stop_launch(fleet, plan, blame)
