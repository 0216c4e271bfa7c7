"""``llama405b bench HOSTS``: test one GPU, one host, two hosts, and all; what a new cluster should pass before it trains.

Each test is one line, with the cause and what to do where it fails. What needs a test that failed is not tried.
"""

import argparse
import dataclasses
import time
from collections.abc import Iterator, Sequence

from llama405b.contract.errors import FAILED, GOOD
from llama405b.spec import probes
from llama405b.spec.parsers import bench_parser
from llama405b.spec.probes import ProbeResult, check_bundle, write_bundle
from llama405b_tools.hosts.fleet import Fleet, read_hosts
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.launch import request as asked
from llama405b_tools.launch.probes import run_probes


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    args = bench_parser().parse(argv)
    hosts, tests, log = read_hosts(args.hosts), probes.chosen(args.tests), probes.Log(args.out)
    check_bundle(args.bundle, with_host_names=args.with_host_names)
    base = asked.parse_launch(_launch_flags(args), time.time())
    code = GOOD

    def say(result: ProbeResult) -> None:
        log.add(result)
        print(f"  {probes.line_of(result)}", flush=True)

    date = time.strftime("%Y-%m-%d")
    try:
        with Fleet(hosts) as fleet:
            for number, (name, part) in enumerate(scopes(hosts), 1):
                print(f"{name}:", flush=True)
                request = dataclasses.replace(base, run=f"{base.run}-{number}")
                found = run_probes(request, part, fleet, tests, args.within, say)
                faults = [result.probe for result in found if result.fault]
                if faults:
                    code = FAILED
                if any(probe in probes.LINKS for probe in faults):
                    break
    finally:  # what did not start is told as well
        if args.bundle:
            names = [name for host in hosts for name in (host.name, host.address)]
            write_bundle(args.bundle, log.results(), tests, date, names, named=args.with_host_names)
    print(log.block(date))
    return code


def _launch_flags(args: argparse.Namespace) -> list[str]:
    """Return what ``launch`` would be given."""
    run = ["--run", f"bench-{time.strftime('%Y%m%d-%H%M%S')}"]
    environment = [word for pair in args.env for word in ("--env", pair)]
    setup = ["--setup-line", args.setup_line] if args.setup_line else []
    return [str(args.hosts), *run, *environment, *setup, "--", "true"]


def scopes(hosts: Sequence[Host]) -> Iterator[tuple[str, list[Host]]]:
    """Yield what to test, from little to all."""
    first = hosts[0]
    yield f"one GPU of {first.name}", [dataclasses.replace(first, slots=1)]
    if first.slots != 1:
        yield f"all GPUs of {first.name}", [first]
    if len(hosts) > 2:
        yield f"{first.name} and {hosts[1].name}", list(hosts[:2])
    if len(hosts) > 1:
        yield f"all {len(hosts)} hosts", list(hosts)
