"""Predict whether a run fits, how long its steps take and what they cost, from shapes and data sheets.

With HOSTS, asks them what they are, as doctor does; without, needs no host: say what the machines are. docs/plan-accuracy.md shows how far
to trust it. Exit code: 0 if it fits, 1 if it runs slower than it could, as GPUs have too little memory for what PyTorch keeps, 3 if it
does not fit.
"""

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from llama405b.capacity.calibration import Calibration
from llama405b.capacity.choice import chosen
from llama405b.capacity.estimate import Cluster
from llama405b.capacity.hardware import Gpu, read_gpus
from llama405b.capacity.known import known_shape
from llama405b.capacity.machines import UNSEEN, Machines, assumptions, described
from llama405b.capacity.outlook import HALVES, WHOLE, Fit, Outlook, predicts_units
from llama405b.capacity.run_shape import RunShape
from llama405b.capacity.search import best
from llama405b.contract import command, config, setting_rules, weights
from llama405b.contract.dealing import Dealing
from llama405b.contract.errors import FAILED, GOOD, UNFIT, RunError, UserError
from llama405b.contract.files import write_atomic
from llama405b.contract.known_bugs import known_bugs
from llama405b.contract.mesh import DP, Axes
from llama405b.contract.mesh_rules import check_mesh
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
from llama405b_tools.run.launch_options import source_flags
from llama405b_tools.text.prediction_record import SCHEMA, UNITS, record
from llama405b_tools.text.predictions import ReportOptions, prediction
from llama405b_tools.text.rankings import comparison, ranking
from llama405b_tools.verbs.arguments import hosts_of
from llama405b_tools.verbs.plan_options import (
    alternatives,
    check_options,
    described_otherwise,
    no_data,
    plan_parser,
    said_of_machines,
)

# Written if they differ from what was asked for.
OF_PARALLEL = ["strategy", "dp_replicate", "tp", "cp", "pp", "pp_schedule", "loss", "prefetch", "reshard_after_forward"]
IF_CHANGED = [f"parallel.{name}" for name in OF_PARALLEL] + ["model.activation_checkpointing", "model.activations"]
CHOSEN = ("parallel.offload", "parallel.wrap", "parallel.moments", "training.micro_batch_size")
CODES = {Fit.NO: UNFIT, Fit.RETRIES: FAILED}
PACKAGES = ("torch", "transformers")


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
    options = ReportOptions(args.tokens, args.price, args.measured)
    answer = Answer(outlook, machines, ranked, compared, options, why_not)
    if args.json:
        print(answer.as_json())
    else:
        linked = measured and (measured.load.hosts > 1 or outlook.load.hosts == 1)  # or its links are assumed
        assumed = [] if linked else assumptions(found, said_of_machines(args), machines, asked=bool(hosts))
        bugs = [f"known bug    {what}; {bug.cure}" for what, bug in known_bugs(planned, machines.versions).items()]
        print("\n".join(answer.lines([*assumed, *bugs])))
    code = CODES.get([*ranked, outlook][0].fit, GOOD)
    if args.write and code != UNFIT:
        _write(args, settings, asked, ranked[0])
    return code


def _moments(asked: Config) -> tuple[Moments, ...]:
    """Return the dtypes of the moments that a search may choose."""
    return ("fp32", "bf16") if asked.optimizer.betas[1] <= setting_rules.MAX_BETA_BF16 else ("fp32",)


def _refuse_unmeasured_cpu(outlook: Outlook, why_not: str) -> None:
    """Refuse to predict CPUs by a data sheet."""
    if outlook.cluster.gpu.is_cpu and not outlook.calibration:
        unused = given("; what was measured on these hosts is not used: {}", why_not)
        raise UserError(
            f"--parallel.device: no data sheet tells how fast a CPU trains; measure it on the hosts: plan HOSTS --calibrate{unused}"
        )


def _kept(args: argparse.Namespace, hosts: Sequence[Host], plan: Outlook) -> tuple[Calibration | None, str]:
    """Return what was measured for such a run on the hosts, or why something that was is not used."""
    if not (hosts and has_calibration(args.hosts)):
        return None, ""
    found = read_calibration(args.hosts, hosts)
    if found is None:
        return None, "it is damaged, of another version, or of other hosts"
    if described := described_otherwise(args):
        return None, f"{described} describes others"
    if not found.knows(plan.load, plan.cluster.gpu):
        return None, "it is of another model, sequence, numerics, attention, packing or GPU, or has no tp, cp or pp"
    return found, ""


def _split(asked: Config, preset: str, machines: Machines) -> Config:
    """The configuration with what is left to the plan; as it is if the model's shape is not known."""
    llama = known_shape(asked, preset)
    if llama is None or machines.gpu is None:
        return asked
    cluster = Cluster(machines.gpu, machines.nic_bytes_per_s, machines.disk_bytes_per_s)
    return chosen(asked, llama, machines.world, machines.slots, cluster, machines.ram_bytes)


def _config(asked: Config, machines: Machines) -> Config:
    """The configuration on these machines."""
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
    """The configuration on other machines: with the nearest global batch of which no rank is left without a part."""
    batch = asked.training.global_batch_size
    even = Dealing.of(asked.training, Axes.of(asked.parallel, machines.world, machines.slots).size(DP)).even
    sizes = [n_micro * asked.training.micro_batch_size for n_micro in even]
    nearest = min(sizes, key=lambda size: abs(size - batch))
    return _config(
        dataclasses.replace(asked, training=dataclasses.replace(asked.training, global_batch_size=nearest)), machines
    )


def _outlook(asked: Config, preset: str, measured: Calibration | None, machines: Machines) -> Outlook:
    """Predict the planned run, with what was measured of it or of others there."""
    if (llama := known_shape(asked, preset)) is None:
        raise UserError(
            f"--model.path: {asked.model.path} has no config.json; {weights.how_to_get(Path(asked.model.path))}, or add the "
            "--preset of its shape"
        )
    weights.check_seq_len(llama, asked.data.seq_len)
    axes = Axes.of(asked.parallel, machines.world, machines.slots)
    check_mesh(axes, asked.parallel, llama, asked.data.seq_len, machines.slots)
    load = dataclasses.replace(RunShape.of(llama, asked, machines.world, axes), ranks_per_host=machines.slots)
    assert machines.gpu, "a kind of GPU was chosen"
    cluster = Cluster(machines.gpu, machines.nic_bytes_per_s, machines.disk_bytes_per_s)
    outlook = Outlook.of(load, cluster, machines.ram_bytes)
    return outlook.calibrated(measured) if measured else outlook


def _calibrate(args: argparse.Namespace, settings: Sequence[str], plan: Outlook, hosts: Sequence[Host]) -> None:
    """Measure the planned run on the hosts, and keep what is found."""
    if plan.load.is_split:
        raise UserError("--calibrate: it measures runs without tp, cp and pp; leave them out")
    if len(plan.load.recompute.counts((plan.load.llama.layers,))) > 1:
        raise UserError(
            "--calibrate: it measures layers that are alike; use --model.activation_checkpointing full, operators or none"
        )
    words = [str(args.hosts), "--run", f"calibrate-{time.strftime('%Y%m%d-%H%M%S')}", *source_flags(args), *settings]
    request = asked_launch.parse_launch([*words, *no_data(args, settings)], time.time())
    if left := request.settings.left_to_plan:
        raise UserError(
            f"--calibrate: its runs have few layers, for which {left} would choose something else; write what it stands for"
        )
    if request.on_cpu and plan.load.offload != "none":
        raise UserError("--calibrate: on CPUs it measures --parallel.offload none alone; use that")
    with Fleet(hosts) as fleet:
        found = calibrate(request, hosts, fleet, plan.load, plan.cluster.gpu, time.strftime("%Y-%m-%d"))
    try:
        save_calibration(args.hosts, found)
    except OSError as error:
        raise RunError(f"{args.hosts}: what was measured cannot be kept beside it ({reason_of(error)})") from None


def _found(args: argparse.Namespace, hosts: Sequence[Host], gpus: dict[str, Gpu], *, on_cpu: bool) -> Machines:
    """Return what is found on the hosts."""
    versions = {name: version_of(name) for name in PACKAGES}  # here, where hosts get theirs from
    found = _asked_hosts(hosts, gpus) if hosts else dataclasses.replace(UNSEEN, versions=versions)
    if on_cpu:
        found = dataclasses.replace(found, gpu=Gpu.of_cpu(found.ram_bytes / max(1, found.slots)))
    if args.hosts and not (args.gpu or found.gpu):
        raise UserError(
            f"{args.hosts}: nvidia-smi reports no GPU on these hosts; name the kind to predict for with --gpu"
        )
    return found


def _asked_hosts(hosts: Sequence[Host], gpus: dict[str, Gpu]) -> Machines:
    """Ask the hosts."""
    with Fleet(hosts) as fleet:
        visit = look(fleet, DEFAULT_PORT, Needs())
    if visit.lost:
        name, why = next(iter(visit.lost.items()))
        raise RunError(f"{name}: {why}; fix that, or describe the machines: --nodes, --gpu, --slots, --ram, --nic")
    return machines_of(hosts, visit.facts, gpus)


def _write(args: argparse.Namespace, settings: Sequence[str], asked: Config, chosen: Outlook) -> None:
    """Write what the command line and its file set, with what the search chose."""
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
