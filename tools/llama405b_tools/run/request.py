"""A launch request: the command line and environment files, parsed and checked. Opens no connection."""

import argparse
import dataclasses
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from llama405b.contract import command, config
from llama405b.contract.checkpoints import newest_complete, step_of
from llama405b.contract.errors import UserError
from llama405b.contract.paths import RunDir
from llama405b.contract.phrases import given
from llama405b.contract.plan import check_run_name
from llama405b.contract.resuming import accept_changes, as_configured
from llama405b.contract.schema import Config
from llama405b.contract.units import seconds
from llama405b_tools.remote.messages.probe import Resumable
from llama405b_tools.run.environment import read_env
from llama405b_tools.run.launch_options import flag, launch_parser, source_flags
from llama405b_tools.run.launch_rules import check_export, check_flags, check_program
from llama405b_tools.run.plan import RunSpec


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchRequest:
    """A launch command, parsed."""

    hosts_file: Path
    run: str
    resume: str
    env: Mapping[str, str]
    secrets: Mapping[str, str]  # names and values: never printed, and written only to the hosts' 0600 files
    setup: str  # a shell line to run before torchrun on every host
    port: int
    dry_run: bool
    follow: bool
    plain: bool
    restart: int  # how often without progress; 0: never
    hang_after_s: float
    shrink: int  # hosts on which it goes on while others stay lost; 0: it waits for all
    shrink_after_s: float
    guard_on: str  # a host; "": this machine
    notify: str
    notify_every_s: float  # 0: only if something happens
    rehearse: bool
    allow_sockets: bool
    allow_misfit: bool
    slurm: str | None  # sbatch's options; None: by SSH
    places: Mapping[str, str]  # cache and scratch on a job's nodes, like cache= and scratch= in a hosts file
    typed_in: str  # the directory
    config: Config | None = None  # None: a program of the user's own
    flags: tuple[str, ...] = ()  # the training settings, as flags
    program: tuple[str, ...] = ()
    typed: tuple[str, ...] = ()  # the command line, without --run, --resume and the program
    evaluates: bool = False  # without training
    blames: bool = False  # of those: it measures the documents of a step
    export: str = ""  # where the first host is to write the model, once the run has ended well
    when_done: str = ""  # the user's command after that
    price: float = 0.0  # of a GPU-hour; 0: unknown
    overridden: tuple[str, ...] = ()  # settings of a file that a later one replaces, in words
    hides_gpus: bool = False  # from a program that is not our trainer

    @property
    def again(self) -> str:
        """What to type after ``llama405b launch`` to continue this run, or to guard it if it is running."""
        program = ["--", *self.program] if self.program else []
        return shlex.join([*self.typed, "--run", self.run, "--resume", "auto", *program])

    def spec(self) -> RunSpec:
        """What the plan is built from, wherever it runs."""
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
        return self.config is not None and self.config.checkpoint.cadence.saves and not self.evaluates

    @property
    def settings(self) -> Config:
        """The training settings; the defaults if another program runs."""
        return self.config or Config()

    @property
    def data_paths(self) -> tuple[str, ...]:
        """The data that it reads."""
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

    def refuse_changes(self, found: Resumable | None, settings: Config) -> None:
        """Refuse to resume what was saved with other settings."""
        if found and not self.evaluates:  # the model is all that matters then, which only ranks compare
            now = as_configured(found.identity, settings)
            accept_changes(found.path, found.identity, now, settings.checkpoint.allow_changes)

    def training_program(self) -> tuple[str, ...]:
        """What torchrun runs: the user's program, or our trainer."""
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
    settings, others = config.split_flags(argv[:end])
    parser = launch_parser()
    known, rest = parser.parse_known_args(others)
    config.refuse_unknown(rest, parser.options)
    if "--" in argv:
        check_program(known, program, settings)
    check_flags(known)
    settings += _hours(known)
    settings += [f"--training.extend={known.extend}"] if known.extend else []
    settings += [f"--checkpoint.after_save={known.after_save}"] if known.after_save else []
    command.check_resume(known.resume, evaluates=known.evaluate_only or bool(known.blame))
    request = _request(known, now)
    if program:
        return dataclasses.replace(request, program=program, typed=_without(argv[:end], "--run", "--resume"))
    resolved, flags = _training(known, settings)
    check_export(known, resolved)
    refuse_nothing_to_resume(known, resolved)
    typed = _without(argv[:end], "--run", "--resume")
    replaced = tuple(config.overridden(known.config))
    return dataclasses.replace(request, config=resolved, flags=flags, typed=typed, overridden=replaced)


def _hours(known: argparse.Namespace) -> list[str]:
    """Return the flag of the GPU-hours that a budget buys; none without one."""
    if known.price < 0 or known.budget < 0 or (known.budget and not known.price):
        raise UserError(
            "--budget: it needs --price, of a GPU-hour, and both must be above 0; write --budget 500 --price 2.5"
        )
    if not known.budget:
        return []
    return [f"--training.gpu_hours={known.budget / known.price:g}"]


def _request(known: argparse.Namespace, now: float) -> LaunchRequest:
    """Return the request of all flags that are not settings of the trainer."""
    env, secrets = read_env(known.env, known.env_file, known.secret, os.environ)
    return LaunchRequest(
        hosts_file=known.hosts,
        run=check_run_name(known.run or _new_name(known, now)),
        resume=known.resume,
        env=env,
        secrets=secrets,
        setup=known.setup_line,
        port=known.port,
        dry_run=known.dry_run,
        follow=known.follow,
        plain=known.plain,
        restart=known.restart,
        hang_after_s=seconds(known.hang_after, "--hang-after"),
        shrink=known.shrink,
        shrink_after_s=seconds(known.shrink_after, "--shrink-after"),
        guard_on=known.guard_on,
        notify=known.notify,
        notify_every_s=seconds(known.notify_every, "--notify-every"),
        rehearse=known.rehearse,
        allow_sockets=known.allow_sockets,
        allow_misfit=known.allow_misfit,
        slurm=known.slurm,
        places={key: path for key, path in (("cache", known.cache), ("scratch", known.scratch)) if path},
        evaluates=known.evaluate_only or bool(known.blame),
        blames=bool(known.blame),
        export=known.export,
        when_done=known.when_done,
        price=known.price,
        typed_in=str(Path.cwd()),
    )


def _without(argv: Sequence[str], *flags: str) -> tuple[str, ...]:
    """Return the arguments without these flags and their values."""
    kept: list[str] = []
    flag = ""
    for argument in argv:
        is_value = flag in flags and not argument.startswith("-")  # --resume may have none
        if not is_value and argument.partition("=")[0] not in flags:
            kept.append(argument)
        flag = argument
    return tuple(kept)


def _training(known: argparse.Namespace, settings: Sequence[str]) -> tuple[Config, tuple[str, ...]]:
    """Return the trainer's settings, and equivalent flags for hosts that do not have the file."""
    own = config.read_files(known.config) | config.read_flags(settings)
    only = [command.EVALUATE_ONLY] * known.evaluate_only + [f"--blame={known.blame}"] * bool(known.blame)
    flags = (*only, *flag("--preset", known.preset), *config.to_flags(own))
    return command.parse([*source_flags(known), *only, *settings]).config, flags


def refuse_nothing_to_resume(known: argparse.Namespace, settings: Config) -> None:
    """Refuse to resume a run that is not named: a new one has no checkpoint."""
    if known.run or settings.checkpoint.dir or not (known.resume == "auto" or known.resume.isdecimal()):
        return
    runs = [RunDir(path) for path in Path("runs").glob("*") if (path / "plan.json").exists()]
    newest = max(runs, key=lambda run: run.plan.stat().st_mtime, default=None)
    if newest is None:
        raise UserError("--resume: nothing to resume; name the run with --run")
    path = newest_complete(newest.checkpoints)
    reached = given(" (step {})", step_of(path) if path else 0)
    raise UserError(f"--resume: nothing to resume; did you mean --run {newest.name}{reached}?")


def _new_name(known: argparse.Namespace, now: float) -> str:
    """Make a name for a run that was given none."""
    of = (known.preset or [Path("run"), *known.config][-1].stem) + "-evaluation" * known.evaluate_only
    return f"{of}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"
