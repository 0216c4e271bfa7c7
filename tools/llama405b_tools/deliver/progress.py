"""Each host's progress while files are pushed: bars on a terminal, else a line now and then."""

import contextlib
import time
from collections.abc import Iterator

from rich import progress
from rich.console import Console

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
