"""Bring the weights of a checkpoint together on one host, when the hosts have its parts on their own disks."""

import dataclasses
import shlex
from collections.abc import Mapping, Sequence

from llama405b.contract.errors import RunError, UserError
from llama405b.contract.phrases import and_more, counted
from llama405b_tools.deliver.chain import Origin
from llama405b_tools.deliver.progress import show_progress
from llama405b_tools.deliver.push_files import pass_down
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.outcomes import replies, unanswered
from llama405b_tools.remote.messages.transfer import PartsReply, PartsRequest
from llama405b_tools.run.host_checks import fault_list
from llama405b_tools.text.fold import fold_names

ASK_S = 60.0
FOR_EXPORT = "for-export"  # below the directory of checkpoints

Places = dict[str, tuple[str, str]]  # by file: a host that has it, and the directory there
Save = tuple[int, str]  # a step, and the digest of its manifest


@dataclasses.dataclass(frozen=True, slots=True)
class Collected:
    """A checkpoint's weights on one host."""

    host: str
    path: str


def collect(fleet: Fleet, run: str, step: int | None) -> Collected:
    """Bring the newest step (or this one) of which everything is on some host to the first host that has any of it.

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
    """Return the newest step of which the hosts have everything (or this one), where its files are, and what the user should know.

    A host that has several is preferred in the order of ``on_hosts``.
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
            f"{run}: step {chosen[0]} was saved twice, and {there[0]} and {there[1]} have different ones; leave out the hosts "
            f"whose save is the older, or delete it there (step-{chosen[0]:08d} below {next(iter(on_hosts.values())).root})"
        )
    note = f"{_lacks(run, newest, missing[newest])}; taking step {chosen[0]}" if chosen[0] < newest[0] else ""
    return chosen[0], places[chosen], note


def _files_of_saves(on_hosts: Mapping[str, PartsReply]) -> tuple[dict[Save, Places], dict[Save, set[str]]]:
    """Return where the files of each save are, and which files make it whole."""
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
    """Link what the head has itself into the directory: a run that goes on may delete a step meanwhile."""
    lines = [f"mkdir -p {shlex.quote(f'{path}/model')}"]
    for name, (host, there) in places.items():
        if host == head:
            lines.append(f"ln -f {shlex.quote(f'{there}/{name}')} {shlex.quote(f'{path}/{name}')}")
    done = fleet.connection(head).run("set -e\n" + "\n".join(lines), "", ASK_S)
    if done.code:
        raise RunError(f"{head}: {path} cannot be made ({done.err.strip()}); fix that, then export again")
