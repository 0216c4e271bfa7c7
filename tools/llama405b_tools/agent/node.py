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
from llama405b.contract.errors import given, last_of
from llama405b.contract.files import append_line, keep_private, read_record, write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.records import Cause, CauseKind, Heartbeat, NodeState, NodeStatus, StopMark
from llama405b.contract.software import own_argv
from llama405b.spec.plan import read_plan
from llama405b_tools import parsers
from llama405b_tools.agent import processes
from llama405b_tools.agent.autopsy import rank_processes
from llama405b_tools.agent.describe import NO_STOP, stop_mark, stopped_by
from llama405b_tools.agent.messages import KILL_AFTER_S
from llama405b_tools.agent.processes import (
    MARKER,
    SETUP_FAILED,
    LogMask,
    node_env,
    read_secrets,
    remove_own_socket,
    setup_argv,
    take_lock,
    torchrun_argv,
)
from llama405b_tools.agent.relay import LAST
from llama405b_tools.agent.streaming import Tail
from llama405b_tools.parsers import ended_by, failed_ranks
from llama405b_tools.text.words import hide, pieces_of

POLL_S, LOGS_EVERY_S = 0.2, 0.5
STOP_EVERY_S = 1.0  # on a disk that all nodes share
AGAIN_S = 5.0  # between two starts of the process that copies
RANKS_WITHIN_S = 300.0  # of torchrun's start: as long ranks are looked for
FOLLOWS_S = 15.0  # after the first rank: whoever ends then was ended by torchrun
SLURM = "Slurm (SIGTERM)"  # who stops a run when its job is preempted, or canceled by hand
SLURM_GRACE_S = 86_400.0  # it ends all itself when its own grace is over, which is not known here
DONE, MOST_WORD = b"done", 4096  # what the guardian receives: that all is well, or a cause


class NodeRunner:
    """One attempt of one run on this host."""

    def __init__(self, run: RunDir, host: str) -> None:
        self.run, self.host = run, host
        self.marker = f"{run.path}:{host}"
        self.stop_signal = self.n_signals = 0
        self.fell_back = ""  # NCCL's line about falling back to TCP
        self.secrets: dict[str, str] = {}
        self.hidden: list[str] = []  # of the secrets, in the tmux pane
        self.mask = LogMask(run.logs(host), ())  # and in the logs
        self.ended = threading.Event()  # set once torchrun has ended
        self.rank_ends: dict[int, float] = {}  # when each local rank was seen to end; none: before it could be watched
        self.failed_at = 0.0  # when the first of them did, seconds since the epoch; 0: unknown
        self.replicator: subprocess.Popen[bytes] | None = None
        self.copying_since = -math.inf
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
        self.report(NodeState.STARTING)
        if by := stopped_by(self.run, self.host):  # since the agent checked
            self.report(NodeState.STOPPED, Cause(CauseKind.STOPPED, self.host, by=by))
            return 128 + signal.SIGTERM
        self.take_secrets()
        guardian, line = self.start_guardian()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self.on_signal)
        # From here on, orphans stay descendants of this process, where the last sweep finds them even without a marker.
        processes.become_subreaper()
        processes.sweep(self.marker, spare=(guardian,))
        try:
            child = self.start_torchrun()
        except OSError as error:
            os.write(line, reader.dumps(Cause(CauseKind.NOT_STARTED, self.host, detail=str(error))).encode())
            raise
        self.report(NodeState.RUNNING)
        self.keep_copying()
        threads = [*self.watch_logs(child), threading.Thread(target=self.watch_ranks, daemon=True)]
        threads[-1].start()
        code = self.wait(child)
        self.ended.set()
        for thread in threads:
            thread.join(KILL_AFTER_S)
        spared = [guardian, self.replicator.pid] if self.replicator else [guardian]
        processes.sweep(self.marker, below=os.getpid(), spare=tuple(spared))
        self.mask.cover_all()
        if code:  # whoever waits for that is told before the copies are finished
            self.report_end(code)
        if self.replicator:
            self.finish_copies(self.replicator)
        if not code:
            self.report_end(code)
        os.write(line, DONE)  # the guardian may go
        os.close(line)
        os.waitpid(guardian, 0)
        remove_own_socket(self.run)
        return code if code >= 0 else 128 - code

    def on_signal(self, number: int, _frame: object) -> None:
        """Record that the run is to end."""
        self.n_signals += 1
        self.stop_signal = self.stop_signal or number

    def report(
        self, state: NodeState, cause: Cause | None = None, *, exit_code: int | None = None, number: int | None = None
    ) -> None:
        """Write the status; ``number``: the signal that ended torchrun."""
        pid = os.getpid()
        began = processes.start_time(pid) or 0
        status = NodeStatus(
            self.host, state, self.plan.attempt, pid, began, exit_code, number, cause, self.failed_at or time.time()
        )
        write_json(self.run.status(self.host), status)
        if state not in (NodeState.STARTING, NodeState.RUNNING):
            with contextlib.suppress(OSError):
                append_line(self.run.ends(self.host), reader.dumps(status))

    def report_end(self, code: int) -> None:
        """Record how torchrun ended, and why."""
        by, host = stopped_by(self.run, self.host), self.host
        exit_code = code if code >= 0 else None
        if self.fell_back:
            cause = Cause(CauseKind.SOCKETS, host, exit_code=code, detail=self.fell_back.strip()[:200])
            self.report(NodeState.EXITED, cause, exit_code=code)
        elif self.stop_signal and by:
            self.report(NodeState.STOPPED, Cause(CauseKind.STOPPED, host, by=by), exit_code=exit_code)
        elif self.stop_signal:
            cause = Cause(CauseKind.SIGNAL, host, signal=int(self.stop_signal))
            self.report(NodeState.KILLED, cause, number=int(self.stop_signal))
        elif exit_code is None:
            self.report(NodeState.KILLED, Cause(CauseKind.TORCHRUN_KILLED, host, signal=-code), number=-code)
        elif not code:
            self.report(NodeState.EXITED, exit_code=code)
        elif (
            failure := self.first_failure(code)
        ).kind is CauseKind.LOST_PEER and by:  # the stop reached the peer first
            self.report(NodeState.STOPPED, Cause(CauseKind.STOPPED, host, by=by, detail=failure.detail), exit_code=code)
        else:
            self.report(NodeState.EXITED, failure, exit_code=code)

    def first_failure(self, code: int) -> Cause:
        """Return this attempt's first failure on this host, from torchrun's summary and rank heartbeats."""
        log = self.run.agent_log(self.host)
        text = log.read_text(encoding="utf-8", errors="replace").rpartition(f"\nattempt {self.plan.attempt}: ")[2]
        if setup := re.search(rf"^{SETUP_FAILED} (\d+)$", text, re.MULTILINE):
            return Cause(CauseKind.SETUP_FAILED, self.host, exit_code=int(setup[1]), detail=self.plan.setup)
        if number := ended_by(text):  # by somebody else: this runner's own signals never get here
            return Cause(CauseKind.TORCHRUN_KILLED, self.host, signal=number, exit_code=code)
        failed = {each: self.cause_of(each, exit_code) for each, exit_code in failed_ranks(text).items()}
        if not failed:
            last = hide(last_of(text.partition("\n")[2].strip().splitlines()), self.hidden)[:300]
            return Cause(CauseKind.TORCHRUN_FAILED, self.host, exit_code=code, detail=f"{log}{given(' ({})', last)}")
        ends = {each: self.rank_ends.get(each, 0.0) for each in failed}
        late_s = min(ends.values()) + FOLLOWS_S

        def place(each: int) -> tuple[bool, bool, float, bool]:
            kind = failed[each].kind
            return ends[each] > late_s, follows(failed[each]), ends[each], kind is not CauseKind.RANK_KILLED

        first = min(failed, key=place)
        self.failed_at = time.time() - time.monotonic() + ends[first] if ends[first] else 0.0
        return failed[first]

    def cause_of(self, local_rank: int, exit_code: int) -> Cause:
        """Return why a rank ended, from its exit code (negative: signal) and its heartbeat."""
        rank = self.plan.node(self.host).first_rank + local_rank
        beat = read_record(Heartbeat, self.run.heartbeat(rank))
        gpu = beat.gpu if beat else ""
        if exit_code < 0:
            return Cause(CauseKind.RANK_KILLED, self.host, rank, signal=-exit_code, gpu=gpu)
        told = beat.cause if beat and beat.cause else Cause(CauseKind.RANK_EXIT)
        return dataclasses.replace(told, host=self.host, rank=rank, exit_code=exit_code, gpu=gpu)

    def start_guardian(self) -> tuple[int, int]:
        """Fork the process that ends the run if this one is killed; return its pid and a pipe to it."""
        read, write = os.pipe()
        os.set_inheritable(write, False)
        runner = os.getpid()
        # Forked before any thread starts: locks that other threads hold stay locked in a child.
        pid = os.fork()
        if pid:
            os.close(read)
            return pid, write
        os.setsid()  # so that a hangup of the terminal does not reach it
        os.close(write)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        word = os.read(read, MOST_WORD)
        if word != DONE:
            processes.sweep(self.marker, spare=(runner,))
            self.mask.cover_all()
            cause = Cause(CauseKind.RUNNER_KILLED, self.host)
            with contextlib.suppress(reader.MalformedError):
                cause = reader.loads(Cause, word, "the node runner's word")
            self.report(NodeState.KILLED, cause, number=int(signal.SIGKILL))
        os._exit(0)

    def start_torchrun(self) -> "subprocess.Popen[bytes]":
        """Start torchrun in a session of its own, with the secrets only in its environment."""
        node = self.plan.node(self.host)
        logs = self.run.logs(self.host)
        logs.mkdir(parents=True, exist_ok=True)
        for place in {"HF_HOME", "TMPDIR"} & set(node.env):  # of cache= and scratch=
            Path(node.env[place]).mkdir(parents=True, exist_ok=True)
        env = {k: v for k, v in os.environ.items() if k not in ("TMUX", "TMUX_PANE", "PYTHONPATH")}
        if self.plan.refuse_sockets:
            env |= parsers.NCCL_DEBUG_LINES
        env |= self.secrets | node_env(self.plan, self.host, str(self.run.path))
        words = torchrun_argv(self.plan, self.host, str(logs))
        python = str(Path(node.python).expanduser())
        argv = setup_argv(self.plan.setup, [python if word == node.python else word for word in words])
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

    def keep_copying(self) -> None:
        """Start the process that copies checkpoints to the next host, or restart it if it was killed.

        Does nothing if the run wants no copies.
        """
        now = time.monotonic()
        lives = self.replicator is not None and self.replicator.poll() is None
        if not self.plan.replicates or lives or now - self.copying_since < AGAIN_S:
            return
        self.copying_since = now
        env = os.environ | {MARKER: self.marker}
        argv = [*own_argv("llama405b_tools.agent.relay"), str(self.run.path), self.host]
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
        signals, mark = self.n_signals, stop_mark(self.run, self.host)
        until = mark.time + mark.grace_s if self.stop_signal else math.inf
        with contextlib.suppress(OSError):
            replicator.stdin.write(LAST)
            replicator.stdin.flush()
        while replicator.poll() is None and self.n_signals == signals and time.time() < until:
            time.sleep(POLL_S)
        replicator.kill()
        replicator.wait()

    def look_for_sockets(self, data: bytes, child: "subprocess.Popen[bytes]") -> None:
        """End the run if NCCL falls back to TCP and the plan forbids that: training would be very slow."""
        if self.plan.refuse_sockets and not self.fell_back and parsers.SOCKETS.encode() in data:
            self.fell_back = parsers.socket_line(data.decode("utf-8", "replace"))
            if self.fell_back:
                self.end_torchrun(child)

    def take_secrets(self) -> None:
        """Read the secrets file and delete it.

        Only this process and the guardian know the secrets from then on, and can mask them in the logs.
        """
        self.secrets = read_secrets(self.run.secrets(self.host))
        self.hidden = pieces_of(self.secrets.values())
        self.mask = LogMask(self.run.logs(self.host), self.hidden)
        self.run.secrets(self.host).unlink(missing_ok=True)

    def wait(self, child: "subprocess.Popen[bytes]") -> int:
        """Wait for torchrun; after a stop, end it in increasingly forceful ways, each with a time limit."""
        look_at = time.monotonic() if self.plan.slurm_job else math.inf  # there no signal reaches this process alone
        while not self.stop_signal:
            code = child.poll()  # Popen.wait with a timeout would wake up twenty times a second
            if self.plan.slurm_job and (code is not None or time.monotonic() >= look_at):
                look_at = time.monotonic() + STOP_EVERY_S
                if self.run.stop(self.host).exists():  # another host may have read its own first, and all have saved
                    self.stop_signal = signal.SIGTERM
            if code is not None:
                return code
            self.keep_copying()
            time.sleep(POLL_S)
        mark, grace_s = stop_mark(self.run, self.host), self.plan.grace_s
        if mark == NO_STOP and self.plan.saves_at_sigterm:
            mark = StopMark(SLURM, SLURM_GRACE_S, time.time())
            with contextlib.suppress(OSError):  # a full disk: the run is said to be killed
                write_json(self.run.stop(self.host), mark)
        if mark != NO_STOP:
            grace_s = mark.grace_s
        end_s = KILL_AFTER_S if self.plan.trains else max(KILL_AFTER_S, grace_s)
        ways: list[tuple[Callable[[], object], float | None]] = [
            (functools.partial(self.end_torchrun, child), end_s),
            (child.kill, None),
        ]
        if grace_s and self.plan.trains and (code := self.let_save(child, grace_s)) is not None:
            return code
        for end, seconds in ways:
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(seconds)
        raise AssertionError("a wait without a limit timed out")

    def let_save(self, child: "subprocess.Popen[bytes]", grace_s: float) -> int | None:
        """Tell the ranks to save after this step and exit; return torchrun's exit code, None if too slow.

        Each rank is signaled only once it writes heartbeats: before that it has no handler, and the signal would kill it.
        """
        deaf, deadline = set(self.plan.node(self.host).ranks), time.monotonic() + grace_s
        while (code := child.poll()) is None and time.monotonic() < deadline:
            below = processes.descendants(child.pid) if deaf else ()
            for rank in sorted(deaf):
                beat = read_record(Heartbeat, self.run.heartbeat(rank))
                if beat and beat.pid in below:
                    deaf.discard(rank)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(beat.pid, signal.SIGUSR1)
            time.sleep(POLL_S)
        return code

    def watch_ranks(self) -> None:
        """Record when each rank ends. torchrun polls only now and then, and its times are whole seconds."""
        slots, ends = self.plan.node(self.host).slots, select.poll()
        ranks: dict[int, int] = {}  # by the descriptor of its process
        look_until = time.monotonic() + RANKS_WITHIN_S  # it reads all of /proc
        while not self.ended.is_set() and len(self.rank_ends) < slots:
            looks = len(ranks) < slots and time.monotonic() < look_until
            for local_rank, pid in rank_processes(self.marker).items() if looks else ():
                if local_rank not in ranks.values():
                    try:
                        process = os.pidfd_open(pid)
                    except ProcessLookupError:
                        continue
                    except (OSError, AttributeError):
                        # before Linux 5.3, in some containers, and in some builds of Python
                        return
                    ranks[process] = local_rank
                    ends.register(process, select.POLLIN)
            ended, now_s = ends.poll(1000 * LOGS_EVERY_S), time.monotonic()
            for process, _ in ended:
                self.rank_ends[ranks[process]] = now_s
                ends.unregister(process)

    def watch_logs(self, child: "subprocess.Popen[bytes]") -> list[threading.Thread]:
        """Start threads that read this host's logs until torchrun has ended.

        There are two, so that a slow tmux pane delays only itself.
        """
        threads = []
        for read in (self.note_logs, self.show_logs):
            tail = Tail(self.run.logs(self.host), from_end=True)
            threads.append(threading.Thread(target=read, args=(child, tail), daemon=True))
            threads[-1].start()
        return threads

    def note_logs(self, child: "subprocess.Popen[bytes]", tail: Tail) -> None:
        """Record the length of each log over time; look for lines that end the run."""
        noted = {path: size for path, (_, size) in tail.marks.items()}
        while True:
            ended = child.poll() is not None
            with contextlib.suppress(OSError):  # a disk that fails, perhaps for a while
                for path in tail.files():
                    size = path.stat().st_size
                    if size != noted.get(path, 0):
                        noted[path] = size
                        self.note_length(path.relative_to(tail.root), size)
                        self.mask.cover(path)
                for piece in tail.new(final=ended) if self.plan.refuse_sockets else ():
                    self.look_for_sockets(piece.data, child)
            if ended:
                return
            self.ended.wait(LOGS_EVERY_S)

    def note_length(self, log: Path, n_bytes: int) -> None:
        """Record the present length of a log."""
        with contextlib.suppress(OSError):  # a full disk
            append_line(self.run.times(self.host), f"{time.time():.3f} {n_bytes} {log}")

    def show_logs(self, child: "subprocess.Popen[bytes]", tail: Tail) -> None:
        """Print the logs in the tmux pane."""
        while True:
            ended = child.poll() is not None
            with contextlib.suppress(OSError):  # of the pane, or of a disk
                for piece in tail.all(final=ended):
                    print(hide(piece.data.decode("utf-8", "replace"), self.hidden), end="", flush=True)
            if ended:
                return
            self.ended.wait(LOGS_EVERY_S)


def follows(cause: Cause) -> bool:
    """Return whether a rank ended because of another one.

    torchrun sends SIGTERM to the other ranks; gloo aborts in a thread of its own.
    """
    return cause.kind in (CauseKind.LOST_PEER, CauseKind.FOLLOWED) or cause.signal in (signal.SIGTERM, signal.SIGABRT)


def main() -> int:
    """Entry point of ``python -m llama405b_tools.agent.node RUN_DIR HOST``."""
    keep_private()
    return NodeRunner(RunDir(Path(sys.argv[1])), sys.argv[2]).main()


if __name__ == "__main__":
    sys.exit(main())
