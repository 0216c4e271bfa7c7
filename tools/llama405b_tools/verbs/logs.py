"""Show the logs of every rank on every host as one stream, in time order.

Times are corrected for each host's measured clock skew. A broken connection is reopened and resumes at the right byte.
Exits with 1 if a host could not be reached.
"""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from llama405b.contract.command import OneLineParser
from llama405b.contract.errors import STOPPED_FOLLOWING, UserError, code_for
from llama405b.contract.phrases import counted
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.outcomes import replies, unanswered
from llama405b_tools.logs import first_error
from llama405b_tools.logs.output import Show
from llama405b_tools.logs.reader import Reader
from llama405b_tools.run.backends import backend_of
from llama405b_tools.run.guard_record import is_guarded
from llama405b_tools.run.query import ask_hosts
from llama405b_tools.verbs.arguments import verb_parser


def _parser() -> OneLineParser:
    parser = verb_parser("logs", __doc__)
    add = parser.add_argument
    add("-f", "--follow", action="store_true", help="keep following until the run (and its guard) ends")
    add("--first-error", action="store_true", help="show only the first failure: host, rank, signal, traceback")
    add("--fold", action="store_true", help="show a line once if many ranks print it; errors are never folded")
    add("--host", action="append", default=[], help="show only this host (repeatable)")
    add("--rank", default="", help="show only these ranks: 3 or 0-7,12")
    add("--stderr", action="store_true", help="show only standard error")
    add("--agent", action="store_true", help="include torchrun's own log")
    add("--attempt", default="0", help="attempt number, or all [the newest and any later ones]")
    add("--since", default="", metavar="TIME", help="show only the last TIME: 30s, 10m or 2h")
    add("--tail", type=int, metavar="N", help="show only the last N lines of each file")
    add("-i", "--include", action="append", default=[], metavar="REGEX", help="show only lines that match any of these")
    add("-e", "--exclude", action="append", default=[], metavar="REGEX", help="hide lines that match any of these")
    add("-H", "--highlight", action="append", default=[], metavar="REGEX", help="highlight what matches")
    add("-o", "--output", choices=("text", "json", "raw"), default="text", help="output format [text]")
    add("--save", type=Path, metavar="DIR", help="also write DIR/<host>/rank-<N>.<out|err>.log")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    args = _parser().parse(argv)
    show = Show(args)
    backend = backend_of(args.run, args.hosts)
    with Fleet(backend.hosts()) as fleet:
        if unknown := [name for name in args.host if name not in fleet.hosts]:
            raise UserError(f"--host: {unknown[0]!r} is not in {args.hosts}; use one of {', '.join(fleet.hosts)}")
        run, seen = ask_hosts(fleet, backend.run)
        world = max((found.world for found in replies(seen).values() if found), default=0)
        if world and (missing := sorted(rank for rank in show.ranks if rank >= world)):
            raise UserError(
                f"--rank: run {run} has {counted(world, 'rank')}, from 0 to {world - 1}, and no {missing[0]}"
            )
        if args.first_error:
            failed, lines = first_error.find(fleet, run, seen, max(0, show.attempt))
            print("\n".join(lines))
            return code_for(failed)
        lost = unanswered(seen)
        for name, fault in lost.items():
            print(f"- {name}: {fault}", file=sys.stderr)
        shown = args.host or fleet.hosts
        first_ranks = {name: found.first_rank for name, found in replies(seen).items() if found and name in shown}
        request = show.request(run, follow=args.follow, forever=args.follow and is_guarded(run))
        try:
            with contextlib.closing(show):
                Reader(fleet, run, first_ranks, request).show(show)
        except KeyboardInterrupt:
            return STOPPED_FOLLOWING
    return code_for(lost)
