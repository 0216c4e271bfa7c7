"""Compare fan-out, status and a whole launch with common alternatives.

``true`` on every host with bare paramiko, pdsh and clush, if installed, and our ``status``; then a whole launch, including all checks
but with a stub instead of torchrun, and the same commands sent to each host by bare paramiko, without waiting for other hosts.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.rig import BARE_RUN, Cost, Said, checked, least, now, stub_launch, stubbed
from llama405b.contract.errors import UserError, fmt_if
from llama405b_tools.agent import starting
from llama405b_tools.agent.messages import COMMIT, Committed, StartReply
from llama405b_tools.hosts import calls
from llama405b_tools.hosts.fleet import AGENT, MAX_AT_ONCE, Fleet, JsonSession
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.ssh import Ssh
from llama405b_tools.run.backends import stop_launch
from llama405b_tools.run.query import STATUS_TIMEOUT_S, ask_hosts
from llama405b_tools.text.figures import format_columns


def fleet(hosts: Sequence[Host], path: Path, repeat: int, *, launches: bool) -> int:
    """Measure the fan-out, and the launch if ``launches``."""
    rows = [(name, least(do, repeat)) for name, do in _fan_outs(hosts).items()]
    rows.append(("llama405b status", least(lambda: _status(hosts), repeat)))
    if launches:
        said: Said = {}
        launched = least(lambda: stub_launch(hosts, path, said=said), repeat)
        rows.append(("a launch's commands, bare paramiko", least(lambda: _replay(hosts, said), repeat)))
        rows.append(("llama405b launch, all checks", launched))
    bare = rows[0][1]
    shown = [
        (name, f"{cost.wall_s:.2f}", f"{cost.cpu_s / len(hosts) * 1000:.1f}", f"{cost.wall_s / bare.wall_s:.2f}")
        for name, cost in rows
    ]
    print(format_columns((f"{len(hosts)} hosts", "wall s", "CPU ms per host", "x bare true"), shown), flush=True)
    if launches:
        print(f"launch: {rows[-1][1].wall_s / rows[-2][1].wall_s:.2f} x the bare fan-out of the same commands")
    return 0


def _fan_outs(hosts: Sequence[Host]) -> dict[str, Callable[[], None]]:
    """Return ways to run ``true`` on every host, with every installed tool."""
    names = ",".join(host.name for host in hosts)
    ssh = fmt_if("-F {}", os.environ.get("LLAMA405B_SSH_CONFIG"))
    found: dict[str, Callable[[], None]] = {"bare paramiko, true": lambda: _bare(hosts, _true)}
    if shutil.which("pdsh"):
        env = os.environ | {"PDSH_SSH_ARGS_APPEND": ssh}
        found["pdsh, true"] = lambda: checked(["pdsh", "-R", "ssh", "-f", str(MAX_AT_ONCE), "-w", names, "true"], env)
    if shutil.which("clush"):
        found["clush, true"] = lambda: checked(["clush", "-f", str(MAX_AT_ONCE), "-o", ssh, "-w", names, "true"])
    return found


def _bare(hosts: Sequence[Host], do: Callable[[Host, Ssh], None]) -> None:
    """Connect to every host, and do something there: the least that any tool based on paramiko can do."""

    def one(host: Host) -> None:
        with contextlib.closing(Ssh(host)) as connection:
            do(host, connection)

    with concurrent.futures.ThreadPoolExecutor(min(MAX_AT_ONCE, len(hosts))) as pool:
        list(pool.map(one, hosts))


def _true(host: Host, connection: Ssh) -> None:
    result = connection.run("true", "", STATUS_TIMEOUT_S)
    if result.code:
        raise UserError(f"{host.name}: {result.err.strip()[:200]}")


def _replay(hosts: Sequence[Host], said: Said) -> Cost:
    """Send each host what a launch sent it, for a run of another name; ending that run is not counted."""
    stubbed_hosts = stubbed(hosts)
    plan = next(request.plan for function, [request] in said[hosts[0].name] if function is starting.start)
    other = dataclasses.replace(plan, run=BARE_RUN, rdzv_id=f"{plan.rdzv_id}-bare")

    def one(host: Host, connection: Ssh) -> None:
        for function, [request] in said[host.name]:
            is_start = function is starting.start
            changed_request = dataclasses.replace(request, **({"plan": other} if is_start else {"run": BARE_RUN}))
            command = found.command(host.name, AGENT, [function.__name__])
            dialogue = JsonSession(connection.stream(command, f"{calls.encode_arguments(function, changed_request)}\n"))
            dialogue.receive(StartReply if is_start else dict, STATUS_TIMEOUT_S)
            if is_start:
                dialogue.send(COMMIT)
                dialogue.receive(Committed, STATUS_TIMEOUT_S)
            dialogue.end_input()
            dialogue.close()

    with Fleet(stubbed_hosts) as found:
        begin = now()
        try:
            _bare(stubbed_hosts, one)
            return now() - begin
        finally:
            stop_launch(other, found)


def _status(hosts: Sequence[Host]) -> None:
    with Fleet(hosts) as found, contextlib.suppress(UserError):  # no run exists yet
        ask_hosts(found, None)
