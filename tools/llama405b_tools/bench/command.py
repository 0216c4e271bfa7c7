"""``llama405b bench fleet|logs|top [HOSTS]``: the operator's side, beside what people use otherwise.

fleet: ``true`` on every host by bare paramiko, pdsh and clush, where they are installed, and our ``status``; then a whole
launch, with all its checks, of a program that a stub runs in torchrun's place, beside the very same commands sent to each
host by bare paramiko, where no host waits for another. logs: the hosts' lines through ``logs`` beside ``ssh … tail``.
top: what cluster-top costs here and on a host, beside a fresh ``ssh host nvidia-smi`` per host and refresh.

Seconds of wall time and of this machine's CPU, by getrusage; hosts may be aliases of a few machines.
"""

import argparse
from collections.abc import Sequence

from llama405b.contract.command import OneLineParser
from llama405b.contract.errors import UserError
from llama405b_tools.bench.fleet import fleet
from llama405b_tools.bench.logs import logs
from llama405b_tools.bench.top import LEAST_S, top
from llama405b_tools.hosts.files import read_hosts
from llama405b_tools.verbs.arguments import add_hosts


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    parser = OneLineParser(
        prog="llama405b bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("fleet", "logs", "top"))
    add_hosts(parser)
    parser.add_argument("--lines", type=int, default=200_000, help="lines of log to write, for logs [200000]")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds to watch, for top [60]")
    parser.add_argument("--no-launch", action="store_true", help="measure only the fan-outs and status, for fleet")
    parser.add_argument("--repeat", type=int, default=3, help="tries, of which the fastest counts [3]")
    args = parser.parse_args(argv)
    if args.seconds < LEAST_S:
        raise UserError(
            f"--seconds: {args.seconds:g} s; it takes at least {LEAST_S:g}, for a few refreshes to be measured"
        )
    hosts = read_hosts(args.hosts)
    if args.what == "logs":
        return logs(hosts, args.hosts, args.lines, args.repeat)
    if args.what == "top":
        return top(hosts, args.hosts, args.seconds, args.repeat)
    return fleet(hosts, args.hosts, args.repeat, launches=not args.no_launch)
