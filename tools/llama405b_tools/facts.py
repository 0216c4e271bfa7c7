"""What launch must know of a host before it starts anything there. Runs on the host; standard library alone.

Changes nothing.
"""

import contextlib
import errno
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import llama405b
from llama405b import weights
from llama405b.errors import UserError
from llama405b.rundir import RunDir, read_json
from llama405b_tools import procs
from llama405b_tools.hosts import LOOPBACK
from llama405b_tools.node import is_alive

CONNECT_TIMEOUT_S = 5.0
ELSEWHERE = "192.0.2.1"  # RFC 5737: an address of no machine, whose route is the default one
Request = dict[str, Any]


def run_dir(name: str) -> RunDir:
    """The run's directory below the working directory."""
    return RunDir(Path.cwd() / "runs" / name)


def probe(request: Request) -> dict[str, Any]:
    """Say what launch must know of this host; starts nothing and changes nothing."""
    run = run_dir(request["run"])
    host, head, port = request["host"], request["head_address"], request["port"]
    facts = {
        "python": platform.python_version(),
        **{name: _version(name) for name in request["packages"]},
        "llama405b": llama405b.__version__,
    }
    interface, address = _route(head, is_head=request["is_head"])
    return {
        "facts": facts,
        "tmux": shutil.which("tmux") is not None,
        "ip": shutil.which("ip") is not None,
        "run_exists": run.path.exists(),
        "attempt": (read_json(run.plan) or {}).get("attempt", 0),
        "alive": is_alive(run, host),
        "owner": (read_json(run.plan) or {}).get("owner", ""),
        "leftovers": procs.marked(f"{run.path}:{host}"),
        "machine": _machine_id(),
        "gpus": _gpus(),
        "cores": len(os.sched_getaffinity(0)),
        "interface": interface,
        "address": address,
        "head": _listen_fault(port) if request["is_head"] else _reach_fault(head, port),
        "workdir": str(Path.cwd()),
        "writable": os.access("runs" if Path("runs").exists() else ".", os.W_OK) and not Path("runs").is_file(),
        "checkpoint": _checkpoint_fault(request.get("checkpoint")),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _machine_id() -> str:
    """Equal for two hosts of the file that are one machine."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + socket.gethostname()
    return socket.gethostname()


def _gpus() -> int:
    """How many GPUs the driver lists; a driver that hangs or is not there has none to offer."""
    if not shutil.which("nvidia-smi"):
        return 0
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=15, check=False)
        return sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    return 0


def _route(head: str, *, is_head: bool) -> tuple[str, str]:
    """The interface and own address on the way to the head; gloo and NCCL must be told, or may pick loopback."""
    try:
        target = socket.gethostbyname(head)
        if is_head and target.startswith("127.") and not LOOPBACK.fullmatch(head):
            target, is_head = ELSEWHERE, False  # Debian's "127.0.1.1 <own name>": where the others cannot reach it
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe_socket:
            probe_socket.connect((target, 9))  # sends nothing
            address = target if is_head else probe_socket.getsockname()[0]
    except OSError:
        return "", ""
    if not shutil.which("ip"):
        return "", address
    done = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, timeout=10, check=False)
    for line in done.stdout.splitlines():
        words = line.split()
        if words[3].partition("/")[0] == address or (address.startswith("127.") and words[1] == "lo"):
            return words[1], address
    return "", address


def _listen_fault(port: int) -> str:
    """'' where the rendezvous may listen on ``port`` here, else why not."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what an attempt left in TIME_WAIT is no one
        try:
            listener.bind(("", port))
            listener.listen(1)
        except OSError as error:
            return "in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
    return ""


def _reach_fault(head: str, port: int) -> str:
    """'' where the head answers (nothing listens on the port yet, so it refuses), else why not."""
    try:
        with socket.create_connection((head, port), timeout=CONNECT_TIMEOUT_S):
            return "in use"
    except ConnectionRefusedError:
        return ""
    except OSError as error:
        return f"cannot reach {head}:{port} ({error.strerror or error})"


def _checkpoint_fault(asked: dict[str, Any] | None) -> str:
    """'' where the checkpoint that rank 0 will read is whole and fits, else the trainer's own sentence."""
    if asked is None:
        return ""
    try:
        weights.check_checkpoint(Path(asked["path"]), asked["seq_len"], asked["layers"], random=asked["random"])
    except UserError as error:
        return str(error)
    return ""
