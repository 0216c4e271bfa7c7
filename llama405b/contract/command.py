"""The training command line: ``llama405b train``, and the command that launch plans for every rank.

Needs no torch: launch checks the ranks' command with ``parse`` before any host starts. Nobody would see the
trainer refuse a flag inside a detached tmux session.
"""

import argparse
import dataclasses
import itertools
import json
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NoReturn

from llama405b.contract import config, settings_schema
from llama405b.contract.config import Setting
from llama405b.contract.errors import UserError
from llama405b.contract.phrases import did_you_mean
from llama405b.contract.schema import Config
from llama405b.contract.settings_help import HELP_WIDTH, settings_help

MAX_WORLD = 1_000_000
EVALUATE_ONLY = "--evaluate-only"
TRAIN = """Train a Llama: one process per rank, under torchrun. `llama405b launch` starts it on every host, and takes the same settings.

  llama405b train --preset llama3.1-8b --data.paths corpus --dry-run --world 8
  llama405b launch hosts --config my.toml --optimizer.lr 2e-5"""


class Paragraphs(argparse.HelpFormatter):
    """Fills each paragraph of a text; lines that begin with a space stay as they are."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=HELP_WIDTH)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = []
        for is_free, group in itertools.groupby(text.strip("\n").splitlines(), lambda line: line[:1].strip() != ""):
            lines = list(group)
            filled += [textwrap.fill(" ".join(lines), width)] if is_free else lines
        return textwrap.indent("\n".join(filled), indent)


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence, and whose help fits a terminal."""

    before_parsing: ClassVar[Callable[["OneLineParser"], None] | None] = None  # tab completion reads the parser here

    if not TYPE_CHECKING:  # argparse's own types hold

        def __init__(self, *args, **more):
            super().__init__(*args, **{"formatter_class": Paragraphs, "allow_abbrev": False} | more)

        def parse_known_args(self, args=None, namespace=None):
            """See ``argparse``."""
            if OneLineParser.before_parsing:
                OneLineParser.before_parsing(self)
            return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        """Return the help; what our messages quote as commands is quoted here as well, but plainly."""
        return super().format_help().replace("`", "'")

    def error(self, message: str) -> NoReturn:
        """Raise the error as a UserError."""
        raise UserError(f"{message}; see `{self.prog} --help`")

    @property
    def options(self) -> list[str]:
        """Every option it takes."""
        return list(self._option_string_actions)

    @property
    def actions(self) -> list[argparse.Action]:
        """Everything that it takes."""
        return list(self._actions)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse a command line without settings.

        Raises:
            UserError: Anything in it is wrong.
        """
        known, rest = self.parse_known_args(argv)
        for word in rest:
            self.error(f"{word}: unknown option or argument{did_you_mean(word.partition('=')[0], self.options)}")
        return known


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """A training command, parsed and checked."""

    config: Config
    preset: str
    run_dir: Path
    resume: str
    dry_run: bool
    world: int
    evaluates: bool  # without training
    blames: int = 0  # without training, too: the step whose documents are measured; 0: none


class PrintSchema(argparse.Action):
    """Prints the schema of the settings, and exits."""

    if not TYPE_CHECKING:  # as above

        def __init__(self, *args, **more):
            super().__init__(*args, nargs=0, **more)

        def __call__(self, *_):
            """See ``argparse``."""
            print(json.dumps(settings_schema.schema(), indent=2))
            raise SystemExit(0)


def add_config(add: Callable[..., object], text: str) -> None:
    """Add ``--config`` to a parser, which may be given several times."""
    add("--config", type=Path, action="append", default=[], metavar="FILE", help=text)


def add_resume(add: Callable[..., object]) -> None:
    """Add ``--resume`` to a parser."""
    text = "no | auto (newest checkpoint that verifies) | STEP | PATH [no]; without a value: auto"
    add("--resume", nargs="?", default="no", const="auto", metavar="WHICH", help=text)


def add_evaluate_only(add: Callable[..., object]) -> None:
    """Add ``--evaluate-only`` to a parser."""
    text = "evaluate on the data of [evaluation] without training: the model, or with --resume PATH a checkpoint of any run"
    add(EVALUATE_ONLY, action="store_true", help=text)


def add_blame(add: Callable[..., object]) -> None:
    """Add ``--blame`` to a parser: `llama405b blame` starts runs with it."""
    add("--blame", type=int, default=0, metavar="STEP", help=argparse.SUPPRESS)


def check_resume(resume: str, *, evaluates: bool = False) -> None:
    """Refuse a value of --resume that is not no, auto, a step, or a path that ends in step-<8 digits>.

    ``evaluates``: without training, in a run of its own, which has no checkpoints.
    """
    if evaluates and re.fullmatch("auto|[0-9]{1,8}", resume):
        raise UserError(
            f"{EVALUATE_ONLY}: --resume is {resume!r}; name the checkpoint by its path, like --resume "
            "runs/RUN/checkpoints/step-00000100, or leave it out for the model itself"
        )
    if not re.fullmatch("no|auto|[0-9]{1,8}", resume) and not re.fullmatch("step-[0-9]{8}", Path(resume).name):
        raise UserError(
            f"--resume: {resume!r} is not a checkpoint; write no, auto, a step, or a path that ends in step-<8 digits>"
        )


def parse(argv: Sequence[str]) -> Command:
    """Parse a training command.

    Raises:
        UserError: Any part of it is invalid.
    """
    parser = OneLineParser(
        prog="llama405b train",
        usage="llama405b train [--preset NAME] [--config FILE] [--SECTION.KEY VALUE …]",
        description=TRAIN,
        epilog=settings_help(),
    )
    parser.add_argument("--preset", default="", help="named settings to start from")
    add_config(parser.add_argument, "TOML file of settings; overrides the preset. Of several the later ones win")
    parser.add_argument("--schema", action=PrintSchema, help="print a JSON Schema of that file, for editors")
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs/local"), help="where the run's files go [runs/local]"
    )
    add_resume(parser.add_argument)
    add_evaluate_only(parser.add_argument)
    add_blame(parser.add_argument)
    parser.add_argument(
        "--dry-run", action="store_true", help="shard the model on the meta device and report what it needs"
    )
    parser.add_argument("--world", type=int, default=1, help="number of ranks for --dry-run [1]")
    flags, others = config.split_flags(argv)
    known, rest = parser.parse_known_args(others)
    config.refuse_unknown(rest, parser.options)
    if not 1 <= known.world <= MAX_WORLD:
        raise UserError(f"--world: {known.world} is out of range; use 1 to {MAX_WORLD}")
    evaluates = known.evaluate_only or bool(known.blame)
    check_resume(known.resume, evaluates=evaluates)
    settings = config.read_preset(known.preset) | config.read_files(known.config) | config.read_flags(flags)
    if known.dry_run:  # the shape needs no data
        settings = {"data.paths": (("none",), "--dry-run")} | settings
    if known.evaluate_only:
        settings = to_evaluate(settings)
    return Command(
        config.resolve(settings),
        known.preset,
        known.run_dir,
        known.resume,
        known.dry_run,
        known.world,
        evaluates,
        known.blame,
    )


def to_evaluate(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return the settings of an evaluation without training: it is due, and reads data to train on only to hold out a part."""
    paths, fraction = (settings.get(f"evaluation.{name}", ((), ""))[0] for name in ("paths", "fraction"))
    unread = {"data.paths": (("none",), EVALUATE_ONLY)} if paths or not fraction else {}
    return unread | dict(settings) | {"evaluation.every": (1, EVALUATE_ONLY)}
