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

from conftest import ROOT
from ops_rig import heartbeat, metrics, wait_for

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
HANGS = (*INSIDE, *OUTSIDE)
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
        self.demo, self.corpus = demo, corpus
        self.undo = contextlib.ExitStack()

    def cli(self, *args, timeout=120):
        command = [sys.executable, "-m", "llama405b_tools.cli", *map(str, args)]
        env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"}
        return subprocess.run(
            command, cwd=self.directory, env=env, capture_output=True, text=True, timeout=timeout, check=False
        )

    def __enter__(self):
        case = self.case
        if case.cause == "frozen_disk":
            self._freeze_disk()
        if case.cause == "locked_file":
            lock = self.undo.enter_context((self.place / "lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        micro = 64 if case.cause == "long_steps" else 4
        flags = [
            "--preset", "demo", "--model.path", self.demo, "--data.paths", self.corpus, "--data.seq_len", 64,
            "--training.global_batch_size", micro, "--training.micro_batch_size", 1, "--training.max_steps", 1_000_000,
            "--checkpoint.every", 5 if case.cause == "long_saves" else 100_000, "--parallel.numa", "off",
        ]  # fmt: skip
        if case.cause == "evaluations":
            flags += ["--evaluation.every", 3, "--evaluation.paths", self.corpus]
        inject = f"{case.cause} {case.rank} {case.step} {case.phase} {self.place}"
        if acts_inside(case.cause):
            flags += ["--env", f"PYTHONPATH={INJECT}", "--env", f"INJECT={inject}"]
        done = self.cli("launch", "--run", "r", *flags)
        assert done.returncode == 0, done.stdout + done.stderr
        return self

    def _freeze_disk(self):
        image, disk = self.place / "image", self.place / "frozen"
        disk.mkdir()
        image.write_bytes(b"")
        os.truncate(image, 32 << 20)
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, disk], check=True)
        self.undo.callback(subprocess.run, ["umount", "-l", disk], check=False)
        subprocess.run(["fsfreeze", "-f", disk], check=True)
        self.undo.callback(subprocess.run, ["fsfreeze", "-u", disk], check=False)

    def pid(self):
        return heartbeat(self.directory, "r", self.case.rank)["pid"]

    def strike(self):
        """Do what is done from outside, once the step before is taken."""
        case = self.case
        path = self.directory / "runs/r/metrics.jsonl"
        wait_for(lambda: path.exists() and max(metrics(self.directory, "r"), default=0) >= case.step - 1, 120)
        if case.cause == "frozen_group":
            self._group("freezer", {"freezer.state": "FROZEN"}, {"freezer.state": "THAWED"})
        if case.cause == "half_a_core":
            self._group("cpu", {"cpu.cfs_quota_us": "30000"}, {})
        if case.cause == "zombie":  # torchrun does not notice
            runner = int((Path("/proc") / str(self.pid()) / "stat").read_text().rpartition(") ")[2].split()[1])
            os.kill(runner, signal.SIGSTOP)
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
        done = self.cli("autopsy", "--run", "r", "--json")
        assert done.stdout.startswith("{"), done.stdout + done.stderr
        return json.loads(done.stdout)

    def __exit__(self, *exc):
        if self.case.cause == "zombie":
            for path in (self.directory / "runs/r/status").glob("*.json"):
                os.kill(json.loads(path.read_text())["pid"], signal.SIGCONT)
        self.undo.close()
        done = self.cli("stop", "--run", "r", "--grace", "0")
        assert done.returncode == 0, done.stdout + done.stderr
        shutil.rmtree(self.directory / "runs", ignore_errors=True)


def acts_inside(cause):
    """Whether the rank itself does it."""
    return cause in INSIDE or cause.startswith("slow") or cause in ("message_that_never_comes", "endless_regex")


def strikes(directory, demo, corpus, case):
    """Have a cause happen, and take an autopsy; returns it."""
    with CauseRun(directory, demo, corpus, case) as run:
        run.strike()
        time.sleep(HANG_S)
        return run.autopsy()


def is_right(case, autopsy):
    """Whether the rank, and its host, were named as what hangs."""
    culprit = autopsy["culprit"] or {}
    host = f"node-{'ab'[case.rank // 2]}"
    verdict = "over" if case.cause == "zombie" else "hangs"
    return autopsy["verdict"] == verdict and culprit.get("ranks") == [case.rank] and culprit.get("hosts") == [host]


def stays_quiet(directory, demo, corpus, case, seconds, every_s=15.0):
    """Watch a run that is healthy, or merely slow; returns what was said of it each time."""
    said = []
    with CauseRun(directory, demo, corpus, case) as run:
        until = time.monotonic() + seconds
        if case.cause != "starting":
            run.strike()
        while time.monotonic() < until:
            if case.cause == "short_pause":
                os.kill(run.pid(), signal.SIGSTOP)
                time.sleep(4)
                os.kill(run.pid(), signal.SIGCONT)
            found = run.autopsy()
            said.append((found["verdict"], found["words"]))
            time.sleep(1.0 if case.cause == "starting" else every_s)
    return said
