"""One node's part in a Slurm job: ``srun python -m llama405b_tools.run.slurm_node RUN_DIR`` on every allocated node.

With the argument ``save``, it asks the node runners to let the trainer save: the job's time is nearly over.

The nodes meet in the shared run directory: each writes where it is, the first builds the plan from that, and each
becomes the node runner of its part.
"""

import dataclasses
import os
import random
import secrets as random_secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from llama405b.contract.code_version import code_version
from llama405b.contract.files import read_record, write_json
from llama405b.contract.paths import UMASK, RunDir
from llama405b.contract.phrases import given
from llama405b.contract.plan import Plan, read_plan
from llama405b_tools.hosts.outcomes import disagreements
from llama405b_tools.machine.network import Address, Rdma
from llama405b_tools.remote import launch_facts
from llama405b_tools.remote.messages.probe import RunPlace
from llama405b_tools.remote.node import NodeRunner
from llama405b_tools.remote.secrets import read_secrets, write_secrets
from llama405b_tools.run import jobs
from llama405b_tools.run.jobs import JobRequest
from llama405b_tools.run.plan import HostSpec, LaunchSpec, build_plan

MEET_S = 120.0
PORTS = range(20_000, 30_000)
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class NodeWhere:
    """What a node tells the others about itself, through the shared directory."""

    job: str  # and how often it was requeued
    ready: bool = False
    head: str = ""  # the head's address as seen from here
    mine: str = ""  # its own address on the route there
    own: tuple[Address, ...] = ()
    machine: str = ""
    gpus: int = 0
    cores: int = 1
    torch: str = ""
    code: str = ""
    rdma: Rdma = Rdma()
    places: Mapping[str, RunPlace] = dataclasses.field(default_factory=dict)  # cache and scratch


def main() -> int:
    """Meet the others, and run this node's part; returns torchrun's exit code."""
    os.umask(UMASK)
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
        jobs.ask_to_stop(run, names, "the job's time limit", request.grace_s)
        return 0
    this = f"job {job}{given(', requeued {} x', restarts)}"
    if restarts:  # a stop of the job before is not one of this job
        run.stop(name).unlink(missing_ok=True)
    write_json(run.where(name), _where(names[0], this, request.places))
    if name == names[0]:
        _make_plan(run, request, names, this)
    _wait(lambda: _plan_of(run, this), f"{names[0]} made no plan")
    secrets = read_secrets(run.job_secrets)
    if secrets and request.spec.secrets:
        write_secrets(run.secrets(name), secrets)
    write_json(run.where(name), NodeWhere(this, ready=True))
    if name == names[0]:
        _wait(lambda: all(_where_of(run, n) == NodeWhere(this, ready=True) for n in names), "a node did not get ready")
        run.job_secrets.unlink(missing_ok=True)
    return NodeRunner(run, name).main()


def _where(head: str, this: str, places: Mapping[str, str]) -> NodeWhere:
    """Return this node's resources, the head's address as seen from here, and its own address on the route there."""
    try:
        target = socket.gethostbyname(head)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # sends nothing
            mine = probe.getsockname()[0]
    except OSError:
        target = mine = ""
    visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    return NodeWhere(
        job=this,
        head=target,
        mine=mine,
        own=launch_facts.addresses(),
        machine=socket.gethostname(),
        gpus=len(visible) or len(launch_facts.gpus()[0]),
        cores=len(os.sched_getaffinity(0)),
        torch=launch_facts.version_of("torch"),
        code=code_version(),
        rdma=launch_facts.rdma_ports(),
        places={key: launch_facts.place_of(os.path.expandvars(path)) for key, path in places.items()},
    )


def restart_count() -> int:
    """How often Slurm has restarted this job: after a node failed, or after preemption."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def _make_plan(run: RunDir, request: JobRequest, names: list[str], this: str) -> None:
    """Build the plan, on the first node, from what all have written; ``this``: the job, and how often it was requeued."""
    found = _wait(lambda: _all_where(run, names, this), "not all nodes appeared")
    if clauses := disagreements(
        {name: {"torch": where.torch, "llama405b": where.code} for name, where in found.items()}
    ):
        raise SystemExit(f"the nodes differ: {'; '.join(clauses)}; install the same versions")
    _check_places(found)
    own = [entry.address for entry in found[names[0]].own]
    seen = [found[name].head for name in names[1:] if found[name].head]
    head = [*seen, *own, "127.0.0.1"][0]
    mine = {name: where.mine for name, where in found.items()} | {names[0]: head}
    parts = [_part(name, where, mine[name]) for name, where in found.items()]
    spec = request.spec
    if restart_count():
        spec = dataclasses.replace(spec, program=request.program_again)
    launching = LaunchSpec(
        attempt=read_plan(run).attempt + 1,
        created=time.time(),
        token=random_secrets.token_hex(4),
        endpoint=f"{head}:{_free_port()}",
        owner=this,
        grace_s=request.grace_s,
        slurm_job=os.environ["SLURM_JOB_ID"],
    )
    write_json(run.plan, build_plan(spec, parts, launching))


def _check_places(found: Mapping[str, NodeWhere]) -> None:
    """Refuse directories that a node cannot use; a variable that is not set there stays, or leaves nothing."""
    for name, where in found.items():
        for key, place in where.places.items():
            if "$" in place.path or not place.path.startswith("/"):
                why = f"{place.path!r} is not a full path on that node; set its variables there, or name another directory"
                raise SystemExit(f"{name}: --{key}: {why}")
            if place.fault:
                why = f"{place.path} cannot be created or written; name a directory of your own"
                raise SystemExit(f"{name}: --{key}: {why}")


def _part(name: str, where: NodeWhere, mine: str) -> HostSpec:
    """Return what a plan needs to know about a node; ``mine``: its address on the training network."""
    return HostSpec(
        name=name,
        slots=0,
        machine=where.machine,
        gpus=where.gpus,
        cores=where.cores,
        rdma=where.rdma,
        workdir=str(Path.cwd()),
        python=sys.executable,
        address=mine,
        interface=next((entry.interface for entry in where.own if entry.address == mine), "lo"),
        places={key: place.path for key, place in where.places.items()},
    )


def _free_port() -> int:
    while True:
        port = random.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


def _plan_of(run: RunDir, this: str) -> Plan | None:
    """The plan of this start of the job; None until it is made."""
    plan = read_plan(run)
    return plan if plan.owner == this else None


def _all_where(run: RunDir, names: list[str], this: str) -> dict[str, NodeWhere] | None:
    """What every node has written about itself; None until all have."""
    found = {name: _where_of(run, name) for name in names}
    if all(where.job == this for where in found.values()):
        return found
    return None


def _where_of(run: RunDir, name: str) -> NodeWhere:
    return read_record(NodeWhere, run.where(name)) or NodeWhere("")


def _wait(condition: Callable[[], T | None], why: str) -> T:
    deadline = time.monotonic() + MEET_S
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise SystemExit(f"{why} within {MEET_S:.0f} s; see the other nodes' lines in the job's log")
        time.sleep(0.1)
    return value


if __name__ == "__main__":
    sys.exit(main())
