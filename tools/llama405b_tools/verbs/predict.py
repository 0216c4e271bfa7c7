"""Predict whether a run fits, how long its steps take and what they cost, from shapes and data sheets.

With HOSTS, queries their hardware as doctor does. Without, needs no host: describe the machines by options. --deadline and prices of
several kinds of GPU compare what could be rented. See docs/plan-accuracy.md for the accuracy. Exit code: 0 if the run fits, 1 if it fits
but runs slower because GPU memory is too small for what PyTorch reserves, 3 if it does not fit; comparing, 3 also if nothing is likely in
time.
"""

import argparse
import bisect
import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llama405b.contract.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_UNFIT,
    RunError,
    UserError,
    fmt_if,
    parse_seconds,
    reason_of,
)
from llama405b.contract.files import write_atomic
from llama405b.predict.calibration import Calibration
from llama405b.predict.estimate import (
    UNKNOWN_MACHINES,
    Cluster,
    MachineOptions,
    Machines,
    apply_machine_options,
    describe_assumptions,
)
from llama405b.predict.hardware import DEFAULT_GPU, Gpu, find_gpu, read_gpus
from llama405b.predict.offers import MAX_HOSTS, Offer, best_settings, fewest_hosts, methods, offers_by_hosts, on_hosts
from llama405b.predict.run_shape import PredictedRun
from llama405b.predict.search import (
    Fit,
    Prediction,
    find_model_shape,
    rank_variants,
    resolve_auto,
    variants,
)
from llama405b.settings import command, config, rules
from llama405b.settings.axes import DP_AXES, FULL_RECOMPUTE, Axes, MicrobatchSplit
from llama405b.settings.parser import OneLineParser
from llama405b.settings.schema import Config, Moments, Parallel
from llama405b.spec import models
from llama405b.spec.rules import check_mesh
from llama405b_tools.agent.machine import package_version
from llama405b_tools.hosts.fleet import Fleet, program_name
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.launch import request as asked_launch
from llama405b_tools.launch.doctor import DEFAULT_PORT, survey_hosts
from llama405b_tools.launch.host_facts import machines_of
from llama405b_tools.launch.host_rules import Requirements
from llama405b_tools.launch.preflight import known_bugs
from llama405b_tools.launch.probes import calibrate
from llama405b_tools.launch.request import source_flags
from llama405b_tools.launch.start import has_calibration, read_calibration, save_calibration
from llama405b_tools.plan import (
    FIELD_UNITS,
    FIT_LABELS,
    SCHEMA_VERSION,
    ReportOptions,
    comparison_lines,
    format_prediction,
    format_summary,
    method_lines,
    offer_lines,
    prediction_record,
    ranking_lines,
)
from llama405b_tools.verbs.arguments import resolve_hosts
from llama405b_tools.verbs.data import TRAINER_MODULE

CALIBRATED_OPTIONS = ("gpu", "nic", "disk")  # options that a calibration replaces
WHOLE_NUMBER = re.compile("[1-9][0-9]{0,4}")
MAX_COUNT, MAX_AMOUNT = 99_999, 1e18


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
    add("--nodes", type=int, help="number of hosts [the fewest that the run fits on]")
    add("--slots", type=int, help="GPUs per host [8; gb200: 4]")
    add("--gpus", type=int, help="number of GPUs on all hosts, instead of --nodes")
    add("--gpu", default="", help=f"kind of GPU [{DEFAULT_GPU}]: {', '.join(read_gpus())}")
    add("--hardware", type=Path, help="file with more kinds of GPU, in the format of llama405b/predict/hardware.toml")
    add("--ram", default="", help="memory of each host, like 2000GiB or 2TB [2TiB]")
    add(
        "--nic",
        default="",
        help="total network bandwidth of a host, one direction [400Gb/s per GPU of such a host]",
    )
    add("--disk", default="", help="disk bandwidth of each host, for weights and checkpoints [5GB/s]")
    add(
        "--tokens",
        type=parse_token_count,
        default=0.0,
        help="predict time and cost for this many tokens, like 1e9 or 1B",
    )
    add(
        "--price",
        type=parse_prices,
        default={},
        metavar="PRICE",
        help="price per GPU-hour, for the cost of a day and a step, or of --tokens; h100-80=2.5,h200-141=3.2 compares kinds of GPU, "
        "each on numbers of hosts with its best settings",
    )
    add(
        "--deadline",
        type=parse_deadline,
        default=0.0,
        metavar="TIME",
        help="compare as --price does, for --tokens within 90m, 48h or 2d; the cheapest in time comes first",
    )
    add("--methods", action="store_true", help="compare full fine-tuning, LoRA, FP8 and all BF16")
    add("--measured", type=float, default=0.0, help="a claimed step time, in seconds, to check against the prediction")
    _add_output_options(add)
    return parser


def parse_token_count(text: str) -> float:
    """Parse a number of tokens: ``1e9``, ``500M``, ``1.5B``, ``15T``."""
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?(?:e\d+)?)([KMBT]?)", text, re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens; write 1e9, 500M or 1.5B")
    return float(match[1]) * math.pow(1000, " kmbt".index(match[2].lower() or " "))


def parse_prices(text: str) -> dict[str, float]:
    """Parse a price of any GPU, ``2.5``, or prices by kind, ``h100-80=2.5,h200-141=3.2``; "" is any kind."""
    words = text.split(",")
    try:
        prices = {kind: float(number) for kind, _, number in (word.rpartition("=") for word in words)}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no price; write 2.5 or h100-80=2.5,h200-141=3.2") from None
    if len(prices) < len(words) or (len(prices) > 1 and "" in prices):
        raise argparse.ArgumentTypeError(
            f"{text!r} has no one price for each kind; write 2.5 or h100-80=2.5,h200-141=3.2"
        )
    return prices


def parse_deadline(text: str) -> float:
    """Parse ``90m``, ``48h`` or ``2d`` as hours."""
    number, unit = text[:-1], text[-1:]
    with contextlib.suppress(UserError):
        hours = 24 * parse_seconds(f"{number}h", "") / 3600 if unit == "d" else parse_seconds(text, "") / 3600
        if hours and unit.isalpha():
            return hours
    raise argparse.ArgumentTypeError(f"{text!r} is no time; write 90m, 48h or 2d")


def _add_output_options(add: Callable[..., object]) -> None:
    """Add the options for what-if, search, calibration and output."""
    add(
        "--what-if",
        nargs="+",
        default=[],
        metavar="NAME=VALUES",
        help="compare other machines, like nodes=12,16 gpu=h200, each with the nearest global batch that they divide; other GPUs with "
        "their best settings",
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
    add("--verbose", action="store_true", help="print all that is predicted")


def check_plan_options(args: argparse.Namespace, settings: Sequence[str]) -> None:
    """Refuse options that contradict each other."""
    _check_numbers(args)
    if args.calibrate:
        _check_calibrate(args)
    if args.write and not args.search:
        raise UserError("--write needs --search; add it")
    if args.write and os.path.lexists(args.write):
        raise UserError(f"--write: {args.write} exists; name another file")
    if args.write and not args.write.absolute().parent.is_dir():
        raise UserError(f"--write: {args.write.parent} is no directory; make it, or name another file")
    if not (args.preset or args.config or _is_set("model.path", args, settings)):
        raise UserError("plan: which model? add --preset, --model.path, or --config; see `llama405b plan --help`")


def _check_numbers(args: argparse.Namespace) -> None:
    """Refuse numbers out of range."""
    for name in ("nodes", "slots", "gpus"):
        if getattr(args, name) is not None and not 1 <= getattr(args, name) <= MAX_COUNT:
            raise UserError(f"--{name}: {getattr(args, name)} is out of range; use 1 to {MAX_COUNT}")
    amounts = [
        ("tokens", args.tokens),
        *(("price", price) for price in args.price.values()),
        ("measured", args.measured),
    ]
    for name, amount in amounts:
        if not 0 <= amount <= MAX_AMOUNT:
            raise UserError(f"--{name}: {amount} is out of range; use a number from 0 to {MAX_AMOUNT:g}")


def _check_calibrate(args: argparse.Namespace) -> None:
    """Refuse to calibrate machines other than a hosts file's, or if the result cannot be saved."""
    if not args.hosts:
        raise UserError("--calibrate: measures on hosts; name a hosts file")
    conflict = next(
        (f"--{name}" for name in ("nodes", "slots", "gpus", "ram") if getattr(args, name)), hardware_override(args)
    )
    if conflict:
        raise UserError(f"{conflict}: --calibrate measures the hosts as they are; remove one of them")
    if not os.access(args.hosts.absolute().parent, os.W_OK):
        raise UserError(
            f"--calibrate: {args.hosts.absolute().parent} is not writable, and the calibration is saved there"
        )


def hardware_override(args: argparse.Namespace) -> str:
    """Return the option that describes machines other than the measured ones; '' if there is none."""
    options = [f"--{name}" for name in CALIBRATED_OPTIONS if getattr(args, name)]
    words = [f"--what-if {name}={value}" for name, value in _split_changes(args.what_if) if name in CALIBRATED_OPTIONS]
    return next(iter([*options, *words]), "")


def placeholder_data_flags(args: argparse.Namespace, settings: Sequence[str]) -> list[str]:
    """Return placeholder data flags if no data is set: a plan needs none."""
    return [] if _is_set("data.paths", args, settings) else ["--data.paths=stdlib"]


def _is_set(key: str, args: argparse.Namespace, settings: Sequence[str]) -> bool:
    """Return whether a setting is set by a preset, a file or a flag."""
    is_in_files = key in (config.read_preset(args.preset) | config.read_toml_files(args.config))
    return is_in_files or any(word.partition("=")[0] == f"--{key}" for word in settings)


def machine_options(args: argparse.Namespace) -> MachineOptions:
    """Return the machine options of the command line."""
    return MachineOptions(args.nodes or 0, args.slots or 0, args.gpu, args.ram, args.nic, args.disk, args.gpus or 0)


def what_if_options(args: argparse.Namespace, gpus: dict[str, Gpu], slots: int) -> dict[str, MachineOptions]:
    """Return the machines of each change of --what-if, by its text: ``nodes=12,16`` is two changes; ``slots``: of the planned hosts."""
    found = {}
    for name, value in _split_changes(args.what_if):
        change = f"{name}={value}"
        if name == "gpu":
            change = f"gpu={find_gpu(value, gpus).name}"
        is_number = name in ("nodes", "slots") and WHOLE_NUMBER.fullmatch(value)
        if not is_number and name not in ("gpu", "ram", "nic", "disk"):
            raise UserError(
                f"--what-if: {change!r} is not a change; use nodes=N, slots=N, gpu=KIND, ram=2000GiB, nic=3200Gb/s or disk=5GB/s"
            )
        asked = machine_options(args)
        if name == "nodes" and args.gpus:  # other hosts have as many each, not as many in all
            asked = dataclasses.replace(asked, gpus=0, slots=slots)
        changed: dict[str, Any] = {name: int(value) if is_number else value}
        found[change] = dataclasses.replace(asked, **changed)
    return found


def _split_changes(words: Sequence[str]) -> list[tuple[str, str]]:
    """Split ``nodes=12,16`` into its name and values."""
    return [(name, value) for name, _, values in (word.partition("=") for word in words) for value in values.split(",")]


# Settings that --write includes even if the search did not change them.
ALWAYS_WRITTEN = (
    "parallel.offload",
    "parallel.fsdp_unit",
    "parallel.fsdp_embedding",
    "parallel.moments",
    "training.micro_batch_size",
)
EXIT_CODES = {Fit.NO: EXIT_UNFIT, Fit.RETRIES: EXIT_FAILED}
PACKAGES = ("torch", "transformers")


def _to_json(fields: dict[str, object]) -> str:
    """Return fields as the JSON of a plan."""
    return json.dumps({"schema": SCHEMA_VERSION, "units": FIELD_UNITS} | fields)


@dataclasses.dataclass(frozen=True, slots=True)
class PlanAnswer:
    """The result of a plan."""

    prediction: Prediction
    ranked: list[Prediction]  # results of --search, best first
    comparisons: dict[str, Prediction]  # results of --what-if, by the text of the change
    options: ReportOptions
    unused_reason: str  # why the calibration is not used; "": it is used, or there is none
    hosts_notes: list[str]  # on the number of hosts, where the plan chose it

    def to_json(self) -> str:
        """Return the numbers as JSON, for programs."""
        extras = {
            "search": [prediction_record(candidate, self.options) for candidate in self.ranked],
            "what_if": {word: prediction_record(other, self.options) for word, other in self.comparisons.items()},
            "calibration_not_used": self.unused_reason,
        }
        return _to_json(prediction_record(self.prediction, self.options) | extras)

    def format_lines(self, notes: Sequence[str], *, is_verbose: bool) -> list[str]:
        """Return the plan as text; ``notes``: the assumptions of the prediction."""
        if is_verbose:
            lines = [*format_prediction(self.prediction, self.options), *notes, *self.hosts_notes]
        else:
            unfit_notes = self.hosts_notes if self.prediction.fit is not Fit.YES else []
            shown_notes = [*notes, *unfit_notes]
            lines = format_summary(self.prediction, self.options, shown_notes, is_fewest=bool(self.hosts_notes))
        if self.unused_reason:
            lines.append(f"not used     what was measured on these hosts: {self.unused_reason}")
        if self.ranked:
            lines += ranking_lines(self.ranked)
        if self.comparisons:
            lines += comparison_lines({"as planned": self.prediction} | self.comparisons, self.options)
        return lines


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    settings, remaining = config.split_flags(argv)
    parser = plan_parser(__doc__)
    args, unknown = parser.parse_known_args(remaining)
    config.refuse_unknown(unknown, parser.options)
    check_plan_options(args, settings)
    requested = command.parse([*source_flags(args), *settings, *placeholder_data_flags(args, settings)]).config
    hosts, gpus = resolve_hosts(args.hosts), read_gpus(args.hardware)
    args.price = _prices_by_name(args.price, gpus)
    detected = _detect_machines(args, hosts, gpus, on_cpu=requested.parallel.device == "cpu")
    machines, hosts_notes = apply_machine_options(detected, machine_options(args), gpus), list[str]()
    if args.deadline or args.methods or [*args.price] not in ([], [""]):
        return _compare(requested, args, settings, gpus, machines)
    if not (args.hosts or args.nodes or args.gpus):
        args.nodes, hosts_notes = _fewest_hosts(requested, args, machines)
        machines = dataclasses.replace(machines, nodes=args.nodes)
    plan_config = config_for(resolve_settings(requested, args.preset, machines), machines)
    others = {
        change: apply_machine_options(detected, options, gpus)
        for change, options in what_if_options(args, gpus, machines.slots).items()
    }
    uncalibrated = predict_run(plan_config, args.preset, None, machines)
    if args.calibrate:
        _calibrate(args, settings, uncalibrated, hosts)
    calibration, unused_reason = _load_calibration(args, hosts, uncalibrated)
    prediction = predict_run(plan_config, args.preset, calibration, machines)
    _refuse_unmeasured_cpu(prediction, unused_reason)
    comparisons = {}
    for change, other in others.items():
        settings_there = _config_for_other(requested, plan_config, args.preset, other, machines)
        there = predict_run(settings_there, args.preset, calibration, other)
        if other.gpu is not machines.gpu:  # the planned settings were made for another one
            recompute = FULL_RECOMPUTE if requested.model.is_recompute_auto else there.run.recompute
            there = best_settings(there.with_run(dataclasses.replace(there.run, recompute=recompute)))
        comparisons[change] = there
    ranked = rank_variants(prediction, _allowed_moments(requested)) if args.search else []
    tokens, data_text = (
        (args.tokens, "") if args.tokens or placeholder_data_flags(args, settings) else _count_tokens(plan_config)
    )
    options = ReportOptions(tokens, args.price, args.measured)
    answer = PlanAnswer(prediction, ranked, comparisons, options, unused_reason, hosts_notes)
    if args.json:
        print(answer.to_json())
    else:
        links_measured = calibration and (
            calibration.load.hosts > 1 or prediction.run.hosts == 1
        )  # else the rates of its links are assumptions
        notes = [] if tokens and not args.verbose else fmt_if("data         {}", data_text).splitlines()
        if not links_measured:
            notes += describe_assumptions(detected, machine_options(args), machines, hosts_asked=bool(hosts))
        bugs = [f"known bug    {what}; {bug.cure}" for what, bug in known_bugs(plan_config, machines.versions).items()]
        print("\n".join(answer.format_lines([*notes, *bugs], is_verbose=args.verbose)))
    code = EXIT_CODES.get([*ranked, prediction][0].fit, EXIT_OK)
    if args.write and code != EXIT_UNFIT:
        _write_settings(args, settings, requested, ranked[0].run.apply_to(plan_config))
    return code


def _prices_by_name(prices: dict[str, float], gpus: dict[str, Gpu]) -> dict[str, float]:
    """Return prices by the names that the table has."""
    by_name = {find_gpu(kind, gpus, "--price").name if kind else "": price for kind, price in prices.items()}
    if len(by_name) < len(prices):
        raise UserError(f"--price: {' and '.join(prices)} name one kind twice; give each kind one price")
    return by_name


def _compare(
    requested: Config, args: argparse.Namespace, settings: Sequence[str], gpus: dict[str, Gpu], machines: Machines
) -> int:
    """Compare kinds of GPU, or methods, by time and money; exit code: that of the first row, 3 also if it is late."""
    kinds = [gpus[kind] for kind in _kinds_to_compare(args)] or [machines.gpu or gpus[DEFAULT_GPU]]
    options = ReportOptions(_tokens_to_compare(requested, args, settings), args.price)
    machines = _machines_with(kinds[0], args, gpus)
    plain = Parallel(strategy="fsdp2", numerics=requested.parallel.numerics, moments=requested.parallel.moments)
    model = dataclasses.replace(requested.model, activation_checkpointing="full")
    training = dataclasses.replace(requested.training, micro_batch_size=1)
    free = dataclasses.replace(requested, parallel=plain, model=model, training=training)
    planned = _planned_run(config_for(free, machines), args.preset, machines)
    if planned.numerics == "fp32":
        raise UserError("--parallel.numerics: no times are known with fp32; compare with fp32-master")
    deadline = f" within {args.deadline:g} h" if args.deadline else ""
    if not args.json:  # what follows takes seconds
        print(
            f"{options.tokens:,.0f} tokens{deadline}; offload, micro-batch, checkpointing and mesh are the fastest that fit:",
            flush=True,
        )
    if args.methods:
        return _compare_methods(planned, args, machines, options)
    offers = {gpu.name: _offers_of_kind(planned, args, _machines_with(gpu, args, gpus), options) for gpu in kinds}
    every = sorted(itertools.chain.from_iterable(offers.values()), key=lambda offer: offer.rank)
    if args.json:
        print(_to_json({"offers": [_offer_record(offer) for offer in every]}))
    else:
        print("\n".join(offer_lines(offers, has_deadline=bool(args.deadline), are_fewest=not args.nodes)))
    return EXIT_CODES.get(every[0].prediction.fit, EXIT_OK) if every[0].timing else EXIT_UNFIT


def _kinds_to_compare(args: argparse.Namespace) -> list[str]:
    """Return the kinds of GPU that are priced; refuse what contradicts a comparison."""
    if args.hosts or args.what_if or args.search or args.calibrate or args.measured:
        raise UserError(
            "--deadline, --methods and prices by kind compare machines to rent; remove HOSTS and the other questions"
        )
    kinds = [kind for kind in args.price if kind]
    if args.methods and (args.deadline or len(kinds) > 1):
        raise UserError("--methods: compares on one kind of GPU; remove --deadline and the prices of other kinds")
    if args.gpu and kinds:
        raise UserError("--gpu: the prices name the kinds of GPU; remove it")
    if args.gpus:
        raise UserError("--gpus: a comparison is of whole hosts; use --nodes, or leave their number open")
    return kinds


def _machines_with(gpu: Gpu, args: argparse.Namespace, gpus: dict[str, Gpu]) -> Machines:
    """Return hosts with such GPUs, as the options describe them."""
    described = dataclasses.replace(machine_options(args), gpu=gpu.name)
    return apply_machine_options(dataclasses.replace(UNKNOWN_MACHINES, gpu=gpu), described, gpus)


def _tokens_to_compare(requested: Config, args: argparse.Namespace, settings: Sequence[str]) -> float:
    """Return the tokens to train on: those of --tokens, or of the data."""
    if args.tokens:
        return float(args.tokens)
    if placeholder_data_flags(args, settings):
        raise UserError("--tokens: how many? times and costs are compared for so many; add --tokens 1e9, or the data")
    tokens, why = _count_tokens(requested)
    if not tokens:
        raise UserError(f"--tokens: {why}")
    return tokens


def _offers_of_kind(
    planned: PredictedRun, args: argparse.Namespace, machines: Machines, options: ReportOptions
) -> list[Offer]:
    """Return the run on numbers of such hosts, or on those of --nodes."""
    assert machines.gpu, "a kind of GPU was chosen"
    price = options.price_of(machines.gpu.name)

    def predict(hosts: int) -> Prediction:
        return _predict_on(on_hosts(planned, hosts, machines.slots), machines)

    def offer(hosts: int) -> Offer:
        return Offer(best_settings(predict(hosts)), options.tokens, price, args.deadline or math.inf)

    return [offer(args.nodes)] if args.nodes else offers_by_hosts(offer, fewest_hosts(predict))


def _offer_record(offer: Offer) -> dict[str, object]:
    """Return an offer as a record for JSON."""
    prices = {} if offer.price is None else {"": offer.price}
    record = prediction_record(offer.prediction, ReportOptions(offer.tokens, prices))
    return record | {"timing": offer.timing.name.lower()}


def _compare_methods(
    planned: PredictedRun, args: argparse.Namespace, machines: Machines, options: ReportOptions
) -> int:
    """Compare methods of training on the hosts of --nodes, or on the fewest on which all fit."""
    assert machines.gpu, "a kind of GPU was chosen"
    found = methods(planned, Cluster(machines.gpu))

    def predict(run: PredictedRun, hosts: int) -> Prediction:
        return _predict_on(on_hosts(run, hosts, machines.slots), machines)

    fewest = {name: fewest_hosts(functools.partial(predict, run)) for name, (run, _) in found.items()}
    hosts = args.nodes or min(MAX_HOSTS, max(fewest.values()))
    price = options.price_of(machines.gpu.name)
    rows = {
        name: (fewest[name], Offer(best_settings(predict(run, hosts)), options.tokens, price), lost)
        for name, (run, lost) in found.items()
    }
    if args.json:
        records = {name: _offer_record(offer) | {"fewest_hosts": count} for name, (count, offer, _) in rows.items()}
        print(_to_json({"methods": records}))
    else:
        print("\n".join(method_lines(rows)))
    best = max(offer.prediction.fit for _, offer, _ in rows.values())
    return EXIT_CODES.get(best, EXIT_OK)


def _fewest_hosts(requested: Config, args: argparse.Namespace, machines: Machines) -> tuple[int, list[str]]:
    """Return the smallest number of such hosts that a run fits on, and a line about it; if it fits on none, the first that it can have.

    With --search, one of its variants without a mesh must fit.
    """
    is_auto = requested.parallel.strategy_spec.is_auto

    def is_legal(nodes: int) -> bool:
        candidate = dataclasses.replace(machines, nodes=nodes)
        with contextlib.suppress(UserError):
            return bool(is_auto or _planned_run(config_for(requested, candidate), args.preset, candidate))
        return False

    @functools.cache
    def find_fit(nodes: int) -> Fit:
        candidate = dataclasses.replace(machines, nodes=nodes)
        with contextlib.suppress(UserError):
            planned = config_for(resolve_settings(requested, args.preset, candidate), candidate)
            prediction = predict_run(planned, args.preset, None, candidate)
            if prediction.fit is Fit.YES or not args.search:
                return prediction.fit
            return max(option.fit for option in variants(prediction, _allowed_moments(requested)))
        return Fit.NO

    counts = [*filter(is_legal, range(1, MAX_HOSTS + 1))] or [1]
    if find_fit(counts[-1]) is not Fit.YES:
        nearest = FIT_LABELS[find_fit(counts[-1])]
        return counts[0], [f"hosts        {counts[0]} assumed; on {counts[-1]}, with these settings: {nearest}"]
    number = bisect.bisect_left(counts, Fit.YES, key=find_fit)
    fewer = f"; on {counts[number - 1]}: {FIT_LABELS[find_fit(counts[number - 1])]}" if number else ""
    return counts[number], [f"hosts        {counts[number]}, the fewest that fit{fewer}"]


def _count_tokens(requested: Config) -> tuple[float, str]:
    """Return the run's number of tokens and a note on it; 0 and the reason if they cannot be counted here."""
    try:
        count = importlib.import_module(TRAINER_MODULE).count_tokens(requested)
    except (ImportError, UserError, RunError) as error:
        return 0.0, f"not counted here ({error}); pass the number with --tokens"
    method = "counted" if count.share == 1 else f"by the first {100 * count.share:.2g}% of its bytes"
    return (
        count.tokens,
        f"{count.tokens:,} tokens with padding, {count.epochs:.3g} epochs of {', '.join(requested.data.paths)}, {method}",
    )


def _allowed_moments(requested: Config) -> tuple[Moments, ...]:
    """Return the moment dtypes that a search may choose."""
    return ("fp32", "bf16") if requested.optimizer.betas[1] <= rules.MAX_BETA_BF16 else ("fp32",)


def _refuse_unmeasured_cpu(prediction: Prediction, unused_reason: str) -> None:
    """Refuse to predict CPUs without a calibration."""
    if prediction.cluster.gpu.is_cpu and not prediction.calibration:
        unused_note = fmt_if("; what was measured on these hosts is not used: {}", unused_reason)
        raise UserError(
            f"--parallel.device: no data sheet tells how fast a CPU trains; measure it on the hosts: plan HOSTS --calibrate{unused_note}"
        )


def _load_calibration(
    args: argparse.Namespace, hosts: Sequence[Host], prediction: Prediction
) -> tuple[Calibration | None, str]:
    """Return the hosts' calibration for such a run, or the reason why it is not used."""
    if not (hosts and has_calibration(args.hosts)):
        return None, ""
    calibration = read_calibration(args.hosts, hosts)
    if calibration is None:
        return None, "it is damaged, of another version, or of other hosts"
    if override := hardware_override(args):
        return None, f"{override} describes other machines"
    if not calibration.covers_run(prediction.run, prediction.cluster.gpu):
        return (
            None,
            "it was made for another model, sequence length, numerics, attention, packing or GPU, or another split by tp, cp or pp",
        )
    return calibration, ""


def resolve_settings(requested: Config, preset: str, machines: Machines) -> Config:
    """Return the settings with auto values resolved; unchanged if the model's shape is unknown."""
    llama = find_model_shape(requested, preset)
    if llama is None or machines.gpu is None:
        return requested
    cluster = Cluster(machines.gpu, machines.nic_bytes_per_s, machines.disk_bytes_per_s)
    return resolve_auto(requested, llama, machines.world_size, machines.slots, cluster, machines.ram_bytes)


def config_for(requested: Config, machines: Machines) -> Config:
    """Return the settings for these machines; refuse what plan cannot predict."""
    axes = Axes.from_parallel(requested.parallel, machines.world_size, machines.slots)
    requested = config.with_global_batch(requested, axes)
    if requested.parallel.is_fsdp1:
        raise UserError("--parallel.strategy: plan does not predict fsdp1; use fsdp2")
    return requested


def _config_for_other(
    requested: Config, planned: Config, preset: str, machines: Machines, planned_machines: Machines
) -> Config:
    """Return the settings for other machines, with the nearest global batch that gives every rank a share if their number differs."""
    batch = planned.training.global_batch_size
    requested = resolve_settings(requested, preset, machines)
    requested = dataclasses.replace(
        requested, training=dataclasses.replace(requested.training, global_batch_size=batch)
    )
    if machines.world_size == planned_machines.world_size:
        return config_for(requested, machines)
    even_counts = MicrobatchSplit.from_training(
        requested.training, Axes.from_parallel(requested.parallel, machines.world_size, machines.slots).size(DP_AXES)
    ).even_n_microbatches
    sizes = [n_micro * requested.training.micro_batch_size for n_micro in even_counts]
    nearest = min(sizes, key=lambda size: abs(size - batch))
    return config_for(
        dataclasses.replace(requested, training=dataclasses.replace(requested.training, global_batch_size=nearest)),
        machines,
    )


def _planned_run(requested: Config, preset: str, machines: Machines) -> PredictedRun:
    """Return the run on these machines; refuse what they cannot train."""
    if (llama := find_model_shape(requested, preset)) is None:
        raise UserError(
            f"--model.path: {requested.model.path} has no config.json; {models.download_hint(Path(requested.model.path))}, or add the "
            "--preset of its shape"
        )
    models.check_seq_len(llama, requested.data.seq_len)
    axes = Axes.from_parallel(requested.parallel, machines.world_size, machines.slots)
    check_mesh(axes, requested.parallel, llama, requested.data.seq_len, machines.slots)
    return PredictedRun.from_config(llama, requested, machines.world_size, machines.slots, axes)


def predict_run(requested: Config, preset: str, calibration: Calibration | None, machines: Machines) -> Prediction:
    """Predict the run, using a calibration if there is one."""
    prediction = _predict_on(_planned_run(requested, preset, machines), machines)
    return prediction.with_calibration(calibration) if calibration else prediction


def _predict_on(run: PredictedRun, machines: Machines) -> Prediction:
    assert machines.gpu, "a kind of GPU was chosen"
    cluster = Cluster(machines.gpu, machines.nic_bytes_per_s, machines.disk_bytes_per_s)
    return Prediction.from_run(run, cluster, machines.ram_bytes)


def _calibrate(
    args: argparse.Namespace, settings: Sequence[str], prediction: Prediction, hosts: Sequence[Host]
) -> None:
    """Measure the planned run on the hosts and save the calibration."""
    if prediction.run.is_split:
        raise UserError("--calibrate: measures only runs without tp, cp and pp; remove them")
    if len(prediction.run.recompute.count_kinds((prediction.run.llama.layers,))) > 1:
        raise UserError(
            "--calibrate: measures only runs with identical layers; use --model.activation_checkpointing full, operators or none"
        )
    launch_argv = [
        str(args.hosts),
        "--run",
        f"calibrate-{time.strftime('%Y%m%d-%H%M%S')}",
        *source_flags(args),
        *settings,
    ]
    request = asked_launch.parse_launch([*launch_argv, *placeholder_data_flags(args, settings)], time.time())
    if auto_settings := request.settings.auto_setting:
        raise UserError(
            f"--calibrate: its runs have few layers, for which {auto_settings} would choose something else; set it explicitly"
        )
    if request.on_cpu and prediction.run.offload != "none":
        raise UserError("--calibrate: on CPUs, only --parallel.offload none can be measured; use it")
    with Fleet(hosts) as fleet:
        calibration = calibrate(
            request, hosts, fleet, prediction.run, prediction.cluster.gpu, time.strftime("%Y-%m-%d")
        )
    try:
        save_calibration(args.hosts, calibration)
    except OSError as error:
        raise RunError(f"{args.hosts}: the calibration cannot be saved next to it ({reason_of(error)})") from None


def _detect_machines(
    args: argparse.Namespace, hosts: Sequence[Host], gpus: dict[str, Gpu], *, on_cpu: bool
) -> Machines:
    """Return the machines: as detected on the hosts, or unknown without hosts."""
    machines = survey_machines(hosts, gpus, on_cpu=on_cpu)
    if args.hosts and not (args.gpu or machines.gpu):
        raise UserError(
            f"{args.hosts}: nvidia-smi reports no GPU on these hosts; name the kind to predict for with --gpu"
        )
    return machines


def survey_machines(hosts: Sequence[Host], gpus: dict[str, Gpu], *, on_cpu: bool) -> Machines:
    """Return the machines as detected on the hosts; unknown ones without hosts."""
    versions = {
        name: package_version(name) for name in PACKAGES
    }  # versions on this machine; setup installs the same on the hosts
    machines = _survey_hosts(hosts, gpus) if hosts else dataclasses.replace(UNKNOWN_MACHINES, versions=versions)
    if on_cpu:
        machines = dataclasses.replace(machines, gpu=Gpu.for_cpu(machines.ram_bytes / max(1, machines.slots)))
    return machines


def _survey_hosts(hosts: Sequence[Host], gpus: dict[str, Gpu]) -> Machines:
    """Query the hosts' hardware."""
    with Fleet(hosts) as fleet:
        survey = survey_hosts(fleet, DEFAULT_PORT, Requirements())
    if survey.lost:
        name, why = next(iter(survey.lost.items()))
        raise RunError(f"{name}: {why}; fix that, or describe the machines with --nodes, --gpu, --slots, --ram, --nic")
    return machines_of(hosts, survey.facts, gpus)


def _write_settings(args: argparse.Namespace, settings: Sequence[str], requested: Config, result: Config) -> None:
    """Write the settings of the command line and its files, with those that the search chose or resolved: ``result``."""
    values = dataclasses.asdict(result)
    names = {
        *config.read_toml_files(args.config),
        *config.read_flags(config.split_flags(settings)[0]),
        *ALWAYS_WRITTEN,
    }
    names |= config.changed_settings(result, requested).keys()
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
