"""Start a run's guard on this machine, where it needs no terminal, and follow it."""

import contextlib
import dataclasses
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from llama405b.contract import reader
from llama405b.contract.errors import FAILED, STOPPED_FOLLOWING, RunError, UserError
from llama405b.contract.own_python import own_argv
from llama405b.contract.paths import RunDir
from llama405b.contract.phrases import given, reason_of
from llama405b.contract.plan import Plan
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.printed_commands import program_name
from llama405b_tools.remote.launch_facts import place_of
from llama405b_tools.run.guard import GuardInput
from llama405b_tools.run.host_checks import place_words
from llama405b_tools.run.request import LaunchRequest
from llama405b_tools.run.screen import printer, show

POLL_S = 0.3


@dataclasses.dataclass(frozen=True, slots=True)
class GuardProcess:
    """A guard that this process started."""

    run: str
    child: "subprocess.Popen[bytes]"
    log: Path
    begin: int  # of its output in the log, in bytes

    @property
    def pid(self) -> int:
        """The guard's process ID."""
        return self.child.pid

    def follow(self, hosts: str, *, plain: bool) -> int:
        """Print the guard's log until it ends; Ctrl-C only stops following."""
        try:
            with (
                self.log.open(encoding="utf-8", errors="replace") as log,
                contextlib.closing(printer(plain=plain)) as screen,
            ):
                log.seek(self.begin)
                rest = ""
                while True:
                    code = self.child.poll()
                    *lines, rest = (rest + log.read()).split("\n")
                    if not screen.show(lines):
                        return STOPPED_FOLLOWING
                    if code is not None:
                        screen.show([rest] if rest else [])
                        return code if code >= 0 else FAILED
                    time.sleep(POLL_S)
        except KeyboardInterrupt:
            stop = f"`{program_name()} stop{hosts} --run {self.run}` ends both"
            show(f"\nno longer following; the run continues, guarded. {stop}")
            return STOPPED_FOLLOWING


def check_place(run: str) -> None:
    """Check that a guard can keep its record and its log here.

    Raises:
        UserError: The run's directory can be neither written nor created.
    """
    place = place_of(str(RunDir.here(run).path.absolute()))
    if place.fault:
        raise UserError(
            f"--restart: a guard cannot keep its log in {place.path}: {place_words(place)}; launch from another directory, "
            "or use --guard-on HOST. Nothing was started"
        )


def spawn(request: LaunchRequest, hosts: Sequence[Host], plan: Plan) -> GuardProcess:
    """Start the guard of a run that is up, in a session of its own.

    Raises:
        RunError: It cannot be started, or its log cannot be written.
    """
    try:
        return _spawn(GuardInput(request, tuple(hosts), plan), RunDir.here(plan.run).guard_log)
    except OSError as error:
        raise RunError(f"{given('{}: ', error.filename)}{reason_of(error)}") from None


def _spawn(order: GuardInput, path: Path) -> GuardProcess:
    """Its order goes through a pipe, because of the secrets."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log:
        begin = log.tell()
        child = subprocess.Popen(
            own_argv("llama405b_tools.run.guard"),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    assert child.stdin
    child.stdin.write(reader.dumps(order).encode())
    child.stdin.close()
    return GuardProcess(order.plan.run, child, path, begin)
