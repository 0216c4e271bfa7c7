"""A run's processes on this host: lock, tmux session, secrets, guard, torchrun, and Slurm's job. Linux.

- the command that the node runner starts, and its environment;
- the processes of a run, whoever their parents are now (process start times also work on macOS, where an operator's guard may run);
- whether a run is alive here: a lock that its node runner and guardian hold;
- the tmux server of a run, and the sockets that tmux leaves behind;
- secrets on their way to the ranks or a guard, and their removal from logs;
- what Slurm reports about a job: no other module calls its programs;
- a run's guard, as a host sees it: its last note and when it came; and the guard that runs on this machine.
"""

import contextlib
import ctypes
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from llama405b.contract import reader
from llama405b.contract.errors import RunError, UserError
from llama405b.contract.files import append_line, read_record, read_records, write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.records import FailureRecord, GuardState, NodeState, NodeStatus, StopMark
from llama405b.contract.software import module_argv
from llama405b.spec.plan import Plan, read_plan
from llama405b_tools import parsers
from llama405b_tools.agent import facts
from llama405b_tools.agent.facts import MARKER
from llama405b_tools.agent.messages import (
    TMUX_START_TIMEOUT_S,
    DiskSpace,
)

PROGRAM_KIND_FLAGS = (
    "-m",
    "--module",
    "--no-python",
    "--no_python",
)  # torchrun's flags that say what a program's name means
SETUP_FAILED = "LLAMA405B_SETUP_FAILED"  # in torchrun's log, with the exit code of the setup line


def torchrun_argv(plan: Plan, host: str, log_dir: str) -> list[str]:
    """Return the command that the node runner starts.

    Only the head may host the store, and must: torchrun's own guess makes a second agent on one machine, or a
    stranger's agent on the same port, join a store that is not this run's.
    """
    node = plan.node(host)
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
        *_separate_program(_as_own_module(plan.program, node.python)),
    ]


def _as_own_module(program: Sequence[str], python: str) -> Sequence[str]:
    """Return the command for a module of ours in the way we start it; any other program unchanged."""
    match program:
        case ["-m", module, *words] if module.startswith("llama405b."):
            return ["--no-python", *module_argv(module, python), *words]
    return program


def _separate_program(program: Sequence[str]) -> list[str]:
    """Put ``--`` before a program's name, so that torchrun does not parse the program's own flags.

    torchrun takes arguments that begin like a flag of its own (``--run``) as that flag. Its own flags before the name stay before it.
    If one of them has a separate value, the name's position is unknown, so the command stays as it is.
    """
    n_flags = len(list(itertools.takewhile(PROGRAM_KIND_FLAGS.__contains__, program)))
    if program[n_flags : n_flags + 1] and program[n_flags].startswith("-"):
        return list(program)
    return [*program[:n_flags], "--", *program[n_flags:]]


def setup_argv(line: str, argv: Sequence[str]) -> list[str]:
    """Return ``argv`` to run after the user's own shell line (``module load cuda``), unless that fails."""
    if not line:
        return list(argv)
    script = f'eval "$0" || {{ echo "{SETUP_FAILED} $?" >&2; exit 97; }}; exec "$@"'
    return ["bash", "-c", script, line, *argv]


def node_env(plan: Plan, host: str, run_dir: str) -> dict[str, str]:
    """Return what torchrun's environment has in addition to the host's own and the secrets."""
    node = plan.node(host)
    return {
        MARKER: f"{run_dir}:{host}",
        "LLAMA405B_HOST": host,
        "LLAMA405B_FIRST_RANK": str(node.first_rank),
        "LLAMA405B_ATTEMPT": str(plan.attempt),
        "GLOO_SOCKET_IFNAME": node.interface,
        "NCCL_SOCKET_IFNAME": node.interface,
        "PYTHONUNBUFFERED": "1",
        **({"HF_HUB_OFFLINE": "1"} if plan.trains else {}),  # the weights are files that were checked
        **node.env,
    }


PR_SET_CHILD_SUBREAPER = 36
PF_KTHREAD = 0x00200000  # among a process's flags: it is a thread of the kernel
EXEC_TIMEOUT_S = 5.0  # how long, on a busy machine, an exec may take


def become_subreaper() -> None:
    """Make orphaned descendants children of this process, so that none is lost."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it is gone or a zombie.

    On macOS: in seconds.
    """
    if sys.platform == "darwin":
        ps = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
        result = subprocess.run(
            ps, env={"LC_ALL": "C", "PATH": os.defpath}, capture_output=True, text=True, check=False
        )
        return parsers.parse_ps_start(result.stdout)
    fields = _read_stat(pid)
    return int(fields[19]) if fields else None


def _read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent, …; [] if it is gone or a zombie."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1").rpartition(") ")[2].split()
        return [] if fields[0] in "ZX" else fields
    return []


def _iterate_live() -> Iterator[tuple[int, list[str]]]:
    """Yield the pid and stat fields of every live process."""
    for entry in os.listdir("/proc"):  # noqa: PTH208
        if entry.isdigit() and (fields := _read_stat(int(entry))):
            yield int(entry), fields


def process_state(pid: int) -> str:
    """Return a process's state as the kernel writes it (R, S, D, T, Z, …); "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="latin-1").rpartition(") ")[2][:1]
    except OSError:
        return ""


def is_same_process(pid: int, started_at: int) -> bool:
    """Return whether ``pid`` is still the process that started at ``started_at``."""
    return pid > 0 and start_time(pid) == started_at


def find_marked(value: str) -> list[int]:
    """Return processes whose environment marks them as belonging to ``<run directory>:<host>``."""
    return facts.marked_processes().get(value, [])


def read_variables(value: str, names: Sequence[str]) -> dict[str, str]:
    """Return the variables of these names that processes of ``<run directory>:<host>`` have set."""
    values = {}
    for pid in find_marked(value) if names else ():
        for entry in facts.environment(pid):
            name, _, text = entry.decode("utf-8", "replace").partition("=")
            if name in names:
                values[name] = text
    return values


def find_descendants(root: int) -> list[int]:
    """Return all live descendants of a process."""
    children: dict[int, list[int]] = {}
    for pid, fields in _iterate_live():
        children.setdefault(int(fields[1]), []).append(pid)
    pids: list[int] = []
    pending = [root]
    while pending:
        child_pids = children.get(pending.pop(), [])
        pids += child_pids
        pending += child_pids
    return pids


def find_in_exec() -> list[int]:
    """Return processes in the middle of an exec.

    Their environment and arguments are empty for a moment, so nobody knows whose they are.
    """
    pids = []
    for pid, fields in _iterate_live():
        with contextlib.suppress(OSError):
            content = Path(f"/proc/{pid}/environ").read_bytes() or Path(f"/proc/{pid}/cmdline").read_bytes()
            if not content and not int(fields[6]) & PF_KTHREAD:
                pids.append(pid)
    return pids


def kill_marked(
    value: str, *, root_pid: int = 0, spared_pids: tuple[int, ...] = (), timeout_s: float = 20.0
) -> tuple[int, list[int]]:
    """SIGKILL every process of ``<run directory>:<host>`` until two scans find none.

    A process that is about to end, or in the middle of an exec, has no environment to read; an exec is given some seconds.
    Returns how many were ended, and which could not be ended within ``timeout_s`` (for example in state D).
    """
    killed_starts: dict[int, int | None] = {}
    start = time.monotonic()
    n_clean_scans = 0
    while True:
        remaining = set(find_marked(value)) | (set(find_descendants(root_pid)) if root_pid else set())
        remaining |= {
            pid
            for pid, started_at in killed_starts.items()
            if started_at is not None and is_same_process(pid, started_at)
        }
        remaining -= {os.getpid(), *spared_pids}
        elapsed_s = time.monotonic() - start
        n_clean_scans = 0 if remaining or (elapsed_s < EXEC_TIMEOUT_S and find_in_exec()) else n_clean_scans + 1
        if n_clean_scans == 2 or elapsed_s > timeout_s:
            return len(killed_starts.keys() - remaining), sorted(remaining)
        for pid in remaining:
            if pid not in killed_starts:
                killed_starts[pid] = start_time(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(0.05)


def take_lock(path: Path, n_tries: int = 10) -> int | None:
    """Take the run's lock on this host; None if another process holds it.

    The process, and its guardian, hold it until they end.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # O_CLOEXEC: programs that are started do not inherit the lock. The guardian is forked without an exec, so it shares it.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for _ in range(n_tries):  # `status` holds it for an instant to check
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.05)
        else:
            return descriptor
    os.close(descriptor)
    return None


def is_alive(run: RunDir, host: str) -> bool:
    """Return whether a node runner (or its guardian) holds the run's lock on this host."""
    return is_locked(run.lock(host))


def is_locked(path: Path) -> bool:
    """Return whether a process holds a lock."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        # Shared, so that two checks at the same time do not take each other for the holder.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def is_run_active(run: RunDir, host: str, plan: Plan | None = None) -> bool:
    """Return whether the run has not ended here; ``plan``: its plan, if that has been read.

    A node runner may live longer, to copy checkpoints to the next host.
    """
    has_runner = is_alive(run, host)
    if not has_runner or not (plan or read_plan(run)).replicates:
        return has_runner
    status = read_record(NodeStatus, run.status(host))
    return status is None or status.state in (NodeState.STARTING, NodeState.RUNNING)


def find_live_names(run: RunDir, excluded: AbstractSet[str]) -> list[str]:
    """Return other host names under which this machine is starting or running the run.

    They use the same run directory.
    """
    names = {
        path.name.removesuffix(".lock").removesuffix(".start") for path in run.path.glob("status/*.lock")
    } - excluded
    local_names = [name for name in sorted(names) if is_run_active(run, name) and _is_local_runner(run, name)]
    return local_names or [name for name in sorted(names) if is_locked(run.start_lock(name))]


def _is_local_runner(run: RunDir, host: str) -> bool:
    """Return whether a node runner is on this machine.

    Another machine's may hold a lock in a directory that both share.
    """
    status = read_record(NodeStatus, run.status(host))
    return status is None or is_same_process(status.pid, status.pid_start)


def resolve_run_dir(run_name: str) -> RunDir:
    """Return the run's directory, below this process's working directory."""
    return RunDir(Path.cwd() / "runs" / run_name)


SOCKET_PREFIX = "llama405b-"
MAX_NAME_CHARS = 40  # characters of a run's name in that of a socket, whose path has room for about 100
TMUX_END_TIMEOUT_S = 10.0  # for tmux to end a session, or to list those of a run


def tmux_socket(run: RunDir) -> str:
    """Return the name of the tmux server of a run directory on this machine.

    It has a hash of the directory, because two directories may hold runs of the same name.
    """
    directory = hashlib.sha256(os.fsencode(run.path.resolve())).hexdigest()
    return f"{SOCKET_PREFIX}{run.name[:MAX_NAME_CHARS]}-{directory[:8]}"


def tmux_session(host: str) -> str:
    """Return the name of a host's session; tmux allows no '.' or ':' in it."""
    return re.sub(r"[.:]", "_", host)


def start_session(server: str, session: str, argv: Sequence[str]) -> int:
    """Start a program in a new session of a tmux server; returns the program's pid.

    Raises:
        RunError: tmux could not start it; says why.
    """
    remove_dead_sockets()
    env = {key: value for key, value in os.environ.items() if key not in ("TMUX", "TMUX_PANE")}
    new_session = ["new-session", "-d", "-P", "-F", "#{pane_pid}", "-s", session, "-x", "200", "-y", "50"]
    command = ["tmux", "-L", server, "-f", "/dev/null", *new_session, "--", *argv]
    try:
        result = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=TMUX_START_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"no answer within {TMUX_START_TIMEOUT_S:g} s") from None
    output = (result.stdout + result.stderr).strip()
    if result.returncode or not result.stdout.strip().isdecimal():
        raise RunError(output or f"exit code {result.returncode}, no output")
    return int(result.stdout)


def remove_dead_sockets(ending_socket: str = "", within_s: float = 0.5) -> None:
    """Remove the sockets of our servers that have ended; ``ending_socket``: one that may be about to end."""
    directory = Path(os.environ.get("TMUX_TMPDIR") or "/tmp") / f"tmux-{os.getuid()}"
    deadline = time.monotonic() + within_s
    while ending_socket and _is_listening(directory / ending_socket) and time.monotonic() < deadline:
        time.sleep(0.02)
    for path in directory.glob(f"{SOCKET_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.is_socket() and not _is_listening(path):
                path.unlink()


def remove_own_socket(run: RunDir) -> None:
    """Remove the socket of the run's server from inside its last session, just before that ends."""
    path = Path(os.environ.get("TMUX", "").partition(",")[0])
    if path.name != tmux_socket(run):
        return
    sessions = ["tmux", "-S", str(path), "list-sessions"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        result = subprocess.run(sessions, capture_output=True, timeout=TMUX_END_TIMEOUT_S, check=False)
        if len(result.stdout.splitlines()) == 1:
            path.unlink()


def _is_listening(path: Path) -> bool:
    """Return whether a server listens on a socket."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except OSError:  # it cannot be told: it stays
        return True
    return True


REDACTION = b"REDACTED"
BLOCK_BYTES = 1 << 20


def write_secrets(path: Path, secrets: dict[str, str]) -> None:
    """Write secrets for the node runner."""
    write_private(path, json.dumps(secrets))


def write_private(path: Path, text: str) -> None:
    """Write a new file that only this user can read, from its first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    # O_EXCL: never write a secret into a file or link that somebody has put there since the unlink.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def read_secrets(path: Path) -> dict[str, str]:
    """Read the secrets; {} if there is no file."""
    try:
        secrets = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return {str(name): str(value) for name, value in secrets.items()}


class LogMask:
    """Overwrites secret values in logs; remembers how far each log has been searched."""

    def __init__(self, root: Path, pieces: Sequence[str]) -> None:
        """Begin at the files' present ends: earlier attempts have searched up to there."""
        self.root, self.pieces = root, [piece.encode() for piece in pieces]
        self.overlap = max(map(len, self.pieces), default=1) - 1  # of two blocks: a piece may lie across their border
        self.positions: dict[Path, tuple[int, int]] = {}  # inode, and bytes
        for path in self._logs():
            self.positions[path] = (path.stat().st_ino, path.stat().st_size)

    def redact_all(self) -> None:
        """Search everything added to every log."""
        for path in self._logs():
            self.redact(path)

    def redact(self, path: Path) -> None:
        """Overwrite secrets in what was added to a log; if that fails, retry with the next addition."""
        if self.pieces:
            with contextlib.suppress(OSError), path.open("r+b", buffering=0) as file:
                inode, position = self.positions.get(path, (0, 0))
                info = os.fstat(file.fileno())
                if info.st_ino != inode or info.st_size < position:  # rewritten
                    position = 0
                self.positions[path] = info.st_ino, self._redact_from(file.fileno(), max(0, position - self.overlap))

    def _redact_from(self, descriptor: int, position: int) -> int:
        """Overwrite all secret values from a position on; return where the file ended."""
        while True:
            block = os.pread(descriptor, BLOCK_BYTES, position)
            for piece in self.pieces:
                index = block.find(piece)
                while index >= 0:
                    os.pwrite(descriptor, REDACTION.ljust(len(piece), b"*")[: len(piece)], position + index)
                    index = block.find(piece, index + len(piece))
            if len(block) <= self.overlap:
                return position + len(block)
            position += len(block) - self.overlap

    def _logs(self) -> list[Path]:
        return sorted(self.root.rglob("*.log")) if self.pieces else []


CLUSTER_VARIABLES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")
SLURM_TIMEOUT_S = 30.0
JOB_END_STATES = (
    "COMPLETED",
    "CANCELLED",
    "FAILED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
)


def job_state(job: str) -> str:
    """Return a job's state as Slurm writes it (PENDING, RUNNING, …); COMPLETED if Slurm has forgotten it.

    Raises:
        RunError: Slurm does not answer.
    """
    result = call_slurm(["squeue", "-h", "-j", job, "-o", "%T", "-t", "all"])
    if result.returncode and "Invalid job id" not in result.stderr:
        raise RunError(f"squeue does not answer ({' '.join(result.stderr.split())[:200]}); try it by hand")
    return [*result.stdout.split(), "COMPLETED"][0].partition("+")[0]


def pending_reason(job: str) -> str:
    """Return why a job is pending, in Slurm's words."""
    return call_slurm(["squeue", "-h", "-j", job, "-o", "%R"]).stdout.strip().strip("()") or "no reason given"


def is_job_alive(job: str) -> bool:
    """Return whether any process of a job may still run."""
    return job_state(job) in ("RUNNING", "COMPLETING", "SUSPENDED", "STAGE_OUT", "SIGNALING", "STOPPED")


def slurm_environment() -> dict[str, str]:
    """Return the environment for Slurm's programs, without variables of the enclosing job or step.

    Variables that find the cluster stay. sbatch passes its environment to the job: in a shell of a step, all ranks would be bound to
    that step's CPUs.
    """
    step_prefixes = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_")
    return {
        name: value
        for name, value in os.environ.items()
        if name in CLUSTER_VARIABLES or not name.startswith(step_prefixes)
    }


def call_slurm(argv: Sequence[str], excluded: Collection[str] = ()) -> "subprocess.CompletedProcess[str]":
    """Run one of Slurm's programs; ``excluded``: variables that it is not to see.

    Raises:
        UserError: It is not installed.
        RunError: It does not answer.
    """
    try:
        env = {name: value for name, value in slurm_environment().items() if name not in excluded}
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=SLURM_TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise UserError(f"{argv[0]} is not installed here; run this on a login node of the cluster") from None
    except subprocess.TimeoutExpired:
        raise RunError(
            f"{argv[0]} does not answer within {SLURM_TIMEOUT_S:.0f} s; Slurm's controller may be down"
        ) from None


DISMISS_TIMEOUT_S = 10.0


def note(run: str, host: str, only: str, state: GuardState) -> tuple[DiskSpace, ...]:
    """Store what a run's guard does now, and return the run's disks: the host's, or those that it shares.

    ``only``: the rendezvous id of the launch that it guards; a later launch's guard, if any, is another. Nothing is stored if
    somebody has stopped run and guard.
    """
    run_dir = resolve_run_dir(run)
    plan = read_plan(run_dir)
    stop_record = read_record(StopMark, run_dir.stop(host))
    if plan.rdzv_id == only and not (stop_record and stop_record.by):
        with contextlib.suppress(OSError):  # a full disk: the answer says so
            write_guard_note(run_dir, host, state)
    return list_disks(run_dir.path, Path(plan.checkpoint_dir or run_dir.path))


def list_disks(*paths: Path) -> tuple[DiskSpace, ...]:
    """Return the disks of these directories, each once; disks that cannot be queried are left out."""
    disks = {}
    for path in paths:
        with contextlib.suppress(OSError):
            if space := facts.disk_space(str(path)):
                disks[path.stat().st_dev] = DiskSpace(str(path), *space)
    return tuple(disks.values())


def write_guard_note(run: RunDir, host: str, state: GuardState | None) -> None:
    """Store the guard's last state with the time by this host's clock; None: no guard was asked for."""
    if state is None:
        run.guarded(host).unlink(missing_ok=True)
    else:
        write_json(run.guarded(host), dataclasses.replace(state, time=time.time()))


def read_guard_note(run: RunDir, host: str) -> GuardState | None:
    """Return the guard's last note to this host.

    For a guard on this machine, also whether it has died since.
    """
    state = read_record(GuardState, run.guarded(host))
    if state is None or not state.pid or not is_from_this_machine(state):
        return state
    return dataclasses.replace(state, died=not is_guard_running(state))


def machine_id() -> str:
    """Return an ID of this boot of this machine: host name, machine ID and boot ID.

    Two words if it has no machine ID.
    """
    files = (Path("/etc/machine-id"), Path("/proc/sys/kernel/random/boot_id"))
    return " ".join(
        [socket.gethostname(), *(path.read_text(encoding="ascii").strip() for path in files if path.exists())]
    )


def is_from_this_machine(guard: GuardState) -> bool:
    """Return whether a guard began on this machine, in this boot.

    If the machine has an ID, an earlier boot counts, too.
    """
    machine, local_machine = guard.machine.split(), machine_id().split()
    return machine == local_machine or (len(machine) == 3 and machine[:2] == local_machine[:2])


def is_guard_running(guard: GuardState) -> bool:
    """Return whether a guard runs on this machine now."""
    return guard.machine.split() == machine_id().split() and is_same_process(guard.pid, guard.pid_start)


def dismiss_guard(run: RunDir) -> tuple[int, ...]:
    """End the run's guard on this machine; return its pid if it stays.

    A run stopped on purpose must not be resumed.
    """
    guard = read_record(GuardState, run.guard)
    if guard is None or not is_guard_running(guard):
        return ()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(guard.pid, signal.SIGTERM)
    deadline = time.monotonic() + DISMISS_TIMEOUT_S
    while is_same_process(guard.pid, guard.pid_start) and time.monotonic() < deadline:
        time.sleep(0.05)
    return (guard.pid,) if is_same_process(guard.pid, guard.pid_start) else ()


def record_failure(run: RunDir, host: str, blame: FailureRecord) -> None:
    """Record why an attempt failed, unless a cause is already recorded."""
    if blame.attempt not in [record.attempt for record in read_records(FailureRecord, run.blames(host), 1)]:
        append_line(run.blames(host), reader.dumps(blame))
