"""Query every host about a run, or about all its runs."""

import dataclasses
import getpass
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from llama405b.contract.causes import Cause, CauseKind
from llama405b.contract.checkpoints import step_of
from llama405b.contract.errors import UserError
from llama405b.contract.paths import RunDir
from llama405b.contract.phrases import and_more
from llama405b.contract.plan import NO_PLAN, Node, Plan, read_plan
from llama405b.contract.records import EvaluationMetrics, Metrics
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.outcomes import Outcomes, replies, unanswered
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.remote.messages.host_run import HostRun, PlanRequest, StatusReply, StatusRequest
from llama405b_tools.run import judge
from llama405b_tools.run.judge import Failure, State, state_words
from llama405b_tools.text.fold import fold_names

STATUS_TIMEOUT_S = 30.0
SHOWN_RUNS = 8  # in a message
LEAST_GRACE_S = 30.0
OF_A_PLAN = Host("", "hosts:1")  # its messages name the usual file, which is not needed where the plan is


Seen = dict[str, HostRun | HostError | None]  # what each host knows about a run; None: the host does not know it
HEADINGS = ("run", "launched", "hosts", "state", "step")


def operator() -> str:
    """Return who asks, as a run's files name them: ``user@machine``."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def ask_hosts(fleet: Fleet, run: str | None) -> tuple[str, Seen]:
    """Find the run that is meant, and what each host knows about it.

    Raises:
        HostError: No host can be queried.
        UserError: There is no such run, or several are alive.
    """
    if run:
        check_hosts(fleet, run)
    outcomes = _ask_all(fleet, run)
    answers = {name: reply.runs for name, reply in replies(outcomes).items()}
    if not answers:
        name, fault = next(iter(outcomes.items()))
        raise HostError(f"no host can be queried: {name}: {fault}")
    if not any(answers.values()):
        raise _nothing_known(fleet, run, outcomes)
    chosen = run or judge.choose_run(answers)
    return chosen, _seen_of(chosen, outcomes)


def _nothing_known(fleet: Fleet, run: str | None, outcomes: Outcomes[StatusReply]) -> UserError:
    """Say that the hosts do not know the run, or any."""
    strangers = [name for reply in replies(outcomes).values() for name in reply.strangers]
    if strangers:
        where = fold_names(dict.fromkeys(strangers))
        return UserError(f"--run: {run!r} was launched on {where}; name the hosts file that has them")
    if run:
        return no_such_run(fleet, run, names_of(all_runs(fleet)), unanswered(outcomes))
    lost = _silence(unanswered(outcomes))
    return UserError(f"no run on these hosts yet{lost}; `{fleet.command_to_type('launch')} …` starts one")


def known_of(seen: Seen) -> dict[str, HostRun]:
    """Return what the hosts that know the run say of it."""
    return {name: run for name, run in replies(seen).items() if run}


def members_of(seen: Seen) -> set[str]:
    """Return the names of all hosts of the run, as its hosts know them."""
    return {name for run in known_of(seen).values() for name in run.hosts}


def head_of(seen: Seen) -> str:
    """Return the host of rank 0; "" if it is not among those that know the run."""
    return next((name for name, run in known_of(seen).items() if run.first_rank == 0), "")


def planned(fleet: Fleet, knows: str, run: str) -> Plan:
    """Return the plan of a run's newest attempt from a host that knows it."""
    return fleet.ask(knows, "planned", PlanRequest(run), Plan, STATUS_TIMEOUT_S)


def ask_run(fleet: Fleet, asked: str | None, *, elsewhere: bool) -> tuple[str, Seen]:
    """``ask_hosts``, and the other hosts of the run, too, which the hosts file lacks or names differently.

    They join the fleet under their names in the run's plan, and are reached by these or by their addresses in it, as the
    user and through the port of a host that knows them. ``elsewhere``: its files here tell of all hosts.
    """
    run, seen = ask_hosts(fleet, asked)
    if elsewhere or not members_of(seen) - set(fleet.hosts):
        return run, seen
    knows = next(name for name, found in known_of(seen).items() if found.hosts)
    plan = planned(fleet, knows, run)
    others = [host_of(node, fleet.hosts[knows]) for node in plan.nodes if node.name not in fleet.hosts]
    fleet.join(others)
    return run, seen | _seen_of(run, _ask_all(fleet, run, [host.name for host in others]))


def host_of(node: Node, like: Host = OF_A_PLAN) -> Host:
    """Return a host of a plan, as far as the plan knows it; the user, the port and the like as for another host."""
    return dataclasses.replace(
        like, name=node.name, slots=node.slots, address=node.address, workdir=node.workdir, python=node.python
    )


def plan_here(run: str | None) -> Plan:
    """Return the plan of a run that was launched from this directory; None: the newest. ``NO_PLAN`` if there is none."""
    runs = [run] if run else [path.name for path in Path("runs").glob("*")]
    return max((read_plan(RunDir.here(name)) for name in runs), key=lambda plan: plan.created, default=NO_PLAN)


def all_runs(fleet: Fleet) -> Outcomes[StatusReply]:
    """Return the newest runs that each host knows."""
    return _ask_all(fleet, None)


def names_of(outcomes: Outcomes[StatusReply]) -> list[str]:
    """Return the runs that the hosts know, the newest first."""
    created = {run.run: run.created for reply in replies(outcomes).values() for run in reply.runs}
    return sorted(created, key=lambda name: -created[name])


def no_such_run(fleet: Fleet, run: str, known: Sequence[str], lost: Mapping[str, str]) -> UserError:
    """Return the refusal of a run that no host has: where it was looked for, and which there are."""
    places = sorted({f"{fleet.workdir(name)}/runs" for name in fleet.hosts})
    there = "there are none yet"
    if known:
        shown = ", ".join(known[:SHOWN_RUNS]) + and_more(known, SHOWN_RUNS)
        there = f"there are {shown}; `{fleet.command_to_type('status')} --all` tells more"
    return UserError(f"--run: no host has {run!r} in {places[0]}{and_more(places)}; {there}{_silence(lost)}")


def _silence(lost: Mapping[str, str]) -> str:
    """Say which hosts could not be asked."""
    if not lost:
        return ""
    return f" ({fold_names(lost)} could not be asked: {next(iter(lost.values()))})"


def _ask_all(fleet: Fleet, run: str | None, names: Iterable[str] | None = None) -> Outcomes[StatusReply]:
    requests = {name: StatusRequest(name, run) for name in (fleet.hosts if names is None else names)}
    return fleet.ask_all("status", requests, StatusReply, STATUS_TIMEOUT_S)


def _seen_of(run: str, outcomes: Outcomes[StatusReply]) -> Seen:
    """Return what the hosts answered about one run."""
    seen: Seen = {}
    for name, found in outcomes.items():
        if isinstance(found, HostError):
            seen[name] = found
        else:
            seen[name] = next((each for each in found.runs if each.run == run), None)
    return seen


def check_hosts(fleet: Fleet, run: str) -> None:
    """Check that a run launched from this machine is on these hosts."""
    names = [node.name for node in read_plan(RunDir.here(run)).nodes]  # none if it was not launched from here
    if names and not set(names) & set(fleet.hosts):
        raise UserError(f"--run: {run!r} was launched on {fold_names(names)}; name the hosts file that has them")


def newest_checkpoint(fleet: Fleet, run: str) -> Path | None:
    """The newest complete checkpoint of a run that any host sees."""
    told = replies(_ask_all(fleet, run)).values()
    paths = [Path(each.checkpoint) for reply in told for each in reply.runs if each.checkpoint]
    return max(paths, key=step_of, default=None)


def seconds_to_save(seen: Seen) -> float:
    """How long to let a run save before it ends: its last save twice, as one may be under way, and a margin."""
    return LEAST_GRACE_S + 2 * max((run.save_s for run in known_of(seen).values()), default=0.0)


def progress(runs: Iterable[HostRun]) -> tuple[str, Metrics | EvaluationMetrics | None]:
    """A run's newest checkpoint ('' for none), and its last step or evaluation, from what its hosts know."""
    found = list(runs)
    saved = max((each.checkpoint for each in found if each.checkpoint), default="")
    metrics = [each.metrics for each in found if each.metrics]
    return saved, max(metrics, key=lambda last: last.step, default=None)


def states_of(seen: Seen) -> dict[str, State]:
    """Return the state of the run on every host that answered."""
    members, runs = members_of(seen), known_of(seen).values()
    was_up, launching = judge.was_up(runs), any(run.launching for run in runs)
    return {
        name: judge.state_of_run(run, is_member=name in members, was_up=was_up, launching=launching)
        for name, run in replies(seen).items()
    }


def failures_of(seen: Seen) -> list[Failure]:
    """Return a failure for every host where something is wrong."""
    lost = [Failure(name, Cause(CauseKind.UNREACHABLE, name, detail=why)) for name, why in unanswered(seen).items()]
    told = [judge.failure_of(name, state) for name, state in states_of(seen).items()]
    runs = known_of(seen)
    failures = [*lost, *filter(None, told), *judge.half_stopped(runs)]
    if not failures:
        return []
    recorded = [blame for run in runs.values() for blame in run.blames]
    return judge.with_blame(failures, judge.blame_of(max((run.attempt for run in runs.values()), default=0), recorded))


def by_run(outcomes: Outcomes[StatusReply]) -> dict[str, dict[str, HostRun]]:
    """Return what each host knows about each run."""
    told = replies(outcomes)
    return {
        name: {host: run for host, reply in told.items() for run in reply.runs if run.run == name}
        for name in names_of(outcomes)
    }


def row(name: str, known: Mapping[str, HostRun]) -> tuple[str, ...]:
    """Return a run as a row of a table."""
    states: dict[str, list[str]] = {}
    for host, run in known.items():
        state = judge.state_of_run(run, launching=any(each.launching for each in known.values()))
        states.setdefault(state_words(state), []).append(host)
    where = "; ".join(f"{words} on {fold_names(hosts)}" for words, hosts in states.items())
    if len(states) == 1:
        where = next(iter(states))
    step = max((run.metrics.step for run in known.values() if run.metrics), default=None)
    created = max(run.created for run in known.values())
    launched = time.strftime("%Y-%m-%d %H:%M", time.localtime(created))
    return name, launched, fold_names(known), where, "—" if step is None else str(step)
