"""Send code (only what differs) or big files (down a chain of hosts) to where they are needed."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from llama405b.contract.errors import UserError, code_for
from llama405b.contract.phrases import counted, given
from llama405b_tools.deliver import sourcetree
from llama405b_tools.deliver.chain import READY_S, Chain, Origin
from llama405b_tools.deliver.progress import show_progress
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.outcomes import unanswered
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.remote import chain_protocol
from llama405b_tools.remote.chain_protocol import FileList
from llama405b_tools.text.shell import shell_path
from llama405b_tools.text.tables import table

PASSES = 4  # chains tried, each without the hosts that broke the previous one


def parse_origin(text: str, hosts: Sequence[Host]) -> Origin:
    """Parse PATH or HOST:PATH.

    Raises:
        UserError: The path does not exist on this machine.
    """
    host, colon, path = text.partition(":")
    if colon and host in [h.name for h in hosts]:
        return Origin(host, path)
    if not Path(text).exists():
        raise UserError(f"{text}: no such file or directory; name one, or HOST:PATH with a host from the hosts file")
    return Origin("", text)


def check_there(fleet: Fleet, origin: Origin) -> None:
    """Check that the sending host has something to send.

    Raises:
        UserError: It has nothing.
    """
    place = shell_path(origin.path)
    look = f"cd {shell_path(fleet.workdir(origin.host))} && find -L {place} -type f | head -1 | grep -q ."
    if fleet.connection(origin.host).run(look, "", READY_S).code:
        raise UserError(f"{origin.host}:{origin.path}: contains no files; name a file or directory on that host")


def same_place(origin: Origin, fleet: Fleet, name: str) -> str:
    """Return the same path on a host; a relative one is below the working directory."""
    place = Path(origin.path)
    if not origin.host and place.is_file():
        place = place.parent
    if place.is_absolute() or str(place).startswith("~/"):
        return str(place)
    return f"{fleet.workdir(name)}/{place}"


def push_code(fleet: Fleet, root: Path, names: Sequence[str], to: str = "") -> int:
    """Make every host's directory equal to the tree; prints one line per host."""
    lines = sourcetree.manifest(root, names)

    def one(name: str) -> tuple[str, str]:
        where, began = to or fleet.workdir(name), time.monotonic()
        sent, gone = sourcetree.push(fleet.connection(name), root, lines, where)
        return where, f"{counted(sent, 'file')} sent, {gone} deleted, {time.monotonic() - began:.1f} s"

    outcomes = fleet.each(one)
    rows = []
    for name, found in outcomes.items():
        if isinstance(found, HostError):
            found = "—", f"FAILED: {found}"
        rows.append((name, *found))
    print(table(("host", "directory", f"of {len(names)} files"), rows), flush=True)
    return code_for(unanswered(outcomes))


def push_files(fleet: Fleet, origin: Origin, targets: Mapping[str, str]) -> int:
    """Pass files down a chain of hosts, each into its directory; prints rates and each host's result."""
    files, began = _files_of(origin), time.monotonic()
    faults, same, dead = _pass_down(fleet, origin, files, targets)
    took = time.monotonic() - began
    ends = dict.fromkeys(targets, "every file verified")
    ends |= {name: f"the same directory as on {first}" for name, first in same.items()}
    ends |= {name: f"FAILED: {why}" for name, why in faults.items()}
    print(table(("host", "directory", "now"), [(name, to, ends[name]) for name, to in targets.items()]), flush=True)
    size = given("{:.2f} GB, ", sum(n_bytes for _, n_bytes in files) / 1e9)
    again = "; run the same command again to continue where it stopped" if set(faults) - dead else ""
    print(f"{len(targets) - len(faults)} of {len(targets)} hosts: {size}{took:.1f} s{again}")
    return code_for(faults)


def _pass_down(
    fleet: Fleet, origin: Origin, files: FileList, targets: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str], set[str]]:
    """Why hosts lack files, which share a directory with an earlier one, and which can never receive."""
    faults: dict[str, str] = {}
    same: dict[str, str] = {}
    dead: set[str] = set()
    left = dict(targets)
    with show_progress() as progress:
        for _ in range(PASSES):
            chain = Chain(fleet, origin, files, left, progress)
            found = chain.run()
            faults = {name: why for name, why in faults.items() if name in dead} | found
            same = {name: first for name, first in same.items() if name not in left} | chain.same
            dead |= chain.dead
            left = {name: to for name, to in left.items() if name in found.keys() - dead}
            if not left:
                break
    return faults, same, dead


def _files_of(origin: Origin) -> FileList:
    """The files on this machine; a sending host lists its own."""
    if origin.host:
        return []
    files = chain_protocol.list_files(Path(origin.path))
    if not files:
        raise UserError(f"{origin.path}: contains no files; name a checkpoint directory")
    return files
