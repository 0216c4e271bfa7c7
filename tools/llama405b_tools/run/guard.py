"""Guard a run: see that it failed or hangs, end what is left of it everywhere, resume it from its newest checkpoint.

``launch --restart N`` leaves this process behind on the operator's machine; it needs no terminal. It writes
``runs/<run>/guard.log`` for people and ``guard.json`` for ``status``, and ends with the run: well, when somebody stops
the run, or after N restarts in a row that brought no newer checkpoint.
"""

import dataclasses
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from llama405b.contract.errors import FAILED, STOPPED_FOLLOWING, RunError, UserError
from llama405b.contract.files import read_json, write_json
from llama405b.contract.paths import UMASK, RunDir
from llama405b.contract.plan import Plan, plan_from_json
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.hosts.typed import front_door, hosts_argument
from llama405b_tools.remote import processes
from llama405b_tools.run.follow import SLACK_S, Ending, Limits, follow
from llama405b_tools.run.guard_record import Guard, machine_id, of_run
from llama405b_tools.run.judge import step_of
from llama405b_tools.run.launch import launch, resumed
from llama405b_tools.run.query import ask, newest_checkpoint
from llama405b_tools.run.request import LaunchRequest
from llama405b_tools.run.start import StartError, stop_this

RETRY_S = (5.0, 10.0, 20.0, 30.0, 60.0)  # between tries to bring the hosts back; then the last, for as long as it takes
NOTIFY_TIMEOUT_S = 60.0
POLL_S = 0.3


def spawn(asked: LaunchRequest, hosts: Sequence[Host], plan: Plan) -> "subprocess.Popen[bytes]":
    """Start the guard of a run that is up, in a session of its own; secrets go through a pipe."""
    RunDir.here(plan.run).guard_log.parent.mkdir(parents=True, exist_ok=True)
    with RunDir.here(plan.run).guard_log.open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "llama405b_tools.run.guard"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    assert child.stdin
    child.stdin.write(pickle.dumps((asked, tuple(hosts), plan)))
    child.stdin.close()
    return child


def follow_log(child: "subprocess.Popen[bytes]", run: str, begin: int, hosts: str) -> int:
    """Print what the guard says until it ends, from ``begin`` (bytes) on; Ctrl-C only stops following."""
    try:
        with RunDir.here(run).guard_log.open(encoding="utf-8", errors="replace") as log:
            log.seek(begin)
            while True:
                ended = child.poll() is not None
                sys.stdout.write(log.read())
                sys.stdout.flush()
                if ended:
                    return child.returncode if child.returncode >= 0 else FAILED
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        print(f"\nno longer following; the run goes on, guarded. `{front_door()} stop{hosts} --run {run}` ends both")
        return STOPPED_FOLLOWING


def unguarded(asked: LaunchRequest, fleet: Fleet) -> Plan | None:
    """The run that is asked for, where it lives and its guard does not: the machine or the terminal died after its start.

    Only where it is the same run: hosts, program, settings and secrets, and the launch that this machine knows.
    """
    known = of_run(asked.run)
    if known and known[1] is not False and known[0]["state"] in ("watching", "recovering"):
        return None
    record = read_json(RunDir.here(asked.run).plan)
    try:
        plan = plan_from_json(record or {})
        _, seen = ask(fleet, asked.run)
    except (KeyError, TypeError, UserError, HostError):
        return None  # what is wrong launch says
    programs = {dataclasses.replace(asked, resume=resume).training_program() for resume in (asked.resume, "auto", "no")}
    same = plan.program in programs and [node.name for node in plan.nodes] == list(fleet.hosts)
    lives = [described["created"] for described in seen.values() if isinstance(described, dict) and described["alive"]]
    return plan if same and set(plan.secrets) == set(asked.secrets) and set(lives) == {plan.created} else None


class Watchman:
    """Follows a run and brings it back."""

    def __init__(self, asked: LaunchRequest, hosts: Sequence[Host], plan: Plan, fleet: Fleet) -> None:
        self.asked, self.hosts, self.plan, self.fleet = asked, hosts, plan, fleet
        began = processes.start_time(os.getpid()) or 0
        self.record = Guard(plan.run, os.getpid(), began, machine_id(), asked.restart)
        load_s = asked.config.timeouts.load if asked.config else 3600
        self.limits = Limits(asked.hang_after_s, load_s + SLACK_S)

    def main(self) -> int:
        """Guard the run to its end; returns the exit code."""
        self.say("watching", "")
        while True:
            ending = follow(self.fleet, self.plan, hosts_argument(self.asked.hosts_file), self.limits)
            if ending.failure is None:
                self.say("stopped" if ending.stopped_by else "ended", ending.words)
                self.notify("stopped" if ending.stopped_by else "end", ending.words)
                return ending.code
            if why := self.hopeless(ending):
                return self.give_up(f"{ending.words}; {why}")
            self.say("recovering", ending.words)
            self.notify("incident", ending.words)
            try:
                if stopped_by := self.bring_back():
                    self.say("stopped", f"stopped by {stopped_by}")
                    return FAILED
            except UserError as error:
                return self.give_up(f"{ending.words}; it cannot be resumed: {error}")
            self.record.restarts += 1
            words = f"running again after {ending.words} (restart {self.record.restarts}, from {self.record.checkpoint or 'the weights'})"
            self.say("watching", words)
            self.notify("recovery", words)

    def hopeless(self, ending: Ending) -> str:
        """Why another try would be in vain; '' where it may not be."""
        if ending.refused and not self.record.restarts:  # later it is a host that changed, and may change back
            return "the trainer refused its input, and would again"
        checkpoint = newest_checkpoint(self.fleet, self.plan.run) or ""
        if checkpoint and (not self.record.checkpoint or step_of(checkpoint) > step_of(self.record.checkpoint)):
            self.record.in_vain, self.record.checkpoint = 0, checkpoint
        if self.record.in_vain >= self.asked.restart:
            since = f"since {self.record.checkpoint}" if self.record.checkpoint else "and no checkpoint yet"
            return f"that was after {self.record.in_vain} restarts without a newer checkpoint ({since})"
        self.record.in_vain += 1
        return ""

    def bring_back(self) -> str:
        """End what is left everywhere, and start again; tries until the hosts can. Returns who stopped the run, or ''.

        Raises:
            UserError: The run cannot be resumed, whatever the hosts do.
        """
        said, tries = "", 0
        while True:
            ends = stop_this(self.plan, self.fleet)
            for end in ends.values():
                if isinstance(end, dict) and end.get("stopped_by"):
                    return str(end["stopped_by"])
            unsure = [f"{name}: {end}" for name, end in ends.items() if isinstance(end, HostError)]
            unsure += [
                f"{name}: processes {end['left']} cannot be ended"
                for name, end in ends.items()
                if isinstance(end, dict) and end["left"]
            ]
            why = "; ".join(unsure)
            if not why:
                try:
                    asked, hosts = resumed(self.asked, self.hosts, self.plan)
                    self.plan = launch(asked, hosts, self.fleet, again=True)
                    return ""
                except StartError as error:  # of this attempt something may be left, to be ended next
                    self.plan, why = error.plan, str(error)
                except RunError as error:
                    why = str(error)
            if why != said:
                said = why
                self.say("recovering", f"cannot start yet: {why}")
                if tries == len(RETRY_S):
                    self.notify("waiting", why)
            time.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)])
            tries += 1

    def give_up(self, why: str) -> int:
        """End what is left, and say why nothing more is tried."""
        stop_this(self.plan, self.fleet)
        self.say("gave up", why)
        self.notify("gave up", why)
        return FAILED

    def say(self, state: str, message: str) -> None:
        """Write the record, and a line of the log."""
        self.record.state, self.record.message, self.record.time = state, message, time.time()
        write_json(RunDir.here(self.plan.run).guard, self.record)
        print(f"guard  {time.strftime('%Y-%m-%d %H:%M:%S')}  {state}{f': {message}' if message else ''}", flush=True)

    def notify(self, event: str, message: str) -> None:
        """Run the user's command; what it does wrong is said, and changes nothing."""
        if not self.asked.notify:
            return
        env = os.environ | {"LLAMA405B_EVENT": event, "LLAMA405B_RUN": self.plan.run, "LLAMA405B_MESSAGE": message}
        try:
            done = subprocess.run(
                ["/bin/sh", "-c", self.asked.notify],
                env=env,
                input=f"{self.plan.run}: {event}: {message}\n",
                text=True,
                timeout=NOTIFY_TIMEOUT_S,
                check=False,
            )
            fault = f"exit code {done.returncode}" if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            fault = str(error)
        if fault:
            print(f"guard  --notify failed ({fault})", flush=True)


def main() -> int:
    """Entry point of ``python -m llama405b_tools.run.guard``; what to guard comes by standard input."""
    os.umask(UMASK)
    asked, hosts, plan = pickle.loads(sys.stdin.buffer.read())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Fleet(hosts) as fleet:
        watchman = Watchman(asked, hosts, plan, fleet)

        def dismissed(*_: object) -> None:
            watchman.say("stopped", "dismissed: the run is being stopped")
            os._exit(FAILED)

        signal.signal(signal.SIGTERM, dismissed)
        try:
            return watchman.main()
        except Exception as error:
            watchman.say("gave up", f"the guard itself failed: {type(error).__name__}: {error}")
            watchman.notify("gave up", watchman.record.message)
            raise


if __name__ == "__main__":
    sys.exit(main())
