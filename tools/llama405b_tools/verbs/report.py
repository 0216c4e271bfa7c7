"""Show a run's loss curve and where its time went, and write an HTML page that needs no network.

The page shows loss, evaluations, gradient norm, tokens/s and MFU compared with the plan, step phases, memory, saves, and failures
with their causes on one time axis; GPU-hours by use; versions and settings. Works during and after training.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from llama405b.contract.errors import EXIT_OK, RunError, UserError, reason_of
from llama405b.contract.files import write_atomic
from llama405b.contract.paths import RunDir
from llama405b.settings.parser import OneLineParser
from llama405b_tools.agent import reports
from llama405b_tools.agent.reports import ReportReply
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.report.page import format_report, render_page
from llama405b_tools.report.summary import Summary
from llama405b_tools.run.backends import backend_of
from llama405b_tools.run.query import RunHandle, ask_run
from llama405b_tools.verbs.arguments import verb_parser

GATHER_TIMEOUT_S = 120.0  # a long run's metrics can be a hundred megabytes


def fetch_report(handle: RunHandle) -> ReportReply:
    """Fetch the report from the host of rank 0; refuse if it has no steps."""
    reply = request_report(handle)
    if not (reply.points or reply.evaluations):
        raise UserError(
            f"run {handle.run}: its metrics have no step; it has not taken one yet, or it runs your own program, which writes none"
        )
    return reply


def request_report(handle: RunHandle) -> ReportReply:
    """Fetch the report from the host of rank 0, even if it is empty."""
    run, head, fleet = handle.run, handle.head, handle.fleet
    if head not in fleet.hosts:
        fault_note = next((f": {name}: {why}" for name, why in handle.unreachable.items()), "")
        raise RunError(f"run {run}: cannot reach the host of its rank 0, which has its metrics{fault_note}")
    return fleet.call(head, reports.report_of, GATHER_TIMEOUT_S, run, head)


PLOT_LINES = 14


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    args = _parser().parse(argv)
    backend = backend_of(args.run, args.hosts)
    if waiting := backend.waiting():
        raise UserError(f"{waiting.description}; there is nothing to report yet")
    with Fleet(backend.hosts()) as fleet:
        handle = ask_run(fleet, backend.run, has_local_files=backend.has_local_files)
        summary = Summary(handle.run, fetch_report(handle), args.price, handle.command("logs"))
    encoding = sys.stdout.encoding or ""
    width = shutil.get_terminal_size((100, 24)).columns
    for line in format_report(summary, min(width, 120), PLOT_LINES, plain=not encoding.lower().startswith("utf")):
        print(line)
    out = args.out or _default_path(handle.run)
    try:
        write_atomic(out, render_page(summary))
    except OSError as error:
        raise UserError(f"--out: {out} cannot be written: {reason_of(error)}; name another file") from None
    print(f"full report: {out}")
    return EXIT_OK


def _parser() -> OneLineParser:
    parser = verb_parser("report", __doc__)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write the page [runs/RUN/report.html, or RUN.html]"
    )
    parser.add_argument("--price", type=float, default=0.0, metavar="MONEY", help="price per GPU-hour")
    return parser


def _default_path(run: str) -> Path:
    """Return the default path of the page: in the run's directory if it was launched from here."""
    run_dir = RunDir.from_name(run)
    return run_dir.report if os.access(run_dir.path, os.W_OK) else Path(f"{run}.html")
