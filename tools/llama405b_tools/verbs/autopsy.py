"""Show what every rank is doing and which one holds up the run, without disturbing it.

Each host reports its ranks' stacks, what they wait for, and the state of its kernel, disks and links. The report is saved in
runs/RUN/autopsy on this machine. Exits with 0 if the run makes progress, 3 if it hangs, 1 if that is unclear.
"""

import json
from collections.abc import Sequence

from llama405b.contract.errors import FAILED, GOOD, UNFIT, UserError, seconds
from llama405b.contract.reader import dumps
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.run.autopsy import Autopsy, Verdict, keep_autopsy, take_autopsy
from llama405b_tools.run.backends import backend_of
from llama405b_tools.run.judge import HANG_AFTER_S
from llama405b_tools.run.query import ask_run, known_of, planned
from llama405b_tools.verbs.arguments import verb_parser

EXIT_CODES: dict[Verdict, int] = {
    Verdict.MOVES: GOOD,
    Verdict.HANGS: UNFIT,
    Verdict.UNCLEAR: FAILED,
    Verdict.OVER: FAILED,
}


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    parser = verb_parser("autopsy", __doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--hang-after",
        default=f"{HANG_AFTER_S:.0f}s",
        metavar="TIME",
        help=f"call the run hung when every rank is silent this long and for 5 steps, as cluster-top does [{HANG_AFTER_S:.0f}s]",
    )
    args = parser.parse(argv)
    hang_after_s = seconds(args.hang_after, "--hang-after")
    backend = backend_of(args.run, args.hosts)
    if backend.elsewhere:
        raise UserError(
            f"run {backend.run} is a Slurm job, and its nodes are not reached over SSH; if SSH works, name a hosts file that lists them"
        )
    with Fleet(backend.hosts()) as fleet:
        run, seen = ask_run(fleet, backend.run, elsewhere=False)
        known = known_of(seen)
        if not any(found.alive or found.leftovers for found in known.values()):
            raise UserError(f"run {run} is not running; `{fleet.command_to_type('status', run)}` says how it ended")
        autopsy = take_autopsy(fleet, planned(fleet, next(iter(known)), run), hang_after_s)
    place = keep_autopsy(autopsy)
    if args.json:
        print(json.dumps(_record(autopsy, str(place or ""))))
    else:
        print("\n".join(autopsy.report()))
        print(f"full report: {place}" if place else "not saved: the run's directory on this machine is not writable")
    return EXIT_CODES[autopsy.diagnosis.verdict]


def _record(autopsy: Autopsy, place: str) -> dict[str, object]:
    """Return the autopsy as JSON, for scripts."""
    culprit = autopsy.diagnosis.culprit
    return {
        "run": autopsy.run,
        "attempt": autopsy.attempt,
        "verdict": autopsy.diagnosis.verdict,
        "words": autopsy.diagnosis.words,
        "culprit": json.loads(dumps(culprit)) if culprit else None,
        "lost": autopsy.lost,
        "took_s": autopsy.took_s,
        "kept": place,
    }
