"""Upload the numbers of a run that its trackers do not have yet.

Run it on the host of rank 0. A run that trains uploads by itself.

Steps that were repeated after a resume keep their first values there.
"""

import argparse
import fcntl
import math
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from llama405b.contract.errors import EXIT_FAILED, EXIT_OK, UserError, fmt_if
from llama405b.contract.files import set_private_umask
from llama405b.contract.paths import EXPORT_RECORD, RunDir
from llama405b.settings.parser import OneLineParser
from llama405b.settings.schema import TRACKERS
from llama405b.tracking.feed import POLL_S, TrackerFeed
from llama405b.tracking.uploads import CLOSE_TIMEOUT_S


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="llama405b track", description=__doc__)
    parser.add_argument("--run", help="name or directory of the run [the newest in ./runs]")
    parser.add_argument("--only", choices=TRACKERS, help="upload to this tracker only")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="also upload the model that export wrote there to W&B, as an artifact"
    )
    parser.add_argument(
        "--again", action="store_true", help="upload everything again as another run, if the tracker lost it"
    )
    parser.add_argument("--until-closed", type=int, metavar="FD", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    args = _parser().parse(argv)
    set_private_umask()
    run = _find_run(args.run)
    if args.model and not (args.model / EXPORT_RECORD).is_file():
        raise UserError(f"--model: {args.model} was not written by `llama405b export`; name a directory that was")
    only = args.only or ("wandb" if args.model else None)
    names = [name for name in TrackerFeed.tracker_names(run) if only in (None, name)]
    if not names:
        raise UserError(
            f"{run.name}: its settings have no tracker; launch with --tracking.to, or add it to {run.config}"
        )
    run.tracking.mkdir(parents=True, exist_ok=True)
    codes = [send_metrics(run, name, args.until_closed, args.model, resend=args.again) for name in names]
    return max(codes)


def _find_run(name: str | None) -> RunDir:
    """Return the run of a name or directory; None: the newest here."""
    places = [Path(name), RunDir.from_name(name).path] if name else Path("runs").glob("*")
    runs = [run for run in map(RunDir, places) if run.config.is_file()]
    if not runs:
        raise UserError(
            f"--run: ./runs has no run{fmt_if(' {!r}', name)}; cd to where it was launched, or name its directory"
        )
    return runs[0] if name else max(runs, key=lambda run: run.config.stat().st_mtime)


def send_metrics(run: RunDir, name: str, pipe: int | None, model: Path | None = None, *, resend: bool = False) -> int:
    """Upload until the other end of the pipe closes; without a pipe, once. Return the exit code.

    ``model``: directory of an exported model to upload, too; ``resend``: repeat what was uploaded before.
    """
    with run.tracking_lock(name).open("w") as lock:
        while not _try_lock(lock):  # the previous attempt's process may be about to end
            if pipe is None or _is_closed(pipe):
                raise UserError(
                    f"{run.name}: another process already uploads its numbers to {name}; wait until the run has ended"
                )
        if resend:
            run.sent(name).unlink(missing_ok=True)
        feed = TrackerFeed(name, run, print_line)
        if pipe is not None:
            while not _is_closed(pipe):
                feed.send()
            signal.alarm(math.ceil(CLOSE_TIMEOUT_S))  # ends this process even if an upload hangs
        if model:
            feed.send(now=True)
            feed.send_model(model)
        feed.end()
    return EXIT_FAILED if feed.pending else EXIT_OK


def _try_lock(lock: TextIO) -> bool:
    """Take a lock if it is free; return whether it was."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_closed(pipe: int) -> bool:
    """Wait ``POLL_S`` at most; return whether the other end of a pipe is closed."""
    return bool(select.select([pipe], [], [], POLL_S)[0])


def print_line(line: str) -> None:
    """Print a line."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
