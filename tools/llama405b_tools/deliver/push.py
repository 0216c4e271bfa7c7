"""Push code (only what differs) or big files to hosts, and collect a checkpoint's files on one host.

A checkpoint is collected for an export, when the hosts have its files on their own disks.
"""

import concurrent.futures
import dataclasses
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llama405b.contract.errors import RunError, UserError, and_more, exit_code_for, fmt_if, pluralize, printable_name
from llama405b.settings.axes import Axes
from llama405b.settings.schema import Parallel
from llama405b.spec.tensors import INDEX_FILE, SINGLE_FILE, HostShard
from llama405b_tools.agent import describe
from llama405b_tools.agent.messages import PartsReply
from llama405b_tools.agent.transfer import FileSource, open_files
from llama405b_tools.deliver.chain import READY_S, Chain, Origin, PushProgress, show_progress
from llama405b_tools.deliver.source_tree import SourceTree, push_tree
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import failure_texts, replies, shell_path
from llama405b_tools.launch.placement import first_ranks
from llama405b_tools.launch.preflight import fault_list
from llama405b_tools.text.figures import format_columns
from llama405b_tools.text.words import fold_names

VERIFIED = "every file verified"
MAX_NAMED = 5  # of what git ignores
MAX_CHAINS = 4  # chains tried, each without the hosts that broke the previous one
MAX_PARALLEL = 8  # parts: each takes a session on the sending host, of which sshd allows 10
COUNT_GPUS = "nvidia-smi -L 2>/dev/null | grep -c '^GPU '; true"


@dataclasses.dataclass(frozen=True, slots=True)
class PushResult:
    """The result of a push, by host."""

    faults: dict[str, str]  # why hosts lack files
    same_directory: dict[str, str]  # which share a directory with an earlier one
    unusable: set[str]  # which can never receive
    n_already_verified: dict[str, int] = dataclasses.field(
        default_factory=dict
    )  # files that an earlier push verified, and nobody touched since

    @classmethod
    def merge(cls, results: Sequence["PushResult"]) -> "PushResult":
        """Merge the results of several hosts."""
        faults, same_directory = dict[str, str](), dict[str, str]()
        for result in results:
            faults |= result.faults
            same_directory |= result.same_directory
        n_already_verified = {name: n for result in results for name, n in result.n_already_verified.items()}
        return cls(
            faults, same_directory, set[str]().union(*(result.unusable for result in results)), n_already_verified
        )


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


def check_origin(fleet: Fleet, origin: Origin) -> None:
    """Check that the sending host has something to send.

    Raises:
        UserError: It has nothing.
    """
    path = shell_path(origin.path)
    command = f"cd {shell_path(fleet.workdir(origin.host))} && find -L {path} -type f | head -1 | grep -q ."
    if fleet.connection(origin.host).run(command, "", READY_S).code:
        raise UserError(f"{origin.host}:{origin.path}: contains no files; name a file or directory on that host")


def target_path(origin: Origin, fleet: Fleet, name: str) -> str:
    """Return the same path on a host; a relative one is below the working directory."""
    path = Path(origin.path)
    if not origin.host and path.is_file():
        path = path.parent
    if path.is_absolute() or str(path).startswith("~/"):
        return str(path)
    return f"{fleet.workdir(name)}/{path}"


def push_code(fleet: Fleet, tree: SourceTree, to: str = "") -> int:
    """Make every host's directory equal to the tree; prints what is not sent, and one line per host."""
    ignored = ", ".join(map(printable_name, tree.ignored[:MAX_NAMED])) + and_more(tree.ignored, MAX_NAMED)
    for note in filter(None, (*tree.notes, fmt_if("left out (ignored by git): {}", ignored))):
        print(note, flush=True)

    def push_to(name: str) -> tuple[str, str]:
        directory, start_s = to or fleet.workdir(name), time.monotonic()
        summary = push_tree(fleet.connection(name), tree, directory)
        return directory, f"{summary}, {time.monotonic() - start_s:.1f} s"

    outcomes = fleet.call_each(push_to)
    failed = failure_texts(outcomes)
    rows = [(name, *replies(outcomes).get(name, ("—", f"FAILED: {failed.get(name)}"))) for name in outcomes]
    print(format_columns(("host", "directory", f"of {pluralize(len(tree.entries), 'file')}"), rows), flush=True)
    return exit_code_for(failed)


def push_files(fleet: Fleet, origin: Origin, targets: Mapping[str, str]) -> int:
    """Pass files down a chain of hosts, each into its directory; prints rates and each host's result."""
    source, start_s = _open_source(origin), time.monotonic()
    with show_progress() as progress:
        for note in source.notes if source else ():
            progress.note("", note)
        result = pass_down(fleet, origin, source, targets, progress)
    states = {name: VERIFIED + fmt_if(", {} of them earlier", result.n_already_verified.get(name)) for name in targets}
    size = sum(n_bytes for _, n_bytes in source.files) if source else 0
    return _print_report(targets, states, result, size, time.monotonic() - start_s)


def push_parts(fleet: Fleet, origin: Origin, targets: Mapping[str, str], parallel: Parallel) -> int:
    """Send each host its ranks' shards, to all at once; print each host's result. ``parallel``: how the run will split the model.

    Raises:
        UserError: Two hosts share a directory: they would need all weights in it.
    """
    parts, start_s = owned_parts(fleet, parallel), time.monotonic()
    states = {name: f"{parts[name].name}: {VERIFIED}" for name in targets}
    has_all = fleet.call_each(lambda name: _has_full_checkpoint(fleet, name, targets[name]), targets)
    states |= {name: "already has all weights" for name, answer in has_all.items() if answer is True}
    receivers = {name: to for name, to in targets.items() if has_all[name] is not True}
    origins = {name: dataclasses.replace(origin, part=parts[name]) for name in receivers}
    sources = {name: _open_source(host_origin) for name, host_origin in origins.items()}
    with show_progress() as progress:
        _refuse_shared(Chain(fleet, origin, None, receivers, progress), receivers)

        def send(name: str) -> PushResult:
            return pass_down(fleet, origins[name], sources[name], {name: receivers[name]}, progress)

        result = PushResult.merge(_send_in_parallel(send, list(receivers)))
    size = sum(n_bytes for source in sources.values() if source for _, n_bytes in source.files)
    return _print_report(targets, states, result, size, time.monotonic() - start_s)


def _send_in_parallel(send: Callable[[str], PushResult], names: Sequence[str]) -> list[PushResult]:
    """Send to several hosts at once, in separate threads: the fleet's threads serve the chains."""
    pool = concurrent.futures.ThreadPoolExecutor(MAX_PARALLEL, "part")
    try:
        return [future.result() for future in [pool.submit(send, name) for name in names]]
    finally:
        # after Ctrl-C, do not wait for transfers that are under way
        pool.shutdown(wait=False, cancel_futures=True)


def _refuse_shared(chain: Chain, receivers: Mapping[str, str]) -> None:
    """Refuse to send different shards into one directory."""
    for name, first in chain.find_shared_directories().items():
        clash = f"{name} and {first} share {receivers[name]}"
        raise UserError(f"--shards: {clash}; push all weights there, without --shards")


def _has_full_checkpoint(fleet: Fleet, name: str, to: str) -> bool:
    """Return whether a host's directory has a full checkpoint's index: that would be loaded, not a shard."""
    files = [f"{shell_path(to)}/{file}" for file in (INDEX_FILE, SINGLE_FILE)]
    return fleet.connection(name).run(f"test -e {files[0]} || test -e {files[1]}", "", READY_S).code == 0


def owned_parts(fleet: Fleet, parallel: Parallel) -> dict[str, HostShard]:
    """Return the ranks that a run on all of these hosts has on each."""
    unknown = [name for name, host in fleet.hosts.items() if not host.slots]
    gpu_counts = fleet.call_each(lambda name: fleet.connection(name).run(COUNT_GPUS, "", READY_S).out, unknown)
    if faults := failure_texts(gpu_counts):
        raise RunError(fault_list(faults, len(fleet.hosts), ", and its line has no slots=. Nothing was sent"))
    slots = [host.slots or int(str(gpu_counts[name]).strip() or 0) or 1 for name, host in fleet.hosts.items()]
    axes, chunks = Axes.from_parallel(parallel, sum(slots), max(slots)), parallel.virtual_stages
    parts = [HostShard(first, first + n - 1, axes, chunks) for first, n in zip(first_ranks(slots), slots, strict=True)]
    return dict(zip(fleet.hosts, parts, strict=True))


def _print_report(
    targets: Mapping[str, str], states: dict[str, str], result: PushResult, n_bytes: int, elapsed_s: float
) -> int:
    states |= {name: f"the same directory as on {first}" for name, first in result.same_directory.items()}
    states |= {name: f"FAILED: {why}" for name, why in result.faults.items()}
    print(
        format_columns(("host", "directory", "now"), [(name, to, states[name]) for name, to in targets.items()]),
        flush=True,
    )
    size = fmt_if("{:.2f} GB, ", n_bytes / 1e9)
    hint = "; run the same command again to continue where it stopped" if set(result.faults) - result.unusable else ""
    print(f"{len(targets) - len(result.faults)} of {len(targets)} hosts: {size}{elapsed_s:.1f} s{hint}")
    return exit_code_for(result.faults)


def pass_down(
    fleet: Fleet, origin: Origin, source: FileSource | None, targets: Mapping[str, str], progress: PushProgress
) -> PushResult:
    """Try chains, each without the hosts that broke the previous one."""
    result = PushResult({}, {}, set())
    remaining = dict(targets)
    for _ in range(MAX_CHAINS):
        chain = Chain(fleet, origin, source, remaining, progress)
        chain_faults = chain.run()
        faults = {name: why for name, why in result.faults.items() if name in result.unusable} | chain_faults
        same_directory = {
            name: first for name, first in result.same_directory.items() if name not in remaining
        } | chain.same_directory
        result = PushResult(
            faults,
            same_directory,
            result.unusable | chain.unusable,
            result.n_already_verified | chain.n_already_verified,
        )
        remaining = {name: to for name, to in remaining.items() if name in chain_faults.keys() - result.unusable}
        if not remaining:
            break
    return result


def _open_source(origin: Origin) -> FileSource | None:
    """Open what this machine sends; None if a host sends."""
    if origin.host:
        return None
    source = open_files(Path(origin.path), origin.part)
    if not source.files:
        raise UserError(f"{origin.path}: contains no files; name a checkpoint directory")
    return source


PARTS_TIMEOUT_S = 60.0
COPY_TIMEOUT_S = 4 * 3600.0  # where links are refused, of terabytes
EXPORT_DIRECTORY = "for-export"  # below the directory of checkpoints

FileLocations = dict[str, tuple[str, str]]  # by file: a host that has it, and the directory there
SavedStep = tuple[int, str]  # a step, and the digest of its manifest


@dataclasses.dataclass(frozen=True, slots=True)
class CollectedCheckpoint:
    """A checkpoint's weights on one host."""

    host: str
    path: str


def collect(fleet: Fleet, run: str, step: int | None) -> CollectedCheckpoint:
    """Collect the newest complete step (or this one) on the first host that has any of it.

    Raises:
        UserError: No host has a checkpoint of the run, or none is there as a whole.
        RunError: A host does not send; the same command resumes.
    """
    outcomes = fleet.call_all(describe.parts, PARTS_TIMEOUT_S, run)
    if silent := failure_texts(outcomes):
        print(fault_list(silent, len(fleet.hosts), ""), flush=True)
    on_hosts = {name: reply for name, reply in replies(outcomes).items() if reply.parts}
    if not on_hosts:
        raise UserError(
            f"{run}: none of these hosts has a checkpoint of it; `{fleet.command_to_type('status')}` lists their runs"
        )
    step, places, note = choose_step(on_hosts, run, step)
    if note:
        print(f"note: {note}", flush=True)
    head = next(iter(on_hosts))
    path = f"{on_hosts[head].root}/{EXPORT_DIRECTORY}/step-{step:08d}"
    _link_files(fleet, head, path, places)
    sources: dict[tuple[str, str], list[str]] = {}
    for name, place in places.items():
        sources.setdefault(place, []).append(name)
    with show_progress() as progress:
        for (host, directory), names in sources.items():
            if host == head:
                continue
            print(f"step {step}: {pluralize(len(names), 'file')} from {host}", flush=True)
            result = pass_down(fleet, Origin(host, directory, names=tuple(names)), None, {head: path}, progress)
            if result.faults:
                raise RunError(f"{host}: {result.faults[head]}; run the same command to resume")
    return CollectedCheckpoint(head, path)


def choose_step(on_hosts: Mapping[str, PartsReply], run: str, step: int | None) -> tuple[int, FileLocations, str]:
    """Return the newest complete step (or this one), where its files are, and a note for the user.

    Of several hosts with a file, the first in ``on_hosts`` is chosen.
    """
    places, needed = _locate_files(on_hosts)
    candidates = sorted(save for save in needed if step in (None, save[0]))
    if not candidates:
        steps = ", ".join(map(str, sorted({number for number, _ in needed})))
        raise UserError(f"--step: these hosts have no step {step} of {run}; choose from {steps}")
    missing = {save: sorted(needed[save] - places[save].keys()) for save in candidates}
    latest, complete = candidates[-1], [save for save in candidates if not missing[save]]
    if not complete:
        raise UserError(f"{_missing_words(run, latest, missing[latest])}; add the host that has them")
    chosen = complete[-1]
    if others := [save for save in complete if save[0] == chosen[0] and save != chosen]:
        host_lists = [fold_names(sorted({host for host, _ in places[save].values()})) for save in (chosen, others[0])]
        raise UserError(
            f"{run}: step {chosen[0]} was saved twice, and {host_lists[0]} and {host_lists[1]} have different saves; omit the hosts "
            f"with the older save, or delete it there (step-{chosen[0]:08d} below {next(iter(on_hosts.values())).root})"
        )
    note = f"{_missing_words(run, latest, missing[latest])}; taking step {chosen[0]}" if chosen[0] < latest[0] else ""
    return chosen[0], places[chosen], note


def _locate_files(
    on_hosts: Mapping[str, PartsReply],
) -> tuple[dict[SavedStep, FileLocations], dict[SavedStep, set[str]]]:
    """Return where the files of each save are, and which files make it complete."""
    places: dict[SavedStep, FileLocations] = {}
    needed: dict[SavedStep, set[str]] = {}
    for host, part in [(host, part) for host, reply in on_hosts.items() for part in reply.parts]:
        save = part.step, part.digest
        needed.setdefault(save, set()).update(part.needed)
        for name in part.here:
            places.setdefault(save, {}).setdefault(name, (host, part.path))
    return places, needed


def _missing_words(run: str, save: SavedStep, missing: Sequence[str]) -> str:
    return f"{run}: step {save[0]} lacks {missing[0]}{and_more(missing)} on these hosts"


def _link_files(fleet: Fleet, head: str, path: str, places: FileLocations) -> None:
    """Link the head's own files into the directory, or copy them: a continuing run may delete the originals."""
    lines = [f"mkdir -p {shlex.quote(f'{path}/model')}"]
    for name, (host, directory) in places.items():
        if host == head:
            arguments = f"{shlex.quote(f'{directory}/{name}')} {shlex.quote(f'{path}/{name}')}"
            lines.append(f"{{ ln -f {arguments} 2>/dev/null || cp -f {arguments}; }}")
    result = fleet.connection(head).run(" && ".join(lines), "", COPY_TIMEOUT_S)
    if result.code:
        raise RunError(f"{head}: {path} cannot be made ({result.err.strip()}); fix that, then export again")
