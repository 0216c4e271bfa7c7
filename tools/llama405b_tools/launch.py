"""``llama405b launch``: check every host, start torchrun on all of them or on none, and follow if asked."""

import argparse
import contextlib
import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from llama405b import command, config
from llama405b.errors import RunError, UserError
from llama405b.rundir import UMASK, RunDir, write_json
from llama405b_tools import commands
from llama405b_tools.commands import Node, Plan
from llama405b_tools.fleet import Fleet, Outcome, front_door, read_hosts
from llama405b_tools.follow import follow
from llama405b_tools.hosts import Host
from llama405b_tools.preflight import (
    Asked,
    check_training,
    fault_list,
    head_address,
    make_plan,
    probe,
    training_program,
)
from llama405b_tools.status import print_table
from llama405b_tools.transport import HostError

PROBE_TIMEOUT_S, START_TIMEOUT_S, STOP_TIMEOUT_S = 60.0, 45.0, 60.0
PORTS = range(20_000, 30_000)  # below the ephemeral ports, so that no outgoing connection sits on it
PORT_TRIES = 5
UNPROVED = (
    "note: CUDA and NCCL are marked 'never run' in the README's proof table; try a small preset on these hosts first"
)
OURS = (
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "PATH",
    "PYTHONUNBUFFERED",
)
EPILOG = """
Settings of the training run are flags too (`llama405b train --help`); after -- comes any other torchrun program:
  llama405b launch hosts --preset llama3.1-405b --data.paths corpus --follow
  llama405b launch hosts -- my_script.py --its-own args
exit codes: 0 started (with --follow: ended well), 1 a host or the run failed, 2 refused, nothing started
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `llama405b launch --help`")


def _parser() -> _Parser:
    parser = _Parser(
        prog="llama405b launch",
        description=__doc__,
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "hosts", nargs="?", type=Path, default=Path("hosts"), metavar="HOSTS", help="hosts file [hosts]"
    )
    parser.add_argument("--run", default="", help="the run's name [<preset>-<date>-<time>]")
    parser.add_argument("--config", type=Path, help="TOML file of settings")
    parser.add_argument("--preset", default="", help=f"{', '.join(config.preset_names())}")
    parser.add_argument("--resume", default="no", help="no | auto (newest checkpoint that verifies) | STEP | PATH [no]")
    parser.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="NAME",
        help="hand this environment variable to the ranks, by SSH's standard input only",
    )
    parser.add_argument("--port", type=int, default=0, help="of the rendezvous on the head [a free one]")
    parser.add_argument("--dry-run", action="store_true", help="print what would run where; opens no connection")
    parser.add_argument("--follow", action="store_true", help="follow the run to its end")
    return parser


def check_secrets(names: Sequence[str]) -> None:
    """Refuse what cannot be handed on: no name, a name the run sets itself, or a variable that is not set here.

    Raises:
        UserError: Names the first.
    """
    for name in names:
        if not commands.SECRET_NAME.fullmatch(name):
            raise UserError(
                f"--secret: {name.partition('=')[0]!r} is no name of a variable; write --secret HF_TOKEN, and export it"
            )
        if name in OURS or name.startswith(("LLAMA405B_", "TORCHELASTIC_")):
            raise UserError(f"--secret: {name} is set by the run itself; take another name")
        if name not in os.environ:
            raise UserError(f"--secret: {name} is not set here; export it first")


def parse(argv: Sequence[str], now: float) -> Asked:
    """Parse the command line; a training command goes through the trainer's own parser.

    Raises:
        UserError: Anything in it is wrong.
    """
    own, program = (
        (list(argv), ()) if "--" not in argv else (list(argv[: argv.index("--")]), tuple(argv[argv.index("--") + 1 :]))
    )
    settings, others = config.split_flags(own)
    known, rest = _parser().parse_known_args(others)
    config.refuse_unknown(rest)
    if "--" in argv and not program:
        raise UserError("--: no program after it; write -- script.py ARG … or -- -m module ARG …")
    if program and (settings or known.preset or known.config):
        raise UserError(
            f"{(settings or ['--preset/--config'])[0]}: settings are for the trainer, but a program stands after --; take one away"
        )
    check_secrets(known.secret)
    command.check_resume(known.resume)
    if known.port and not 0 < known.port < 65536:
        raise UserError(f"--port: {known.port} is out of range; take 1 to 65535")
    training = None
    flags: tuple[str, ...] = ()
    if not program:
        base = ["--preset", known.preset] if known.preset else []
        layers = (config.read_toml(known.config) if known.config else {}) | config.read_flags(settings)
        training = command.parse([*base, *(["--config", str(known.config)] if known.config else []), *settings])
        flags = (*base, *config.to_flags(layers))
    stem = known.preset or (known.config.stem if known.config else "run")
    run = commands.check_run_name(known.run or f"{stem}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}")
    return Asked(
        known.hosts,
        run,
        known.resume,
        tuple(known.secret),
        known.port,
        known.dry_run,
        known.follow,
        training,
        flags,
        program,
    )


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    os.umask(UMASK)
    asked = parse(argv, time.time())
    hosts = read_hosts(asked.hosts_file)
    if asked.dry_run:
        print_dry_run(asked, hosts)
        return 0
    began = time.monotonic()
    with Fleet(hosts) as fleet:
        answers, port = probe(asked, hosts, fleet)
        plan = make_plan(asked, hosts, answers, port, time.time())
        check_training(asked, plan)
        start(asked, plan, fleet)
        took = f"up in {time.monotonic() - began:.1f} s"
        print(f"{plan.run}: {len(plan.nodes)} hosts, {plan.world} ranks, rendezvous at {plan.endpoint}, {took}")
        if (
            asked.training
            and asked.training.config.parallel.device != "cpu"
            and any(a["gpus"] for a in answers.values())
        ):
            print(UNPROVED)
        print_next(asked, plan)
        sys.stdout.flush()
        return follow(fleet, plan, hosts_argument(asked)) if asked.follow else 0


def start(asked: Asked, plan: Plan, fleet: Fleet) -> None:
    """Start the node runner on every host; if one does not start, stop them all.

    Raises:
        RunError: Names the hosts that did not start, and any on which something may be left.
    """
    record = dataclasses.asdict(plan)
    hidden = {name: os.environ[name] for name in asked.secrets}
    requests = {
        node.name: {
            "host": node.name,
            "plan": record,
            "secrets": hidden,
            "ranks": list(range(node.first_rank, node.first_rank + node.slots)),
        }
        for node in plan.nodes
    }
    try:
        outcomes = fleet.ask_all("start", requests, START_TIMEOUT_S)
    except BaseException:  # Ctrl-C as well: all or nothing
        print("ending what was started", file=sys.stderr)
        _stop_all(plan, fleet)
        raise
    faults = {name: why for name, found in outcomes.items() if (why := _start_fault(found))}
    if not faults:
        with contextlib.suppress(OSError):  # the hosts have theirs; this one is for the operator to read
            write_json(RunDir(Path("runs") / plan.run).plan, plan)
        return
    ends = _stop_all(plan, fleet)
    rows = []
    for name in requests:
        end = ends[name]
        stopped = (
            "nothing is left"
            if isinstance(end, dict) and not end["left"]
            else f"NOT VERIFIED: {end if isinstance(end, HostError) else end['left']}"
        )
        rows.append((name, faults.get(name, "started, then stopped"), stopped))
    print_table(("host", "what happened", "now"), rows)
    unverified = [name for name in requests if isinstance(ends[name], HostError) or ends[name]["left"]]  # type: ignore[index]
    tail = (
        f"; run `{front_door()} stop --run {plan.run}` once {', '.join(unverified)} can be reached"
        if unverified
        else "; nothing is left running"
    )
    raise RunError(f"{fault_list(faults, len(requests), '')}{tail}")


def _stop_all(plan: Plan, fleet: Fleet) -> dict[str, Outcome]:
    """End this launch's processes everywhere; another launch's of the same name are not touched."""
    requests = {node.name: {"run": plan.run, "host": node.name, "only": plan.rdzv_id} for node in plan.nodes}
    return fleet.ask_all("stop", requests, STOP_TIMEOUT_S)


def print_dry_run(asked: Asked, hosts: Sequence[Host]) -> None:
    """Print what would run where; what only the hosts can tell is marked with <>."""
    program = tuple(asked.program) or tuple(training_program(asked))
    if asked.training:
        command.parse(program[2:])
    slots = [host.slots for host in hosts]
    known = all(slots)
    ranks = commands.first_ranks(slots)
    plan = Plan(
        asked.run,
        1,
        0.0,
        f"{asked.run}-<attempt>-<random>",
        f"{head_address(hosts)}:{asked.port or '<free port>'}",
        program,
        asked.secrets,
        tuple(
            Node(
                h.name,
                h.slots,
                r,
                h.workdir or str(Path.cwd()),
                h.python or sys.executable,
                h.address or "<route to the head>",
                "<interface>",
                {},
            )
            for h, r in zip(hosts, ranks, strict=True)
        ),
    )
    for host, node in zip(hosts, plan.nodes, strict=True):
        span = f"ranks {node.first_rank}-{node.first_rank + node.slots - 1}" if known else "one rank for each GPU"
        print(f"{host.name}  ({span}, in {node.workdir}, tmux -L {commands.tmux_socket(plan.run)})")
        shown = shlex.join(commands.torchrun_argv(plan, host.name, f"runs/{plan.run}/logs/{host.name}"))
        print(f"  {shown if host.slots else shown.replace('--nproc-per-node=0', '--nproc-per-node=<GPUs>')}")
    if asked.training and known:
        config.check_world(asked.training.config, plan.world)
    print("nothing was started, and no connection opened")


def hosts_argument(asked: Asked) -> str:
    """What a later command needs to find the hosts again."""
    return "" if asked.hosts_file == Path("hosts") else f" {shlex.quote(str(asked.hosts_file))}"


def print_next(asked: Asked, plan: Plan) -> None:
    """Print the commands to go on with."""
    hosts = hosts_argument(asked)
    for verb, what in (
        ("status", "how it goes"),
        ("logs", "every rank's log (-f follows)"),
        ("attach", "tmux on every host"),
        ("stop", "end it"),
    ):
        print(f"  {front_door()} {verb}{hosts} --run {plan.run}   # {what}")


def _start_fault(found: Outcome) -> str:
    if isinstance(found, HostError):
        return str(found)
    if "error" in found:
        return str(found["error"])
    return ""
