"""``llama405b status``: what runs where, and how it goes."""

import json
from collections.abc import Sequence
from typing import Any

from llama405b.contract.errors import FAILED, GOOD
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.remote import slurm
from llama405b_tools.run import jobs, judge
from llama405b_tools.run.guard_record import guard_line
from llama405b_tools.run.judge import Described
from llama405b_tools.run.query import ask, failures_of
from llama405b_tools.text.tables import table
from llama405b_tools.verbs.arguments import hosts_asked, verb_parser


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    parser = verb_parser("status", __doc__)
    parser.add_argument("--json", action="store_true", help="for scripts")
    args = parser.parse_args(argv)
    job = jobs.run_asked(args.run, args.hosts)
    if job and jobs.waits(job):
        print(jobs.words_of(job))
        return FAILED if slurm.state_of(jobs.job_of(job)) in slurm.GONE else GOOD
    with Fleet(hosts_asked(args)) as fleet:
        run, seen = ask(fleet, args.run or job)
    failures = failures_of(seen)
    if args.json:
        hosts = {name: {"error": str(found)} if isinstance(found, HostError) else found for name, found in seen.items()}
        print(
            json.dumps(
                {
                    "run": run,
                    "ok": not failures,
                    "failures": [f"{f.host}: {f.what}" for f in failures],
                    "hosts": hosts,
                }
            )
        )
    else:
        print(f"run {run}")
        print(
            table(
                ("host", "state", "ranks", "phase", "step", "heard"),
                [_row(name, found) for name, found in seen.items()],
            ),
            flush=True,
        )
        if line := guard_line(run):
            print(line)
        print_progress([found for found in seen.values() if isinstance(found, dict)])
        if failures:
            worst = judge.first_failure(failures)
            print(f"{worst.host}: {worst.what}")
    return FAILED if failures else GOOD


def print_progress(found: Sequence[Described]) -> None:
    """Print the last step and the newest checkpoint, where a host knows them."""
    metrics = max((d["metrics"] for d in found if d["metrics"]), key=lambda m: m["step"], default=None)
    if metrics:
        print(
            f"step {metrics['step']}, loss {metrics['loss']:.4f}, {metrics['tokens_per_s']:,.0f} tokens/s, {metrics['step_s']:.2f} s a step"
        )
    saved = max((d["checkpoint"] for d in found if d["checkpoint"]), default=None)
    print(f"newest checkpoint: {saved or 'none yet'}")


def _row(name: str, found: Described | HostError | None) -> tuple[str, ...]:
    if isinstance(found, HostError):
        return name, f"UNREACHABLE: {found}", "—", "—", "—", "—"
    beats: list[dict[str, Any]] = found["heartbeats"] if found else []
    if found is None or not beats:
        return name, judge.state_of(found), "—", "—", "—", "—"
    steps, phases = sorted({b["step"] for b in beats}), sorted({b["phase"] for b in beats})
    age = max(found["now"] - b["time"] for b in beats)  # both by that host's clock
    span = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]}-{steps[-1]}"
    ranks = f"{beats[0]['rank']}" if len(beats) == 1 else f"{beats[0]['rank']}-{beats[-1]['rank']}"
    return name, judge.state_of(found), ranks, "/".join(phases), span, f"{age:.0f} s ago"
