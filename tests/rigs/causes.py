"""Causes of a hang, and of a run that is healthy or merely slow, each in a real run of four ranks on two hosts of this machine."""

import contextlib
import dataclasses
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from hosts_rig import NET, Hosts
from ops_rig import freeze, heartbeat, metrics, own_disk, wait_for
from ranks_rig import ROOT

HOSTS = "node-a address=localhost slots=2\nnode-b address=localhost slots=2\n"
INJECT = Path(__file__).parent / "inject"
PHASES = ("data", "forward", "backward", "optimizer", "save")
HANG_S = 24.0  # of silence, after which it is looked
CGROUPS = Path("/sys/fs/cgroup")


@dataclasses.dataclass(frozen=True)
class Case:
    """One cause, where it strikes."""

    cause: str
    rank: int
    step: int
    phase: str

    @property
    def name(self):
        return f"{self.cause.replace('_', '-')}-r{self.rank}-s{self.step}-{self.phase}"


INSIDE = (
    "stop",
    "sleep",
    "gil_held",
    "gil_held_by_a_thread",
    "endless_loop",
    "blocked_read",
    "full_pipe",
    "frozen_disk",
    "locked_file",
    "deadlock",
    "child_that_stays",
    "silent_server",
    "queue_of_a_dead_thread",
    "other_collective",
    "swallowed",
)  # fmt: skip - what the rank itself does
OUTSIDE = ("frozen_group", "zombie")  # what is done to it
LATER_INSIDE = ("endless_regex", "message_that_never_comes", "group_of_its_own", "lock_of_a_thread")
LATER_OUTSIDE = ("no_memory", "no_core", "debugger", "cut_link")
LATER = (*LATER_INSIDE, *LATER_OUTSIDE)  # written after the rules had been fixed
HANGS = (*INSIDE, *OUTSIDE, *LATER)
QUIET = (
    "nothing", "slow", "slow_disk", "long_saves", "evaluations", "half_a_core", "long_steps", "short_pause", "starting", "busy_machine",
)  # fmt: skip


def cases(causes, count, seed):
    """``count`` cases of these causes, in turn, with rank, step and phase drawn by a seed."""
    draw = random.Random(seed)
    found = []
    for n in range(count):
        cause = causes[n % len(causes)]
        phase = draw.choice(PHASES)
        if cause == "swallowed":
            phase = "forward"  # elsewhere the run crashes, or goes on
        found.append(Case(cause, draw.randrange(4), draw.randrange(4, 12), phase))
    return found


class CauseRun:
    """A run in which a case happens."""

    def __init__(self, directory, demo, corpus, case):
        self.case, self.directory = case, Path(directory) / case.name
        self.place = self.directory / "place"
        self.place.mkdir(parents=True)
        (self.directory / "hosts").write_text(HOSTS)
        self.env = {}
        self.demo, self.corpus = demo, corpus
        self.undo = contextlib.ExitStack()

    def cli(self, *args, timeout=120):
        command = [sys.executable, "-m", "llama405b_tools.cli", *map(str, args)]
        env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"} | self.env
        return subprocess.run(
            command, cwd=self.directory, env=env, capture_output=True, text=True, timeout=timeout, check=False
        )

    def __enter__(self):
        try:
            self._launch()
        except BaseException:
            self.undo.close()
            raise
        return self

    def _launch(self):
        case = self.case
        if case.cause == "frozen_disk":
            self._freeze_disk()
        if case.cause == "locked_file":
            lock = self.undo.enter_context((self.place / "lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        batch = {"long_steps": 64, "cut_link": 3}.get(case.cause, 4)
        flags = [
            "--preset", "demo", "--model.path", self.demo, "--data.paths", self.corpus, "--data.seq_len", 64,
            "--training.global_batch_size", batch, "--training.micro_batch_size", 1, "--training.max_steps", 1_000_000,
            "--checkpoint.every", 5 if case.cause == "long_saves" else 100_000, "--parallel.numa", "off",
        ]  # fmt: skip
        if case.cause == "cut_link":
            flags += ["--checkpoint.storage", "local"]
        if case.cause == "evaluations":
            flags += ["--evaluation.every", 3, "--evaluation.paths", self.corpus]
        inject = f"{case.cause} {case.rank} {case.step} {case.phase} {self.place}"
        if acts_inside(case.cause):
            flags += ["--env", f"PYTHONPATH={INJECT}", "--env", f"INJECT={inject}"]
        done = self.cli("launch", "--run", "r", *flags)
        assert done.returncode == 0, done.stdout + done.stderr

    def _freeze_disk(self):
        freeze(self.undo.enter_context(own_disk(self.place / "frozen", 32 << 20)))

    def pid(self):
        return heartbeat(self.directory, "r", self.case.rank)["pid"]

    def strike(self):
        """Do what is done from outside, once the step before is taken."""
        case = self.case
        path = self.directory / "runs/r/metrics.jsonl"
        wait_for(lambda: path.exists() and max(metrics(self.directory, "r"), default=0) >= case.step - 1, 120)
        if case.cause == "frozen_group":
            self._group("freezer", {"freezer.state": "FROZEN"}, {"freezer.state": "THAWED"})
        if case.cause == "no_memory":  # and the kernel ends nobody: whoever wants more waits
            self._group(
                "memory", {"memory.limit_in_bytes": "1M", "memory.oom_control": "1"}, {"memory.oom_control": "0"}
            )
        if case.cause == "no_core":
            self._group("cpu", {"cpu.cfs_period_us": "1000000", "cpu.cfs_quota_us": "1000"}, {"cpu.cfs_quota_us": "-1"})
        if case.cause == "debugger":  # that halts it and waits for its user
            code = "import ctypes, sys, time; c = ctypes.CDLL(None); c.ptrace(16, int(sys.argv[1]), 0, 0); time.sleep(9999)"
            debugger = subprocess.Popen([sys.executable, "-c", code, str(self.pid())])
            self.undo.callback(debugger.wait)
            self.undo.callback(debugger.kill)
        if case.cause == "half_a_core":
            self._group("cpu", {"cpu.cfs_quota_us": "30000"}, {})
        if case.cause == "zombie":  # torchrun does not notice
            runner = int((Path("/proc") / str(self.pid()) / "stat").read_text().rpartition(") ")[2].split()[1])
            os.kill(runner, signal.SIGSTOP)
            self.undo.callback(wake, runner)
            os.kill(self.pid(), signal.SIGKILL)
        if case.cause == "busy_machine":
            for _ in range(6):
                busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                self.undo.callback(busy.kill)

    def _group(self, kind, settings, at_the_end):
        group = CGROUPS / kind / f"l4-{os.getpid()}-{self.case.name}"
        group.mkdir()
        for thread in (Path("/proc") / str(self.pid()) / "task").iterdir():
            with contextlib.suppress(OSError):
                (group / "tasks").write_text(thread.name)
        for name, value in settings.items():
            (group / name).write_text(value)

        def leave():
            for name, value in at_the_end.items():
                (group / name).write_text(value)
            for _ in range(50):
                with contextlib.suppress(OSError):
                    group.rmdir()
                    return
                for pid in (group / "tasks").read_text().split():
                    with contextlib.suppress(OSError):
                        os.kill(int(pid), signal.SIGKILL)
                time.sleep(0.1)

        self.undo.callback(leave)

    def autopsy(self):
        done = self.cli("autopsy", "--run", "r", "--json", "--hang-after", "20s")
        assert done.stdout.startswith("{"), done.stdout + done.stderr
        return json.loads(done.stdout)

    def __exit__(self, *exc):
        if self.case.cause != "cut_link":  # whose hosts are gone then
            self.undo.close()
        done = self.cli("stop", "--run", "r", "--grace", "0")
        self.undo.close()
        assert done.returncode == 0, done.stdout + done.stderr
        shutil.rmtree(self.directory / "runs/r/checkpoints", ignore_errors=True)


def wake(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def acts_inside(cause):
    """Whether the rank itself does it."""
    return cause in (*INSIDE, *LATER_INSIDE) or cause.startswith("slow")


class CutLink(CauseRun):
    """Three real hosts, one of which sends nothing any more on the training network; SSH goes on."""

    def __enter__(self):
        self.hosts = self.undo.enter_context(Hosts(3, users=("root",)))
        self.hosts.hosts_file(self.directory / "hosts")
        self.env = self.hosts.env()
        return super().__enter__()

    def strike(self):
        host = 1 + self.case.rank % 3
        wait_for(lambda: self.steps() >= self.case.step, 120)
        for rule in (
            ("prio", "10", "ipproto", "tcp", "sport", "22", "lookup", "main"),
            ("prio", "11", "to", f"{NET}.0/24", "blackhole"),
        ):
            self.hosts.exec(host, "ip", "rule", "add", *rule)

    def steps(self):
        lines = self.cli("status", "--run", "r").stdout.splitlines()
        return next((int(line.split()[1].strip(",")) for line in lines if line.startswith("step ")), 0)


def strikes(directory, demo, corpus, case):
    """Have a cause happen, and take an autopsy; returns it."""
    kind = CutLink if case.cause == "cut_link" else CauseRun
    with kind(directory, demo, corpus, case) as run:
        run.strike()
        time.sleep(HANG_S)
        return run.autopsy()


def is_right(case, autopsy):
    """Whether the rank, and its host, were named as what hangs."""
    culprit = autopsy["culprit"] or {}
    if case.cause == "cut_link":
        return autopsy["verdict"] == "hangs" and culprit.get("hosts") == [f"node-{1 + case.rank % 3}"]
    host = f"node-{'ab'[case.rank // 2]}"
    verdict = "over" if case.cause == "zombie" else "hangs"
    return autopsy["verdict"] == verdict and culprit.get("ranks") == [case.rank] and culprit.get("hosts") == [host]


def stays_quiet(directory, demo, corpus, case, seconds, every_s=15.0, least=1):
    """Watch a run that is healthy, or merely slow, so many times at least; returns what was said of it each time."""
    said = []
    with CauseRun(directory, demo, corpus, case) as run:
        if case.cause != "starting":
            run.strike()
        until = time.monotonic() + seconds
        while time.monotonic() < until or len(said) < least:
            if case.cause == "short_pause":
                os.kill(run.pid(), signal.SIGSTOP)
                time.sleep(4)
                os.kill(run.pid(), signal.SIGCONT)
            found = run.autopsy()
            said.append((found["verdict"], found["words"]))
            time.sleep(1.0 if case.cause == "starting" else every_s)
    return said
