"""How far each host is, while files are pushed: bars at a terminal, else a line now and then."""

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

SAY_EVERY_S = 10.0  # where standard output is not a terminal


class PushProgress:
    """How far each host is: bars at a terminal, else a line now and then."""

    def __init__(self, bars: Progress | None) -> None:
        self.bars = bars
        self.tasks: dict[str, TaskID] = {}
        self.began, self.said = time.monotonic(), 0.0
        self.state: dict[str, tuple[int, int]] = {}

    def at(self, name: str, done: int, total: int) -> None:
        """A host has ``done`` of ``total`` bytes."""
        self.state[name] = done, total
        if self.bars:
            if name not in self.tasks:
                self.tasks[name] = self.bars.add_task(name, total=total)
            self.bars.update(self.tasks[name], completed=done, total=total or 1)
        elif time.monotonic() - self.said > SAY_EVERY_S and total:
            self.said = time.monotonic()
            rate = min(d for d, _ in self.state.values()) / max(0.1, time.monotonic() - self.began)
            behind = min(self.state, key=lambda host: self.state[host][0])
            print(
                f"{self.state[behind][0] / 1e9:.2f} of {total / 1e9:.2f} GB on {behind}, the last; {rate / 1e6:,.0f} MB/s",
                flush=True,
            )


@contextlib.contextmanager
def show_progress() -> Iterator[PushProgress]:
    """A display of every host's progress."""
    console = Console()
    if not console.is_terminal:
        yield PushProgress(None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        yield PushProgress(bars)
