"""One attempt to pass files down a chain of hosts: each host forwards data while it receives."""

import contextlib
import dataclasses
import itertools
import secrets
import threading
from collections.abc import Mapping, Sequence

from llama405b.contract import reader
from llama405b.contract.parts import Part
from llama405b.contract.phrases import given
from llama405b_tools.deliver.progress import PushProgress
from llama405b_tools.hosts.dialogue import Dialogue
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.outcomes import unanswered
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.remote import chain_protocol
from llama405b_tools.remote.chain_protocol import BrokenLinkError
from llama405b_tools.remote.file_sources import FileSource
from llama405b_tools.remote.messages.transfer import (
    LOOK,
    Hop,
    NextHop,
    RelayProgress,
    RelayReady,
    RelayRequest,
    RelaySees,
    SendRequest,
)

READY_S, SILENT_S = 30.0, 180.0


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where the files are: on this machine (``host`` ""), or on a host."""

    host: str
    path: str
    part: Part | None = None  # of the checkpoint there; None: all of it
    names: tuple[str, ...] = ()  # of the files there; (): all


class Chain:
    """One attempt."""

    def __init__(
        self,
        fleet: Fleet,
        origin: Origin,
        source: FileSource | None,
        targets: Mapping[str, str],
        progress: PushProgress,
    ) -> None:
        """Plan one; ``source``: what this machine sends, None if a host does."""
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
        self.same: dict[str, str] = {}  # host -> an earlier one that shares its directory, and writes it for both

    def run(self) -> dict[str, str]:
        """Pass the files down; returns the hosts that do not have everything, and why."""
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
        """Return the hosts whose directory is that of an earlier one; nothing is passed down."""
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
        """Start a relay on every host; returns those that can receive."""

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
        """The hosts to pass files to, in order; only the first of those that share a directory."""

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
        """The address at which a host receives."""
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
                chain_protocol.send_files(self.source, self.token, link, lambda _: None)
        except (OSError, HostError, BrokenLinkError, reader.MalformedError) as error:
            self.origin_fault = str(error)

    def _link(self, first: str, below: NextHop) -> chain_protocol.Link:
        try:
            return chain_protocol.connect_to(below)
        except BrokenLinkError:
            return self.fleet.connection(first).tunnel(below.port)

    def _follow(self, name: str, dialogue: Dialogue) -> RelayProgress:
        while True:
            news = dialogue.answer(RelayProgress, SILENT_S)
            if news.end:
                self.progress.at(name, news.done, news.done)
                return news
            self.progress.at(name, news.done, news.total)
