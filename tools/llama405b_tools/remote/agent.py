"""What the operator's machine asks of a host: one short-lived process a question. Standard library alone.

``python -m llama405b_tools.remote.agent ACTION`` reads one line of JSON from standard input and prints JSON, so that no
argument or value ever passes through a shell. ``stream`` prints a line of JSON whenever there is news, until its
standard input closes: when the operator's terminal dies, so does it.
"""

import contextlib
import importlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from llama405b.contract.files import read_json, write_json
from llama405b.contract.paths import UMASK, RunDir
from llama405b.contract.plan import REHEARSAL
from llama405b_tools.remote import processes, slurm
from llama405b_tools.remote.hostlogs import HostLogs
from llama405b_tools.remote.locks import is_alive, run_of, take_lock
from llama405b_tools.remote.messages import KEEP
from llama405b_tools.remote.node import GRACE_S
from llama405b_tools.remote.secrets import write_secrets
from llama405b_tools.remote.tail import Tail
from llama405b_tools.remote.tmux import tmux_session, tmux_socket

Request = dict[str, Any]
START_WITHIN_S = 20.0
KEEP_WITHIN_S = 60.0  # after this host is up, for all the others to be
STREAM_EVERY_S = 0.3
BEATS_EVERY_S = 2.0
NEWEST_RUNS = 20
STEP_DIR = re.compile(r"step-\d{8}")


def start(request: Request) -> None:
    """Start the run here, and say so; end it again unless the operator, having heard from all hosts, says to keep it."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # whoever asked may be gone: then there is something to end
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    reply, plan = _start(request), request["plan"]
    with contextlib.suppress(BrokenPipeError):
        _print(reply)
        if "error" in reply:
            return
        if select.select([sys.stdin], [], [], KEEP_WITHIN_S)[0] and sys.stdin.readline() == KEEP:
            _print({"kept": True})
            return
    stop({"run": plan["run"], "host": request["host"], "only": plan["rdzv_id"]})
    sys.stdout = None  # nobody listens, and nothing is left to say


def _start(request: Request) -> dict[str, Any]:
    """Write the plan and the secrets, start the node runner inside tmux, and wait until torchrun runs."""
    host, plan = request["host"], request["plan"]
    run = run_of(plan["run"])
    claim = take_lock(run.start_lock(host))  # two launches of one name at once: the other one is told
    if claim is None or is_alive(run, host):
        owner = (read_json(run.plan) or {}).get("owner") or "somebody else"
        return {"error": f"run {run.name} was started by {owner} just now"}
    if not request["again"]:
        run.stop(host).unlink(missing_ok=True)
    elif run.stop(host).exists():
        return {"error": f"run {run.name} was stopped: {(read_json(run.stop(host)) or {}).get('by', '')}"}
    write_json(run.plan, plan)
    run.status(host).unlink(missing_ok=True)
    for rank in request["ranks"]:
        run.heartbeat(rank).unlink(missing_ok=True)
    if request["secrets"]:
        write_secrets(run.secrets(host), request["secrets"])
    if fault := _start_tmux(run, host):
        return {"error": fault}
    deadline = time.monotonic() + START_WITHIN_S
    while time.monotonic() < deadline:
        status = read_json(run.status(host))
        if status and status["state"] == "killed":
            return {"error": f"the node runner ended at once: {status['reason']}"}
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
    return {"runs": [_describe(run_of(path.name), plan, host) for _, path, plan in found[:NEWEST_RUNS]]}


def stop(request: Request) -> dict[str, Any]:
    """End every process of the run on this host, and look whether any is left.

    ``by``: who asked for it, so that no restart follows; ``grace_s``: for the trainer to save first; ``hard``: as a
    crash would; ``discard``: delete a rehearsal's checkpoints.
    """
    run, host = run_of(request["run"]), request["host"]
    grace_s = float(request.get("grace_s", 0))
    if request.get("only") not in (None, (read_json(run.plan) or {}).get("rdzv_id")):
        by = (read_json(run.stop(host)) or {}).get("by", "")  # another launch's: not ours to end
        return {"known": True, "was_alive": False, "swept": 0, "left": [], "status": None, "stopped_by": by}
    plan = read_json(run.plan)
    runner = read_json(run.status(host)) or {}
    was_alive = is_alive(run, host)
    if request.get("by") and run.path.is_dir():
        write_json(run.stop(host), {"by": request["by"], "grace_s": grace_s, "time": time.time()})
    if was_alive and processes.same_process(runner.get("pid", 0), runner.get("pid_start", -1)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(runner["pid"], signal.SIGKILL if request.get("hard") else signal.SIGTERM)
        deadline = time.monotonic() + grace_s + GRACE_S + 10
        while is_alive(run, host) and time.monotonic() < deadline:
            time.sleep(0.1)
        if is_alive(run, host):  # it does not answer: its guardian ends the rest
            with contextlib.suppress(ProcessLookupError):
                os.kill(runner["pid"], signal.SIGKILL)
    ended, left = processes.sweep(f"{run.path}:{host}")
    subprocess.run(
        ["tmux", "-L", tmux_socket(run.name), "kill-session", "-t", f"={tmux_session(host)}"],
        capture_output=True,
        timeout=10,
        check=False,
    )
    with contextlib.suppress(OSError):
        run.secrets(host).unlink()
    if request.get("discard") and plan and run.name.endswith(REHEARSAL) and not left:
        shutil.rmtree(_checkpoints(run, plan), ignore_errors=True)
    return {
        "known": run.path.is_dir() and (plan is None or host in [node["name"] for node in plan["nodes"]]),
        "was_alive": was_alive,
        "swept": ended,
        "left": left,
        "status": read_json(run.status(host)),
        "stopped_by": (read_json(run.stop(host)) or {}).get("by", ""),
        "node": _describe(run, plan, host) if plan else None,
    }


def orphans(request: Request) -> dict[str, Any]:
    """Processes of runs whose node runner is gone, by run directory; ended where ``end`` says so."""
    found: dict[str, list[int]] = {}
    for value, pids in processes.all_marked().items():
        directory, _, host = value.rpartition(":")
        if not is_alive(RunDir(Path(directory)), host):
            found[value] = pids
    left = {value: processes.sweep(value)[1] for value in found} if request["end"] else {}
    return {
        "orphans": [
            {"value": value, "pids": pids, "what": processes.command_of(pids[0]), "left": left.get(value, pids)}
            for value, pids in sorted(found.items())
        ]
    }


def stream(request: Request) -> None:
    """Print what is new: log lines, metrics and the host's state, until standard input closes or it is done."""
    run, host = run_of(request["run"]), request["host"]
    logs = HostLogs(run, host, request)
    metrics = Tail(run.metrics) if request.get("metrics") else None
    last, beats_at = "", 0.0
    while True:
        plan = read_json(run.plan) or {}
        alive = _is_alive(run, plan, host)  # before the lines are read: a run that ended has written its last
        last_pass = not request.get("follow") or not (alive or request.get("forever"))
        for message in logs.poll(final=last_pass):
            _print(message)
        for piece in metrics.all() if metrics and run.metrics.is_file() else ():
            _print({"metrics": [json.loads(line) for line in piece.data.splitlines()]})
        state = {"alive": alive, "status": read_json(run.status(host))}
        if json.dumps(state) != last:
            last = json.dumps(state)
            _print(state | {"stopped_by": (read_json(run.stop(host)) or {}).get("by", "")})
        if request.get("beats") and (last_pass or time.monotonic() > beats_at + BEATS_EVERY_S):
            beats_at = time.monotonic()
            _print({"beats": _beats(run, _node(plan, host)), "now": time.time()})
        if last_pass:
            _print({"end": True})
            return
        if select.select([sys.stdin], [], [], STREAM_EVERY_S)[0] and not os.read(sys.stdin.fileno(), 4096):
            return


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
            "llama405b_tools.remote.node",
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
        run.secrets(host).unlink(missing_ok=True)
        return f"tmux would not start a session ({done.stderr.strip() or done.returncode})"
    return ""


def _is_alive(run: RunDir, plan: dict[str, Any], host: str) -> bool:
    """Whether a node runner runs the plan: here, or on the node of a Slurm job whose files these are."""
    if plan.get("slurm_job"):
        status = read_json(run.status(host))
        if status and status["attempt"] == plan["attempt"] and status["state"] not in ("starting", "running"):
            return False
        return slurm.alive(plan["slurm_job"])
    return is_alive(run, host)


def _node(plan: dict[str, Any], host: str) -> dict[str, Any]:
    return next((node for node in plan.get("nodes", []) if node["name"] == host), {"first_rank": 0, "slots": 0})


def _beats(run: RunDir, node: dict[str, Any]) -> list[dict[str, Any]]:
    """The heartbeats of this host's ranks, by rank, each with the state of its process (R, S, D, T, …; "" if gone)."""
    ranks = range(node["first_rank"], node["first_rank"] + node["slots"])
    return [
        beat | {"state": processes.state(beat["pid"])} for rank in ranks if (beat := read_json(run.heartbeat(rank)))
    ]


def _describe(run: RunDir, plan: dict[str, Any], host: str) -> dict[str, Any]:
    node, alive = _node(plan, host), _is_alive(run, plan, host)
    root = _checkpoints(run, plan)
    found = root.iterdir() if root.is_dir() else ()
    saved = sorted(p.name for p in found if STEP_DIR.fullmatch(p.name) and (p / "manifest.json").exists())
    return {
        "run": run.name,
        "created": plan["created"],
        "attempt": plan["attempt"],
        "owner": plan.get("owner", ""),
        "first_rank": node["first_rank"],
        "alive": alive,
        "leftovers": [] if alive or plan.get("slurm_job") else processes.marked(f"{run.path}:{host}"),
        "status": read_json(run.status(host)),
        "heartbeats": _beats(run, node),
        "ends": _ends(run, host),
        "stopped_by": (read_json(run.stop(host)) or {}).get("by", ""),
        "metrics": _last_line(run.metrics),
        "checkpoint": str(root / saved[-1]) if saved else None,
        "now": time.time(),
    }


def _ends(run: RunDir, host: str) -> list[dict[str, Any]]:
    """How the last attempts ended here, oldest first."""
    with contextlib.suppress(OSError, ValueError):
        return [json.loads(line) for line in run.ends(host).read_text(encoding="utf-8").splitlines()[-NEWEST_RUNS:]]
    return []


def _checkpoints(run: RunDir, plan: dict[str, Any]) -> Path:
    return Path(plan["checkpoint_dir"]) if plan.get("checkpoint_dir") else run.checkpoints


def _last_line(path: Path) -> Any:
    with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().splitlines()
        return json.loads(lines[-1]) if lines else None
    return None


def _print(value: Any) -> None:
    print(json.dumps(value), flush=True)


ACTIONS = {  # action: module and function; imported when it is asked for, as most of an agent's time is Python's start
    "start": ("llama405b_tools.remote.agent", "start"),
    "status": ("llama405b_tools.remote.agent", "status"),
    "stop": ("llama405b_tools.remote.agent", "stop"),
    "orphans": ("llama405b_tools.remote.agent", "orphans"),
    "stream": ("llama405b_tools.remote.agent", "stream"),
    "probe": ("llama405b_tools.remote.facts", "probe"),
    "relay": ("llama405b_tools.remote.relay", "relay"),
    "send": ("llama405b_tools.remote.relay", "send_from_here"),
}


def main() -> int:
    """Entry point of ``python -m llama405b_tools.remote.agent ACTION``."""
    os.umask(UMASK)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if sys.argv[1] not in ACTIONS:
        raise SystemExit(f"{sys.argv[1]}: not an action of the agent")
    module, name = ACTIONS[sys.argv[1]]
    reply = getattr(importlib.import_module(module), name)(json.loads(sys.stdin.readline()))
    if reply is not None:
        _print(reply)
    return 0


if __name__ == "__main__":
    sys.exit(main())
