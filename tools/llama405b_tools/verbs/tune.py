"""Try settings on HOSTS, and write the fastest that has room into the settings file.

Each is tried with the run's own shapes on all ranks, with random weights and few layers. Offload, FSDP units, micro-batches, meshes,
checkpointing and kernels change; what a step trains does not: settings whose first losses differ from the others' are left out, by name.
What was measured is kept beside HOSTS: plan, launch and cluster-top go by it from then on. Exit code: 3 if none has room.
"""

import dataclasses
import itertools
import os
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llama405b.contract.errors import EXIT_OK, EXIT_UNFIT, RunError, UserError, reason_of
from llama405b.contract.files import write_atomic
from llama405b.predict.calibration import Calibration
from llama405b.predict.estimate import Cluster, MachineOptions, Machines, apply_machine_options
from llama405b.predict.hardware import GIB, read_gpus
from llama405b.predict.run_shape import SEARCHED_SETTINGS
from llama405b.predict.search import Fit, Prediction
from llama405b.predict.tuning import (
    Candidate,
    Trial,
    Trials,
    common_layers,
    find_candidates,
    has_equal_layers,
    layers_to_try,
    outliers,
    traits_of,
)
from llama405b.settings import command, config
from llama405b.settings.parser import OneLineParser
from llama405b.settings.rules import find_faults
from llama405b.settings.schema import Config
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.launch.probes import AS_SET, run_trials, trial_flags
from llama405b_tools.launch.request import (
    LaunchRequest,
    add_environment,
    environment_flags,
    flag,
    parse_launch,
    source_flags,
)
from llama405b_tools.launch.start import read_calibration, save_calibration
from llama405b_tools.run.screen import show
from llama405b_tools.text.figures import format_columns
from llama405b_tools.verbs.arguments import add_hosts, resolve_hosts
from llama405b_tools.verbs.predict import config_for, predict_run, resolve_settings, survey_machines

USUAL_MINUTES = 10.0
MIN_GAIN = 0.01  # by which a step must be shorter than as set, as a share: less is noise
MAX_MINUTES = 600
RECOMPUTE = "model.activation_checkpointing"
BATCH = "training.global_batch_size"  # the search keeps it: 0 would be another number on another mesh
KEPT = {"parallel.numerics", "data.seq_len", "optimizer.kind"}  # by the search: they change what a step trains
SEARCHED = {*SEARCHED_SETTINGS.values(), *(f"parallel.{name}" for name in config.MESH_SETTINGS), RECOMPUTE} - KEPT


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """Settings that may be tried."""

    candidate: Candidate
    prediction: Prediction  # before anything is measured


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured of settings."""

    option: Option
    first_steps: tuple[float, ...]  # losses, then gradient norms
    calibration: Calibration

    @property
    def label(self) -> str:
        """The settings' name."""
        return self.option.candidate.label

    @property
    def measured(self) -> Prediction:
        """The prediction with all layers, by what was measured with few."""
        return self.option.prediction.with_calibration(self.calibration)

    @property
    def step_s(self) -> float:
        """Seconds of a step with all layers."""
        return self.measured.needs.step_s or 0.0


def tune_parser() -> OneLineParser:
    """Return the verb's parser."""
    parser = OneLineParser(
        prog="llama405b tune",
        description=__doc__,
        epilog="Also takes settings as for launch, such as --data.seq_len 8192.",
    )
    add_hosts(parser)
    command.add_config(parser.add_argument, "TOML file of settings; the fastest are written into the last")
    parser.add_argument("--preset", default="", help="settings to start from")
    help_text = f"time for all trials; one that has begun ends [{USUAL_MINUTES:g}]"
    parser.add_argument("--minutes", type=float, default=USUAL_MINUTES, metavar="N", help=help_text)
    parser.add_argument("--extend", default="", metavar="FILE", help="a Python file with functions of your own")
    add_environment(parser.add_argument_group("environment of the ranks"))
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    settings, remaining = config.split_flags(argv)
    parser = tune_parser()
    args, unknown = parser.parse_known_args(remaining)
    config.refuse_unknown(unknown, parser.options)
    if not 0 < args.minutes <= MAX_MINUTES:
        raise UserError(f"--minutes: {args.minutes:g} is out of range; use more than 0, up to {MAX_MINUTES}")
    words = [*source_flags(args), *flag("--extend", args.extend), *environment_flags(args), *settings]
    words += ["--tracking.log_model=false"]  # it needs an export
    request = parse_launch([str(args.hosts), *words], time.time())
    return EXIT_OK if tune(request, resolve_hosts(args.hosts), 60 * args.minutes) else EXIT_UNFIT


def tune(
    request: LaunchRequest, hosts: Sequence[Host], within_s: float = 60 * USUAL_MINUTES, *, once: bool = False
) -> bool:
    """Try settings on the hosts, and write the fastest; return whether some have room. ``once``: not if that was done for these settings.

    Raises:
        UserError: The request is wrong; nothing was started.
        RunError: No settings work on these hosts.
    """
    check_tunable(request)
    asked, prediction = predict_asked(request, detect_machines(request, hosts))
    known = read_calibration(request.hosts_file, hosts)
    is_known = known and known.matches_run(prediction.run) and known.covers_run(prediction.run, prediction.cluster.gpu)
    if once and known and known.tuned and is_known:
        show(f"tuned on {known.made}: these settings were the fastest on these hosts")
        return True
    options = list_options(request.settings, asked, prediction)
    if not options:
        why = "no settings are predicted to fit on these hosts; `llama405b plan HOSTS` shows what would help"
        raise UserError(f"tune: {why}")
    outcomes = try_options(request, hosts, options, within_s)
    if not outcomes:
        raise RunError("none of these settings works on these hosts; nothing was written")
    show(format_columns(*outcome_table(outcomes, known)))
    return keep_best(request, outcomes)


def try_options(
    request: LaunchRequest, hosts: Sequence[Host], options: Sequence[Option], within_s: float
) -> list[Outcome]:
    """Try options on the hosts, while there is time; tell of each."""
    trials, numbers = build_trials(request, options), itertools.count(1)
    n_trials = min(trials.at_most, len(options))
    show(
        f"up to {n_trials} of {len(options)} settings, each with few layers and random weights, in {within_s / 60:g} min:"
    )

    def show_trial(label: str, trial: Trial) -> None:
        took = f"failed: {trial.fault}" if trial.fault else f"{seconds_text(trials.step_s(trial.points))} a step"
        show(f"{next(numbers):3}  {took}; {label}")

    run, asked = f"tune-{time.strftime('%Y%m%d-%H%M%S')}", options[0].prediction
    with Fleet(hosts) as fleet:
        trial_request = dataclasses.replace(request, run=run)
        rates, found = run_trials(trial_request, hosts, fleet, trials, within_s, asked.run, show_trial)
    names, gpu, made = tuple(host.name for host in hosts), asked.cluster.gpu.name, time.strftime("%Y-%m-%d")
    outcomes = []
    for option in options:
        trial = found.get(option.candidate.label, Trial())
        if trial.points:
            load, few, more = option.prediction.run, trial.points[0], trial.points[-1]
            own_rates = dataclasses.replace(rates, layer_s=rates.layer_s * load.micro_batch / asked.run.micro_batch)
            measured = Calibration(load, few, more, None, own_rates, names, gpu, made, tuned=True)
            outcomes.append(Outcome(option, trial.first_steps, measured))
    return outcomes


def detect_machines(request: LaunchRequest, hosts: Sequence[Host]) -> Machines:
    """Return the machines, as they were found; what they do not say is as plan assumes it."""
    detected = survey_machines(hosts, read_gpus(), on_cpu=request.on_cpu)
    if detected.gpu is None:
        raise UserError(
            f"{request.hosts_file}: nvidia-smi reports no GPU on these hosts; add --parallel.device cpu to try it on CPUs"
        )
    return apply_machine_options(detected, MachineOptions(), read_gpus())


def predict_asked(request: LaunchRequest, machines: Machines) -> tuple[Config, Prediction]:
    """Return the settings as asked, with what was left open, and what is predicted of them.

    Raises:
        UserError: A few layers would not tell about all of them, or a CPU cannot do it.
    """
    asked, file = request.settings, request.files[-1]
    if asked.model.is_recompute_auto:  # it would keep what few layers have room for
        asked = dataclasses.replace(asked, model=dataclasses.replace(asked.model, activation_checkpointing="full"))
    asked = config_for(resolve_settings(asked, request.preset, machines), machines)
    prediction = predict_run(asked, request.preset, None, machines)
    if not has_equal_layers(prediction.run):
        why = f"set model.activation_checkpointing in {file} to full, operators or none"
        raise UserError(f"tune: tries only identical layers; {why}")
    if prediction.cluster.gpu.is_cpu and prediction.run.offload != "none":
        raise UserError(f"tune: on CPUs, only without offload; set parallel.offload in {file} to none")
    return asked, prediction


def build_trials(request: LaunchRequest, options: Sequence[Option]) -> Trials:
    """Return what is to be tried of a request's options."""
    layers = options[0].prediction.run.llama.layers
    common = common_layers(option.prediction.run for option in options)
    return Trials(trial_flags(request), tuple(option.candidate for option in options), layers, min(layers, common))


def check_tunable(request: LaunchRequest) -> None:
    """Refuse what cannot be tuned: settings that are in no file, or that flags fix."""
    if request.config is None:
        raise UserError("tune: tries settings of the trainer; remove the program after --")
    if not request.files:
        raise UserError("tune: the fastest settings go into a file; add --config FILE, which may be empty")
    typed = config.read_flags(config.split_flags(request.typed)[0])
    fixed = [key for key, (value, _) in typed.items() if key in SEARCHED or (key, value) == (BATCH, 0)]
    if fixed:
        why = f"tune chooses it; write it into {request.files[-1]}, from where it may be changed"
        raise UserError(f"--{fixed[0]}: {why}")
    if request.config.parallel.is_fsdp1:
        raise UserError(f"tune does not try fsdp1; set parallel.strategy in {request.files[-1]} to fsdp2")
    with_settings("", {}, "")  # finds out now whether there is what it needs
    file = request.files[-1].resolve()
    for path in (file, file.parent, request.hosts_file.absolute().parent):
        if not os.access(path, os.W_OK):
            raise UserError(f"tune: {path} is not writable, and what is found is saved there; make it so")


def list_options(requested: Config, asked: Config, prediction: Prediction) -> list[Option]:
    """Return the settings to try, those as asked first; ``asked``: as requested, with what was left open."""
    on_cpu = prediction.cluster.gpu.is_cpu
    # No data sheet tells how fast a CPU is: what is fastest on GPUs is tried first.
    base = Prediction.from_run(prediction.run, Cluster()) if on_cpu else prediction
    runs = [found.run for found in find_candidates(base, prediction.cluster)]
    runs = [run for run in runs if run == prediction.run or not any(find_faults(run.apply_to(asked)))]
    common = common_layers(runs)
    return [make_option(base.with_run(run), requested, asked, prediction, common) for run in runs]


def make_option(found: Prediction, requested: Config, asked: Config, prediction: Prediction, common: int) -> Option:
    """Return an option of ``list_options``; ``found``: as its order goes by; ``common``: layers that all are tried with."""
    chosen = asked if found.run == prediction.run else found.run.apply_to(asked)
    flags = config.to_flags(config.changed_settings(chosen, asked))
    candidate = Candidate(
        " ".join(flag.replace("=", " ", 1) for flag in flags) or AS_SET,
        tuple(config.to_flags(config.changed_settings(chosen, requested))),
        traits_of(found.run),
        found.needs.step_s or 0.0,
        layers_to_try(found.run, common),
    )
    return Option(candidate, prediction.with_run(found.run))


def outcome_table(outcomes: Sequence[Outcome], known: Calibration | None) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of what was measured, the fastest first; ``known``: an earlier calibration of the hosts."""
    total_gib = outcomes[0].measured.cluster.gpu.memory_bytes / GIB
    rows = []
    for outcome in sorted(outcomes, key=lambda each: each.step_s):
        predicted = outcome.option.prediction.with_calibration(known) if known else outcome.option.prediction
        step_s, beside = predicted.needs.step_s, "—"
        if step_s and (predicted.calibration or not predicted.cluster.gpu.is_cpu):
            beside = f"{seconds_text(step_s)} ({outcome.step_s / step_s:.2f})"
        memory = [f"{each.kept_bytes / GIB:.1f}" for each in (outcome.measured, predicted)]
        rows.append([seconds_text(outcome.step_s), beside, *memory, outcome.label])
    return ["a step", "predicted", f"of {total_gib:.1f} GiB", "predicted", "settings"], rows


def keep_best(request: LaunchRequest, outcomes: Sequence[Outcome]) -> bool:
    """Write the fastest settings that have room, and what was measured of them; return whether there are any."""
    wrong = outliers({outcome.label: outcome.first_steps for outcome in outcomes}, AS_SET)
    for outcome in outcomes:
        if outcome.label in wrong:
            losses = ", ".join(f"{loss:.5g}" for loss in outcome.first_steps)
            why = f"its first losses and gradient norms ({losses}) are not those of the others"
            show(f"left out: {why}; {outcome.label}")
    right = [outcome for outcome in outcomes if outcome.label not in wrong]
    fitting = [outcome for outcome in right if outcome.measured.fit is Fit.YES]
    if not fitting:
        nearest = min(right, key=lambda outcome: outcome.measured.kept_bytes)
        why = f"nothing was written; the nearest: {memory_words(nearest)}; {nearest.label}"
        show(f"none has room with all layers; {why}")
        return False
    as_set = next((outcome for outcome in fitting if outcome.label == AS_SET), None)
    best = min(fitting, key=lambda outcome: outcome.step_s)
    if as_set and best.step_s > as_set.step_s * (1 - MIN_GAIN):
        best = as_set
    gain = f", {as_set.step_s / best.step_s:.2f} x as fast as set" if as_set and best is not as_set else ""
    show(f"fastest with room: {best.label}: {seconds_text(best.step_s)} a step{gain}; {memory_words(best)}")
    before = f", {seconds_text(as_set.step_s)} before" if as_set else ""
    comment = f"tuned {best.calibration.made}: {seconds_text(best.step_s)} a step{before}"
    changed = {} if best is as_set else config.read_flags(best.option.candidate.flags)
    save_calibration(request.hosts_file, best.calibration)
    if changed:
        write_settings(request.files[-1], {name: value for name, (value, _) in changed.items()}, comment)
    written = f"wrote {', '.join(changed)} into" if changed else "nothing to change in"
    show(f"{written} {request.files[-1]}; what was measured is kept for plan, launch and cluster-top")
    return True


def seconds_text(seconds: float) -> str:
    """Format seconds so that settings can be told apart."""
    return f"{seconds:.3g} s"


def memory_words(outcome: Outcome) -> str:
    """Return the memory of a GPU, or of a rank on a CPU, and what there is."""
    cluster = outcome.measured.cluster
    owner = "rank" if cluster.gpu.is_cpu else "GPU"
    return f"{outcome.measured.kept_bytes / GIB:.1f} of {cluster.gpu.memory_bytes / GIB:.1f} GiB of each {owner}"


def write_settings(path: Path, values: Mapping[str, Any], comment: str) -> None:
    """Set values in a TOML file, each with a comment; all else in it stays.

    Raises:
        RunError: The file cannot be written, or has one of the settings in another form; it is unchanged.
    """
    flags = " ".join(config.to_flags({name: (value, "") for name, value in values.items()}))
    try:
        file = path.resolve()  # not a link to it
        write_atomic(file, with_settings(file.read_bytes().decode(), values, comment))
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = reason_of(error) if isinstance(error, OSError) else " ".join(str(error).split())
        raise RunError(f"{path}: cannot be changed ({why}); the fastest settings are {flags}") from None


def with_settings(text: str, values: Mapping[str, Any], comment: str) -> str:
    """Return the text of a TOML file with other values, each with a comment where there is room for one."""
    import tomlkit  # here, as launch starts a run without it, too

    document = tomlkit.parse(text)
    for name, value in values.items():
        section, _, key = name.partition(".")
        document.setdefault(section, tomlkit.table())[key] = tomlkit.item(value).comment(comment)
    expected = tomllib.loads(text)
    for name, value in values.items():
        section, _, key = name.partition(".")
        expected.setdefault(section, {})[key] = value
    changed = tomlkit.dumps(document)
    if tomllib.loads(changed) != expected:
        raise ValueError("it has settings in another form")
    return changed
