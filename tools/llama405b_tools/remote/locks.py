"""Whether a run is alive on this host: a lock that its node runner and guardian hold. Standard library."""

import fcntl
import os
import time
from collections.abc import Set as AbstractSet
from pathlib import Path

from llama405b.contract.files import read_record
from llama405b.contract.paths import RunDir
from llama405b.contract.plan import read_plan
from llama405b.contract.records import NodeState, NodeStatus
from llama405b_tools.remote.processes import same_process


def take_lock(path: Path, tries: int = 10) -> int | None:
    """Hold the run's lock on this host until the process (and its guardian) ends; None if another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for _ in range(tries):  # `status` holds it for an instant to check
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.05)
        else:
            return descriptor
    os.close(descriptor)
    return None


def is_alive(run: RunDir, host: str) -> bool:
    """Whether a node runner (or its guardian) holds the run's lock on this host."""
    return is_held(run.lock(host))


def is_held(path: Path) -> bool:
    """Whether a process holds a lock."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def runs(run: RunDir, host: str) -> bool:
    """Whether the run has not ended here: a node runner may live longer, to copy checkpoints to the next host."""
    lives = is_alive(run, host)
    if not lives or not read_plan(run).replicates:
        return lives
    status = read_record(NodeStatus, run.status(host))
    return status is None or status.state in (NodeState.STARTING, NodeState.RUNNING)


def live_names(run: RunDir, but: AbstractSet[str]) -> list[str]:
    """The names of other hosts under which a run of this machine is being started, or has not ended: it is its directory."""
    names = {path.name.removesuffix(".lock").removesuffix(".start") for path in run.path.glob("status/*.lock")} - but
    here = [name for name in sorted(names) if runs(run, name) and _is_here(run, name)]
    return here or [name for name in sorted(names) if is_held(run.start_lock(name))]


def _is_here(run: RunDir, host: str) -> bool:
    """Whether a node runner is one of this machine: another's may hold a lock in a directory that both share."""
    status = read_record(NodeStatus, run.status(host))
    return status is None or same_process(status.pid, status.pid_start)


def run_of(name: str) -> RunDir:
    """The run's directory, below this process's working directory."""
    return RunDir(Path.cwd() / "runs" / name)
