"""The report in a terminal: the loss curve first, then what the time went into. Pure."""

from collections.abc import Iterator

from llama405b.contract.phrases import counted, given
from llama405b_tools.report.draw.page import notes
from llama405b_tools.report.draw.summary import Summary, state_words
from llama405b_tools.run.accounts import account_line, incident_line
from llama405b_tools.text.figures import amount, reading, span
from llama405b_tools.text.plot import plot


def lines_of(found: Summary, width: int, height: int, *, plain: bool) -> Iterator[str]:
    """Yield the lines. ``plain``: without characters that a terminal may lack."""
    reply, points = found.reply, found.reply.points
    yield f"run {found.run}: {state_words(found)}"
    losses = [(float(point.step), point.loss) for point in points]
    evaluated = [(float(step), loss) for step, _, loss in reply.evaluations]
    if losses or evaluated:
        yield "loss by step" + given("; o evaluations", len(evaluated))
        yield from plot(losses, evaluated, width, height, reading, plain=plain)
    if points:
        many = counted(found.last_steps, "step")
        yield f"loss {points[0].loss:.4f} -> {found.last('loss'):.4f} (mean of the last {many}), {_rate(found)}"
    if evaluated:
        best = min(reply.evaluations, key=lambda each: each[2])
        yield f"evaluation {evaluated[0][1]:.4f} -> {evaluated[-1][1]:.4f}, the lowest {best[2]:.4f} at step {best[0]}"
    if account := reply.account:
        yield account_line(account, found.unit)
        if cost := found.cost(sum(account.seconds.values())):
            yield f"cost {cost:,.2f} at {found.price:g} a {found.unit}"
        for incident in account.incidents:
            yield f"  {incident_line(account, incident, found.unit)}"
    yield from notes(found)


def _rate(found: Summary) -> str:
    rate = found.last("tokens_per_s")
    mfu = given(", MFU {:.1f}%", found.mfu(rate))
    planned = given(" (planned {})", found.reply.expected_step_s and span(found.reply.expected_step_s))
    return f"{amount(rate)} tokens/s{mfu}, {found.last('step_s'):.2f} s per step{planned}"
