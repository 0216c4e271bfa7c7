"""The node runner: the process that tmux starts on a host, and the parent of torchrun there. Standard library only.

``python -m llama405b_tools.agent.node RUN_DIR HOST`` takes everything from ``RUN_DIR/plan.json``. It holds the run's lock
on the host, ends processes that an earlier attempt left behind, passes the secrets only to torchrun's environment, and records
the run's state in ``status/<host>.json``. It leaves no process behind, however it ends: a guardian process, which shares its
lock, outlives a SIGKILL of the runner just long enough to end the remaining processes.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

from llama405b.contract import reader
from llama405b.contract.errors import fmt_if, last_or
from llama405b.contract.files import append_line, read_record, set_private_umask, write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.records import Cause, CauseKind, Heartbeat, NodeState, NodeStatus, StopMark
from llama405b.contract.software import module_argv
from llama405b.spec.plan import read_plan
from llama405b_tools import parsers
from llama405b_tools.agent import processes
from llama405b_tools.agent.describe import NO_STOP, read_stop_mark, stopped_by
from llama405b_tools.agent.evidence import rank_processes
from llama405b_tools.agent.facts import MARKER
from llama405b_tools.agent.messages import KILL_AFTER_S
from llama405b_tools.agent.processes import (
    SETUP_FAILED,
    LogMask,
    node_env,
    read_secrets,
    remove_own_socket,
    setup_argv,
    take_lock,
    torchrun_argv,
)
from llama405b_tools.agent.relay import FINISH
from llama405b_tools.agent.streaming import FileFollower
from llama405b_tools.parsers import parse_failed_ranks, parse_torchrun_signal
from llama405b_tools.text.words import hide_secrets, secret_lines

POLL_S, LOGS_INTERVAL_S = 0.2, 0.5
STOP_CHECK_INTERVAL_S = 1.0  # on a disk that all nodes share
REPLICATOR_RESTART_S = 5.0  # between two starts of the process that copies
RANK_SEARCH_S = 300.0  # of torchrun's start: as long ranks are looked for
CASCADE_S = 15.0  # after the first rank: whoever ends then was ended by torchrun
STOPPED_BY_SLURM = "Slurm (SIGTERM)"  # who stops a run when its job is preempted, or canceled by hand
SLURM_GRACE_S = 86_400.0  # it ends all itself when its own grace is over, which is not known here
ALL_WELL, MAX_MESSAGE_BYTES = b"done", 4096  # what the guardian receives: that all is well, or a cause


class NodeRunner:
    """One attempt of one run on this host."""

    def __init__(self, run: RunDir, host: str) -> None:
        self.run, self.host = run, host
        self.marker = f"{run.path}:{host}"
        self.stop_signal = self.n_signals = 0
        self.tcp_fallback_line = ""  # NCCL's line about falling back to TCP
        self.secrets: dict[str, str] = {}
        self.secret_parts: list[str] = []  # of the secrets, in the tmux pane
        self.mask = LogMask(run.logs(host), ())  # and in the logs
        self.torchrun_ended = threading.Event()  # set once torchrun has ended
        self.rank_end_times: dict[
            int, float
        ] = {}  # when each local rank was seen to end; none: before it could be watched
        self.failed_at = 0.0  # when the first of them did, seconds since the epoch; 0: unknown
        self.replicator: subprocess.Popen[bytes] | None = None
        self.replicator_started_at = -math.inf
        self.plan = read_plan(run)
        if not self.plan.nodes:
            raise SystemExit(f"{run.plan}: cannot be read; launch the run again")

    def main(self) -> int:
        """Run torchrun to its end; returns its exit code, or 128 + the signal that ended it.

        Raises:
            OSError: A disk or process of this host fails; the guardian ends what was started, and records why.
        """
        lock = take_lock(self.run.lock(self.host))
        if lock is None:
            raise SystemExit(f"{self.run.name} is already running on {self.host}")
        self.write_status(NodeState.STARTING)
        if stopper := stopped_by(self.run, self.host):  # since the agent checked
            self.write_status(NodeState.STOPPED, Cause(CauseKind.STOPPED, self.host, by=stopper))
            return 128 + signal.SIGTERM
        self.load_secrets()
        guardian, guardian_pipe = self.start_guardian()
        for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signal_number, self.on_signal)
        # From here on, orphans stay descendants of this process, where the last sweep finds them even without a marker.
        processes.become_subreaper()
        processes.kill_marked(self.marker, spared_pids=(guardian,))
        try:
            child = self.start_torchrun()
        except OSError as error:
            os.write(guardian_pipe, reader.dumps(Cause(CauseKind.NOT_STARTED, self.host, detail=str(error))).encode())
            raise
        self.write_status(NodeState.RUNNING)
        self.ensure_replicator()
        threads = [*self.watch_logs(child), threading.Thread(target=self.watch_ranks, daemon=True)]
        threads[-1].start()
        code = self.wait(child)
        self.torchrun_ended.set()
        for thread in threads:
            thread.join(KILL_AFTER_S)
        spared_pids = [guardian, self.replicator.pid] if self.replicator else [guardian]
        processes.kill_marked(self.marker, root_pid=os.getpid(), spared_pids=tuple(spared_pids))
        self.mask.redact_all()
        if code:  # whoever waits for that is told before the copies are finished
            self.write_final_status(code)
        if self.replicator:
            self.finish_copies(self.replicator)
        if not code:
            self.write_final_status(code)
        os.write(guardian_pipe, ALL_WELL)  # the guardian may go
        os.close(guardian_pipe)
        os.waitpid(guardian, 0)
        remove_own_socket(self.run)
        return code if code >= 0 else 128 - code

    def on_signal(self, number: int, _frame: object) -> None:
        """Record that the run is to end."""
        self.n_signals += 1
        self.stop_signal = self.stop_signal or number

    def write_status(
        self,
        state: NodeState,
        cause: Cause | None = None,
        *,
        exit_code: int | None = None,
        signal_number: int | None = None,
    ) -> None:
        """Write the status; ``signal_number``: the signal that ended torchrun."""
        pid = os.getpid()
        start = processes.start_time(pid) or 0
        status = NodeStatus(
            self.host,
            state,
            self.plan.attempt,
            pid,
            start,
            exit_code,
            signal_number,
            cause,
            self.failed_at or time.time(),
        )
        write_json(self.run.status(self.host), status)
        if state not in (NodeState.STARTING, NodeState.RUNNING):
            with contextlib.suppress(OSError):
                append_line(self.run.ends(self.host), reader.dumps(status))

    def write_final_status(self, code: int) -> None:
        """Record how torchrun ended, and why."""
        stopper, host = stopped_by(self.run, self.host), self.host
        exit_code = code if code >= 0 else None
        if self.tcp_fallback_line:
            cause = Cause(CauseKind.SOCKETS, host, exit_code=code, detail=self.tcp_fallback_line.strip()[:200])
            self.write_status(NodeState.EXITED, cause, exit_code=code)
        elif self.stop_signal and stopper:
            self.write_status(NodeState.STOPPED, Cause(CauseKind.STOPPED, host, by=stopper), exit_code=exit_code)
        elif self.stop_signal:
            cause = Cause(CauseKind.SIGNAL, host, signal=int(self.stop_signal))
            self.write_status(NodeState.KILLED, cause, signal_number=int(self.stop_signal))
        elif exit_code is None:
            self.write_status(
                NodeState.KILLED, Cause(CauseKind.TORCHRUN_KILLED, host, signal=-code), signal_number=-code
            )
        elif not code:
            self.write_status(NodeState.EXITED, exit_code=code)
        elif (
            failure := self.find_first_failure(code)
        ).kind is CauseKind.LOST_PEER and stopper:  # the stop reached the peer first
            self.write_status(
                NodeState.STOPPED, Cause(CauseKind.STOPPED, host, by=stopper, detail=failure.detail), exit_code=code
            )
        else:
            self.write_status(NodeState.EXITED, failure, exit_code=code)

    def find_first_failure(self, code: int) -> Cause:
        """Return this attempt's first failure on this host, from torchrun's summary and rank heartbeats."""
        log = self.run.agent_log(self.host)
        text = log.read_text(encoding="utf-8", errors="replace").rpartition(f"\nattempt {self.plan.attempt}: ")[2]
        if match := re.search(rf"^{SETUP_FAILED} (\d+)$", text, re.MULTILINE):
            return Cause(CauseKind.SETUP_FAILED, self.host, exit_code=int(match[1]), detail=self.plan.setup)
        if signal_number := parse_torchrun_signal(text):  # by somebody else: this runner's own signals never get here
            return Cause(CauseKind.TORCHRUN_KILLED, self.host, signal=signal_number, exit_code=code)
        causes = {
            local_rank: self.find_rank_cause(local_rank, exit_code)
            for local_rank, exit_code in parse_failed_ranks(text).items()
        }
        if not causes:
            final_line = hide_secrets(last_or(text.partition("\n")[2].strip().splitlines()), self.secret_parts)[:300]
            return Cause(
                CauseKind.TORCHRUN_FAILED, self.host, exit_code=code, detail=f"{log}{fmt_if(' ({})', final_line)}"
            )
        end_times = {local_rank: self.rank_end_times.get(local_rank, 0.0) for local_rank in causes}
        cutoff_s = min(end_times.values()) + CASCADE_S

        def order_key(local_rank: int) -> tuple[bool, bool, float, bool]:
            kind = causes[local_rank].kind
            return (
                end_times[local_rank] > cutoff_s,
                is_consequence(causes[local_rank]),
                end_times[local_rank],
                kind is not CauseKind.RANK_KILLED,
            )

        first_local_rank = min(causes, key=order_key)
        self.failed_at = (
            time.time() - time.monotonic() + end_times[first_local_rank] if end_times[first_local_rank] else 0.0
        )
        return causes[first_local_rank]

    def find_rank_cause(self, local_rank: int, exit_code: int) -> Cause:
        """Return why a rank ended, from its exit code (negative: signal) and its heartbeat."""
        rank = self.plan.node(self.host).first_rank + local_rank
        beat = read_record(Heartbeat, self.run.heartbeat(rank))
        gpu = beat.gpu if beat else ""
        if exit_code < 0:
            return Cause(CauseKind.RANK_KILLED, self.host, rank, signal=-exit_code, gpu=gpu)
        cause = beat.cause if beat and beat.cause else Cause(CauseKind.RANK_EXIT)
        return dataclasses.replace(cause, host=self.host, rank=rank, exit_code=exit_code, gpu=gpu)

    def start_guardian(self) -> tuple[int, int]:
        """Fork the process that ends the run if this one is killed; return its pid and a pipe to it."""
        read_end, write_end = os.pipe()
        os.set_inheritable(write_end, False)
        runner_pid = os.getpid()
        # Forked before any thread starts: locks that other threads hold stay locked in a child.
        pid = os.fork()
        if pid:
            os.close(read_end)
            return pid, write_end
        os.setsid()  # so that a hangup of the terminal does not reach it
        os.close(write_end)
        for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signal_number, signal.SIG_IGN)
        message = os.read(read_end, MAX_MESSAGE_BYTES)
        if message != ALL_WELL:
            processes.kill_marked(self.marker, spared_pids=(runner_pid,))
            self.mask.redact_all()
            cause = Cause(CauseKind.RUNNER_KILLED, self.host)
            with contextlib.suppress(reader.MalformedError):
                cause = reader.loads(Cause, message, "the node runner's word")
            self.write_status(NodeState.KILLED, cause, signal_number=int(signal.SIGKILL))
        os._exit(0)

    def start_torchrun(self) -> "subprocess.Popen[bytes]":
        """Start torchrun in a session of its own, with the secrets only in its environment."""
        node = self.plan.node(self.host)
        logs = self.run.logs(self.host)
        logs.mkdir(parents=True, exist_ok=True)
        for variable in {"HF_HOME", "TMPDIR"} & set(node.env):  # of cache= and scratch=
            Path(node.env[variable]).mkdir(parents=True, exist_ok=True)
        env = {k: v for k, v in os.environ.items() if k not in ("TMUX", "TMUX_PANE", "PYTHONPATH")}
        if self.plan.refuse_sockets:
            env |= parsers.NCCL_DEBUG_LINES
        env |= self.secrets | node_env(self.plan, self.host, str(self.run.path))
        args = torchrun_argv(self.plan, self.host, str(logs))
        python = str(Path(node.python).expanduser())
        argv = setup_argv(self.plan.setup, [python if arg == node.python else arg for arg in args])
        with self.run.agent_log(self.host).open("ab", buffering=0) as log:  # the child writes after this line
            log.write(f"\nattempt {self.plan.attempt}: {json.dumps(argv)}\n".encode())
            with self.sigterm_blocked():
                return subprocess.Popen(
                    argv,
                    cwd=node.workdir,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

    @contextlib.contextmanager
    def sigterm_blocked(self) -> Generator[None]:
        """Make processes started in this context survive Slurm's SIGTERM, which is for this process alone."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM} if self.plan.saves_at_sigterm else ())
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def end_torchrun(self, child: "subprocess.Popen[bytes]") -> None:
        """Signal torchrun to end its ranks and itself."""
        child.send_signal(signal.SIGHUP if self.plan.saves_at_sigterm else signal.SIGTERM)

    def ensure_replicator(self) -> None:
        """Start the process that copies checkpoints to the next host, or restart it if it was killed.

        Does nothing if the run wants no copies.
        """
        now = time.monotonic()
        is_running = self.replicator is not None and self.replicator.poll() is None
        if not self.plan.replicates or is_running or now - self.replicator_started_at < REPLICATOR_RESTART_S:
            return
        self.replicator_started_at = now
        env = os.environ | {MARKER: self.marker}
        argv = [*module_argv("llama405b_tools.agent.relay"), str(self.run.path), self.host]
        with (
            contextlib.suppress(OSError),  # of a disk; training needs no copies, and it is tried again
            self.run.agent_log(self.host).open("ab", buffering=0) as log,
            self.sigterm_blocked(),
        ):
            self.replicator = subprocess.Popen(
                argv, env=env, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )

    def finish_copies(self, replicator: "subprocess.Popen[bytes]") -> None:
        """Wait until the last checkpoint is copied: after a stop, no longer than its grace period.

        One more signal to this runner also ends the wait.
        """
        assert replicator.stdin
        n_signals_before, stop = self.n_signals, read_stop_mark(self.run, self.host)
        deadline = stop.time + stop.grace_s if self.stop_signal else math.inf
        with contextlib.suppress(OSError):
            replicator.stdin.write(FINISH)
            replicator.stdin.flush()
        while replicator.poll() is None and self.n_signals == n_signals_before and time.time() < deadline:
            time.sleep(POLL_S)
        replicator.kill()
        replicator.wait()

    def check_tcp_fallback(self, data: bytes, child: "subprocess.Popen[bytes]") -> None:
        """End the run if NCCL falls back to TCP and the plan forbids that: training would be very slow."""
        if self.plan.refuse_sockets and not self.tcp_fallback_line and parsers.SOCKET_TRANSPORT.encode() in data:
            self.tcp_fallback_line = parsers.find_socket_line(data.decode("utf-8", "replace"))
            if self.tcp_fallback_line:
                self.end_torchrun(child)

    def load_secrets(self) -> None:
        """Read the secrets file and delete it.

        Only this process and the guardian know the secrets from then on, and can mask them in the logs.
        """
        self.secrets = read_secrets(self.run.secrets(self.host))
        self.secret_parts = secret_lines(self.secrets.values())
        self.mask = LogMask(self.run.logs(self.host), self.secret_parts)
        self.run.secrets(self.host).unlink(missing_ok=True)

    def wait(self, child: "subprocess.Popen[bytes]") -> int:
        """Wait for torchrun; after a stop, end it in increasingly forceful ways, each with a time limit."""
        next_check = time.monotonic() if self.plan.slurm_job else math.inf  # there no signal reaches this process alone
        while not self.stop_signal:
            code = child.poll()  # Popen.wait with a timeout would wake up twenty times a second
            if self.plan.slurm_job and (code is not None or time.monotonic() >= next_check):
                next_check = time.monotonic() + STOP_CHECK_INTERVAL_S
                if self.run.stop(self.host).exists():  # another host may have read its own first, and all have saved
                    self.stop_signal = signal.SIGTERM
            if code is not None:
                return code
            self.ensure_replicator()
            time.sleep(POLL_S)
        stop, grace_s = read_stop_mark(self.run, self.host), self.plan.grace_s
        if stop == NO_STOP and self.plan.saves_at_sigterm:
            stop = StopMark(STOPPED_BY_SLURM, SLURM_GRACE_S, time.time())
            with contextlib.suppress(OSError):  # a full disk: the run is said to be killed
                write_json(self.run.stop(self.host), stop)
        if stop != NO_STOP:
            grace_s = stop.grace_s
        end_timeout_s = KILL_AFTER_S if self.plan.trains else max(KILL_AFTER_S, grace_s)
        end_actions: list[tuple[Callable[[], object], float | None]] = [
            (functools.partial(self.end_torchrun, child), end_timeout_s),
            (child.kill, None),
        ]
        if grace_s and self.plan.trains and (code := self.request_save(child, grace_s)) is not None:
            return code
        for end_action, timeout_s in end_actions:
            end_action()
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(timeout_s)
        raise AssertionError("a wait without a limit timed out")

    def request_save(self, child: "subprocess.Popen[bytes]", grace_s: float) -> int | None:
        """Tell the ranks to save after this step and exit; return torchrun's exit code, None if too slow.

        Each rank is signaled only once it writes heartbeats: before that it has no handler, and the signal would kill it.
        """
        unsignaled_ranks, deadline = set(self.plan.node(self.host).ranks), time.monotonic() + grace_s
        while (code := child.poll()) is None and time.monotonic() < deadline:
            descendant_pids = processes.find_descendants(child.pid) if unsignaled_ranks else ()
            for rank in sorted(unsignaled_ranks):
                beat = read_record(Heartbeat, self.run.heartbeat(rank))
                if beat and beat.pid in descendant_pids:
                    unsignaled_ranks.discard(rank)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(beat.pid, signal.SIGUSR1)
            time.sleep(POLL_S)
        return code

    def watch_ranks(self) -> None:
        """Record when each rank ends. torchrun polls only now and then, and its times are whole seconds."""
        slots, poller = self.plan.node(self.host).slots, select.poll()
        local_ranks: dict[int, int] = {}  # by the descriptor of its process
        search_deadline = time.monotonic() + RANK_SEARCH_S  # it reads all of /proc
        while not self.torchrun_ended.is_set() and len(self.rank_end_times) < slots:
            is_searching = len(local_ranks) < slots and time.monotonic() < search_deadline
            for local_rank, pid in rank_processes(self.marker).items() if is_searching else ():
                if local_rank not in local_ranks.values():
                    try:
                        pidfd = os.pidfd_open(pid)
                    except ProcessLookupError:
                        continue
                    except (OSError, AttributeError):
                        # before Linux 5.3, in some containers, and in some builds of Python
                        return
                    local_ranks[pidfd] = local_rank
                    poller.register(pidfd, select.POLLIN)
            events, now_s = poller.poll(1000 * LOGS_INTERVAL_S), time.monotonic()
            for pidfd, _ in events:
                self.rank_end_times[local_ranks[pidfd]] = now_s
                poller.unregister(pidfd)

    def watch_logs(self, child: "subprocess.Popen[bytes]") -> list[threading.Thread]:
        """Start threads that read this host's logs until torchrun has ended.

        There are two, so that a slow tmux pane delays only itself.
        """
        threads = []
        for target in (self.record_log_growth, self.show_logs):
            tail = FileFollower(self.run.logs(self.host), from_end=True)
            threads.append(threading.Thread(target=target, args=(child, tail), daemon=True))
            threads[-1].start()
        return threads

    def record_log_growth(self, child: "subprocess.Popen[bytes]", tail: FileFollower) -> None:
        """Record the length of each log over time; look for lines that end the run."""
        sizes = {path: size for path, (_, size) in tail.positions.items()}
        while True:
            has_ended = child.poll() is not None
            with contextlib.suppress(OSError):  # a disk that fails, perhaps for a while
                for path in tail.files():
                    size = path.stat().st_size
                    if size != sizes.get(path, 0):
                        sizes[path] = size
                        self.record_log_length(path.relative_to(tail.root), size)
                        self.mask.redact(path)
                for piece in tail.read_new(final=has_ended) if self.plan.refuse_sockets else ():
                    self.check_tcp_fallback(piece.data, child)
            if has_ended:
                return
            self.torchrun_ended.wait(LOGS_INTERVAL_S)

    def record_log_length(self, log: Path, n_bytes: int) -> None:
        """Record the present length of a log."""
        with contextlib.suppress(OSError):  # a full disk
            append_line(self.run.times(self.host), f"{time.time():.3f} {n_bytes} {log}")

    def show_logs(self, child: "subprocess.Popen[bytes]", tail: FileFollower) -> None:
        """Print the logs in the tmux pane."""
        while True:
            has_ended = child.poll() is not None
            with contextlib.suppress(OSError):  # of the pane, or of a disk
                for piece in tail.read_all(final=has_ended):
                    print(hide_secrets(piece.data.decode("utf-8", "replace"), self.secret_parts), end="", flush=True)
            if has_ended:
                return
            self.torchrun_ended.wait(LOGS_INTERVAL_S)


def is_consequence(cause: Cause) -> bool:
    """Return whether a rank ended because of another one.

    torchrun sends SIGTERM to the other ranks; gloo aborts in a thread of its own.
    """
    return cause.kind in (CauseKind.LOST_PEER, CauseKind.FOLLOWED) or cause.signal in (signal.SIGTERM, signal.SIGABRT)


def main() -> int:
    """Entry point of ``python -m llama405b_tools.agent.node RUN_DIR HOST``."""
    set_private_umask()
    return NodeRunner(RunDir(Path(sys.argv[1])), sys.argv[2]).main()


if __name__ == "__main__":
    sys.exit(main())
