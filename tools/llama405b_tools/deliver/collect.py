"""Bring the weights of a checkpoint together on one host, when the hosts have its parts on their own disks."""

import dataclasses
import shlex
from collections.abc import Mapping

from llama405b.contract.errors import RunError, UserError
from llama405b.contract.phrases import and_more, counted
from llama405b_tools.deliver.chain import Origin
from llama405b_tools.deliver.progress import show_progress
from llama405b_tools.deliver.push import pass_down
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.outcomes import replies, unanswered
from llama405b_tools.remote.messages.pieces import Pieces, PiecesRequest
from llama405b_tools.run.preflight import fault_list

ASK_S = 60.0
FOR_EXPORT = "for-export"  # below the directory of checkpoints

Places = dict[str, tuple[str, str]]  # by file: a host that has it, and the directory there


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
    outcomes = fleet.ask_all("pieces", dict.fromkeys(fleet.hosts, PiecesRequest(run)), Pieces, ASK_S)
    if silent := unanswered(outcomes):
        print(fault_list(silent, len(fleet.hosts), ""), flush=True)
    found = {name: pieces for name, pieces in replies(outcomes).items() if pieces.found}
    if not found:
        raise UserError(
            f"{run}: none of these hosts has a checkpoint of it; `{fleet.typed('status')}` lists their runs"
        )
    step, places = choose(found, run, step)
    head = next(iter(found))
    path = f"{found[head].root}/{FOR_EXPORT}/step-{step:08d}"
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


def choose(found: Mapping[str, Pieces], run: str, step: int | None) -> tuple[int, Places]:
    """Return the newest step of which the hosts have everything (or this one), and where its files are, preferably on the first.

    Raises:
        UserError: There is none.
    """
    places: dict[tuple[int, str], Places] = {}  # by step and the manifest's digest
    needed: dict[tuple[int, str], set[str]] = {}
    for host, pieces in found.items():
        for piece in pieces.found:
            key = piece.step, piece.digest
            needed.setdefault(key, set()).update(piece.needed)
            for name in piece.here:
                places.setdefault(key, {}).setdefault(name, (host, piece.path))
    wanted = sorted(key for key in needed if step in (None, key[0]))
    if not wanted:
        steps = ", ".join(map(str, sorted({number for number, _ in needed})))
        raise UserError(f"--step: these hosts have no step {step} of {run}; choose from {steps}")
    whole = [key for key in wanted if needed[key] <= places.get(key, {}).keys()]
    if not whole:
        lacking = sorted(needed[wanted[-1]] - places.get(wanted[-1], {}).keys())
        raise UserError(
            f"{run}: step {wanted[-1][0]} lacks {lacking[0]}{and_more(lacking)} on these hosts; add the host that has them"
        )
    return whole[-1][0], places[whole[-1]]


def _link(fleet: Fleet, head: str, path: str, places: Places) -> None:
    """Link what the head has itself into the directory: a run that goes on may delete a step meanwhile."""
    lines = [f"mkdir -p {shlex.quote(f'{path}/model')}"]
    for name, (host, there) in places.items():
        if host == head:
            lines.append(f"ln -f {shlex.quote(f'{there}/{name}')} {shlex.quote(f'{path}/{name}')}")
    done = fleet.connection(head).run("set -e\n" + "\n".join(lines), "", ASK_S)
    if done.code:
        raise RunError(f"{head}: {path} cannot be made ({done.err.strip()}); free up space there")
