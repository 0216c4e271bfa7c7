"""Send code (only what differs) or big files (down a chain of hosts) to where they are needed."""

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llama405b.contract.errors import RunError, UserError, code_for
from llama405b.contract.mesh import Axes
from llama405b.contract.parts import Part
from llama405b.contract.phrases import given
from llama405b.contract.schema import Parallel
from llama405b.contract.tensors import INDEX, SINGLE
from llama405b_tools.deliver import sourcetree
from llama405b_tools.deliver.chain import READY_S, Chain, Origin
from llama405b_tools.deliver.progress import PushProgress, show_progress
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.login_shell import shell_path
from llama405b_tools.hosts.outcomes import replies, unanswered
from llama405b_tools.remote.file_sources import FileSource, open_files
from llama405b_tools.run.host_checks import fault_list
from llama405b_tools.run.plan import first_ranks
from llama405b_tools.text.figures import format_table

PASSES = 4  # chains tried, each without the hosts that broke the previous one
AT_ONCE = 8  # parts: each takes a session on the sending host, of which sshd allows 10
COUNT_GPUS = "nvidia-smi -L 2>/dev/null | grep -c '^GPU '; true"


@dataclasses.dataclass(frozen=True, slots=True)
class PushResult:
    """What came of it, by host."""

    faults: dict[str, str]  # why hosts lack files
    same: dict[str, str]  # which share a directory with an earlier one
    dead: set[str]  # which can never receive

    @classmethod
    def joined(cls, results: Sequence["PushResult"]) -> "PushResult":
        """Join those of several hosts."""
        faults, same = dict[str, str](), dict[str, str]()
        for each in results:
            faults |= each.faults
            same |= each.same
        return cls(faults, same, set[str]().union(*(each.dead for each in results)))


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
        said = sourcetree.push(fleet.connection(name), root, lines, where)
        return where, f"{said}, {time.monotonic() - began:.1f} s"

    outcomes = fleet.each(one)
    failed = unanswered(outcomes)
    rows = [(name, *replies(outcomes).get(name, ("—", f"FAILED: {failed.get(name)}"))) for name in outcomes]
    print(format_table(("host", "directory", f"of {len(names)} files"), rows), flush=True)
    return code_for(failed)


def push_files(fleet: Fleet, origin: Origin, targets: Mapping[str, str]) -> int:
    """Pass files down a chain of hosts, each into its directory; prints rates and each host's result."""
    source, began = _source_of(origin), time.monotonic()
    with show_progress() as progress:
        result = pass_down(fleet, origin, source, targets, progress)
    ends = dict.fromkeys(targets, "every file verified")
    size = sum(n_bytes for _, n_bytes in source.files) if source else 0
    return _report(targets, ends, result, size, time.monotonic() - began)


def push_parts(fleet: Fleet, origin: Origin, targets: Mapping[str, str], parallel: Parallel) -> int:
    """Send each host what its ranks own, all at once; prints each host's result. ``parallel``: how the run will split the model.

    Raises:
        UserError: Two hosts share a directory: they would need all weights in it.
    """
    parts, began = owned_parts(fleet, parallel), time.monotonic()
    ends = {name: f"{parts[name].name}: every file verified" for name in targets}
    has_whole = fleet.each(lambda name: _has_whole(fleet, name, targets[name]), targets)
    ends |= {name: "all weights are there" for name, answer in has_whole.items() if answer is True}
    lacking = {name: to for name, to in targets.items() if has_whole[name] is not True}
    origins = {name: dataclasses.replace(origin, part=parts[name]) for name in lacking}
    sources = {name: _source_of(each) for name, each in origins.items()}
    with show_progress() as progress:
        _refuse_shared(Chain(fleet, origin, None, lacking, progress), lacking)

        def send(name: str) -> PushResult:
            return pass_down(fleet, origins[name], sources[name], {name: lacking[name]}, progress)

        result = PushResult.joined(_all_at_once(send, list(lacking)))
    size = sum(n_bytes for source in sources.values() if source for _, n_bytes in source.files)
    return _report(targets, ends, result, size, time.monotonic() - began)


def _all_at_once(send: Callable[[str], PushResult], names: Sequence[str]) -> list[PushResult]:
    """Send to several hosts at the same time, in threads of its own: the fleet's serve the chains."""
    pool = concurrent.futures.ThreadPoolExecutor(AT_ONCE, "part")
    try:
        return [each.result() for each in [pool.submit(send, name) for name in names]]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _refuse_shared(chain: Chain, lacking: Mapping[str, str]) -> None:
    """Refuse to send different rows into one directory."""
    for name, first in chain.shared().items():
        where = f"{name} and {first} share {lacking[name]}"
        raise UserError(f"--shards: {where}; push all weights there, for both, without --shards")


def _has_whole(fleet: Fleet, name: str, to: str) -> bool:
    """Whether a directory on a host has the index of a whole checkpoint: it would be loaded, and not a part."""
    files = [f"{shell_path(to)}/{file}" for file in (INDEX, SINGLE)]
    return fleet.connection(name).run(f"test -e {files[0]} || test -e {files[1]}", "", READY_S).code == 0


def owned_parts(fleet: Fleet, parallel: Parallel) -> dict[str, Part]:
    """Return which ranks a run on all of these hosts has on each."""
    unknown = [name for name, host in fleet.hosts.items() if not host.slots]
    asked = fleet.each(lambda name: fleet.connection(name).run(COUNT_GPUS, "", READY_S).out, unknown)
    if faults := unanswered(asked):
        raise RunError(fault_list(faults, len(fleet.hosts), ", and its line has no slots=. Nothing was sent"))
    slots = [host.slots or int(str(asked[name]).strip() or 0) or 1 for name, host in fleet.hosts.items()]
    axes, chunks = Axes.of(parallel, sum(slots), max(slots)), parallel.chunks
    parts = [Part(first, first + n - 1, axes, chunks) for first, n in zip(first_ranks(slots), slots, strict=True)]
    return dict(zip(fleet.hosts, parts, strict=True))


def _report(targets: Mapping[str, str], ends: dict[str, str], result: PushResult, n_bytes: int, took_s: float) -> int:
    ends |= {name: f"the same directory as on {first}" for name, first in result.same.items()}
    ends |= {name: f"FAILED: {why}" for name, why in result.faults.items()}
    print(
        format_table(("host", "directory", "now"), [(name, to, ends[name]) for name, to in targets.items()]), flush=True
    )
    size = given("{:.2f} GB, ", n_bytes / 1e9)
    again = "; run the same command again to continue where it stopped" if set(result.faults) - result.dead else ""
    print(f"{len(targets) - len(result.faults)} of {len(targets)} hosts: {size}{took_s:.1f} s{again}")
    return code_for(result.faults)


def pass_down(
    fleet: Fleet, origin: Origin, source: FileSource | None, targets: Mapping[str, str], progress: PushProgress
) -> PushResult:
    """Try chains, each without the hosts that broke the previous one."""
    result = PushResult({}, {}, set())
    left = dict(targets)
    for _ in range(PASSES):
        chain = Chain(fleet, origin, source, left, progress)
        found = chain.run()
        faults = {name: why for name, why in result.faults.items() if name in result.dead} | found
        same = {name: first for name, first in result.same.items() if name not in left} | chain.same
        result = PushResult(faults, same, result.dead | chain.dead)
        left = {name: to for name, to in left.items() if name in found.keys() - result.dead}
        if not left:
            break
    return result


def _source_of(origin: Origin) -> FileSource | None:
    """What this machine sends; None if a host does."""
    if origin.host:
        return None
    source = open_files(Path(origin.path), origin.part)
    if not source.files:
        raise UserError(f"{origin.path}: contains no files; name a checkpoint directory")
    return source
