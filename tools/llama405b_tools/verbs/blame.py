"""Find the document that made a step go wrong, and write a skip list that excludes it.

Each document of the step is run through the model alone, with the weights of the last checkpoint before the step, on the run's hosts.
The report shows its loss, its gradient norm, and how far they are from those of the other documents. Weights do not change. This is a
separate run that takes about one step's time per document; the original run must have ended. Resume with --data.skip LIST to mask the
listed documents. Other options are those of launch: repeat --env, --setup-line and --secret as for the original run.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from llama405b.contract.checkpoints import REPLICA_PREFIX, list_committed, step_of
from llama405b.contract.errors import UserError
from llama405b.contract.paths import RunDir
from llama405b.settings.parser import OneLineParser
from llama405b_tools.agent import describe
from llama405b_tools.hosts.fleet import Fleet, program_name
from llama405b_tools.run.backends import backend_of
from llama405b_tools.run.query import STATUS_TIMEOUT_S, ask_hosts
from llama405b_tools.run.screen import show
from llama405b_tools.verbs import launch
from llama405b_tools.verbs.arguments import verb_parser
from llama405b_tools.verbs.report import request_report


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    args, options = _parser().parse_known_args(argv)
    if args.step < 1:
        raise UserError(f"STEP: {args.step} is not a step; use 1 or more")
    backend = backend_of(args.run, args.hosts)
    if backend.run and backend.has_local_files:
        raise UserError(
            f"run {backend.run} is a Slurm job, so this must be one too: `{_slurm_command(backend.run, args.step)}`"
        )
    with Fleet(backend.hosts()) as fleet:
        handle = ask_hosts(fleet, backend.run)
        run, reply = handle.run, request_report(handle)
        if reply.alive:
            raise UserError(
                f"run {run} is still training on the same GPUs; `{handle.command('stop')}` saves and stops it"
            )
        if not reply.settings:
            raise UserError(f"run {run}: no config.toml; name a run of the trainer, not of your own program")
        last_step = max([reply.last.step if reply.last else 0, *(event.step or 0 for event in reply.events)])
        if args.step > last_step + 1:
            raise UserError(f"STEP: run {run} reached step {last_step}; name one up to {last_step + 1}")
        parts_reply = fleet.call(reply.hosts[0][0], describe.parts, STATUS_TIMEOUT_S, run)
    earlier_parts = [
        part
        for part in parts_reply.parts
        if part.step < args.step and not Path(part.path).parent.name.startswith(REPLICA_PREFIX)
    ]
    resume = ["--resume", max(earlier_parts, key=lambda part: part.step).path] if earlier_parts else []
    if not earlier_parts:
        show(
            f"no checkpoint before step {args.step} is left; using the run's initial weights, which have seen none of the documents"
        )
    with tempfile.TemporaryDirectory(prefix="llama405b-blame-") as directory:
        settings = Path(directory) / "config.toml"
        settings.write_text(reply.settings, encoding="utf-8")
        name = ["--run", f"{run}-blame-{args.step}"]
        launch_argv = [*name, *options, "--config", str(settings), "--blame", str(args.step), *resume, "--follow"]
        return launch.main([str(args.hosts), *launch_argv])


def _slurm_command(run: str, step: int) -> str:
    """Return the command to type for a Slurm job; its files are on this machine."""
    run_dir = RunDir.from_name(run)
    earlier_checkpoints = [path for path in list_committed(run_dir.checkpoints) if step_of(path) < step]
    resume = f" --resume {earlier_checkpoints[-1]}" if earlier_checkpoints else ""
    return f"{program_name()} launch --slurm OPTIONS --run {run}-blame-{step} --config {run_dir.config} --blame {step}{resume}"


def _parser() -> OneLineParser:
    return verb_parser("blame", __doc__, {"step": {"metavar": "STEP", "type": int, "help": "the step that went wrong"}})
