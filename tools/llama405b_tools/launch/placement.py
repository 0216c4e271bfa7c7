"""Build a plan from the request, the hosts' facts and the network between them. Pure; the only module that makes plans."""

import dataclasses
from collections.abc import Mapping, Sequence

from llama405b.contract.errors import UserError, counted
from llama405b.spec.plan import OWN_THREADS, Node, Plan
from llama405b_tools import parsers
from llama405b_tools.parsers import Rdma
from llama405b_tools.text.words import fold_names

PLACES = {"cache": "HF_HOME", "scratch": "TMPDIR"}  # key of the hosts file -> variable of the ranks


@dataclasses.dataclass(frozen=True, slots=True)
class RunSpec:
    """What is requested of a run, wherever it runs."""

    run: str
    program: tuple[str, ...]
    env: Mapping[str, str]
    secrets: tuple[str, ...]  # names
    setup: str = ""
    checkpoint_dir: str = ""
    replicates: bool = False
    spread: bool = False
    on_cpu: bool = False
    allow_sockets: bool = False
    load_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class HostSpec:
    """The facts of a host that a plan needs."""

    name: str
    slots: int  # ranks; 0: one per GPU, or 1 if there is none
    machine: str  # equal for two hosts of the file that are one machine
    gpus: int
    cores: int
    rdma: Rdma
    workdir: str
    python: str
    address: str  # its own, on the training network
    interface: str  # of that address
    places: Mapping[str, str] = dataclasses.field(default_factory=dict)  # cache and scratch, in full


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What is specific to one launch."""

    attempt: int
    created: float  # seconds since the epoch
    token: str  # new for each launch, so that no two share a rendezvous
    endpoint: str  # host:port of the rendezvous store
    owner: str
    grace_s: float = 0.0
    slurm_job: str = ""


def build_plan(spec: RunSpec, parts: Sequence[HostSpec], launch: LaunchSpec) -> Plan:
    """Build the plan of a launch."""
    parts = used_parts(spec, parts)
    slots = [part.slots or part.gpus or 1 for part in parts]
    devices = _devices(parts, slots)
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if spec.on_cpu else {}
    nccl = [{name: value for name, (value, _) in nccl_reasons(part).items()} for part in parts]
    firsts = first_ranks(slots)
    nodes = []
    for i, part in enumerate(parts):
        on_machine = sum(n for n, other in zip(slots, parts, strict=True) if other.machine == part.machine)
        threads = _threads_env(part, on_machine, spec)
        env = threads | hidden | devices[i] | nccl[i] | places_env(part.places) | dict(spec.env)
        nodes.append(Node(part.name, slots[i], firsts[i], part.workdir, part.python, part.address, part.interface, env))
    return Plan(
        run=spec.run,
        attempt=launch.attempt,
        created=launch.created,
        rdzv_id=f"{spec.run}-{launch.attempt}-{launch.token}",
        endpoint=launch.endpoint,
        program=spec.program,
        secrets=spec.secrets,
        nodes=tuple(nodes),
        checkpoint_dir=spec.checkpoint_dir,
        replicates=spec.replicates,
        spread=spec.spread,
        owner=launch.owner,
        setup=spec.setup,
        # all hosts have RDMA: NCCL over TCP would train, but far slower
        refuse_sockets=all(nccl) and not spec.allow_sockets,
        grace_s=launch.grace_s,
        slurm_job=launch.slurm_job,
        load_s=spec.load_s,
    )


def _threads_env(part: HostSpec, ranks: int, spec: RunSpec) -> dict[str, str]:
    """Return the variables for a rank's threads: its share of the machine's cores, unless the user sets them."""
    threads = {"OMP_NUM_THREADS": str(max(1, part.cores // ranks))}
    return threads | {OWN_THREADS: "1"} if "OMP_NUM_THREADS" in spec.env else threads


def first_ranks(slots: Sequence[int]) -> list[int]:
    """Return the first rank of each host, in the order of the hosts file."""
    return [sum(slots[:i]) for i in range(len(slots))]


def places_env(places: Mapping[str, str]) -> dict[str, str]:
    """Return the ranks' variables for ``cache=`` and ``scratch=`` in the hosts file."""
    return {PLACES[key]: path for key, path in places.items()}


def used_parts(spec: RunSpec, parts: Sequence[HostSpec]) -> Sequence[HostSpec]:
    """Return the hosts as the run uses them: without GPUs if it trains on CPUs."""
    if not spec.on_cpu:
        return parts
    return [dataclasses.replace(part, gpus=0) for part in parts]


def nccl_reasons(part: HostSpec) -> dict[str, tuple[str, str]]:
    """Return the NCCL settings for a host's RDMA devices, each with its reason; {} if it has no GPU or no RDMA."""
    ports = part.rdma.ports
    if not part.gpus or not parsers.has_rdma(ports):
        return {}
    return parsers.nccl_env(ports, part.interface)


def _devices(parts: Sequence[HostSpec], slots: Sequence[int]) -> list[dict[str, str]]:
    """Return each host's variables for disjoint GPUs, for hosts that are the same machine."""
    machines = [part.machine for part in parts]
    used: dict[str, int] = {}
    environments: list[dict[str, str]] = []
    for part, count in zip(parts, slots, strict=True):
        begin = used.get(part.machine, 0)
        used[part.machine] = begin + count
        if part.gpus and used[part.machine] > part.gpus:
            names = [each.name for each in parts if each.machine == part.machine]
            raise UserError(_too_many_ranks(names, used[part.machine], part.gpus))
        ids = ",".join(str(i) for i in range(begin, begin + count))
        shared = part.gpus and machines.count(part.machine) > 1
        environments.append({"CUDA_VISIBLE_DEVICES": ids} if shared else {})
    return environments


def _too_many_ranks(names: Sequence[str], ranks: int, gpus: int) -> str:
    what = f"{ranks} ranks on {counted(gpus, 'GPU')}"
    if len(names) > 1:
        return f"slots: {fold_names(names)} are the same machine: {what}; keep one of them, or lower slots="
    return f"slots: {names[0]}: {what}; lower slots= in the hosts file"
