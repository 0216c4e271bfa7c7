"""The training program: torchrun starts one process per rank (``-m llama405b.train``)."""

import contextlib
import gc
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

from llama405b import extend
from llama405b.commands.blame_step import blame
from llama405b.commands.evaluate_only import evaluate_only, refuse_trained
from llama405b.contract.errors import EXIT_FAILED, EXIT_OK, UserError
from llama405b.contract.files import set_private_umask
from llama405b.contract.paths import RunDir
from llama405b.contract.records import Cause, CauseKind, EventKind, Phase, describe_rank_exit
from llama405b.distributed import ranks
from llama405b.settings import command
from llama405b.training.build import resolve_config
from llama405b.training.context import RankContext, cause_of
from llama405b.training.journal import HeartbeatWriter, Journal
from llama405b.training.requests import StopSignal
from llama405b.training.setup import build_trainer


def main(argv: Sequence[str]) -> int:
    """Run a training command; return the exit code."""
    heartbeat: HeartbeatWriter | None = None
    try:
        invocation = command.parse(argv)
        stop = StopSignal()
        set_private_umask()
        run = RunDir(invocation.run_dir)
        if invocation.is_evaluation:
            signal.signal(
                signal.SIGUSR1, lambda *_: sys.exit(EXIT_OK)
            )  # a stop ends an evaluation at once: there is nothing to save
            refuse_trained(run)
        heartbeat = HeartbeatWriter(run, ranks.rank_from_environment())
        ranks.enable_flight_recorder(run.flight(ranks.rank_from_environment().index))
        ranks.set_gpu_env(invocation.config.parallel)
        rank = ranks.join_process_group(invocation.config.parallel.device, invocation.config.timeouts.load)
        extend.use(invocation.config.training.extend)
        config = resolve_config(invocation.config, invocation.preset, rank)
        context = RankContext.from_rank(ranks.with_mesh(rank, config.parallel), heartbeat)
        if invocation.blame_step:
            blame(config, invocation.resume, invocation.blame_step, context)
        elif invocation.is_evaluation:
            evaluate_only(config, invocation.resume, context)
        else:
            with contextlib.closing(build_trainer(config, invocation.resume, context, stop)) as trainer:
                trainer.run_steps()
        heartbeat.enter_phase(Phase.DONE)
        ranks.leave_process_group()
    except Exception as error:
        cause = cause_of(error, heartbeat)
        report_end(cause, heartbeat)
        if cause.kind is CauseKind.LOST_PEER:
            return EXIT_FAILED
        if isinstance(error, UserError):
            return error.exit_code
        raise
    return 0


def report_end(cause: Cause, heartbeat: HeartbeatWriter | None) -> None:
    """Report why this rank ends: on standard error, in its heartbeat, and as an event if all ranks end for it."""
    print(f"llama405b train: {describe_rank_exit(cause)}", file=sys.stderr, flush=True)
    if cause.kind is CauseKind.LOST_PEER:  # message of gloo or NCCL
        print(cause.detail, file=sys.stderr, flush=True)
    if heartbeat is None:
        return
    heartbeat.record_failure(cause)
    if cause.kind in (CauseKind.REFUSED, CauseKind.FOLLOWED, CauseKind.NOT_FINITE, CauseKind.SPIKE):
        Journal(heartbeat.run, heartbeat.rank).write_event(EventKind.REFUSED, cause=cause)


class _LossyOutput:
    """A stream that drops text it cannot write: a full disk under a log must not end a rank."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write text; ignore OSError."""
        with contextlib.suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush; ignore OSError."""
        with contextlib.suppress(OSError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def run_and_exit() -> NoReturn:
    """Run the program and exit immediately, without the interpreter's shutdown.

    During that shutdown, torch's threads abort a rank whose peers die (its exit code and message would be lost), and a stop signal finds
    no handler and kills the process.
    """
    gc.set_threshold(700)  # Python's default (see own_python): garbage that holds GPU memory must be freed soon
    code: object = EXIT_FAILED
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an odd locale must not end a rank either
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = _LossyOutput(sys.stdout), _LossyOutput(sys.stderr)
    try:
        code = main(sys.argv[1:])
    except SystemExit as system_exit:  # argparse's --help
        code = system_exit.code or EXIT_OK
    except BaseException:  # noqa: BLE001 - printed as the interpreter would
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else EXIT_FAILED)


if __name__ == "__main__":
    run_and_exit()
