"""What the operator's machine asks of a host: one short-lived process a question. Standard library alone.

``python -m llama405b_tools.agent ACTION`` reads one line of JSON from standard input and prints JSON, so that no
argument or value ever passes through a shell. ``stream`` prints a line of JSON whenever there is news, until its
standard input closes: when the operator's terminal dies, so does it.
"""

import contextlib
import errno
import importlib.metadata
import json
import os
import platform
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama405b
from llama405b import weights
from llama405b.errors import UserError
from llama405b.rundir import UMASK, RunDir, read_json, write_json
from llama405b_tools import procs
from llama405b_tools.commands import tmux_session, tmux_socket
from llama405b_tools.hosts import LOOPBACK
from llama405b_tools.node import GRACE_S, is_alive, secrets_path, take_lock
from llama405b_tools.tail import Tail

Request = dict[str, Any]
START_WITHIN_S = 20.0
STREAM_EVERY_S = 0.3
CONNECT_TIMEOUT_S = 5.0
NEWEST_RUNS = 20
ELSEWHERE = "192.0.2.1"  # RFC 5737: an address of no machine, whose route is the default one


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


def start(request: Request) -> dict[str, Any]:
    """Write the plan and the secrets, start the node runner inside tmux, and wait until torchrun runs."""
    host, plan = request["host"], request["plan"]
    run = run_dir(plan["run"])
    claim = take_lock(run.lock(f"{host}.start"))  # two launches of one name at once: the other one is told
    if claim is None or is_alive(run, host):
        return {"error": f"run {run.name} was started by somebody else just now"}
    write_json(run.plan, plan)
    run.status(host).unlink(missing_ok=True)
    for rank in request["ranks"]:
        run.heartbeat(rank).unlink(missing_ok=True)
    if request["secrets"]:
        _write_secrets(secrets_path(run, host), request["secrets"])
    if fault := _start_tmux(run, host):
        return {"error": fault}
    deadline = time.monotonic() + START_WITHIN_S
    while time.monotonic() < deadline:
        status = read_json(run.status(host))
        if status and status["state"] != "starting":
            return {"status": status}
        time.sleep(0.05)
    return {"error": f"the node runner did not start torchrun within {START_WITHIN_S:.0f} s"}


def status(request: Request) -> dict[str, Any]:
    """Every run of this host, newest first: its state, its ranks' heartbeats, its last step and checkpoint."""
    host = request["host"]
    found = []
    for path in Path("runs").iterdir() if Path("runs").is_dir() else []:
        plan = read_json(path / "plan.json")
        with contextlib.suppress(KeyError, TypeError):  # a file that is no plan of ours is not a run
            known = plan and host in [node["name"] for node in plan["nodes"]] and plan["rdzv_id"] and plan["attempt"]
            if plan and known and request.get("run") in (None, path.name):
                found.append((float(plan["created"]), path, plan))
    found.sort(key=lambda entry: entry[0], reverse=True)
    return {"runs": [_describe(run_dir(path.name), plan, host) for _, path, plan in found[:NEWEST_RUNS]]}


def stop(request: Request) -> dict[str, Any]:
    """End every process of the run on this host, and look whether any is left."""
    run, host = run_dir(request["run"]), request["host"]
    if request.get("only") not in (None, (read_json(run.plan) or {}).get("rdzv_id")):
        return {
            "known": True,
            "was_alive": False,
            "swept": 0,
            "left": [],
            "status": None,
        }  # another launch's: not ours to end
    runner = read_json(run.status(host)) or {}
    was_alive = is_alive(run, host)
    if was_alive and procs.same_process(runner.get("pid", 0), runner.get("pid_start", -1)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(runner["pid"], signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S + 10
        while is_alive(run, host) and time.monotonic() < deadline:
            time.sleep(0.1)
        if is_alive(run, host):  # it does not answer: its guardian ends the rest
            with contextlib.suppress(ProcessLookupError):
                os.kill(runner["pid"], signal.SIGKILL)
    ended, left = procs.sweep(f"{run.path}:{host}")
    subprocess.run(
        ["tmux", "-L", tmux_socket(run.name), "kill-session", "-t", f"={tmux_session(host)}"],
        capture_output=True,
        timeout=10,
        check=False,
    )
    with contextlib.suppress(OSError):
        secrets_path(run, host).unlink()
    return {
        "known": run.path.is_dir(),
        "was_alive": was_alive,
        "swept": ended,
        "left": left,
        "status": read_json(run.status(host)),
    }


def stream(request: Request) -> None:
    """Print what is new: log lines, metrics and the host's state, until standard input closes or it is done."""
    run, host = run_dir(request["run"]), request["host"]
    plan = read_json(run.plan) or {}
    seen: dict[str, int] = dict(request.get("seen") or {})
    tail = Tail(run.logs(host))
    metrics = Tail(run.path) if request.get("metrics") else None
    last = ""
    while True:
        alive = is_alive(run, host)  # before the lines are read: a run that ended has written its last
        last_pass = not alive or not request.get("follow")
        for path, lines in tail.all_lines(final=last_pass):
            parts = path.relative_to(run.logs(host)).parts
            if len(parts) == 1 or parts[0].startswith(plan.get("rdzv_id", "")):
                file = "/".join(parts)
                skip = min(len(lines), seen.get(file, 0))  # what the operator had before the connection broke
                seen[file] = seen.get(file, 0) - skip
                if lines[skip:]:
                    _print({"file": file, "lines": lines[skip:]})
        for path, lines in metrics.all_lines() if metrics else ():
            if path == run.metrics:
                _print({"metrics": [json.loads(line) for line in lines]})
        state = {"alive": alive, "status": read_json(run.status(host))}
        if json.dumps(state) != last:
            last = json.dumps(state)
            _print(state)
        if last_pass:
            _print({"end": True})
            return
        if select.select([sys.stdin], [], [], STREAM_EVERY_S)[0] and not os.read(sys.stdin.fileno(), 4096):
            return


def run_dir(name: str) -> RunDir:
    """The run's directory below the working directory."""
    return RunDir(Path.cwd() / "runs" / name)


def _start_tmux(run: RunDir, host: str) -> str:
    """Start the node runner in a session of the run's own tmux server; '' or what went wrong."""
    env = {key: value for key, value in os.environ.items() if key not in ("TMUX", "TMUX_PANE")}
    done = subprocess.run(
        [
            "tmux",
            "-L",
            tmux_socket(run.name),
            "-f",
            "/dev/null",
            "new-session",
            "-d",
            "-s",
            tmux_session(host),
            "-x",
            "200",
            "-y",
            "50",
            "--",
            sys.executable,
            "-m",
            "llama405b_tools.node",
            str(run.path),
            host,
        ],
        env=env,
        capture_output=True,
        text=True,
        timeout=START_WITHIN_S,
        check=False,
    )
    if done.returncode:
        secrets_path(run, host).unlink(missing_ok=True)
        return f"tmux would not start a session ({done.stderr.strip() or done.returncode})"
    return ""


def _describe(run: RunDir, plan: dict[str, Any], host: str) -> dict[str, Any]:
    node = next(node for node in plan["nodes"] if node["name"] == host)
    ranks = range(node["first_rank"], node["first_rank"] + node["slots"])
    root = Path(plan["checkpoint_dir"]) if plan.get("checkpoint_dir") else run.checkpoints
    saved = (
        sorted(p.name for p in root.iterdir() if p.name.startswith("step-") and (p / "manifest.json").exists())
        if root.is_dir()
        else []
    )
    return {
        "run": run.name,
        "created": plan["created"],
        "attempt": plan["attempt"],
        "first_rank": node["first_rank"],
        "alive": is_alive(run, host),
        "leftovers": procs.marked(f"{run.path}:{host}") if not is_alive(run, host) else [],
        "status": read_json(run.status(host)),
        "heartbeats": [beat for rank in ranks if (beat := read_json(run.heartbeat(rank)))],
        "metrics": _last_line(run.metrics),
        "checkpoint": str(root / saved[-1]) if saved and not saved[-1].endswith((".tmp", ".old")) else None,
        "now": time.time(),
    }


def _last_line(path: Path) -> Any:
    with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().splitlines()
        return json.loads(lines[-1]) if lines else None
    return None


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
        weights.check_checkpoint(Path(asked["path"]), asked["seq_len"])
    except UserError as error:
        return str(error)
    return ""


def _write_secrets(path: Path, secrets: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(secrets, file)


def _print(value: Any) -> None:
    print(json.dumps(value), flush=True)


ACTIONS: dict[str, Callable[[Request], dict[str, Any] | None]] = {
    "probe": probe,
    "start": start,
    "status": status,
    "stop": stop,
    "stream": stream,
}


def main() -> int:
    """Entry point of ``python -m llama405b_tools.agent ACTION``."""
    os.umask(UMASK)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    reply = ACTIONS[sys.argv[1]](json.loads(sys.stdin.readline()))
    if reply is not None:
        _print(reply)
    return 0


if __name__ == "__main__":
    sys.exit(main())
