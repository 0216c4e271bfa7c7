"""The node runner: what tmux starts on a host, and the parent of torchrun there. Standard library alone.

``python -m llama405b_tools.remote.node RUN_DIR HOST`` takes everything from ``RUN_DIR/plan.json``. It holds the run's lock
on the host, ends what an earlier attempt left behind, hands the secrets to torchrun's environment only, and writes
the truth to ``status/<host>.json``. It leaves no process behind, however it ends itself: a guardian, which shares
its lock, outlives a SIGKILL of the runner just long enough to end the rest.
"""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from llama405b.contract.files import read_json, write_json
from llama405b.contract.paths import UMASK, RunDir
from llama405b.contract.plan import Plan, plan_from_json
from llama405b.contract.records import NodeStatus
from llama405b_tools.machine import fabric
from llama405b_tools.remote import processes
from llama405b_tools.remote.locks import take_lock
from llama405b_tools.remote.tail import Tail
from llama405b_tools.remote.torchrun import SETUP_FAILED, node_env, setup_argv, torchrun_argv

GRACE_S = 10.0  # between SIGTERM and SIGKILL
POLL_S, SLURM_POLL_S, LOGS_EVERY_S = 0.2, 1.0, 0.5
NOTE_EVERY_S = 0.5  # of one file
ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):.*?rank\s*: \d+ \(local_rank: (\d+)\).*?exitcode\s*: (-?\d+)", re.DOTALL
)


class NodeRunner:
    """One attempt of one run on this host."""

    def __init__(self, run: RunDir, host: str) -> None:
        self.run, self.host = run, host
        self.marker = f"{run.path}:{host}"
        self.stop_signal = 0
        self.fell_back = ""  # NCCL's line that says so
        self.ended = threading.Event()  # torchrun has
        record = read_json(run.plan)
        if record is None:
            raise SystemExit(f"{run.plan}: cannot be read; launch the run again")
        self.plan: Plan = plan_from_json(record)

    def main(self) -> int:
        """Run torchrun to its end; returns its exit code, or 128 + the signal that ended it.

        Raises:
            OSError: Of this host's disk or processes; the guardian ends what was started, and says why.
        """
        lock = take_lock(self.run.lock(self.host))
        if lock is None:
            raise SystemExit(f"{self.run.name} runs on {self.host} already")
        self.report("starting")
        if asked := read_json(self.run.stop(self.host)):  # between the agent's look and ours
            self.report("stopped", reason=f"stopped by {asked['by']}")
            return 128 + signal.SIGTERM
        guardian, line = self.start_guardian()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self.on_signal)
        processes.become_subreaper()
        processes.sweep(self.marker, spare=(guardian,))
        try:
            child = self.start_torchrun()
        except OSError as error:
            os.write(line, f"torchrun could not be started ({error})".encode())
            raise
        self.report("running")
        shown = self.show_logs(child)
        code = self.wait(child)
        self.ended.set()
        shown.join(GRACE_S)
        processes.sweep(self.marker, below=os.getpid(), spare=(guardian,))
        self.report_end(code)
        os.write(line, b"done")  # the guardian may go
        os.close(line)
        os.waitpid(guardian, 0)
        return code if code >= 0 else 128 - code

    def on_signal(self, number: int, _frame: object) -> None:
        """Remember that the run is to end."""
        self.stop_signal = self.stop_signal or number

    def report(self, state: str, **more: Any) -> None:
        """Write the status."""
        pid = os.getpid()
        began = processes.start_time(pid) or 0
        status = NodeStatus(self.host, state, self.plan.attempt, pid, began, time=time.time(), **more)
        write_json(self.run.status(self.host), status)
        if state not in ("starting", "running"):
            with contextlib.suppress(OSError), self.run.ends(self.host).open("a", encoding="utf-8") as ends:
                ends.write(json.dumps(dataclasses.asdict(status)) + "\n")

    def report_end(self, code: int) -> None:
        """Say how torchrun ended, and which rank was the first to fail."""
        asked = read_json(self.run.stop(self.host))
        if self.fell_back:
            said = f"NCCL fell back to TCP sockets although RDMA ports are up ({self.fell_back.strip()[:200]}); "
            self.report("exited", exit_code=code, reason=f"{said}set NCCL_IB_HCA with --env, or take --allow-sockets")
            return
        if self.stop_signal and asked:
            self.report("stopped", exit_code=code if code >= 0 else None, reason=f"stopped by {asked['by']}")
        elif self.stop_signal:
            name = signal.Signals(self.stop_signal).name
            self.report("killed", signal=int(self.stop_signal), reason=f"stopped by {name}")
        elif code < 0:
            self.report("killed", signal=-code, reason=f"torchrun was killed by {_signal_name(-code)}")
        else:
            self.report("exited", exit_code=code, reason="" if code == 0 else self.first_failure())

    def first_failure(self) -> str:
        """The first failure of this attempt on this host, from torchrun's summary and the rank's own words."""
        log = self.run.agent_log(self.host)
        text = log.read_text(encoding="utf-8", errors="replace").rpartition(f"\nattempt {self.plan.attempt}: ")[2]
        match = ROOT_CAUSE.search(text)
        if setup := re.search(rf"^{SETUP_FAILED}.*", text, re.MULTILINE):
            return setup[0]
        if match is None:
            return f"torchrun failed; see {log}"
        rank, code = self.plan.node(self.host).first_rank + int(match[1]), int(match[2])
        words = (read_json(self.run.heartbeat(rank)) or {}).get("message", "")
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with {code}"
        return f"rank {rank} {how}{f': {words}' if words and code >= 0 else ''}"

    def start_guardian(self) -> tuple[int, int]:
        """Fork the process that ends the run should this one be killed; returns its pid and a pipe to it."""
        read, write = os.pipe()
        os.set_inheritable(write, False)
        runner = os.getpid()
        pid = os.fork()
        if pid:
            os.close(read)
            return pid, write
        os.setsid()  # a hang-up of the terminal is not for it
        os.close(write)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        words = os.read(read, 1000)
        if words != b"done":
            processes.sweep(self.marker, spare=(runner,))
            reason = words.decode("utf-8", "replace") or "the node runner was killed"
            self.report("killed", signal=int(signal.SIGKILL), reason=reason)
        os._exit(0)

    def start_torchrun(self) -> "subprocess.Popen[bytes]":
        """Start torchrun in a session of its own, with the secrets in its environment alone."""
        node = self.plan.node(self.host)
        logs = self.run.logs(self.host)
        logs.mkdir(parents=True, exist_ok=True)
        for place in {"HF_HOME", "TMPDIR"} & set(node.env):  # of cache= and scratch=
            Path(node.env[place]).mkdir(parents=True, exist_ok=True)
        env = {k: v for k, v in os.environ.items() if k not in ("TMUX", "TMUX_PANE", "PYTHONPATH")}
        env |= fabric.NCCL_DEBUG_LINES if self.plan.refuse_sockets else {}
        env |= self.take_secrets() | node_env(self.plan, self.host, str(self.run.path))
        torchrun = torchrun_argv(self.plan, self.host, str(logs))
        torchrun[0] = str(Path(torchrun[0]).expanduser())
        argv = setup_argv(self.plan.setup, torchrun)
        with self.run.agent_log(self.host).open("ab") as log:
            log.write(f"\nattempt {self.plan.attempt}: {json.dumps(argv)}\n".encode())
            return subprocess.Popen(
                argv,
                cwd=node.workdir,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def look_for_sockets(self, data: bytes, child: "subprocess.Popen[bytes]") -> None:
        """End the run where NCCL says that it falls back to TCP, if the plan has it so: it would train at a crawl."""
        if self.plan.refuse_sockets and not self.fell_back and fabric.SOCKETS.encode() in data:
            self.fell_back = fabric.socket_line(data.decode("utf-8", "replace"))
            if self.fell_back:
                child.terminate()

    def take_secrets(self) -> dict[str, str]:
        """Read the secrets' file, and delete it."""
        path = self.run.secrets(self.host)
        try:
            secrets = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        path.unlink()
        return {str(key): str(value) for key, value in secrets.items()}

    def wait(self, child: "subprocess.Popen[bytes]") -> int:
        """Wait for torchrun; once told to stop, end it in ever harder ways, each with its time."""
        while not self.stop_signal:
            if self.plan.slurm_job and self.run.stop(self.host).exists():  # no signal reaches this process alone
                self.stop_signal = signal.SIGTERM
                break
            if (code := child.poll()) is not None:  # Popen.wait with a timeout would wake up twenty times a second
                return code
            time.sleep(SLURM_POLL_S if self.plan.slurm_job else POLL_S)
        grace_s = float((read_json(self.run.stop(self.host)) or {}).get("grace_s", self.plan.grace_s))
        ways = [(child.terminate, GRACE_S if self.plan.trains else max(GRACE_S, grace_s)), (child.kill, None)]
        if grace_s and self.plan.trains and (code := self.let_save(child, grace_s)) is not None:
            return code
        for end, seconds in ways:
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(seconds)
        raise AssertionError("a wait without a limit came to its end")

    def let_save(self, child: "subprocess.Popen[bytes]", grace_s: float) -> int | None:
        """Tell the ranks to save after this step, and to end; returns torchrun's exit code, None if they took too long.

        Each is told once it writes heartbeats: then it knows the signal, which before would kill it.
        """
        node, deadline = self.plan.node(self.host), time.monotonic() + grace_s
        deaf = set(range(node.first_rank, node.first_rank + node.slots))
        while (code := child.poll()) is None and time.monotonic() < deadline:
            below = processes.descendants(child.pid) if deaf else ()
            for rank in sorted(deaf):
                beat = read_json(self.run.heartbeat(rank))
                if beat and beat["pid"] in below:
                    deaf.discard(rank)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(beat["pid"], signal.SIGUSR1)
            time.sleep(POLL_S)
        return code

    def show_logs(self, child: "subprocess.Popen[bytes]") -> threading.Thread:
        """Print the logs of this host's ranks in the tmux pane, for whoever attaches, and note when what arrived."""
        root = self.run.logs(self.host)
        tail = Tail(root, from_end=True)

        def follow() -> None:
            ends: dict[Path, int] = {}  # arrived, and not noted yet
            noted: dict[Path, float] = {}
            with self.run.times(self.host).open("a", encoding="utf-8") as times:
                while True:
                    ended = child.poll() is not None
                    for piece in tail.all(final=ended):
                        self.look_for_sockets(piece.data, child)
                        ends[piece.path] = piece.begin + len(piece.data)
                        with contextlib.suppress(OSError):
                            print(piece.data.decode("utf-8", "replace"), end="", flush=True)
                    now = time.time()
                    for path in [path for path in ends if ended or now - noted.get(path, 0.0) > NOTE_EVERY_S]:
                        noted[path] = now
                        times.write(f"{now:.3f} {ends.pop(path)} {path.relative_to(root)}\n")
                    times.flush()
                    if ended:
                        return
                    self.ended.wait(LOGS_EVERY_S)

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        return thread


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def main() -> int:
    """Entry point of ``python -m llama405b_tools.remote.node RUN_DIR HOST``."""
    os.umask(UMASK)
    return NodeRunner(RunDir(Path(sys.argv[1])), sys.argv[2]).main()


if __name__ == "__main__":
    sys.exit(main())
