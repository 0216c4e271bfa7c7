"""Predict whether a run fits, how long its steps take and what they cost, from shapes and data sheets.

With HOSTS, asks them what they are, as doctor does; without, needs no host: say what the machines are. docs/plan.md shows how far
to trust it. Exit code: 0 if it fits, 3 if it does not.
"""

import argparse
import dataclasses
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path

from llama405b.capacity.estimate import DISK_BYTES_PER_S, RUNTIME_BYTES, Cluster, Load
from llama405b.capacity.hardware import GIB, Gpu, gpu_named, read_gpus
from llama405b.capacity.known import known_shape
from llama405b.capacity.outlook import MEMORY_SPREAD, TIME_SPREAD, Fit, Outlook, best, largest_micro_batch
from llama405b.contract import command, config
from llama405b.contract.command import OneLineParser
from llama405b.contract.errors import GOOD, UNFIT, RunError, UserError
from llama405b.contract.files import write_atomic
from llama405b.contract.schema import Config
from llama405b_tools.doctor.machines import Machines, machines_of
from llama405b_tools.doctor.rules.of_host import Needs
from llama405b_tools.doctor.visit import DEFAULT_PORT, look
from llama405b_tools.hosts.files import read_hosts
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.typed import front_door
from llama405b_tools.run.request import source_flags

FITS = {Fit.YES: "fits", Fit.MAYBE: "MAY NOT FIT", Fit.NO: "DOES NOT FIT"}
CHOSEN = ("parallel.offload", "parallel.wrap", "parallel.moments", "training.micro_batch_size")
USUAL = "h100-80"
ASSUMED = Machines(1, 8, None, 0.0, 400e9)  # eight links of 400 Gbit/s
SHOWN = 8  # of a search
RATE = re.compile(r"([0-9.]+) *(Gb/s|GB/s)")
SIZE = re.compile(r"([0-9.]+) *(GiB|TiB)")


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
    outlook, assumed = _outlook(args, asked.config, args.preset)
    found = best(outlook) if args.search else []
    if args.json:
        print(json.dumps(_record(outlook, args) | {"search": [_record(each, args) for each in found]}))
    else:
        for line in [*_lines(outlook, args), *assumed, *_search_lines(found)]:
            print(line)
    code = UNFIT if (found[0] if found else outlook).fit is Fit.NO else GOOD
    if args.write and code == GOOD:
        _write(args, settings, asked.config, found[0])
    return code


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="llama405b plan",
        description=__doc__,
        epilog="Settings as for launch, such as --data.seq_len 8192, follow.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
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
    add("--tokens", type=float, default=0.0, help="predict time and cost for so many, like 1e9")
    add("--price", type=float, default=0.0, help="of a GPU for an hour")
    add("--measured", type=float, default=0.0, help="seconds that a step is said to take: is it possible?")
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
    add("--json", action="store_true", help="print the numbers as JSON")
    return parser


def _check(args: argparse.Namespace) -> None:
    """Refuse what cannot be.

    Raises:
        UserError: A number is out of range, or --write has nothing to write.
    """
    for name in ("nodes", "slots"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name}: {getattr(args, name)} is too small; use 1 or more")
    for name in ("tokens", "price", "measured"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise UserError(f"--{name}: {getattr(args, name)} is out of range; use a number of at least 0")
    if args.write and not args.search:
        raise UserError("--write: writes what --search finds; add --search")
    if args.write and args.write.exists():
        raise UserError(f"--write: {args.write} exists; name another file")
    if not (args.preset or args.config):
        raise UserError("plan: which model? add --preset, or --config with model.path; see `llama405b plan --help`")


def _has_data(args: argparse.Namespace, settings: Sequence[str]) -> bool:
    """Whether data is named: a plan needs none."""
    named = "data.paths" in (config.read_preset(args.preset) | config.read_toml(args.config))
    return named or any(word.startswith("--data.paths") for word in settings)


def _outlook(args: argparse.Namespace, asked: Config, preset: str) -> tuple[Outlook, list[str]]:
    """Predict the planned run; also returns lines about what was assumed.

    Raises:
        UserError: Something is not known: the model, the GPU, or a unit.
    """
    if (llama := known_shape(asked, preset)) is None:
        raise UserError(
            f"--model.path: {asked.model.path} has no config.json; download it, or add the --preset of its shape"
        )
    gpus = read_gpus(args.hardware)
    found = _asked_hosts(args.hosts, gpus) if args.hosts else ASSUMED
    nodes, slots = args.nodes or found.nodes, args.slots or found.slots
    if args.hosts and not (args.gpu or found.gpu):
        raise UserError(
            f"{args.hosts}: nvidia-smi reports no GPU on these hosts; name the kind to predict for with --gpu"
        )
    gpu = gpu_named(args.gpu, gpus) if args.gpu else found.gpu or gpu_named(USUAL, gpus)
    world = nodes * slots
    asked = config.on_ranks(asked, world)
    config.check_world(asked, world)
    if not asked.model.activation_checkpointing:
        raise UserError("--model.activation_checkpointing: plan predicts runs that recompute; use true")
    nic = _number(args.nic, "--nic", RATE) if args.nic else found.nic_bytes_per_s or ASSUMED.nic_bytes_per_s
    ram = _number(args.ram, "--ram", SIZE) if args.ram else found.ram_bytes
    assumed = [f"{nic * 8 / 1e9:,.0f} Gbit/s a host" + " (no active RDMA link was found)" * bool(args.hosts)] * (
        nodes > 1 and not args.nic and (not args.hosts or not found.nic_bytes_per_s)
    )
    assumed += [f"GPUs are {gpu.name}"] * (not args.gpu and not args.hosts)
    lines = [f"assumed      {'; '.join(assumed)}"] if assumed else []
    load = dataclasses.replace(Load.of(llama, asked, world), ranks_per_host=slots)
    return Outlook.of(load, Cluster(gpu, nic), ram), lines


def _asked_hosts(file: Path, gpus: dict[str, Gpu]) -> Machines:
    """Ask the hosts of a file.

    Raises:
        UserError: They are not alike, or have no GPU that is known.
        RunError: One does not answer.
    """
    hosts = read_hosts(file)
    with Fleet(hosts) as fleet:
        visit = look(fleet, DEFAULT_PORT, Needs())
    if visit.lost:
        name, why = next(iter(visit.lost.items()))
        raise RunError(f"{name}: {why}; mend that, or describe the machines: --nodes, --gpu, --slots, --ram, --nic")
    return machines_of(hosts, visit.facts, gpus)


def _number(text: str, option: str, form: re.Pattern[str]) -> float:
    """Bytes, or bytes per second."""
    units = {"Gb/s": 1e9 / 8, "GB/s": 1e9, "GiB": float(GIB), "TiB": 1024.0 * GIB}
    if not (found := form.fullmatch(text)) or found[1].count(".") > 1 or not float(found[1]):
        known = " or ".join(unit for unit in units if form.fullmatch(f"1{unit}"))
        raise UserError(f"{option}: {text!r} is not a number with {known}; correct it")
    return float(found[1]) * units[found[2]]


def _lines(outlook: Outlook, args: argparse.Namespace) -> list[str]:
    """The prediction, for people."""
    load, needs, cluster = outlook.load, outlook.needs, outlook.cluster
    lines = [
        f"{load.llama.parameters / 1e9:,.1f} B parameters on {load.hosts} x {load.ranks_per_host} {cluster.gpu.name}, "
        f"{cluster.nic_bytes_per_s * 8 / 1e9:,.0f} Gbit/s a host; "
        f"{load.numerics}, offload {load.offload}, micro-batch {load.micro_batch} of {load.seq_len:,} tokens, "
        f"{outlook.step_tokens:,} tokens a step",
        f"GPU memory   {_spread(needs.gpu_bytes / GIB, MEMORY_SPREAD)} of {cluster.gpu.memory_bytes / GIB:,.0f} GiB: {FITS[outlook.gpu]}"
        f" (states {needs.states_bytes / GIB:,.1f}, activations and gathered units {needs.activations_bytes / GIB:,.1f}, "
        f"CUDA and NCCL {RUNTIME_BYTES / GIB:,.1f}); largest micro-batch that fits: {largest_micro_batch(outlook)}",
    ]
    if needs.host_bytes:
        has = (
            f" of {outlook.ram_bytes / GIB:,.0f} GiB: {FITS[outlook.ram]}"
            if outlook.ram_bytes
            else " GiB (say --ram to compare)"
        )
        lines.append(f"host memory  {_spread(needs.host_bytes / GIB, MEMORY_SPREAD)}{has}, per host")
    lines += _time_lines(outlook, args)
    each = load.checkpoint_bytes / load.hosts
    lines.append(
        f"disk         {needs.weights_bytes / GIB:,.0f} GiB of weights; a checkpoint is {load.checkpoint_bytes / GIB:,.0f} GiB, "
        f"{each / GIB:,.0f} per host, {each / DISK_BYTES_PER_S:,.0f} s at {DISK_BYTES_PER_S / 1e9:.0f} GB/s; "
        f"{load.keep + 1} of them: {needs.checkpoints_bytes / GIB:,.0f} GiB"
    )
    return lines


def _time_lines(outlook: Outlook, args: argparse.Namespace) -> list[str]:
    time, lines = outlook.needs.time, list[str]()
    if args.measured and args.measured < outlook.floor_s:
        lines.append(
            f"IMPOSSIBLE   a step of {args.measured:g} s: the model's FLOPs alone take {outlook.floor_s:.1f} s at the GPUs' peak; "
            "check the sequence, the batch and the number of GPUs"
        )
    if not (time and outlook.tokens_per_s and outlook.mfu):
        return [*lines, f"time         unknown: nobody has timed {outlook.load.numerics}"]
    exposed, rate = time.forward_s + time.backward_s - time.compute_s, outlook.tokens_per_s
    lines += [
        f"step         {_spread(time.step_s, TIME_SPREAD)} s: compute {time.compute_s:.1f}, communication "
        f"{time.communication_s:.1f} of which {exposed:.1f} is not hidden, update {time.optimizer_s:.1f}; "
        f"never below {outlook.floor_s:.1f}",
        f"rate         {rate:,.0f} tokens/s, {rate / outlook.load.world:,.0f} per GPU, MFU {100 * outlook.mfu:.0f}%",
    ]
    if args.tokens:
        hours = args.tokens / outlook.tokens_per_s / 3600
        cost = (
            f", {_spread(args.price * hours * outlook.load.world, TIME_SPREAD)} at {args.price:g} a GPU-hour"
            if args.price
            else ""
        )
        days = f"{_spread(hours / 24, TIME_SPREAD)} days"
        lines.append(f"{args.tokens:,.0f} tokens: {days}, {hours * outlook.load.world:,.0f} GPU-hours{cost}")
    return lines


def _search_lines(found: Sequence[Outlook]) -> list[str]:
    if not found:
        return []
    lines = ["", "  offload  units   micro-batch  GPU GiB  RAM GiB   step s  tokens/s"]
    for each in found[:SHOWN]:
        units = "halves" if each.load.halves else "layers"
        time = f"{each.needs.step_s:8.1f} {each.tokens_per_s:9,.0f}" if each.needs.step_s else "        -         -"
        lines.append(
            f"  {each.load.offload:7}  {units:6}  {each.load.micro_batch:11}  {each.needs.gpu_bytes / GIB:7,.0f}  "
            f"{each.needs.host_bytes / GIB:7,.0f} {time}  {FITS[each.fit]}"
        )
    return lines


def _spread(value: float, share: float) -> str:
    digits = 0 if value >= 100 else 1
    return f"{value:,.{digits}f} ({value * (1 - share):,.{digits}f} to {value * (1 + share):,.{digits}f})"


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
    write_atomic(args.write, "\n".join(lines))
    preset = f"--preset {args.preset} " if args.preset else ""
    print(f"wrote {args.write}: `{front_door()} launch HOSTS {preset}--config {args.write}` trains with it")


def _record(outlook: Outlook, args: argparse.Namespace) -> dict[str, object]:
    """The prediction as JSON."""
    needs, load = outlook.needs, outlook.load
    hours = args.tokens / outlook.tokens_per_s / 3600 if args.tokens and outlook.tokens_per_s else None
    return {
        "fits": outlook.fit.name.lower(), "gpu_bytes": needs.gpu_bytes, "host_bytes": needs.host_bytes,
        "states_bytes": needs.states_bytes, "activations_bytes": needs.activations_bytes,
        "memory_spread": MEMORY_SPREAD, "time_spread": TIME_SPREAD,
        "time": dataclasses.asdict(needs.time) | {"step_s": needs.step_s} if needs.time else None,
        "floor_s": outlook.floor_s, "tokens_per_s": outlook.tokens_per_s, "mfu": outlook.mfu,
        "gpu_hours": hours * load.world if hours else None, "checkpoint_bytes": load.checkpoint_bytes,
        "settings": {"offload": load.offload, "wrap": load.wrap, "micro_batch_size": load.micro_batch},
    }  # fmt: skip
