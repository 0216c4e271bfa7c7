"""``llama405b stop``: end every process of a run on every host, and verify that none is left."""

from collections.abc import Sequence

from llama405b.errors import FAILED, GOOD, UserError
from llama405b_tools.commands import check_run_name
from llama405b_tools.fleet import Fleet, Outcome, read_hosts
from llama405b_tools.status import ask, print_table, verb_parser
from llama405b_tools.transport import HostError

STOP_TIMEOUT_S = 60.0


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    args = verb_parser("stop", __doc__).parse_args(argv)
    with Fleet(read_hosts(args.hosts)) as fleet:
        run = check_run_name(args.run) if args.run else ask(fleet, None)[0]
        ends = stop(fleet, run)
    if not any(isinstance(end, HostError) or end["known"] for end in ends.values()):
        raise UserError(f"--run: no host knows a run {run!r}; `llama405b status` shows the newest")
    print(f"run {run}")
    print_table(("host", "before", "now"), [_row(name, end) for name, end in ends.items()])
    bad = {name: end for name, end in ends.items() if isinstance(end, HostError) or end["left"]}
    for name, end in list(bad.items())[:1]:
        what = (
            f"could not be asked: {end}" if isinstance(end, HostError) else f"processes {end['left']} cannot be ended"
        )
        print(f"{name}: {what}; run the same command again once it can be reached")
    return FAILED if bad else GOOD


def stop(fleet: Fleet, run: str) -> dict[str, Outcome]:
    """End the run on every host at once."""
    return fleet.ask_all("stop", {name: {"run": run, "host": name} for name in fleet.hosts}, STOP_TIMEOUT_S)


def _row(name: str, end: Outcome) -> tuple[str, str, str]:
    if isinstance(end, HostError):
        return name, "—", f"NOT VERIFIED: {end}"
    before = "running" if end["was_alive"] else f"{end['swept']} processes left over" if end["swept"] else "not running"
    return name, before, f"NOT ENDED: {end['left']}" if end["left"] else "no process left"
