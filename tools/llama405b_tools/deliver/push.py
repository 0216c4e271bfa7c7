"""Push code (only what differs) or big files to hosts, and collect a checkpoint's files on one host.

A checkpoint is collected for an export, when the hosts have its files on their own disks.
"""

import concurrent.futures
import dataclasses
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llama405b.contract.errors import RunError, UserError, and_more, code_for, counted, given, shown_name
from llama405b.settings.axes import Axes
from llama405b.settings.schema import Parallel
from llama405b.spec.tensors import INDEX, SINGLE, Part
from llama405b_tools.agent.messages import PartsReply, PartsRequest
from llama405b_tools.agent.transfer import FileSource, open_files
from llama405b_tools.deliver.chain import READY_S, Chain, Origin, PushProgress, show_progress
from llama405b_tools.deliver.source_tree import SourceTree, push_tree
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import replies, shell_path, unanswered
from llama405b_tools.launch.placement import first_ranks
from llama405b_tools.launch.preflight import fault_list
from llama405b_tools.text.figures import format_table
from llama405b_tools.text.words import fold_names

VERIFIED = "every file verified"
MOST_NAMED = 5  # of what git ignores
PASSES = 4  # chains tried, each without the hosts that broke the previous one
AT_ONCE = 8  # parts: each takes a session on the sending host, of which sshd allows 10
COUNT_GPUS = "nvidia-smi -L 2>/dev/null | grep -c '^GPU '; true"


@dataclasses.dataclass(frozen=True, slots=True)
class PushResult:
    """The result of a push, by host."""

    faults: dict[str, str]  # why hosts lack files
    same: dict[str, str]  # which share a directory with an earlier one
    dead: set[str]  # which can never receive
    known: dict[str, int] = dataclasses.field(
        default_factory=dict
    )  # files that an earlier push verified, and nobody touched since

    @classmethod
    def joined(cls, results: Sequence["PushResult"]) -> "PushResult":
        """Merge the results of several hosts."""
        faults, same = dict[str, str](), dict[str, str]()
        for each in results:
            faults |= each.faults
            same |= each.same
        known = {name: n for each in results for name, n in each.known.items()}
        return cls(faults, same, set[str]().union(*(each.dead for each in results)), known)


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


def push_code(fleet: Fleet, tree: SourceTree, to: str = "") -> int:
    """Make every host's directory equal to the tree; prints what is not sent, and one line per host."""
    ignored = ", ".join(map(shown_name, tree.ignored[:MOST_NAMED])) + and_more(tree.ignored, MOST_NAMED)
    for note in filter(None, (*tree.notes, given("left out (ignored by git): {}", ignored))):
        print(note, flush=True)

    def one(name: str) -> tuple[str, str]:
        where, began = to or fleet.workdir(name), time.monotonic()
        said = push_tree(fleet.connection(name), tree, where)
        return where, f"{said}, {time.monotonic() - began:.1f} s"

    outcomes = fleet.each(one)
    failed = unanswered(outcomes)
    rows = [(name, *replies(outcomes).get(name, ("—", f"FAILED: {failed.get(name)}"))) for name in outcomes]
    print(format_table(("host", "directory", f"of {counted(len(tree.entries), 'file')}"), rows), flush=True)
    return code_for(failed)


def push_files(fleet: Fleet, origin: Origin, targets: Mapping[str, str]) -> int:
    """Pass files down a chain of hosts, each into its directory; prints rates and each host's result."""
    source, began = _source_of(origin), time.monotonic()
    with show_progress() as progress:
        for note in source.notes if source else ():
            progress.note("", note)
        result = pass_down(fleet, origin, source, targets, progress)
    ends = {name: VERIFIED + given(", {} of them earlier", result.known.get(name)) for name in targets}
    size = sum(n_bytes for _, n_bytes in source.files) if source else 0
    return _report(targets, ends, result, size, time.monotonic() - began)


def push_parts(fleet: Fleet, origin: Origin, targets: Mapping[str, str], parallel: Parallel) -> int:
    """Send each host its ranks' shards, to all at once; print each host's result. ``parallel``: how the run will split the model.

    Raises:
        UserError: Two hosts share a directory: they would need all weights in it.
    """
    parts, began = owned_parts(fleet, parallel), time.monotonic()
    ends = {name: f"{parts[name].name}: {VERIFIED}" for name in targets}
    has_whole = fleet.each(lambda name: _has_whole(fleet, name, targets[name]), targets)
    ends |= {name: "already has all weights" for name, answer in has_whole.items() if answer is True}
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
    """Send to several hosts at once, in separate threads: the fleet's threads serve the chains."""
    pool = concurrent.futures.ThreadPoolExecutor(AT_ONCE, "part")
    try:
        return [each.result() for each in [pool.submit(send, name) for name in names]]
    finally:
        # after Ctrl-C, do not wait for transfers that are under way
        pool.shutdown(wait=False, cancel_futures=True)


def _refuse_shared(chain: Chain, lacking: Mapping[str, str]) -> None:
    """Refuse to send different shards into one directory."""
    for name, first in chain.shared().items():
        where = f"{name} and {first} share {lacking[name]}"
        raise UserError(f"--shards: {where}; push all weights there, without --shards")


def _has_whole(fleet: Fleet, name: str, to: str) -> bool:
    """Return whether a host's directory has a full checkpoint's index: that would be loaded, not a shard."""
    files = [f"{shell_path(to)}/{file}" for file in (INDEX, SINGLE)]
    return fleet.connection(name).run(f"test -e {files[0]} || test -e {files[1]}", "", READY_S).code == 0


def owned_parts(fleet: Fleet, parallel: Parallel) -> dict[str, Part]:
    """Return the ranks that a run on all of these hosts has on each."""
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
        result = PushResult(faults, same, result.dead | chain.dead, result.known | chain.known)
        left = {name: to for name, to in left.items() if name in found.keys() - result.dead}
        if not left:
            break
    return result


def _source_of(origin: Origin) -> FileSource | None:
    """Open what this machine sends; None if a host sends."""
    if origin.host:
        return None
    source = open_files(Path(origin.path), origin.part)
    if not source.files:
        raise UserError(f"{origin.path}: contains no files; name a checkpoint directory")
    return source


ASK_S = 60.0
COPY_S = 4 * 3600.0  # where links are refused, of terabytes
FOR_EXPORT = "for-export"  # below the directory of checkpoints

Places = dict[str, tuple[str, str]]  # by file: a host that has it, and the directory there
Save = tuple[int, str]  # a step, and the digest of its manifest


@dataclasses.dataclass(frozen=True, slots=True)
class Collected:
    """A checkpoint's weights on one host."""

    host: str
    path: str


def collect(fleet: Fleet, run: str, step: int | None) -> Collected:
    """Collect the newest complete step (or this one) on the first host that has any of it.

    Raises:
        UserError: No host has a checkpoint of the run, or none is there as a whole.
        RunError: A host does not send; the same command resumes.
    """
    outcomes = fleet.ask_all("parts", dict.fromkeys(fleet.hosts, PartsRequest(run)), PartsReply, ASK_S)
    if silent := unanswered(outcomes):
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
    path = f"{on_hosts[head].root}/{FOR_EXPORT}/step-{step:08d}"
    _link(fleet, head, path, places)
    sources: dict[tuple[str, str], list[str]] = {}
    for name, place in places.items():
        sources.setdefault(place, []).append(name)
    with show_progress() as progress:
        for (host, there), names in sources.items():
            if host == head:
                continue
            print(f"step {step}: {counted(len(names), 'file')} from {host}", flush=True)
            result = pass_down(fleet, Origin(host, there, names=tuple(names)), None, {head: path}, progress)
            if result.faults:
                raise RunError(f"{host}: {result.faults[head]}; run the same command to resume")
    return Collected(head, path)


def choose_step(on_hosts: Mapping[str, PartsReply], run: str, step: int | None) -> tuple[int, Places, str]:
    """Return the newest complete step (or this one), where its files are, and a note for the user.

    Of several hosts with a file, the first in ``on_hosts`` is chosen.
    """
    places, needed = _files_of_saves(on_hosts)
    wanted = sorted(save for save in needed if step in (None, save[0]))
    if not wanted:
        steps = ", ".join(map(str, sorted({number for number, _ in needed})))
        raise UserError(f"--step: these hosts have no step {step} of {run}; choose from {steps}")
    missing = {save: sorted(needed[save] - places[save].keys()) for save in wanted}
    newest, whole = wanted[-1], [save for save in wanted if not missing[save]]
    if not whole:
        raise UserError(f"{_lacks(run, newest, missing[newest])}; add the host that has them")
    chosen = whole[-1]
    if others := [save for save in whole if save[0] == chosen[0] and save != chosen]:
        there = [fold_names(sorted({host for host, _ in places[save].values()})) for save in (chosen, others[0])]
        raise UserError(
            f"{run}: step {chosen[0]} was saved twice, and {there[0]} and {there[1]} have different saves; omit the hosts "
            f"with the older save, or delete it there (step-{chosen[0]:08d} below {next(iter(on_hosts.values())).root})"
        )
    note = f"{_lacks(run, newest, missing[newest])}; taking step {chosen[0]}" if chosen[0] < newest[0] else ""
    return chosen[0], places[chosen], note


def _files_of_saves(on_hosts: Mapping[str, PartsReply]) -> tuple[dict[Save, Places], dict[Save, set[str]]]:
    """Return where the files of each save are, and which files make it complete."""
    places: dict[Save, Places] = {}
    needed: dict[Save, set[str]] = {}
    for host, part in [(host, part) for host, reply in on_hosts.items() for part in reply.parts]:
        save = part.step, part.digest
        needed.setdefault(save, set()).update(part.needed)
        for name in part.here:
            places.setdefault(save, {}).setdefault(name, (host, part.path))
    return places, needed


def _lacks(run: str, save: Save, missing: Sequence[str]) -> str:
    return f"{run}: step {save[0]} lacks {missing[0]}{and_more(missing)} on these hosts"


def _link(fleet: Fleet, head: str, path: str, places: Places) -> None:
    """Link the head's own files into the directory, or copy them: a continuing run may delete the originals."""
    lines = [f"mkdir -p {shlex.quote(f'{path}/model')}"]
    for name, (host, there) in places.items():
        if host == head:
            both = f"{shlex.quote(f'{there}/{name}')} {shlex.quote(f'{path}/{name}')}"
            lines.append(f"{{ ln -f {both} 2>/dev/null || cp -f {both}; }}")
    done = fleet.connection(head).run(" && ".join(lines), "", COPY_S)
    if done.code:
        raise RunError(f"{head}: {path} cannot be made ({done.err.strip()}); fix that, then export again")
