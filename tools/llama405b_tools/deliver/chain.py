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
from llama405b.contract.errors import fmt_if
from llama405b.spec.tensors import HostShard
from llama405b_tools.agent import relay, transfer
from llama405b_tools.agent.transfer import (
    CHECK_CANARIES,
    BrokenLinkError,
    Downstream,
    FileSource,
    NextHost,
    RelayCanaries,
    RelayProgress,
    RelayReady,
    RelayRequest,
    SendRequest,
)
from llama405b_tools.deliver.setup_plan import SetupStep
from llama405b_tools.hosts.fleet import Fleet, JsonSession
from llama405b_tools.hosts.transport import HostError, failure_texts
from llama405b_tools.text.words import fold_names

PRINT_EVERY_S = 10.0  # if standard output is not a terminal


class PushProgress:
    """Show the progress that the hosts report."""

    def __init__(self, bars: progress.Progress | None) -> None:
        self.bars = bars
        self.tasks: dict[str, progress.TaskID] = {}
        self.started_at, self.printed_at = time.monotonic(), 0.0
        self.done_bytes: dict[str, int] = {}  # bytes
        self.noted: set[tuple[str, str]] = set()

    def note(self, name: str, text: str) -> None:
        """Print a host's note on the files, once."""
        if (name, text) not in self.noted:
            self.noted.add((name, text))
            line = fmt_if("{}: ", name) + text
            self.bars.console.print(line, markup=False, highlight=False) if self.bars else print(line, flush=True)

    def update(self, name: str, done_bytes: int, total_bytes: int) -> None:
        """Show that a host has ``done_bytes`` of ``total_bytes`` bytes."""
        self.done_bytes[name] = done_bytes
        if self.bars:
            if name not in self.tasks:
                self.tasks[name] = self.bars.add_task(name, total=total_bytes)
            self.bars.update(self.tasks[name], completed=done_bytes, total=total_bytes or 1)
        elif time.monotonic() - self.printed_at > PRINT_EVERY_S and total_bytes:
            self.printed_at = time.monotonic()
            slowest = min(self.done_bytes, key=lambda host: self.done_bytes[host])
            min_bytes = self.done_bytes[slowest]
            rate = f"{min_bytes / max(0.1, time.monotonic() - self.started_at) / 1e6:,.0f} MB/s"
            print(f"{min_bytes / 1e9:.2f} of {total_bytes / 1e9:.2f} GB on {slowest} (slowest); {rate}", flush=True)


@contextlib.contextmanager
def show_progress() -> Iterator[PushProgress]:
    """Show every host's progress."""
    console = Console()
    if not console.is_terminal:
        yield PushProgress(None)
        return
    name, downloaded = progress.TextColumn("{task.description}"), progress.DownloadColumn()
    rate, eta = progress.TransferSpeedColumn(), progress.TimeRemainingColumn()
    with progress.Progress(name, progress.BarColumn(), downloaded, rate, eta, console=console) as bars:
        yield PushProgress(bars)


class StepProgress:
    """Print each host's steps: a line when one begins, and after a silence a line about those that still run."""

    def __init__(self, every_s: float = PRINT_EVERY_S) -> None:
        self.every_s = every_s
        self.lock = threading.Lock()
        self.started_at = time.monotonic()
        self.printed_at = 0.0
        self.current_steps: dict[str, tuple[str, str]] = {}  # by host: the step, and the last line of its output

    def say(self, hosts: str, text: str) -> None:
        """Print a line."""
        with self.lock:
            self._print(hosts, text)

    @contextlib.contextmanager
    def track(self, host: str, step: SetupStep) -> Iterator[Callable[[str], None]]:
        """Print that a step begins, and take its output, line by line."""
        self.say(host, f"{step.name}{fmt_if(' ({})', step.download)}")
        ended = threading.Event()

        def on_output(line: str) -> None:
            self.current_steps[host] = step.name, line

        def remind() -> None:
            while not ended.wait(self.every_s):
                self._remind()

        on_output("")
        threading.Thread(target=remind, daemon=True).start()
        try:
            yield on_output
        finally:
            ended.set()
            del self.current_steps[host]

    def running_steps(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield the steps that run anywhere, each with the last line of its output by host."""
        current = dict(self.current_steps)
        for step in sorted({step for step, _ in current.values()}):
            yield step, {host: line for host, (host_step, line) in current.items() if host_step == step}

    def _remind(self) -> None:
        """Print one line per step that runs anywhere, if nothing was printed for a while."""
        with self.lock:
            if time.monotonic() - self.printed_at < self.every_s:
                return
            for step, hosts in self.running_steps():
                self._print(fold_names(hosts), f"still {step}{fmt_if(': {}', next(iter(hosts.values())))}")

    def _print(self, hosts: str, text: str) -> None:
        self.printed_at = time.monotonic()
        print(f"{self.printed_at - self.started_at:5.0f} s  {hosts}: {text}", flush=True)


READY_S, SILENT_S = 30.0, 180.0


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where the files are: on this machine (``host`` ""), or on a host."""

    host: str
    path: str
    part: HostShard | None = None  # of the checkpoint there; None: all of it
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
        self.dialogues: dict[str, JsonSession] = {}
        self.faults: dict[str, str] = {}  # by host
        self.origin_fault = ""
        self.unusable: set[str] = set()  # cannot receive, now or in another attempt
        self.n_already_verified: dict[str, int] = {}  # by host: files that were not read again
        self.same_directory: dict[
            str, str
        ] = {}  # host -> an earlier one that shares its directory, and writes it for both

    def run(self) -> dict[str, str]:
        """Pass the files down; return the hosts that lack some, and why."""
        try:
            ready = self._start_relays()
            order = self._receiving_order(ready)
            hops = [self._next_host(name, ready[name]) for name in order]
            for name, hop in itertools.zip_longest(order, hops[1:]):
                self.dialogues[name].send(reader.dumps(Downstream(hop)) + "\n")
            if order:
                self._relay_files(order, hops[0])
        finally:
            self._close()
        return self.faults

    def find_shared_directories(self) -> dict[str, str]:
        """Return the hosts that share an earlier host's directory; pass nothing down."""
        try:
            self._receiving_order(self._start_relays())
        finally:
            self._close()
        return self.same_directory

    def _close(self) -> None:
        for dialogue in self.dialogues.values():
            dialogue.end_input()
            dialogue.stream.close()

    def _start_relays(self) -> dict[str, RelayReady]:
        """Start a relay on every host; return those that can receive."""

        def start_relay(name: str) -> RelayReady:
            request = RelayRequest(self.targets[name], self.token, name)
            self.dialogues[name] = self.fleet.open_session(name, relay.relay, request)
            ready = self.dialogues[name].receive(RelayReady, READY_S)
            if ready.fault:
                raise HostError(ready.fault)
            return ready

        outcomes = self.fleet.call_each(start_relay, self.targets)
        self.faults = failure_texts(outcomes)
        self.unusable = set(self.faults)
        return {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, RelayReady)}

    def _receiving_order(self, ready: Mapping[str, RelayReady]) -> list[str]:
        """Return the hosts to pass files to, in order; of those that share a directory, only the first."""

        def read_marks(name: str) -> RelayCanaries:
            self.dialogues[name].send(CHECK_CANARIES)
            return self.dialogues[name].receive(RelayCanaries, READY_S)

        outcomes = self.fleet.call_each(read_marks, ready)
        self.faults |= failure_texts(outcomes)
        marks_by_host = {name: outcome.sees for name, outcome in outcomes.items() if isinstance(outcome, RelayCanaries)}
        for name, marks in marks_by_host.items():
            first = next((other for other in marks_by_host if other in marks), name)
            if first != name:
                self.same_directory[name] = first
        return [name for name in marks_by_host if name not in self.same_directory]

    def _next_host(self, name: str, ready: RelayReady) -> NextHost:
        """Return the address at which a host receives."""
        host = self.fleet.hosts[name]
        addresses = ready.addresses
        if host.address:
            addresses = (host.address,)
        return NextHost(addresses, ready.port, self.token)

    def _relay_files(self, order: Sequence[str], first: NextHost) -> None:
        """Feed the first host, and collect the result from all."""
        sender = threading.Thread(target=self._send, args=(order[0], first), daemon=True)
        sender.start()
        outcomes = self.fleet.call_each(lambda name: self._read_progress(name, self.dialogues[name]), order)
        sender.join(READY_S)
        results = {name: end for name, end in outcomes.items() if isinstance(end, RelayProgress)}
        faults = failure_texts(outcomes) | {name: end.fault for name, end in results.items() if end.fault}
        origin_note = fmt_if(" ({})", self.origin_fault)
        self.faults |= {name: f"{fault}{origin_note}" for name, fault in faults.items()}
        self.unusable |= {name for name, end in results.items() if end.own}
        self.n_already_verified = {name: end.known for name, end in results.items()}
        self.faults |= {
            name: f"same as on {first}" for name, first in self.same_directory.items() if first in self.faults
        }

    def _send(self, first: str, downstream: NextHost) -> None:
        """Feed the first host: from this machine by TCP or through SSH, or from the host that has the files."""
        try:
            if self.source is None:
                request = SendRequest(self.origin.path, downstream, self.origin.part, self.origin.names)
                dialogue = self.fleet.open_session(self.origin.host, relay.send, request)
                self.origin_fault = self._read_progress(self.origin.host, dialogue).fault
                return
            with contextlib.closing(self._connect(first, downstream)) as link:
                transfer.send_files(self.source, self.token, link, lambda _: None)
        except (OSError, HostError, BrokenLinkError, reader.MalformedError) as error:
            self.origin_fault = str(error)

    def _connect(self, first: str, downstream: NextHost) -> transfer.ByteStream:
        try:
            return transfer.connect_to_host(downstream)
        except BrokenLinkError:
            return self.fleet.connection(first).tunnel(downstream.port)

    def _read_progress(self, name: str, dialogue: JsonSession) -> RelayProgress:
        while True:
            report = dialogue.receive(RelayProgress, SILENT_S)
            for note in report.notes:
                self.progress.note(name, note)
            if report.end:
                self.progress.update(name, report.done, report.done)
                return report
            self.progress.update(name, report.done, report.total)
