"""Install the project and one locked environment on hosts that have only sh and sshd.

Later verbs use the environment that setup found or created. Running it again does only what is missing. Hosts are set up in
parallel; a host that fails does not delay the others.
"""

import argparse
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from llama405b.contract.errors import exit_code_for
from llama405b.settings.parser import OneLineParser
from llama405b_tools.deliver import source_tree
from llama405b_tools.deliver.install import Installer, make_wheelhouse, project_root
from llama405b_tools.deliver.setup_plan import SetupOptions
from llama405b_tools.deliver.source_tree import SourceTree
from llama405b_tools.hosts.fleet import Fleet, hosts_argument, program_name, write_installations
from llama405b_tools.text.figures import format_columns
from llama405b_tools.verbs.arguments import add_hosts, resolve_hosts


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    parser = OneLineParser(prog="llama405b setup", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add_hosts(parser)
    environment_group = parser.add_mutually_exclusive_group()
    environment_group.add_argument(
        "--python", default="", metavar="PATH", help="Python to create .venv with [python3, else uv's]"
    )
    environment_group.add_argument("--conda", default="", metavar="ENV", help="install into this conda environment")
    environment_group.add_argument("--container", default="", metavar="IMAGE", help="run in this image, with apptainer")
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
    with tempfile.TemporaryDirectory(prefix="llama405b-source-") as scratch:
        root = project_root(Path(scratch))
        is_checkout = root != Path(scratch)  # which may be in a repository, too, but is none
        return _set_up(args, (is_checkout and source_tree.git_tree(root)) or source_tree.plain_tree(root))


def _set_up(args: argparse.Namespace, tree: SourceTree) -> int:
    """Set up the hosts from a source tree; return the exit code."""
    for note in tree.notes:
        print(note, flush=True)
    options = SetupOptions(args.python, args.conda, args.module, args.container, torch_index=args.torch_index)
    hosts = resolve_hosts(args.hosts)
    local_platform = f"{'.'.join(platform.python_version_tuple()[:2])} {platform.machine()}"
    wheels = make_wheelhouse(tree.root) if args.offline and not args.container else None
    with Fleet(hosts) as fleet:
        installer = Installer(fleet, tree, options, local_platform)
        try:
            results, faults = installer.set_up_all(wheels, args.build)
        except KeyboardInterrupt:
            print(f"interrupted: {installer.interrupt()}; run the same command to continue", file=sys.stderr)
            raise
    write_installations((host, results[host.name].installation) for host in hosts if host.name in results)
    statuses = {name: result.summary for name, result in results.items()} | {
        name: f"FAILED: {why}" for name, why in faults.items()
    }
    print(format_columns(("host", "now"), [(host.name, statuses[host.name]) for host in hosts]), flush=True)
    if not faults:
        print(f"next: `{program_name()} doctor{hosts_argument(args.hosts)}`, then launch")
    return exit_code_for(faults)
