"""Predict whether a run fits, how long its steps take and what they cost, from shapes and data sheets.

With HOSTS, asks them what they are, as doctor does; without, needs no host: say what the machines are. docs/plan-accuracy.md shows how far
to trust it. Exit code: 0 if it fits, 3 if it does not.
"""

import argparse
import dataclasses
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from llama405b.capacity.calibration import Calibration
from llama405b.capacity.estimate import Cluster, Load
from llama405b.capacity.hardware import USUAL, Gpu, gpu_named, read_gpus
from llama405b.capacity.known import known_shape
from llama405b.capacity.machines import UNSEEN, Described, Machines, assumptions, described
from llama405b.capacity.outlook import HALVES, WHOLE, Fit, Outlook, best, predicts_units
from llama405b.contract import command, config, setting_rules, weights
from llama405b.contract.command import OneLineParser
from llama405b.contract.errors import GOOD, UNFIT, RunError, UserError
from llama405b.contract.files import write_atomic
from llama405b.contract.known_bugs import known_bugs
from llama405b.contract.phrases import given, reason_of
from llama405b.contract.schema import Config, Moments
from llama405b_tools.doctor.host_facts import machines_of
from llama405b_tools.doctor.rules.of_host import Needs
from llama405b_tools.doctor.visit import DEFAULT_PORT, look
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.printed_commands import program_name
from llama405b_tools.remote.launch_facts import version_of
from llama405b_tools.run import request as asked_launch
from llama405b_tools.run.calibrate import calibrate
from llama405b_tools.run.forecast import has_calibration, read_calibration, save_calibration
from llama405b_tools.run.request import source_flags
from llama405b_tools.text.predictions import SCHEMA, UNITS, ReportOptions, comparison, prediction, ranking, record
from llama405b_tools.verbs.arguments import hosts_of

CHOSEN = ("parallel.offload", "parallel.wrap", "parallel.moments", "training.micro_batch_size")
MEASURED = ("gpu", "nic", "disk")  # what a calibration tells
PACKAGES = ("torch", "transformers")
WHOLE_NUMBER = re.compile("[1-9][0-9]{0,4}")
MOST, LARGEST = 99_999, 1e18


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What a plan answers."""

    outlook: Outlook
    machines: Machines
    ranked: list[Outlook]  # of --search
    compared: dict[str, tuple[Machines, Outlook]]  # of --what-if, by its words
    options: ReportOptions
    not_used: str  # why what was measured is not used; "": it is, or nothing was

    def as_json(self) -> str:
        """Return the numbers, for programs."""
        more = {
            "search": [record(each, self.machines, self.options) for each in self.ranked],
            "what_if": {word: record(each, machines, self.options) for word, (machines, each) in self.compared.items()},
            "calibration_not_used": self.not_used,
        }
        own = record(self.outlook, self.machines, self.options)
        return json.dumps({"schema": SCHEMA, "units": UNITS} | own | more)

    def lines(self, notes: Sequence[str]) -> list[str]:
        """Return lines for people; ``notes``: on what the prediction rests."""
        lines = [*prediction(self.outlook, self.options), *notes]
        if self.not_used:
            lines.append(f"not used     what was measured on these hosts: {self.not_used}")
        if self.ranked:
            lines += ranking(self.ranked)
        if self.compared:
            others = {word: outlook for word, (_, outlook) in self.compared.items()}
            lines += comparison({"as planned": self.outlook} | others, self.options)
        return lines


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    settings, others = config.split_flags(argv)
    parser = _parser()
    args, rest = parser.parse_known_args(others)
    config.refuse_unknown(rest, parser.options)
    _check(args, settings)
    asked = command.parse([*source_flags(args), *settings, *_no_data(args, settings)]).config
    hosts, gpus = hosts_of(args.hosts), read_gpus(args.hardware)
    found = _found(args, hosts, gpus, on_cpu=asked.parallel.device == "cpu")
    machines = described(found, _said(args), gpus)
    planned = _config(asked, machines)
    elsewhere = {word: described(found, _said(other), gpus) for word, other in _alternatives(args, gpus).items()}
    plain = _outlook(planned, args.preset, None, machines)
    if args.calibrate:
        _calibrate(args, settings, plain, hosts)
    measured, why_not = _kept(args, hosts, plain)
    outlook = _outlook(planned, args.preset, measured, machines)
    _refuse_unmeasured_cpu(outlook, why_not)
    compared = {
        word: (other, _outlook(_elsewhere(planned, other), args.preset, measured, other))
        for word, other in elsewhere.items()
    }
    ranked = best(outlook, _moments(asked)) if args.search else []
    options = ReportOptions(args.tokens, args.price, args.measured)
    answer = Answer(outlook, machines, ranked, compared, options, why_not)
    if args.json:
        print(answer.as_json())
    else:
        linked = measured and (measured.load.hosts > 1 or outlook.load.hosts == 1)  # or its links are assumed
        assumed = [] if linked else assumptions(found, _said(args), machines, asked=bool(hosts))
        bugs = [f"known bug    {what}; {bug.cure}" for what, bug in known_bugs(planned, machines.versions).items()]
        print("\n".join(answer.lines([*assumed, *bugs])))
    code = UNFIT if [*ranked, outlook][0].fit is Fit.NO else GOOD
    if args.write and code == GOOD:
        _write(args, settings, asked, ranked[0])
    return code


def _moments(asked: Config) -> tuple[Moments, ...]:
    """Return the dtypes of the moments that a search may choose."""
    return ("fp32", "bf16") if asked.optimizer.betas[1] <= setting_rules.MAX_BETA_BF16 else ("fp32",)


def _refuse_unmeasured_cpu(outlook: Outlook, why_not: str) -> None:
    """Refuse to predict CPUs by a data sheet.

    Raises:
        UserError: Nothing was measured of them, or not of such a run.
    """
    if outlook.cluster.gpu.is_cpu and not outlook.calibration:
        unused = given("; what was measured on these hosts is not used: {}", why_not)
        raise UserError(
            f"--parallel.device: no data sheet tells how fast a CPU trains; measure it on the hosts: plan HOSTS --calibrate{unused}"
        )


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="llama405b plan",
        description=__doc__,
        epilog="Settings as for launch, such as --data.seq_len 8192, follow.",
    )
    add = parser.add_argument
    add("hosts", nargs="?", type=Path, metavar="HOSTS", help="hosts file: ask its hosts for what is not said here")
    add("--preset", default="", help="preset of the planned run")
    add("--config", type=Path, help="TOML file with the settings of the planned run")
    add("--nodes", type=int, help="number of hosts [1]")
    add("--slots", type=int, help="GPUs of each [8; gb200: 4]")
    add("--gpu", default="", help=f"kind of GPU [{USUAL}]: {', '.join(read_gpus())}")
    add("--hardware", type=Path, help="a file with more kinds, in the form of llama405b/capacity/hardware.toml")
    add("--ram", default="", help="memory of each host, like 2000GiB [not checked]")
    add(
        "--nic",
        default="",
        help="all network links of a host, one direction [400Gb/s for each GPU that such hosts have]",
    )
    add("--disk", default="", help="disk bandwidth of each host, for weights and checkpoints [5GB/s]")
    add("--tokens", type=float, default=0.0, help="predict time and cost for so many, like 1e9")
    add(
        "--price", type=float, default=0.0, help="of a GPU for an hour: predict what a day and a step cost, or --tokens"
    )
    add("--measured", type=float, default=0.0, help="a claimed step time, in seconds, to check against the prediction")
    add(
        "--what-if",
        nargs="+",
        default=[],
        metavar="NAME=VALUES",
        help="compare other machines, like nodes=12,16 gpu=h200, with the nearest global batch that divides among them",
    )
    add(
        "--search",
        action="store_true",
        help="try offload, moments, FSDP units and micro-batches; of the fastest that fit, the one with most room first",
    )
    add(
        "--write",
        type=Path,
        help="with --search: write the first one's settings, if it fits, to a new TOML file for --config",
    )
    add(
        "--calibrate",
        action="store_true",
        help="measure on HOSTS what steps of this run take, with few of its layers, and what their parts attain; kept and used later",
    )
    add("--json", action="store_true", help="print the numbers as JSON")
    return parser


def _check_numbers(args: argparse.Namespace) -> None:
    """Refuse numbers that cannot be.

    Raises:
        UserError: One is out of range.
    """
    for name in ("nodes", "slots"):
        if getattr(args, name) is not None and not 1 <= getattr(args, name) <= MOST:
            raise UserError(f"--{name}: {getattr(args, name)} is out of range; use 1 to {MOST}")
    for name in ("tokens", "price", "measured"):
        if not 0 <= getattr(args, name) <= LARGEST:
            raise UserError(f"--{name}: {getattr(args, name)} is out of range; use a number from 0 to {LARGEST:g}")


def _check(args: argparse.Namespace, settings: Sequence[str]) -> None:
    """Refuse what cannot be.

    Raises:
        UserError: A number is out of range, no model is named, or --write has nothing to write.
    """
    _check_numbers(args)
    if args.calibrate:
        _check_calibrate(args)
    if args.write and not args.search:
        raise UserError("--write: writes what --search finds; add --search")
    if args.write and os.path.lexists(args.write):
        raise UserError(f"--write: {args.write} exists; name another file")
    if not (args.preset or args.config or _is_set("model.path", args, settings)):
        raise UserError("plan: which model? add --preset, --model.path, or --config; see `llama405b plan --help`")


def _check_calibrate(args: argparse.Namespace) -> None:
    """Refuse to measure other machines than those of a hosts file, or what cannot be kept.

    Raises:
        UserError: There is no such file, its directory cannot be written, or other machines are described.
    """
    if not args.hosts:
        raise UserError("--calibrate: measures on hosts; name a hosts file")
    other = next((f"--{name}" for name in ("nodes", "slots", "ram") if getattr(args, name)), _described(args))
    if other:
        raise UserError(f"{other}: --calibrate measures the hosts as they are; remove one of them")
    if not os.access(args.hosts.absolute().parent, os.W_OK):
        raise UserError(
            f"--calibrate: {args.hosts.absolute().parent} cannot be written, and what it finds is kept there"
        )


def _described(args: argparse.Namespace) -> str:
    """Return what on the command line describes other machines than were measured; '' if nothing."""
    options = [f"--{name}" for name in MEASURED if getattr(args, name)]
    words = [f"--what-if {name}={value}" for name, value in _changes(args.what_if) if name in MEASURED]
    return next(iter([*options, *words]), "")


def _kept(args: argparse.Namespace, hosts: Sequence[Host], plan: Outlook) -> tuple[Calibration | None, str]:
    """Return what was measured for such a run on the hosts, or why something that was is not used."""
    if not (hosts and has_calibration(args.hosts)):
        return None, ""
    found = read_calibration(args.hosts, hosts)
    if found is None:
        return None, "it is damaged, of another version, or of other hosts"
    if described := _described(args):
        return None, f"{described} describes others"
    if not found.knows(plan.load, plan.cluster.gpu):
        return None, "it is of another model, sequence, numerics, attention, packing or GPU"
    return found, ""


def _no_data(args: argparse.Namespace, settings: Sequence[str]) -> list[str]:
    """Return what names some data where none is named: a plan needs none."""
    return [] if _is_set("data.paths", args, settings) else ["--data.paths=stdlib"]


def _is_set(key: str, args: argparse.Namespace, settings: Sequence[str]) -> bool:
    """Whether a setting is named."""
    named = key in (config.read_preset(args.preset) | config.read_toml(args.config))
    return named or any(word.partition("=")[0] == f"--{key}" for word in settings)


def _config(asked: Config, machines: Machines) -> Config:
    """The configuration on these machines.

    Raises:
        UserError: It cannot run on so many ranks, or is not predicted.
    """
    asked = config.on_ranks(asked, machines.world)
    config.check_world(asked, machines.world)
    if asked.parallel.fsdp == "fsdp1":
        raise UserError("--parallel.fsdp: plan predicts fsdp2; use that")
    if not asked.model.activation_checkpointing:
        raise UserError("--model.activation_checkpointing: plan predicts runs that recompute; use true")
    if not predicts_units(asked.parallel.wrap):
        units = ",".join(asked.parallel.wrap) or "nothing"
        known = " or ".join(",".join(name for name in each if name != "Embedding") for each in (WHOLE, HALVES))
        raise UserError(
            f"--parallel.wrap: plan does not predict FSDP units of {units}; use {known}, with Embedding or without"
        )
    return asked


def _elsewhere(asked: Config, machines: Machines) -> Config:
    """The configuration on other machines: with the nearest global batch that divides among their ranks.

    Raises:
        UserError: It cannot run there, or is not predicted.
    """
    batch = asked.training.global_batch_size
    nearest = min(config.nearest_batches(asked.training, machines.world), key=lambda size: abs(size - batch))
    return _config(
        dataclasses.replace(asked, training=dataclasses.replace(asked.training, global_batch_size=nearest)), machines
    )


def _outlook(asked: Config, preset: str, measured: Calibration | None, machines: Machines) -> Outlook:
    """Predict the planned run, with what was measured of it or of others there.

    Raises:
        UserError: The model's shape is not known, or the sequences are too long for it.
    """
    if (llama := known_shape(asked, preset)) is None:
        raise UserError(
            f"--model.path: {asked.model.path} has no config.json; {weights.how_to_get(Path(asked.model.path))}, or add the "
            "--preset of its shape"
        )
    weights.check_seq_len(llama, asked.data.seq_len)
    load = dataclasses.replace(Load.of(llama, asked, machines.world), ranks_per_host=machines.slots)
    assert machines.gpu, "a kind of GPU was chosen"
    cluster = Cluster(machines.gpu, machines.nic_bytes_per_s, machines.disk_bytes_per_s)
    outlook = Outlook.of(load, cluster, machines.ram_bytes)
    return outlook.calibrated(measured) if measured else outlook


def _calibrate(args: argparse.Namespace, settings: Sequence[str], plan: Outlook, hosts: Sequence[Host]) -> None:
    """Measure the planned run on the hosts, and keep what is found.

    Raises:
        UserError: It cannot be launched there as it is, or is not measured.
        RunError: It fails there, or what is found cannot be kept.
    """
    words = [str(args.hosts), "--run", f"calibrate-{time.strftime('%Y%m%d-%H%M%S')}", *source_flags(args), *settings]
    request = asked_launch.parse_launch([*words, *_no_data(args, settings)], time.time())
    if request.on_cpu and plan.load.offload != "none":
        raise UserError("--calibrate: on CPUs it measures --parallel.offload none alone; use that")
    with Fleet(hosts) as fleet:
        found = calibrate(request, hosts, fleet, plan.load, plan.cluster.gpu, time.strftime("%Y-%m-%d"))
    try:
        save_calibration(args.hosts, found)
    except OSError as error:
        raise RunError(f"{args.hosts}: what was measured cannot be kept beside it ({reason_of(error)})") from None


def _found(args: argparse.Namespace, hosts: Sequence[Host], gpus: dict[str, Gpu], *, on_cpu: bool) -> Machines:
    """Return what is found on the hosts.

    Raises:
        UserError: Something is not known, or the hosts are not alike.
        RunError: A host does not answer.
    """
    found = _asked_hosts(hosts, gpus) if hosts else dataclasses.replace(UNSEEN, versions=_installed())
    if on_cpu:
        found = dataclasses.replace(found, gpu=Gpu.of_cpu(found.ram_bytes / max(1, found.slots)))
    if args.hosts and not (args.gpu or found.gpu):
        raise UserError(
            f"{args.hosts}: nvidia-smi reports no GPU on these hosts; name the kind to predict for with --gpu"
        )
    return found


def _said(args: argparse.Namespace) -> Described:
    """Return what the command line says of machines."""
    return Described(args.nodes or 0, args.slots or 0, args.gpu, args.ram, args.nic, args.disk)


def _alternatives(args: argparse.Namespace, gpus: dict[str, Gpu]) -> dict[str, argparse.Namespace]:
    """Return the command line with each change of --what-if, by its words: ``nodes=12,16`` are two.

    Raises:
        UserError: One says nothing that is known, or what the command line itself could not say.
    """
    found = {}
    for name, value in _changes(args.what_if):
        word = f"{name}={value}"
        if name == "gpu":
            word = f"gpu={gpu_named(value, gpus).name}"
        number = name in ("nodes", "slots") and WHOLE_NUMBER.fullmatch(value)
        if not number and name not in ("gpu", "ram", "nic", "disk"):
            raise UserError(
                f"--what-if: {word!r} is none of nodes=N, slots=N, gpu=KIND, ram=2000GiB, nic=3200Gb/s, disk=5GB/s; correct it"
            )
        found[word] = argparse.Namespace(**vars(args) | {name: int(value) if number else value})
        _check_numbers(found[word])
    return found


def _changes(words: Sequence[str]) -> list[tuple[str, str]]:
    """``nodes=12,16`` as two."""
    return [(name, value) for name, _, values in (word.partition("=") for word in words) for value in values.split(",")]


def _asked_hosts(hosts: Sequence[Host], gpus: dict[str, Gpu]) -> Machines:
    """Ask the hosts.

    Raises:
        UserError: They are not alike, or have no GPU that is known.
        RunError: One does not answer.
    """
    with Fleet(hosts) as fleet:
        visit = look(fleet, DEFAULT_PORT, Needs())
    if visit.lost:
        name, why = next(iter(visit.lost.items()))
        raise RunError(f"{name}: {why}; mend that, or describe the machines: --nodes, --gpu, --slots, --ram, --nic")
    return machines_of(hosts, visit.facts, gpus)


def _installed() -> dict[str, str]:
    """The versions of packages here, where hosts get theirs from."""
    return {name: version_of(name) for name in PACKAGES}


def _write(args: argparse.Namespace, settings: Sequence[str], asked: Config, chosen: Outlook) -> None:
    """Write what the command line and its file set, with what the search chose."""
    load = chosen.load
    parallel = dataclasses.replace(asked.parallel, offload=load.offload, wrap=load.wrap, moments=load.moments)
    training = dataclasses.replace(asked.training, micro_batch_size=load.micro_batch)
    values = dataclasses.asdict(dataclasses.replace(asked, parallel=parallel, training=training))
    names = {*config.read_toml(args.config), *config.read_flags(config.split_flags(settings)[0]), *CHOSEN}
    lines = list[str]()
    for section, keys in itertools.groupby(sorted(name.split(".") for name in names), lambda name: name[0]):
        lines += [f"[{section}]", *(f"{key} = {json.dumps(values[section][key])}" for _, key in keys), ""]
    try:
        write_atomic(args.write, "\n".join(lines))
    except OSError as error:
        raise UserError(f"--write: {args.write} cannot be written ({reason_of(error)}); name another file") from None
    preset = f"--preset {args.preset} " if args.preset else ""
    print(
        f"wrote {args.write}: `{program_name()} launch HOSTS {preset}--config {args.write}` trains with it",
        file=sys.stderr,
    )
