"""Check that the hosts are fit to train and agree with each other.

Needs only sh and python3 on each host. Lists problems first, each with its remedy. Exit code: 0 if the hosts are fit,
1 if there are warnings, 3 if a host is not fit.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence

from llama405b.contract.errors import EXIT_FAILED, EXIT_OK, EXIT_UNFIT, UserError
from llama405b.settings import command, config
from llama405b.settings.parser import OneLineParser
from llama405b.settings.schema import Config
from llama405b_tools.hosts.fleet import Fleet, command_to_type
from llama405b_tools.launch import host_rules
from llama405b_tools.launch.doctor import (
    DEFAULT_PORT,
    check_under_load,
    estimate_requirements,
    port_findings,
    print_report,
    survey_hosts,
)
from llama405b_tools.launch.findings import BAD, WARN
from llama405b_tools.launch.request import source_flags
from llama405b_tools.verbs.arguments import add_hosts, resolve_hosts

EXIT_CODES = {WARN: EXIT_FAILED, BAD: EXIT_UNFIT}


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    settings, remaining = config.split_flags(argv)
    parser = _parser()
    args, unknown = parser.parse_known_args(remaining)
    config.refuse_unknown(unknown, parser.options)
    if args.port and not 0 < args.port < 65000:
        raise UserError(f"--port: {args.port} is out of range; use 1 to 65000")
    hosts = resolve_hosts(args.hosts)
    requirements = dataclasses.replace(
        estimate_requirements(_planned_config(args, settings), args.preset, hosts),
        hash_weights=args.deep,
        command_format=command_to_type("{}", args.hosts),
    )
    with Fleet(hosts) as fleet:
        survey = survey_hosts(fleet, args.port or DEFAULT_PORT, requirements)
        unreachable = survey.lost | {
            name: f"it is unknown which hosts it can reach ({why})" for name, why in survey.mute.items()
        }
        findings = host_rules.list_findings(survey.facts, unreachable, survey.skew_s, survey.peers, requirements)
        if args.port:
            findings = [*port_findings(survey.facts, args.port), *findings]
        if args.deep and not any(finding.level == BAD for finding in findings):
            findings = [*check_under_load(hosts, fleet), *findings]
    code = max((EXIT_CODES.get(finding.level, EXIT_OK) for finding in findings), default=EXIT_OK)
    if args.json:
        record = dataclasses.asdict(survey) | {
            "findings": [dataclasses.asdict(finding_record) for finding_record in findings],
            "exit_code": code,
        }
        print(json.dumps(record))
    else:
        print_report(survey, findings, [host.name for host in hosts], deep=args.deep, mesh=requirements.mesh)
    return code


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="llama405b doctor",
        description=__doc__,
        epilog="With --preset, --config or settings as for launch, also checks that memory and disks suffice for that run.",
    )
    add = parser.add_argument
    add_hosts(parser)
    add(
        "--deep",
        action="store_true",
        help="also stress every GPU, measure every link and hash the weights (needs the project installed on the hosts)",
    )
    add("--json", action="store_true", help="print facts and findings as JSON")
    add("--port", type=int, default=0, help=f"rendezvous port to try [{DEFAULT_PORT}]")
    add("--preset", default="", help="preset of the planned run")
    command.add_config(add, "TOML file with the settings of the planned run; may be repeated")
    return parser


def _planned_config(args: argparse.Namespace, settings: Sequence[str]) -> Config | None:
    if not (args.preset or args.config or settings):
        return None
    return command.parse([*source_flags(args), "--data.paths=stdlib", *settings]).config
