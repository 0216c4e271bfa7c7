"""``llama405b setup``: the project and one locked environment on hosts that have only sh and sshd.

Every later verb uses what it found or made there. Calling it again does only what is left to do; hosts are worked on
at once, and one that fails does not keep the others back.
"""

import platform
from collections.abc import Sequence
from pathlib import Path

from llama405b.contract.command import OneLineParser
from llama405b.contract.errors import FAILED, GOOD
from llama405b_tools.deliver import sourcetree
from llama405b_tools.deliver.plan import Wishes
from llama405b_tools.deliver.setup import Installed, Work, make_wheelhouse, project_root
from llama405b_tools.hosts.files import read_hosts, write_uses
from llama405b_tools.hosts.fleet import Fleet, faults_of
from llama405b_tools.hosts.typed import front_door, hosts_argument
from llama405b_tools.text.tables import table


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    parser = OneLineParser(prog="llama405b setup", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("hosts", nargs="?", type=Path, default=Path("hosts"), metavar="HOSTS", help="hosts file [hosts]")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--python", default="", metavar="PATH", help="the Python to make .venv from [python3, else uv's]")
    how.add_argument("--conda", default="", metavar="ENV", help="install into this conda environment")
    how.add_argument("--container", default="", metavar="IMAGE", help="run in this image, by apptainer")
    add("--module", default="", metavar="LINE", help="a shell line before everything, like 'module load python/3.12'")
    add("--offline", action="store_true", help="install from wheels that are fetched here and pushed")
    add("--build", default="", metavar="REQ", help="compiled on the first host, its wheel pushed to all: flash-attn")
    add(
        "--torch-index",
        default="auto",
        metavar="URL",
        help="where torch comes from; none: pip's own [as the driver needs]",
    )
    args = parser.parse_args(argv)
    root = project_root()
    names = sourcetree.tree_files(root)
    names = names if names is not None else sourcetree.walk(root)
    lines = sourcetree.manifest(root, names)
    wishes = Wishes(args.python, args.conda, args.module, args.container, torch_index=args.torch_index)
    hosts = read_hosts(args.hosts)
    here = f"{'.'.join(platform.python_version_tuple()[:2])} {platform.machine()}"
    wheels = make_wheelhouse(root) if args.offline else None
    with Fleet(hosts) as fleet:
        work = Work(fleet, root, lines, wishes, here)
        faults = faults_of(fleet.each(work.bring_code))
        if wheels:
            work.bring_wheels(wheels, [name for name in fleet.hosts if name not in faults])
        outcomes = fleet.each(work.install, [name for name in fleet.hosts if name not in faults])
        faults |= faults_of(outcomes)
        if args.build:
            faults |= work.build(args.build, [name for name in fleet.hosts if name not in faults])
    made = {name: found for name, found in outcomes.items() if isinstance(found, Installed) and name not in faults}
    write_uses(args.hosts, {name: found.use for name, found in made.items()})
    now = {name: found.said for name, found in made.items()} | {name: f"FAILED: {why}" for name, why in faults.items()}
    print(table(("host", "now"), [(host.name, now[host.name]) for host in hosts]), flush=True)
    if not faults:
        print(f"next: `{front_door()} doctor{hosts_argument(args.hosts)}`, then launch")
    return FAILED if faults else GOOD
