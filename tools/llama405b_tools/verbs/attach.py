"""Watch the output of every host in tmux, with one window per host.

Ctrl-b n and Ctrl-b p change the window, Ctrl-b d leaves; the run continues. The windows only show: what you type does not
reach the run. --host NAME shows that host alone, and what you type reaches it: Ctrl-c there ends the run.
Exits with 1 if a host could not be reached: it has no window.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence

from llama405b.contract.errors import RunError, UserError, code_for
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.outcomes import replies, unanswered
from llama405b_tools.hosts.printed_commands import command_to_type
from llama405b_tools.run.backends import backend_of
from llama405b_tools.run.query import ask_hosts
from llama405b_tools.run.tmux_windows import build_session, operator_socket, window_command
from llama405b_tools.verbs.arguments import verb_parser


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    parser = verb_parser("attach", __doc__)
    parser.add_argument("--host", help="show this host only, and pass on what is typed")
    parser.add_argument("--no-attach", action="store_true", help="only print the command that shows the windows")
    args = parser.parse(argv)
    backend = backend_of(args.run, args.hosts)
    if backend.elsewhere:
        logs = command_to_type("logs", None, args.run or "")
        raise UserError(f"attach: a Slurm job has no tmux session; `{logs} -f` shows every rank")
    with Fleet(backend.hosts()) as fleet:
        run, seen = ask_hosts(fleet, args.run)
    live = {fleet.hosts[name]: found.tmux for name, found in replies(seen).items() if found and found.alive}
    lost = unanswered(seen)
    for name in [args.host] if args.host else lost:
        if name in lost and (args.host or not live):
            raise RunError(f"attach: {name}: {lost[name]}")
    if not live:
        raise UserError(f"run {run} is not running on any host; `{fleet.command_to_type('logs', run)}` shows its logs")
    os.environ.pop("TMUX", None)
    if args.host:
        names = [host.name for host in live]
        if args.host not in names:
            raise UserError(f"--host: run {run} is not running on {args.host!r}; it is on {', '.join(names)}")
        host = fleet.hosts[args.host]
        line = window_command(host, live[host], writable=True)
        os.execvp("/bin/sh", ["sh", "-c", line])
    if not args.no_attach and not sys.stdout.isatty():
        raise UserError("attach: standard output is not a terminal; add --no-attach to only create the session")
    attach = ["tmux", "-L", operator_socket(run), "attach", "-t", f"={build_session(live, run)}"]
    for name, why in lost.items():  # to be read before and after tmux has the screen
        print(f"- {name}: {why}; it has no window", file=sys.stderr, flush=True)
    if args.no_attach:
        print(shlex.join(attach))
        return code_for(lost)
    return subprocess.run(attach, check=False).returncode or code_for(lost)
