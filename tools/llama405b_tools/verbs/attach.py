"""Watch the output of every host in tmux, with one window per host.

Ctrl-b n and Ctrl-b p switch windows; Ctrl-b d detaches, and the run continues. The windows are read-only: what you type does
not reach the run. --host NAME shows only that host and passes on what you type: Ctrl-c there ends the run.
Exits with 1 if a host could not be reached; it has no window.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from llama405b.contract.errors import RunError, UserError, exit_code_for
from llama405b_tools.hosts.fleet import Fleet, command_to_type
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.run.backends import backend_of
from llama405b_tools.run.query import ask_hosts
from llama405b_tools.run.screen import build_session, operator_socket, window_command
from llama405b_tools.verbs.arguments import verb_parser


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    parser = verb_parser("attach", __doc__)
    parser.add_argument("--host", help="show only this host, and pass on what you type")
    parser.add_argument("--no-attach", action="store_true", help="only print the command that opens the windows")
    args = parser.parse(argv)
    backend = backend_of(args.run, args.hosts)
    if backend.has_local_files:
        logs = command_to_type("logs", None, args.run or "")
        raise UserError(f"attach: a Slurm job has no tmux session; `{logs} -f` shows every rank")
    with Fleet(backend.hosts()) as fleet:
        handle = ask_hosts(fleet, args.run)
    run, unreachable = handle.run, handle.unreachable
    sessions = {fleet.hosts[name]: handle.host_runs[name].tmux for name in handle.live_hosts}
    if args.host in unreachable:
        raise RunError(f"attach: {args.host}: {unreachable[args.host]}")
    if unreachable and not sessions:
        name, why = next(iter(unreachable.items()))
        raise RunError(f"attach: {name}: {why}")
    if not sessions:
        raise UserError(f"run {run} is not running on any host; `{handle.command('logs')}` shows its logs")
    os.environ.pop("TMUX", None)
    if args.host:
        attach_host(args.host, run, sessions)
    if not args.no_attach and not sys.stdout.isatty():
        raise UserError(
            "attach: standard output is not a terminal; add --no-attach to create the session without opening it"
        )
    return attach_all(run, sessions, unreachable, only_print=args.no_attach)


def attach_host(name: str, run: str, sessions: Mapping[Host, str]) -> NoReturn:
    """Replace this process by one host's tmux session, with keyboard input."""
    host = next((host for host in sessions if host.name == name), None)
    if host is None:
        host_names = ", ".join(host.name for host in sessions)
        raise UserError(f"--host: run {run} is not running on {name!r}; it is on {host_names}")
    os.execvp("/bin/sh", ["sh", "-c", window_command(host, sessions[host], writable=True)])


def attach_all(run: str, sessions: Mapping[Host, str], unreachable: Mapping[str, str], *, only_print: bool) -> int:
    """Show every host in its own window, or print the command that does; return the exit code."""
    command = ["tmux", "-L", operator_socket(run), "attach", "-t", f"={build_session(sessions, run)}"]
    for name, why in unreachable.items():  # stays readable before tmux takes the screen and after it leaves
        print(f"- {name}: {why}; it has no window", file=sys.stderr, flush=True)
    if only_print:
        print(shlex.join(command))
        return exit_code_for(unreachable)
    return subprocess.run(command, check=False).returncode or exit_code_for(unreachable)
