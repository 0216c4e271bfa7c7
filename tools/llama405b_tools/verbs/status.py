"""Show a run's progress and its state on every host."""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence

from llama405b.contract.accounting import Account
from llama405b.contract.errors import UserError, code_for, given
from llama405b.contract.reader import Json
from llama405b.contract.records import EvaluationMetrics
from llama405b_tools.agent.messages import HostRun
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.transport import HostError, unanswered
from llama405b_tools.run import judge, query
from llama405b_tools.run.backends import backend_of
from llama405b_tools.run.judge import Failure, State, failure_words, log_words, state_words
from llama405b_tools.run.query import (
    GuardStatus,
    Seen,
    account_line,
    account_of_run,
    all_runs,
    ask_run,
    failures_of,
    guard_line,
    guard_of_hosts,
    heard_by,
    incident_line,
    known_of,
    progress,
    states_of,
)
from llama405b_tools.text.figures import format_table, number
from llama405b_tools.text.words import fold_numbers
from llama405b_tools.verbs.arguments import verb_parser


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    parser = verb_parser("status", __doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--all", action="store_true", help="list the newest runs on these hosts instead")
    args = parser.parse(argv)
    if args.all and args.run:
        raise UserError("--run cannot be used with --all, which lists every run")
    backend = backend_of(args.run, args.hosts)
    if waiting := backend.waiting():
        print(waiting.words)
        return code_for(waiting.is_over)
    with Fleet(backend.hosts()) as fleet:
        if args.all:
            return print_runs(fleet, as_json=args.json)
        run, seen = ask_run(fleet, backend.run, elsewhere=backend.elsewhere)
        account, logs = account_of_run(fleet, run, seen), fleet.command_to_type("logs", run)
    return print_run(run, seen, account, as_json=args.json, logs=logs)


def print_run(run: str, seen: Seen, account: Account | None, *, as_json: bool, logs: str) -> int:
    """Print the hosts' reports on a run; return the exit code. ``logs``: the command that shows its logs."""
    known = known_of(seen)
    failures, told = failures_of(seen), list(known.values())
    guard = guard_of(run, told, is_needed=bool(failures))
    faults = (
        bool(failures) or any(reply.unsaved or reply.unsent for reply in told) or (guard is not None and guard.gone)
    )
    if as_json:
        print(json.dumps(_record(run, seen, failures, guard, account, is_good=not faults)))
        return code_for(faults)
    mesh = next((reply.mesh.told for reply in told if reply.mesh), "")
    print(f"run {run}{given(', ranks as {}', mesh)}")
    headings = ("host", "state", "ranks", "phase", "step", "heard")
    states = states_of(seen)
    print(format_table(headings, [_row(name, reply, states.get(name)) for name, reply in seen.items()]), flush=True)
    if guard:
        print(guard_line(guard))
    if account:
        print(account_line(account, "rank-h"))
        for incident in account.incidents:
            print(f"  {incident_line(account, incident, 'rank-h')}")
    print_progress(told)
    print_copies(known)
    if failures:
        worst = judge.first_failure(failures)
        print(f"{worst.host}: {failure_words(worst)}{log_words(worst, logs)}")
    return code_for(faults)


def guard_of(run: str, told: Sequence[HostRun], *, is_needed: bool) -> GuardStatus | None:
    """Return the run's guard; None if there is none, or it is gone and no longer needed."""
    guard = guard_of_hosts(run, heard_by(told), time.time())
    if guard and guard.gone and not (is_needed or guard.finishes or any(found.alive for found in told)):
        return None
    return guard


def _record(
    run: str,
    seen: Seen,
    failures: Sequence[Failure],
    guard: GuardStatus | None,
    account: Account | None,
    *,
    is_good: bool,
) -> dict[str, Json]:
    """Return the status as JSON, for scripts."""
    hosts: dict[str, Json] = {}
    for name, found in seen.items():
        if isinstance(found, HostError):
            hosts[name] = {"error": str(found)}
        else:
            hosts[name] = dataclasses.asdict(found) if found else None
    said = [f"{failure.host}: {failure_words(failure)}" for failure in failures]
    guarded: Json = {"state": guard.state.state, "gone": guard.gone, "words": guard_line(guard)} if guard else None
    counted: Json = dataclasses.asdict(account) | {"goodput": account.goodput} if account else None
    return {"run": run, "ok": is_good, "failures": said, "guard": guarded, "account": counted, "hosts": hosts}


def print_runs(fleet: Fleet, *, as_json: bool) -> int:
    """Print every run that the hosts know, and the hosts that could not be reached."""
    outcomes = all_runs(fleet)
    lost, runs = unanswered(outcomes), query.by_run(outcomes)
    if as_json:
        known = {name: {host: dataclasses.asdict(run) for host, run in of.items()} for name, of in runs.items()}
        print(json.dumps({"runs": known, "lost": lost}))
        return code_for(lost)
    if runs:
        print(format_table(query.HEADINGS, [query.row(name, of) for name, of in runs.items()]), flush=True)
    elif not lost:
        print("no runs on these hosts")
    for name, why in lost.items():
        print(f"{name}: UNREACHABLE: {why}")
    return code_for(lost)


def print_progress(on_hosts: Sequence[HostRun]) -> None:
    """Print the last step and the newest checkpoint, if a host knows them."""
    saved, last = progress(on_hosts)
    only_evaluates = isinstance(last, EvaluationMetrics)
    if isinstance(last, EvaluationMetrics):
        print(f"evaluation of step {last.step}: loss {number(last.evaluation_loss, '.4f')}")
    elif last:
        print(f"step {last.step}, loss {last.loss:.4f}, {last.rate:,.0f} tokens/s, {last.step_s:.2f} s per step")
    trains = any(run.heartbeats for run in on_hosts) and not only_evaluates
    if saved or trains:
        print(f"newest checkpoint: {saved or 'none yet'}")
    for unsaved in {run.unsaved for run in on_hosts} - {""}:
        print(f"NOT SAVED: {unsaved}")
    for unsent in {run.unsent for run in on_hosts} - {""}:
        print(f"AFTER SAVE FAILED: {unsent}; checkpoints are kept until it succeeds")


def print_copies(found: Mapping[str, HostRun]) -> None:
    """Print the newest checkpoint that survives the loss of a host, and why a newer one is not replicated."""
    copies = {name: each.copied for name, each in found.items() if each.copied}
    if not copies:
        return
    least = min(copy.step for copy in copies.values())
    what = f"step {least}" if least else "nothing yet; losing one host loses all checkpoints"
    print(f"copied to the next host: {what}")
    for name, copy in copies.items():
        if copy.fault:
            print(f"{name}: not copied: {copy.fault}")


def _row(name: str, found: HostRun | HostError | None, standing: State | None) -> tuple[str, ...]:
    if isinstance(found, HostError) or standing is None:
        return name, f"UNREACHABLE: {found}", "—", "—", "—", "—"
    state = state_words(standing)
    if found is None or not found.heartbeats:
        return name, state, "—", "—", "—", "—"
    beats = found.heartbeats
    steps = sorted(beat.step for beat in beats)
    phases = "/".join(sorted({str(beat.phase) for beat in beats}))
    age_s = max(found.now - beat.time for beat in beats)  # both times are by that host's clock
    return (
        name,
        state,
        fold_numbers([beat.rank for beat in beats]),
        phases,
        "-".join(map(str, sorted({steps[0], steps[-1]}))),
        f"{age_s:.0f} s ago",
    )
