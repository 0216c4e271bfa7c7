"""``llama405b doctor``: whether these machines are fit to train, and agree with each other.

Needs only sh and python3 on a host. Problems come first, each with what to do. Exit code 0 fit, 1 with warnings, 3 not.
"""

import argparse
import dataclasses
import json
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llama405b.contract import command, config, weights
from llama405b.contract.errors import FAILED, GOOD, UNFIT, UserError
from llama405b.contract.schema import BYTES_PER_PARAMETER, Config
from llama405b_tools import fabric, findings, gpus
from llama405b_tools.clean import clean
from llama405b_tools.findings import Finding, Peers
from llama405b_tools.fleet import Fleet, Outcome, Reply, read_hosts
from llama405b_tools.fold import fold_names
from llama405b_tools.host_rules import BAD, GIB, WARN, Needs
from llama405b_tools.hosts import Host
from llama405b_tools.status import VerbParser, print_table
from llama405b_tools.streams import Dialogue
from llama405b_tools.transport import HostError

SCRIPT = (Path(__file__).parent / "hostprobe.py").read_text(encoding="utf-8")
LOADER = "import sys; n = int(sys.stdin.readline()); exec(compile(sys.stdin.read(n), 'hostprobe', 'exec'))"
FACTS_TIMEOUT_S, PEERS_TIMEOUT_S, HASH_TIMEOUT_S = 45.0, 20.0, 3600.0
DEFAULT_PORT = 29_400  # torchrun's own


@dataclasses.dataclass(frozen=True, slots=True)
class Visit:
    """What one visit to the hosts brought."""

    facts: dict[str, dict[str, Any]]
    lost: dict[str, str]
    skew_s: dict[str, float]  # host's clock minus this one's
    latency_ms: dict[str, float]
    peers: Peers
    mute: dict[str, str]  # hosts that did not tell whom they reach, and why


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    settings, others = config.split_flags(argv)
    args, rest = _parser().parse_known_args(others)
    config.refuse_unknown(rest)
    refuse_port(args.port)
    hosts = read_hosts(args.hosts)
    needs = dataclasses.replace(needs_of(_config(args, settings), args.preset, hosts), hash_weights=args.deep)
    with Fleet(hosts) as fleet:
        visit = look(fleet, args.port or DEFAULT_PORT, needs)
        lost = visit.lost | {name: f"whom it reaches is not known ({why})" for name, why in visit.mute.items()}
        found = findings.diagnose(visit.facts, lost, visit.skew_s, visit.peers, needs)
        if args.port:
            found = [*port_findings(visit.facts, args.port), *found]
        if args.deep and not any(finding.level == BAD for finding in found):
            from llama405b_tools.deep import check

            found = [*check(hosts, fleet), *found]
    levels = {finding.level for finding in found}
    code = UNFIT if BAD in levels else FAILED if WARN in levels else GOOD
    if args.json:
        record = dataclasses.asdict(visit) | {"findings": [dataclasses.asdict(f) for f in found], "exit_code": code}
        print(json.dumps(record))
    else:
        report(visit, found, [host.name for host in hosts], deep=args.deep)
    return code


def _parser() -> VerbParser:
    parser = VerbParser(
        prog="llama405b doctor",
        description=__doc__,
        epilog="With --preset, --config and settings as for launch, room is checked against what that run needs.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("hosts", nargs="?", type=Path, default=Path("hosts"), metavar="HOSTS", help="hosts file [hosts]")
    add(
        "--deep",
        action="store_true",
        help="also burn every GPU, measure every link, hash the weights (needs the project there)",
    )
    add("--json", action="store_true", help="facts and findings, for scripts")
    add("--port", type=int, default=0, help=f"of the rendezvous, to be tried [{DEFAULT_PORT}]")
    add("--preset", default="", help="of the run that is meant")
    add("--config", type=Path, help="of the run that is meant")
    return parser


def _config(args: argparse.Namespace, settings: Sequence[str]) -> Config | None:
    if not (args.preset or args.config or settings):
        return None
    base = ["--preset", args.preset] if args.preset else []
    base += ["--config", str(args.config)] if args.config else []
    data = [] if any(flag.startswith("--data.paths") for flag in settings) else ["--data.paths=stdlib"]
    return command.parse([*base, *data, *settings]).config


def needs_of(asked: Config | None, preset: str, hosts: Sequence[Host]) -> Needs:
    """What a run takes on the fullest host: its state alone, without activations."""
    if asked is None:
        return Needs()
    known = json.loads((config.PRESET_DIR / "architectures.json").read_text(encoding="utf-8"))
    directory = Path(asked.model.path)
    if (directory / "config.json").is_file():
        parameters = weights.read_llama(directory).parameters
    elif preset in known:
        parameters = weights.parse_llama(known[preset], preset).parameters
    else:
        parameters = 0
    slots = [host.slots or 8 for host in hosts]
    each = parameters * BYTES_PER_PARAMETER[asked.parallel.numerics] // sum(slots)
    offload = asked.parallel.cpu_offload or asked.parallel.device == "cpu"
    path = "" if asked.model.path == config.DEMO_MODEL else asked.model.path
    return Needs(each * max(slots) if offload else 0, 0 if offload else each, path, asked.parallel.device != "cpu")


def look(fleet: Fleet, port: int, needs: Needs) -> Visit:
    """Ask every host for its facts, then for its way to every other."""
    dialogues: dict[str, Dialogue] = {}
    tokens = {name: f"llama405b {name} {secrets.token_hex(8)}" for name in fleet.hosts}
    latency_ms: dict[str, float] = {}

    def first(name: str) -> Reply:
        connection = fleet.connection(name)
        began = time.monotonic()
        alive = connection.run("command -v python3 || echo none", "", FACTS_TIMEOUT_S)
        latency_ms[name] = round((time.monotonic() - began) * 1000, 1)
        if "none" in alive.out:
            raise HostError("there is no python3; type there: apt-get install python3")
        stdin = f"{len(SCRIPT)}\n{SCRIPT}{json.dumps(_request(fleet, name, port, tokens[name], needs))}\n"
        dialogues[name] = Dialogue(connection.stream(f"exec python3 -c {shlex.quote(LOADER)} 2>&1", stdin))
        return dialogues[name].answer(HASH_TIMEOUT_S if needs.hash_weights and name == head else FACTS_TIMEOUT_S)

    head = next(iter(fleet.hosts))
    outcomes = fleet.each(first)
    facts = {name: found for name, found in outcomes.items() if isinstance(found, dict)}
    lost = {name: str(found) for name, found in outcomes.items() if isinstance(found, HostError)}
    skew_s = {name: round(found["now"] - found["heard"], 2) for name, found in facts.items()}
    candidates = {name: candidates_of(fleet.hosts[name], found) for name, found in facts.items()}
    ports = {name: found["ports"] for name, found in facts.items()}

    def second(name: str) -> Reply:
        peers = [
            {"name": other, "addresses": candidates[other], "ports": ports[other], "token": tokens[other]}
            for other in facts
            if other != name
        ]
        dialogues[name].say(json.dumps({"peers": peers}) + "\n")
        return dialogues[name].answer(PEERS_TIMEOUT_S)

    reached: dict[str, Outcome] = fleet.each(second, facts)
    for dialogue in dialogues.values():
        dialogue.end_input()
    for dialogue in dialogues.values():
        dialogue.close()
    reach = {name: found["peers"] for name, found in reached.items() if isinstance(found, dict)}
    chosen = {name: fleet.hosts[name].address for name in facts}
    mute = {name: str(found) for name, found in reached.items() if isinstance(found, HostError)}
    return Visit(facts, lost, skew_s, latency_ms, Peers(reach, candidates, ports, chosen), mute)


def candidates_of(host: Host, found: Mapping[str, Any]) -> list[str]:
    """Addresses at which the others may reach a host: what the hosts file says, then its own."""
    own = [entry["address"] for entry in (found["network"] or {}).get("addresses", ())]
    if host.loopback:
        own = ["127.0.0.1"]
    return list(dict.fromkeys([*([host.address] if host.address else []), *own]))


def _request(fleet: Fleet, name: str, port: int, token: str, needs: Needs) -> Reply:
    head = next(iter(fleet.hosts))
    local = [other for other, host in fleet.hosts.items() if host.loopback]
    own_port = port + local.index(name) if name in local else port  # hosts that are one machine share its ports
    return {
        "port": own_port,
        "token": token,
        "workdir": fleet.workdir(name),
        "python": fleet.python(name),
        "paths": [fleet.workdir(name), *fleet.hosts[name].places.values()],
        "rates": True,
        "weights": needs.weights if name == head else "",
        "hash": needs.hash_weights,
        "within_s": HASH_TIMEOUT_S - 10 if needs.hash_weights and name == head else FACTS_TIMEOUT_S - 5,
    }


def report(visit: Visit, found: Sequence[Finding], names: Sequence[str], *, deep: bool) -> None:
    """Print problems first, then all hosts side by side."""
    for finding in found:
        where = "all hosts" if len(finding.hosts) == len(names) > 1 else fold_names(finding.hosts)
        print(clean(f"{finding.level.upper() if finding.level == BAD else finding.level}  {where}: {finding.what}"))
        print(clean(f"     → {finding.remedy}"))
    if found:
        print()
    headings = (
        "host",
        "fit",
        "address",
        "ssh",
        "clock",
        "GPUs",
        "RDMA",
        "RAM",
        "workdir free",
        "write",
        "python",
        "torch",
    )
    print_table(headings, [_row(name, visit, found) for name in names])
    bad, warnings = (sum(finding.level == level for finding in found) for level in (BAD, WARN))
    verdict = f"not fit: {bad} problems" if bad else f"fit, with {warnings} warnings" if warnings else "fit"
    never = "" if deep else "; links and GPUs were not loaded: --deep does that"
    print(f"\n{len(names)} hosts: {verdict}{never}")


def _row(name: str, visit: Visit, found: Sequence[Finding]) -> tuple[str, ...]:
    levels = {finding.level for finding in found if name in finding.hosts}
    fit = "NO" if BAD in levels else "warn" if WARN in levels else "yes"
    if name in visit.lost:
        return (name, "NO", *["—"] * 10)
    facts = visit.facts[name]
    sound = {key: {} if isinstance(value, dict) and "probe_failed" in value else value for key, value in facts.items()}
    all_gpus = gpus.read(sound["gpus"])[0] if sound["gpus"] else []
    ports = [port for port in fabric.read(sound["rdma"] or {}) if port.up]
    memory, packages = sound["memory"] or {}, (sound["environment"] or {}).get("packages") or {}
    work: dict[str, Any] = next(
        (entry for entry in (sound["disks"] or {}).get("filesystems", ()) if "path" in entry), {}
    )
    return (
        name,
        fit,
        findings.training_address(name, visit.peers) or "—",
        f"{visit.latency_ms[name]:.0f} ms",
        f"{visit.skew_s[name]:+.1f} s",
        f"{len(all_gpus)} {all_gpus[0].name.removeprefix('NVIDIA ')}" if all_gpus else "none",
        f"{len(ports)} x {ports[0].gbit:g} Gb/s" if ports else "none",
        f"{memory.get('total', 0) / GIB:.0f} GiB",
        f"{work.get('free', 0) / 1e9:,.0f} GB",
        f"{work['write_per_s'] / 1e9:.1f} GB/s" if "write_per_s" in work else "—",
        packages.get("python", "—"),
        packages.get("torch", "—"),
    )


def port_findings(facts: Mapping[str, Mapping[str, Any]], port: int) -> list[Finding]:
    """Hosts on which the port that was asked for is not to be had."""
    held = tuple(name for name, found in facts.items() if found["port_fault"])
    return [Finding(BAD, held, f"port {port} is in use there", "take another --port")] if held else []


def refuse_port(port: int) -> None:
    """Refuse what is no port.

    Raises:
        UserError: It is none.
    """
    if port and not 0 < port < 65000:
        raise UserError(f"--port: {port} is out of range; take 1 to 65000")
