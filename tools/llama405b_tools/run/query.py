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

from llama405b.contract.accounting import Account, Incident, TimeUse
from llama405b.contract.checkpoints import is_nearly_full, step_of
from llama405b.contract.errors import UserError, and_more, fmt_if, pluralize
from llama405b.contract.files import read_record
from llama405b.contract.paths import RunDir
from llama405b.contract.records import (
    ACTIVE_GUARD_STAGES,
    Cause,
    CauseKind,
    EvaluationMetrics,
    GuardStage,
    GuardState,
    Metrics,
    RunEvent,
)
from llama405b.spec.plan import NO_PLAN, Node, Plan, read_plan
from llama405b_tools.agent import describe, processes, reports, streaming
from llama405b_tools.agent.messages import (
    DiskSpace,
    HostRun,
    StatusReply,
    StreamMessage,
    StreamRequest,
)
from llama405b_tools.hosts.fleet import Fleet, StreamEndedError, program_name
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import HostError, Outcomes, Stream, failure_texts, replies
from llama405b_tools.run import judge
from llama405b_tools.run.judge import Failure, HostRunState, failure_words, format_state
from llama405b_tools.text.figures import format_clock, format_duration
from llama405b_tools.text.words import clean, fold_names, hide_secrets_in_json, secret_lines

STATUS_TIMEOUT_S = 30.0
SHOWN_RUNS = 8  # in a message
MIN_GRACE_S = 30.0
HOST_OF_PLAN = Host("", "hosts:1")  # its messages name the usual file, which is not needed where the plan is


RunReplies = dict[str, HostRun | HostError | None]  # what each host knows about a run; None: the host does not know it


@dataclasses.dataclass(frozen=True, slots=True)
class RunHandle:
    """A run, and what each of its hosts knows of it."""

    fleet: Fleet
    run: str
    replies: RunReplies

    @property
    def host_runs(self) -> dict[str, HostRun]:
        """The run as each host that knows it reports it."""
        return {name: run for name, run in replies(self.replies).items() if run}

    @property
    def unreachable(self) -> dict[str, str]:
        """Why hosts could not be asked."""
        return failure_texts(self.replies)

    @property
    def live_hosts(self) -> list[str]:
        """The hosts on which it is alive."""
        return [name for name, run in self.host_runs.items() if run.alive]

    @property
    def members(self) -> set[str]:
        """All hosts of the run, as its hosts know them."""
        return {name for run in self.host_runs.values() for name in run.hosts}

    @property
    def head(self) -> str:
        """The host of rank 0; "" if it is not among those that know the run."""
        return next((name for name, run in self.host_runs.items() if run.first_rank == 0), "")

    def command(self, verb: str) -> str:
        """Return a command about it, to be typed by the user."""
        return self.fleet.command_to_type(verb, self.run)

    def fetch_plan(self) -> Plan:
        """Return the plan of its newest attempt, from a host where it is alive if there is one."""
        host = next(iter([*self.live_hosts, *self.host_runs]))
        return self.fleet.call(host, describe.planned, STATUS_TIMEOUT_S, self.run)

    def fetch_account(self) -> Account | None:
        """Return what its time went into, if the host of rank 0 answers."""
        return account_of_head(self.fleet, self.run, self.head) if self.head in self.fleet.hosts else None

    def seconds_to_save(self) -> float:
        """Return how long to let it save: twice its last save, as one may be under way, and a margin."""
        return MIN_GRACE_S + 2 * max((run.save_s for run in self.host_runs.values()), default=0.0)

    def states(self) -> dict[str, HostRunState]:
        """Return its state on every host that answered."""
        members, runs = self.members, self.host_runs.values()
        all_started, launching = judge.all_hosts_started(runs), any(run.launching for run in runs)
        return {
            name: judge.state_of_run(run, is_member=name in members, all_started=all_started, launching=launching)
            for name, run in replies(self.replies).items()
        }

    def failures(self) -> list[Failure]:
        """Return a failure for every host where something is wrong."""
        unreachable = [
            Failure(name, Cause(CauseKind.UNREACHABLE, name, detail=why)) for name, why in self.unreachable.items()
        ]
        failed = [judge.failure_of(name, state) for name, state in self.states().items()]
        runs = self.host_runs
        failures = [*unreachable, *filter(None, failed), *judge.half_stopped_failures(runs)]
        if not failures:
            return []
        recorded = [blame for run in runs.values() for blame in run.blames]
        return judge.apply_failure_record(
            failures, judge.find_failure_record(max((run.attempt for run in runs.values()), default=0), recorded)
        )


HEADINGS = ("run", "launched", "hosts", "state", "step")


def operator_name() -> str:
    """Return who asks, as a run's files name them: ``user@machine``."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def ask_hosts(fleet: Fleet, run: str | None) -> RunHandle:
    """Find the requested run, and what each host knows about it.

    Raises:
        HostError: No host can be queried.
        UserError: There is no such run, or several are alive.
    """
    if run:
        check_launched_hosts(fleet, run)
    outcomes = _ask_all(fleet, run)
    answers = {name: reply.runs for name, reply in replies(outcomes).items()}
    if not answers:
        name, fault = next(iter(outcomes.items()))
        raise HostError(f"no host can be queried: {name}: {fault}")
    if not any(answers.values()):
        raise _no_run_error(fleet, run, outcomes)
    chosen = run or judge.choose_run(answers)
    return RunHandle(fleet, chosen, _replies_about(chosen, outcomes))


def _no_run_error(fleet: Fleet, run: str | None, outcomes: Outcomes[StatusReply]) -> UserError:
    """Return the error that the hosts do not know the run, or any run."""
    strangers = [name for reply in replies(outcomes).values() for name in reply.strangers]
    if strangers:
        launched_on = fold_names(dict.fromkeys(strangers))
        return UserError(f"--run: {run!r} was launched on {launched_on}; name the hosts file that has them")
    if run:
        return no_such_run(fleet, run, run_names(all_runs(fleet)), failure_texts(outcomes))
    unreachable_words = _unreachable_words(failure_texts(outcomes))
    return UserError(f"no run on these hosts yet{unreachable_words}; `{fleet.command_to_type('launch')} …` starts one")


def ask_run(fleet: Fleet, requested_run: str | None, *, has_local_files: bool) -> RunHandle:
    """Like ``ask_hosts``, with the hosts of the run that the hosts file lacks or names differently.

    They join the fleet under their names in the run's plan, and are reached by these or by their addresses in it, as the
    user and through the port of a host that knows them. ``has_local_files``: the files of all hosts are on this machine.
    """
    handle = ask_hosts(fleet, requested_run)
    if has_local_files or not handle.members - set(fleet.hosts):
        return handle
    member = next(name for name, host_run in handle.host_runs.items() if host_run.hosts)
    nodes = handle.fetch_plan().nodes
    others = [host_of(node, fleet.hosts[member]) for node in nodes if node.name not in fleet.hosts]
    fleet.add_hosts(others)
    added_replies = _replies_about(handle.run, _ask_all(fleet, handle.run, [host.name for host in others]))
    return dataclasses.replace(handle, replies=handle.replies | added_replies)


def host_of(node: Node, like: Host = HOST_OF_PLAN) -> Host:
    """Return a host of a plan, as far as the plan knows it; the user, the port and the like as for another host."""
    return dataclasses.replace(
        like, name=node.name, slots=node.slots, address=node.address, workdir=node.workdir, python=node.python
    )


def plan_in_directory(run: str | None) -> Plan:
    """Return the plan of a run that was launched from this directory; None: the newest. ``NO_PLAN`` if there is none."""
    runs = [run] if run else [path.name for path in Path("runs").glob("*")]
    return max((read_plan(RunDir.from_name(name)) for name in runs), key=lambda plan: plan.created, default=NO_PLAN)


def all_runs(fleet: Fleet) -> Outcomes[StatusReply]:
    """Return the newest runs that each host knows."""
    return _ask_all(fleet, None)


def run_names(outcomes: Outcomes[StatusReply]) -> list[str]:
    """Return the runs that the hosts know, the newest first."""
    created = {run.run: run.created for reply in replies(outcomes).values() for run in reply.runs}
    return sorted(created, key=lambda name: -created[name])


def no_such_run(fleet: Fleet, run: str, names: Sequence[str], unreachable: Mapping[str, str]) -> UserError:
    """Return the error for a run that no host has: where it was searched, and which runs exist."""
    places = sorted({f"{fleet.workdir(name)}/runs" for name in fleet.hosts})
    existing = "there are none yet"
    if names:
        shown = ", ".join(names[:SHOWN_RUNS]) + and_more(names, SHOWN_RUNS)
        existing = f"there are {shown}; `{fleet.command_to_type('status')} --all` lists more"
    return UserError(
        f"--run: no host has {run!r} in {places[0]}{and_more(places)}; {existing}{_unreachable_words(unreachable)}"
    )


def _unreachable_words(unreachable: Mapping[str, str]) -> str:
    """Return which hosts could not be queried, as a clause."""
    if not unreachable:
        return ""
    return f" ({fold_names(unreachable)} could not be queried: {next(iter(unreachable.values()))})"


def _ask_all(fleet: Fleet, run: str | None, names: Iterable[str] | None = None) -> Outcomes[StatusReply]:
    return fleet.call_each(lambda name: fleet.call(name, describe.status, STATUS_TIMEOUT_S, name, run), names)


def _replies_about(run: str, outcomes: Outcomes[StatusReply]) -> RunReplies:
    """Return what the hosts answered about one run."""
    run_replies: RunReplies = {}
    for name, reply in outcomes.items():
        if isinstance(reply, HostError):
            run_replies[name] = reply
        else:
            run_replies[name] = next((host_run for host_run in reply.runs if host_run.run == run), None)
    return run_replies


def check_launched_hosts(fleet: Fleet, run: str) -> None:
    """Check that a run launched from this machine is on these hosts."""
    names = [node.name for node in read_plan(RunDir.from_name(run)).nodes]  # none if it was not launched from here
    if names and not set(names) & set(fleet.hosts):
        raise UserError(f"--run: {run!r} was launched on {fold_names(names)}; name the hosts file that has them")


def newest_checkpoint(fleet: Fleet, run: str) -> Path | None:
    """Return the newest complete checkpoint of a run that any host sees."""
    answers = replies(_ask_all(fleet, run)).values()
    paths = [Path(host_run.checkpoint) for reply in answers for host_run in reply.runs if host_run.checkpoint]
    return max(paths, key=step_of, default=None)


def run_progress(runs: Iterable[HostRun]) -> tuple[str, Metrics | EvaluationMetrics | None]:
    """Return a run's newest checkpoint ('' for none), and its last step or evaluation."""
    host_runs = list(runs)
    saved = max((host_run.checkpoint for host_run in host_runs if host_run.checkpoint), default="")
    metrics = [host_run.metrics for host_run in host_runs if host_run.metrics]
    return saved, max(metrics, key=lambda entry: entry.step, default=None)


def hosts_by_run(outcomes: Outcomes[StatusReply]) -> dict[str, dict[str, HostRun]]:
    """Return what each host knows about each run."""
    answers = replies(outcomes)
    return {
        name: {host: run for host, reply in answers.items() for run in reply.runs if run.run == name}
        for name in run_names(outcomes)
    }


def run_row(name: str, host_runs: Mapping[str, HostRun]) -> tuple[str, ...]:
    """Return a run as a row of a table."""
    states: dict[str, list[str]] = {}
    for host, run in host_runs.items():
        state = judge.state_of_run(run, launching=any(host_run.launching for host_run in host_runs.values()))
        states.setdefault(format_state(state), []).append(host)
    state_summary = "; ".join(f"{state_text} on {fold_names(hosts)}" for state_text, hosts in states.items())
    if len(states) == 1:
        state_summary = next(iter(states))
    step = max((run.metrics.step for run in host_runs.values() if run.metrics), default=None)
    created = max(run.created for run in host_runs.values())
    launched = time.strftime("%Y-%m-%d %H:%M", time.localtime(created))
    return name, launched, fold_names(host_runs), state_summary, "—" if step is None else str(step)


RETRY_S = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Unreachable:
    """The host cannot be reached now; the connection is retried."""

    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class HostMessage:
    """One message, and when it arrived."""

    host: str
    message: StreamMessage | Unreachable
    arrived_at: float  # this machine's clock, seconds since the epoch


class Streams:
    """One stream per host, each with its own thread, until the host reports that its run is over."""

    def __init__(
        self, fleet: Fleet, hosts: Sequence[str], request: StreamRequest, records_of: str = "", max_waiting: int = 0
    ) -> None:
        """Send ``request`` to each host.

        ``records_of``: the host that writes metrics and events; ``max_waiting``: messages kept per host before it has to wait
        (0: all).
        """
        self.fleet = fleet
        self.request = request
        self.records_of = records_of
        self.arrivals: queue.Queue[HostMessage] = queue.Queue()
        self.free_slots = {host: threading.Semaphore(max_waiting) for host in hosts} if max_waiting else {}
        names = read_plan(RunDir.from_name(request.run)).secrets  # none if it was not launched from here
        self.secrets = secret_lines(os.environ[name] for name in names if name in os.environ)
        self.closing = threading.Event()
        self.open: dict[str, Stream] = {}
        self.offsets: dict[str, dict[str, tuple[int, int]]] = {}  # by host: how far each file was read
        for host in hosts:
            self.offsets[host] = {}
            fleet.keep_listening(host, self._listen, self._report_break, self.closing, RETRY_S)

    def close(self) -> None:
        """End the agents on the hosts."""
        self.closing.set()
        for stream in list(self.open.values()):
            stream.close()

    def release(self, host: str) -> None:
        """Note that a host's message was handled, so that another may arrive."""
        if self.free_slots:
            self.free_slots[host].release()

    def _report_break(self, host: str, why: HostError) -> None:
        self.arrivals.put(HostMessage(host, Unreachable(str(why)), time.time()))

    def _listen(self, host: str) -> None:
        """Put a host's messages on the queue until the last one."""
        offsets, last_line = self.offsets[host], ""
        request = dataclasses.replace(self.request, host=host, records=host == self.records_of, marks=offsets)
        stream = self.open[host] = self.fleet.stream(host, streaming.stream, request)
        if self.closing.is_set():  # meanwhile
            stream.close()
            return
        for line in stream:
            if not line.startswith("{"):
                last_line = line.strip()[:200] or last_line
                continue
            message = self.fleet.read_message(host, StreamMessage, hide_secrets_in_json(line, self.secrets))
            if self.free_slots:
                self.free_slots[host].acquire()
            offsets.update(message.marks)
            self.arrivals.put(HostMessage(host, message, time.time()))
            if message.end:
                return
        raise StreamEndedError(str(self.fleet.explain_fault(host, last_line)))


MIN_SHARE = 0.0005  # of the time: smaller shares are not listed
MAX_XIDS = 3  # in the line of an incident


def account_of_head(fleet: Fleet, run: str, head: str) -> Account | None:
    """Ask the host of rank 0; None if it cannot be asked, or knows nothing yet."""
    try:
        return fleet.call(head, reports.account_of, STATUS_TIMEOUT_S, run, head)
    except HostError:  # the table of hosts says what is wrong with it
        return None


def account_line(account: Account, unit: str) -> str:
    """Return the goodput, and where the rest of the time went: ``goodput 97.1% of 7h51m: …``. ``unit``: GPU-h or rank-h."""
    total_s = sum(account.seconds.values())
    spent = account.seconds
    parts = [f"{account.rank_hours(spent[TimeUse.TRAINING]):,.1f} {unit} trained"]
    failures = pluralize(len(account.incidents), "failure")
    labels = {
        TimeUse.FAILURES: f"lost to {failures}",
        TimeUse.SLOW: "lost to slow or hung steps",
        TimeUse.RESTARTS: "lost to a requested restart",
        TimeUse.STARTING: "starting",
        TimeUse.SAVING: "saving",
        TimeUse.PAUSES: "other pauses",
        TimeUse.WAITING: "since the last step",
    }
    parts += [
        f"{account.rank_hours(spent[use]):,.1f} {label}"
        for use, label in labels.items()
        if spent[use] > MIN_SHARE * total_s
    ]
    return f"goodput {100 * (account.goodput or 0.0):.1f}% of {format_duration(total_s)}: {', '.join(parts)}"


def incident_words(incident: Incident) -> str:
    """Return why an attempt failed, and where."""
    host = incident.cause.host
    return fmt_if("{}: ", host) + clean(failure_words(Failure(host, incident.cause)))


def started_words(incident: Incident) -> str:
    """Return whether another attempt followed a failure; no step has."""
    return "restarted, no step yet" if incident.restarted else "not restarted"


def incident_line(account: Account, incident: Incident, unit: str, xids: Sequence[str] = ()) -> str:
    """Return a failure in one line: when, what, how long until the next step, and what that cost.

    ``xids``: errors of GPUs that hosts reported meanwhile, in words: they came first.
    """
    failed = format_clock(incident.failed, "%Y-%m-%d %H:%M:%S")
    until = incident.failed if incident.resumed is None else incident.resumed
    cost = account.rank_hours(until - incident.began)
    outcome = (
        f"next step after {format_duration(until - incident.began)}" if incident.resumed else started_words(incident)
    )
    xid_text = "".join(f"{xid} → " for xid in xids[:MAX_XIDS]) + fmt_if("and {} more → ", max(0, len(xids) - MAX_XIDS))
    return f"{failed}  attempt {incident.attempt}: {xid_text}{incident_words(incident)}; {outcome}, {cost:,.1f} {unit}"


BEAT_S = 20.0  # how often a guard tells the hosts of its run that it is alive
SILENT_AFTER_S = 120.0  # six heartbeats
BEGINS_WITHIN_S = 30.0  # after it was asked for


GuardReports = Sequence[tuple[float, GuardState]]  # how many seconds ago a host heard it, and what
COMMAND_TIMEOUT_S = 60.0
SAVES_IN_A_ROW = 2  # that fail: one alone may be a disk that hesitated


class GuardLiveness(enum.StrEnum):
    """Whether a guard's process is running."""

    LIVES = "lives"
    DIED = "died"
    ELSEWHERE = "elsewhere"  # on another machine; its hosts heard from it lately, if they were asked
    SILENT = "silent"  # on another machine, or not started; its hosts heard nothing for too long


@dataclasses.dataclass(frozen=True, slots=True)
class GuardStatus:
    """A run's guard, according to its record."""

    state: GuardState
    liveness: GuardLiveness
    heard_at: float  # last, by this machine's clock

    @property
    def is_gone(self) -> bool:
        """Whether it died while the run still needed it."""
        return self.state.state in ACTIVE_GUARD_STAGES and self.liveness in (GuardLiveness.DIED, GuardLiveness.SILENT)

    @property
    def is_finishing(self) -> bool:
        """Whether the run has ended well, and what follows it has not."""
        return self.state.state is GuardStage.FINISHING

    @property
    def is_guarding(self) -> bool:
        """Whether it may restart the run, or finish what follows it."""
        return self.state.state in ACTIVE_GUARD_STAGES and self.state.pid > 0 and not self.is_gone


def guard_reports(host_runs: Iterable[HostRun]) -> GuardReports:
    """Return the guard's latest note on each host."""
    return [(host.now - host.guard.time, host.guard) for host in host_runs if host.guard]


def guard_of_hosts(run: str, reports: GuardReports, now: float) -> GuardStatus | None:
    """Return a run's guard by its latest note on the hosts; by its record here if it runs or died here.

    A host that it ran on knows at once that it died.
    """
    age_s, state = min(reports, key=lambda entry: entry[0], default=(0.0, None))
    heard_at = now - age_s
    local = local_guard(run)
    if state is None or (local and local.liveness is GuardLiveness.LIVES):
        return local
    if local and local.liveness is GuardLiveness.DIED and _same_guard(local.state, state):
        return GuardStatus(local.state, GuardLiveness.DIED, max(heard_at, local.heard_at))
    if any(other.died and _same_guard(other, state) for _, other in reports):
        return GuardStatus(state, GuardLiveness.DIED, heard_at)
    if now - heard_at < (SILENT_AFTER_S if state.pid else BEGINS_WITHIN_S):
        return GuardStatus(state, GuardLiveness.ELSEWHERE, heard_at)
    return GuardStatus(state, GuardLiveness.SILENT, heard_at)


def _same_guard(one: GuardState, other: GuardState) -> bool:
    return (one.machine, one.pid, one.pid_start) == (other.machine, other.pid, other.pid_start)


def local_guard(run: str) -> GuardStatus | None:
    """Return the guard of a run by its record on this machine; None if there never was one."""
    state = read_record(GuardState, RunDir.from_name(run).guard)
    if state is None:
        return None
    if not processes.is_from_this_machine(state):
        return GuardStatus(state, GuardLiveness.ELSEWHERE, state.time)
    return GuardStatus(
        state, GuardLiveness.LIVES if processes.is_guard_running(state) else GuardLiveness.DIED, state.time
    )


def is_guarded(run: str) -> bool:
    """Return whether a guard on this machine may restart the run."""
    status = local_guard(run)
    return status is not None and status.liveness is GuardLiveness.LIVES


def guard_line(status: GuardStatus) -> str:
    """Describe what a run's guard is doing, or how to replace it."""
    state, machine = status.state, status.state.machine.partition(" ")[0]
    if status.is_gone:
        event = "last heard" if state.pid else "asked for"  # when it died, nobody knows
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.heard_at))
        died = (
            f"process {state.pid} on {machine} died while {state.state}"
            if state.pid
            else f"it never started on {machine}"
        )
        place = fmt_if(" in {}", shlex.quote(state.directory)) if state.directory != str(Path.cwd()) else ""
        command = (
            fmt_if(f"`{program_name()} launch {{}}`{place}", state.command)
            or "the same launch command, with --resume auto,"
        )
        purpose = "finish what follows the run" if status.is_finishing else "guard the run again"
        return clean(f"guard: GONE, {event} at {at} ({died}); to {purpose}, use {command}")
    times = pluralize(state.restarts, "restart")
    location = f" on {machine}" if status.liveness is GuardLiveness.ELSEWHERE else ""
    if not state.pid:
        return f"guard{location}: starting"
    restart_count = f"{times}, {state.in_vain} of {state.limit} allowed without progress"
    return clean(f"guard{location}: {state.state}, {restart_count}{fmt_if('; {}', state.message)}")


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


def disk_words(hosts: Mapping[str, Sequence[DiskSpace]]) -> str:
    """Return which disks of the run are nearly full; '' if none is."""
    hosts_by_space: dict[str, list[str]] = {}
    for name, disks in hosts.items():
        for disk in disks:
            if is_nearly_full(disk.free_bytes, disk.total_bytes):
                hosts_by_space.setdefault(f"{disk.free_bytes / (1 << 30):.1f} GiB left at {disk.path}", []).append(name)
    return fmt_if(
        "{}; make room there", "; ".join(f"{fold_names(names)}: {space}" for space, names in hosts_by_space.items())
    )


def run_notify_command(command: str, event: str, run: str, message: str) -> str:
    """Run the user's command; return why that failed, or ''."""
    env = os.environ | {"LLAMA405B_EVENT": event, "LLAMA405B_RUN": run, "LLAMA405B_MESSAGE": message}
    try:
        result = subprocess.run(
            ["/bin/sh", "-c", command],
            env=env,
            input=f"{run}: {event}: {message}\n",
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return fmt_if("exit code {}", result.returncode)
