"""Ask the head of a run for what a report of it shows."""

from llama405b.contract.errors import RunError, UserError
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.outcomes import replies
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.remote.messages.account_request import HeadRequest
from llama405b_tools.remote.messages.report import ReportReply
from llama405b_tools.run.query import Seen

TIMEOUT_S = 120.0  # a long run's metrics are a hundred megabytes


def report_of_run(fleet: Fleet, run: str, seen: Seen) -> ReportReply:
    """Ask the host of rank 0.

    Raises:
        RunError: It cannot be asked.
        UserError: The run has nothing to report: no step and no evaluation.
    """
    reply = ask_report(fleet, run, seen)
    if not (reply.points or reply.evaluations):
        raise UserError(
            f"run {run}: no step is in its metrics; it takes none yet, or it is a program of your own, which writes none"
        )
    return reply


def ask_report(fleet: Fleet, run: str, seen: Seen) -> ReportReply:
    """Ask the host of rank 0, whatever there is to report.

    Raises:
        RunError: It cannot be asked.
    """
    head = next((name for name, known in replies(seen).items() if known and known.first_rank == 0), "")
    if head not in fleet.hosts:
        lost = next((f": {name}: {why}" for name, why in seen.items() if isinstance(why, HostError)), "")
        raise RunError(f"run {run}: the host of its rank 0, which has its metrics, cannot be asked{lost}")
    return fleet.ask(head, "report_of", HeadRequest(run, head), ReportReply, TIMEOUT_S)
