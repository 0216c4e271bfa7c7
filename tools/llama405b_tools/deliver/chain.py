"""Pass files down a chain of hosts, where each host forwards data while it receives, and show the progress.

A push shows bars on a terminal, else a line now and then; a setup prints lines.
"""

import contextlib
import dataclasses
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich import progress
from rich.console import Console

from llama405b.contract import reader
from llama405b.contract.errors import given
from llama405b.spec.tensors import Part
from llama405b_tools.agent import transfer
from llama405b_tools.agent.transfer import (
    LOOK,
    BrokenLinkError,
    FileSource,
    Hop,
    NextHop,
    RelayProgress,
    RelayReady,
    RelayRequest,
    RelaySees,
    SendRequest,
)
from llama405b_tools.deliver.setup_plan import Step
from llama405b_tools.hosts.fleet import Dialogue, Fleet
from llama405b_tools.hosts.transport import HostError, unanswered
from llama405b_tools.text.words import fold_names

SAY_EVERY_S = 10.0  # if standard output is not a terminal


class PushProgress:
    """Show the progress that the hosts report."""

    def __init__(self, bars: progress.Progress | None) -> None:
        self.bars = bars
        self.tasks: dict[str, progress.TaskID] = {}
        self.began, self.said = time.monotonic(), 0.0
        self.done: dict[str, int] = {}  # bytes
        self.noted: set[tuple[str, str]] = set()

    def note(self, name: str, text: str) -> None:
        """Print a host's note on the files, once."""
        if (name, text) not in self.noted:
            self.noted.add((name, text))
            line = given("{}: ", name) + text
            self.bars.console.print(line, markup=False, highlight=False) if self.bars else print(line, flush=True)

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
            print(f"{least / 1e9:.2f} of {total / 1e9:.2f} GB on {behind} (slowest); {rate}", flush=True)


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
    """Print each host's steps: a line when one begins, and after a silence a line about those that still run."""

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
        """Print that a step begins, and take its output, line by line."""
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
        """Print one line per step that runs anywhere, if nothing was printed for a while."""
        with self.lock:
            if time.monotonic() - self.said < self.every_s:
                return
            for step, hosts in self.running():
                self._print(fold_names(hosts), f"still {step}{given(': {}', next(iter(hosts.values())))}")

    def _print(self, whose: str, what: str) -> None:
        self.said = time.monotonic()
        print(f"{self.said - self.began:5.0f} s  {whose}: {what}", flush=True)


READY_S, SILENT_S = 30.0, 180.0


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where the files are: on this machine (``host`` ""), or on a host."""

    host: str
    path: str
    part: Part | None = None  # of the checkpoint there; None: all of it
    names: tuple[str, ...] = ()  # of the files there; (): all


class Chain:
    """One attempt to pass files down a chain of hosts."""

    def __init__(
        self,
        fleet: Fleet,
        origin: Origin,
        source: FileSource | None,
        targets: Mapping[str, str],
        progress: PushProgress,
    ) -> None:
        """Plan an attempt; ``source``: what this machine sends, None if a host does."""
        self.fleet = fleet
        self.origin = origin
        self.source = source
        self.targets = targets
        self.progress = progress
        self.token = secrets.token_hex(32)
        self.dialogues: dict[str, Dialogue] = {}
        self.faults: dict[str, str] = {}  # by host
        self.origin_fault = ""
        self.dead: set[str] = set()  # cannot receive, now or in another attempt
        self.known: dict[str, int] = {}  # by host: files that were not read again
        self.same: dict[str, str] = {}  # host -> an earlier one that shares its directory, and writes it for both

    def run(self) -> dict[str, str]:
        """Pass the files down; return the hosts that lack some, and why."""
        try:
            ready = self._begin()
            order = self._look(ready)
            hops = [self._hop(name, ready[name]) for name in order]
            for name, hop in itertools.zip_longest(order, hops[1:]):
                self.dialogues[name].say(reader.dumps(Hop(hop)) + "\n")
            if order:
                self._pass_on(order, hops[0])
        finally:
            self._close()
        return self.faults

    def shared(self) -> dict[str, str]:
        """Return the hosts that share an earlier host's directory; pass nothing down."""
        try:
            self._look(self._begin())
        finally:
            self._close()
        return self.same

    def _close(self) -> None:
        for dialogue in self.dialogues.values():
            dialogue.end_input()
            dialogue.stream.close()

    def _begin(self) -> dict[str, RelayReady]:
        """Start a relay on every host; return those that can receive."""

        def begin(name: str) -> RelayReady:
            request = RelayRequest(self.targets[name], self.token, name)
            self.dialogues[name] = self.fleet.dialogue(name, "relay", request)
            ready = self.dialogues[name].answer(RelayReady, READY_S)
            if ready.fault:
                raise HostError(ready.fault)
            return ready

        outcomes = self.fleet.each(begin, self.targets)
        self.faults = unanswered(outcomes)
        self.dead = set(self.faults)
        return {name: found for name, found in outcomes.items() if isinstance(found, RelayReady)}

    def _look(self, ready: Mapping[str, RelayReady]) -> list[str]:
        """Return the hosts to pass files to, in order; of those that share a directory, only the first."""

        def look(name: str) -> RelaySees:
            self.dialogues[name].say(LOOK)
            return self.dialogues[name].answer(RelaySees, READY_S)

        seen = self.fleet.each(look, ready)
        self.faults |= unanswered(seen)
        sees = {name: found.sees for name, found in seen.items() if isinstance(found, RelaySees)}
        for name, marks in sees.items():
            first = next((other for other in sees if other in marks), name)
            if first != name:
                self.same[name] = first
        return [name for name in sees if name not in self.same]

    def _hop(self, name: str, ready: RelayReady) -> NextHop:
        """Return the address at which a host receives."""
        host = self.fleet.hosts[name]
        addresses = ready.addresses
        if host.address:
            addresses = (host.address,)
        return NextHop(addresses, ready.port, self.token)

    def _pass_on(self, order: Sequence[str], first: NextHop) -> None:
        """Feed the first host, and collect the result from all."""
        sender = threading.Thread(target=self._send, args=(order[0], first), daemon=True)
        sender.start()
        ends = self.fleet.each(lambda name: self._follow(name, self.dialogues[name]), order)
        sender.join(READY_S)
        news = {name: end for name, end in ends.items() if isinstance(end, RelayProgress)}
        faults = unanswered(ends) | {name: end.fault for name, end in news.items() if end.fault}
        because = given(" ({})", self.origin_fault)
        self.faults |= {name: f"{fault}{because}" for name, fault in faults.items()}
        self.dead |= {name for name, end in news.items() if end.own}
        self.known = {name: end.known for name, end in news.items()}
        self.faults |= {name: f"same as on {first}" for name, first in self.same.items() if first in self.faults}

    def _send(self, first: str, below: NextHop) -> None:
        """Feed the first host: from this machine by TCP or through SSH, or from the host that has the files."""
        try:
            if self.source is None:
                request = SendRequest(self.origin.path, below, self.origin.part, self.origin.names)
                dialogue = self.fleet.dialogue(self.origin.host, "send", request)
                self.origin_fault = self._follow(self.origin.host, dialogue).fault
                return
            with contextlib.closing(self._link(first, below)) as link:
                transfer.send_files(self.source, self.token, link, lambda _: None)
        except (OSError, HostError, BrokenLinkError, reader.MalformedError) as error:
            self.origin_fault = str(error)

    def _link(self, first: str, below: NextHop) -> transfer.Link:
        try:
            return transfer.connect_to(below)
        except BrokenLinkError:
            return self.fleet.connection(first).tunnel(below.port)

    def _follow(self, name: str, dialogue: Dialogue) -> RelayProgress:
        while True:
            news = dialogue.answer(RelayProgress, SILENT_S)
            for note in news.notes:
                self.progress.note(name, note)
            if news.end:
                self.progress.at(name, news.done, news.done)
                return news
            self.progress.at(name, news.done, news.total)
