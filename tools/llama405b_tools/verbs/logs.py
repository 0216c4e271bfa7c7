"""Show the logs of every rank on every host as one stream, in time order.

Times are corrected for each host's measured clock skew. A broken connection is reopened and resumes at the right byte.
With -f, lines that arrive faster than they can be shown are dropped and counted. Lines over 64 KiB are truncated (-o raw shows all).
A progress bar shows its newest state: in place on a terminal, else once a minute; a change in its words starts a new line. An
unfinished line, such as a prompt, is shown after two seconds.
Exits with 1 if a host could not be reached.
"""

import contextlib
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from llama405b.contract.errors import EXIT_DETACHED, UserError, exit_code_for, pluralize
from llama405b.settings.parser import OneLineParser
from llama405b_tools.agent.messages import HostRun
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.run import log_reader
from llama405b_tools.run.backends import backend_of
from llama405b_tools.run.log_reader import LogPrinter, LogReader
from llama405b_tools.run.query import RunHandle, ask_hosts, is_guarded
from llama405b_tools.text.words import fold_ranks
from llama405b_tools.verbs.arguments import verb_parser


def _parser() -> OneLineParser:
    parser = verb_parser("logs", __doc__)
    add = parser.add_argument
    add("-f", "--follow", action="store_true", help="keep following until the run (and its guard) ends")
    add("--first-error", action="store_true", help="show only the first failure: host, rank, signal, traceback")
    add("--fold", action="store_true", help="show a line once if several ranks print it; errors are never folded")
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
    show = LogPrinter(args)
    backend = backend_of(args.run, args.hosts)
    with Fleet(backend.hosts()) as fleet:
        if unknown := [name for name in args.host if name not in fleet.hosts]:
            raise UserError(f"--host: {unknown[0]!r} is not in {args.hosts}; use one of {', '.join(fleet.hosts)}")
        handle = ask_hosts(fleet, backend.run)
        _check_filters(show, args.host, handle)
        if args.first_error:
            failed, lines = log_reader.find_first_error(handle, max(0, show.attempt))
            print("\n".join(lines))
            return exit_code_for(failed)
        unreachable = handle.unreachable
        for name, fault in unreachable.items():
            print(f"- {name}: {fault}", file=sys.stderr)
        shown_hosts = args.host or fleet.hosts
        first_ranks = {name: run.first_rank for name, run in handle.host_runs.items() if name in shown_hosts}
        request = show.request(handle.run, follow=args.follow, forever=args.follow and is_guarded(handle.run))
        try:
            with contextlib.closing(show):
                LogReader(fleet, handle.run, first_ranks, request).show_all(show)
        except KeyboardInterrupt:
            return EXIT_DETACHED
    return exit_code_for(unreachable)


def _check_filters(show: LogPrinter, hosts: Sequence[str], handle: RunHandle) -> None:
    """Refuse filters that cannot match anything in the run's logs."""
    run, host_runs = handle.run, handle.host_runs
    max_attempt = max((reply.attempt for reply in host_runs.values()), default=0)
    if show.attempt > max_attempt:
        attempts_text = f"attempts 1 to {max_attempt}" if max_attempt > 1 else "only attempt 1"
        raise UserError(f"--attempt: run {run} has {attempts_text}, not {show.attempt}")
    if hosts_without_run := [name for name in hosts if handle.replies[name] is None]:
        raise UserError(f"--host: {hosts_without_run[0]} has no part of run {run}; use one of {', '.join(host_runs)}")
    if show.ranks:
        _check_ranks(show.ranks, hosts, run, host_runs)


def _check_ranks(ranks: Collection[int], hosts: Sequence[str], run: str, host_runs: Mapping[str, HostRun]) -> None:
    """Refuse ranks that the run does not have, or that are not on these hosts."""
    world = max((reply.world for reply in host_runs.values()), default=0)
    if world and max(ranks) >= world:
        first_beyond = min(rank for rank in ranks if rank >= world)
        raise UserError(
            f"--rank: run {run} has {pluralize(world, 'rank')}, from 0 to {world - 1}, and no {first_beyond}"
        )
    by_host = _ranks_by_host_name(host_runs, world)
    host_ranks = [rank for name in hosts for rank in by_host.get(name, ())]
    if host_ranks and not {*ranks} & {*host_ranks}:
        raise UserError(
            f"--rank: {', '.join(hosts)} has only {fold_ranks(host_ranks)} of run {run}; correct --host or --rank"
        )


def _ranks_by_host_name(host_runs: Mapping[str, HostRun], world: int) -> dict[str, range]:
    """Return the ranks of each host of a run; {} unless all its hosts answered."""
    if any(name not in host_runs for host_run in host_runs.values() for name in host_run.hosts):
        return {}
    firsts = sorted((host_run.first_rank, name) for name, host_run in host_runs.items())
    ends = [first for first, _ in firsts[1:]] + [world]
    return {name: range(first, end) for (first, name), end in zip(firsts, ends, strict=True)}
