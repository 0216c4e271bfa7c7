"""The first lines of cluster-top: what runs where, how it goes, and the verdict. Pure.

If a line is too long, its least important parts are omitted.
"""

import textwrap
from collections.abc import Iterator, Sequence

from rich.text import Text

from llama405b.contract.phrases import counted
from llama405b_tools.text.figures import DASH, WIDE, amount, number, span, sparkline
from llama405b_tools.top.draw.marks import ODD, OLD
from llama405b_tools.top.state.picture import OVER, GuardShown, Picture, RunPhase, TrainingStatus, Verdict, known

Part = tuple[int, Text]  # the highest number is omitted first
VERDICTS = {
    Verdict.HEALTHY: ("●", "green"),
    **dict.fromkeys((Verdict.DEGRADED, Verdict.RESTARTING), ("▲", "yellow")),
    Verdict.CONNECTING: ("…", "yellow"),
    **dict.fromkeys((Verdict.TRAINING, Verdict.RUNNING), ("●", "")),
    **dict.fromkeys((Verdict.STARTING, Verdict.LOADING, Verdict.SAVING, Verdict.EVALUATING), ("◐", "blue")),
    **dict.fromkeys((Verdict.DONE, Verdict.STOPPED, Verdict.NO_RUN), ("■", "")),
}
PHASE_STYLES = {
    RunPhase.HUNG: "bold red",
    RunPhase.FAILED: "bold red",
    RunPhase.TRAINING: "bold green",
    RunPhase.RUNNING: "bold green",
}


def headline(pic: Picture, width: int, max_lines: int | None = None) -> list[Text]:
    """Return what runs where, how it goes, and the verdict, which may take ``max_lines``."""
    run = pic.training
    ages = known(row.age_s for row in pic.hosts)
    first = Text()
    parts = [
        (0, _alarm(f"hosts {pic.fresh}/{len(pic.hosts)}", when=pic.fresh < len(pic.hosts))),
        (0, _alarm(_gpus(pic), when=pic.gpus_seen < pic.gpus_expected)),
    ]
    if pic.badge:
        first.append(f" {pic.badge} ", "black on yellow")
        first.append(" ")
    if run:
        first.append(f"{run.run} ", "bold")
        first.append(run.phase, PHASE_STYLES.get(run.phase, "bold"))
        first.append(f" {span(run.phase_s)}")
        parts += _parts(run, pic, width)
        second = _progress(run, width)
    else:
        first.append("no run" if pic.fresh else f"run {DASH}", "bold")
        second = _no_run(pic)
    parts.append((4, Text(f"sampled {span(max(ages, default=None))}")))
    sign, style = VERDICTS.get(pic.verdict, ("✖", "bold red"))
    verdict = f"{sign} {pic.verdict}  {pic.why}".rstrip()
    wrapped = textwrap.wrap(verdict, max(width, 8), subsequent_indent="  ", max_lines=max_lines, placeholder=" …")
    return [_joined(first, parts, width), second, *(Text(line, style) for line in wrapped)]


def _gpus(pic: Picture) -> str:
    if pic.gpus_expected:
        return f"GPU {pic.gpus_seen}/{pic.gpus_expected}"
    if any(row.has_gpu is False for row in pic.hosts):
        return "no GPU"
    return f"GPU {DASH}"


def _parts(run: TrainingStatus, pic: Picture, width: int) -> Iterator[Part]:
    """Yield the parts of the first line that follow the run's phase."""
    yield 2, _alarm(f"net {run.network or DASH}", when=run.network == "SOCKET")
    yield 1, _marked(_risk(run, pic, short=width < WIDE), run, "checkpoint_step")
    if run.attempt > 1:
        yield 3, Text(f"restarts {run.attempt - 1}", "yellow")
    if run.others:
        yield 1, Text(f"{len(run.others)} more live: {', '.join(run.others)}", "yellow")
    if run.guard:
        yield 2, _alarm(f"guard {run.guard}", when=run.guard is GuardShown.GONE)


def _alarm(words: str, *, when: bool) -> Text:
    """Return the words, red if something is wrong."""
    return Text(words, "bold red" if when else "")


def _risk(run: TrainingStatus, pic: Picture, *, short: bool) -> str:
    if run.lost_steps is None:
        return "ckpt none yet" if run.checkpoint_step is None else f"ckpt step {run.checkpoint_step}"
    steps = counted(run.lost_steps, "step")
    what = "lost" if run.phase in OVER and run.lost_steps else "at risk"
    if short:
        return f"{steps} {what}"
    if run.lost_rank_hours is not None:
        unit = "GPU-h" if pic.gpus_expected else "rank-h"
        steps += f", {run.lost_rank_hours:.1f} {unit}"
    where = "none" if run.checkpoint_step is None else run.checkpoint_step
    copied = "" if run.copied_step is None else f", copied {run.copied_step or 'none'}"
    return f"ckpt {where}{copied}: {steps} {what}"


def _no_run(pic: Picture) -> Text:
    if not pic.fresh:
        return Text("no host has reported: it is unknown whether a run is live", "dim")
    where = pic.workdirs[0] if len(pic.workdirs) == 1 else "their working directories"
    return Text(f"no run in {where} on these hosts; `llama405b launch` starts one", "dim")


def _progress(run: TrainingStatus, width: int) -> Text:
    if run.phase is RunPhase.LOADING and run.total_bytes:
        done_bytes, total = run.done_bytes or 0, run.total_bytes
        share = f"{done_bytes / 1e9:,.1f} of {total / 1e9:,.1f} GB  {100 * done_bytes / total:.0f}%"
        return Text(f"loading {share}  ETA {span(run.eta_s)}")
    if run.step is None:
        return Text("no step yet", "dim")
    done = str(run.step)
    if run.steps:
        done += f"/{run.steps} {100 * run.step / run.steps:.0f}%"
    first = _marked(f"step {done}", run, "step")
    first.append("  ").append_text(_marked(f"loss {number(run.loss, '.4f')}", run, "loss"))
    first.append(f" {sparkline(run.losses, 16 if width >= WIDE else 8)}")
    times = (("data", run.data_s), ("fwd", run.forward_s), ("bwd", run.backward_s), ("opt", run.optimizer_s))
    split = " ".join(f"{name} {number(value, '.2f')}" for name, value in times)
    if run.update_s is not None:
        split += f" update {number(run.update_s, '.2f')} of which waited {number(run.exposed_s, '.2f')}"
    parts = [
        (0, _marked(f"{number(run.step_s, '.2f')} s/step", run, "step_s")),
        (2, Text(f"(plan {run.expected_step_s:.1f})" if run.expected_step_s else "")),
        (3, Text(f"({split})")),
        (1, Text(f"{amount(run.tokens_per_s)} tok/s")),
        (2, Text(f"MFU {number(run.mfu_pct and run.mfu_pct / 100, '.0%')}")),
        (0, Text(f"ETA {span(run.eta_s)}")),
        (2, Text(_evaluated(run))),
        (4, Text(_moved(run))),
    ]
    line = _joined(first, [part for part in parts if part[1].plain], width, "  ")
    if run.is_stale:
        line.stylize_before(OLD)
    return line


def _evaluated(run: TrainingStatus) -> str:
    if run.evaluated_step is None:
        return ""
    return f"eval {number(run.evaluation_loss, '.4f')} @{run.evaluated_step}"


def _moved(run: TrainingStatus) -> str:
    """Say how fast rank 0 updates in CPU memory, and what crosses between that and its device in a step."""
    if not run.update_s or run.update_bytes is None:
        return ""
    crossed = f"{amount(run.down_bytes)}B down {amount(run.up_bytes)}B up"
    return f"host memory {amount(run.update_bytes / run.update_s)}B/s  {crossed}"


def _marked(words: str, run: TrainingStatus, field: str) -> Text:
    """Return the words that show a field, marked if it stands out."""
    return Text().append(words, ODD if field in run.odd_in else "")


def _joined(first: Text, parts: Sequence[Part], width: int, between: str = " │ ") -> Text:
    """Join as many parts as fit; those with the highest number are omitted first."""
    kept = list(parts)
    while kept and first.cell_len + sum(len(between) + part.cell_len for _, part in kept) > width:
        kept.remove(max(kept, key=lambda entry: entry[0]))
    line = first.copy()
    for _, part in kept:
        line.append(between, "dim")
        line.append_text(part)
    return line
