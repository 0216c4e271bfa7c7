"""Code (what differs) or big files (as a chain of hosts) to where they are needed."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from llama405b.contract.errors import FAILED, GOOD, UserError
from llama405b_tools.deliver import sourcetree
from llama405b_tools.deliver.chain import Chain, Source
from llama405b_tools.deliver.progress import show_progress
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.remote import wire
from llama405b_tools.text.shell import shell_path
from llama405b_tools.text.tables import table

PASSES = 4  # chains tried, each without the hosts that broke the one before
READY_S, SILENT_S = 30.0, 180.0
SAY_EVERY_S = 10.0  # where standard output is no terminal


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


@dataclasses.dataclass(frozen=True, slots=True)
class Pushed:
    """What pushing code to a host did."""

    sent: int  # files
    gone: int  # files deleted there
    seconds: float


def push_code(fleet: Fleet, root: Path, names: Sequence[str], to: str = "") -> int:
    """Make every host's directory equal to the tree; prints a line for each host."""
    lines = sourcetree.manifest(root, names)

    def one(name: str) -> Pushed:
        began = time.monotonic()
        sent, gone = sourcetree.push(fleet.connection(name), root, lines, to or fleet.workdir(name))
        return Pushed(sent, gone, time.monotonic() - began)

    outcomes = fleet.each(one)
    rows = []
    for name, found in outcomes.items():
        if isinstance(found, HostError):
            rows.append((name, "—", f"FAILED: {found}"))
        else:
            did = f"{found.sent} files sent, {found.gone} deleted, {found.seconds:.1f} s"
            rows.append((name, to or fleet.workdir(name), did))
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
    ends = dict.fromkeys(targets, "every file verified") | good_words
    ends |= {name: f"FAILED: {why}" for name, why in faults.items()}
    rows = [(name, targets[name], ends[name]) for name in targets]
    print(table(("host", "directory", "now"), rows), flush=True)
    good = len(targets) - len(faults)
    again = "; run the same command again to continue where it stopped" if set(faults) - dead else ""
    size = f"{total / 1e9:.2f} GB, " if total else ""
    print(f"{good} of {len(targets)} hosts: {size}{took:.1f} s{again}")
    return FAILED if faults else GOOD


def _same_place(source: Source, fleet: Fleet, name: str) -> str:
    """The same path; below the working directory where it is relative."""
    path = Path(source.path)
    place = path.parent if not source.host and path.is_file() else path
    return str(place) if place.is_absolute() or str(place).startswith("~/") else f"{fleet.workdir(name)}/{place}"
