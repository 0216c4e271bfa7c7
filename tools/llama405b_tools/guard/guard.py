"""Guard a run: when it fails or hangs, end what is left of it on every host and resume it from its newest checkpoint.

``launch --restart N`` leaves this process running on the operator's machine; it needs no terminal. It writes ``runs/<run>/guard.log`` for
people and ``guard.json`` for ``status``. It ends when the run finishes, when somebody stops the run, or after N restarts in a row without a
newer checkpoint. A run may continue without hosts that stay down, and takes them back later. After a run that ended well, the guard makes
and verifies the requested export, and runs the user's command.
"""

import collections
import contextlib
import dataclasses
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from llama405b.contract import reader
from llama405b.contract.checkpoints import step_of
from llama405b.contract.errors import EXIT_FAILED, RunError, UserError, fmt_if, pluralize
from llama405b.contract.files import append_line, set_private_umask, write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.records import Cause, CauseKind, EventKind, FailureRecord, GuardStage, GuardState, RunEvent
from llama405b.spec.plan import Plan
from llama405b_tools.agent import processes
from llama405b_tools.agent.messages import DiskSpace, HostRun
from llama405b_tools.agent.processes import machine_id
from llama405b_tools.hosts.fleet import Fleet, command_to_type
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import HostError, failure_texts, replies
from llama405b_tools.launch.request import LaunchRequest, requested_guard
from llama405b_tools.launch.start import StartError, launch, resumed_launch
from llama405b_tools.run.backends import backend_of_plan, run_verb_on, stop_launch
from llama405b_tools.run.follow import Ending, EndKind, RunMonitor, follow
from llama405b_tools.run.hang import Pace
from llama405b_tools.run.judge import Failure, unstopped_hosts
from llama405b_tools.run.query import (
    BEAT_S,
    GuardStatus,
    Notice,
    ask_hosts,
    disk_words,
    guard_of_hosts,
    guard_reports,
    newest_checkpoint,
    run_notify_command,
    unsaved_words,
)
from llama405b_tools.run.screen import show
from llama405b_tools.text.words import fold_names

NOTE_TIMEOUT_S = 60.0


def adopt_run(request: LaunchRequest, fleet: Fleet) -> Plan | None:
    """Return the plan of the requested run if its guard died and it is still running or finishing; else None.

    It must be the same run, by its hosts, program, settings and the names of its secrets. Its hosts are then told that
    a guard was requested.

    Raises:
        UserError: Its guard is alive.
        HostError: A host of it was lost meanwhile.
    """
    try:
        handle = ask_hosts(fleet, request.run)
    except UserError:
        return None  # it is new, or launch reports what is wrong
    host_runs = handle.host_runs
    status = _refuse_guarded(request, host_runs.values())
    alive = (
        host_runs
        if status and status.is_finishing and status.is_gone
        else {name: run for name, run in host_runs.items() if run.alive}
    )
    if not alive or any(run.stopped_by for run in host_runs.values()):
        return None  # which launch reports
    plan = handle.fetch_plan()
    if not _matches_request(request, fleet, plan) or {run.created for run in alive.values()} != {plan.created}:
        return None
    send_guard_note(fleet, plan, requested_guard(request))
    return plan


def _refuse_guarded(request: LaunchRequest, runs: Iterable[HostRun]) -> GuardStatus | None:
    """Refuse a second guard; return what is known of the first."""
    status = guard_of_hosts(request.run, guard_reports(runs), time.time())
    if status and status.is_guarding:
        guard_process = f"process {status.state.pid} on {status.state.machine.partition(' ')[0]}"
        stop = command_to_type("stop", request.hosts_file, request.run)
        raise UserError(
            f"--run: {request.run!r} already has a guard ({guard_process}); `{stop}` ends both, or leave them running"
        )
    return status


def _matches_request(request: LaunchRequest, fleet: Fleet, plan: Plan) -> bool:
    """Return whether a plan belongs to this request, apart from --resume."""
    resume_value = dict(zip(plan.program, plan.program[1:], strict=False)).get("--resume", "")
    program = dataclasses.replace(request, resume=resume_value).training_program()
    resolves_auto = bool(request.settings.auto_setting)  # then what was chosen follows
    is_same_program = program == plan.program
    if plan.trains:  # translated settings may be in another order
        wanted, running = collections.Counter(program), collections.Counter(plan.program)
        is_same_program = wanted <= running if resolves_auto else wanted == running
    names = [node.name for node in plan.nodes]
    on_its_hosts = names == list(fleet.hosts) or (request.shrink and set(names) < set(fleet.hosts))
    return bool(is_same_program and on_its_hosts and set(plan.secrets) == set(request.secrets))


def send_guard_note(fleet: Fleet, plan: Plan, state: GuardState) -> dict[str, tuple[DiskSpace, ...]]:
    """Send every host of a run its guard's state; return the run's disks on each. A lost host gets it the next time."""

    def send(name: str) -> tuple[DiskSpace, ...]:
        return fleet.call(name, processes.note, NOTE_TIMEOUT_S, plan.run, name, plan.rdzv_id, state)

    return replies(fleet.call_each(send, [node.name for node in plan.nodes]))


NOT_ENDED_WELL, NOT_FOLLOWED = "because the run did not end well", "because nobody follows the run now"


def run_follow_up(
    request: LaunchRequest, ending: Ending, plan: Plan, fleet: Fleet, say: Callable[[str], object]
) -> tuple[str, str]:
    """Run what follows a good end; return why it failed, and a remark on what was skipped, each or ''."""
    if ending.kind is EndKind.LEFT:
        return "", _skipped_words(request, NOT_FOLLOWED)
    if ending.kind is not EndKind.WELL:
        return "", not_well_words(request, plan)
    fault = _export_and_run(request, plan, fleet, say)
    return fault, "" if fault or request.when_done else _cost_words(request, plan)


def not_well_words(request: LaunchRequest, plan: Plan) -> str:
    """Return what is skipped after a run that did not end well, and what its machines cost."""
    return "; ".join(filter(None, [_skipped_words(request, NOT_ENDED_WELL), _cost_words(request, plan)]))


def _export_and_run(request: LaunchRequest, plan: Plan, fleet: Fleet, say: Callable[[str], object]) -> str:
    """Export and verify the last checkpoint on rank 0's host, then run the command; return a fault or ''."""
    head = plan.nodes[0].name
    if request.export:
        say(f"exporting the last checkpoint to {request.export}")
        try:
            run_verb_on(fleet, head, ["export", plan.run, request.export, "--verify"], say, plan.setup)
        except (RunError, UserError) as error:
            not_run = "--when-done did not run" if request.when_done else ""
            return "; ".join(filter(None, [f"--export failed: {error}", not_run, _cost_words(request, plan)]))
        if request.settings.tracking.log_model:
            try:
                run_verb_on(fleet, head, ["track", plan.run, "--model", request.export], say, plan.setup)
            except (RunError, UserError) as error:  # the model is there
                retry_command = f"llama405b track --run {plan.run} --model {request.export}"
                say(f"the model was not sent to W&B ({error}); once {head} has a key, type there: {retry_command}")
    if request.when_done:
        say(f"running {request.when_done}")
        env = os.environ | {"LLAMA405B_RUN": plan.run}
        result = subprocess.run(["/bin/sh", "-c", request.when_done], env=env, stdin=subprocess.DEVNULL, check=False)
        if result.returncode:
            return f"--when-done failed (exit code {result.returncode}){fmt_if('; {}', _cost_words(request, plan))}"
    return ""


def _skipped_words(request: LaunchRequest, why: str) -> str:
    """Return what was skipped, and why; "" if nothing was requested."""
    flags = [flag for flag, value in (("--export", request.export), ("--when-done", request.when_done)) if value]
    return fmt_if("{} did not run, " + why, " and ".join(flags))


def _cost_words(request: LaunchRequest, plan: Plan) -> str:
    """Return what the machines of an ended run cost; "" without a price."""
    if not request.price:
        return ""
    per_hour = f"{request.price * plan.world_size:,.2f} an hour"
    return f"its machines cost {per_hour} until they are released ({plan.world_size} x {request.price:g})"


class Roster:
    """The hosts of a run that may shrink and grow again."""

    def __init__(self, hosts: Sequence[Host], min_hosts: int, after_s: float) -> None:
        """Begin with all of them.

        ``min_hosts``: hosts that the run needs; 0: all. ``after_s``: how long one is lost before the run does without it, and how long
        it is back before the run takes it again.
        """
        self.hosts = list(hosts)
        self.min_hosts, self.after_s = min_hosts, after_s
        self.lost_at: dict[str, float] = {}
        self.back_at: dict[str, float] = {}
        self.excluded: frozenset[str] = frozenset()  # of the attempt that runs

    def note_lost(self, unreached: Collection[str], now_s: float) -> None:
        """Note which hosts could not be reached to end what is left on them."""
        self.lost_at = {name: self.lost_at.get(name, now_s) for name in unreached}
        self.back_at = {name: at for name, at in self.back_at.items() if name not in self.lost_at}

    def note_back(self, reached: Collection[str], now_s: float) -> None:
        """Note which of the excluded hosts can be reached."""
        self.back_at = {name: self.back_at.get(name, now_s) for name in reached}

    def can_grow(self, now_s: float) -> bool:
        """Return whether an excluded host has been back for long enough."""
        return any(now_s >= at + self.after_s for at in self.back_at.values())

    def choose_hosts(self, now_s: float) -> list[Host]:
        """Return the hosts to start on: all but those that stay down, if enough remain."""
        if not self.min_hosts:
            return self.hosts
        stay_lost = {name for name, at in self.lost_at.items() if now_s >= at + self.after_s}
        stay_lost |= self.excluded - self.back_at.keys()
        available = [host for host in self.hosts if host.name not in stay_lost]
        return available if len(available) >= self.min_hosts else self.hosts

    def note_started(self, hosts: Sequence[Host]) -> None:
        """Note on which hosts an attempt runs."""
        used = {host.name for host in hosts}
        self.excluded = frozenset(host.name for host in self.hosts if host.name not in used)
        self.lost_at, self.back_at = {}, {}

    def note_not_started(self, hosts: Sequence[Host]) -> None:
        """Note that no attempt could start on these hosts: exclude those that have just come back."""
        for host in hosts:
            self.back_at.pop(host.name, None)


RETURN_CHECK_S = 30.0  # between looks, and how long one may take
SAVE_TIMEOUT_S = 1800.0  # for the save


def find_returned(fleet: Fleet, roster: Roster) -> str:
    """Query the excluded hosts; return those that are back, if one has been for long enough."""
    outcomes = fleet.call_each(lambda name: fleet.connection(name).run("true", "", RETURN_CHECK_S), roster.excluded)
    roster.note_back([name for name, answer in outcomes.items() if not isinstance(answer, HostError)], time.monotonic())
    return fold_names(sorted(roster.back_at)) if roster.can_grow(time.monotonic()) else ""


def stop_to_grow(fleet: Fleet, plan: Plan, returned: str) -> None:
    """Save and stop this attempt so that the next can use all hosts."""
    head = plan.nodes[0].name
    cause = Cause(CauseKind.STOPPED, head, by=f"its guard ({returned} is back)")
    backend_of_plan(plan).stop_launch(fleet, plan, FailureRecord(plan.attempt, head, cause), SAVE_TIMEOUT_S)


RETRY_S = (5.0, 10.0, 20.0, 30.0, 60.0)  # between tries to restart; the last one repeats for as long as it takes
WAITING_AFTER_S = 120.0  # without a run: then the user is told that it does not come back
STUCK_S = 900.0  # longer than any one try to bring a run back
PAGED_NOTICES = {EventKind.AFTER_SAVE_FAILED: Notice.AFTER_SAVE, EventKind.BUDGET: Notice.BUDGET}
END_STAGES = {EndKind.STOPPED: (GuardStage.STOPPED, Notice.STOPPED)}


@dataclasses.dataclass(frozen=True, slots=True)
class GuardInput:
    """What a guard reads from standard input: the launch, its hosts, and the plan that is running."""

    request: LaunchRequest
    hosts: tuple[Host, ...]
    plan: Plan


class HopelessError(Exception):
    """No restart would help; says why, as a clause."""


class StoppedError(Exception):
    """Somebody stopped the run; says who."""


class Guard:
    """Follows a run and restarts it."""

    def __init__(self, request: LaunchRequest, hosts: Sequence[Host], plan: Plan, fleet: Fleet) -> None:
        self.request = request
        self.first_plan = plan  # of which each host's ranks are known
        self.plan = plan
        self.full_fleet = fleet
        self.fleet = fleet.subset([node.name for node in plan.nodes])
        self.roster = Roster(hosts, request.shrink, request.shrink_after_s)
        self.roster.note_started([host for host in hosts if plan.find_node(host.name)])
        pid_start = processes.start_time(os.getpid()) or 0
        self.record = dataclasses.replace(
            requested_guard(request), machine=machine_id(), pid=os.getpid(), pid_start=pid_start
        )
        self.note_lock = threading.Lock()
        self.is_over = threading.Event()
        self.has_news = threading.Event()
        self.progress_at = self.notified_at = time.monotonic()
        self.unsaved = ""  # why saves fail now
        self.has_ended = False  # the run has, and what follows is under way
        self.pages = collections.deque[RunEvent]()  # that the user is to be told
        self.down_at = math.inf  # since when the run has been down
        self.notified = set[Notice]()  # what lasts, and the user was told
        self.pace = Pace(load_s=request.settings.timeouts.load, min_hang_s=request.hang_after_s)

    def main(self, on_watching: Callable[[], object] = lambda: None) -> int:
        """Guard the run to its end, and keep its hosts informed; return the exit code. ``on_watching``: called once it does."""
        self.set_stage(GuardStage.WATCHING, "")
        on_watching()
        threading.Thread(target=self.keep_beating, daemon=True).start()
        if self.request.shrink:
            threading.Thread(target=self.watch_for_returns, daemon=True).start()
        try:
            return self.follow_to_end()
        finally:
            self.end()

    def keep_beating(self) -> None:
        """Send heartbeats until the guard ends, and at once when there is news."""
        while not self.is_over.is_set():
            self.send_heartbeat()
            self.has_news.wait(min(BEAT_S, self.request.notify_every_s or BEAT_S))
            self.has_news.clear()

    def watch_for_returns(self) -> None:
        """Watch for excluded hosts until the guard ends; once one is back, have the attempt save and end."""
        while not self.is_over.wait(min(RETURN_CHECK_S, self.request.shrink_after_s / 3)):
            if (
                self.roster.excluded
                and not self.has_ended
                and self.down_at == math.inf
                and self.saves_at_end
                and (returned := find_returned(self.full_fleet, self.roster))
            ):
                log(f"{returned}: back; the attempt saves and ends so that the next uses all hosts")
                stop_to_grow(self.fleet, self.plan, returned)

    @property
    def saves_at_end(self) -> bool:
        """Whether a stopped attempt saves first, so that no step is lost; assumed of the user's own program."""
        return (self.request.saves or self.request.config is None) and not self.unsaved

    def send_heartbeat(self) -> None:
        """Tell the hosts that the guard is alive, and the user if it is time; a hung guard sends nothing."""
        now = time.monotonic()
        if now > self.progress_at + STUCK_S:
            return
        waiting_reason = self.record.message if now > self.down_at + WAITING_AFTER_S else ""
        troubles = {
            Notice.DISK_FULL: disk_words(self.update_hosts()),
            Notice.NOT_SAVED: self.unsaved,
            Notice.WAITING: waiting_reason,
        }
        self.send_pages()
        if any(self.notify_once(notice, why) for notice, why in troubles.items()):
            return  # the command may have taken so long that the hosts are to be told again
        if self.request.notify_every_s and now >= self.notified_at + self.request.notify_every_s:
            self.notified_at = now
            self.notify(Notice.HEARTBEAT, f"{self.record.state}{fmt_if('; {}', self.record.message)}")

    def notify_once(self, notice: Notice, why: str) -> bool:
        """Notify the user of a problem, once until it has passed; return whether it did."""
        if not why:
            self.notified.discard(notice)
        if not why or notice in self.notified:
            return False
        self.notified.add(notice)
        log(f"{notice}: {why}")
        self.notify(notice, why)
        return True

    def note_progress(self, monitor: RunMonitor | None = None) -> bool:
        """Note that the guard does not hang, and whether saves fail; return False, to follow the run to its end."""
        self.progress_at = time.monotonic()
        self.unsaved = (
            unsaved_words(monitor.failed_saves) or fmt_if("no checkpoint {}", monitor.late_save()) if monitor else ""
        )
        while monitor and monitor.pages:
            self.pages.append(monitor.pages.popleft())
            self.has_news.set()
        return False

    def send_pages(self) -> None:
        """Notify the user of each pending event."""
        with contextlib.suppress(IndexError):  # there is none left
            while True:
                event = self.pages.popleft()
                log(f"{PAGED_NOTICES[event.kind]}: {event.detail}")
                self.notify(PAGED_NOTICES[event.kind], event.detail)

    def update_hosts(self) -> dict[str, tuple[DiskSpace, ...]]:
        """Send the hosts the guard's state; one call at a time, so that no older state arrives last."""
        with self.note_lock:
            return send_guard_note(self.fleet, self.plan, self.record)

    def end(self) -> None:
        """Stop beating, and tell the hosts how it ended."""
        self.is_over.set()
        self.has_news.set()
        self.update_hosts()

    def follow_to_end(self) -> int:
        """Guard the run to its end; returns the exit code."""
        while True:
            ending = follow(self.fleet, self.plan, self.pace, self.note_progress)
            if ending.failure is None and ending.kind is not EndKind.RESTART:
                self.send_pages()
                return self.finish(ending)
            try:
                self.recover(ending, ending.failure)
            except HopelessError as error:
                return self.give_up(f"{ending.words}; {error}")
            except StoppedError as error:
                self.set_stage(GuardStage.STOPPED, f"stopped by {error}")
                return EXIT_FAILED

    def finish(self, ending: Ending) -> int:
        """Run what follows the end of the run, and report it; return the exit code."""
        self.has_ended = True
        stage, notice = END_STAGES.get(ending.kind, (GuardStage.ENDED, Notice.END))
        self.progress_at = math.inf  # for as long as what follows takes
        if ending.kind is EndKind.WELL and (self.request.export or self.request.when_done):
            self.set_stage(GuardStage.FINISHING, ending.words)
        fault, remark = run_follow_up(self.request, ending, self.plan, self.fleet, log)
        summary = "; ".join(filter(None, [ending.words, fault, remark]))
        self.set_stage(stage, summary)
        self.notify(Notice.WHEN_DONE if fault else notice, summary)
        return EXIT_FAILED if fault else ending.code

    def recover(self, ending: Ending, failure: Failure | None) -> None:
        """Restart the run after a failure, and report both; None: a requested restart, which is no incident."""
        if failure is None:
            cause = Cause(CauseKind.STOPPED, by=ending.stopped_by)
            self.record = dataclasses.replace(self.record, cause=cause)
            self.note_checkpoint()
        else:
            self.record = dataclasses.replace(self.record, cause=failure.cause)
            self.write_event(EventKind.FAILED)
            self.count_restart(ending)
        self.set_stage(GuardStage.RECOVERING, ending.words)
        if failure:
            self.notify(Notice.INCIDENT, ending.words)
        self.restart()
        self.note_restart(ending)

    def note_restart(self, ending: Ending) -> None:
        """Count a restart, and report it."""
        self.record, self.down_at = dataclasses.replace(self.record, restarts=self.record.restarts + 1), math.inf
        self.write_event(EventKind.RESTARTED, self.record.checkpoint)
        source, without = self.record.checkpoint or "the weights", fold_names(sorted(self.roster.excluded))
        message = f"running again{fmt_if(' without {}', without)} after {ending.words} (restart {self.record.restarts}, from {source})"
        self.set_stage(GuardStage.WATCHING, message)
        self.notify(Notice.RECOVERY, message)

    def count_restart(self, ending: Ending) -> None:
        """Count a restart that is about to be tried, from the newest checkpoint."""
        if ending.would_fail_again and not self.record.restarts:  # after a restart a host changed, and may change back
            raise HopelessError("the trainer refused its input and would refuse it again")
        self.note_checkpoint()
        checkpoint, in_vain = self.record.checkpoint, self.record.in_vain
        if in_vain >= self.request.restart:
            since = fmt_if("since {}", checkpoint) or "and no checkpoint yet"
            raise HopelessError(f"that was after {pluralize(in_vain, 'restart')} without a newer checkpoint ({since})")
        self.record = dataclasses.replace(self.record, in_vain=in_vain + 1)

    def note_checkpoint(self) -> None:
        """Note the newest checkpoint; if it is newer than the one known, the restarts until now were not in vain."""
        latest, current = newest_checkpoint(self.fleet, self.plan.run), self.record.checkpoint
        if latest and (not current or step_of(latest) > step_of(Path(current))):
            self.record = dataclasses.replace(self.record, checkpoint=str(latest), in_vain=0)

    def restart(self) -> None:
        """End what is left on every host and start again, retrying until that works."""
        last_reason, self.down_at = "", time.monotonic()
        for pause_s in itertools.chain(RETRY_S, itertools.repeat(RETRY_S[-1])):
            self.note_progress()
            try:
                self.stop_remaining()
                return self.relaunch()
            except RunError as error:
                why = str(error)
            if why != last_reason:
                last_reason = why
                self.set_stage(GuardStage.RECOVERING, f"cannot start yet: {why}")
            time.sleep(pause_s)
        raise AssertionError("it is tried for ever")

    def stop_remaining(self) -> None:
        """End what is left on every host."""
        outcomes = stop_launch(self.plan, self.fleet)
        for end in replies(outcomes).values():
            if end.stopped_by:
                raise StoppedError(end.stopped_by)
        now_s = time.monotonic()
        self.roster.note_lost(failure_texts(outcomes), now_s)
        chosen_hosts = {host.name for host in self.roster.choose_hosts(now_s)}
        if remains := {name: why for name, why in unstopped_hosts(outcomes).items() if name in chosen_hosts}:
            raise RunError("; ".join(f"{name}: {why}" for name, why in remains.items()))

    def relaunch(self) -> None:
        """Launch the run from its newest checkpoint."""
        roster = self.roster
        request, hosts = resumed_launch(self.request, roster.choose_hosts(time.monotonic()), self.first_plan)
        fleet, has_fewer_hosts = self.full_fleet.subset([host.name for host in hosts]), len(hosts) < len(roster.hosts)
        try:
            self.plan = launch(request, hosts, fleet, is_restart=True, has_fewer_hosts=has_fewer_hosts)
        except StartError as error:
            self.plan, self.fleet = error.plan, fleet  # something of this attempt may be left, to be ended next
            roster.note_not_started(hosts)
            raise
        except RunError:
            roster.note_not_started(hosts)
            raise
        except UserError as error:
            if has_fewer_hosts:  # the others may come back
                raise RunError(str(error)) from None
            raise HopelessError(f"it cannot be resumed: {error}") from None
        self.fleet = fleet
        roster.note_started(hosts)

    def write_event(self, kind: EventKind, path: str = "") -> None:
        """Write an event of the guard's own."""
        record = self.record
        event = RunEvent(time.time(), "guard", kind, self.plan.attempt, None, path, record.restarts, cause=record.cause)
        with contextlib.suppress(OSError):
            append_line(RunDir.from_name(self.plan.run).events("guard"), reader.dumps(event))

    def give_up(self, why: str) -> int:
        """End what is left, and report why the guard gives up."""
        stop_launch(self.plan, self.fleet)
        why = "; ".join(filter(None, [why, not_well_words(self.request, self.plan)]))
        self.set_stage(GuardStage.GAVE_UP, why)
        self.notify(Notice.GAVE_UP, why)
        return EXIT_FAILED

    def set_stage(self, stage: GuardStage, message: str) -> None:
        """Note what the guard does, and tell the hosts soon."""
        self.write_record(stage, message)
        self.has_news.set()

    def write_record(self, stage: GuardStage, message: str) -> None:
        """Write the record and a line of the log."""
        self.record = dataclasses.replace(self.record, state=stage, message=message, time=time.time())
        with contextlib.suppress(OSError):  # a full disk here is no reason to leave the run alone
            write_json(RunDir.from_name(self.plan.run).guard, self.record)
        log(f"{stage}{fmt_if(': {}', message)}")

    def notify(self, event: Notice, message: str) -> None:
        """Run the user's command; if it fails, that is logged and changes nothing."""
        if not self.request.notify:
            return
        if fault := run_notify_command(self.request.notify, event, self.plan.run, message):
            show(f"guard  --notify failed ({fault})")


def log(line: str) -> None:
    """Write a line of the guard's log, which is its standard output."""
    show(f"guard  {time.strftime('%Y-%m-%d %H:%M:%S')}  {line}")


def main() -> int:
    """Entry point of ``python -m llama405b_tools.guard.guard FD``; reads what to guard from standard input.

    Once it watches, it says so in a byte to the descriptor, and closes that.
    """
    ready = os.fdopen(int(sys.argv[1]), "wb", 0)
    set_private_umask()
    guard_input = reader.loads(GuardInput, sys.stdin.buffer.read(), "the guard's order")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what it starts must not read from there
    # neither Ctrl-C nor the end of the terminal may end the guard
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Fleet(guard_input.hosts) as fleet:
        guard = Guard(guard_input.request, guard_input.hosts, guard_input.plan, fleet)

        def on_dismissed(*_: object) -> None:
            guard.write_record(GuardStage.STOPPED, "dismissed: the run was stopped or launched again")
            # at once: no `finally` of the interrupted code may run
            os._exit(EXIT_FAILED)

        def announce() -> None:
            with contextlib.suppress(OSError), ready:  # whoever started it may be gone
                ready.write(b"+")

        signal.signal(signal.SIGTERM, on_dismissed)
        try:
            return guard.main(announce)
        except Exception as error:
            guard.set_stage(GuardStage.GAVE_UP, f"the guard itself failed: {type(error).__name__}: {error}")
            guard.update_hosts()
            guard.notify(Notice.GAVE_UP, guard.record.message)
            raise


if __name__ == "__main__":
    sys.exit(main())
