"""One try to pass files down a chain of hosts: each host passes on what it receives while it receives."""

import contextlib
import dataclasses
import itertools
import secrets
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from llama405b.contract import reader
from llama405b_tools.deliver.progress import PushProgress
from llama405b_tools.hosts.dialogue import Dialogue
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.remote import wire
from llama405b_tools.remote.messages.chain import (
    LOOK,
    Hop,
    NextHop,
    RelayNews,
    RelayReady,
    RelayRequest,
    RelaySees,
    SendRequest,
)
from llama405b_tools.remote.wire import BrokenLinkError, FileList

READY_S, SILENT_S = 30.0, 180.0


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where the files are: here (``host`` ""), or on a host."""

    host: str
    path: str


class Chain:
    """One try."""

    def __init__(
        self, fleet: Fleet, source: Source, files: FileList, targets: Mapping[str, str], progress: PushProgress
    ) -> None:
        self.fleet, self.source, self.files, self.targets, self.progress = fleet, source, files, targets, progress
        self.token = secrets.token_hex(32)
        self.dialogues: dict[str, Dialogue] = {}
        self.faults: dict[str, str] = {}  # by host
        self.source_fault = ""
        self.dead: set[str] = set()  # cannot receive, and could not on another try
        self.same: dict[str, str] = {}  # host -> one before it that sees the same directory, and writes it for both

    def run(self) -> tuple[set[str], dict[str, str]]:
        """Returns the hosts that have everything, and why the others have not."""
        try:
            ready = self._begin()
            order = self._look(ready)
            hops = [self._hop(name, ready[name]) for name in order]
            for name, hop in itertools.zip_longest(order, hops[1:]):
                self.dialogues[name].say(reader.dumps(Hop(hop)) + "\n")
            if order:
                self._pass_on(order, hops[0])
        finally:
            for dialogue in self.dialogues.values():
                dialogue.end_input()
                dialogue.stream.close()
        return set(self.targets) - set(self.faults), self.faults

    def _begin(self) -> dict[str, RelayReady]:
        """Start a relay on every host; returns those that can receive."""

        def begin(name: str) -> RelayReady:
            request = RelayRequest(self.targets[name], self.token, name)
            self.dialogues[name] = Dialogue(self.fleet.stream(name, "relay", request))
            return self.dialogues[name].answer(RelayReady, READY_S)

        ready: dict[str, RelayReady] = {}
        for name, found in self.fleet.each(begin, self.targets).items():
            fault = str(found) if isinstance(found, HostError) else found.fault
            if isinstance(found, RelayReady) and not fault:
                ready[name] = found
            else:
                self.faults[name] = fault
        self.dead = set(self.faults)
        return ready

    def _look(self, ready: Mapping[str, RelayReady]) -> list[str]:
        """The hosts to pass files to, in order: of those that share a directory the first."""

        def look(name: str) -> RelaySees:
            self.dialogues[name].say(LOOK)
            return self.dialogues[name].answer(RelaySees, READY_S)

        seen = self.fleet.each(look, ready)
        self.faults |= {name: str(found) for name, found in seen.items() if isinstance(found, HostError)}
        sees = {name: found.sees for name, found in seen.items() if isinstance(found, RelaySees)}
        firsts = {name: next((other for other in sees if other in marks), name) for name, marks in sees.items()}
        self.same = {name: first for name, first in firsts.items() if first != name}
        return [name for name in sees if name not in self.same]

    def _hop(self, name: str, ready: RelayReady) -> NextHop:
        """Where a host receives."""
        host = self.fleet.hosts[name]
        loopback = ("127.0.0.1",) if host.loopback else ()
        addresses = (host.address,) if host.address else (*ready.addresses, *loopback)
        return NextHop(addresses, ready.port, self.token)

    def _pass_on(self, order: Sequence[str], first: NextHop) -> None:
        """Feed the first host, and hear from all how it went."""
        sender = threading.Thread(target=self._send, args=(order[0], first), daemon=True)
        sender.start()
        ends = self.fleet.each(lambda name: self._follow(name, self.dialogues[name]), order)
        sender.join(READY_S)
        because = f" ({self.source_fault})" if self.source_fault else ""
        for name, end in ends.items():
            fault = str(end) if isinstance(end, HostError) else end.fault
            if fault:
                self.faults[name] = f"{fault}{because}"
            if isinstance(end, RelayNews) and end.own:
                self.dead.add(name)
        self.faults |= {name: f"as on {first}" for name, first in self.same.items() if first in self.faults}

    def _send(self, first: str, below: NextHop) -> None:
        """Feed the first host: from here by TCP, or through its SSH connection, or from the host that has the files."""
        try:
            if self.source.host:
                dialogue = Dialogue(self.fleet.stream(self.source.host, "send", SendRequest(self.source.path, below)))
                self.source_fault = self._follow(self.source.host, dialogue).fault
                return
            with contextlib.closing(self._link(first, below)) as link:
                wire.source(Path(self.source.path), self.files, self.token, link, lambda _: None)
        except (OSError, HostError, BrokenLinkError, reader.MalformedError) as error:
            self.source_fault = str(error)

    def _link(self, first: str, below: NextHop) -> wire.Link:
        try:
            return wire.connect(below)
        except BrokenLinkError:
            return self.fleet.connection(first).tunnel(below.port)

    def _follow(self, name: str, dialogue: Dialogue) -> RelayNews:
        while True:
            news = dialogue.answer(RelayNews, SILENT_S)
            if news.end:
                self.progress.at(name, news.done, news.done)
                return news
            self.progress.at(name, news.done, news.total)
