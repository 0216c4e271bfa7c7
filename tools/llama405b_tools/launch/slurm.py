"""Launch a run as a Slurm job: submit it, and run each node's part of it.

``runs/<run>/slurm.json`` names the job of a run. Its hosts are not reached over SSH: status, logs and stop read the files
that all nodes share, and ask Slurm what is alive.

``srun python -m llama405b_tools.launch.slurm RUN_DIR`` runs on every allocated node. The nodes meet in the shared run directory: each
writes its address and resources, the first builds the plan from them, and each becomes the node runner of its part, as on SSH hosts.

With the argument ``save``, it asks the node runners to let the trainer save, as the job's time is nearly over. With ``ended`` and
an exit code, it has Slurm requeue a job that was preempted.
"""

import contextlib
import dataclasses
import math
import os
import random
import re
import secrets as random_secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from llama405b.contract.checkpoints import list_committed, refuse_existing
from llama405b.contract.errors import RunError, UserError, fmt_if
from llama405b.contract.files import read_record, set_private_umask, write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.software import code_version, module_argv
from llama405b.predict.estimate import DISK_BYTES_PER_S
from llama405b.predict.run_shape import checkpoint_bytes
from llama405b.predict.search import find_model_shape
from llama405b.spec.plan import Plan, read_plan
from llama405b_tools.agent import machine, processes
from llama405b_tools.agent.describe import stopped_by
from llama405b_tools.agent.machine import DirectoryCheck, check_writable_directory, find_resume_checkpoint
from llama405b_tools.agent.node import STOPPED_BY_SLURM, NodeRunner
from llama405b_tools.agent.processes import read_secrets, write_secrets
from llama405b_tools.hosts.fleet import command_to_type
from llama405b_tools.hosts.transport import list_disagreements
from llama405b_tools.launch import sbatch
from llama405b_tools.launch.findings import unwritable
from llama405b_tools.launch.placement import HostSpec, LaunchSpec, RunSpec, build_plan
from llama405b_tools.launch.preflight import name_remedy
from llama405b_tools.launch.request import LaunchRequest
from llama405b_tools.parsers import Address
from llama405b_tools.run import backends
from llama405b_tools.run.backends import POLL_S, JobRecord, job_of, job_words
from llama405b_tools.text.figures import format_duration

TIME_LIMIT = "the job's time limit"  # who stops a run whose job is nearly over
MAX_LEAD_S = 300  # before the job's time limit, for the trainer to save, unless a save takes longer
MIN_LEAD_S = 20
JOB_ID_LINE = r"^(?:Submitted batch job )?(\d+)(?:;.*| on cluster .*)?$"
CPUS_OPTION = "${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}"  # which srun does not inherit since 22.05


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
    run = RunDir(Path.cwd() / "runs" / request.run)
    words, requested = parse_sbatch_options(request, options)
    limit_s = sbatch.time_limit_s(requested.get("time") or os.environ.get("SBATCH_TIMELIMIT", ""))
    lead_s = _lead_s(request, limit_s, requested.get("nodes", ""))
    is_new = not run.path.exists()
    _check_run(request, run)
    for leftover in [*run.path.glob("status/*.stop"), *run.path.glob("status/*.where")]:
        leftover.unlink()
    _write_request(request, run, lead_s)
    refused_reasons = sbatch.refused_variables(os.environ)
    for variable, why in refused_reasons.items():
        print(f"{variable} is not used: {why}", flush=True)
    argv = ["sbatch", *words, *_own_options(request, run, lead_s), str(run.job_script)]
    result = processes.call_slurm(argv, excluded=refused_reasons)
    if result.returncode:
        run.job_secrets.unlink(missing_ok=True)
        if is_new:
            shutil.rmtree(run.path)
        why = " ".join(f"{result.stderr} {result.stdout}".split())[:300]
        raise UserError(f"--slurm: sbatch refused ({why}); correct the options")
    jobs = re.findall(
        JOB_ID_LINE, result.stdout, re.MULTILINE
    )  # a site's own filters may print more, and drop --parsable
    if not jobs:
        output = " ".join(result.stdout.split())[:300]
        raise RunError(
            f"sbatch accepted the job but printed no job ID ({output}); find it with squeue and end it with scancel"
        )
    job = str(jobs[-1])
    if limit_s and request.saves:
        print(
            f"the run saves and stops {format_duration(lead_s)} before its time limit of {format_duration(limit_s)}",
            flush=True,
        )
    write_json(run.job, JobRecord(job, options))
    return job


def _check_run(request: LaunchRequest, run: RunDir) -> None:
    """Refuse a run whose name is taken, or that cannot write or resume here."""
    for finding in unwritable(check_writable_directory(str(run.path)), "launch from another directory"):
        raise UserError(f"--slurm: {finding}")
    if run.path.exists() and (request.resume == "no" or request.evaluates):
        raise UserError(f"--run: {request.run!r} exists here; {name_remedy(request)}")
    if directory := request.new_checkpoints:
        with contextlib.suppress(OSError):  # if it cannot be read, the trainer says so
            refuse_existing(Path(directory), list_committed(Path(directory)))
    if request.config:
        request.refuse_changes(find_resume_checkpoint(request.resume, request.checkpoints), request.config)
    earlier = read_record(JobRecord, run.job)
    if earlier and processes.job_state(earlier.job) not in processes.JOB_END_STATES:
        stop = command_to_type("stop", None, request.run)
        raise UserError(f"--run: {request.run!r} is already job {earlier.job}; `{stop}` ends it")


def _lead_s(request: LaunchRequest, limit_s: float | None, nodes: str) -> int:
    """Return how long before its time limit a job is told to save: a tenth of it, or what a save takes."""
    save_s = 0.0
    n_nodes = re.match(r"\d+", nodes)
    if n_nodes and request.config and request.saves and (llama := find_model_shape(request.config, "")):
        save_s = 2 * checkpoint_bytes(llama, request.config) / DISK_BYTES_PER_S / int(n_nodes[0])
    lead_s = max(MIN_LEAD_S, save_s, min(MAX_LEAD_S, limit_s / 10 if limit_s else math.inf))
    return int(min(lead_s, limit_s / 2 if limit_s else math.inf))


def _write_request(request: LaunchRequest, run: RunDir, lead_s: int) -> None:
    """Write what the job's nodes read."""
    resume = request.resume if request.evaluates else "auto"
    resume_program = dataclasses.replace(request, resume=resume).training_program()
    write_json(run.job_request, JobRequest(request.spec(), resume_program, 0.8 * lead_s, request.places))
    if request.secrets:
        write_secrets(run.job_secrets, dict(request.secrets))
    run.job_script.write_text(job_script(request.run, run.path), encoding="utf-8")


def _own_options(request: LaunchRequest, run: RunDir, lead_s: int) -> list[str]:
    """Return launch's own options of sbatch; they come last and win."""
    options = [
        "--parsable",
        "--ntasks-per-node=1",
        f"--signal=B:USR1@{lead_s}",
        f"--output={str(run.path).replace('%', '%%')}/slurm-%j.log",
        "--open-mode=append",
    ]
    if request.secrets:  # they are not kept, so the job cannot start again
        options.append("--no-requeue")
    return options


def job_script(name: str, directory: Path) -> str:
    """Return the batch script, which starts this node's part on every node of the job."""
    node = [*module_argv("llama405b_tools.launch.slurm"), str(directory)]
    return "\n".join(
        [
            "#!/bin/sh",
            f"#SBATCH --job-name=llama405b-{name}",
            f"cd {shlex.quote(str(Path.cwd()))} || exit 2",
            "unset PYTHONHOME",
            f"trap {shlex.quote(shlex.join([*node, 'save']))} USR1  # the job's time is nearly over",
            f"srun --ntasks=$SLURM_JOB_NUM_NODES --ntasks-per-node=1 {CPUS_OPTION} --kill-on-bad-exit=0 {shlex.join(node)} &",
            # the trap interrupts `wait`: wait again until srun has ended
            "while :; do wait $!; code=$?; kill -0 $! 2>/dev/null || break; done",
            f"{shlex.join([*node, 'ended'])} $code",
            "exit $code",
            "",
        ]
    )


def parse_sbatch_options(request: LaunchRequest, text: str) -> tuple[list[str], dict[str, str]]:
    """Return sbatch's options as words, and their values by name.

    Raises:
        UserError: An option is refused.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f'--slurm: {text!r} cannot be parsed ({error}); write it as "-N 4 -p gpu"') from None
    requested = {option.name: value for option, value in sbatch.parse_options(words)}
    if "requeue" in requested and request.secrets:
        raise UserError("--slurm: --requeue: secrets are not kept, so the job cannot start again; leave it out")
    return words, requested


def await_plan(run: str) -> Plan:
    """Wait until the nodes of a job have met, and return its plan; print what it waits for.

    Raises:
        RunError: The job ended before that.
    """
    last_printed, job = "", job_of(run)
    while (plan := read_plan(RunDir.from_name(run))).slurm_job != job:
        if (description := job_words(run)) != last_printed:
            print(description, flush=True)
            last_printed = description
        if processes.job_state(job) in processes.JOB_END_STATES:
            raise RunError(f"job {job} ended before its nodes met; see runs/{run}/slurm-{job}.log")
        time.sleep(POLL_S)
    return plan


RENDEZVOUS_S = 120.0
PORTS = range(20_000, 30_000)
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node reports about itself, through the shared directory."""

    job: str  # and how often it was requeued
    ready: bool = False
    spec: HostSpec | None = None  # its address is that on the route to the head
    head: str = ""  # the head's address as seen from here
    own: tuple[Address, ...] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    places: Mapping[str, DirectoryCheck] = dataclasses.field(default_factory=dict)  # cache and scratch


def main() -> int:
    """Meet the other nodes, and run this node's part; return torchrun's exit code."""
    set_private_umask()
    run = RunDir(Path(sys.argv[1]))
    request = read_record(JobRequest, run.job_request)
    if request is None:
        raise SystemExit(f"{run.path} is missing on {socket.gethostname()}: it must be on a disk that all nodes share")
    name = os.environ["SLURMD_NODENAME"]
    job = os.environ["SLURM_JOB_ID"]
    restarts = restart_count()
    argv = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    names = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    if sys.argv[2:] == ["save"]:
        backends.ask_to_stop(run, names, TIME_LIMIT, request.grace_s)
        return 0
    if sys.argv[2:3] == ["ended"]:
        by, failed = stopped_by(run, name), sys.argv[3] != "0"
        if by in (STOPPED_BY_SLURM, TIME_LIMIT) or (
            failed and not by
        ):  # some sites have preemption send the limit's signal
            _requeue_if_preempted(job)
        return 0
    start_id = f"job {job}{fmt_if(', requeued {} x', restarts)}"
    if restarts:  # a stop of the job before is not one of this job
        run.stop(name).unlink(missing_ok=True)
    write_json(run.where(name), _node_report(name, names[0], start_id, request.places))
    if name == names[0]:
        _make_plan(run, request, names, start_id)
    _wait_for(lambda: _current_plan(run, start_id), f"{names[0]} made no plan")
    secrets = read_secrets(run.job_secrets)
    if secrets and request.spec.secrets:
        write_secrets(run.secrets(name), secrets)
    write_json(run.where(name), NodeReport(start_id, ready=True))
    if name == names[0]:
        _wait_for(
            lambda: all(_read_report(run, n) == NodeReport(start_id, ready=True) for n in names),
            "a node did not get ready",
        )
        run.job_secrets.unlink(missing_ok=True)
    return NodeRunner(run, name).main()


def _requeue_if_preempted(job: str) -> None:
    """Requeue this job if it was preempted.

    Slurm by itself requeues only a job that runs until the partition's GraceTime is over.
    """
    state = dict(re.findall(r"(\w+)=(\S*)", processes.call_slurm(["scontrol", "show", "job", "-o", job]).stdout))
    if not state.get("StartTime", "~") <= state.get("PreemptTime", "") < "None":  # this start of it, in ISO 8601
        return
    print(f"job {job} was preempted; requeueing it", flush=True)
    result = processes.call_slurm(["scontrol", "requeue", job])  # which ends this process, too
    if result.returncode:
        why = " ".join(result.stderr.split())
        print(f"Slurm does not requeue it ({why}); to continue, repeat the launch with --resume auto", flush=True)


def _node_report(name: str, head: str, start_id: str, places: Mapping[str, str]) -> NodeReport:
    """Return this node's resources, the head's address as seen from here, and its own address on the route there."""
    try:
        target = socket.gethostbyname(head)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # sends nothing
            own_address = probe.getsockname()[0]
    except OSError:
        target = own_address = ""
    visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    checks = {key: machine.check_writable_directory(os.path.expandvars(path)) for key, path in places.items()}
    own = machine.list_addresses()
    spec = HostSpec(
        name=name,
        slots=0,
        machine=socket.gethostname(),
        gpus=len(visible) or len(machine.list_working_gpus()[0]),
        cores=len(os.sched_getaffinity(0)),
        rdma=machine.rdma_ports(),
        workdir=str(Path.cwd()),
        python=sys.executable,
        address=own_address,
        interface=_interface_of(own_address, own),
        places={key: place.path for key, place in checks.items()},
    )
    versions = {"torch": machine.package_version("torch"), "llama405b": code_version()}
    return NodeReport(start_id, spec=spec, head=target, own=own, versions=versions, places=checks)


def _interface_of(address: str, own: Sequence[Address]) -> str:
    return next((entry.interface for entry in own if entry.address == address), "lo")


def restart_count() -> int:
    """Return how often Slurm has restarted this job, after a failed node or preemption."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def _make_plan(run: RunDir, request: JobRequest, names: list[str], start_id: str) -> None:
    """Build the plan, on the first node, from all reports; ``start_id``: the job, and how often it was requeued."""
    reports = _wait_for(lambda: _read_all_reports(run, names, start_id), "not all nodes appeared")
    if clauses := list_disagreements({name: report.versions for name, report in reports.items()}):
        raise SystemExit(f"the nodes differ: {'; '.join(clauses)}; install the same versions")
    _check_places(reports)
    own_addresses = [entry.address for entry in reports[names[0]].own]
    head_addresses = [reports[name].head for name in names[1:] if reports[name].head]
    head = [*head_addresses, *own_addresses, "127.0.0.1"][0]
    specs = {name: report.spec for name, report in reports.items() if report.spec}
    interface = _interface_of(head, reports[names[0]].own)
    specs[names[0]] = dataclasses.replace(specs[names[0]], address=head, interface=interface)
    spec = request.spec
    if restart_count():
        spec = dataclasses.replace(spec, program=request.program_again)
    launching = LaunchSpec(
        attempt=read_plan(run).attempt + 1,
        created=time.time(),
        token=random_secrets.token_hex(4),
        endpoint=f"{head}:{_free_port()}",
        owner=start_id,
        grace_s=request.grace_s,
        slurm_job=os.environ["SLURM_JOB_ID"],
    )
    write_json(run.plan, build_plan(spec, [*specs.values()], launching))


def _check_places(reports: Mapping[str, NodeReport]) -> None:
    """Refuse directories that a node cannot use.

    A variable that is not set there stays in the path, or leaves nothing of it.
    """
    for name, report in reports.items():
        for key, place in report.places.items():
            if "$" in place.path or not place.path.startswith("/"):
                why = f"{place.path!r} is not a full path on that node; set its variables there, or name another directory"
                raise SystemExit(f"{name}: --{key}: {why}")
            for finding in unwritable(place, "name another directory", f"--{key}"):
                raise SystemExit(f"{name}: {finding}")


def _free_port() -> int:
    while True:
        port = random.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


def _current_plan(run: RunDir, start_id: str) -> Plan | None:
    """Return the plan of this start of the job; None until there is one."""
    plan = read_plan(run)
    return plan if plan.owner == start_id else None


def _read_all_reports(run: RunDir, names: list[str], start_id: str) -> dict[str, NodeReport] | None:
    """Return every node's report; None until all have written one."""
    reports = {name: _read_report(run, name) for name in names}
    return reports if all(report.job == start_id and report.spec for report in reports.values()) else None


def _read_report(run: RunDir, name: str) -> NodeReport:
    return read_record(NodeReport, run.where(name)) or NodeReport("")


def _wait_for(condition: Callable[[], T | None], why: str) -> T:
    deadline = time.monotonic() + RENDEZVOUS_S
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise SystemExit(f"{why} within {RENDEZVOUS_S:.0f} s; see the other nodes' lines in the job's log")
        time.sleep(0.1)
    return value


if __name__ == "__main__":
    sys.exit(main())
