"""Push code (only what differs) or large files (along a chain) to the hosts.

In a git work tree, the files that git does not ignore are pushed as code. Everything else goes along a chain: each host passes
data on as it receives it, so many hosts take about as long as one. An interrupted push resumes at the byte where it
stopped; every file is verified by its SHA-256. PATH may be HOST:PATH if a host already has the files.

With --shards, each host gets only the weights that its ranks own, for a run on all hosts of the hosts file in its order: with
8 hosts, an eighth each. The trainer then loads them without network traffic. Pass the run's settings that split the model, like
--parallel.tp 8.
"""

from collections.abc import Sequence
from pathlib import Path

from llama405b.contract.errors import UserError
from llama405b.settings import config
from llama405b.settings.parser import OneLineParser
from llama405b.settings.rules import find_faults
from llama405b.settings.schema import Config, Parallel
from llama405b_tools.deliver.push import check_origin, parse_origin, push_code, push_files, push_parts, target_path
from llama405b_tools.deliver.source_tree import git_tree
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.verbs.arguments import add_hosts, resolve_hosts


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    parser = OneLineParser(prog="llama405b push", description=__doc__, allow_abbrev=False)
    parser.add_argument("path", metavar="PATH", help="local file or directory, or HOST:PATH")
    add_hosts(parser)
    parser.add_argument("--to", default="", metavar="DIR", help="destination [the same path; for code, workdir=]")
    parser.add_argument("--shards", action="store_true", help="send each host only what its ranks own")
    flags, remaining = config.split_flags(argv)
    args = parser.parse(remaining)
    parallel = parse_parallel(flags, shards=args.shards)
    hosts = resolve_hosts(args.hosts)
    origin = parse_origin(args.path, hosts)
    if args.to and not args.to.startswith(("/", "~/")):
        raise UserError(f"--to: {args.to!r} is relative; use a full path")
    with Fleet(hosts) as fleet:
        is_local = not origin.host and Path(origin.path).is_dir() and not args.shards
        tree = git_tree(Path(origin.path)) if is_local else None
        if tree is not None:
            return push_code(fleet, tree, args.to)
        if origin.host:
            check_origin(fleet, origin)
        targets = {name: args.to or target_path(origin, fleet, name) for name in fleet.hosts if name != origin.host}
        if args.shards:
            return push_parts(fleet, origin, targets, parallel)
        return push_files(fleet, origin, targets)


def parse_parallel(flags: Sequence[str], *, shards: bool) -> Parallel:
    """Parse the settings that say how a run splits the model."""
    settings = config.read_flags(flags)
    for key, (_, source) in settings.items():
        if not shards or not key.startswith("parallel."):
            raise UserError(
                f"{source}: unexpected setting; push takes only settings like --parallel.tp 8, with --shards"
            )
    parallel = Parallel(**{key.partition(".")[2]: value for key, (value, _) in settings.items()})  # type: ignore[arg-type]
    for key, fault in find_faults(Config(parallel=parallel)):
        if key in settings:
            raise UserError(f"--{key}: {fault}")
    return parallel
