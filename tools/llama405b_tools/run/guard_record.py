"""The record that a guard keeps of its run on the operator's machine, and whether the guard lives."""

import contextlib
import dataclasses
import os
import signal
import socket
import time
from pathlib import Path

from llama405b.contract.files import read_json
from llama405b.contract.paths import RunDir
from llama405b_tools.remote import processes
from llama405b_tools.text.clean import clean


@dataclasses.dataclass(slots=True)
class Guard:
    """What a guard has done so far; ``guard.json``."""

    run: str
    pid: int
    pid_start: int
    machine: str  # where it runs
    limit: int  # restarts in vain
    state: str = "watching"  # watching | recovering | ended | stopped | gave up
    message: str = ""
    restarts: int = 0
    in_vain: int = 0  # restarts since the newest checkpoint last became newer
    checkpoint: str = ""  # newest known
    time: float = 0.0


def of_run(run: str) -> tuple[dict[str, object], bool | None] | None:
    """The record of a run's guard, and whether it lives; None where it is another machine's, so that nobody knows."""
    record = read_json(RunDir.here(run).guard)
    fields = {field.name for field in dataclasses.fields(Guard)}
    if record is None or not fields <= set(record) or not all(type(record[key]) is int for key in ("pid", "pid_start")):
        return None
    machine, here = str(record["machine"]).split(), machine_id().split()
    if machine == here:
        return record, processes.same_process(int(record["pid"]), int(record["pid_start"]))
    return record, False if len(machine) == 3 and machine[:2] == here[:2] else None  # rebooted since


def machine_id() -> str:
    """This boot of this machine: host name, the system's id, the boot's; without the system's id two words."""
    files = (Path("/etc/machine-id"), Path("/proc/sys/kernel/random/boot_id"))
    return " ".join(
        [socket.gethostname(), *(path.read_text(encoding="ascii").strip() for path in files if path.exists())]
    )


def dismiss(run: str) -> None:
    """End the guard of a run on this machine, if there is one: what is stopped on purpose must not be resumed."""
    found = of_run(run)
    if found and found[1]:
        pid = int(str(found[0]["pid"]))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 10
        while processes.start_time(pid) is not None and time.monotonic() < deadline:
            time.sleep(0.05)


def guard_line(run: str) -> str:
    """What the guard of a run on this machine does; '' where there is none."""
    found = of_run(run)
    if found is None:
        return ""
    record, lives = found
    if record["state"] in ("watching", "recovering") and lives is False:
        died = f"process {record['pid']} of this machine died while {record['state']}"
        return f"guard: GONE ({died}); nobody restarts this run: repeat its launch command to have it guarded again"
    done = f"restarted {record['restarts']} times, {record['in_vain']} of at most {record['limit']} in vain"
    message = f"; {record['message']}" if record["message"] else ""
    where = "" if lives is not None else f" on {str(record['machine']).partition(' ')[0]}"
    return clean(f"guard{where}: {record['state']}, {done}{message}")
