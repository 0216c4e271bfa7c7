"""Compare the operator's side with common alternatives: ``llama405b bench fleet|logs|top [HOSTS]``.

fleet: ``true`` on every host with bare paramiko, pdsh and clush, if installed, and our ``status``; then a whole launch,
including all checks but with a stub instead of torchrun, and the same commands sent to each host by bare paramiko,
without waiting for other hosts. logs: the hosts' lines with ``logs`` and with ``ssh … tail``.
top: cluster-top, here and on a host, and a fresh ``ssh host nvidia-smi`` per host and refresh.

Reports seconds of wall time and of this machine's CPU (getrusage). Hosts may be aliases of a few machines.
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
    parser.add_argument("--lines", type=int, default=200_000, help="for logs: log lines to write on each host [200000]")
    parser.add_argument("--seconds", type=float, default=60.0, help="for top: seconds to measure [60]")
    parser.add_argument("--no-launch", action="store_true", help="for fleet: measure only the fan-outs and status")
    parser.add_argument("--repeat", type=int, default=3, help="number of tries; the fastest counts [3]")
    args = parser.parse(argv)
    if args.seconds < LEAST_S:
        raise UserError(
            f"--seconds: {args.seconds:g} is too short to measure a few refreshes; use at least {LEAST_S:g}"
        )
    hosts = read_hosts(args.hosts)
    if args.what == "logs":
        return logs(hosts, args.hosts, args.lines, args.repeat)
    if args.what == "top":
        return top(hosts, args.hosts, args.seconds, args.repeat)
    return fleet(hosts, args.hosts, args.repeat, launches=not args.no_launch)
