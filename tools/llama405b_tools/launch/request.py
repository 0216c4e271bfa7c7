"""Parse and check the command line and environment files of ``launch``. Opens no connection."""

import argparse
import dataclasses
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llama405b.contract.checkpoints import find_newest_complete, step_of
from llama405b.contract.errors import UserError, fmt_if, parse_seconds, reason_of
from llama405b.contract.files import check_only_owner_writes
from llama405b.contract.paths import RunDir
from llama405b.contract.records import GuardState
from llama405b.contract.software import DOCS
from llama405b.settings import command, config
from llama405b.settings.parser import OneLineParser
from llama405b.settings.schema import Config
from llama405b.spec.plan import check_run_name
from llama405b.spec.rules import check_resume_changes, with_config
from llama405b_tools.agent import processes
from llama405b_tools.agent.machine import ResumeCheckpoint
from llama405b_tools.launch.placement import RunSpec

EPILOG = """
Settings of the training run are flags, too: see `llama405b train --help`. Any other torchrun program goes after --.

  llama405b launch hosts --config my.toml --rehearse
  llama405b launch hosts --config my.toml --optimizer.lr 2e-5 --restart 5
  llama405b launch hosts -- my_script.py --its-own args

Exit codes: 0 started (with --follow: finished successfully), 1 a host or the run failed, 2 refused, nothing started.
"""


def option(default: Any, help_text: str, **how: Any) -> Any:
    """Return the field of an option of launch. ``how``: what ``add_argument`` takes."""
    return dataclasses.field(default=default, metadata={"help": help_text, "default": default} | how)


def time_option(default: str, help_text: str) -> Any:
    """Return the field of an option that is a time, such as ``5m``; the field is in seconds."""
    how = {"help": help_text, "default": default, "metavar": "TIME"}
    return dataclasses.field(default=parse_seconds(default, ""), metadata=how)


@dataclasses.dataclass(frozen=True, slots=True)
class StartOptions:
    """How a run is started and followed."""

    rehearse: bool = option(False, "only rehearse the run, with 2 layers: load, step, save, kill, resume")
    tune: bool = option(
        False,
        "first try other settings on the hosts, as `llama405b tune` does, unless that was done for these hosts and settings",
    )
    follow: bool = option(False, "follow the run to its end; Ctrl-C only stops following")
    plain: bool = option(False, "follow with every step on its own line, even on a terminal")
    allow_sockets: bool = option(False, "let NCCL use TCP even though the hosts have RDMA")
    force_fit: bool = option(False, "start even if `llama405b plan` predicts that the run does not fit")
    port: int = option(0, "rendezvous port on the first host [a free one]")
    dry_run: bool = option(False, "print what would run where, without connecting")


@dataclasses.dataclass(frozen=True, slots=True)
class GuardOptions(StartOptions):
    """How a run is guarded, and what follows it."""

    restart: int = option(
        0, "resume the run on failure or hang, up to N times without a newer checkpoint [0]", metavar="N"
    )
    hang_after_s: float = time_option(
        "5m",
        "with --restart: end and resume the run when a rank is silent this long; cluster-top shows a hang earlier [5m]",
    )
    shrink: int = option(
        0,
        "with --restart: run on at least MIN hosts while others are down; re-add them later [1]",
        nargs="?",
        const=1,
        metavar="MIN",
    )
    shrink_after_s: float = time_option(
        "5m", "with --shrink: how long a host must be down, or back, before the run changes [5m]"
    )
    guard_on: str = option(
        "",
        "run the guard on this host of the run, so that this machine can be switched off [this machine]",
        metavar="HOST",
    )
    notify: str = option("", "run CMD on incident, recovery, trouble and end", metavar="CMD")
    notify_every_s: float = time_option(
        "0", "also run it this often while nothing happens, so that silence means that the guard is gone [never]"
    )
    budget: float = option(
        0.0,
        "maximum cost of the run, with --price: it saves and stops before that (training.gpu_hours) [unlimited]",
        metavar="MONEY",
    )
    price: float = option(0.0, "price per GPU-hour", metavar="MONEY")
    export: str = option(
        "", "when the run has finished, write its model to OUT on the first host and verify it", metavar="OUT"
    )
    when_done: str = option(
        "", "run CMD here when the run has finished, after --export: e.g. to release the machines", metavar="CMD"
    )


def launch_parser() -> OneLineParser:
    """Return the parser of ``launch``; flags that it does not know are settings of the trainer."""
    parser = OneLineParser(
        prog="llama405b launch",
        description="Check every host, start torchrun on all of them or on none, and follow or guard the run if asked to.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("hosts", nargs="?", type=Path, default=Path("hosts"), metavar="HOSTS", help="hosts file [hosts]")
    add("--run", default="", help="name of the run [<preset>-<date>-<time>]")
    command.add_config(add, "TOML file of settings; of several the later ones win")
    add("--preset", default="", help=f"settings to start from: {', '.join(config.preset_names())}")
    command.add_resume(add)
    command.add_evaluate_only(add)
    command.add_blame(add)
    _add_options(parser, StartOptions)
    extend_help = (
        f"a Python file with functions of your own: metrics, loss, documents, … (training.extend; {DOCS}/extending.md)"
    )
    add("--extend", default="", metavar="FILE", help=extend_help)
    after_save_help = "run CMD in the background after each complete save, with its path in $LLAMA405B_CHECKPOINT (checkpoint.after_save)"
    add("--after-save", default="", metavar="CMD", help=after_save_help)
    _add_options(parser.add_argument_group("guard the run"), GuardOptions)
    add_environment(parser.add_argument_group("environment of the ranks"))
    slurm = parser.add_argument_group("Slurm")
    slurm_help = 'submit a job with these sbatch options, such as "-N 4 -p gpu"; needs no hosts file'
    slurm.add_argument("--slurm", metavar="OPTIONS", help=slurm_help)
    slurm.add_argument("--cache", default="", metavar="DIR", help="HF_HOME on each node, such as '/nvme/$USER/hf'")
    scratch_help = "TMPDIR on each node, such as '/nvme/$SLURM_JOB_ID'"
    slurm.add_argument("--scratch", default="", metavar="DIR", help=scratch_help)
    return parser


def _add_options(group: argparse._ActionsContainer, options: type[Any]) -> None:
    """Add the options that a dataclass has besides those of its base."""
    for field in dataclasses.fields(options):
        if field.name not in options.__annotations__:
            continue
        default = field.metadata["default"]
        kind: dict[str, Any] = {"action": "store_true"} if default is False else {"type": type(default)}
        group.add_argument(_flag(field.name.removesuffix("_s")), **kind, **field.metadata)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _given_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the options as they were given, times in seconds."""
    values = {}
    for field in dataclasses.fields(GuardOptions):
        name = field.name.removesuffix("_s")  # of a time, which is typed with its unit
        value = getattr(args, name)
        values[field.name] = value if name == field.name else parse_seconds(value, _flag(name))
    return values


def add_environment(group: argparse._ActionsContainer) -> None:
    """Add the options that set the environment of the ranks."""

    def add_list(flag: str, metavar: str, text: str, type_: type[str] | type[Path] = str) -> None:
        group.add_argument(flag, action="append", default=[], type=type_, metavar=metavar, help=text)

    add_list("--env", "K=V", "set an environment variable")
    add_list("--env-file", "FILE", "read K=V lines from FILE; names that look secret go as with --secret", Path)
    add_list("--secret", "NAME", "pass this environment variable on, only through SSH's standard input")
    setup_line_help = "shell line to run before torchrun on every host, such as 'module load cuda'"
    group.add_argument("--setup-line", default="", metavar="LINE", help=setup_line_help)


def environment_flags(args: argparse.Namespace) -> list[str]:
    """Return the flags of the environment of the ranks, as they were given."""
    lists = {"--env": args.env, "--env-file": args.env_file, "--secret": args.secret}
    words = [word for name, values in lists.items() for value in values for word in (name, str(value))]
    return [*words, *flag("--setup-line", args.setup_line)]


def source_flags(args: argparse.Namespace) -> list[str]:
    """Return the flags of the settings' sources, as they were given."""
    return [*flag("--preset", args.preset), *(word for path in args.config for word in flag("--config", path))]


def flag(name: str, value: str | Path | None) -> list[str]:
    """Return a flag and its value; [] without a value."""
    return [name, str(value)] if value else []


def check_flags(args: argparse.Namespace) -> None:
    """Refuse flags that contradict each other, or are out of range."""
    if not 0 <= args.restart <= 1000:
        raise UserError(f"--restart: {args.restart} times; use 0 to 1000")
    if args.port and not 0 < args.port < 65536:
        raise UserError(f"--port: {args.port} is out of range; use 1 to 65535")
    _check_guard(args)
    _check_end(args)
    _check_slurm(args)
    if args.rehearse and (args.restart or args.resume != "no"):
        raise UserError("--rehearse is a run of its own; remove --restart and --resume")
    if args.tune and (args.rehearse or args.evaluate_only or args.resume != "no" or args.slurm is not None):
        raise UserError("--tune: chooses the settings of a new run on SSH hosts; remove it, or what contradicts that")
    if args.evaluate_only and (args.restart or args.rehearse):
        raise UserError(f"{command.EVALUATE_ONLY} takes no step; remove --restart and --rehearse")


def _check_guard(args: argparse.Namespace) -> None:
    """Refuse flags that need a guard, if there is none."""
    if args.shrink < 0:
        raise UserError(f"--shrink: {args.shrink} hosts; use 1 or more")
    for flag, value in (("--guard-on", args.guard_on), ("--notify", args.notify), ("--shrink", args.shrink)):
        if value and not args.restart:
            raise UserError(f"{flag} needs --restart N, which guards the run; add it")
    if args.guard_on and args.follow:
        raise UserError(
            "--follow cannot follow a guard on another machine; remove it, and use `llama405b logs -f` or `top`"
        )
    if args.notify_every != "0" and not args.notify:
        raise UserError("--notify-every needs --notify CMD; add it")


def _check_end(args: argparse.Namespace) -> None:
    """Refuse --export and --when-done if nobody waits for the end of the run, or for a rehearsal."""
    for flag, value in (("--export", args.export), ("--when-done", args.when_done)):
        if value and args.slurm is not None:
            raise UserError(f"{flag}: a job frees its nodes by itself; remove it, or write `launch … --follow && …`")
        if value and not (args.follow or args.restart):
            raise UserError(f"{flag}: nobody would see the end of the run; add --follow or --restart N")
        if value and args.rehearse:
            raise UserError(f"{flag}: nothing follows a rehearsal; remove one of them")


def _check_slurm(args: argparse.Namespace) -> None:
    """Refuse flags that a Slurm job cannot have, and flags that only a job can have."""
    if args.slurm is not None and (args.restart or args.rehearse or args.port):
        raise UserError("--slurm: --restart, --rehearse and --port are for SSH hosts; remove them")
    for flag, path in (("--cache", args.cache), ("--scratch", args.scratch)):
        if path and args.slurm is None:
            raise UserError("--cache and --scratch are for --slurm; in a hosts file, use cache= and scratch=")
        if path and not path.startswith(("/", "~/", "$")):
            raise UserError(f"{flag}: {path!r} is relative; use a full path")


def check_program(args: argparse.Namespace, program: Sequence[str], settings: Sequence[str]) -> None:
    """Refuse flags of the trainer together with the user's own program."""
    if not program:
        raise UserError("--: no program after it; write -- script.py ARG … or -- -m module ARG …")
    for_trainer = [*settings, *source_flags(args)]
    for_trainer += (
        ["--budget"] * bool(args.budget)
        + ["--after-save"] * bool(args.after_save)
        + ["--extend"] * bool(args.extend)
        + ["--export"] * bool(args.export)
        + [command.EVALUATE_ONLY] * args.evaluate_only
        + ["--rehearse"] * args.rehearse
        + ["--tune"] * args.tune
    )
    if for_trainer:
        raise UserError(
            f"{for_trainer[0]}: settings are for the trainer, but there is a program after --; remove one of them"
        )


def check_export(args: argparse.Namespace, settings: Config) -> None:
    """Refuse to export a model that no host has in full, and to send one that is not exported."""
    sends = settings.tracking.log_model and not (args.rehearse or args.evaluate_only or args.blame)
    if sends and args.slurm is not None:
        raise UserError(
            "--tracking.log_model: a job writes no model; leave it out, and use `llama405b track --run RUN --model OUT` afterwards"
        )
    if sends and not args.export:
        raise UserError(
            "--tracking.log_model: sends what --export writes; add --export OUT, or use `llama405b track --run RUN --model OUT`"
        )
    if not args.export:
        return
    if args.evaluate_only or not settings.checkpoint.cadence.is_enabled:
        raise UserError("--export: the run saves nothing; remove it, or set --checkpoint.every")
    if settings.checkpoint.storage == "local":
        raise UserError(
            "--export: with --checkpoint.storage local no host has the whole model; remove it, and use `llama405b export RUN OUT HOSTS`"
        )


VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET_NAME = re.compile(r"TOKEN(?!IZ)|SECRET|PASSWORD|PASSWD|CREDENTIAL|(API|ACCESS|PRIVATE)_?KEY", re.IGNORECASE)
RESERVED_VARIABLES = ("PYTHONUNBUFFERED", "CUDA_VISIBLE_DEVICES")  # set by the run itself, which relies on them


def read_env(
    pairs: Sequence[str], files: Sequence[Path], names: Sequence[str], environ: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the ranks' variables and secrets, from ``--env``, ``--env-file`` and ``--secret`` (looked up in ``environ``)."""
    file_values = {_check_variable(name, source): value for path in files for source, name, value in _env_lines(path)}
    secrets = {name: value for name, value in file_values.items() if SECRET_NAME.search(name)}
    env = {name: value for name, value in file_values.items() if name not in secrets}
    env |= dict(map(_env_pair, pairs))
    secrets |= dict(_secret(name, environ) for name in names)
    for name, value in env.items():
        if "\0" in value or "\n" in value:
            raise UserError(f"--env: the value of {name} contains a line break; remove it")
    return env, secrets


def _secret(name: str, environ: Mapping[str, str]) -> tuple[str, str]:
    if _check_variable(name.partition("=")[0], "--secret") not in environ or "=" in name:
        raise UserError(f"--secret: {name.partition('=')[0]} is not set here; export it, and write --secret NAME")
    return name, environ[name]


def _env_pair(pair: str) -> tuple[str, str]:
    name, equals, value = pair.partition("=")
    if SECRET_NAME.search(name):
        raise UserError(
            f"--env: {name} looks like a secret, which `ps` would show to everyone; export it, and write --secret {name}"
        )
    if not equals:
        raise UserError(f"--env: {pair!r} has no value; write --env NAME=VALUE")
    return _check_variable(name, "--env"), value


def _env_lines(path: Path) -> list[tuple[str, str, str]]:
    try:
        check_only_owner_writes(path)
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--env-file: {path} cannot be read ({reason_of(error)}); name a file of NAME=VALUE lines"
        ) from None
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if not equals:
            raise UserError(f"{path}:{number}: there is no '='; write NAME=VALUE")
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        entries.append((f"{path}:{number}", name.strip(), value))
    return entries


def _check_variable(name: str, source: str) -> str:
    if not VARIABLE_NAME.fullmatch(name):
        raise UserError(f"{source}: {name!r} is not a valid variable name; use letters, digits and '_'")
    if name in RESERVED_VARIABLES or name.startswith(("LLAMA405B_", "TORCHELASTIC_")):
        raise UserError(f"{source}: {name} is set by the run itself; use another name")
    return name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest(GuardOptions):
    """A launch command, parsed."""

    hosts_file: Path
    run: str
    resume: str
    env: Mapping[str, str]
    secrets: Mapping[str, str]  # names and values: never printed, and written only to the hosts' 0600 files
    setup: str  # a shell line to run before torchrun on every host
    slurm: str | None  # sbatch's options; None: by SSH
    places: Mapping[str, str]  # cache and scratch on a job's nodes, like cache= and scratch= in a hosts file
    typed_in: str  # the directory
    config: Config | None = None  # None: a program of the user's own
    preset: str = ""  # that it starts from
    files: tuple[Path, ...] = ()  # of settings
    flags: tuple[str, ...] = ()  # the training settings, as flags
    program: tuple[str, ...] = ()
    typed: tuple[str, ...] = ()  # the command line, without --run, --resume and the program
    evaluates: bool = False  # without training
    blames: bool = False  # of those: it measures the documents of a step
    overridden: tuple[str, ...] = ()  # settings of a file that a later one replaces, in words
    hides_gpus: bool = False  # from a program that is not our trainer

    @property
    def resume_arguments(self) -> str:
        """What to type after ``llama405b launch`` to continue this run, or to guard it if it is running."""
        program = ["--", *self.program] if self.program else []
        return shlex.join([*self.typed, "--run", self.run, "--resume", "auto", *program])

    def spec(self) -> RunSpec:
        """Return what the plan is built from, on hosts or in a job."""
        return RunSpec(
            run=self.run,
            program=self.training_program(),
            env=dict(self.env),
            secrets=tuple(sorted(self.secrets)),
            setup=self.setup,
            checkpoint_dir="" if self.evaluates else self.settings.checkpoint.dir,
            replicates=self.saves and self.settings.checkpoint.copies > 0,
            spread=self.saves and self.settings.checkpoint.storage == "local",
            on_cpu=self.on_cpu,
            allow_sockets=self.allow_sockets,
            load_s=self.settings.timeouts.load,
        )

    @property
    def on_cpu(self) -> bool:
        """Whether it trains on CPUs, even if there are GPUs."""
        return self.hides_gpus or self.settings.parallel.device == "cpu"

    @property
    def saves(self) -> bool:
        """Whether it writes checkpoints."""
        return self.config is not None and self.config.checkpoint.cadence.is_enabled and not self.evaluates

    @property
    def settings(self) -> Config:
        """The training settings; the defaults if another program runs."""
        return self.config or Config()

    @property
    def data_paths(self) -> tuple[str, ...]:
        """The paths of the data that it reads."""
        data, held_out = self.settings.data.paths, self.settings.evaluation.paths
        return held_out if self.evaluates and held_out and not self.blames else (*data, *held_out)

    @property
    def new_checkpoints(self) -> str:
        """The directory that must hold no checkpoint before the run starts; '' if one is resumed, or it is the run's own."""
        if self.resume != "no" or self.evaluates:
            return ""
        return self.settings.checkpoint.dir

    @property
    def checkpoints(self) -> str:
        """The directory of the run's checkpoints."""
        return self.settings.checkpoint.dir or f"runs/{self.run}/checkpoints"

    def refuse_changes(self, resumable: ResumeCheckpoint | None, settings: Config) -> None:
        """Refuse to resume what was saved with other settings."""
        if resumable and not self.evaluates:  # the model is all that matters then, which only ranks compare
            current = with_config(resumable.identity, settings)
            check_resume_changes(resumable.path, resumable.identity, current, settings.checkpoint.allow_changes)

    def training_program(self) -> tuple[str, ...]:
        """Return what torchrun runs: the user's program, or our trainer."""
        if self.program:
            return self.program
        return ("-m", "llama405b.train", "--run-dir", f"runs/{self.run}", "--resume", self.resume, *self.flags)


def parse_launch(argv: Sequence[str], now: float) -> LaunchRequest:
    """Parse the command line; a training command goes through the trainer's own parser.

    Raises:
        UserError: Something in it is wrong.
    """
    end = [*argv, "--"].index("--")
    program = tuple(argv[end + 1 :])
    settings, remaining = config.split_flags(argv[:end])
    parser = launch_parser()
    args, rest = parser.parse_known_args(remaining)
    config.refuse_unknown(rest, parser.options)
    if "--" in argv:
        check_program(args, program, settings)
    check_flags(args)
    settings += _gpu_hours_flag(args)
    settings += [f"--training.extend={args.extend}"] if args.extend else []
    settings += [f"--checkpoint.after_save={args.after_save}"] if args.after_save else []
    command.check_resume(args.resume, is_evaluation=args.evaluate_only or bool(args.blame))
    request = _build_request(args, now)
    if program:
        return dataclasses.replace(request, program=program, typed=_drop_flags(argv[:end], "--run", "--resume"))
    resolved, flags = _resolve_settings(args, settings)
    check_export(args, resolved)
    refuse_nothing_to_resume(args, resolved)
    typed = _drop_flags(argv[:end], "--run", "--resume")
    setting_layers = (config.read_preset(args.preset), *map(config.read_toml, args.config), config.read_flags(settings))
    replaced = (*config.describe_overrides(args.config), *config.describe_unused_length(*setting_layers))
    return dataclasses.replace(
        request,
        config=resolved,
        preset=args.preset,
        files=tuple(args.config),
        flags=flags,
        typed=typed,
        overridden=replaced,
    )


def _gpu_hours_flag(args: argparse.Namespace) -> list[str]:
    """Return the flag of the GPU-hours that a budget buys; none without one."""
    if args.price < 0 or args.budget < 0 or (args.budget and not args.price):
        raise UserError(
            "--budget: needs --price per GPU-hour, and both must be above 0; write --budget 500 --price 2.5"
        )
    if not args.budget:
        return []
    return [f"--training.gpu_hours={args.budget / args.price:g}"]


def _build_request(args: argparse.Namespace, now: float) -> LaunchRequest:
    """Return the request of all flags that are not settings of the trainer."""
    env, secrets = read_env(args.env, args.env_file, args.secret, os.environ)
    return LaunchRequest(
        **_given_options(args),
        hosts_file=args.hosts,
        run=check_run_name(args.run or _default_run_name(args, now)),
        resume=args.resume,
        env=env,
        secrets=secrets,
        setup=args.setup_line,
        slurm=args.slurm,
        places={key: path for key, path in (("cache", args.cache), ("scratch", args.scratch)) if path},
        evaluates=args.evaluate_only or bool(args.blame),
        blames=bool(args.blame),
        typed_in=str(Path.cwd()),
    )


def _drop_flags(argv: Sequence[str], *flags: str) -> tuple[str, ...]:
    """Return the arguments without these flags and their values."""
    remaining: list[str] = []
    flag = ""
    for argument in argv:
        is_value = flag in flags and not argument.startswith("-")  # --resume may have none
        if not is_value and argument.partition("=")[0] not in flags:
            remaining.append(argument)
        flag = argument
    return tuple(remaining)


def _resolve_settings(args: argparse.Namespace, settings: Sequence[str]) -> tuple[Config, tuple[str, ...]]:
    """Return the trainer's settings, and equivalent flags for hosts that do not have the file."""
    overrides = config.merge_sources(*map(config.read_toml, args.config), config.read_flags(settings))
    mode_flags = [command.EVALUATE_ONLY] * args.evaluate_only + [f"--blame={args.blame}"] * bool(args.blame)
    flags = (*mode_flags, *flag("--preset", args.preset), *config.to_flags(overrides))
    return command.parse([*source_flags(args), *mode_flags, *settings]).config, flags


def refuse_nothing_to_resume(args: argparse.Namespace, settings: Config) -> None:
    """Refuse to resume a run that is not named: a new one has no checkpoint."""
    if args.run or settings.checkpoint.dir or not (args.resume == "auto" or args.resume.isdecimal()):
        return
    runs = [RunDir(path) for path in Path("runs").glob("*") if (path / "plan.json").exists()]
    latest_run = max(runs, key=lambda run: run.plan.stat().st_mtime, default=None)
    if latest_run is None:
        raise UserError("--resume: nothing to resume; name the run with --run")
    path = find_newest_complete(latest_run.checkpoints)
    step_note = fmt_if(" (step {})", step_of(path) if path else 0)
    raise UserError(f"--resume: nothing to resume; did you mean --run {latest_run.name}{step_note}?")


def _default_run_name(args: argparse.Namespace, now: float) -> str:
    """Return the default name of a run."""
    stem = (args.preset or [Path("run"), *args.config][-1].stem) + "-evaluation" * args.evaluate_only
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"


def requested_guard(request: LaunchRequest) -> GuardState:
    """Return the record of a requested guard that does not run yet."""
    return GuardState(
        request.run,
        0,
        0,
        request.guard_on or processes.machine_id(),
        request.restart,
        command=request.resume_arguments,
        directory=request.typed_in,
        hang_after_s=request.hang_after_s,
    )
