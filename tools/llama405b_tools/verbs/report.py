"""Show a run's loss curve and what its time went into, and write all of it as a page that needs no network.

The page has the loss, evaluations, gradient norm, tokens/s and MFU beside the plan's, the parts of a step, memory, saves, failures
and their causes on one axis of time, GPU-hours by what they went into, versions and settings. While a run trains, and after.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from llama405b.contract.command import OneLineParser
from llama405b.contract.errors import GOOD, UserError
from llama405b.contract.files import write_atomic
from llama405b.contract.paths import RunDir
from llama405b.contract.phrases import reason_of
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.report.draw.page import page
from llama405b_tools.report.draw.summary import Summary
from llama405b_tools.report.draw.terminal import lines_of
from llama405b_tools.report.gather import report_of_run
from llama405b_tools.run.backends import backend_of
from llama405b_tools.run.query import ask_run
from llama405b_tools.verbs.arguments import add_hosts

PLOT_LINES = 14


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    args = _parser().parse(argv)
    backend = backend_of(args.run, args.hosts)
    if waiting := backend.waiting():
        raise UserError(f"{waiting.words}; there is nothing to report yet")
    with Fleet(backend.hosts()) as fleet:
        run, seen = ask_run(fleet, backend.run, elsewhere=backend.elsewhere)
        summary = Summary(run, report_of_run(fleet, run, seen), args.price, fleet.command_to_type("logs", run))
    encoding = sys.stdout.encoding or ""
    width = shutil.get_terminal_size((100, 24)).columns
    for line in lines_of(summary, min(width, 120), PLOT_LINES, plain=not encoding.lower().startswith("utf")):
        print(line)
    out = args.out or _place(run)
    try:
        write_atomic(out, page(summary))
    except OSError as error:
        raise UserError(f"--out: {out} cannot be written: {reason_of(error)}; name another file") from None
    print(f"the whole report: {out}")
    return GOOD


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="llama405b report", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="name of the run")
    add_hosts(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page [runs/RUN/report.html, or RUN.html]")
    parser.add_argument("--price", type=float, default=0.0, metavar="MONEY", help="of a GPU-hour")
    return parser


def _place(run: str) -> Path:
    """Where the page belongs: beside a run's files if it was launched from here."""
    here = RunDir.here(run)
    return here.report if os.access(here.path, os.W_OK) else Path(f"{run}.html")
