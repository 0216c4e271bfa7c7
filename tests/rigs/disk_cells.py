"""What becomes of a run where one of its places is on an odd disk: started, saved, killed, resumed, exported; by the real programs."""

import dataclasses
import json
import re
import shutil
import time
from pathlib import Path

from odd_disk import ODDS, REAL, odd_disk, real_disk

from llama405b.contract.files import read_record
from llama405b.contract.records import Heartbeat
from ranks_rig import ROOT, run_program

USES = (
    "working directory", "checkpoints, shared", "checkpoints, local", "after_save", "export", "data", "weights", "cache",
)  # fmt: skip
LATER = tuple(
    f"{odd}, later" for odd in ("stale", "quota", "full", "read-only")
)  # after the first save, until the resume
CELLS = [(use, odd) for use in USES for odd in (*ODDS, *LATER, *REAL)]
PACED = str(Path(__file__).with_name("paced.py"))


@dataclasses.dataclass
class Outcome:
    """What a phase came to: its exit code, and the sentence that it ended with."""

    phase: str
    code: int
    words: str
    log: str


class Cell:
    """A run of two ranks on this machine: on one host or, where checkpoints are local, on two with a directory each."""

    def __init__(self, use, odd, place, demo, corpus):
        self.use, self.odd, self.place = use, odd, place
        self.disk = place / "disk"
        self.work = self.disk / "work" if use == "working directory" else place / "work"
        self.out = (self.disk if use == "export" else place) / "out"
        self.copies = (self.disk if use == "after_save" else place) / "copies"
        self.demo, self.corpus = demo, corpus
        self.hosts = "ab" if use == "checkpoints, local" else "a"
        self.outcomes = []

    def run(self):
        """Try it all; returns what each phase came to, up to the first that failed."""
        early = [self.odd] if self.odd in (*ODDS, *REAL) else []
        with real_disk(self.disk, self.odd) if self.odd in REAL else odd_disk(self.disk) as become:
            for directory in (self.work, self.copies):
                directory.mkdir()
            self.demo, self.corpus = self._brought(self.demo, "weights"), self._brought(self.corpus, "data")
            (self.work / "hosts").write_text("\n".join(map(self._host, self.hosts)))
            become(*early)
            try:
                self._phases(early, become)
            finally:
                become()
                self._cli("stop", "--run", "r", "--grace", "0")
        return self.outcomes

    def _phases(self, early, become):
        if not self._phase("launch", "launch", *self._settings(100_000), "--training.extend", PACED):
            return
        self._wait(lambda: self._saved() or self._complaints() or not self._lives())
        if not early:
            become(self.odd.removesuffix(", later"))
            time.sleep(6)  # what is written now is not seen
            become()
            at = self._step()
            self._wait(lambda: self._step() > at + 3 or not self._lives())
        goes_on, saved = self._lives(), self._saved()
        self._cli("stop", "--run", "r", "--grace", "0")
        self.outcomes[-1].words = "; ".join(self._complaints()) or self.outcomes[-1].words
        if not (goes_on and saved):
            self.outcomes[-1].code = 1
            return
        again = [*self._settings(self._step() + 4), "--resume", "auto", "--follow"]
        changes = ["--checkpoint.allow_changes", "training.max_steps"]
        if not self._phase("resume", "launch", *again, *changes):
            return
        if self.use == "checkpoints, local":
            shutil.rmtree(self._below(self.disk / "b" / "runs"))
            more = [*self._settings(self._step() + 4), "--resume", "auto", "--follow"]
            if not self._phase("blank", "launch", *more, *changes):
                return
        self._phase("export", "export", "r", self.out, *(["hosts"] if self.use == "checkpoints, local" else []))

    def _brought(self, source, use):
        if self.use != use:
            return source
        return shutil.copytree(source, self.disk / use)

    def _host(self, name):
        options = ["address=localhost", f"slots={2 // len(self.hosts)}"]
        if self.use == "checkpoints, local":
            options.append(f"workdir={self.disk / name}")
            (self.disk / name).mkdir()
        if self.use == "cache":
            options.append(f"cache={self.disk / 'cache'}")
        return f"node-{name} {' '.join(options)}"

    def _settings(self, steps):
        settings = [
            "--run", "r", "--preset", "demo", "--model.path", self.demo, "--data.paths", self.corpus, "--data.seq_len", 64,
            "--training.global_batch_size", 4, "--training.micro_batch_size", 2, "--training.max_steps", steps,
            "--checkpoint.every", 3, "--checkpoint.keep", 2, "--checkpoint.max_failures", 0, "--env", "OMP_NUM_THREADS=1",
        ]  # fmt: skip
        if self.use == "checkpoints, local":
            settings += ["--checkpoint.storage", "local"]
        if self.use == "checkpoints, shared":
            settings += ["--checkpoint.dir", self.disk / "c"]
        if self.use == "after_save":
            settings += ["--checkpoint.after_save", f'cp -r "$LLAMA405B_CHECKPOINT" {self.copies}/']
        return settings

    def _phase(self, name, *words):
        done = self._cli(*words)
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        self.outcomes.append(Outcome(name, done.returncode, lines[-1] if lines else "", done.stdout + done.stderr))
        return done.returncode == 0

    def _cli(self, *words):
        env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}", "OMP_NUM_THREADS": "1"}
        return run_program("llama405b_tools.cli:main", *words, cwd=self.work, env=env, timeout_s=240)

    def _runs(self):
        return [
            path
            for path in (self.work / "runs" / "r", *(self.disk / name / "runs" / "r" for name in self.hosts))
            if path.exists()
        ]

    def _step(self):
        read = [read_record(Heartbeat, beat) for run in self._runs() for beat in run.glob("heartbeat/rank-*.json")]
        return max((beat.step for beat in read if beat), default=0)

    def _complaints(self):
        """What rank 0 said that it could not do."""
        logs = [log.read_text(errors="replace") for run in self._runs() for log in run.glob("logs/*/**/0/stdout.log")]
        lines = [line for log in logs for line in log.splitlines()]
        return list(dict.fromkeys(line for line in lines if "not saved" in line or "cannot be" in line))

    def _saved(self):
        places = [run / "checkpoints" for run in self._runs()] + [self.disk / "c"]
        real = [place for place in map(self._below, places) if place.exists()]
        return any(re.fullmatch(r"step-\d{8}", path.name) for place in real for path in place.iterdir())

    def _below(self, path):
        """Where the same is seen, and nothing is refused."""
        real = self.disk if self.odd in REAL else self.place / ".disk.real"
        return Path(str(path).replace(str(self.disk), str(real)))

    def _lives(self):
        hosts = json.loads(self._cli("status", "--run", "r", "--json").stdout or "{}").get("hosts", {})
        return any(host and host.get("alive") for host in hosts.values())

    def _wait(self, condition, seconds=90):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.outcomes
            time.sleep(0.5)
