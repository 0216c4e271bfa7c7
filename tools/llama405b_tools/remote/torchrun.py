"""The command that the node runner starts on a host, and its environment. Pure."""

import itertools
from collections.abc import Sequence

from llama405b.contract.own_python import own_argv
from llama405b.contract.plan import Plan

NO_VALUE = ("-m", "--module", "--no-python", "--no_python")  # torchrun's flags that say what a program's name means
SETUP_FAILED = "LLAMA405B_SETUP_FAILED"  # in torchrun's log, with the exit code of the setup line
MARKER = "LLAMA405B_NODE"  # in the environment of every process of a run: <run directory>:<host>


def torchrun_argv(plan: Plan, name: str, log_dir: str) -> list[str]:
    """Return the command that the node runner starts.

    Only the head may host the store, and must: torchrun's own guess makes a second agent on one machine, or a
    stranger's agent on the same port, join a store that is not this run's.
    """
    node = plan.node(name)
    return [
        node.python,
        "-P",  # of torchrun alone: what it starts does not inherit it
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
        *_apart(_own(plan.program, node.python)),
    ]


def _own(program: Sequence[str], python: str) -> Sequence[str]:
    """Have torchrun start a module of ours as we start it; any other program as it is."""
    match program:
        case ["-m", module, *words] if module.startswith("llama405b."):
            return ["--no-python", *own_argv(module, python), *words]
    return program


def _apart(program: Sequence[str]) -> list[str]:
    """Put ``--`` before a program's name: torchrun takes what begins as a flag of its own (``--run``) from its arguments.

    Flags of torchrun's own before the name stay before it; one with a separate value leaves open where the name is.
    """
    n_flags = len(list(itertools.takewhile(NO_VALUE.__contains__, program)))
    if program[n_flags : n_flags + 1] and program[n_flags].startswith("-"):
        return list(program)
    return [*program[:n_flags], "--", *program[n_flags:]]


def setup_argv(line: str, argv: Sequence[str]) -> list[str]:
    """Return ``argv`` to run after the user's own shell line (``module load cuda``), unless that fails."""
    if not line:
        return list(argv)
    script = f'eval "$0" || {{ echo "{SETUP_FAILED} $?" >&2; exit 97; }}; exec "$@"'
    return ["bash", "-c", script, line, *argv]


def node_env(plan: Plan, name: str, run_dir: str) -> dict[str, str]:
    """Return what torchrun's environment has in addition to the host's own and the secrets."""
    node = plan.node(name)
    return {
        MARKER: f"{run_dir}:{name}",
        "LLAMA405B_HOST": name,
        "LLAMA405B_FIRST_RANK": str(node.first_rank),
        "LLAMA405B_ATTEMPT": str(plan.attempt),
        "GLOO_SOCKET_IFNAME": node.interface,
        "NCCL_SOCKET_IFNAME": node.interface,
        "PYTHONUNBUFFERED": "1",
        **({"HF_HUB_OFFLINE": "1"} if plan.trains else {}),  # the weights are files that were checked
        **node.env,
    }
