"""What can be done to the selected host and run: each is a command that could be typed, and is asked before it is run. Pure."""

import shlex
from collections.abc import Sequence
from typing import NamedTuple

from llama405b.contract.phrases import given
from llama405b_tools.text.figures import stopwatch
from llama405b_tools.top.draw.lines import event_line
from llama405b_tools.top.draw.panels import Scene
from llama405b_tools.top.draw.ui import Ui
from llama405b_tools.top.state.picture import GUARDED, OVER, HostRow, TrainingStatus

SHELL = "!"
NOT_LIVE = "a recording cannot be acted on"
PAST = "this is the past: End returns to now"
READ_ONLY = "cluster-top was started with --read-only"
NO_FILE = "for that, start cluster-top with a hosts file instead of host names"
IN_BROWSER = "a shell needs a terminal; use ssh in one"
IN_JOB = "the nodes of a Slurm job are not reached over SSH; srun --overlap --pty opens a shell there"


class Action(NamedTuple):
    """Something to do, with ``{run}`` in its words."""

    question: str
    words: tuple[str, ...]  # of our command, without the hosts file; () opens a shell
    limit_s: float = 0.0  # after which the command is ended


LOOK_S = 60.0  # hosts answer an autopsy within seconds
ASK_S = 900.0  # `ask` waits ten minutes by itself, then says what it waited for
END_S = 3600.0  # a run has time to save, as long as its last save took, and as often again
ACTIONS = {
    "a": Action(
        "look at what every rank of {run} is doing, and who holds it up", ("autopsy", "--run", "{run}"), LOOK_S
    ),
    "c": Action("save a checkpoint of {run} now", ("ask", "{run}", "save"), ASK_S),
    "p": Action("trace the next step of every rank of {run}", ("ask", "{run}", "profile"), ASK_S),
    "M": Action("tell what the memory of every rank of {run} holds", ("ask", "{run}", "memory"), ASK_S),
    "R": Action(
        "save, end this attempt of {run}, and have its guard start the next", ("ask", "{run}", "restart"), END_S
    ),
    "S": Action("stop {run} on every host; it saves first", ("stop", "--run", "{run}"), END_S),
    SHELL: Action("open a shell on {host}", ()),
}
OF_LIVE = ("c", "p", "M", "R")  # what only a run that runs can do
LINES = 20  # of the log and of the events in a diagnosis


def refusals(
    *, is_live: bool, read_only: bool, has_file: bool, in_job: bool, in_browser: bool = False
) -> dict[str, str]:
    """Return, by key, why something cannot be done from this screen, whatever is selected."""
    if read_only or not is_live:
        return dict.fromkeys(ACTIONS, READ_ONLY if read_only else NOT_LIVE)
    if in_job:
        return {SHELL: IN_JOB}
    found = {} if has_file else {key: NO_FILE for key in ACTIONS if key != SHELL}
    return found | ({SHELL: IN_BROWSER} if in_browser else {})


def asked(ui: Ui, key: str, of: Scene) -> None:
    """Ask whether to do it, or say why it cannot be done."""
    row, run = of.selected, of.pic.training
    refusal = ui.refusals.get(key, "") or (PAST if ui.is_past else "")
    if not refusal and key == SHELL and row is None:
        refusal = "no host is selected"
    elif not refusal and key != SHELL:
        refusal = _refused_of_run(key, run)
    if refusal:
        ui.hint = refusal
        return
    if row:
        ui.selected = row.name
    ui.pending = key
    ui.question = ACTIONS[key].question.format(run=run.run if run else "", host=row.name if row else "")


def _refused_of_run(key: str, run: TrainingStatus | None) -> str:
    """Return why the run would not do it, as far as that is known now; "" if nothing is."""
    if run is None:
        return "there is no run on these hosts"
    if key in OF_LIVE and run.phase in OVER:
        return f"run {run.run} is not running: {run.phase}"
    if key == "R" and run.guard not in GUARDED:
        return f"run {run.run} has no guard, which would start it again: stop it (S), and launch it with --resume auto"
    return ""


def words_of(key: str, run: str, hosts_file: str) -> list[str]:
    """Return an action as the words of our command. ``hosts_file``: '' in a Slurm job, which has none."""
    words = [word.format(run=run) for word in ACTIONS[key].words]
    return [*words, *([hosts_file] if hosts_file else ())]


def shell_line(host: str, workdir: str) -> str:
    """Return what opens a shell on a host and says so. ``workdir``: as a shell reads it."""
    said = shlex.quote(f"shell on {host}; exit returns to cluster-top")
    return f'echo {said}; cd {workdir}; exec "${{SHELL:-sh}}"'


def diagnosis(of: Scene, commands: Sequence[str]) -> list[str]:
    """Return what is known, as text to paste into a message. ``commands``: that show more."""
    pic, run = of.pic, of.pic.training
    lines = [f"THE PAST: {stopwatch(of.ui.kept[1] - pic.time)} ago"] if of.ui.is_past else []
    lines.append(f"{pic.verdict}: {pic.why}".removesuffix(": "))
    if pic.advice:
        lines.append(f"next: {pic.advice}")
    if run:
        lines.append(_run_words(run))
    lines.append(f"hosts heard {pic.fresh} of {len(pic.hosts)}; GPUs {pic.gpus_seen} of {pic.gpus_expected}")
    for row in of.rows:
        lines += [f"{row.name}: {words}" for words in _odd(row)]
    if pic.events:
        lines += ["", "events:", *(event_line(event).plain for event in pic.events[-LINES:])]
    mine = [line for line in of.chosen_logs if of.selected and of.selected.name in line.hosts][-LINES:]
    if of.selected and mine:
        lines += ["", f"log of {of.selected.name}:", *(f"{line.where} {line.text}" for line in mine)]
    return [*lines, *(("", "more:") if commands else ()), *commands]


def _run_words(run: TrainingStatus) -> str:
    """Say what is known of a run, with what is not left out."""
    step = given("step {:,}", run.step) + given(" of {:,}", run.steps if run.step is not None else None)
    pace = given("{:.2f} s a step", run.step_s) + given(" (planned {:.2f})", run.expected_step_s)
    saved = given("newest checkpoint step {:,}", run.checkpoint_step) or "no checkpoint yet"
    parts = [str(run.phase), step, given("loss {:.4f}", run.loss), pace, saved, given("network {}", run.network)]
    return f"run {run.run}, attempt {run.attempt}: {'; '.join(filter(None, parts))}"


def _odd(row: HostRow) -> list[str]:
    state = [f"{row.state} {row.why}"] if row.severity else []
    ranks = [
        f"rank {rank.rank} at step {rank.step}, heard {rank.age_s:.0f} s ago: {rank.odd}"
        for rank in row.ranks
        if rank.odd
    ]
    return [*state, *row.notes, *ranks]
