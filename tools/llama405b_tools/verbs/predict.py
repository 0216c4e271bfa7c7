"""Predict whether a run fits, how long its steps take and what they cost, from shapes and data sheets.

With HOSTS, queries their hardware as doctor does. Without, needs no host: describe the machines by options. See docs/plan-accuracy.md
for the accuracy. Exit code: 0 if the run fits, 1 if it fits but runs slower because GPU memory is too small for what PyTorch reserves, 3
if it does not fit.
"""

import argparse
import dataclasses
import importlib
import itertools
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path

from llama405b.contract.errors import FAILED, GOOD, UNFIT, RunError, UserError, given, reason_of
from llama405b.contract.files import write_atomic
from llama405b.predict.calibration import Calibration
from llama405b.predict.estimate import UNSEEN, Cluster, Described, Machines, assumptions, described
from llama405b.predict.hardware import USUAL, Gpu, gpu_named, read_gpus
from llama405b.predict.run_shape import RunShape
from llama405b.predict.search import HALVES, WHOLE, Fit, Outlook, best, chosen, known_shape, predicts_units
from llama405b.settings import command, config, rules
from llama405b.settings.axes import DP, Axes, Dealing
from llama405b.settings.command import OneLineParser
from llama405b.settings.schema import Config, Moments
from llama405b.spec import models
from llama405b.spec.rules import check_mesh
from llama405b_tools.agent.machine import version_of
from llama405b_tools.hosts.fleet import Fleet, program_name
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.launch import request as asked_launch
from llama405b_tools.launch.doctor import DEFAULT_PORT, look
from llama405b_tools.launch.host_facts import machines_of
from llama405b_tools.launch.host_rules import Needs
from llama405b_tools.launch.preflight import known_bugs
from llama405b_tools.launch.probes import calibrate
from llama405b_tools.launch.request import source_flags
from llama405b_tools.launch.start import has_calibration, read_calibration, save_calibration
from llama405b_tools.plan import SCHEMA, UNITS, ReportOptions, comparison, prediction, ranking, record
from llama405b_tools.verbs.arguments import hosts_of
from llama405b_tools.verbs.data import TRAINERS_OWN

MEASURED = ("gpu", "nic", "disk")  # options that a calibration replaces
WHOLE_NUMBER = re.compile("[1-9][0-9]{0,4}")
MOST, LARGEST = 99_999, 1e18


def plan_parser(description: str | None) -> OneLineParser:
    """Return the verb's parser."""
    parser = OneLineParser(
        prog="llama405b plan",
        description=description,
        epilog="Also takes settings as for launch, such as --data.seq_len 8192.",
    )
    add = parser.add_argument
    add(
        "hosts",
        nargs="?",
        type=Path,
        metavar="HOSTS",
        help="hosts file: query its hosts for what the options do not say",
    )
    add("--preset", default="", help="preset of the planned run")
    command.add_config(add, "TOML file with the settings of the planned run; may be repeated")
    add("--nodes", type=int, help="number of hosts [1]")
    add("--slots", type=int, help="GPUs per host [8; gb200: 4]")
    add("--gpus", type=int, help="number of GPUs on all hosts, instead of --nodes")
    add("--gpu", default="", help=f"kind of GPU [{USUAL}]: {', '.join(read_gpus())}")
    add("--hardware", type=Path, help="file with more kinds of GPU, in the format of llama405b/predict/hardware.toml")
    add("--ram", default="", help="memory of each host, like 2000GiB or 2TB [not checked]")
    add(
        "--nic",
        default="",
        help="total network bandwidth of a host, one direction [400Gb/s per GPU of such a host]",
    )
    add("--disk", default="", help="disk bandwidth of each host, for weights and checkpoints [5GB/s]")
    add("--tokens", type=token_count, default=0.0, help="predict time and cost for this many tokens, like 1e9 or 1B")
    add(
        "--price",
        type=float,
        default=0.0,
        help="price per GPU-hour: predict the cost of a day and a step, or of --tokens",
    )
    add("--measured", type=float, default=0.0, help="a claimed step time, in seconds, to check against the prediction")
    _add_answers(add)
    return parser


def token_count(text: str) -> float:
    """Parse a number of tokens: ``1e9``, ``500M``, ``1.5B``, ``15T``."""
    found = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?(?:e\d+)?)([KMBT]?)", text, re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens; write 1e9, 500M or 1.5B")
    return float(found[1]) * math.pow(1000, " kmbt".index(found[2].lower() or " "))


def _add_answers(add: Callable[..., object]) -> None:
    """Add the options for what-if, search, calibration and output."""
    add(
        "--what-if",
        nargs="+",
        default=[],
        metavar="NAME=VALUES",
        help="compare other machines, like nodes=12,16 gpu=h200, each with the nearest global batch that they divide",
    )
    add(
        "--search",
        action="store_true",
        help="try offload, moments, FSDP units, micro-batches and meshes; of the fastest that fit, most free memory first",
    )
    add(
        "--write",
        type=Path,
        help="with --search: write the best settings, if they fit, to a new TOML file for --config",
    )
    add(
        "--calibrate",
        action="store_true",
        help="measure on HOSTS the step times of this run with a few of its layers, and the rates of their parts; saved for later plans",
    )
    add("--json", action="store_true", help="print the numbers as JSON")


def check_options(args: argparse.Namespace, settings: Sequence[str]) -> None:
    """Refuse options that contradict each other."""
    _check_numbers(args)
    if args.calibrate:
        _check_calibrate(args)
    if args.write and not args.search:
        raise UserError("--write needs --search; add it")
    if args.write and os.path.lexists(args.write):
        raise UserError(f"--write: {args.write} exists; name another file")
    if not (args.preset or args.config or _is_set("model.path", args, settings)):
        raise UserError("plan: which model? add --preset, --model.path, or --config; see `llama405b plan --help`")


def _check_numbers(args: argparse.Namespace) -> None:
    """Refuse numbers out of range."""
    for name in ("nodes", "slots", "gpus"):
        if getattr(args, name) is not None and not 1 <= getattr(args, name) <= MOST:
            raise UserError(f"--{name}: {getattr(args, name)} is out of range; use 1 to {MOST}")
    for name in ("tokens", "price", "measured"):
        if not 0 <= getattr(args, name) <= LARGEST:
            raise UserError(f"--{name}: {getattr(args, name)} is out of range; use a number from 0 to {LARGEST:g}")


def _check_calibrate(args: argparse.Namespace) -> None:
    """Refuse to calibrate machines other than a hosts file's, or if the result cannot be saved."""
    if not args.hosts:
        raise UserError("--calibrate: measures on hosts; name a hosts file")
    other = next(
        (f"--{name}" for name in ("nodes", "slots", "gpus", "ram") if getattr(args, name)), described_otherwise(args)
    )
    if other:
        raise UserError(f"{other}: --calibrate measures the hosts as they are; remove one of them")
    if not os.access(args.hosts.absolute().parent, os.W_OK):
        raise UserError(
            f"--calibrate: {args.hosts.absolute().parent} is not writable, and the calibration is saved there"
        )


def described_otherwise(args: argparse.Namespace) -> str:
    """Return the option that describes machines other than the measured ones; '' if there is none."""
    options = [f"--{name}" for name in MEASURED if getattr(args, name)]
    words = [f"--what-if {name}={value}" for name, value in _changes(args.what_if) if name in MEASURED]
    return next(iter([*options, *words]), "")


def no_data(args: argparse.Namespace, settings: Sequence[str]) -> list[str]:
    """Return placeholder data flags if no data is set: a plan needs none."""
    return [] if _is_set("data.paths", args, settings) else ["--data.paths=stdlib"]


def _is_set(key: str, args: argparse.Namespace, settings: Sequence[str]) -> bool:
    """Return whether a setting is set by a preset, a file or a flag."""
    named = key in (config.read_preset(args.preset) | config.read_files(args.config))
    return named or any(word.partition("=")[0] == f"--{key}" for word in settings)


def said_of_machines(args: argparse.Namespace) -> Described:
    """Return the machine options of the command line."""
    return Described(args.nodes or 0, args.slots or 0, args.gpu, args.ram, args.nic, args.disk, args.gpus or 0)


def alternatives(args: argparse.Namespace, gpus: dict[str, Gpu]) -> dict[str, argparse.Namespace]:
    """Return the arguments for each change of --what-if, by its text: ``nodes=12,16`` is two changes."""
    found = {}
    for name, value in _changes(args.what_if):
        word = f"{name}={value}"
        if name == "gpu":
            word = f"gpu={gpu_named(value, gpus).name}"
        number = name in ("nodes", "slots") and WHOLE_NUMBER.fullmatch(value)
        if not number and name not in ("gpu", "ram", "nic", "disk"):
            raise UserError(
                f"--what-if: {word!r} is not a change; use nodes=N, slots=N, gpu=KIND, ram=2000GiB, nic=3200Gb/s or disk=5GB/s"
            )
        found[word] = argparse.Namespace(**vars(args) | {name: int(value) if number else value})
        _check_numbers(found[word])
    return found


def _changes(words: Sequence[str]) -> list[tuple[str, str]]:
    """Split ``nodes=12,16`` into its name and values."""
    return [(name, value) for name, _, values in (word.partition("=") for word in words) for value in values.split(",")]


# Settings that --write includes only if the search changed them.
OF_PARALLEL = ["strategy", "dp_replicate", "tp", "cp", "pp", "pp_schedule", "loss", "prefetch", "reshard_after_forward"]
IF_CHANGED = [f"parallel.{name}" for name in OF_PARALLEL] + ["model.activation_checkpointing", "model.activations"]
CHOSEN = ("parallel.offload", "parallel.wrap", "parallel.moments", "training.micro_batch_size")
CODES = {Fit.NO: UNFIT, Fit.RETRIES: FAILED}
PACKAGES = ("torch", "transformers")


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The result of a plan."""

    outlook: Outlook
    machines: Machines
    ranked: list[Outlook]  # results of --search, best first
    compared: dict[str, tuple[Machines, Outlook]]  # results of --what-if, by the text of the change
    options: ReportOptions
    not_used: str  # why the calibration is not used; "": it is used, or there is none

    def as_json(self) -> str:
        """Return the numbers as JSON, for programs."""
        more = {
            "search": [record(each, self.machines, self.options) for each in self.ranked],
            "what_if": {word: record(each, machines, self.options) for word, (machines, each) in self.compared.items()},
            "calibration_not_used": self.not_used,
        }
        own = record(self.outlook, self.machines, self.options)
        return json.dumps({"schema": SCHEMA, "units": UNITS} | own | more)

    def lines(self, notes: Sequence[str]) -> list[str]:
        """Return the plan as text; ``notes``: the assumptions of the prediction."""
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
    parser = plan_parser(__doc__)
    args, rest = parser.parse_known_args(others)
    config.refuse_unknown(rest, parser.options)
    check_options(args, settings)
    asked = command.parse([*source_flags(args), *settings, *no_data(args, settings)]).config
    hosts, gpus = hosts_of(args.hosts), read_gpus(args.hardware)
    found = _found(args, hosts, gpus, on_cpu=asked.parallel.device == "cpu")
    machines = described(found, said_of_machines(args), gpus)
    asked = _split(asked, args.preset, machines)
    planned = _config(asked, machines)
    elsewhere = {
        word: described(found, said_of_machines(other), gpus) for word, other in alternatives(args, gpus).items()
    }
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
    tokens, counted = (args.tokens, "") if args.tokens or no_data(args, settings) else _counted(planned)
    options = ReportOptions(tokens, args.price, args.measured)
    answer = Answer(outlook, machines, ranked, compared, options, why_not)
    if args.json:
        print(answer.as_json())
    else:
        linked = measured and (
            measured.load.hosts > 1 or outlook.load.hosts == 1
        )  # else the rates of its links are assumptions
        assumed = [] if linked else assumptions(found, said_of_machines(args), machines, asked=bool(hosts))
        bugs = [f"known bug    {what}; {bug.cure}" for what, bug in known_bugs(planned, machines.versions).items()]
        print("\n".join(answer.lines([*given("data         {}", counted).splitlines(), *assumed, *bugs])))
    code = CODES.get([*ranked, outlook][0].fit, GOOD)
    if args.write and code != UNFIT:
        _write(args, settings, asked, ranked[0])
    return code


def _counted(asked: Config) -> tuple[float, str]:
    """Return the run's number of tokens and a note on it; 0 and the reason if they cannot be counted here."""
    try:
        found = importlib.import_module(TRAINERS_OWN).count(asked)
    except (ImportError, UserError, RunError) as error:
        return 0.0, f"not counted here ({error}); pass the number with --tokens"
    how = "counted" if found.share == 1 else f"by the first {100 * found.share:.2g}% of its bytes"
    return (
        found.tokens,
        f"{found.tokens:,} tokens with padding, {found.epochs:.3g} epochs of {', '.join(asked.data.paths)}, {how}",
    )


def _moments(asked: Config) -> tuple[Moments, ...]:
    """Return the moment dtypes that a search may choose."""
    return ("fp32", "bf16") if asked.optimizer.betas[1] <= rules.MAX_BETA_BF16 else ("fp32",)


def _refuse_unmeasured_cpu(outlook: Outlook, why_not: str) -> None:
    """Refuse to predict CPUs without a calibration."""
    if outlook.cluster.gpu.is_cpu and not outlook.calibration:
        unused = given("; what was measured on these hosts is not used: {}", why_not)
        raise UserError(
            f"--parallel.device: no data sheet tells how fast a CPU trains; measure it on the hosts: plan HOSTS --calibrate{unused}"
        )


def _kept(args: argparse.Namespace, hosts: Sequence[Host], plan: Outlook) -> tuple[Calibration | None, str]:
    """Return the hosts' calibration for such a run, or the reason why it is not used."""
    if not (hosts and has_calibration(args.hosts)):
        return None, ""
    found = read_calibration(args.hosts, hosts)
    if found is None:
        return None, "it is damaged, of another version, or of other hosts"
    if described := described_otherwise(args):
        return None, f"{described} describes other machines"
    if not found.knows(plan.load, plan.cluster.gpu):
        return (
            None,
            "it was made for another model, sequence length, numerics, attention, packing or GPU, or without tp, cp and pp",
        )
    return found, ""


def _split(asked: Config, preset: str, machines: Machines) -> Config:
    """Return the settings with auto values resolved; unchanged if the model's shape is unknown."""
    llama = known_shape(asked, preset)
    if llama is None or machines.gpu is None:
        return asked
    cluster = Cluster(machines.gpu, machines.nic_bytes_per_s, machines.disk_bytes_per_s)
    return chosen(asked, llama, machines.world, machines.slots, cluster, machines.ram_bytes)


def _config(asked: Config, machines: Machines) -> Config:
    """Return the settings for these machines; refuse what plan cannot predict."""
    axes = Axes.of(asked.parallel, machines.world, machines.slots)
    asked = config.on_ranks(asked, axes)
    if asked.parallel.by_fsdp1:
        raise UserError("--parallel.strategy: plan does not predict fsdp1; use fsdp2")
    if not predicts_units(asked.parallel.wrap):
        units = ",".join(asked.parallel.wrap) or "nothing"
        known = " or ".join(",".join(name for name in each if name != "Embedding") for each in (WHOLE, HALVES))
        raise UserError(
            f"--parallel.wrap: plan does not predict FSDP units of {units}; use {known}, with Embedding or without"
        )
    return asked


def _elsewhere(asked: Config, machines: Machines) -> Config:
    """Return the settings for other machines, with the nearest global batch that gives every rank a share."""
    batch = asked.training.global_batch_size
    even = Dealing.of(asked.training, Axes.of(asked.parallel, machines.world, machines.slots).size(DP)).even
    sizes = [n_micro * asked.training.micro_batch_size for n_micro in even]
    nearest = min(sizes, key=lambda size: abs(size - batch))
    return _config(
        dataclasses.replace(asked, training=dataclasses.replace(asked.training, global_batch_size=nearest)), machines
    )


def _outlook(asked: Config, preset: str, measured: Calibration | None, machines: Machines) -> Outlook:
    """Predict the run, using a calibration if there is one."""
    if (llama := known_shape(asked, preset)) is None:
        raise UserError(
            f"--model.path: {asked.model.path} has no config.json; {models.how_to_get(Path(asked.model.path))}, or add the "
            "--preset of its shape"
        )
    models.check_seq_len(llama, asked.data.seq_len)
    axes = Axes.of(asked.parallel, machines.world, machines.slots)
    check_mesh(axes, asked.parallel, llama, asked.data.seq_len, machines.slots)
    load = dataclasses.replace(RunShape.of(llama, asked, machines.world, axes), ranks_per_host=machines.slots)
    assert machines.gpu, "a kind of GPU was chosen"
    cluster = Cluster(machines.gpu, machines.nic_bytes_per_s, machines.disk_bytes_per_s)
    outlook = Outlook.of(load, cluster, machines.ram_bytes)
    return outlook.calibrated(measured) if measured else outlook


def _calibrate(args: argparse.Namespace, settings: Sequence[str], plan: Outlook, hosts: Sequence[Host]) -> None:
    """Measure the planned run on the hosts and save the calibration."""
    if plan.load.is_split:
        raise UserError("--calibrate: measures only runs without tp, cp and pp; remove them")
    if len(plan.load.recompute.counts((plan.load.llama.layers,))) > 1:
        raise UserError(
            "--calibrate: measures only runs with identical layers; use --model.activation_checkpointing full, operators or none"
        )
    words = [str(args.hosts), "--run", f"calibrate-{time.strftime('%Y%m%d-%H%M%S')}", *source_flags(args), *settings]
    request = asked_launch.parse_launch([*words, *no_data(args, settings)], time.time())
    if left := request.settings.left_to_plan:
        raise UserError(
            f"--calibrate: its runs have few layers, for which {left} would choose something else; set it explicitly"
        )
    if request.on_cpu and plan.load.offload != "none":
        raise UserError("--calibrate: on CPUs, only --parallel.offload none can be measured; use it")
    with Fleet(hosts) as fleet:
        found = calibrate(request, hosts, fleet, plan.load, plan.cluster.gpu, time.strftime("%Y-%m-%d"))
    try:
        save_calibration(args.hosts, found)
    except OSError as error:
        raise RunError(f"{args.hosts}: the calibration cannot be saved next to it ({reason_of(error)})") from None


def _found(args: argparse.Namespace, hosts: Sequence[Host], gpus: dict[str, Gpu], *, on_cpu: bool) -> Machines:
    """Return the machines: as detected on the hosts, or unknown without hosts."""
    versions = {
        name: version_of(name) for name in PACKAGES
    }  # versions on this machine; setup installs the same on the hosts
    found = _asked_hosts(hosts, gpus) if hosts else dataclasses.replace(UNSEEN, versions=versions)
    if on_cpu:
        found = dataclasses.replace(found, gpu=Gpu.of_cpu(found.ram_bytes / max(1, found.slots)))
    if args.hosts and not (args.gpu or found.gpu):
        raise UserError(
            f"{args.hosts}: nvidia-smi reports no GPU on these hosts; name the kind to predict for with --gpu"
        )
    return found


def _asked_hosts(hosts: Sequence[Host], gpus: dict[str, Gpu]) -> Machines:
    """Query the hosts' hardware."""
    with Fleet(hosts) as fleet:
        visit = look(fleet, DEFAULT_PORT, Needs())
    if visit.lost:
        name, why = next(iter(visit.lost.items()))
        raise RunError(f"{name}: {why}; fix that, or describe the machines with --nodes, --gpu, --slots, --ram, --nic")
    return machines_of(hosts, visit.facts, gpus)


def _write(args: argparse.Namespace, settings: Sequence[str], asked: Config, chosen: Outlook) -> None:
    """Write the settings of the command line and its files, with those that the search chose."""
    load = chosen.load
    model = dataclasses.replace(asked.model, activation_checkpointing=str(load.recompute), activations=load.activations)
    training = dataclasses.replace(asked.training, micro_batch_size=load.micro_batch)
    written = dataclasses.replace(asked, model=model, parallel=load.parallel(asked.parallel), training=training)
    values = dataclasses.asdict(written)
    names = {*config.read_files(args.config), *config.read_flags(config.split_flags(settings)[0]), *CHOSEN}
    names |= {name for name in IF_CHANGED if attrgetter(name)(written) != attrgetter(name)(asked)}
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
