"""``llama405b bench fleet|logs|top [HOSTS]``: the operator's side, beside what people use otherwise.

fleet: ``true`` on every host by bare paramiko, pdsh and clush, where they are installed, and our ``status``; then a whole
launch, with all its checks, of a program that a stub runs in torchrun's place, beside the very same commands sent to each
host by bare paramiko, where no host waits for another. logs: the hosts' lines through ``logs`` beside ``ssh … tail``.
top: what cluster-top costs here and on a host, beside a fresh ``ssh host nvidia-smi`` per host and refresh.

Seconds of wall time and of this machine's CPU, by getrusage; hosts may be aliases of a few machines.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from llama405b.contract.errors import UserError
from llama405b_tools import asked, commands
from llama405b_tools.commands import KEEP
from llama405b_tools.fleet import MAX_AT_ONCE, Fleet, Reply, read_hosts
from llama405b_tools.hosts import Host
from llama405b_tools.launch import launch
from llama405b_tools.ssh import Ssh
from llama405b_tools.start import stop_this
from llama405b_tools.status import STATUS_TIMEOUT_S, VerbParser, ask, print_table
from llama405b_tools.transport import Stream

RUN, BARE_RUN, SETTLE_S = "bench-fleet", "bench-bare", 5.0
Said = dict[str, list[tuple[str, Reply]]]  # by host, what it was asked: action and request
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
    """What something took."""

    wall_s: float
    cpu_s: float  # of this process and its children

    def __sub__(self, before: "Cost") -> "Cost":
        """What was spent since."""
        return Cost(self.wall_s - before.wall_s, self.cpu_s - before.cpu_s)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    parser = VerbParser(
        prog="llama405b bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("fleet", "logs", "top"))
    parser.add_argument(
        "hosts", nargs="?", type=Path, default=Path("hosts"), metavar="HOSTS", help="hosts file [hosts]"
    )
    parser.add_argument("--lines", type=int, default=200_000, help="of log, for logs [200000]")
    parser.add_argument("--seconds", type=float, default=60.0, help="to watch, for top [60]")
    parser.add_argument("--no-launch", action="store_true", help="for fleet: only the fan-outs and status")
    parser.add_argument("--repeat", type=int, default=3, help="the least of so many tries [3]")
    args = parser.parse_args(argv)
    hosts = read_hosts(args.hosts)
    if args.what == "logs":
        return logs(hosts, args.hosts, args.lines, args.repeat)
    if args.what == "top":
        from llama405b_tools.bench_top import top

        return top(hosts, args.hosts, args.seconds, args.repeat)
    return fleet(hosts, args.hosts, args.repeat, launches=not args.no_launch)


def fleet(hosts: Sequence[Host], path: Path, repeat: int, *, launches: bool) -> int:
    """Measure the fan-out."""
    rows: list[tuple[str, Cost]] = []
    for name, do in _fan_outs(hosts).items():
        rows.append((name, least(do, repeat)))
    rows.append(("llama405b status", least(lambda: _status(hosts), repeat)))
    if launches:
        said: Said = {}
        launched = least(lambda: _launch(hosts, path, said=said), repeat)
        rows.append(("a launch's commands, bare paramiko", least(lambda: _replay(hosts, said), repeat)))
        rows.append(("llama405b launch, all checks", launched))
    bare = rows[0][1]
    table = [
        (name, f"{cost.wall_s:.2f}", f"{cost.cpu_s / len(hosts) * 1000:.1f}", f"{cost.wall_s / bare.wall_s:.2f}")
        for name, cost in rows
    ]
    print_table((f"{len(hosts)} hosts", "wall s", "CPU ms a host", "x bare true"), table)
    if launches:
        print(f"launch: {rows[-1][1].wall_s / rows[-2][1].wall_s:.2f} x the bare fan-out of the same commands")
    return 0


def _fan_outs(hosts: Sequence[Host]) -> dict[str, Callable[[], None]]:
    """``true`` on every host, by everything that is installed."""
    names = ",".join(host.name for host in hosts)
    config = os.environ.get("LLAMA405B_SSH_CONFIG", "")
    ssh = f"-F {config}" if config else ""
    found: dict[str, Callable[[], None]] = {"bare paramiko, true": lambda: _bare(hosts, _true)}
    if shutil.which("pdsh"):
        env = os.environ | {"PDSH_SSH_ARGS_APPEND": ssh}
        found["pdsh, true"] = lambda: _checked(["pdsh", "-R", "ssh", "-f", str(MAX_AT_ONCE), "-w", names, "true"], env)
    if shutil.which("clush"):
        found["clush, true"] = lambda: _checked(["clush", "-f", str(MAX_AT_ONCE), "-o", ssh, "-w", names, "true"], None)
    return found


def _checked(argv: Sequence[str], env: dict[str, str] | None) -> None:
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"bench: {argv[0]} failed ({done.stderr.strip()[:200]}); is every host reached by ssh?")


def _bare(hosts: Sequence[Host], do: Callable[[Host, Ssh], None]) -> None:
    """Connect to every host, and do something there: the least any tool on paramiko can do."""

    def one(host: Host) -> None:
        connection = Ssh(host)
        try:
            do(host, connection)
        finally:
            connection.close()

    with concurrent.futures.ThreadPoolExecutor(min(MAX_AT_ONCE, len(hosts))) as pool:
        list(pool.map(one, hosts))


def _true(host: Host, connection: Ssh) -> None:
    result = connection.run("true", "", STATUS_TIMEOUT_S)
    if result.code:
        raise UserError(f"bench: {host.name}: {result.err.strip()[:200]}")


class Overheard(Fleet):
    """Remembers what each host is asked."""

    def __init__(self, hosts: Sequence[Host], said: Said) -> None:
        super().__init__(hosts)
        self.said = said

    def ask(self, name: str, action: str, request: Reply, timeout_s: float) -> Reply:
        """See ``Fleet``."""
        self.said.setdefault(name, []).append((action, request))
        return super().ask(name, action, request, timeout_s)

    def stream(self, name: str, action: str, request: Reply) -> Stream:
        """See ``Fleet``."""
        self.said.setdefault(name, []).append((action, request))
        return super().stream(name, action, request)


def _replay(hosts: Sequence[Host], said: Said) -> Cost:
    """Send each host what a launch sent it, for a run of another name; ending that is not counted."""
    stubbed = _stubbed(hosts)
    plan = next(request["plan"] for action, request in said[hosts[0].name] if action == "start")
    other = {**plan, "run": BARE_RUN, "rdzv_id": f"{plan['rdzv_id']}-bare"}

    def one(host: Host, connection: Ssh) -> None:
        for action, request in said[host.name]:
            line, words = found.command(host.name, action), {**request, "run": BARE_RUN, "plan": other}
            stream = connection.stream(line, json.dumps(words) + "\n")
            answers = iter(stream)
            answer = next(answers, "nothing")
            if action == "start":
                stream.send(KEEP)
                answer = next(answers, answer)
                if "kept" not in answer:
                    raise UserError(f"bench: {host.name}: {answer.strip()[:200]}")
            stream.end_input()
            collections.deque(answers, maxlen=0)  # until it ends

    with Fleet(stubbed) as found:
        begin = _now()
        try:
            _bare(stubbed, one)
            return _now() - begin
        finally:
            stop_this(commands.plan_from_json(other), found)


def _status(hosts: Sequence[Host]) -> None:
    with Fleet(hosts) as found, contextlib.suppress(UserError):  # that there is no run yet
        ask(found, None)


def _launch(hosts: Sequence[Host], path: Path, program: str = "stub", said: Said | None = None) -> Cost:
    """A whole launch with a stub in torchrun's place; ending it is not counted. ``said``: takes what it asked."""
    with stub_run(hosts, path, program, said) as cost:
        return cost


def _stubbed(hosts: Sequence[Host]) -> list[Host]:
    return [dataclasses.replace(host, python=f"{host.workdir or Path.cwd()}/.bench-python") for host in hosts]


@contextlib.contextmanager
def stub_run(hosts: Sequence[Host], path: Path, program: str = "stub", said: Said | None = None) -> Iterator[Cost]:
    """A run of the stub, and what its launch took; ended at the end."""
    request = asked.parse([str(path), "--run", RUN, "--resume", "auto", "--", program], time.time())
    stubbed = _stubbed(hosts)
    with Fleet(hosts) as found:
        found.each(lambda name: _write_stub(found, name))
    heard: Said = {}
    with Overheard(stubbed, heard) as found:
        begin = _now()
        with contextlib.redirect_stdout(io.StringIO()):
            plan = launch(request, stubbed, found)
        cost = _now() - begin
        if said is not None:
            said.update({name: list(asked_of) for name, asked_of in heard.items()})
        try:
            yield cost
        finally:
            if program == "stub":
                stop_this(plan, found)


def _write_stub(found: Fleet, name: str) -> dict[str, object]:
    place = f"{found.workdir(name)}/.bench-python"
    script = STUB.format(python=found.python(name), body=BODY)
    path = commands.shell_path(place)
    line = f"cat >{path}.$$ && chmod +x {path}.$$ && mv {path}.$$ {path}"
    found.connection(name).run(line, script, STATUS_TIMEOUT_S)
    return {}


def least(do: Callable[[], Cost | None], repeat: int) -> Cost:
    """The try with the least wall time; ``do`` may count for itself."""
    costs = []
    for _ in range(repeat):
        begin = _now()
        own = do()
        costs.append(own or _now() - begin)
    return min(costs, key=lambda cost: cost.wall_s)


def _now() -> Cost:
    cpu = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        cpu += used.ru_utime + used.ru_stime
    return Cost(time.monotonic(), cpu)


def logs(hosts: Sequence[Host], path: Path, lines: int, repeat: int) -> int:
    """Measure reading a log of so many lines from every host."""
    _launch(hosts, path, str(lines))
    time.sleep(SETTLE_S)
    total = lines * len(hosts)
    env = [sys.executable, "-m", "llama405b_tools.cli", "logs", str(path), "--run", RUN]
    rows = [
        ("ssh … tail, a child each", least(lambda: _tails(hosts), repeat)),
        ("llama405b logs -o raw", least(lambda: _checked([*env, "-o", "raw"], None), repeat)),
        ("llama405b logs", least(lambda: _checked(env, None), repeat)),
        ("llama405b logs --fold", least(lambda: _checked([*env, "--fold"], None), repeat)),
    ]
    table = [(n, f"{c.wall_s:.2f}", f"{total / c.wall_s:,.0f}", f"{c.cpu_s:.2f}") for n, c in rows]
    print_table((f"{len(hosts)} hosts, {total:,} lines", "wall s", "lines/s", "CPU s here"), table)
    return 0


def ssh_argv() -> list[str]:
    """OpenSSH's client, reading the configuration that we read."""
    config = os.environ.get("LLAMA405B_SSH_CONFIG", "")
    return ["ssh", *(["-F", config] if config else []), "-o", "BatchMode=yes"]


def _tails(hosts: Sequence[Host]) -> None:
    """What people type: one ssh a host, each with tail on its files."""
    children = []
    for host in hosts:
        files = f"{host.workdir or Path.cwd()}/runs/{RUN}/logs/{host.name}/{RUN}-*/attempt_0/0/stdout.log"
        newest = f"tail -q -n +1 $(ls -td {files} | head -1)"
        children.append(subprocess.Popen([*ssh_argv(), host.name, newest], stdout=subprocess.DEVNULL))
    for child in children:
        if child.wait():
            raise UserError("bench: ssh failed; is every host reached by ssh?")
