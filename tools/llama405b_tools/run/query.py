"""``llama405b status``: what runs where, and how it goes."""

from llama405b.contract.errors import UserError
from llama405b.contract.files import read_json
from llama405b.contract.paths import RunDir
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.run import judge
from llama405b_tools.run.judge import Described, Failure
from llama405b_tools.text.fold import fold_names

STATUS_TIMEOUT_S = 30.0


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
    chosen = judge.choose(answers, run)
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
    return max((path for path in found if path), key=judge.step_of, default=None)


def failures_of(seen: dict[str, Described | HostError | None]) -> list[Failure]:
    """Every host that is not as it should be."""
    failures = []
    for name, found in seen.items():
        failure = Failure(name, str(found), origin=2) if isinstance(found, HostError) else judge.failure_of(name, found)
        if failure:
            failures.append(failure)
    return failures
