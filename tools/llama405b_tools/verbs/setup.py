"""Install the project and one locked environment on hosts that have only sh and sshd.

Later verbs use the environment that setup found or created. Running it again does only what is missing. Hosts are set up in
parallel; a host that fails does not delay the others.
"""

import platform
import sys
from collections.abc import Sequence

from llama405b.contract.errors import code_for
from llama405b.settings.command import OneLineParser
from llama405b_tools.deliver import source_tree
from llama405b_tools.deliver.install import Work, make_wheelhouse, project_root
from llama405b_tools.deliver.setup_plan import Wishes
from llama405b_tools.hosts.fleet import Fleet, hosts_argument, program_name, write_uses
from llama405b_tools.text.figures import format_table
from llama405b_tools.verbs.arguments import add_hosts, hosts_of


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    parser = OneLineParser(prog="llama405b setup", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add_hosts(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--python", default="", metavar="PATH", help="Python to create .venv with [python3, else uv's]")
    how.add_argument("--conda", default="", metavar="ENV", help="install into this conda environment")
    how.add_argument("--container", default="", metavar="IMAGE", help="run in this image, with apptainer")
    add("--module", default="", metavar="LINE", help="shell line to run first, such as 'module load python/3.12'")
    add("--offline", action="store_true", help="install from wheels that this machine downloads and pushes")
    add(
        "--build",
        default="",
        metavar="REQ",
        help="package to build on the first host and push to all as a wheel, such as flash-attn",
    )
    add(
        "--torch-index",
        default="auto",
        metavar="URL",
        help="package index for torch, or none for pip's default [the index for the host's driver]",
    )
    args = parser.parse(argv)
    root = project_root()
    tree = source_tree.git_tree(root) or source_tree.plain_tree(root)
    for note in tree.notes:
        print(note, flush=True)
    wishes = Wishes(args.python, args.conda, args.module, args.container, torch_index=args.torch_index)
    hosts = hosts_of(args.hosts)
    here = f"{'.'.join(platform.python_version_tuple()[:2])} {platform.machine()}"
    wheels = make_wheelhouse(root) if args.offline and not args.container else None
    with Fleet(hosts) as fleet:
        work = Work(fleet, tree, wishes, here)
        try:
            made, faults = work.everywhere(wheels, args.build)
        except KeyboardInterrupt:
            print(f"interrupted: {work.end()}; run the same command to continue", file=sys.stderr)
            raise
    write_uses((host, made[host.name].use) for host in hosts if host.name in made)
    now = {name: found.said for name, found in made.items()} | {name: f"FAILED: {why}" for name, why in faults.items()}
    print(format_table(("host", "now"), [(host.name, now[host.name]) for host in hosts]), flush=True)
    if not faults:
        print(f"next: `{program_name()} doctor{hosts_argument(args.hosts)}`, then launch")
    return code_for(faults)
