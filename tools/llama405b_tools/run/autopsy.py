"""Ask all hosts of a run at once what its ranks are doing, say who holds it up, and keep what was seen."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

from llama405b.contract import reader
from llama405b.contract.causes import CauseKind
from llama405b.contract.files import read_record, write_atomic
from llama405b.contract.paths import RunDir
from llama405b.contract.phrases import counted, given, short
from llama405b.contract.plan import Plan
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.outcomes import replies, unanswered
from llama405b_tools.machine.program_output import load_per_core
from llama405b_tools.remote.messages.autopsy import EvidenceRequest, HostEvidence, RankEvidence
from llama405b_tools.run.diagnose import Diagnosis, diagnose, frame_words, group_words
from llama405b_tools.run.judge import HANG_AFTER_S, Failure
from llama405b_tools.run.screen import show
from llama405b_tools.text.clean import clean
from llama405b_tools.text.figures import amount, span
from llama405b_tools.text.fold import fold_ranks

ANSWER_S, MOST_ANSWER_S = 9.0, 60.0  # for a host to answer, times its load per core
LOAD = "cat /proc/loadavg; grep -c ^processor /proc/cpuinfo"
SHOWN_GROUPS = 12
REPORT = "report.txt"  # written last
FINDING = 240  # characters in an incident


@dataclasses.dataclass(frozen=True, slots=True)
class Autopsy:
    """What the hosts saw, and what it means."""

    run: str
    attempt: int
    hosts: dict[str, HostEvidence]
    lost: dict[str, str]  # hosts that did not answer, and why
    diagnosis: Diagnosis
    took_s: float

    @property
    def line(self) -> str:
        """The finding in one line."""
        return clean(f"{self.diagnosis.verdict.upper()}  {self.diagnosis.words}")

    def report(self) -> list[str]:
        """What a person reads."""
        found, ranks = self.diagnosis, [rank for host in self.hosts.values() for rank in host.ranks]
        lines = [
            f"run {self.run}, attempt {self.attempt}: {counted(len(ranks), 'rank')} on {counted(len(self.hosts), 'host')}, "
            f"seen in {self.took_s:.1f} s",
            self.line,
        ]
        lines += [f"  {line}" for line in (found.culprit.evidence if found.culprit else ())]
        lines += ["where the ranks are"]
        lines += [f"  {fold_ranks(group.ranks)}: {group_words(group)}" for group in found.groups[:SHOWN_GROUPS]]
        if len(found.groups) > SHOWN_GROUPS:
            lines.append(f"  and {counted(len(found.groups) - SHOWN_GROUPS, 'more place', 'more places')}")
        lines += [f"{name} did not answer: {why}" for name, why in self.lost.items()]
        lines += [
            f"{name}: NCCL's flight recorder wrote {path}"
            for name, host in self.hosts.items()
            for path in host.around.flight_records
        ]
        return [clean(line) for line in lines]


def take_autopsy(fleet: Fleet, plan: Plan, hang_after_s: float = HANG_AFTER_S) -> Autopsy:
    """Look at every rank of a run; hosts that do not answer are named."""
    began = time.monotonic()
    requests = {node.name: EvidenceRequest(plan.run, node.name) for node in plan.nodes if node.name in fleet.hosts}

    def look(name: str) -> HostEvidence:
        load = load_per_core(fleet.connection(name).run(LOAD, "", ANSWER_S).out)
        wait_s = min(MOST_ANSWER_S, ANSWER_S * max(1.0, load))
        return fleet.ask(name, "evidence", requests[name], HostEvidence, wait_s)

    outcomes = fleet.each(look, requests)
    hosts, lost = replies(outcomes), unanswered(outcomes)
    return Autopsy(plan.run, plan.attempt, hosts, lost, diagnose(hosts, lost, hang_after_s), time.monotonic() - began)


def keep_autopsy(autopsy: Autopsy) -> Path | None:
    """Write all that was seen below the run's directory here; returns where, or None if it cannot be written."""
    place = RunDir.here(autopsy.run).autopsies / time.strftime("%Y%m%d-%H%M%S")
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True, mode=0o700)  # it has lines of logs
        lines = [line for host in autopsy.hosts.values() for rank in host.ranks for line in _rank_lines(host, rank)]
        write_atomic(place / "stacks.txt", "\n".join([*lines, ""]))
        for name, host in autopsy.hosts.items():
            write_atomic(place / f"{name}.json", reader.dumps(host) + "\n")
            if host.around.nccl:
                write_atomic(place / f"{name}.nccl-ras.txt", host.around.nccl)
        write_atomic(place / REPORT, "\n".join([*autopsy.report(), ""]))
        return place
    return None


def examined(fleet: Fleet, plan: Plan, failure: Failure, hang_after_s: float) -> Failure:
    """Take and keep an autopsy of an attempt that is about to be ended; returns its failure, of a hang with the culprit that was found.

    ``hang_after_s``: the limit of who ends it.

    Whatever goes wrong with it, the failure is what it was: a run waits to be brought back.
    """
    try:
        autopsy = take_autopsy(fleet, plan, hang_after_s)
        place = keep_autopsy(autopsy)
    except Exception as error:  # noqa: BLE001
        show(f"autopsy: none, {type(error).__name__}: {error}")
        return failure
    show(f"autopsy: {autopsy.line}{given('; all of it in {}', str(place or ''))}")
    culprit = autopsy.diagnosis.culprit
    if failure.cause.kind is not CauseKind.HUNG or culprit is None or not culprit.hosts:
        return failure
    host, rank = culprit.hosts[0], next(iter(culprit.ranks), failure.cause.rank)
    finding, ranks = short(culprit.words, FINDING), autopsy.hosts[host].ranks if host in autopsy.hosts else ()
    gpu = next((each.beat.gpu for each in ranks if each.rank == rank and each.beat), "")
    cause = dataclasses.replace(failure.cause, host=host, rank=rank, finding=finding, gpu=gpu)
    return dataclasses.replace(failure, host=host, cause=cause)


def last_stacks(run: str) -> tuple[str, dict[int, list[str]]]:
    """Return when the last autopsy was taken that is kept here, and the lines about each rank; "" and none if there is none."""
    kept = [path for path in sorted(RunDir.here(run).autopsies.glob("*")) if (path / REPORT).exists()]
    if not kept:
        return "", {}
    hosts = [host for path in kept[-1].glob("*.json") if (host := read_record(HostEvidence, path))]
    found = {rank.rank: [clean(line) for line in _rank_lines(host, rank)] for host in hosts for rank in host.ranks}
    return kept[-1].name, found


def _rank_lines(host: HostEvidence, rank: RankEvidence) -> Iterator[str]:
    """Yield all that was seen of a rank."""
    doing, calls = rank.doing, rank.waits_in or "no system call"
    yield (
        f"rank {rank.rank} on {host.host}: process {rank.pid}, state {rank.state or 'none'}, in {calls}"
        f" ({rank.kernel_wait or 'not in the kernel'}); in {span(host.window_s)}: {doing.cpu_s:.2f} s of CPU, "
        f"{doing.waited_s:.2f} s waiting for one, {amount(doing.moved_bytes)}B moved, {doing.major_faults} page faults"
    )
    yield f"  stacks by {rank.source}" if rank.source else f"  no stacks: {rank.no_stacks or 'it has no process'}"
    for thread in rank.threads:
        marks = (" (main)" if thread.is_main else "") + (", holds the GIL" if thread.has_gil else "")
        yield f"  thread {thread.name}{marks}"
        for frame in thread.frames:
            native = f"{Path(frame.file).name}: {frame.function}"
            yield f"    {frame_words(frame) if frame.is_python else native}"
    yield from (f"  wrote: {line}" for line in rank.log)
