"""One node's part in a Slurm job: ``srun python -m llama405b_tools.run.slurm_node RUN_DIR`` on every allocated node.

With ``save`` behind it, it asks the node runners to let the trainer save: the job's time is nearly over.

The nodes meet in the shared run directory: each says where it is, the first makes the plan from that, and each becomes
the node runner of its part.
"""

import os
import random
import secrets as random_secrets
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from llama405b.contract.files import read_json, write_json
from llama405b.contract.paths import UMASK, RunDir
from llama405b.contract.plan import Node, Plan
from llama405b_tools.machine.sameness import disagreements
from llama405b_tools.remote import facts, hostprobe
from llama405b_tools.remote.node import NodeRunner
from llama405b_tools.run import jobs
from llama405b_tools.run.plan import first_ranks

MEET_S = 120.0
PORTS = range(20_000, 30_000)


def main() -> int:
    """Meet the others, and run this node's part; returns torchrun's exit code."""
    os.umask(UMASK)
    run = RunDir(Path(sys.argv[1]))
    request = read_json(run.job_request)
    if request is None:
        raise SystemExit(f"{run.path} is not seen on {socket.gethostname()}: it must be on a disk that all nodes share")
    name, job, restarts = os.environ["SLURMD_NODENAME"], os.environ["SLURM_JOB_ID"], restart_count()
    names = _names(os.environ["SLURM_JOB_NODELIST"])
    if sys.argv[2:] == ["save"]:
        jobs.ask_to_stop(run, names, "the job's time limit", request["grace_s"])
        return 0
    this = f"job {job}{f', requeued {restarts} x' if restarts else ''}"
    if restarts:  # what was asked of the job before is not asked of this one
        run.stop(name).unlink(missing_ok=True)
    write_json(run.where(name), _where(names[0]) | {"job": this})
    if name == names[0]:
        _make_plan(run, request, names, this)
    _wait(lambda: (read_json(run.plan) or {}).get("owner") == this, f"{names[0]} made no plan")
    secrets = read_json(run.job_secrets)
    if secrets and request["secrets"]:
        write_json(run.secrets(name), secrets)
    write_json(run.where(name), {"job": this, "ready": True})
    if name == names[0]:
        _wait(lambda: all((_read_where(run, n, this) or {}).get("ready") for n in names), "a node did not get ready")
        run.job_secrets.unlink(missing_ok=True)
    return NodeRunner(run, name).main()


def _names(nodelist: str) -> list[str]:
    done = subprocess.run(
        ["scontrol", "show", "hostnames", nodelist], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.split()


def _where(head: str) -> dict[str, Any]:
    """This node's resources, the head's address as seen from here, and the own address on the way there."""
    own = hostprobe.network()["addresses"]
    try:
        target = socket.gethostbyname(head)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # sends nothing
            mine = probe.getsockname()[0]
    except OSError:
        target = mine = ""
    gpus = 0
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False).stdout
        visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
        gpus = len(visible) or listed.count("GPU ")
    return {
        "head": target,
        "mine": mine,
        "own": own,
        "gpus": gpus,
        "cores": len(os.sched_getaffinity(0)),
        "torch": facts.version_of("torch"),
    }


def restart_count() -> int:
    """How often Slurm began this job again: after a node failed, or it made room for another."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def _make_plan(run: RunDir, request: dict[str, Any], names: list[str], this: str) -> None:
    """The first node makes the plan, once all have said where they are; ``this``: the job, and which of its lives."""
    found: dict[str, Any] = _wait(
        lambda: (w := {n: _read_where(run, n, this) for n in names}) and all(w.values()) and w, "not all nodes came"
    )
    versions = {name: {"torch": where["torch"]} for name, where in found.items()}
    if clauses := disagreements(versions):
        raise SystemExit(f"the nodes differ: {'; '.join(clauses)}; install the same everywhere")
    own = found[names[0]]["own"]
    seen = [found[name]["head"] for name in names[1:] if found[name]["head"]]
    head = seen[0] if seen else (own[0]["address"] if own else "127.0.0.1")
    on_cpu = request["on_cpu"]
    slots = [1 if on_cpu else found[name]["gpus"] or 1 for name in names]
    nodes = []
    for name, count, first in zip(names, slots, first_ranks(slots), strict=True):
        where = found[name]
        mine = head if name == names[0] else where["mine"]
        interface = next((entry["interface"] for entry in where["own"] if entry["address"] == mine), "lo")
        env = {"OMP_NUM_THREADS": str(max(1, where["cores"] // count))} | (
            {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
        )
        nodes.append(Node(name, count, first, str(Path.cwd()), sys.executable, mine, interface, env | request["env"]))
    attempt = int((read_json(run.plan) or {}).get("attempt", 0)) + 1
    plan = Plan(
        run=request["run"],
        attempt=attempt,
        created=time.time(),
        rdzv_id=f"{request['run']}-{attempt}-{random_secrets.token_hex(4)}",
        endpoint=f"{head}:{_free_port()}",
        program=tuple(request["program_again" if restart_count() else "program"]),
        secrets=tuple(request["secrets"]),
        nodes=tuple(nodes),
        checkpoint_dir=request["checkpoint_dir"],
        owner=this,
        setup=request["setup"],
        grace_s=request["grace_s"],
        slurm_job=os.environ["SLURM_JOB_ID"],
    )
    write_json(run.plan, plan)


def _free_port() -> int:
    while True:
        port = random.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


def _read_where(run: RunDir, name: str, this: str) -> dict[str, Any] | None:
    found = read_json(run.where(name))
    return found if found and found["job"] == this else None


def _wait(condition: Any, why: str) -> Any:
    deadline = time.monotonic() + MEET_S
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise SystemExit(f"{why} within {MEET_S:.0f} s; see the other nodes' lines in the job's log")
        time.sleep(0.1)
    return value


if __name__ == "__main__":
    sys.exit(main())
