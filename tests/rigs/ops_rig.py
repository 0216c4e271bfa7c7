"""Helpers for tests of complete runs on this machine."""

import contextlib
import itertools
import json
import os
import re
import shlex
import subprocess
import time
from pathlib import Path

from ranks_rig import ROOT, run_program

COUNT = itertools.count()
FAKE_TRAINER = (
    "--env",
    f"PYTHONPATH={Path(__file__).parent / 'fake_trainer'}",
)  # for launch: a trainer without torch, see there
PACED = (
    "--training.extend",
    str(Path(__file__).parent / "paced.py"),
)  # for runs that are still there when they are stopped


def settings(demo, corpus, steps=12):
    return [
        "--preset", "demo", "--model.path", demo, "--data.paths", corpus, "--data.seq_len", 64,
        "--training.global_batch_size", 4, "--training.micro_batch_size", 2, "--training.max_steps", steps,
        "--checkpoint.every", 4,
    ]  # fmt: skip


def fake_trainer(demo, corpus, steps=12):
    """The same for the fake trainer: for tests of what is around the trainer."""
    return [*settings(demo, corpus, steps), *FAKE_TRAINER]


def train(work, run, *flags, world=1, code=0):
    """Train in a run's directory without a launch, by ranks that start in no time; returns the completed process."""
    (work / "runs" / run).mkdir(parents=True, exist_ok=True)
    done = run_program("llama405b.train:run_and_exit", *flags, "--run-dir", f"runs/{run}", cwd=work, world=world)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def metrics(work, run):
    lines = map(json.loads, (work / "runs" / run / "metrics.jsonl").read_text().splitlines())
    return {m["step"]: m for m in lines if "loss" in m}


class Patience:
    """So many seconds; a busy machine has longer: while N processes want each core, a second counts as 1/N."""

    def __init__(self, seconds=60):
        self.left, self.at = seconds, time.monotonic()

    def lasts(self):
        """Whether some is left, of what was there at the last call."""
        now = time.monotonic()
        self.left -= (now - self.at) / max(1.0, os.getloadavg()[0] / os.cpu_count())
        self.at = now
        return self.left > 0


def wait_for(condition, seconds=60, says=lambda: ""):
    """The condition's value once it is true; ``says``: what else to print where it does not become so, in a busy machine's time.

    It is asked half of the time at most: a command that asks a host takes the CPU that what is waited for needs.
    """
    patience, asked = Patience(seconds), time.monotonic()
    while not (value := condition()):
        assert patience.lasts(), f"waited {seconds} s (more where the machine was busy), too long\n{says()}"
        time.sleep(max(0.1, time.monotonic() - asked))
        asked = time.monotonic()
    return value


def heartbeat(work, run, rank):
    try:
        return json.loads((work / "runs" / run / "heartbeat" / f"rank-{rank}.json").read_text())
    except OSError:
        return {"step": -1}


@contextlib.contextmanager
def own_disk(place, size):
    """An ext4 of so many bytes, mounted on a directory that is made; thawed and unmounted at the end."""
    image = place.with_suffix(".image")
    image.touch()
    os.truncate(image, size)
    place.mkdir()
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, place], check=True)
    try:
        yield place
    finally:
        freeze(place, "-u", check=False)
        subprocess.run(["umount", "-l", place], check=False)


def freeze(disk, how="-f", *, check=True):
    """Have whatever writes to a disk wait in the kernel, or (``-u``) go on."""
    subprocess.run(["fsfreeze", how, disk], check=check, capture_output=True)


class Terminal:
    """A tmux pane in which a program runs."""

    def __init__(self, argv, cwd, env, size=(160, 45)):
        self.tmux = ("tmux", "-L", f"l4top-{os.getpid()}-{next(COUNT)}", "-f", "/dev/null")
        line = f"{shlex.join(map(str, argv))}; echo rc=$?; exec sleep 600"
        settings = [part for key, value in env.items() for part in ("-e", f"{key}={value}")]
        size = ("-x", str(size[0]), "-y", str(size[1]))
        self.run("new-session", "-d", "-s", "t", *size, "-c", str(cwd), *settings, "--", "sh", "-c", line)

    def run(self, *args):
        return subprocess.run([*self.tmux, *args], capture_output=True, text=True, timeout=20, check=True).stdout

    def screen(self):
        return self.run("capture-pane", "-p", "-t", "t")

    def keys(self, *names):
        self.run("send-keys", "-t", "t", *names)

    def shows(self, pattern, seconds):
        """Wait until the screen matches; a busy machine has longer, as in ``wait_for``."""

        def found():
            return (screen := self.screen()) and re.search(pattern, screen, re.MULTILINE) and screen

        return wait_for(found, seconds, lambda: f"{pattern} is not on the screen:\n{self.screen()}")

    def pid(self):
        """Of the program."""
        shell = self.run("display", "-p", "-t", "t", "#{pane_pid}").strip()
        return int(subprocess.run(["pgrep", "-P", shell], capture_output=True, text=True, check=True).stdout.split()[0])

    def close(self):
        subprocess.run([*self.tmux, "kill-server"], capture_output=True, check=False)
        (Path(os.environ.get("TMUX_TMPDIR") or "/tmp") / f"tmux-{os.getuid()}" / self.tmux[2]).unlink(missing_ok=True)


def benchmark(cwd, *args, env=None, timeout=300):
    """Run one of ``benchmarks/`` in a directory; returns the completed process."""
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"} | (env or {})
    return run_program("benchmarks.run:main", *args, cwd=cwd, env=env, timeout_s=timeout)
