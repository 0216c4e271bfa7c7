"""``llama405b bench`` without HOSTS: test this machine's first GPU."""

import platform
import time
from collections.abc import Sequence

from llama405b.commands.probes.program import run_here
from llama405b.contract import probes
from llama405b.contract.bundle import check_bundle, write_bundle
from llama405b.contract.errors import UserError
from llama405b.contract.verb_parsers import bench_parser


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    args = bench_parser().parse(argv)
    if args.env or args.setup_line:
        raise UserError("bench: --env and --setup-line are for hosts; name a hosts file, or leave them out")
    tests, log = probes.chosen(args.tests), probes.Log(args.out)
    check_bundle(args.bundle, with_host_names=args.with_host_names)

    def say(result: probes.ProbeResult) -> None:
        log.add(result)
        print(probes.line_of(result), flush=True)

    code, date = run_here(tests, args.within, say), time.strftime("%Y-%m-%d")
    print(log.block(date))
    if args.bundle:
        write_bundle(args.bundle, log.results(), tests, date, [platform.node()], named=args.with_host_names)
    return code
