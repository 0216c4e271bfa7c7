"""Shared by the benchmarks of the operator's side: a run with a stub instead of torchrun, and cost accounting."""

import contextlib
import dataclasses
import functools
import io
import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from llama405b.contract.errors import UserError
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import Stream, shell_path
from llama405b_tools.launch import request as asked
from llama405b_tools.launch.start import launch
from llama405b_tools.run.backends import stop_launch
from llama405b_tools.run.query import STATUS_TIMEOUT_S

P = ParamSpec("P")
T = TypeVar("T")
RUN, BARE_RUN, SETTLE_S = "bench-fleet", "bench-bare", 5.0
Said = dict[
    str, list[tuple[Callable[..., object], tuple[Any, ...]]]
]  # by host, what was called there, with which arguments
STUB = """#!/bin/sh
# in python's place on a host: torchrun becomes a stub, everything else is the real one
case "$*" in *torch.distributed.run*) exec {python} -c '{body}' "$@" ;; esac
exec {python} "$@"
"""
BODY = """import os, sys, time
log = next(a[10:] for a in sys.argv if a.startswith("--log-dir=")) + "/"
log += next(a[10:] for a in sys.argv if a.startswith("--rdzv-id=")) + "_stub/attempt_0/0"
if sys.argv[-1] == "stub": time.sleep(600)
os.makedirs(log)
with open(log + "/stdout.log", "w") as file:
    for i in range(int(sys.argv[-1])): file.write("step %d loss 4.0358 grad 0.683 lr 3.00e-04 6,152 tokens/s\\n" % i)
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """What something cost."""

    wall_s: float
    cpu_s: float  # of this process and its children

    def __sub__(self, before: "Cost") -> "Cost":
        """Return the cost since ``before``."""
        return Cost(self.wall_s - before.wall_s, self.cpu_s - before.cpu_s)


def checked(argv: Sequence[str], env: dict[str, str] | None = None) -> None:
    """Run a command.

    Raises:
        UserError: It fails.
    """
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{argv[0]} failed ({done.stderr.strip()[:200]}); check that `ssh HOST` works")


class Overheard(Fleet):
    """A fleet that records the requests to each host."""

    def __init__(self, hosts: Sequence[Host], said: Said) -> None:
        super().__init__(hosts)
        self.said = said

    def call(self, name: str, function: Callable[P, T], timeout_s: float, *args: P.args, **kwargs: P.kwargs) -> T:
        """See ``Fleet``."""
        self.said.setdefault(name, []).append((function, args))
        return super().call(name, function, timeout_s, *args, **kwargs)

    def stream(self, name: str, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> Stream:
        """See ``Fleet``."""
        self.said.setdefault(name, []).append((function, args))
        return super().stream(name, function, *args, **kwargs)


def stub_launch(hosts: Sequence[Host], path: Path, program: str = "stub", said: Said | None = None) -> Cost:
    """Measure a whole launch with a stub instead of torchrun; ending it is not counted. ``said`` takes its requests."""
    with stub_run(hosts, path, program, said) as cost:
        return cost


def stubbed(hosts: Sequence[Host]) -> list[Host]:
    """Return the hosts with the stub as their Python."""
    return [dataclasses.replace(host, python=f"{host.workdir or Path.cwd()}/.bench-python") for host in hosts]


@contextlib.contextmanager
def stub_run(hosts: Sequence[Host], path: Path, program: str = "stub", said: Said | None = None) -> Iterator[Cost]:
    """Launch a run of the stub, yield the launch's cost, and end the run."""
    anywhere = ["--env", "PYTHONPATH=."]  # or launch looks for the program, which is no file
    request = asked.parse_launch([str(path), "--run", RUN, "--resume", "auto", *anywhere, "--", program], time.time())
    stubbed_hosts = stubbed(hosts)
    with Fleet(hosts) as found:
        found.call_each(functools.partial(_write_stub, found))
    heard: Said = {}
    with Overheard(stubbed_hosts, heard) as found:
        begin = now()
        with contextlib.redirect_stdout(io.StringIO()):
            plan = launch(request, stubbed_hosts, found)
        cost = now() - begin
        if said is not None:
            said.update({name: list(asked_of) for name, asked_of in heard.items()})
        try:
            yield cost
        finally:
            if program == "stub":
                stop_launch(plan, found)


def _write_stub(found: Fleet, name: str) -> None:
    path = shell_path(f"{found.workdir(name)}/.bench-python")
    script = STUB.format(python=found.python(name), body=BODY)
    line = f"cat >{path}.$$ && chmod +x {path}.$$ && mv {path}.$$ {path}"
    found.connection(name).run(line, script, STATUS_TIMEOUT_S)


def least(do: Callable[[], Cost | None], repeat: int) -> Cost:
    """Return the cost of the try with the least wall time; ``do`` may return its own cost."""
    costs = []
    for _ in range(repeat):
        begin = now()
        own = do()
        costs.append(own or now() - begin)
    return min(costs, key=lambda cost: cost.wall_s)


def now() -> Cost:
    """Return the cost of this process and its children so far."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return Cost(time.monotonic(), sum(each.ru_utime + each.ru_stime for each in used))


def ssh_argv() -> list[str]:
    """Return OpenSSH's client command, with the same configuration that we use."""
    config = os.environ.get("LLAMA405B_SSH_CONFIG", "")
    return ["ssh", *(["-F", config] if config else []), "-o", "BatchMode=yes"]
