"""The first lines of cluster-top: the verdict, what runs where, how far it is, and what to do next. Pure.

If a line is too long, its least important parts are omitted.
"""

import textwrap
from collections.abc import Iterator, Sequence

from rich.text import Text

from llama405b.contract.phrases import counted, given
from llama405b_tools.text.figures import DASH, WIDE, amount, local_time, number, span, stopwatch
from llama405b_tools.top.draw.blocks import gauge
from llama405b_tools.top.draw.marks import ODD, OLD
from llama405b_tools.top.state.picture import OVER, GuardShown, Picture, RunPhase, TrainingStatus, Verdict, known

Part = tuple[int, Text]  # the highest number is omitted first
VERDICTS = {
    Verdict.HEALTHY: ("●", "ok"),
    **dict.fromkeys((Verdict.DEGRADED, Verdict.RESTARTING), ("▲", "warn")),
    Verdict.CONNECTING: ("…", "warn"),
    **dict.fromkeys((Verdict.TRAINING, Verdict.RUNNING), ("●", "busy")),
    **dict.fromkeys((Verdict.STARTING, Verdict.LOADING, Verdict.SAVING, Verdict.EVALUATING), ("◐", "busy")),
    **dict.fromkeys((Verdict.DONE, Verdict.STOPPED, Verdict.NO_RUN), ("■", "over")),
}
PHASE_STYLES = {RunPhase.HUNG: "bad", RunPhase.FAILED: "bad"}
BAR = 10  # the least columns of the bar of progress


def headline(pic: Picture, width: int, max_lines: int | None = None, *, ago_s: float | None = None) -> list[Text]:
    """Return the verdict, what runs where, its progress, and what to do.

    ``max_lines``: of the verdict, as bars as wide as the screen; None: it is text to be printed. ``ago_s``: of a picture of
    the past, how old it is; it has a bar that says so, and its verdict is none.
    """
    sign, name = VERDICTS.get(pic.verdict, ("✖", "bad"))
    indent = "" if max_lines is None else " "
    words = f"{indent}{sign} {'' if ago_s is None else 'was '}{pic.verdict}  {pic.why}".rstrip()
    wrapped = _wrapped(words, width, indent, max_lines)
    where, run = _runs_where(pic, width - len(indent), clock=bool(indent)), pic.training
    progress = _progress(run, width - len(indent), bars=bool(indent)) if run else _no_run(pic)
    style = f"bar.{name}" if ago_s is None else OLD
    lines = [Text(line.ljust(width if indent else 0), style) for line in wrapped]
    if ago_s is not None:
        lines.insert(
            0, Text(f"{indent}◀ THE PAST: {stopwatch(ago_s)} ago, at {local_time(pic.time)}".ljust(width), "bar.past")
        )
    lines += [Text(indent).append_text(line) for line in (where, progress)]
    if pic.advice:
        advice = _wrapped(f"{indent}→ {'' if ago_s is None else 'then: '}{pic.advice}", width, indent, max_lines)
        lines += [Text(line, "strong" if ago_s is None else OLD) for line in advice]
    return lines


def _wrapped(words: str, width: int, indent: str, max_lines: int | None) -> list[str]:
    return textwrap.wrap(
        words,
        max(width, 8),
        subsequent_indent=f"{indent}  ",
        max_lines=max_lines,
        placeholder=" …",
        drop_whitespace=False,
    )


def _runs_where(pic: Picture, width: int, *, clock: bool) -> Text:
    run = pic.training
    ages = known(row.age_s for row in pic.hosts)
    first = Text()
    parts = [
        (0, _alarm(f"hosts {pic.fresh}/{len(pic.hosts)}", when=pic.fresh < len(pic.hosts))),
        (0, _alarm(_gpus(pic), when=pic.gpus_seen < pic.gpus_expected)),
    ]
    if pic.badge:
        first.append(f" {pic.badge} ", "bar.warn").append(" ")
    if run:
        first.append(f"{run.run} ", "strong")
        first.append(run.phase, PHASE_STYLES.get(run.phase, "strong"))
        first.append(f" {span(run.phase_s)}")
        parts += _parts(run, pic, width)
    else:
        first.append("no run" if pic.fresh else f"run {DASH}", "strong")
    parts.append((4, Text(f"sampled {span(max(ages, default=None))}")))
    now = f" {local_time(pic.time)}" if clock and width > WIDE else ""
    line = _joined(first, parts, width - len(now))
    return line.append(" " * (width - len(now) - line.cell_len)).append(now, OLD) if now else line


def _gpus(pic: Picture) -> str:
    if pic.gpus_expected:
        return f"GPU {pic.gpus_seen}/{pic.gpus_expected}"
    if any(row.has_gpu is False for row in pic.hosts):
        return "no GPU"
    return f"GPU {DASH}"


def _parts(run: TrainingStatus, pic: Picture, width: int) -> Iterator[Part]:
    """Yield the parts of the second line that follow the run's phase."""
    yield 2, _alarm(f"net {run.network or DASH}", when=run.network == "SOCKET")
    yield 1, _marked(_risk(run, pic, short=width < WIDE), run, "checkpoint_step")
    if run.attempt > 1:
        yield 3, Text(counted(run.attempt - 1, "restart"), "warn")
    if run.age_s is not None:
        yield 3, Text(f"since {span(run.age_s)}")
    if run.goodput_pct is not None:
        yield 3, Text(f"goodput {run.goodput_pct:.1f}%")
    if run.others:
        yield 1, Text(f"{len(run.others)} more live: {', '.join(run.others)}", "warn")
    if run.guard:
        yield 2, _alarm(f"guard {run.guard}", when=run.guard is GuardShown.GONE)


def _alarm(words: str, *, when: bool) -> Text:
    """Return the words, red if something is wrong."""
    return Text(words, "bad" if when else "")


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
        return Text("no host has reported: it is unknown whether a run is live", OLD)
    where = pic.workdirs[0] if len(pic.workdirs) == 1 else "their working directories"
    return Text(f"no run in {where} on these hosts; `llama405b launch` starts one", OLD)


def _progress(run: TrainingStatus, width: int, *, bars: bool) -> Text:
    """Draw how far the run is, as a bar that takes the room that is left, and how fast."""
    if run.phase is RunPhase.LOADING and run.total_bytes:
        done_bytes, total = run.done_bytes or 0, run.total_bytes
        words = f"loading {done_bytes / 1e9:,.1f} of {total / 1e9:,.1f} GB "
        return _with_bar(Text(words), done_bytes / total, [(0, Text(f"ETA {span(run.eta_s)}"))], width, bars=bars)
    if run.step is None:
        return Text("no step yet", OLD)
    first = _marked(f"step {run.step}{given('/{} ', run.steps)}", run, "step")
    first.append_text(Text("" if run.steps else "  "))
    plan = f" (plan {run.expected_step_s:.1f})" if run.expected_step_s else ""
    parts = [
        (1, _marked(f"loss {number(run.loss, '.4f')}", run, "loss")),
        (0, _marked(f"{number(run.step_s, '.2f')} s/step", run, "step_s").append(plan if width >= WIDE else "")),
        (0, Text(f"{amount(run.tokens_per_s)} tok/s")),
        (2, Text(f"MFU {number(run.mfu_pct and run.mfu_pct / 100, '.0%')}")),
        (0, Text(f"ETA {span(run.eta_s)}")),
        (3, Text(_evaluated(run))),
        (4, Text(_moved(run))),
    ]
    line = _with_bar(
        first, run.step / run.steps if run.steps else None, [p for p in parts if p[1].plain], width, bars=bars
    )
    if run.is_stale:
        line.stylize_before(OLD)
    return line


def _with_bar(first: Text, share: float | None, parts: Sequence[Part], width: int, *, bars: bool) -> Text:
    """Join parts, with a bar of the room that is left after the first."""
    if share is None:
        return _joined(first, parts, width, "  ")
    percent = f" {100 * share:.0f}%"
    line = _joined(Text(), parts, width - first.cell_len - len(percent) - BAR - 1, "  ")
    room = width - first.cell_len - len(percent) - line.cell_len - 1
    if room < BAR or not bars:
        return first.append(percent.strip()).append_text(line)
    return first.append(gauge(share, room), "chart").append(percent).append_text(line)


def _evaluated(run: TrainingStatus) -> str:
    if run.evaluated_step is None:
        return ""
    return f"eval {number(run.evaluation_loss, '.4f')} @{run.evaluated_step}"


def _moved(run: TrainingStatus) -> str:
    """Say how long updates on the CPU take, how fast rank 0's are, and what crosses between its memory and its device."""
    if run.update_s is None:
        return ""
    words = f"update {number(run.update_s, '.2f')} of which waited {number(run.exposed_s, '.2f')}"
    if not run.update_s or run.update_bytes is None:
        return words
    crossed = f"{amount(run.down_bytes)}B down {amount(run.up_bytes)}B up"
    return f"{words}  host memory {amount(run.update_bytes / run.update_s)}B/s  {crossed}"


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
        line.append(between, OLD)
        line.append_text(part)
    return line
