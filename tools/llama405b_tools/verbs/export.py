"""Write a run's checkpoint as a model that others load: here, or where the hosts' checkpoints are."""

import functools
import importlib
import shlex
import sys
from collections.abc import Sequence

from llama405b.contract.errors import GOOD
from llama405b.spec.parsers import export_parser
from llama405b.spec.plan import check_run_name
from llama405b_tools.deliver.push import collect
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.run.backends import call_on
from llama405b_tools.verbs.arguments import hosts_of

TRAINERS_OWN = "llama405b.commands.export"  # what writes the model: it needs torch


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    args = export_parser().parse(argv)
    if args.hosts is None:
        return int(importlib.import_module(TRAINERS_OWN).main(argv))
    check_run_name(args.source)
    hosts = hosts_of(args.hosts)
    options = []
    for flag, value in (
        ("--dtype", args.dtype),
        ("--model", args.model),
        ("--try", args.try_),
        ("--push-to-hub", args.push_to_hub),
    ):
        options += [flag, str(value)] if value else []
    options += ["--one-file"] * args.one_file + ["--adapter"] * args.adapter + ["--verify"] * args.verify
    with Fleet(hosts) as fleet:
        collected = collect(fleet, args.source, args.step)
        host = collected.host
        try:
            words = ["export", collected.path, args.out, *options]
            call_on(fleet, host, words, functools.partial(print, flush=True))
        except KeyboardInterrupt:
            print(f"interrupted: the export on {host} ends, too; run the same command to resume", file=sys.stderr)
            raise
        fleet.connection(host).run(f"rm -rf {shlex.quote(collected.path)}", "", 600.0)
    return GOOD
