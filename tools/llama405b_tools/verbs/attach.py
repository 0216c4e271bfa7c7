"""Watch the output of every host in tmux, with one window per host.

Ctrl-b n and Ctrl-b p change the window, Ctrl-b d leaves; the run continues. The windows only show: what you type does not
reach the run. --host NAME shows that host alone, and what you type reaches it: Ctrl-c there ends the run.
"""

import os
import shlex
import sys
from collections.abc import Sequence

from llama405b.contract.errors import GOOD, UserError
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.outcomes import replies
from llama405b_tools.hosts.typed import to_type
from llama405b_tools.run.attach import build_session, operator_socket, window_command
from llama405b_tools.run.backends import backend_of
from llama405b_tools.run.query import ask_hosts
from llama405b_tools.verbs.arguments import verb_parser


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    parser = verb_parser("attach", __doc__)
    parser.add_argument("--host", help="show this host only, and pass on what is typed")
    parser.add_argument("--no-attach", action="store_true", help="only print the command that shows the windows")
    args = parser.parse(argv)
    backend = backend_of(args.run, args.hosts)
    if backend.elsewhere:
        logs = to_type("logs", None, args.run or "")
        raise UserError(f"attach: a Slurm job has no tmux session; `{logs} -f` shows every rank")
    with Fleet(backend.hosts()) as fleet:
        run, seen = ask_hosts(fleet, args.run)
    live = {fleet.hosts[name]: found.tmux for name, found in replies(seen).items() if found and found.alive}
    if not live:
        raise UserError(f"run {run} is not running on any host; `{fleet.typed('logs', run)}` shows its logs")
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
    if not args.no_attach:
        os.execvp("tmux", attach)
    print(shlex.join(attach))
    return GOOD
