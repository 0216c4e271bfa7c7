"""Compare cluster-top, on both sides, with a fresh ``ssh host nvidia-smi`` per refresh."""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import json
import os
import pty
import signal
import statistics
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rig import RUN, least, ssh_argv, stub_run
from llama405b.contract import reader
from llama405b.contract.errors import UserError, fmt_if
from llama405b.contract.records import Heartbeat, Phase
from llama405b_tools.hosts.fleet import MAX_AT_ONCE, Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import shell_path
from llama405b_tools.text.figures import format_columns
from llama405b_tools.top import event_sources
from llama405b_tools.top.state.frames import HostFrame

INTERVAL_S = 2.0
COLUMNS, LINES = 200, 60
UNKNOWN_KEYS = "bdgiltuvxz"  # each is answered with a line of its own
RUN_HOSTS = 64  # in a launch that one machine, which plays all of them, can take
WARM_S, PER_HOST_S = 12.0, 0.15  # until every host has been sending frames for some time
CHANGES, FIRST_STEP, DELAY_MOST_S = 9, 400_001, 30.0
QUERY = "nvidia-smi --query-gpu=index,utilization.gpu,memory.used,power.draw --format=csv,noheader || true"
TICKS = os.sysconf("SC_CLK_TCK")


class Top:
    """cluster-top in its own process, with a pseudo-terminal."""

    def __init__(self, hosts_file: Path, *args: str) -> None:
        mine, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        asked = ["top", str(hosts_file), "--interval", f"{INTERVAL_S:g}", *args]
        argv = [sys.executable, "-m", "llama405b_tools.cli", *asked]
        env = {**os.environ, "TERM": "xterm-256color"}
        self.child = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
        os.close(theirs)
        self.terminal, self.seen = mine, b""
        threading.Thread(target=self._drain, args=(mine,), daemon=True).start()

    def _drain(self, terminal: int) -> None:
        while True:
            try:
                self.seen = (self.seen + os.read(terminal, 1 << 16))[-(1 << 18) :]
            except OSError:
                return

    def spent(self) -> tuple[float, float]:
        """CPU seconds so far, and resident megabytes."""
        words = Path(f"/proc/{self.child.pid}/stat").read_text(encoding="ascii").rpartition(") ")[2].split()
        return (int(words[11]) + int(words[12])) / TICKS, int(words[21]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def over(self, seconds: float) -> tuple[float, float]:
        """CPU seconds per second, and resident megabytes at the end."""
        begin, before = time.monotonic(), self.spent()[0]
        time.sleep(seconds)
        if self.child.poll() is not None:
            raise UserError(f"cluster-top ended with {self.child.returncode}: {self.seen[-300:]!r}")
        cpu_s, megabytes = self.spent()
        return (cpu_s - before) / (time.monotonic() - begin), megabytes

    def press(self, key: str) -> None:
        """Press a key."""
        os.write(self.terminal, key.encode())

    def answered_s(self, key: str) -> float:
        """Seconds from pressing an unknown key to the answer on the screen."""
        begin = time.monotonic()
        self.press(key)
        while f"no such key: {key}".encode() not in self.seen:
            if time.monotonic() > begin + DELAY_MOST_S:
                raise UserError(f"key {key} was not answered within {DELAY_MOST_S:g} s")
            time.sleep(0.001)
        return time.monotonic() - begin

    def close(self) -> None:
        """End the process."""
        self.child.send_signal(signal.SIGTERM)
        try:
            self.child.wait(10)
        except subprocess.TimeoutExpired:
            self.child.kill()


def top(hosts: Sequence[Host], path: Path, seconds: float, repeat: int) -> int:
    """Measure cluster-top."""
    fresh = least(lambda: _fresh(hosts), repeat)
    rows = [("ssh host nvidia-smi, one process each", fresh.cpu_s / INTERVAL_S, 0.0)]  # share of a core, MB
    with stub_run(hosts[:RUN_HOSTS], path), Fleet(hosts[:1]) as fleet:
        with contextlib.closing(Top(path)) as shown:
            time.sleep(WARM_S + PER_HOST_S * len(hosts))
            rows.append(("cluster-top, its screen", *shown.over(seconds)))
            shown.press("3")  # the ranks, whose steps are shown however many hosts there are
            delays = [_delay(fleet, shown, FIRST_STEP + i) for i in range(CHANGES)]
            answers = [_answer(shown, key) for key in UNKNOWN_KEYS]
        with contextlib.closing(Top(path, "--json", "--watch", f"{INTERVAL_S:g}")) as printed:
            time.sleep(WARM_S + PER_HOST_S * len(hosts))
            rows.append(("cluster-top --json --watch 2", *printed.over(seconds)))
        sampler_share, sampler_mb = _sampler(fleet, seconds)
    shown_rows = [
        (
            name,
            f"{100 * share:.1f}",
            f"{1000 * INTERVAL_S * share:.0f}",
            fmt_if("{:.0f}", megabytes),
            f"{rows[0][1] / share:.0f}" if share else "",  # '' if it took less than a tick
        )
        for name, share, megabytes in rows
    ]
    heads = (f"{len(hosts)} hosts", "% of a core", "CPU ms per refresh", "RSS MB", "times cheaper")
    print(format_columns(heads, shown_rows), flush=True)
    print(
        f"refresh every {INTERVAL_S:g} s; screen {COLUMNS}x{LINES}; a run and its logs on {len(hosts[:RUN_HOSTS])} of the hosts"
    )
    print(f"the sampler on a host: {100 * sampler_share:.2f}% of a core, {sampler_mb:.0f} MB")
    print(
        f"from a change on a host to the screen: median {statistics.median(delays):.1f} s, at most {max(delays):.1f} s "
        f"of {CHANGES}"
    )
    print(
        f"from a key to its answer on the screen: median {1000 * statistics.median(answers):.0f} ms, "
        f"at most {1000 * max(answers):.0f} ms of {len(answers)}"
    )
    return 0


def _answer(shown: Top, key: str) -> float:
    """Return how long a key waits, at a moment that has nothing to do with the samples."""
    time.sleep(0.37)
    return shown.answered_s(key)


def _fresh(hosts: Sequence[Host]) -> None:
    """Refresh once as scripts do: one ssh process per host. Without nvidia-smi, the remote sh reports an error."""

    def one(host: Host) -> None:
        argv = [*ssh_argv(), host.name, QUERY]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if done.returncode:
            raise UserError(f"ssh {host.name} failed ({done.stderr.decode(errors='replace').strip()[:200]})")

    with concurrent.futures.ThreadPoolExecutor(min(MAX_AT_ONCE, len(hosts))) as pool:
        list(pool.map(one, hosts))


def _delay(fleet: Fleet, shown: Top, step: int) -> float:
    """Return the seconds from writing a heartbeat on the host to its step on the screen."""
    [name] = fleet.hosts
    time.sleep(INTERVAL_S * (step - FIRST_STEP) / CHANGES)  # otherwise each would follow right after a sample
    begin, now = time.monotonic(), time.time()
    beat = Heartbeat(0, name, 0, now, step, Phase.TRAIN, now - 1)
    folder = f"{shell_path(fleet.workdir(name))}/runs/{RUN}/heartbeat"
    line = f"mkdir -p {folder} && cat >{folder}/new && mv {folder}/new {folder}/rank-0.json"
    fleet.connection(name).run(line, json.dumps(dataclasses.asdict(beat)), DELAY_MOST_S)
    while str(step).encode() not in shown.seen:
        if time.monotonic() > begin + DELAY_MOST_S:
            raise UserError(f"step {step} did not appear on the screen within {DELAY_MOST_S:g} s")
        time.sleep(0.01)
    return time.monotonic() - begin


def _sampler(fleet: Fleet, seconds: float) -> tuple[float, float]:
    """Return CPU seconds per second and megabytes of one sampler, by its own count."""
    found: list[HostFrame] = []
    with contextlib.closing(event_sources.LiveSource(fleet, RUN, INTERVAL_S)) as live:
        end = live.now() + seconds
        while live.now() < end:
            arrived = [event.frame for event in live.events(end) if event.frame is not None]
            found += [reader.build_record(HostFrame, frame, "frame") for frame in arrived]
    first, last = found[1], found[-1]
    assert first.own
    assert last.own
    return (last.own[0] - first.own[0]) / (last.now - first.now), last.own[1] / 1e6
