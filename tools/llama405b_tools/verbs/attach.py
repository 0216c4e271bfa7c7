"""Open a tmux session on this machine, with one window per host.

Each window attaches read-only to the host's session on the run's own tmux server; --host NAME attaches to one host
read-write, in this terminal. Detaching (Ctrl-b d) does not affect the run.
"""

import os
import shlex
import sys
from collections.abc import Sequence

from llama405b.contract.errors import GOOD, UserError
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.outcomes import replies
from llama405b_tools.run.attach import build_session, operator_socket, window_command
from llama405b_tools.run.backends import backend_of
from llama405b_tools.run.query import ask_hosts
from llama405b_tools.verbs.arguments import verb_parser


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    parser = verb_parser("attach", __doc__)
    parser.add_argument("--host", help="attach to this host only, read-write")
    parser.add_argument(
        "--no-attach", action="store_true", help="create the session and print the command that attaches to it"
    )
    args = parser.parse(argv)
    backend = backend_of(args.run, args.hosts)
    if backend.elsewhere:
        raise UserError("attach: a Slurm job has no tmux session; `llama405b logs -f` shows every rank")
    with Fleet(backend.hosts()) as fleet:
        run, seen = ask_hosts(fleet, args.run)
    live = [fleet.hosts[name] for name, found in replies(seen).items() if found and found.alive]
    if not live:
        raise UserError(f"run {run} is not running on any host; `llama405b logs --run {run}` shows its logs")
    os.environ.pop("TMUX", None)
    if args.host:
        names = [host.name for host in live]
        if args.host not in names:
            raise UserError(f"--host: run {run} is not running on {args.host!r}; it is on {', '.join(names)}")
        line = window_command(fleet.hosts[args.host], run, writable=True)
        os.execvp("/bin/sh", ["sh", "-c", line])
    if not args.no_attach and not sys.stdout.isatty():
        raise UserError("attach: standard output is not a terminal; add --no-attach to only create the session")
    attach = ["tmux", "-L", operator_socket(run), "attach", "-t", f"={build_session(live, run)}"]
    if not args.no_attach:
        os.execvp("tmux", attach)
    print(shlex.join(attach))
    return GOOD
