"""``llama405b logs``: the logs of every rank of every host, each line with its host and rank."""

import sys
from collections.abc import Sequence

from llama405b.errors import FAILED, GOOD, STOPPED_FOLLOWING, UserError
from llama405b_tools.fleet import Fleet, read_hosts
from llama405b_tools.status import ask, verb_parser
from llama405b_tools.streams import Streams
from llama405b_tools.transport import HostError


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    parser = verb_parser("logs", __doc__)
    parser.add_argument("-f", "--follow", action="store_true", help="go on as the logs grow, until the run ends")
    parser.add_argument("--host", action="append", default=[], help="only this host (may be given again)")
    parser.add_argument("--agent", action="store_true", help="torchrun's own log too")
    args = parser.parse_args(argv)
    hosts = read_hosts(args.hosts)
    for name in args.host:
        if name not in [host.name for host in hosts]:
            raise UserError(
                f"--host: {name!r} is not in {args.hosts}; take one of {', '.join(host.name for host in hosts)}"
            )
    with Fleet(hosts) as fleet:
        run, seen = ask(fleet, args.run)
        names = [
            name for name, found in seen.items() if isinstance(found, dict) and (not args.host or name in args.host)
        ]
        lost = {name: found for name, found in seen.items() if isinstance(found, HostError)}
        for name, fault in lost.items():
            print(f"- {name}: {fault}", file=sys.stderr)
        try:
            print_streams(
                fleet,
                run,
                names,
                {name: found["first_rank"] for name, found in seen.items() if isinstance(found, dict)},
                follow=args.follow,
                agent=args.agent,
            )
        except KeyboardInterrupt:
            return STOPPED_FOLLOWING
    return FAILED if lost else GOOD


def print_streams(
    fleet: Fleet, run: str, names: Sequence[str], first: dict[str, int], *, follow: bool, agent: bool
) -> None:
    """Print the lines of all hosts as they arrive; notices go to standard error."""
    streams = Streams(fleet, run, names, follow=follow)
    width = max(map(len, names), default=0)
    unreachable: set[str] = set()
    going = set(names)
    try:
        while going:
            host, item = streams.news.get()
            if "unreachable" in item:
                if host not in unreachable:
                    print(f"- {host}: {item['unreachable']}; trying again", file=sys.stderr)
                unreachable.add(host)
                continue
            unreachable.discard(host)
            if "end" in item:
                going.discard(host)
            elif "file" in item and ((source := _source(item["file"], first[host])) or agent):
                for line in item["lines"]:
                    print(f"{host:{width}} {source or 'torchrun':8} │ {line}")
                sys.stdout.flush()
    finally:
        streams.close()


def _source(file: str, first: int) -> str:
    """``r3 out`` for <attempt>/attempt_0/<local rank>/stdout.log; '' for torchrun's own log."""
    parts = file.split("/")
    if len(parts) < 3 or not parts[-2].isdigit():
        return ""
    return f"r{first + int(parts[-2])} {parts[-1][3:6]}"
