"""Show what every rank is doing and which one holds up the run, without disturbing it.

Each host reports its ranks' stacks, what they wait for, and the state of its kernel, disks and links. The report is saved in
runs/RUN/autopsy on this machine. Exits with 0 if the run makes progress, 3 if it hangs, 1 if that is unclear.
"""

import json
from collections.abc import Sequence

from llama405b.contract.errors import EXIT_FAILED, EXIT_OK, EXIT_UNFIT, UserError, parse_seconds
from llama405b.contract.reader import dumps
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.run.backends import backend_of
from llama405b_tools.run.diagnosis import Autopsy, DiagnosisKind, save_autopsy, take_autopsy
from llama405b_tools.run.hang import HANG_AFTER_S
from llama405b_tools.run.query import ask_run
from llama405b_tools.verbs.arguments import verb_parser

EXIT_CODES: dict[DiagnosisKind, int] = {
    DiagnosisKind.MOVES: EXIT_OK,
    DiagnosisKind.HANGS: EXIT_UNFIT,
    DiagnosisKind.UNCLEAR: EXIT_FAILED,
    DiagnosisKind.OVER: EXIT_FAILED,
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
    hang_after_s = parse_seconds(args.hang_after, "--hang-after")
    backend = backend_of(args.run, args.hosts)
    if backend.has_local_files:
        raise UserError(
            f"run {backend.run} is a Slurm job, and its nodes are not reached over SSH; if SSH works, name a hosts file that lists them"
        )
    with Fleet(backend.hosts()) as fleet:
        handle = ask_run(fleet, backend.run, has_local_files=False)
        if not any(host_run.alive or host_run.leftovers for host_run in handle.host_runs.values()):
            raise UserError(f"run {handle.run} is not running; `{handle.command('status')}` says how it ended")
        autopsy = take_autopsy(fleet, handle.fetch_plan(), hang_after_s)
    directory = save_autopsy(autopsy)
    if args.json:
        print(json.dumps(_json_record(autopsy, str(directory or ""))))
    else:
        print("\n".join(autopsy.report()))
        print(
            f"full report: {directory}"
            if directory
            else "not saved: the run's directory on this machine is not writable"
        )
    return EXIT_CODES[autopsy.diagnosis.verdict]


def _json_record(autopsy: Autopsy, directory: str) -> dict[str, object]:
    """Return the autopsy as JSON, for scripts."""
    culprit = autopsy.diagnosis.culprit
    return {
        "run": autopsy.run,
        "attempt": autopsy.attempt,
        "verdict": autopsy.diagnosis.verdict,
        "words": autopsy.diagnosis.words,
        "culprit": json.loads(dumps(culprit)) if culprit else None,
        "lost": autopsy.unreachable,
        "took_s": autopsy.elapsed_s,
        "kept": directory,
    }
