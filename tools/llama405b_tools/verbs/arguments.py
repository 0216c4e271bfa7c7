"""What several verbs take on their command line."""

from argparse import Namespace
from pathlib import Path

from llama405b.contract.command import OneLineParser
from llama405b.contract.errors import UserError
from llama405b_tools.hosts.files import read_hosts
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.run import jobs


def verb_parser(verb: str, description: str | None) -> OneLineParser:
    """The arguments that status, stop, logs and attach share."""
    parser = OneLineParser(prog=f"llama405b {verb}", description=description, allow_abbrev=False)
    parser.add_argument(
        "hosts", nargs="?", type=Path, default=Path("hosts"), metavar="HOSTS", help="hosts file [hosts]"
    )
    parser.add_argument("--run", help="the run's name [the only live one, else the newest]")
    return parser


def hosts_asked(args: Namespace) -> tuple[Host, ...]:
    """The hosts of the hosts file; or the nodes of the job, where the run that is meant is one.

    Raises:
        UserError: The hosts file cannot be read, or the job has no nodes yet.
    """
    job = jobs.run_asked(args.run, args.hosts)
    if job is None:
        return read_hosts(args.hosts)
    hosts = jobs.hosts_of(job)
    if not hosts:
        raise UserError(f"{jobs.words_of(job)}; it has no nodes to ask")
    return hosts
