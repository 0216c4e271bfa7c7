"""Each host's progress: while files are pushed, bars on a terminal, else a line now and then; while it is set up, lines."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich import progress
from rich.console import Console

from llama405b.contract.phrases import given
from llama405b_tools.deliver.setup_plan import Step
from llama405b_tools.text.fold import fold_names

SAY_EVERY_S = 10.0  # if standard output is not a terminal


class PushProgress:
    """Display of what the hosts report."""

    def __init__(self, bars: progress.Progress | None) -> None:
        self.bars = bars
        self.tasks: dict[str, progress.TaskID] = {}
        self.began, self.said = time.monotonic(), 0.0
        self.done: dict[str, int] = {}  # bytes

    def at(self, name: str, done: int, total: int) -> None:
        """Show that a host has ``done`` of ``total`` bytes."""
        self.done[name] = done
        if self.bars:
            if name not in self.tasks:
                self.tasks[name] = self.bars.add_task(name, total=total)
            self.bars.update(self.tasks[name], completed=done, total=total or 1)
        elif time.monotonic() - self.said > SAY_EVERY_S and total:
            self.said = time.monotonic()
            behind = min(self.done, key=lambda host: self.done[host])
            least = self.done[behind]
            rate = f"{least / max(0.1, time.monotonic() - self.began) / 1e6:,.0f} MB/s"
            print(f"{least / 1e9:.2f} of {total / 1e9:.2f} GB on {behind}, the last; {rate}", flush=True)


@contextlib.contextmanager
def show_progress() -> Iterator[PushProgress]:
    """Show every host's progress."""
    console = Console()
    if not console.is_terminal:
        yield PushProgress(None)
        return
    name, so_far = progress.TextColumn("{task.description}"), progress.DownloadColumn()
    rate, left = progress.TransferSpeedColumn(), progress.TimeRemainingColumn()
    with progress.Progress(name, progress.BarColumn(), so_far, rate, left, console=console) as bars:
        yield PushProgress(bars)


class StepProgress:
    """Each host's steps: a line when one begins, and after any silence a line about those that still run."""

    def __init__(self, every_s: float = SAY_EVERY_S) -> None:
        self.every_s = every_s
        self.lock = threading.Lock()
        self.began = time.monotonic()
        self.said = 0.0
        self.doing: dict[str, tuple[str, str]] = {}  # by host: the step, and the last line of its output

    def say(self, whose: str, what: str) -> None:
        """Print a line."""
        with self.lock:
            self._print(whose, what)

    @contextlib.contextmanager
    def of(self, host: str, step: Step) -> Iterator[Callable[[str], None]]:
        """Say that a step begins, and take its output, line by line."""
        self.say(host, f"{step.name}{given(' ({})', step.comes)}")
        ended = threading.Event()

        def seen(line: str) -> None:
            self.doing[host] = step.name, line

        def remind() -> None:
            while not ended.wait(self.every_s):
                self._remind()

        seen("")
        threading.Thread(target=remind, daemon=True).start()
        try:
            yield seen
        finally:
            ended.set()
            del self.doing[host]

    def running(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield the steps that run anywhere, each with the last line of its output by host."""
        doing = dict(self.doing)
        for step in sorted({step for step, _ in doing.values()}):
            yield step, {host: line for host, (each, line) in doing.items() if each == step}

    def _remind(self) -> None:
        """Print one line per step that runs anywhere, if nothing was said for a while."""
        with self.lock:
            if time.monotonic() - self.said < self.every_s:
                return
            for step, hosts in self.running():
                self._print(fold_names(hosts), f"still {step}{given(': {}', next(iter(hosts.values())))}")

    def _print(self, whose: str, what: str) -> None:
        self.said = time.monotonic()
        print(f"{self.said - self.began:5.0f} s  {whose}: {what}", flush=True)
