"""Show a run's progress and its state on every host."""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence

from llama405b.contract.accounting import Account
from llama405b.contract.errors import UserError, exit_code_for, fmt_if
from llama405b.contract.reader import Json
from llama405b.contract.records import EvaluationMetrics
from llama405b_tools.agent.messages import HostRun
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.transport import HostError, failure_texts
from llama405b_tools.run import judge, query
from llama405b_tools.run.backends import backend_of
from llama405b_tools.run.judge import Failure, HostRunState, failure_words, format_state, log_words
from llama405b_tools.run.query import (
    GuardStatus,
    RunHandle,
    account_line,
    all_runs,
    ask_run,
    guard_line,
    guard_of_hosts,
    guard_reports,
    incident_line,
    run_progress,
)
from llama405b_tools.text.figures import fmt_or_dash, format_columns, hour_unit
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
        print(waiting.description)
        return exit_code_for(waiting.is_over)
    with Fleet(backend.hosts()) as fleet:
        if args.all:
            return print_runs(fleet, as_json=args.json)
        handle = ask_run(fleet, backend.run, has_local_files=backend.has_local_files)
        account = handle.fetch_account()
    return print_run(handle, account, as_json=args.json)


def print_run(handle: RunHandle, account: Account | None, *, as_json: bool) -> int:
    """Print the hosts' reports on a run; return the exit code."""
    run, host_runs = handle.run, handle.host_runs
    failures, runs = handle.failures(), list(host_runs.values())
    guard = find_needed_guard(run, runs, is_needed=bool(failures))
    faults = (
        bool(failures) or any(reply.unsaved or reply.unsent for reply in runs) or (guard is not None and guard.is_gone)
    )
    if as_json:
        print(json.dumps(_json_record(handle, failures, guard, account, is_good=not faults)))
        return exit_code_for(faults)
    mesh = next((reply.mesh.label for reply in runs if reply.mesh), "")
    print(f"run {run}{fmt_if(', ranks as {}', mesh)}")
    headings = ("host", "state", "ranks", "phase", "step", "heard")
    states = handle.states()
    rows = [_row(name, reply, states.get(name)) for name, reply in handle.replies.items()]
    print(format_columns(headings, rows), flush=True)
    if guard:
        print(guard_line(guard))
    if account:
        unit = hour_unit(any(beat.gpu for host_run in runs for beat in host_run.heartbeats))
        print(account_line(account, unit))
        for incident in account.incidents:
            print(f"  {incident_line(account, incident, unit)}")
    print_progress(runs)
    print_copies(host_runs)
    if failures:
        worst = judge.first_failure(failures)
        print(f"{worst.host}: {failure_words(worst)}{log_words(worst, handle.command('logs'))}")
    return exit_code_for(faults)


def find_needed_guard(run: str, runs: Sequence[HostRun], *, is_needed: bool) -> GuardStatus | None:
    """Return the run's guard; None if there is none, or it is gone and no longer needed."""
    guard = guard_of_hosts(run, guard_reports(runs), time.time())
    if guard and guard.is_gone and not (is_needed or guard.is_finishing or any(host_run.alive for host_run in runs)):
        return None
    return guard


def _json_record(
    handle: RunHandle,
    failures: Sequence[Failure],
    guard: GuardStatus | None,
    account: Account | None,
    *,
    is_good: bool,
) -> dict[str, Json]:
    """Return the status as JSON, for scripts."""
    hosts: dict[str, Json] = {}
    for name, host_reply in handle.replies.items():
        if isinstance(host_reply, HostError):
            hosts[name] = {"error": str(host_reply)}
        else:
            hosts[name] = dataclasses.asdict(host_reply) if host_reply else None
    failure_lines = [f"{failure.host}: {failure_words(failure)}" for failure in failures]
    guard_record: Json = (
        {"state": guard.state.state, "gone": guard.is_gone, "words": guard_line(guard)} if guard else None
    )
    account_record: Json = dataclasses.asdict(account) | {"goodput": account.goodput} if account else None
    return {
        "run": handle.run,
        "ok": is_good,
        "failures": failure_lines,
        "guard": guard_record,
        "account": account_record,
        "hosts": hosts,
    }


def print_runs(fleet: Fleet, *, as_json: bool) -> int:
    """Print every run that the hosts know, and the hosts that could not be reached."""
    outcomes = all_runs(fleet)
    unreachable, runs = failure_texts(outcomes), query.hosts_by_run(outcomes)
    if as_json:
        records = {
            name: {host: dataclasses.asdict(run) for host, run in host_runs.items()} for name, host_runs in runs.items()
        }
        print(json.dumps({"runs": records, "lost": unreachable}))
        return exit_code_for(unreachable)
    if runs:
        print(
            format_columns(query.HEADINGS, [query.run_row(name, host_runs) for name, host_runs in runs.items()]),
            flush=True,
        )
    elif not unreachable:
        print("no runs on these hosts")
    for name, why in unreachable.items():
        print(f"{name}: UNREACHABLE: {why}")
    return exit_code_for(unreachable)


def print_progress(runs: Sequence[HostRun]) -> None:
    """Print the last step and the newest checkpoint, if a host knows them."""
    saved, last_metrics = run_progress(runs)
    only_evaluates = isinstance(last_metrics, EvaluationMetrics)
    if isinstance(last_metrics, EvaluationMetrics):
        print(f"evaluation of step {last_metrics.step}: loss {fmt_or_dash(last_metrics.evaluation_loss, '.4f')}")
    elif last_metrics:
        print(
            f"step {last_metrics.step}, loss {last_metrics.loss:.4f}, {last_metrics.rate:,.0f} tokens/s, "
            f"{last_metrics.step_s:.2f} s per step"
        )
    trains = any(run.heartbeats for run in runs) and not only_evaluates
    if saved or trains:
        print(f"newest checkpoint: {saved or 'none yet'}")
    for unsaved in {run.unsaved for run in runs} - {""}:
        print(f"NOT SAVED: {unsaved}")
    for unsent in {run.unsent for run in runs} - {""}:
        print(f"AFTER SAVE FAILED: {unsent}; checkpoints are kept until it succeeds")


def print_copies(host_runs: Mapping[str, HostRun]) -> None:
    """Print the newest checkpoint that survives the loss of a host, and why a newer one is not replicated."""
    copies = {name: host_run.copied for name, host_run in host_runs.items() if host_run.copied}
    if not copies:
        return
    oldest_step = min(copy.step for copy in copies.values())
    copied_text = f"step {oldest_step}" if oldest_step else "nothing yet; losing one host loses all checkpoints"
    print(f"copied to the next host: {copied_text}")
    for name, copy in copies.items():
        if copy.fault:
            print(f"{name}: not copied: {copy.fault}")


def _row(name: str, host_reply: HostRun | HostError | None, run_state: HostRunState | None) -> tuple[str, ...]:
    if isinstance(host_reply, HostError) or run_state is None:
        return name, f"UNREACHABLE: {host_reply}", "—", "—", "—", "—"
    state = format_state(run_state)
    if host_reply is None or not host_reply.heartbeats:
        return name, state, "—", "—", "—", "—"
    beats = host_reply.heartbeats
    steps = sorted(beat.step for beat in beats)
    phases = "/".join(sorted({str(beat.phase) for beat in beats}))
    age_s = max(host_reply.now - beat.time for beat in beats)  # both times are by that host's clock
    return (
        name,
        state,
        fold_numbers([beat.rank for beat in beats]),
        phases,
        "-".join(map(str, sorted({steps[0], steps[-1]}))),
        f"{age_s:.0f} s ago",
    )
