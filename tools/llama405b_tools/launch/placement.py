"""Build a plan from the request, the hosts' facts and the network between them. Pure; the only module that makes plans."""

import dataclasses
from collections.abc import Mapping, Sequence

from llama405b.contract.errors import UserError, pluralize
from llama405b.spec.plan import OWN_THREADS, Node, Plan
from llama405b_tools import parsers
from llama405b_tools.parsers import Rdma
from llama405b_tools.text.words import fold_names

PLACE_VARIABLES = {"cache": "HF_HOME", "scratch": "TMPDIR"}  # key of the hosts file -> variable of the ranks


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


def build_plan(spec: RunSpec, hosts: Sequence[HostSpec], launch: LaunchSpec) -> Plan:
    """Build the plan of a launch."""
    hosts = without_unused_gpus(spec, hosts)
    slots = [host.slots or host.gpus or 1 for host in hosts]
    devices = _visible_devices(hosts, slots)
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if spec.on_cpu else {}
    nccl = [{name: value for name, (value, _) in nccl_reasons(host).items()} for host in hosts]
    firsts = first_ranks(slots)
    nodes = []
    for i, host in enumerate(hosts):
        ranks_on_machine = sum(n for n, other in zip(slots, hosts, strict=True) if other.machine == host.machine)
        threads = _threads_env(host, ranks_on_machine, spec)
        env = threads | hidden | devices[i] | nccl[i] | places_env(host.places) | dict(spec.env)
        nodes.append(Node(host.name, slots[i], firsts[i], host.workdir, host.python, host.address, host.interface, env))
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


def _threads_env(host: HostSpec, ranks: int, spec: RunSpec) -> dict[str, str]:
    """Return the variables for a rank's threads: its share of the machine's cores, unless the user sets them."""
    threads = {"OMP_NUM_THREADS": str(max(1, host.cores // ranks))}
    return threads | {OWN_THREADS: "1"} if "OMP_NUM_THREADS" in spec.env else threads


def first_ranks(slots: Sequence[int]) -> list[int]:
    """Return the first rank of each host, in the order of the hosts file."""
    return [sum(slots[:i]) for i in range(len(slots))]


def places_env(places: Mapping[str, str]) -> dict[str, str]:
    """Return the ranks' variables for ``cache=`` and ``scratch=`` in the hosts file."""
    return {PLACE_VARIABLES[key]: path for key, path in places.items()}


def without_unused_gpus(spec: RunSpec, hosts: Sequence[HostSpec]) -> Sequence[HostSpec]:
    """Return the hosts as the run uses them: without GPUs if it trains on CPUs."""
    if not spec.on_cpu:
        return hosts
    return [dataclasses.replace(host, gpus=0) for host in hosts]


def nccl_reasons(host: HostSpec) -> dict[str, tuple[str, str]]:
    """Return the NCCL settings for a host's RDMA devices, each with its reason; {} if it has no GPU or no RDMA."""
    ports = host.rdma.ports
    if not host.gpus or not parsers.has_rdma(ports):
        return {}
    return parsers.nccl_env(ports, host.interface)


def _visible_devices(hosts: Sequence[HostSpec], slots: Sequence[int]) -> list[dict[str, str]]:
    """Return each host's variables for disjoint GPUs, for hosts that are the same machine."""
    machines = [host.machine for host in hosts]
    used: dict[str, int] = {}
    environments: list[dict[str, str]] = []
    for host, count in zip(hosts, slots, strict=True):
        begin = used.get(host.machine, 0)
        used[host.machine] = begin + count
        if host.gpus and used[host.machine] > host.gpus:
            names = [other.name for other in hosts if other.machine == host.machine]
            raise UserError(_too_many_ranks(names, used[host.machine], host.gpus))
        ids = ",".join(str(i) for i in range(begin, begin + count))
        shared = host.gpus and machines.count(host.machine) > 1
        environments.append({"CUDA_VISIBLE_DEVICES": ids} if shared else {})
    return environments


def _too_many_ranks(names: Sequence[str], ranks: int, gpus: int) -> str:
    counts = f"{ranks} ranks on {pluralize(gpus, 'GPU')}"
    if len(names) > 1:
        return f"slots: {fold_names(names)} are the same machine: {counts}; keep one of them, or lower slots="
    return f"slots: {names[0]}: {counts}; lower slots= in the hosts file"
