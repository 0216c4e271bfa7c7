"""Guard a run: when it fails or hangs, end what is left of it on every host and resume it from its newest checkpoint.

``launch --restart N`` leaves this process running on the operator's machine; it needs no terminal. It writes
``runs/<run>/guard.log`` for people and ``guard.json`` for ``status``. It ends when the run finishes, when somebody stops
the run, or after N restarts in a row without a newer checkpoint.
"""

import collections
import contextlib
import dataclasses
import itertools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from llama405b.contract import reader
from llama405b.contract.causes import Cause, CauseKind
from llama405b.contract.checkpoints import step_of
from llama405b.contract.errors import FAILED, RunError, UserError
from llama405b.contract.events import EventKind, RunEvent
from llama405b.contract.files import append_line, write_json
from llama405b.contract.paths import UMASK, RunDir
from llama405b.contract.phrases import counted, given
from llama405b.contract.plan import Plan
from llama405b.contract.records import GuardStage
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.outcomes import replies, unanswered
from llama405b_tools.hosts.printed_commands import hosts_argument
from llama405b_tools.remote import processes
from llama405b_tools.remote.guarding import end_own_session, machine_id
from llama405b_tools.remote.messages.guard_notes import NoteReply
from llama405b_tools.run.after_end import after_end, not_well_words
from llama405b_tools.run.follow import Ending, EndKind, Limits, RunMonitor, follow
from llama405b_tools.run.guard_hosts import tell_hosts
from llama405b_tools.run.guard_record import (
    BEAT_S,
    Notice,
    asked_for,
    disk_words,
    run_command,
    unsaved_words,
)
from llama405b_tools.run.judge import Failure, first_step, not_stopped
from llama405b_tools.run.launch import launch, resumed
from llama405b_tools.run.query import newest_checkpoint
from llama405b_tools.run.regrow import LOOK_S, end_to_grow, found_again
from llama405b_tools.run.request import LaunchRequest
from llama405b_tools.run.roster import Roster
from llama405b_tools.run.screen import show
from llama405b_tools.run.start_everywhere import StartError, stop_launch
from llama405b_tools.text.fold import fold_names

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
        """Guard the run to its end, and tell its hosts all the while; returns the exit code."""
        self.say(GuardStage.WATCHING, "")
        threading.Thread(target=self.keep_beating, daemon=True).start()
        if self.request.shrink:
            threading.Thread(target=self.keep_looking, daemon=True).start()
        try:
            return self.watch()
        finally:
            self.end()

    def keep_beating(self) -> None:
        """Beat until the guard ends, and whenever there is news."""
        while not self.is_over.is_set():
            self.beat()
            self.has_news.wait(min(BEAT_S, self.request.notify_every_s or BEAT_S))
            self.has_news.clear()

    def keep_looking(self) -> None:
        """Look for hosts that the run does without, until the guard ends; once one is back, have the attempt save and end."""
        while not self.is_over.wait(min(LOOK_S, self.request.shrink_after_s / 3)):
            if (
                self.roster.left_out
                and not self.has_ended
                and self.down_at == math.inf
                and self.ending_saves
                and (back := found_again(self.everywhere, self.roster))
            ):
                log(f"{back}: back; the attempt saves and ends, to go on there as well")
                end_to_grow(self.fleet, self.plan, back)

    @property
    def ending_saves(self) -> bool:
        """Whether an attempt that is ended saves first, so that no step is lost; of a program of the user's own we take it so."""
        return (self.request.saves or self.request.config is None) and not self.unsaved

    def beat(self) -> None:
        """Let the hosts know that the guard lives, and the user if it is time; a guard that hangs is to be missed."""
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
        """Tell the user what is wrong with a run that is not over, once until it has passed; returns whether it did."""
        if not why:
            self.notified.discard(notice)
        if not why or notice in self.notified:
            return False
        self.notified.add(notice)
        log(f"{notice}: {why}")
        self.notify(notice, why)
        return True

    def note_progress(self, watch: RunMonitor | None = None) -> bool:
        """Note that the guard does not hang, and whether saves fail; always False: it is to follow the run to its end."""
        self.progress_at = time.monotonic()
        self.unsaved = (
            unsaved_words(watch.failed_saves) or given("no checkpoint {}", watch.late_save()) if watch else ""
        )
        while watch and watch.pages:
            self.pages.append(watch.pages.popleft())
            self.has_news.set()
        return False

    def page(self) -> None:
        """Tell the user what happened once."""
        with contextlib.suppress(IndexError):  # there is none left
            while True:
                event = self.pages.popleft()
                log(f"{PAGES[event.kind]}: {event.detail}")
                self.notify(PAGES[event.kind], event.detail)

    def tell(self) -> dict[str, NoteReply]:
        """Tell the hosts what the guard does now; one at a time, so that none hears the older news last."""
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
        """Do what is to follow the end of the run, and report it; returns the exit code."""
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
        """Restart the run after a failure, and report both; None: somebody asked for that, which is no incident.

        Raises:
            HopelessError: No restart would help.
            StoppedError: Somebody stopped the run.
        """
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
        """Count a restart that is about to be tried, from the newest checkpoint.

        Raises:
            HopelessError: It would be refused, or too many before it led to no newer checkpoint.
        """
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
        """End what is left on every host and start again, retrying until that works.

        Raises:
            HopelessError: The run cannot be resumed, whatever the hosts do.
            StoppedError: Somebody stopped the run.
        """
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
        """End what is left on every host.

        Raises:
            RunError: Something remains.
            StoppedError: Somebody stopped the run.
        """
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
        """Launch the run from its newest checkpoint.

        Raises:
            RunError: That is not possible now.
            HopelessError: It never will be.
        """
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
    """Entry point of ``python -m llama405b_tools.run.guard``; reads what to guard from standard input."""
    os.umask(UMASK)
    order = reader.loads(GuardInput, sys.stdin.buffer.read(), "the guard's order")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the order has secrets: its file must not live on as ours
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Fleet(order.hosts) as fleet:
        guard = Guard(order.request, order.hosts, order.plan, fleet)

        def dismissed(*_: object) -> None:
            guard.note(GuardStage.STOPPED, "dismissed: the run is stopped, or launched anew")
            end_own_session(RunDir.here(order.plan.run))
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
