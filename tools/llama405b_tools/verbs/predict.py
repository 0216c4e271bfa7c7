"""Predict whether a run fits, how long its steps take and what they cost, from shapes and data sheets.

With HOSTS, asks them what they are, as doctor does; without, needs no host: say what the machines are. docs/plan.md shows how far
to trust it. Exit code: 0 if it fits, 3 if it does not.
"""

import argparse
import dataclasses
import functools
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
from llama405b.capacity.hardware import GIB, Gpu, gpu_named, read_gpus
from llama405b.capacity.known import known_shape
from llama405b.capacity.outlook import Fit, Outlook, best
from llama405b.contract import command, config
from llama405b.contract.command import OneLineParser
from llama405b.contract.errors import GOOD, UNFIT, RunError, UserError
from llama405b.contract.files import write_atomic
from llama405b.contract.known_bugs import known_bugs
from llama405b.contract.phrases import given, reason_of
from llama405b.contract.schema import Config
from llama405b_tools.doctor.machines import Machines, machines_of
from llama405b_tools.doctor.rules.of_host import Needs
from llama405b_tools.doctor.visit import DEFAULT_PORT, look
from llama405b_tools.hosts.files import read_hosts
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.typed import front_door
from llama405b_tools.remote.launch_facts import version_of
from llama405b_tools.run import request as asked_launch
from llama405b_tools.run.calibrate import calibrate
from llama405b_tools.run.calibrations import is_kept, keep, kept
from llama405b_tools.run.request import source_flags
from llama405b_tools.text.predictions import Asked, comparison, prediction, ranking

CHOSEN = ("parallel.offload", "parallel.wrap", "parallel.moments", "training.micro_batch_size")
MEASURED = ("gpu", "nic", "disk")  # what a calibration tells
USUAL = "h100-80"
ASSUMED = Machines(1, 8, None, 0.0, 400e9)  # eight links of 400 Gbit/s
PACKAGES = ("torch", "transformers")
RATE = re.compile(r"([0-9]{1,9}(?:[.][0-9]{1,9})?) *(Gb/s|GB/s)")
SIZE = re.compile(r"([0-9]{1,9}(?:[.][0-9]{1,9})?) *(GiB|TiB)")
WHOLE = re.compile("[1-9][0-9]{0,4}")
MOST, LARGEST = 99_999, 1e18


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    settings, others = config.split_flags(argv)
    parser = _parser()
    args, rest = parser.parse_known_args(others)
    config.refuse_unknown(rest, parser.options)
    _check(args)
    asked = command.parse(
        [*source_flags(args), *settings, *([] if _has_data(args, settings) else ["--data.paths=stdlib"])]
    )
    hosts = read_hosts(args.hosts) if args.hosts else ()
    machines, assumed = _machines(args, hosts, on_cpu=asked.config.parallel.device == "cpu")
    on_these = _config(asked.config, machines)
    changed = {word: _changed(machines, word, args) for word in _alternatives(args.what_if)}
    plain = _outlook(on_these, args.preset, None, machines)
    if args.calibrate:
        _calibrate(args, settings, plain, hosts)
    measured, why_not = _kept(args, hosts, plain)
    predict = functools.partial(_outlook, on_these, args.preset, measured)
    outlook = predict(machines)
    if outlook.cluster.gpu.is_cpu and not outlook.calibration:
        unused = given("; what was measured on these hosts is not used: {}", why_not)
        raise UserError(
            f"--parallel.device: no data sheet tells how fast a CPU trains; measure it on the hosts: plan HOSTS --calibrate{unused}"
        )
    found = best(outlook) if args.search else []
    compared = {word: predict(other) for word, other in changed.items()}
    if args.json:
        what_if = {word: _record(each, args) for word, each in compared.items()}
        more = {"search": [_record(each, args) for each in found], "what_if": what_if, "calibration_not_used": why_not}
        print(json.dumps(_record(outlook, args) | more))
    else:
        lines = prediction(outlook, Asked(args.tokens, args.price, args.measured))
        linked = measured and (measured.load.hosts > 1 or outlook.load.hosts == 1)  # or its links are assumed
        lines += [] if linked else assumed
        lines += [f"known bug    {what}; {bug.cure}" for what, bug in known_bugs(on_these, machines.versions).items()]
        lines += [f"not used     what was measured on these hosts: {why_not}"] if why_not else []
        lines += ranking(found) if found else []
        lines += comparison({"as planned": outlook} | compared) if compared else []
        print("\n".join(lines))
    code = UNFIT if (found[0] if found else outlook).fit is Fit.NO else GOOD
    if args.write and code == GOOD:
        _write(args, settings, asked.config, found[0])
    return code


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
    add("--slots", type=int, help="GPUs of each [8]")
    add("--gpu", help=f"kind of GPU [h100-80]: {', '.join(read_gpus())}")
    add("--hardware", type=Path, help="a file with more kinds, in the form of llama405b/capacity/hardware.toml")
    add("--ram", default="", help="memory of each host, like 2000GiB [not checked]")
    add("--nic", default="", help="all network links of a host, one direction [3200Gb/s]")
    add("--disk", default="", help="what a host reads weights and writes checkpoints with [5GB/s]")
    add("--tokens", type=float, default=0.0, help="predict time and cost for so many, like 1e9")
    add("--price", type=float, default=0.0, help="of a GPU for an hour")
    add("--measured", type=float, default=0.0, help="seconds that a step is said to take: is it possible?")
    add(
        "--what-if",
        nargs="+",
        default=[],
        metavar="NAME=VALUES",
        help="compare other machines, like nodes=12,16 gpu=h200-141",
    )
    add(
        "--search",
        action="store_true",
        help="rank places of the states, FSDP units and micro-batches; the fastest that fits first",
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


def _check(args: argparse.Namespace) -> None:
    """Refuse what cannot be.

    Raises:
        UserError: A number is out of range, or --write has nothing to write.
    """
    for name in ("nodes", "slots"):
        if getattr(args, name) is not None and not 1 <= getattr(args, name) <= MOST:
            raise UserError(f"--{name}: {getattr(args, name)} is out of range; use 1 to {MOST}")
    for name in ("tokens", "price", "measured"):
        if not 0 <= getattr(args, name) <= LARGEST:
            raise UserError(f"--{name}: {getattr(args, name)} is out of range; use a number from 0 to {LARGEST:g}")
    if args.calibrate and not args.hosts:
        raise UserError("--calibrate: measures on hosts; name a hosts file")
    other = next((f"--{name}" for name in ("nodes", "slots", "ram") if getattr(args, name)), _described(args))
    if args.calibrate and other:
        raise UserError(f"{other}: --calibrate measures the hosts as they are; remove one of them")
    if args.calibrate and not os.access(args.hosts.absolute().parent, os.W_OK):
        raise UserError(
            f"--calibrate: {args.hosts.absolute().parent} cannot be written, and what it finds is kept there"
        )
    if args.write and not args.search:
        raise UserError("--write: writes what --search finds; add --search")
    if args.write and os.path.lexists(args.write):
        raise UserError(f"--write: {args.write} exists; name another file")
    if not (args.preset or args.config):
        raise UserError("plan: which model? add --preset, or --config with model.path; see `llama405b plan --help`")


def _described(args: argparse.Namespace) -> str:
    """Return what on the command line describes other machines than were measured; '' if nothing."""
    options = [f"--{name}" for name in MEASURED if getattr(args, name)]
    words = [f"--what-if {word}" for word in _alternatives(args.what_if) if word.partition("=")[0] in MEASURED]
    return next(iter([*options, *words]), "")


def _kept(args: argparse.Namespace, hosts: Sequence[Host], plan: Outlook) -> tuple[Calibration | None, str]:
    """Return what was measured for such a run on the hosts, or why something that was is not used."""
    if not (hosts and is_kept(args.hosts)):
        return None, ""
    found = kept(args.hosts, hosts)
    if found is None:
        return None, "it is damaged, of another version, or of other hosts"
    if described := _described(args):
        return None, f"{described} describes others"
    if not found.knows(plan.load, plan.cluster.gpu):
        return None, "it is of another model, sequence, numerics, attention, packing or GPU"
    return found, ""


def _has_data(args: argparse.Namespace, settings: Sequence[str]) -> bool:
    """Whether data is named: a plan needs none."""
    named = "data.paths" in (config.read_preset(args.preset) | config.read_toml(args.config))
    return named or any(word.startswith("--data.paths") for word in settings)


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
    return asked


def _outlook(asked: Config, preset: str, measured: Calibration | None, machines: Machines) -> Outlook:
    """Predict the planned run, with what was measured of it or of others there.

    Raises:
        UserError: The model's shape is not known.
    """
    if (llama := known_shape(asked, preset)) is None:
        raise UserError(
            f"--model.path: {asked.model.path} has no config.json; download it, or add the --preset of its shape"
        )
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
    request = asked_launch.parse([*words, *([] if _has_data(args, settings) else ["--data.paths=stdlib"])], time.time())
    if request.on_cpu and plan.load.offload != "none":
        raise UserError("--calibrate: on CPUs it measures --parallel.offload none alone; use that")
    with Fleet(hosts) as fleet:
        found = calibrate(request, hosts, fleet, plan.load, plan.cluster.gpu, time.strftime("%Y-%m-%d"))
    try:
        keep(args.hosts, found)
    except OSError as error:
        raise RunError(f"{args.hosts}: what was measured cannot be kept beside it ({reason_of(error)})") from None


def _machines(args: argparse.Namespace, hosts: Sequence[Host], *, on_cpu: bool) -> tuple[Machines, list[str]]:
    """What is said of the machines, or found on the hosts; also returns lines about what is assumed.

    Raises:
        UserError: Something is not known, or the hosts are not alike.
        RunError: A host does not answer.
    """
    gpus = read_gpus(args.hardware)
    found = _asked_hosts(hosts, gpus) if hosts else dataclasses.replace(ASSUMED, versions=_installed())
    if on_cpu:
        found = dataclasses.replace(found, gpu=Gpu.of_cpu(found.ram_bytes / found.slots))
    if args.hosts and not (args.gpu or found.gpu):
        raise UserError(
            f"{args.hosts}: nvidia-smi reports no GPU on these hosts; name the kind to predict for with --gpu"
        )
    said = dataclasses.replace(
        found, nodes=args.nodes or found.nodes, slots=args.slots or found.slots, gpu=found.gpu or gpu_named(USUAL, gpus)
    )
    for name in ("gpu", "ram", "nic", "disk"):
        if value := getattr(args, name):
            said = _changed(said, f"{name}={value}", args)
    assumed = [] if args.gpu or args.hosts else [f"GPUs are {USUAL}"]
    if not said.nic_bytes_per_s:
        said = dataclasses.replace(said, nic_bytes_per_s=ASSUMED.nic_bytes_per_s)
    if said.nodes > 1 and not args.nic and not (args.hosts and found.nic_bytes_per_s):
        unseen = " (no active RDMA link was found)" if args.hosts else ""
        assumed.append(f"{said.nic_bytes_per_s * 8 / 1e9:,.0f} Gbit/s a host{unseen}")
    return said, [f"assumed      {'; '.join(assumed)}"] if assumed else []


def _alternatives(words: Sequence[str]) -> list[str]:
    """``nodes=12,16`` as two."""
    return [
        f"{name}={value}" for name, _, values in (word.partition("=") for word in words) for value in values.split(",")
    ]


def _changed(machines: Machines, word: str, args: argparse.Namespace) -> Machines:
    """Other machines, as a word says it: ``nodes=12``.

    Raises:
        UserError: It says nothing that is known.
    """
    name, _, value = word.partition("=")
    if name in ("nodes", "slots") and WHOLE.fullmatch(value):
        nodes, slots = (int(value), machines.slots) if name == "nodes" else (machines.nodes, int(value))
        return dataclasses.replace(machines, nodes=nodes, slots=slots)
    if name == "gpu":
        return dataclasses.replace(machines, gpu=gpu_named(value, read_gpus(args.hardware)))
    if name == "ram":
        return dataclasses.replace(machines, ram_bytes=_number(value, "--ram", SIZE))
    if name == "nic":
        return dataclasses.replace(machines, nic_bytes_per_s=_number(value, "--nic", RATE))
    if name == "disk":
        return dataclasses.replace(machines, disk_bytes_per_s=_number(value, "--disk", RATE))
    raise UserError(
        f"--what-if: {word!r} is none of nodes=N, slots=N, gpu=KIND, ram=2000GiB, nic=3200Gb/s, disk=5GB/s; correct it"
    )


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


def _number(text: str, option: str, form: re.Pattern[str]) -> float:
    """Bytes, or bytes per second."""
    units = {"Gb/s": 1e9 / 8, "GB/s": 1e9, "GiB": float(GIB), "TiB": 1024.0 * GIB}
    if not (found := form.fullmatch(text)) or not float(found[1]):
        known = " or ".join(unit for unit in units if form.fullmatch(f"1{unit}"))
        raise UserError(f"{option}: {text!r} is not a number with {known}; correct it")
    return float(found[1]) * units[found[2]]


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
        f"wrote {args.write}: `{front_door()} launch HOSTS {preset}--config {args.write}` trains with it",
        file=sys.stderr,
    )


def _record(outlook: Outlook, args: argparse.Namespace) -> dict[str, object]:
    """The prediction as JSON."""
    needs, load = outlook.needs, outlook.load
    hours = args.tokens / outlook.tokens_per_s / 3600 if args.tokens and outlook.tokens_per_s else None
    return {
        "fits": outlook.fit.name.lower(), "gpu_bytes": needs.gpu_bytes, "host_bytes": needs.host_bytes,
        "gpu_held_bytes": needs.peak.held, "peak_moment": needs.peak.moment, "host_held_bytes": needs.held_by_host,
        "loading": dataclasses.asdict(needs.loading), "saving": dataclasses.asdict(needs.saving),
        "memory_spread": outlook.memory_spread, "time_spread": outlook.time_spread, "calibrated": bool(outlook.calibration),
        "time": dataclasses.asdict(needs.time) | {"step_s": needs.step_s} if needs.time else None,
        "floor_s": outlook.floor_s, "tokens_per_s": outlook.tokens_per_s, "mfu": outlook.mfu, "hfu": outlook.hfu,
        "gpu_hours": hours * load.world if hours else None, "checkpoint_bytes": load.checkpoint_bytes,
        "settings": {"offload": load.offload, "wrap": load.wrap, "micro_batch_size": load.micro_batch},
    }  # fmt: skip
