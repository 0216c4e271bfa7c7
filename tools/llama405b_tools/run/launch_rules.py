"""What on a launch's command line contradicts itself, or is out of range."""

import argparse
from collections.abc import Sequence

from llama405b.contract import command
from llama405b.contract.errors import UserError
from llama405b.contract.schema import Config
from llama405b_tools.run.launch_options import source_flags


def check_flags(known: argparse.Namespace) -> None:
    """Refuse flags that contradict each other, or are out of range."""
    if not 0 <= known.restart <= 1000:
        raise UserError(f"--restart: {known.restart} times; use 0 to 1000")
    if known.port and not 0 < known.port < 65536:
        raise UserError(f"--port: {known.port} is out of range; use 1 to 65535")
    _check_guard(known)
    _check_end(known)
    _check_slurm(known)
    if known.rehearse and (known.restart or known.resume != "no"):
        raise UserError("--rehearse is a run of its own; remove --restart and --resume")
    if known.evaluate_only and (known.restart or known.rehearse):
        raise UserError(f"{command.EVALUATE_ONLY} takes no step; remove --restart and --rehearse")


def _check_guard(known: argparse.Namespace) -> None:
    """Refuse what only a guard can do, where there is none."""
    if known.shrink < 0:
        raise UserError(f"--shrink: {known.shrink} hosts; use 1 or more")
    for flag, value in (("--guard-on", known.guard_on), ("--notify", known.notify), ("--shrink", known.shrink)):
        if value and not known.restart:
            raise UserError(f"{flag} needs --restart N, which guards the run; add it")
    if known.guard_on and known.follow:
        raise UserError(
            "--follow cannot follow a guard on another machine; remove it, and use `llama405b logs -f` or `top`"
        )
    if known.notify_every != "0" and not known.notify:
        raise UserError("--notify-every needs --notify CMD; add it")


def _check_end(known: argparse.Namespace) -> None:
    """Refuse what is to follow the end of the run, where nobody waits for it, or the run is none."""
    for flag, value in (("--export", known.export), ("--when-done", known.when_done)):
        if value and known.slurm is not None:
            raise UserError(f"{flag}: a job frees its nodes by itself; remove it, or write `launch … --follow && …`")
        if value and not (known.follow or known.restart):
            raise UserError(f"{flag}: nobody would see the end of the run; add --follow or --restart N")
        if value and known.rehearse:
            raise UserError(f"{flag}: a rehearsal is followed by nothing; remove one of them")


def _check_slurm(known: argparse.Namespace) -> None:
    """Refuse what is not for a job, and what is only for one."""
    if known.slurm is not None and (known.restart or known.rehearse or known.port):
        raise UserError("--slurm: --restart, --rehearse and --port are for SSH hosts; remove them")
    for flag, path in (("--cache", known.cache), ("--scratch", known.scratch)):
        if path and known.slurm is None:
            raise UserError("--cache and --scratch are for --slurm; in a hosts file, use cache= and scratch=")
        if path and not path.startswith(("/", "~/", "$")):
            raise UserError(f"{flag}: {path!r} is relative; use a full path")


def check_program(known: argparse.Namespace, program: Sequence[str], settings: Sequence[str]) -> None:
    """Refuse a program of the user's own with what is for the trainer."""
    if not program:
        raise UserError("--: no program after it; write -- script.py ARG … or -- -m module ARG …")
    for_trainer = [*settings, *source_flags(known)]
    for_trainer += (
        ["--budget"] * bool(known.budget)
        + ["--after-save"] * bool(known.after_save)
        + ["--extend"] * bool(known.extend)
        + ["--export"] * bool(known.export)
        + [command.EVALUATE_ONLY] * known.evaluate_only
        + ["--rehearse"] * known.rehearse
    )
    if for_trainer:
        raise UserError(
            f"{for_trainer[0]}: settings are for the trainer, but there is a program after --; remove one of them"
        )


def check_export(known: argparse.Namespace, settings: Config) -> None:
    """Refuse an export of what is not on one host, and to send one that is not made."""
    sends = settings.tracking.log_model and not (known.rehearse or known.evaluate_only or known.blame)
    if sends and known.slurm is not None:
        raise UserError(
            "--tracking.log_model: a job writes no model; leave it out, and use `llama405b track RUN --model OUT` afterwards"
        )
    if sends and not known.export:
        raise UserError(
            "--tracking.log_model: sends what --export writes; add --export OUT, or use `llama405b track RUN --model OUT`"
        )
    if not known.export:
        return
    if known.evaluate_only or not settings.checkpoint.cadence.saves:
        raise UserError("--export: the run saves nothing; remove it, or set --checkpoint.every")
    if settings.checkpoint.storage == "local":
        raise UserError(
            "--export: with --checkpoint.storage local no host has the whole model; remove it, and use `llama405b export RUN OUT HOSTS`"
        )
