"""The training command line: ``llama405b train``, and what launch plans for every rank.

Needs no torch: launch checks with ``parse`` what the ranks will be told, before any host starts. A flag that the
trainer refuses inside a detached tmux session would be seen by nobody.
"""

import argparse
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from llama405b.contract import config as configuration
from llama405b.contract.config import Setting
from llama405b.contract.errors import UserError
from llama405b.contract.schema import Config

MAX_WORLD = 1_000_000


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        """Refuse."""
        raise UserError(f"{message}; see `{self.prog} --help`")


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """A training command, parsed and checked."""

    config: Config
    settings: dict[str, Setting]  # as the preset, the file and the flags gave them
    preset: str
    run_dir: Path
    resume: str
    dry_run: bool
    world: int


def check_resume(resume: str) -> None:
    """Refuse what can be no checkpoint: it must be no, auto, a step, or a path that ends in step-<8 digits>.

    Raises:
        UserError: It is none of them.
    """
    step = resume.isascii() and resume.isdecimal() and len(resume) <= 8
    if resume not in ("no", "auto") and not step and not re.fullmatch(r"step-[0-9]{8}", Path(resume).name):
        raise UserError(
            f"--resume: {resume!r} is not a checkpoint; write no, auto, a step, or a path that ends in step-<8 digits>"
        )


def parse(argv: Sequence[str]) -> Command:
    """Parse a training command. Needs no torch: launch checks with it what the ranks will be told.

    Raises:
        UserError: Anything in it is wrong.
    """
    parser = OneLineParser(
        prog="llama405b train",
        description="Train a Llama. One process per rank, under torchrun; `llama405b launch` starts it on every host.",
        epilog=configuration.help_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--preset", default="", help="settings to start from")
    parser.add_argument("--config", type=Path, help="TOML file of settings, over the preset's")
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs/local"), help="where the run's files go [runs/local]"
    )
    parser.add_argument("--resume", default="no", help="no | auto (newest checkpoint that verifies) | STEP | PATH [no]")
    parser.add_argument(
        "--dry-run", action="store_true", help="shard the model on the meta device, and say what it takes"
    )
    parser.add_argument("--world", type=int, default=1, help="ranks, with --dry-run [1]")
    flags, others = configuration.split_flags(argv)
    known, rest = parser.parse_known_args(others)
    configuration.refuse_unknown(rest)
    if not 1 <= known.world <= MAX_WORLD:
        raise UserError(f"--world: {known.world} ranks; it takes 1 to {MAX_WORLD}")
    check_resume(known.resume)
    settings = configuration.read_preset(known.preset) if known.preset else {}
    settings |= configuration.read_toml(known.config) if known.config else {}
    settings |= configuration.read_flags(flags)
    if known.dry_run:  # the shape needs no data
        settings = {"data.paths": (("none",), "--dry-run")} | settings
    config = configuration.resolve(settings)
    return Command(config, settings, known.preset, known.run_dir, known.resume, known.dry_run, known.world)
