"""Write a run's checkpoint as a model that others load: here, or where the hosts' checkpoints are."""

import importlib
import shlex
import sys
from collections.abc import Sequence

from llama405b.contract.errors import RunError
from llama405b.contract.plan import check_run_name
from llama405b.contract.verb_parsers import export_parser
from llama405b_tools.deliver.collect import Collected, collect
from llama405b_tools.hosts.dialogue import run_streaming
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.login_shell import shell_path
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
    options += ["--one-file"] * args.one_file + ["--adapter"] * args.adapter
    with Fleet(hosts) as fleet:
        collected = collect(fleet, args.source, args.step)
        return _export(fleet, collected, args.out, options)


def _export(fleet: Fleet, collected: Collected, out: str, options: Sequence[str]) -> int:
    """Write the model where its weights are, and delete what was brought there."""
    host, connection = collected.host, fleet.connection(collected.host)
    python = fleet.python(host)
    workdir = shell_path(fleet.workdir(host))
    prefix = fleet.hosts[host].prefix or "true"
    written = shlex.join(["export", collected.path, out, *options])
    line = f"{prefix} && cd {workdir} && PYTHONPATH=tools {shell_path(python)} -m llama405b_tools.cli {written}"
    try:
        code = run_streaming(connection, line, lambda said: print(f"{host}: {said}", flush=True))
    except KeyboardInterrupt:
        print(f"interrupted: the export on {host} ends, too; run the same command to resume", file=sys.stderr)
        raise
    if code == "2":  # its sentence says what to do
        return 2
    if code != "0":
        why = f"export ended with exit code {code}; see above" if code else "the connection was lost"
        raise RunError(f"{host}: {why}; run the same command to resume")
    connection.run(f"rm -rf {shlex.quote(collected.path)}", "", 600.0)
    return 0
