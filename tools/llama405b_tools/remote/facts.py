"""What launch must know of a host before it starts anything there. Runs on the host; standard library alone.

Changes nothing.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import llama405b
from llama405b.contract import weights
from llama405b.contract.errors import UserError
from llama405b.contract.files import read_json
from llama405b.contract.paths import RunDir
from llama405b_tools.remote import hostprobe, processes
from llama405b_tools.remote.locks import is_alive, run_of

Request = dict[str, Any]


def probe(request: Request) -> None:
    """Say what launch must know of this host; the head goes on listening for the others until its input closes.

    Starts nothing and changes nothing.
    """
    listener = hostprobe.Listener(request["port"], request["token"]) if request["is_head"] else None
    print(json.dumps(_answer(request, listener.fault if listener else "")), flush=True)
    if listener:
        sys.stdin.read()


def _answer(request: Request, port_fault: str) -> dict[str, Any]:
    run, host = run_of(request["run"]), request["host"]
    facts = {
        "python": ".".join(platform.python_version_tuple()[:2]),  # patch releases agree with each other
        **{name: version_of(name) for name in request["packages"]},
        "llama405b": llama405b.__version__,
    }
    plan = read_json(run.plan) or {}
    own = hostprobe.network()["addresses"]
    return {
        "facts": facts,
        "tmux": shutil.which("tmux") is not None,
        "ip": shutil.which("ip") is not None,
        "run_exists": run.path.exists(),
        "attempt": plan.get("attempt", 0),
        "owner": plan.get("owner", ""),
        "alive": is_alive(run, host),
        "others": [p.name for p in run.path.parent.glob("*") if p.name != run.name and is_alive(RunDir(p), host)],
        "leftovers": processes.marked(f"{run.path}:{host}"),
        "machine": _machine_id(),
        "gpus": _gpus(),
        "rdma": hostprobe.rdma(),
        "cores": len(os.sched_getaffinity(0)),
        "port_fault": port_fault,
        "own": own,
        "head": _reach_head(request, own),
        "workdir": str(Path.cwd()),
        "writable": os.access("runs" if Path("runs").exists() else ".", os.W_OK) and not Path("runs").is_file(),
        "places": {key: _place(path) for key, path in request["places"].items()},
        "free_bytes": shutil.disk_usage(".").free,
        "checkpoint": _checkpoint_fault(request.get("checkpoint")),
    }


def _reach_head(request: Request, own: list[dict[str, str]]) -> dict[str, Any]:
    """For each address the head may have: '' or a fault, and the own address and interface on the way there."""
    found = {}
    for address in request["candidates"]:
        result = hostprobe.reach(address, request["port"], request["token"])
        mine = result.get("mine", "")
        interface = next((entry["interface"] for entry in own if entry["address"] == mine), "")
        found[address] = result | {"interface": "lo" if mine.startswith("127.") else interface}
    return found


def _place(path: str) -> dict[str, Any]:
    """A directory in full, and whether it is there or can be made."""
    full = Path(path).expanduser()
    there = next(parent for parent in (full, *full.parents) if parent.exists())
    return {"path": str(full), "writable": there.is_dir() and os.access(there, os.W_OK | os.X_OK)}


def version_of(package: str) -> str:
    """A package's version here, or "missing"."""
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


def _checkpoint_fault(asked: dict[str, Any] | None) -> str:
    """'' where the checkpoint that rank 0 will read is whole and fits, else the trainer's own sentence."""
    if asked is None:
        return ""
    try:
        weights.check_checkpoint(Path(asked["path"]), asked["seq_len"], asked["layers"], random=asked["random"])
    except UserError as error:
        return str(error)
    return ""
