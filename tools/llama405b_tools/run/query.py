"""Query the hosts of a run: its state, its messages as they come, what its time went into, and its guard.

Messages arrive in one queue; a broken connection is reopened and resumes where it was. Whether a run's guard is running is known from
its record here, and from its latest note on the hosts.
"""

import dataclasses
import enum
import getpass
import os
import queue
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from llama405b.contract.accounting import Account, Incident, Use
from llama405b.contract.checkpoints import nearly_full, step_of
from llama405b.contract.errors import UserError, and_more, counted, given
from llama405b.contract.files import read_record
from llama405b.contract.paths import RunDir
from llama405b.contract.records import (
    GUARDING,
    Cause,
    CauseKind,
    EvaluationMetrics,
    GuardStage,
    GuardState,
    Metrics,
    RunEvent,
)
from llama405b.spec.plan import NO_PLAN, Node, Plan, read_plan
from llama405b_tools.agent import processes
from llama405b_tools.agent.messages import (
    AccountReply,
    HeadRequest,
    HostRun,
    NoteReply,
    PlanRequest,
    StatusReply,
    StatusRequest,
    StreamMessage,
    StreamRequest,
)
from llama405b_tools.hosts.fleet import Fleet, program_name
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import HostError, Outcomes, Stream, read_message, replies, unanswered
from llama405b_tools.run import judge
from llama405b_tools.run.judge import Failure, State, failure_words, state_words
from llama405b_tools.text.figures import local_time, span
from llama405b_tools.text.words import clean, fold_names, hide_in_json, pieces_of

STATUS_TIMEOUT_S = 30.0
SHOWN_RUNS = 8  # in a message
LEAST_GRACE_S = 30.0
OF_A_PLAN = Host("", "hosts:1")  # its messages name the usual file, which is not needed where the plan is


Seen = dict[str, HostRun | HostError | None]  # what each host knows about a run; None: the host does not know it
HEADINGS = ("run", "launched", "hosts", "state", "step")


def operator_name() -> str:
    """Return who asks, as a run's files name them: ``user@machine``."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def ask_hosts(fleet: Fleet, run: str | None) -> tuple[str, Seen]:
    """Find the requested run, and what each host knows about it.

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
    """Return the error that the hosts do not know the run, or any run."""
    strangers = [name for reply in replies(outcomes).values() for name in reply.strangers]
    if strangers:
        where = fold_names(dict.fromkeys(strangers))
        return UserError(f"--run: {run!r} was launched on {where}; name the hosts file that has them")
    if run:
        return no_such_run(fleet, run, names_of(all_runs(fleet)), unanswered(outcomes))
    lost = _silence(unanswered(outcomes))
    return UserError(f"no run on these hosts yet{lost}; `{fleet.command_to_type('launch')} …` starts one")


def known_of(seen: Seen) -> dict[str, HostRun]:
    """Return the run as each host that knows it reports it."""
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
    """Like ``ask_hosts``, with the hosts of the run that the hosts file lacks or names differently.

    They join the fleet under their names in the run's plan, and are reached by these or by their addresses in it, as the
    user and through the port of a host that knows them. ``elsewhere``: the files of all hosts are on this machine.
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
    """Return the error for a run that no host has: where it was searched, and which runs exist."""
    places = sorted({f"{fleet.workdir(name)}/runs" for name in fleet.hosts})
    there = "there are none yet"
    if known:
        shown = ", ".join(known[:SHOWN_RUNS]) + and_more(known, SHOWN_RUNS)
        there = f"there are {shown}; `{fleet.command_to_type('status')} --all` lists more"
    return UserError(f"--run: no host has {run!r} in {places[0]}{and_more(places)}; {there}{_silence(lost)}")


def _silence(lost: Mapping[str, str]) -> str:
    """Return which hosts could not be queried, as a clause."""
    if not lost:
        return ""
    return f" ({fold_names(lost)} could not be queried: {next(iter(lost.values()))})"


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
    """Return the newest complete checkpoint of a run that any host sees."""
    told = replies(_ask_all(fleet, run)).values()
    paths = [Path(each.checkpoint) for reply in told for each in reply.runs if each.checkpoint]
    return max(paths, key=step_of, default=None)


def seconds_to_save(seen: Seen) -> float:
    """Return how long to let a run save: twice its last save, as one may be under way, and a margin."""
    return LEAST_GRACE_S + 2 * max((run.save_s for run in known_of(seen).values()), default=0.0)


def progress(runs: Iterable[HostRun]) -> tuple[str, Metrics | EvaluationMetrics | None]:
    """Return a run's newest checkpoint ('' for none), and its last step or evaluation."""
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


RETRY_S = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Unreachable:
    """The host cannot be reached now; the connection is retried."""

    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class HostMessage:
    """One message, and when it arrived."""

    host: str
    news: StreamMessage | Unreachable
    at: float  # this machine's clock, seconds since the epoch


class Streams:
    """One stream per host, each with its own thread, until the host reports that its run is over."""

    def __init__(
        self, fleet: Fleet, hosts: Sequence[str], request: StreamRequest, records_of: str = "", most: int = 0
    ) -> None:
        """Send ``request`` to each host.

        ``records_of``: the host that writes metrics and events; ``most``: messages kept per host before it has to wait
        (0: all).
        """
        self.fleet = fleet
        self.request = request
        self.records_of = records_of
        self.arrivals: queue.Queue[HostMessage] = queue.Queue()
        self.room = {host: threading.Semaphore(most) for host in hosts} if most else {}
        names = read_plan(RunDir.here(request.run)).secrets  # none if it was not launched from here
        self.secrets = pieces_of(os.environ[name] for name in names if name in os.environ)
        self.closing = threading.Event()
        self.open: dict[str, Stream] = {}
        for host in hosts:
            threading.Thread(target=self._pump, args=(host,), daemon=True).start()

    def close(self) -> None:
        """End the agents on the hosts."""
        self.closing.set()
        for stream in list(self.open.values()):
            stream.close()

    def done(self, host: str) -> None:
        """Note that a host's message was handled, so that another may arrive."""
        if self.room:
            self.room[host].release()

    def _pump(self, host: str) -> None:
        marks: dict[str, tuple[int, int]] = {}  # how far each file was read
        while not self.closing.is_set():
            ended = False
            try:
                self.open[host] = self.fleet.stream(
                    host,
                    "stream",
                    dataclasses.replace(self.request, host=host, records=host == self.records_of, marks=marks),
                )
                if self.closing.is_set():  # meanwhile
                    self.open[host].close()
                    return
                last = self._read(host, self.open[host], marks)
                if last is None:
                    return
                why, ended = str(self.fleet.fault_of(host, last)), True
            except HostError as error:
                why = str(error)
            if self.closing.is_set():
                return
            self.fleet.forget(host, unless_open=ended)
            self.arrivals.put(HostMessage(host, Unreachable(why), time.time()))
            self.closing.wait(RETRY_S)

    def _read(self, host: str, stream: Stream, marks: dict[str, tuple[int, int]]) -> str | None:
        """Put the stream's messages on the queue; returns None at its end, or the last line of an agent that failed."""
        last = ""
        for line in stream:
            if not line.startswith("{"):
                last = line.strip()[:200] or last
                continue
            news = read_message(StreamMessage, hide_in_json(line, self.secrets), "its news")
            if self.room:
                self.room[host].acquire()
            marks.update(news.marks)
            self.arrivals.put(HostMessage(host, news, time.time()))
            if news.end:
                return None
        return last


LEAST = 0.0005  # of the time: smaller shares are not listed
MOST_XIDS = 3  # in the line of an incident


def account_of_run(fleet: Fleet, run: str, seen: Seen) -> Account | None:
    """Ask the host of rank 0, if it is among those that answered."""
    head = head_of(seen)
    return account_of_head(fleet, run, head) if head in fleet.hosts else None


def account_of_head(fleet: Fleet, run: str, head: str) -> Account | None:
    """Ask the host of rank 0; None if it cannot be asked, or knows nothing yet."""
    try:
        return fleet.ask(head, "account_of", HeadRequest(run, head), AccountReply, STATUS_TIMEOUT_S).account
    except HostError:  # the table of hosts says what is wrong with it
        return None


def account_line(found: Account, unit: str) -> str:
    """Return the goodput, and where the rest of the time went: ``goodput 97.1% of 7h51m: …``. ``unit``: GPU-h or rank-h."""
    total_s = sum(found.seconds.values())
    spent = found.seconds
    parts = [f"{found.rank_hours(spent[Use.TRAINING]):,.1f} {unit} trained"]
    failures = counted(len(found.incidents), "failure")
    what = {
        Use.FAILURES: f"lost to {failures}",
        Use.SLOW: "lost to slow or hung steps",
        Use.RESTARTS: "lost to a requested restart",
        Use.STARTING: "starting",
        Use.SAVING: "saving",
        Use.PAUSES: "other pauses",
        Use.WAITING: "since the last step",
    }
    parts += [
        f"{found.rank_hours(spent[use]):,.1f} {said}" for use, said in what.items() if spent[use] > LEAST * total_s
    ]
    return f"goodput {100 * (found.goodput or 0.0):.1f}% of {span(total_s)}: {', '.join(parts)}"


def incident_words(incident: Incident) -> str:
    """Return why an attempt failed, and where."""
    host = incident.cause.host
    return given("{}: ", host) + clean(failure_words(Failure(host, incident.cause)))


def started_words(incident: Incident) -> str:
    """Return whether another attempt followed a failure; no step has."""
    return "restarted, no step yet" if incident.restarted else "not restarted"


def incident_line(found: Account, incident: Incident, unit: str, xids: Sequence[str] = ()) -> str:
    """Return a failure in one line: when, what, how long until the next step, and what that cost.

    ``xids``: errors of GPUs that hosts reported meanwhile, in words: they came first.
    """
    failed = local_time(incident.failed, "%Y-%m-%d %H:%M:%S")
    until = incident.failed if incident.resumed is None else incident.resumed
    cost = found.rank_hours(until - incident.began)
    then = f"next step after {span(until - incident.began)}" if incident.resumed else started_words(incident)
    first = "".join(f"{xid} → " for xid in xids[:MOST_XIDS]) + given("and {} more → ", max(0, len(xids) - MOST_XIDS))
    return f"{failed}  attempt {incident.attempt}: {first}{incident_words(incident)}; {then}, {cost:,.1f} {unit}"


BEAT_S = 20.0  # how often a guard tells the hosts of its run that it is alive
SILENT_AFTER_S = 120.0  # six heartbeats
BEGINS_WITHIN_S = 30.0  # after it was asked for


GuardReports = Sequence[tuple[float, GuardState]]  # how many seconds ago a host heard it, and what
COMMAND_TIMEOUT_S = 60.0
SAVES_IN_A_ROW = 2  # that fail: one alone may be a disk that hesitated


class Life(enum.StrEnum):
    """Whether a guard's process is running."""

    LIVES = "lives"
    DIED = "died"
    ELSEWHERE = "elsewhere"  # on another machine; its hosts heard from it lately, if they were asked
    SILENT = "silent"  # on another machine, or not started; its hosts heard nothing for too long


@dataclasses.dataclass(frozen=True, slots=True)
class GuardStatus:
    """A run's guard, according to its record."""

    state: GuardState
    life: Life
    heard_at: float  # last, by this machine's clock

    @property
    def gone(self) -> bool:
        """Whether it died while the run still needed it."""
        return self.state.state in GUARDING and self.life in (Life.DIED, Life.SILENT)

    @property
    def finishes(self) -> bool:
        """Whether the run has ended well, and what follows it has not."""
        return self.state.state is GuardStage.FINISHING

    @property
    def guards(self) -> bool:
        """Whether it may restart the run, or finish what follows it."""
        return self.state.state in GUARDING and self.state.pid > 0 and not self.gone


def heard_by(told: Iterable[HostRun]) -> GuardReports:
    """Return the guard's latest note on each host."""
    return [(host.now - host.guard.time, host.guard) for host in told if host.guard]


def guard_of_hosts(run: str, heard: GuardReports, now: float) -> GuardStatus | None:
    """Return a run's guard by its latest note on the hosts; by its record here if it runs or died here.

    A host that it ran on knows at once that it died.
    """
    age_s, state = min(heard, key=lambda entry: entry[0], default=(0.0, None))
    heard_at = now - age_s
    here = guard_of_run(run)
    if state is None or (here and here.life is Life.LIVES):
        return here
    if here and here.life is Life.DIED and _same_guard(here.state, state):
        return GuardStatus(here.state, Life.DIED, max(heard_at, here.heard_at))
    if any(other.died and _same_guard(other, state) for _, other in heard):
        return GuardStatus(state, Life.DIED, heard_at)
    if now - heard_at < (SILENT_AFTER_S if state.pid else BEGINS_WITHIN_S):
        return GuardStatus(state, Life.ELSEWHERE, heard_at)
    return GuardStatus(state, Life.SILENT, heard_at)


def _same_guard(one: GuardState, other: GuardState) -> bool:
    return (one.machine, one.pid, one.pid_start) == (other.machine, other.pid, other.pid_start)


def guard_of_run(run: str) -> GuardStatus | None:
    """Return the guard of a run by its record on this machine; None if there never was one."""
    state = read_record(GuardState, RunDir.here(run).guard)
    if state is None:
        return None
    if not processes.is_of_this_machine(state):
        return GuardStatus(state, Life.ELSEWHERE, state.time)
    return GuardStatus(state, Life.LIVES if processes.lives_here(state) else Life.DIED, state.time)


def is_guarded(run: str) -> bool:
    """Return whether a guard on this machine may restart the run."""
    found = guard_of_run(run)
    return found is not None and found.life is Life.LIVES


def guard_line(found: GuardStatus) -> str:
    """Describe what a run's guard is doing, or how to replace it."""
    state, machine = found.state, found.state.machine.partition(" ")[0]
    if found.gone:
        last = "last heard" if state.pid else "asked for"  # when it died, nobody knows
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.heard_at))
        died = (
            f"process {state.pid} on {machine} died while {state.state}"
            if state.pid
            else f"it never started on {machine}"
        )
        place = given(" in {}", shlex.quote(state.directory)) if state.directory != str(Path.cwd()) else ""
        again = (
            given(f"`{program_name()} launch {{}}`{place}", state.command)
            or "the same launch command, with --resume auto,"
        )
        what = "finish what follows the run" if found.finishes else "guard the run again"
        return clean(f"guard: GONE, {last} at {at} ({died}); to {what}, use {again}")
    times = counted(state.restarts, "restart")
    where = f" on {machine}" if found.life is Life.ELSEWHERE else ""
    if not state.pid:
        return f"guard{where}: starting"
    done = f"{times}, {state.in_vain} of {state.limit} allowed without progress"
    return clean(f"guard{where}: {state.state}, {done}{given('; {}', state.message)}")


class Notice(enum.StrEnum):
    """The events that run the ``--notify`` command."""

    INCIDENT = "incident"
    WAITING = "waiting"  # the run cannot be started again yet
    RECOVERY = "recovery"
    NOT_SAVED = "not saved"  # several times in a row; training goes on
    AFTER_SAVE = "after save failed"  # the user's command for a checkpoint; it is tried again
    BUDGET = "budget"  # most of it is spent
    DISK_FULL = "disk full"
    STOPPED = "stopped"
    END = "end"
    WHEN_DONE = "when done failed"  # the run ended well, but what was to follow did not succeed
    GAVE_UP = "gave up"
    HEARTBEAT = "heartbeat"  # nothing has happened


def unsaved_words(failed: Sequence[RunEvent]) -> str:
    """Return why the last saves failed; '' unless several did in a row."""
    if len(failed) < SAVES_IN_A_ROW:
        return ""
    return f"the last {len(failed)} saves failed; step {failed[-1].step}: {failed[-1].detail}"


def disk_words(hosts: Mapping[str, NoteReply]) -> str:
    """Return which disks of the run are nearly full; '' if none is."""
    full: dict[str, list[str]] = {}
    for name, noted in hosts.items():
        for disk in noted.disks:
            if nearly_full(disk.free_bytes, disk.total_bytes):
                full.setdefault(f"{disk.free_bytes / (1 << 30):.1f} GiB left at {disk.path}", []).append(name)
    return given("{}; make room there", "; ".join(f"{fold_names(names)}: {left}" for left, names in full.items()))


def run_command(command: str, event: str, run: str, message: str) -> str:
    """Run the user's command; return why that failed, or ''."""
    env = os.environ | {"LLAMA405B_EVENT": event, "LLAMA405B_RUN": run, "LLAMA405B_MESSAGE": message}
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            env=env,
            input=f"{run}: {event}: {message}\n",
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return given("exit code {}", done.returncode)
