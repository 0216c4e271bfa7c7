"""``llama405b status``: what runs where, and how it goes."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from llama405b.contract.errors import FAILED, GOOD, UserError
from llama405b.contract.files import read_json
from llama405b.contract.paths import RunDir
from llama405b_tools import runs, slurm
from llama405b_tools.clean import clean
from llama405b_tools.fleet import Fleet, read_hosts
from llama405b_tools.fold import fold_names
from llama405b_tools.hosts import Host
from llama405b_tools.runs import Described, Failure
from llama405b_tools.transport import HostError

STATUS_TIMEOUT_S = 30.0


class VerbParser(argparse.ArgumentParser):
    """A parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        """Refuse."""
        raise UserError(f"{message}; see `{self.prog} --help`")


def verb_parser(verb: str, description: str | None) -> VerbParser:
    """The arguments that status, stop, logs and attach share."""
    parser = VerbParser(prog=f"llama405b {verb}", description=description, allow_abbrev=False)
    parser.add_argument(
        "hosts", nargs="?", type=Path, default=Path("hosts"), metavar="HOSTS", help="hosts file [hosts]"
    )
    parser.add_argument("--run", help="the run's name [the only live one, else the newest]")
    return parser


def hosts_asked(args: argparse.Namespace) -> tuple[Host, ...]:
    """The hosts of the hosts file; or the nodes of the job, where the run that is meant is one.

    Raises:
        UserError: The hosts file cannot be read, or the job has no nodes yet.
    """
    job = slurm.run_asked(args.run, args.hosts)
    if job is None:
        return read_hosts(args.hosts)
    hosts = slurm.hosts_of(job)
    if not hosts:
        raise UserError(f"{slurm.words_of(job)}; it has no nodes to ask")
    return hosts


def ask(fleet: Fleet, run: str | None) -> tuple[str, dict[str, Described | HostError | None]]:
    """Find the run that is meant, and what each host says of it (None: it does not know it).

    Raises:
        UserError: There is no such run, or several are alive.
    """
    if run:
        check_hosts(fleet, run)
    outcomes = fleet.ask_all("status", {name: {"host": name, "run": run} for name in fleet.hosts}, STATUS_TIMEOUT_S)
    answers = {name: found["runs"] for name, found in outcomes.items() if isinstance(found, dict)}
    if not answers:
        name, fault = next((name, found) for name, found in outcomes.items())
        raise HostError(f"no host can be asked: {name}: {fault}")
    chosen = runs.choose(answers, run)
    seen: dict[str, Described | HostError | None] = {}
    for name, found in outcomes.items():
        if isinstance(found, HostError):
            seen[name] = found
        else:
            seen[name] = next((described for described in found["runs"] if described["run"] == chosen), None)
    return chosen, seen


def check_hosts(fleet: Fleet, run: str) -> None:
    """See that a run which was launched from here is one of these hosts'.

    Raises:
        UserError: It is on others, whose hosts file was not named.
    """
    try:
        names = [str(node["name"]) for node in (read_json(RunDir.here(run).plan) or {})["nodes"]]
    except (KeyError, TypeError):  # not launched from here
        return
    if names and not set(names) & set(fleet.hosts):
        raise UserError(f"--run: {run!r} was launched on {fold_names(names)}; name the hosts file that has them")


def newest_checkpoint(fleet: Fleet, run: str) -> str | None:
    """The newest complete checkpoint of a run that any host sees."""
    outcomes = fleet.ask_all("status", {name: {"host": name, "run": run} for name in fleet.hosts}, STATUS_TIMEOUT_S)
    found = [d["checkpoint"] for answer in outcomes.values() if isinstance(answer, dict) for d in answer["runs"]]
    return max((path for path in found if path), key=runs.step_of, default=None)


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    parser = verb_parser("status", __doc__)
    parser.add_argument("--json", action="store_true", help="for scripts")
    args = parser.parse_args(argv)
    job = slurm.run_asked(args.run, args.hosts)
    if job and slurm.waits(job):
        print(slurm.words_of(job))
        return FAILED if slurm.state_of(slurm.job_of(job)) in slurm.GONE else GOOD
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
        print_table(
            ("host", "state", "ranks", "phase", "step", "heard"),
            [_row(name, found) for name, found in seen.items()],
        )
        if line := guard_line(run):
            print(line)
        print_progress([found for found in seen.values() if isinstance(found, dict)])
        if failures:
            worst = runs.first_failure(failures)
            print(f"{worst.host}: {worst.what}")
    return FAILED if failures else GOOD


def failures_of(seen: dict[str, Described | HostError | None]) -> list[Failure]:
    """Every host that is not as it should be."""
    failures = []
    for name, found in seen.items():
        failure = Failure(name, str(found), origin=2) if isinstance(found, HostError) else runs.failure_of(name, found)
        if failure:
            failures.append(failure)
    return failures


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns, as wide as they need to be."""
    table = [list(headings), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in table) for i in range(len(headings))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    sys.stdout.flush()


def guard_line(run: str) -> str:
    """What the guard of a run on this machine does; '' where there is none."""
    from llama405b_tools import guard

    found = guard.of_run(run)
    if found is None:
        return ""
    record, lives = found
    if record["state"] in ("watching", "recovering") and lives is False:
        died = f"process {record['pid']} of this machine died while {record['state']}"
        return f"guard: GONE ({died}); nobody restarts this run: repeat its launch command to have it guarded again"
    done = f"restarted {record['restarts']} times, {record['in_vain']} of at most {record['limit']} in vain"
    message = f"; {record['message']}" if record["message"] else ""
    where = "" if lives is not None else f" on {str(record['machine']).partition(' ')[0]}"
    return clean(f"guard{where}: {record['state']}, {done}{message}")


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
        return name, runs.state_of(found), "—", "—", "—", "—"
    steps, phases = sorted({b["step"] for b in beats}), sorted({b["phase"] for b in beats})
    age = max(found["now"] - b["time"] for b in beats)  # both by that host's clock
    span = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]}-{steps[-1]}"
    ranks = f"{beats[0]['rank']}" if len(beats) == 1 else f"{beats[0]['rank']}-{beats[-1]['rank']}"
    return name, runs.state_of(found), ranks, "/".join(phases), span, f"{age:.0f} s ago"
