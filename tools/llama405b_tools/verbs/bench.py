"""Test the machines that will train, from a first collective to whole steps of the 405B shape.

Runs on one GPU of the first host, one host, two hosts, and all; without HOSTS, on this machine's first GPU. Each test prints a line,
with the cause and the remedy if it fails. `bench knobs [HOSTS]` measures tuning options, each alone and all together: the embedding
as an FSDP unit, forward prefetch, unlimited all-gathers, offload; then options that trade memory for speed: chunked loss, activation
checkpointing, layer inputs on the host, fused and compiled layers, numerics (`--tests knobs-2`). It prints a table of seconds and
memory for each half, next to the plan's.
"""

import argparse
import dataclasses
import importlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from llama405b.contract.errors import EXIT_FAILED, EXIT_OK
from llama405b.settings.parser import OneLineParser
from llama405b.spec import probes
from llama405b.spec.probes import ProbeResult, check_bundle, write_bundle
from llama405b_tools.hosts.fleet import Fleet, read_hosts
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.launch import request as asked
from llama405b_tools.launch.probes import run_probes

TRAINER_MODULE = "llama405b.bench.program"  # the probes that run on this machine; imported late, as they need torch


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="llama405b bench", description=__doc__)
    parser.add_argument("hosts", nargs="?", type=Path, metavar="HOSTS", help="hosts file [only this machine]")
    probes.add_options(parser)
    asked.add_environment(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    args = _parser().parse([*argv[1:], "--tests", "knobs"] if argv[:1] == ["knobs"] else argv)
    if not args.hosts:
        return int(importlib.import_module(TRAINER_MODULE).main(args))
    hosts, tests, log = read_hosts(args.hosts), probes.select_tests(args.tests), probes.ResultDirectory(args.out)
    check_bundle(args.bundle, with_host_names=args.with_host_names)
    base = asked.parse_launch(_launch_flags(args), time.time())
    code = EXIT_OK

    def report_result(result: ProbeResult) -> None:
        log.add(result)
        print(f"  {probes.format_result(result)}", flush=True)

    date = time.strftime("%Y-%m-%d")
    try:
        with Fleet(hosts) as fleet:
            for number, (name, scope_hosts) in enumerate(list_scopes(hosts), 1):
                print(f"{name}:", flush=True)
                request = dataclasses.replace(base, run=f"{base.run}-{number}")
                results = run_probes(request, scope_hosts, fleet, tests, args.time_limit, report_result)
                failed_probes = [result.probe for result in results if result.fault]
                if failed_probes:
                    code = EXIT_FAILED
                if any(probe in probes.REHEARSAL_PROBES for probe in failed_probes):
                    break
    finally:  # also after a failure: the bundle lists tests that did not start
        if args.bundle:
            names = [name for host in hosts for name in (host.name, host.address)]
            write_bundle(args.bundle, log.results(), tests, date, names, keep_names=args.with_host_names)
    print(log.format_report(date))
    return code


def _launch_flags(args: argparse.Namespace) -> list[str]:
    """Return the arguments for ``launch``."""
    run = ["--run", f"bench-{time.strftime('%Y%m%d-%H%M%S')}"]
    return [str(args.hosts), *run, *asked.environment_flags(args), "--", "true"]


def list_scopes(hosts: Sequence[Host]) -> Iterator[tuple[str, list[Host]]]:
    """Yield the scopes to test, from one GPU to all hosts: name and hosts."""
    first = hosts[0]
    yield f"one GPU of {first.name}", [dataclasses.replace(first, slots=1)]
    if first.slots != 1:
        yield f"all GPUs of {first.name}", [first]
    if len(hosts) > 2:
        yield f"{first.name} and {hosts[1].name}", list(hosts[:2])
    if len(hosts) > 1:
        yield f"all {len(hosts)} hosts", list(hosts)
