"""Compare the operator's side with common alternatives: ``llama405b bench fleet|logs|top|copies|plan [HOSTS]``.

fleet: ``true`` on every host with bare paramiko, pdsh and clush, if installed, and our ``status``; then a whole launch,
including all checks but with a stub instead of torchrun, and the same commands sent to each host by bare paramiko,
without waiting for other hosts. logs: the hosts' lines with ``logs`` and with ``ssh … tail``.
top: cluster-top, here and on a host, and a fresh ``ssh host nvidia-smi`` per host and refresh.

plan: what a calibrated plan predicts for the demo, beside what its run takes.
copies: files copied and verified as checkpoints are, between two processes here, and plainly. HOSTS is not used.

Reports seconds of wall time and of this machine's CPU (getrusage). Hosts may be aliases of a few machines.
"""

from collections.abc import Sequence
from pathlib import Path

from llama405b.contract.command import OneLineParser
from llama405b.contract.errors import UserError
from llama405b_tools.bench.copies import copies
from llama405b_tools.bench.fleet import fleet
from llama405b_tools.bench.logs import logs
from llama405b_tools.bench.predicted import predicted
from llama405b_tools.bench.top import LEAST_S, top
from llama405b_tools.hosts.hosts_file import read_hosts
from llama405b_tools.verbs.arguments import add_hosts


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    parser = OneLineParser(
        prog="llama405b bench",
        description=__doc__,
    )
    parser.add_argument("what", choices=("fleet", "logs", "top", "copies", "plan"))
    add_hosts(parser)
    parser.add_argument("--lines", type=int, default=200_000, help="for logs: log lines to write on each host [200000]")
    parser.add_argument("--seconds", type=float, default=60.0, help="for top: seconds to measure [60]")
    parser.add_argument("--no-launch", action="store_true", help="for fleet: measure only the fan-outs and status")
    parser.add_argument("--repeat", type=int, default=3, help="number of tries; the fastest counts [3]")
    parser.add_argument("--gb", type=float, default=1.0, help="for copies: how much [1]")
    parser.add_argument(
        "--mbit", type=int, default=0, help="for copies, as root: the link's speed in Mbit/s [not limited]"
    )
    parser.add_argument("--dir", type=Path, help="for copies: a directory on the disk to measure [the temporary one]")
    args = parser.parse(argv)
    if args.seconds < LEAST_S:
        raise UserError(
            f"--seconds: {args.seconds:g} is too short to measure a few refreshes; use at least {LEAST_S:g}"
        )
    if args.what == "copies":
        return copies(args.gb, args.mbit, args.repeat, args.dir)
    hosts = read_hosts(args.hosts)
    if args.what == "logs":
        return logs(hosts, args.hosts, args.lines, args.repeat)
    if args.what == "plan":
        return predicted(hosts, args.hosts, args.repeat)
    if args.what == "top":
        return top(hosts, args.hosts, args.seconds, args.repeat)
    return fleet(hosts, args.hosts, args.repeat, launches=not args.no_launch)
