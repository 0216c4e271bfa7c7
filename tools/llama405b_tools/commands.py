"""Turn a run and its hosts into what each host is told. Pure: opens no file, socket or process, reads no clock."""

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from llama405b.contract.errors import UserError

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
SETUP_FAILED = "the setup line failed"
REHEARSAL = "-rehearsal"  # at the end of a run's name: its checkpoints may be deleted
KEEP = "keep\n"  # what a starting host is told once all hosts are up
MARKER = "LLAMA405B_NODE"  # in the environment of every process of a run: <run directory>:<host>


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One host's part in a run."""

    name: str
    slots: int
    first_rank: int
    workdir: str
    python: str
    address: str  # its own, on the training network
    interface: str  # that carries the address
    env: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """``plan.json``: everything a node runner needs to know."""

    run: str
    attempt: int
    created: float  # operator's clock, seconds since the epoch
    rdzv_id: str  # fresh for every attempt
    endpoint: str  # host:port of the rendezvous store, on the head
    program: tuple[str, ...]  # what follows torchrun's own arguments
    secrets: tuple[str, ...]  # names only
    nodes: tuple[Node, ...]
    checkpoint_dir: str = ""
    owner: str = ""  # who launched it, for whoever finds it running
    setup: str = ""  # a shell line that goes before torchrun
    refuse_sockets: bool = False  # end the run if NCCL falls back to TCP although there is RDMA
    grace_s: float = 0.0  # for the trainer to save, where SIGTERM comes without a word
    slurm_job: str = ""  # the job it runs in, if it does

    @property
    def trains(self) -> bool:
        """Whether it runs our trainer, which saves when asked to stop and writes heartbeats."""
        return self.program[:2] == ("-m", "llama405b.train")

    @property
    def world(self) -> int:
        """Ranks over all hosts."""
        return sum(node.slots for node in self.nodes)

    def node(self, name: str) -> Node:
        """The part of one host."""
        return next(node for node in self.nodes if node.name == name)


def plan_from_json(record: Mapping[str, Any]) -> Plan:
    """Read back what ``dataclasses.asdict`` wrote."""
    nodes = tuple(Node(**node) for node in record["nodes"])
    return Plan(**{**record, "nodes": nodes, "program": tuple(record["program"]), "secrets": tuple(record["secrets"])})


def first_ranks(slots: Sequence[int]) -> list[int]:
    """The rank each host begins with, in the order of the hosts file."""
    return [sum(slots[:i]) for i in range(len(slots))]


def device_env(nodes: Sequence[tuple[str, int]], gpus: Sequence[int]) -> list[dict[str, str]]:
    """Disjoint GPUs for hosts that are one machine: ``(machine, slots)`` per host -> its environment.

    Raises:
        UserError: The hosts on one machine ask for more GPUs than it has.
    """
    used: dict[str, int] = {}
    environments: list[dict[str, str]] = []
    shared = {machine for machine, _ in nodes if sum(m == machine for m, _ in nodes) > 1}
    for (machine, slots), present in zip(nodes, gpus, strict=True):
        begin = used.get(machine, 0)
        used[machine] = begin + slots
        if present and used[machine] > present:
            raise UserError(
                f"slots: {used[machine]} ranks on a machine with {present} GPUs; lower slots= in the hosts file"
            )
        ids = ",".join(str(i) for i in range(begin, begin + slots))
        environments.append({"CUDA_VISIBLE_DEVICES": ids} if present and machine in shared else {})
    return environments


def torchrun_argv(plan: Plan, name: str, log_dir: str) -> list[str]:
    """The command the node runner starts.

    Only the head may host the store, and must: torchrun's own guess makes a second agent on one machine, or a
    stranger's agent on the same port, join a store that is not this run's.
    """
    node = plan.node(name)
    return [
        node.python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={len(plan.nodes)}",
        f"--nproc-per-node={node.slots}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={plan.endpoint}",
        f"--rdzv-id={plan.rdzv_id}",
        f"--rdzv-conf=is_host={int(node is plan.nodes[0] or node.name == plan.nodes[0].name)},read_timeout=120",
        f"--local-addr={node.address}",
        "--max-restarts=0",
        f"--log-dir={log_dir}",
        "--redirects=3",
        *plan.program,
    ]


def setup_argv(line: str, argv: Sequence[str]) -> list[str]:
    """``argv``, after a shell line of the user's own (``module load cuda``), whose failure ends it."""
    if not line:
        return list(argv)
    script = f'eval "$0" || {{ echo "{SETUP_FAILED} with exit code $?: $0" >&2; exit 97; }}; exec "$@"'
    return ["bash", "-c", script, line, *argv]


def node_env(plan: Plan, name: str, run_dir: str) -> dict[str, str]:
    """What torchrun's environment holds beside the host's own and the secrets."""
    node = plan.node(name)
    return {
        MARKER: f"{run_dir}:{name}",
        "LLAMA405B_HOST": name,
        "LLAMA405B_FIRST_RANK": str(node.first_rank),
        "GLOO_SOCKET_IFNAME": node.interface,
        "NCCL_SOCKET_IFNAME": node.interface,
        "PYTHONUNBUFFERED": "1",
        "HF_HOME": f"{node.workdir}/.cache/huggingface",
        **({"HF_HUB_OFFLINE": "1"} if plan.trains else {}),  # the weights are files that were checked
        **node.env,
    }


def agent_command(python: str, workdir: str, action: str, prefix: str = "") -> str:
    """The shell line that runs one action of the agent on a host; what to do goes in by standard input."""
    before = f"{prefix} && " if prefix else ""
    start = f"PYTHONPATH=tools exec {shell_path(python)} -m llama405b_tools.agent {shlex.quote(action)}"
    return f"{before}cd {shell_path(workdir)} && {start}"


def shell_path(path: str) -> str:
    """A path for a shell line, with ``~/`` left to the host."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)


def tmux_socket(run: str) -> str:
    """The name of the run's own tmux server."""
    return f"llama405b-{run}"


def tmux_session(host: str) -> str:
    """The session of a host; tmux takes no '.' or ':' in a name."""
    return re.sub(r"[.:]", "_", host)


def check_run_name(run: str) -> str:
    """Return the name.

    Raises:
        UserError: It would not do as a directory and a tmux server.
    """
    if not RUN_NAME.fullmatch(run):
        raise UserError(f"--run: {run!r} will not do as a name; take letters, digits, '.', '_' and '-', at most 100")
    return run


def disagreements(facts: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Which hosts differ from the majority: one clause for each differing fact."""
    clauses = []
    for key in next(iter(facts.values()), {}):
        values = {host: found.get(key, "missing") for host, found in facts.items()}
        if len(set(values.values())) > 1:
            counts = list(values.values())
            majority = max(counts, key=counts.count)
            odd = ", ".join(f"{host} has {value}" for host, value in values.items() if value != majority)
            clauses.append(f"{key} is {majority} on most hosts, but {odd}")
    return clauses
