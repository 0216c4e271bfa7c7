"""Code (what differs) or big files (as a chain of hosts) to where they are needed."""

import contextlib
import dataclasses
import json
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from llama405b.contract.errors import FAILED, GOOD, UserError
from llama405b_tools.deliver import sourcetree
from llama405b_tools.hosts.fleet import Fleet, Outcome
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.remote import wire
from llama405b_tools.remote.wire import BrokenLinkError, FileList
from llama405b_tools.run.streams import Dialogue
from llama405b_tools.text.shell import shell_path
from llama405b_tools.text.tables import table

PASSES = 4  # chains tried, each without the hosts that broke the one before
READY_S, SILENT_S = 30.0, 180.0
SAY_EVERY_S = 10.0  # where standard output is no terminal


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where the files are: here (``host`` ""), or on a host."""

    host: str
    path: str


def _source(text: str, hosts: Sequence[Host]) -> Source:
    host, colon, path = text.partition(":")
    if colon and host in [h.name for h in hosts]:
        return Source(host, path)
    if not Path(text).exists():
        raise UserError(f"{text}: no such file or directory here; name one, or HOST:PATH with a host of the hosts file")
    return Source("", text)


def _check_there(fleet: Fleet, source: Source) -> None:
    """See that the host which is to send has something to send.

    Raises:
        UserError: It has not.
    """
    place = shell_path(source.path)
    look = f"cd {shell_path(fleet.workdir(source.host))} && find -L {place} -type f | head -1 | grep -q ."
    if fleet.connection(source.host).run(look, "", READY_S).code:
        raise UserError(f"{source.host}:{source.path}: there is no file in it; name a file or directory of that host")


def push_code(fleet: Fleet, root: Path, names: Sequence[str], to: str = "") -> int:
    """Make every host's directory equal to the tree; prints a line for each host."""
    lines = sourcetree.manifest(root, names)

    def one(name: str) -> dict[str, Any]:
        began = time.monotonic()
        sent, gone = sourcetree.push(fleet.connection(name), root, lines, to or fleet.workdir(name))
        return {"sent": sent, "gone": gone, "seconds": time.monotonic() - began}

    outcomes = fleet.each(one)
    rows = []
    for name, found in outcomes.items():
        if isinstance(found, HostError):
            rows.append((name, "—", f"FAILED: {found}"))
        else:
            rows.append(
                (
                    name,
                    to or fleet.workdir(name),
                    f"{found['sent']} files sent, {found['gone']} deleted, {found['seconds']:.1f} s",
                )
            )
    print(table(("host", "directory", f"of {len(names)} files"), rows), flush=True)
    return FAILED if any(isinstance(found, HostError) for found in outcomes.values()) else GOOD


def push_files(fleet: Fleet, source: Source, targets: Mapping[str, str]) -> int:
    """Pass files down a chain of hosts, each into its directory; prints rates and what became of each host."""
    files = wire.list_files(Path(source.path)) if not source.host else []
    total = sum(size for _, size in files)
    if not source.host and not files:
        raise UserError(f"{source.path}: there is no file in it; name a checkpoint directory")
    faults: dict[str, str] = {}
    same: dict[str, str] = {}
    dead: set[str] = set()
    left, began = list(targets), time.monotonic()
    with show_progress() as progress:
        for _ in range(PASSES):
            chain = Chain(fleet, source, files, {name: targets[name] for name in left}, progress)
            done, found = chain.run()
            faults = {name: why for name, why in faults.items() if name not in done} | found
            same |= chain.same
            dead |= chain.dead
            left = [name for name in left if name not in done and name not in chain.dead]
            if not left:
                break
    took = time.monotonic() - began
    good_words = {name: f"the same directory as on {first}" for name, first in same.items()}
    rows = [
        (
            name,
            targets[name],
            f"FAILED: {faults[name]}" if name in faults else good_words.get(name, "every file verified"),
        )
        for name in targets
    ]
    print(table(("host", "directory", "now"), rows), flush=True)
    good = len(targets) - len(faults)
    again = "; the same command again goes on where it broke off" if set(faults) - dead else ""
    size = f"{total / 1e9:.2f} GB, " if total else ""
    print(f"{good} of {len(targets)} hosts: {size}{took:.1f} s{again}")
    return FAILED if faults else GOOD


def _same_place(source: Source, fleet: Fleet, name: str) -> str:
    """The same path; below the working directory where it is relative."""
    path = Path(source.path)
    place = path.parent if not source.host and path.is_file() else path
    return str(place) if place.is_absolute() or str(place).startswith("~/") else f"{fleet.workdir(name)}/{place}"


class Chain:
    """One try to pass the files down a chain of hosts."""

    def __init__(
        self, fleet: Fleet, source: Source, files: FileList, targets: Mapping[str, str], progress: "Show"
    ) -> None:
        self.fleet, self.source, self.files, self.targets, self.progress = fleet, source, files, targets, progress
        self.token = secrets.token_hex(32)
        self.dead: set[str] = set()  # cannot receive, and could not on another try
        self.same: dict[str, str] = {}  # host -> one before it that sees the same directory, and writes it for both

    def run(self) -> tuple[set[str], dict[str, str]]:
        """Returns the hosts that have everything, and why the others have not."""
        dialogues: dict[str, Dialogue] = {}

        def begin(name: str) -> dict[str, Any]:
            request = {"to": self.targets[name], "token": self.token, "host": name}
            dialogues[name] = Dialogue(self.fleet.stream(name, "relay", request))
            return dialogues[name].answer(READY_S)

        ready = self.fleet.each(begin, self.targets)
        faults = {name: str(found) for name, found in ready.items() if isinstance(found, HostError)}
        faults |= {name: found["fault"] for name, found in ready.items() if isinstance(found, dict) and "end" in found}
        self.dead = set(faults)
        order = [name for name in self.targets if name not in faults]
        seen = self.fleet.each(lambda name: _look(dialogues[name]), order)
        faults |= {name: str(found) for name, found in seen.items() if isinstance(found, HostError)}
        self.same = _sharing(seen)
        order = [name for name in order if name not in self.same and name not in faults]
        below: list[dict[str, Any] | None] = []
        for name in order:
            found = ready[name]
            assert isinstance(found, dict)
            own = self.fleet.hosts[name].address
            addresses = (
                [own] if own else [*found["addresses"], *(["127.0.0.1"] if self.fleet.hosts[name].loopback else [])]
            )
            below.append({"addresses": addresses, "port": found["port"], "token": self.token})
        try:
            for i, name in enumerate(order):
                dialogues[name].say(json.dumps(below[i + 1] if i + 1 < len(order) else None) + "\n")
            if order and below[0]:
                sender = threading.Thread(target=self._send, args=(order[0], below[0], faults), daemon=True)
                sender.start()
                ends = self.fleet.each(lambda name: self._follow(name, dialogues[name]), order)
                sender.join(READY_S)
                self.dead |= {name for name, end in ends.items() if isinstance(end, dict) and end["own"]}
                faults |= _faults(ends, faults)
                faults |= {name: f"as on {first}" for name, first in self.same.items() if first in faults}
        finally:
            for dialogue in dialogues.values():
                dialogue.end_input()
                dialogue.stream.close()
        return {name for name in self.targets if name not in faults}, {
            k: v for k, v in faults.items() if k in self.targets
        }

    def _send(self, first: str, below: dict[str, Any], faults: dict[str, str]) -> None:
        """Feed the first host: from here by TCP, or through its SSH connection, or from the host that has the files."""
        try:
            if self.source.host:
                request = {"path": self.source.path, "below": below}
                dialogue = Dialogue(self.fleet.stream(self.source.host, "send", request))
                end = self._follow(self.source.host, dialogue)
                if end["fault"]:
                    faults[self.source.host] = end["fault"]
                return
            try:
                link: Any = wire.connect(below)
            except BrokenLinkError:
                link = self.fleet.connection(first).tunnel(below["port"])
            with contextlib.closing(link):
                wire.source(Path(self.source.path), self.files, self.token, link, lambda _: None)
        except (OSError, HostError, BrokenLinkError) as error:
            faults["the source"] = str(error)

    def _follow(self, name: str, dialogue: Dialogue) -> dict[str, Any]:
        while True:
            news = dialogue.answer(SILENT_S)
            if "end" in news:
                self.progress.at(name, news["done"], news["done"])
                return news
            self.progress.at(name, news["done"], news["total"])


def _look(dialogue: Dialogue) -> dict[str, Any]:
    dialogue.say("look\n")
    return dialogue.answer(READY_S)


def _sharing(seen: Mapping[str, Outcome]) -> dict[str, str]:
    """The hosts that see the directory of one before them, and whose it is."""
    sees = {name: found["sees"] for name, found in seen.items() if isinstance(found, dict)}
    firsts = {name: next((other for other in sees if other in marks), name) for name, marks in sees.items()}
    return {name: first for name, first in firsts.items() if first != name}


def _faults(ends: Mapping[str, Any], known: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for name, end in ends.items():
        fault = str(end) if isinstance(end, HostError) else end["fault"]
        if fault:
            source = f" ({known['the source']})" if "the source" in known else ""
            found[name] = f"{fault}{source}"
    return found


class Show:
    """How far each host is: bars at a terminal, else a line now and then."""

    def __init__(self, bars: Progress | None) -> None:
        self.bars = bars
        self.tasks: dict[str, Any] = {}
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
def show_progress() -> Iterator[Show]:
    """A display of every host's progress."""
    console = Console()
    if not console.is_terminal:
        yield Show(None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        yield Show(bars)
