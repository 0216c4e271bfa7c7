"""States, failures and leftovers in words. Pure."""

from llama405b.contract.causes import words
from llama405b_tools.hosts.outcomes import Outcomes, replies, unanswered
from llama405b_tools.remote.messages.end import Ended
from llama405b_tools.run.judge import Failure, Standing, State
from llama405b_tools.text.clean import clean


def state_words(state: State) -> str:
    """Describe a state in one word or a few, for a table."""
    if state.standing is Standing.LEFTOVERS and state.cause:
        return f"LEFTOVERS ({state.cause.count} processes)"
    if state.standing is Standing.EXITED:
        return f"exited {state.exit_code}" if state.exit_code else "finished"
    if state.standing is Standing.KILLED:
        return f"killed by signal {state.signal}"
    return str(state.standing)


def failure_words(failure: Failure) -> str:
    """Describe a failure, without naming the host."""
    said = clean(words(failure.cause))
    if failure.state is None:
        return said
    return ": ".join(filter(None, [state_words(failure.state), said]))


def not_ended(ends: Outcomes[Ended]) -> dict[str, str]:
    """Return the hosts where something may be left, each with the reason."""
    return {name: f"could not be queried: {why}" for name, why in unanswered(ends).items()} | {
        name: f"{end.remains} cannot be ended" for name, end in replies(ends).items() if end.remains
    }
