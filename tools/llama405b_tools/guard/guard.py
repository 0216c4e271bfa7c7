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
from llama405b.contract.errors import FAILED, RunError, UserError, counted, given
from llama405b.contract.files import append_line, keep_private, write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.records import Blame, Cause, CauseKind, EventKind, GuardStage, GuardState, RunEvent
from llama405b.spec.plan import Plan
from llama405b_tools.agent import processes
from llama405b_tools.agent.messages import GuardNote, HostRun, NoteReply
from llama405b_tools.agent.processes import end_own_session, machine_id
from llama405b_tools.hosts.fleet import Fleet, hosts_argument, program_name
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import HostError, replies, unanswered
from llama405b_tools.launch.request import LaunchRequest, asked_for
from llama405b_tools.launch.start import StartError, launch, resumed
from llama405b_tools.run.backends import backend_of_plan, call_on, stop_launch
from llama405b_tools.run.follow import Ending, EndKind, Limits, RunMonitor, follow
from llama405b_tools.run.judge import Failure, first_step, not_stopped
from llama405b_tools.run.query import (
    BEAT_S,
    GuardStatus,
    Notice,
    ask_hosts,
    disk_words,
    guard_of_hosts,
    heard_by,
    known_of,
    newest_checkpoint,
    planned,
    run_command,
    unsaved_words,
)
from llama405b_tools.run.screen import show
from llama405b_tools.text.words import fold_names

NOTE_TIMEOUT_S = 60.0


def adopt(request: LaunchRequest, fleet: Fleet) -> Plan | None:
    """Return the plan of the requested run if its guard died and it is still running or finishing; else None.

    It must be the same run, by its hosts, program, settings and the names of its secrets. Its hosts are then told that
    a guard was requested.

    Raises:
        UserError: Its guard is alive.
        HostError: A host of it was lost meanwhile.
    """
    try:
        _, seen = ask_hosts(fleet, request.run)
    except UserError:
        return None  # it is new, or launch reports what is wrong
    known = known_of(seen)
    status = _refuse_guarded(request, known.values())
    alive = (
        known if status and status.finishes and status.gone else {name: run for name, run in known.items() if run.alive}
    )
    if not alive or any(run.stopped_by for run in known.values()):
        return None  # which launch reports
    plan = planned(fleet, next(iter(alive)), request.run)
    if not _is_same(request, fleet, plan) or {run.created for run in alive.values()} != {plan.created}:
        return None
    tell_hosts(fleet, plan, asked_for(request))
    return plan


def _refuse_guarded(request: LaunchRequest, runs: Iterable[HostRun]) -> GuardStatus | None:
    """Refuse a second guard; return what is known of the first."""
    status = guard_of_hosts(request.run, heard_by(runs), time.time())
    if status and status.guards:
        who = f"process {status.state.pid} on {status.state.machine.partition(' ')[0]}"
        stop = f"{program_name()} stop{hosts_argument(request.hosts_file)} --run {request.run}"
        raise UserError(
            f"--run: {request.run!r} already has a guard ({who}); `{stop}` ends both, or leave them running"
        )
    return status


def _is_same(request: LaunchRequest, fleet: Fleet, plan: Plan) -> bool:
    """Return whether a plan belongs to this request, apart from --resume."""
    resumed = dict(zip(plan.program, plan.program[1:], strict=False)).get("--resume", "")
    program = dataclasses.replace(request, resume=resumed).training_program()
    chooses = bool(request.settings.left_to_plan)  # then what was chosen follows
    same = program == (plan.program[: len(program)] if chooses else plan.program)
    names = [node.name for node in plan.nodes]
    on_its_hosts = names == list(fleet.hosts) or (request.shrink and set(names) < set(fleet.hosts))
    return bool(same and on_its_hosts and set(plan.secrets) == set(request.secrets))


def tell_hosts(fleet: Fleet, plan: Plan, state: GuardState) -> dict[str, NoteReply]:
    """Send every host of a run its guard's state; return the answers. A lost host gets it the next time."""
    notes = {node.name: GuardNote(plan.run, node.name, plan.rdzv_id, state) for node in plan.nodes}
    return replies(fleet.ask_all("note", notes, NoteReply, NOTE_TIMEOUT_S))


NOT_WELL, LEFT = "because the run did not end well", "because nobody follows the run now"


def after_end(
    request: LaunchRequest, ending: Ending, plan: Plan, fleet: Fleet, say: Callable[[str], object]
) -> tuple[str, str]:
    """Run what follows a good end; return why it failed, and a remark on what was skipped, each or ''."""
    if ending.kind is EndKind.LEFT:
        return "", _left_out(request, LEFT)
    if ending.kind is not EndKind.WELL:
        return "", not_well_words(request, plan)
    fault = _follow_up(request, plan, fleet, say)
    return fault, "" if fault or request.when_done else _cost(request, plan)


def not_well_words(request: LaunchRequest, plan: Plan) -> str:
    """Return what is skipped after a run that did not end well, and what its machines cost."""
    return "; ".join(filter(None, [_left_out(request, NOT_WELL), _cost(request, plan)]))


def _follow_up(request: LaunchRequest, plan: Plan, fleet: Fleet, say: Callable[[str], object]) -> str:
    """Export and verify the last checkpoint on rank 0's host, then run the command; return a fault or ''."""
    head = plan.nodes[0].name
    if request.export:
        say(f"exporting the last checkpoint to {request.export}")
        try:
            call_on(fleet, head, ["export", plan.run, request.export, "--verify"], say, plan.setup)
        except (RunError, UserError) as error:
            not_run = "--when-done did not run" if request.when_done else ""
            return "; ".join(filter(None, [f"--export failed: {error}", not_run, _cost(request, plan)]))
        if request.settings.tracking.log_model:
            try:
                call_on(fleet, head, ["track", plan.run, "--model", request.export], say, plan.setup)
            except (RunError, UserError) as error:  # the model is there
                again = f"llama405b track {plan.run} --model {request.export}"
                say(f"the model was not sent to W&B ({error}); once {head} has a key, type there: {again}")
    if request.when_done:
        say(f"running {request.when_done}")
        env = os.environ | {"LLAMA405B_RUN": plan.run}
        done = subprocess.run(["/bin/sh", "-c", request.when_done], env=env, stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            return f"--when-done failed (exit code {done.returncode}){given('; {}', _cost(request, plan))}"
    return ""


def _left_out(request: LaunchRequest, why: str) -> str:
    """Return what was skipped, and why; "" if nothing was requested."""
    asked = [flag for flag, value in (("--export", request.export), ("--when-done", request.when_done)) if value]
    return given("{} did not run, " + why, " and ".join(asked))


def _cost(request: LaunchRequest, plan: Plan) -> str:
    """Return what the machines of an ended run cost; "" without a price."""
    if not request.price:
        return ""
    return f"its machines cost {request.price * plan.world:,.2f} an hour until they are released ({plan.world} x {request.price:g})"


class Roster:
    """The hosts of a run that may shrink and grow again."""

    def __init__(self, hosts: Sequence[Host], least: int, after_s: float) -> None:
        """Begin with all of them.

        ``least``: hosts that the run needs; 0: all. ``after_s``: how long one is lost before the run does without it, and how long
        it is back before the run takes it again.
        """
        self.hosts = list(hosts)
        self.least, self.after_s = least, after_s
        self.lost_at: dict[str, float] = {}
        self.back_at: dict[str, float] = {}
        self.left_out: frozenset[str] = frozenset()  # of the attempt that runs

    def note_lost(self, unreached: Collection[str], now_s: float) -> None:
        """Note which hosts could not be reached to end what is left on them."""
        self.lost_at = {name: self.lost_at.get(name, now_s) for name in unreached}
        self.back_at = {name: at for name, at in self.back_at.items() if name not in self.lost_at}

    def note_back(self, reached: Collection[str], now_s: float) -> None:
        """Note which of the excluded hosts can be reached."""
        self.back_at = {name: self.back_at.get(name, now_s) for name in reached}

    def grows(self, now_s: float) -> bool:
        """Return whether an excluded host has been back for long enough."""
        return any(now_s >= at + self.after_s for at in self.back_at.values())

    def chosen(self, now_s: float) -> list[Host]:
        """Return the hosts to start on: all but those that stay down, if enough remain."""
        if not self.least:
            return self.hosts
        stay_lost = {name for name, at in self.lost_at.items() if now_s >= at + self.after_s}
        stay_lost |= self.left_out - self.back_at.keys()
        left = [host for host in self.hosts if host.name not in stay_lost]
        return left if len(left) >= self.least else self.hosts

    def started(self, hosts: Sequence[Host]) -> None:
        """Note on which hosts an attempt runs."""
        used = {host.name for host in hosts}
        self.left_out = frozenset(host.name for host in self.hosts if host.name not in used)
        self.lost_at, self.back_at = {}, {}

    def not_started(self, hosts: Sequence[Host]) -> None:
        """Note that no attempt could start on these hosts: exclude those that have just come back."""
        for host in hosts:
            self.back_at.pop(host.name, None)


LOOK_S = 30.0  # between looks, and how long one may take
SAVE_S = 1800.0  # for the save


def found_again(fleet: Fleet, roster: Roster) -> str:
    """Query the excluded hosts; return those that are back, if one has been for long enough."""
    found = fleet.each(lambda name: fleet.connection(name).run("true", "", LOOK_S), roster.left_out)
    roster.note_back([name for name, answer in found.items() if not isinstance(answer, HostError)], time.monotonic())
    return fold_names(sorted(roster.back_at)) if roster.grows(time.monotonic()) else ""


def end_to_grow(fleet: Fleet, plan: Plan, back: str) -> None:
    """Save and stop this attempt so that the next can use all hosts."""
    head = plan.nodes[0].name
    asked = Cause(CauseKind.STOPPED, head, by=f"its guard ({back} is back)")
    backend_of_plan(plan).stop_launch(fleet, plan, Blame(plan.attempt, head, asked), SAVE_S)


RETRY_S = (5.0, 10.0, 20.0, 30.0, 60.0)  # between tries to restart; the last one repeats for as long as it takes
WAITING_AFTER_S = 120.0  # without a run: then the user is told that it does not come back
STUCK_S = 900.0  # longer than any one try to bring a run back
PAGES = {EventKind.AFTER_SAVE_FAILED: Notice.AFTER_SAVE, EventKind.BUDGET: Notice.BUDGET}
ENDS = {EndKind.STOPPED: (GuardStage.STOPPED, Notice.STOPPED)}


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
        self.first = plan  # of which each host's ranks are known
        self.plan = plan
        self.everywhere = fleet
        self.fleet = fleet.among([node.name for node in plan.nodes])
        self.roster = Roster(hosts, request.shrink, request.shrink_after_s)
        self.roster.started([host for host in hosts if plan.find(host.name)])
        began = processes.start_time(os.getpid()) or 0
        self.record = dataclasses.replace(asked_for(request), machine=machine_id(), pid=os.getpid(), pid_start=began)
        self.telling = threading.Lock()
        self.is_over = threading.Event()
        self.has_news = threading.Event()
        self.progress_at = self.notified_at = time.monotonic()
        self.unsaved = ""  # why saves fail now
        self.has_ended = False  # the run has, and what follows is under way
        self.pages = collections.deque[RunEvent]()  # that the user is to be told
        self.down_at = math.inf  # since when the run has been down
        self.notified = set[Notice]()  # what lasts, and the user was told
        self.limits = Limits(request.hang_after_s, first_step(request.settings.timeouts.load).hang_s)

    def main(self) -> int:
        """Guard the run to its end, and keep its hosts informed; return the exit code."""
        self.say(GuardStage.WATCHING, "")
        threading.Thread(target=self.keep_beating, daemon=True).start()
        if self.request.shrink:
            threading.Thread(target=self.keep_looking, daemon=True).start()
        try:
            return self.watch()
        finally:
            self.end()

    def keep_beating(self) -> None:
        """Send heartbeats until the guard ends, and at once when there is news."""
        while not self.is_over.is_set():
            self.beat()
            self.has_news.wait(min(BEAT_S, self.request.notify_every_s or BEAT_S))
            self.has_news.clear()

    def keep_looking(self) -> None:
        """Watch for excluded hosts until the guard ends; once one is back, have the attempt save and end."""
        while not self.is_over.wait(min(LOOK_S, self.request.shrink_after_s / 3)):
            if (
                self.roster.left_out
                and not self.has_ended
                and self.down_at == math.inf
                and self.ending_saves
                and (back := found_again(self.everywhere, self.roster))
            ):
                log(f"{back}: back; the attempt saves and ends so that the next uses all hosts")
                end_to_grow(self.fleet, self.plan, back)

    @property
    def ending_saves(self) -> bool:
        """Whether a stopped attempt saves first, so that no step is lost; assumed of the user's own program."""
        return (self.request.saves or self.request.config is None) and not self.unsaved

    def beat(self) -> None:
        """Tell the hosts that the guard is alive, and the user if it is time; a hung guard sends nothing."""
        now = time.monotonic()
        if now > self.progress_at + STUCK_S:
            return
        waits = self.record.message if now > self.down_at + WAITING_AFTER_S else ""
        troubles = {Notice.DISK_FULL: disk_words(self.tell()), Notice.NOT_SAVED: self.unsaved, Notice.WAITING: waits}
        self.page()
        if any(self.notify_once(notice, why) for notice, why in troubles.items()):
            return  # the command may have taken so long that the hosts are to be told again
        if self.request.notify_every_s and now >= self.notified_at + self.request.notify_every_s:
            self.notified_at = now
            self.notify(Notice.HEARTBEAT, f"{self.record.state}{given('; {}', self.record.message)}")

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

    def note_progress(self, watch: RunMonitor | None = None) -> bool:
        """Note that the guard does not hang, and whether saves fail; return False, to follow the run to its end."""
        self.progress_at = time.monotonic()
        self.unsaved = (
            unsaved_words(watch.failed_saves) or given("no checkpoint {}", watch.late_save()) if watch else ""
        )
        while watch and watch.pages:
            self.pages.append(watch.pages.popleft())
            self.has_news.set()
        return False

    def page(self) -> None:
        """Notify the user of each pending event."""
        with contextlib.suppress(IndexError):  # there is none left
            while True:
                event = self.pages.popleft()
                log(f"{PAGES[event.kind]}: {event.detail}")
                self.notify(PAGES[event.kind], event.detail)

    def tell(self) -> dict[str, NoteReply]:
        """Send the hosts the guard's state; one call at a time, so that no older state arrives last."""
        with self.telling:
            return tell_hosts(self.fleet, self.plan, self.record)

    def end(self) -> None:
        """Stop beating, and tell the hosts how it ended."""
        self.is_over.set()
        self.has_news.set()
        self.tell()

    def watch(self) -> int:
        """Guard the run to its end; returns the exit code."""
        while True:
            ending = follow(
                self.fleet, self.plan, hosts_argument(self.request.hosts_file), self.limits, self.note_progress
            )
            if ending.failure is None and ending.kind is not EndKind.RESTART:
                self.page()
                return self.finish(ending)
            try:
                self.recover(ending, ending.failure)
            except HopelessError as error:
                return self.give_up(f"{ending.words}; {error}")
            except StoppedError as error:
                self.say(GuardStage.STOPPED, f"stopped by {error}")
                return FAILED

    def finish(self, ending: Ending) -> int:
        """Run what follows the end of the run, and report it; return the exit code."""
        self.has_ended = True
        stage, notice = ENDS.get(ending.kind, (GuardStage.ENDED, Notice.END))
        self.progress_at = math.inf  # for as long as what follows takes
        if ending.kind is EndKind.WELL and (self.request.export or self.request.when_done):
            self.say(GuardStage.FINISHING, ending.words)
        fault, more = after_end(self.request, ending, self.plan, self.fleet, log)
        said = "; ".join(filter(None, [ending.words, fault, more]))
        self.say(stage, said)
        self.notify(Notice.WHEN_DONE if fault else notice, said)
        return FAILED if fault else ending.code

    def recover(self, ending: Ending, failure: Failure | None) -> None:
        """Restart the run after a failure, and report both; None: a requested restart, which is no incident."""
        if failure is None:
            asked = Cause(CauseKind.STOPPED, by=ending.stopped_by)
            self.record = dataclasses.replace(self.record, cause=asked)
            self.note_checkpoint()
        else:
            self.record = dataclasses.replace(self.record, cause=failure.cause)
            self.event(EventKind.FAILED)
            self.count_try(ending)
        self.say(GuardStage.RECOVERING, ending.words)
        if failure:
            self.notify(Notice.INCIDENT, ending.words)
        self.restart()
        self.restarted(ending)

    def restarted(self, ending: Ending) -> None:
        """Count a restart, and report it."""
        self.record, self.down_at = dataclasses.replace(self.record, restarts=self.record.restarts + 1), math.inf
        self.event(EventKind.RESTARTED, self.record.checkpoint)
        source, without = self.record.checkpoint or "the weights", fold_names(sorted(self.roster.left_out))
        said = f"running again{given(' without {}', without)} after {ending.words} (restart {self.record.restarts}, from {source})"
        self.say(GuardStage.WATCHING, said)
        self.notify(Notice.RECOVERY, said)

    def count_try(self, ending: Ending) -> None:
        """Count a restart that is about to be tried, from the newest checkpoint."""
        if ending.refused and not self.record.restarts:  # after a restart a host changed, and may change back
            raise HopelessError("the trainer refused its input and would refuse it again")
        self.note_checkpoint()
        known, in_vain = self.record.checkpoint, self.record.in_vain
        if in_vain >= self.request.restart:
            since = given("since {}", known) or "and no checkpoint yet"
            raise HopelessError(f"that was after {counted(in_vain, 'restart')} without a newer checkpoint ({since})")
        self.record = dataclasses.replace(self.record, in_vain=in_vain + 1)

    def note_checkpoint(self) -> None:
        """Note the newest checkpoint; if it is newer than the one known, the restarts until now were not in vain."""
        newest, known = newest_checkpoint(self.fleet, self.plan.run), self.record.checkpoint
        if newest and (not known or step_of(newest) > step_of(Path(known))):
            self.record = dataclasses.replace(self.record, checkpoint=str(newest), in_vain=0)

    def restart(self) -> None:
        """End what is left on every host and start again, retrying until that works."""
        said, self.down_at = "", time.monotonic()
        for pause_s in itertools.chain(RETRY_S, itertools.repeat(RETRY_S[-1])):
            self.note_progress()
            try:
                self.stop_rest()
                return self.relaunch()
            except RunError as error:
                why = str(error)
            if why != said:
                said = why
                self.say(GuardStage.RECOVERING, f"cannot start yet: {why}")
            time.sleep(pause_s)
        raise AssertionError("it is tried for ever")

    def stop_rest(self) -> None:
        """End what is left on every host."""
        ends = stop_launch(self.plan, self.fleet)
        for end in replies(ends).values():
            if end.stopped_by:
                raise StoppedError(end.stopped_by)
        now_s = time.monotonic()
        self.roster.note_lost(unanswered(ends), now_s)
        wanted = {host.name for host in self.roster.chosen(now_s)}
        if remains := {name: why for name, why in not_stopped(ends).items() if name in wanted}:
            raise RunError("; ".join(f"{name}: {why}" for name, why in remains.items()))

    def relaunch(self) -> None:
        """Launch the run from its newest checkpoint."""
        roster = self.roster
        request, hosts = resumed(self.request, roster.chosen(time.monotonic()), self.first)
        fleet, fewer = self.everywhere.among([host.name for host in hosts]), len(hosts) < len(roster.hosts)
        try:
            self.plan = launch(request, hosts, fleet, again=True, fewer=fewer)
        except StartError as error:
            self.plan, self.fleet = error.plan, fleet  # something of this attempt may be left, to be ended next
            roster.not_started(hosts)
            raise
        except RunError:
            roster.not_started(hosts)
            raise
        except UserError as error:
            if fewer:  # the others may come back
                raise RunError(str(error)) from None
            raise HopelessError(f"it cannot be resumed: {error}") from None
        self.fleet = fleet
        roster.started(hosts)

    def event(self, kind: EventKind, path: str = "") -> None:
        """Write an event of the guard's own."""
        record = self.record
        event = RunEvent(time.time(), "guard", kind, self.plan.attempt, None, path, record.restarts, cause=record.cause)
        with contextlib.suppress(OSError):
            append_line(RunDir.here(self.plan.run).events("guard"), reader.dumps(event))

    def give_up(self, why: str) -> int:
        """End what is left, and report why the guard gives up."""
        stop_launch(self.plan, self.fleet)
        why = "; ".join(filter(None, [why, not_well_words(self.request, self.plan)]))
        self.say(GuardStage.GAVE_UP, why)
        self.notify(Notice.GAVE_UP, why)
        return FAILED

    def say(self, stage: GuardStage, message: str) -> None:
        """Note what the guard does, and tell the hosts soon."""
        self.note(stage, message)
        self.has_news.set()

    def note(self, stage: GuardStage, message: str) -> None:
        """Write the record and a line of the log."""
        self.record = dataclasses.replace(self.record, state=stage, message=message, time=time.time())
        with contextlib.suppress(OSError):  # a full disk here is no reason to leave the run alone
            write_json(RunDir.here(self.plan.run).guard, self.record)
        log(f"{stage}{given(': {}', message)}")

    def notify(self, event: Notice, message: str) -> None:
        """Run the user's command; if it fails, that is logged and changes nothing."""
        if not self.request.notify:
            return
        if fault := run_command(self.request.notify, event, self.plan.run, message):
            show(f"guard  --notify failed ({fault})")


def log(line: str) -> None:
    """Write a line of the guard's log, which is its standard output."""
    show(f"guard  {time.strftime('%Y-%m-%d %H:%M:%S')}  {line}")


def main() -> int:
    """Entry point of ``python -m llama405b_tools.guard.guard``; reads what to guard from standard input."""
    keep_private()
    order = reader.loads(GuardInput, sys.stdin.buffer.read(), "the guard's order")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the order has secrets: its file must not live on as ours
    # neither Ctrl-C nor the end of the terminal may end the guard
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Fleet(order.hosts) as fleet:
        guard = Guard(order.request, order.hosts, order.plan, fleet)

        def dismissed(*_: object) -> None:
            guard.note(GuardStage.STOPPED, "dismissed: the run was stopped or launched again")
            end_own_session(RunDir.here(order.plan.run))
            # at once: no `finally` of the interrupted code may run
            os._exit(FAILED)

        signal.signal(signal.SIGTERM, dismissed)
        try:
            return guard.main()
        except Exception as error:
            guard.say(GuardStage.GAVE_UP, f"the guard itself failed: {type(error).__name__}: {error}")
            guard.tell()
            guard.notify(Notice.GAVE_UP, guard.record.message)
            raise
        finally:
            end_own_session(RunDir.here(order.plan.run))


if __name__ == "__main__":
    sys.exit(main())
