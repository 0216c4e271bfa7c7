"""Runs in a Slurm job: the same node runner on each allocated node, with all state in the shared directory.

``runs/<run>/slurm.json`` names the job of a run. Its hosts are not reached over SSH: status, logs and stop read the files
that all nodes share, and ask Slurm what is alive.
"""

import contextlib
import dataclasses
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from llama405b.contract.checkpoints import committed, refuse_held
from llama405b.contract.errors import RunError, UserError
from llama405b.contract.files import read_record, write_json
from llama405b.contract.own_python import own_argv
from llama405b.contract.paths import RunDir
from llama405b.contract.plan import Plan, read_plan
from llama405b.contract.records import StopMark
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.printed_commands import command_to_type
from llama405b_tools.remote import slurm
from llama405b_tools.remote.launch_facts import place_of, resumable
from llama405b_tools.remote.messages.stop_request import RUNNER_ENDS_S
from llama405b_tools.remote.secrets import write_secrets
from llama405b_tools.run.host_checks import other_name, place_words
from llama405b_tools.run.plan import RunSpec
from llama405b_tools.run.request import LaunchRequest

SIGNAL_BEFORE_S = 300  # before the job's time limit, for the trainer to save
KILL_WAIT_S = 60.0  # for Slurm to end what did not end by itself
POLL_S = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class JobRecord:
    """The job of a run."""

    job: str
    options: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class JobRequest:
    """What the nodes of a job build the plan from."""

    spec: RunSpec
    program_again: tuple[str, ...]  # if Slurm requeues the job
    grace_s: float
    places: Mapping[str, str] = dataclasses.field(default_factory=dict)  # cache and scratch, for each node to expand


def submit(request: LaunchRequest, options: str) -> str:
    """Submit the job of a run; returns its id.

    Raises:
        UserError: sbatch is not installed or refuses the options, the run exists, or its directory cannot be written.
    """
    if not shutil.which("sbatch"):
        raise UserError("--slurm: sbatch is not installed here; launch from a login node of the cluster")
    words, run = _options(options), RunDir(Path.cwd() / "runs" / request.run)
    is_new = not run.path.exists()
    _check_run(request, run)
    for leftover in [*run.path.glob("status/*.stop"), *run.path.glob("status/*.where")]:
        leftover.unlink()
    _write_request(request, run)
    done = slurm.call(["sbatch", *_own_options(request, run), *words, str(run.job_script)])
    if done.returncode:
        run.job_secrets.unlink(missing_ok=True)
        if is_new:
            shutil.rmtree(run.path)
        raise UserError(f"--slurm: sbatch refused ({' '.join(done.stderr.split())[:300]}); correct the options")
    job = done.stdout.strip().partition(";")[0]
    write_json(run.job, JobRecord(job, options))
    return job


def _check_run(request: LaunchRequest, run: RunDir) -> None:
    """Refuse a run whose name is taken, or that cannot write or resume here."""
    if (place := place_of(str(run.path))).fault:
        raise UserError(f"--slurm: {place.path} cannot be written: {place_words(place)}; launch from another directory")
    if run.path.exists() and (request.resume == "no" or request.evaluates):
        raise UserError(f"--run: {request.run!r} exists here; {other_name(request)}")
    if directory := request.new_checkpoints:
        with contextlib.suppress(OSError):  # if it cannot be read, the trainer says so
            refuse_held(Path(directory), committed(Path(directory)))
    if request.config:
        request.refuse_changes(resumable(request.resume, request.checkpoints), request.config)
    earlier = read_record(JobRecord, run.job)
    if earlier and slurm.job_state(earlier.job) not in slurm.GONE:
        stop = command_to_type("stop", None, request.run)
        raise UserError(f"--run: {request.run!r} is already job {earlier.job}; `{stop}` ends it")


def _write_request(request: LaunchRequest, run: RunDir) -> None:
    """Write what the job's nodes read."""
    resume = request.resume if request.evaluates else "auto"
    again = dataclasses.replace(request, resume=resume).training_program()
    write_json(run.job_request, JobRequest(request.spec(), again, SIGNAL_BEFORE_S - 60, request.places))
    if request.secrets:
        write_secrets(run.job_secrets, dict(request.secrets))
    run.job_script.write_text(job_script(request.run, run.path), encoding="utf-8")


def _own_options(request: LaunchRequest, run: RunDir) -> list[str]:
    options = [
        "--parsable",
        "--ntasks-per-node=1",
        f"--signal=B:USR1@{SIGNAL_BEFORE_S}",
        f"--output={run.path}/slurm-%j.log",
        "--open-mode=append",
    ]
    if request.secrets:  # they are not kept, so the job cannot start again
        options.append("--no-requeue")
    return options


def job_script(name: str, directory: Path) -> str:
    """Return the batch script, which starts this node's part on every node of the job."""
    node = [*own_argv("llama405b_tools.run.slurm_node"), str(directory)]
    return "\n".join(
        [
            "#!/bin/sh",
            f"#SBATCH --job-name=llama405b-{name}",
            f"cd {shlex.quote(str(Path.cwd()))} || exit 2",
            "unset PYTHONHOME",
            f"trap {shlex.quote(shlex.join([*node, 'save']))} USR1  # the job's time is nearly over",
            f"srun --ntasks-per-node=1 --kill-on-bad-exit=0 {shlex.join(node)} &",
            "while :; do wait $!; code=$?; kill -0 $! 2>/dev/null || exit $code; done",
            "",
        ]
    )


def _options(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f'--slurm: {text!r} cannot be parsed ({error}); write it as "-N 4 -p gpu"') from None


def stop_job(run: RunDir, job: str, hosts: Iterable[str], by: str, grace_s: float) -> bool:
    """End a job: through the node runners, which look for a stop file and let the trainer save, then through Slurm.

    Slurm's own signals go to every process of a job, torchrun and ranks too, which would end before they have saved.
    Returns whether the job is gone.
    """
    if by:
        ask_to_stop(run, hosts, by, grace_s)
    if slurm.alive(job) and grace_s:
        _until_gone(job, grace_s + RUNNER_ENDS_S)
    if slurm.job_state(job) not in slurm.GONE:
        slurm.call(["scancel", job])
        _until_gone(job, KILL_WAIT_S)
    return slurm.job_state(job) in slurm.GONE


def ask_to_stop(run: RunDir, hosts: Iterable[str], by: str, grace_s: float) -> None:
    """Write the stop files on which the node runners let the trainer save, and end."""
    for host in hosts:
        write_json(run.stop(host), StopMark(by, grace_s, time.time()))


def _until_gone(job: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while slurm.job_state(job) not in slurm.GONE and time.monotonic() < deadline:
        time.sleep(POLL_S)


def waits(run: str) -> bool:
    """Whether the job of a run has no nodes: not yet, or not again after a requeue."""
    return not job_hosts(run) or slurm.job_state(job_of(run)) == "PENDING"


def job_hosts(run: str) -> tuple[Host, ...]:
    """Return the nodes of a run's job, as hosts whose files are on this machine; () before the job has started."""
    where = f"job {job_of(run)}"
    nodes = read_plan(RunDir.here(run)).nodes
    return tuple(Host(node.name, where, address="localhost", python=sys.executable) for node in nodes)


def run_asked(run: str | None, hosts_file: Path) -> str | None:
    """Return the run that is meant if it is a job: the one named, or the newest if there is no hosts file."""
    if run and re.fullmatch(r"[\w.-]+", run) and _record(run):
        return run
    if run or hosts_file.exists():
        return None
    jobs = [path for path in Path("runs").glob("*/slurm.json") if _record(path.parent.name)]
    jobs.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    return next((path.parent.name for path in jobs), None)


def job_of(run: str) -> str:
    """Return the job ID of a run."""
    record = _record(run)
    assert record, f"{run} is not a job"
    return record.job


def _record(run: str) -> JobRecord | None:
    return read_record(JobRecord, RunDir.here(run).job)


def await_plan(run: str) -> Plan:
    """Return the plan of a job just submitted, once its nodes have met; prints what it waits for.

    Raises:
        RunError: The job ended before that.
    """
    said, job = "", job_of(run)
    while (plan := read_plan(RunDir.here(run))).slurm_job != job:
        if (words := words_of(run)) != said:
            print(words, flush=True)
            said = words
        if slurm.job_state(job) in slurm.GONE:
            raise RunError(f"job {job} ended before its nodes met; see runs/{run}/slurm-{job}.log")
        time.sleep(POLL_S)
    return plan


def words_of(run: str) -> str:
    """Describe in one line a job that has no nodes yet, or none any more."""
    job = job_of(run)
    state = slurm.job_state(job)
    why = ""
    if state == "PENDING":
        why = f" ({slurm.why_pending(job)})"
    return f"run {run}: job {job} is {state}{why}"
