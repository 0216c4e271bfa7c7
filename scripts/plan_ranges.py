"""The ranges of the plan's times, from published rates that were not fitted, and how well they hold them, by program."""

import dataclasses
import json
import math
import statistics

from llama405b.predict.calibration import MIN_PROGRAMS, Evidence

T_95 = (
    6.31,
    2.92,
    2.35,
    2.13,
    2.02,
    1.94,
    1.89,
    1.86,
    1.83,
    1.81,
    1.80,
    1.78,
    1.77,
)  # Student's t, one-sided, by degrees of freedom from 1
KINDS = tuple(kind for kind in Evidence if kind not in (Evidence.STEPS, Evidence.RATES))
ALPHA = 0.12  # of the interval score: what lies outside costs 2 / ALPHA of how far


def points(rows, rates):
    """Logarithms of measured over predicted times, by what is known of such runs and by program."""
    found = {kind: {} for kind in KINDS}
    for row in rows:
        if row.is_evidence:
            kind = Evidence.kinds_of(row.setting)[0]
            found[kind].setdefault(row.program, []).append(row.slowness(rates))
    return found


def spread(programs):
    """Where the logarithm of a point of one more program lies with nine chances in ten; each program counts about the same.

    Programs differ, and so do the points of one: a random-effects model (DerSimonian and Laird, 1986), whose variances of programs,
    of points, and of the mean add up, with Student's t of one degree less than there are programs.
    """
    means = [statistics.mean(each) for each in programs]
    rest = [x - mean for each, mean in zip(programs, means, strict=True) for x in each]
    within = math.fsum(x * x for x in rest) / max(1, len(rest) - len(means))
    between = max(0.0, statistics.variance(means) - within * statistics.mean(1 / len(each) for each in programs))
    weights = [1 / max(1e-12, between + within / len(each)) for each in programs]
    mean = math.fsum(w * x for w, x in zip(weights, means, strict=True)) / math.fsum(weights)
    t = T_95[min(len(means) - 2, len(T_95) - 1)]
    half = t * math.sqrt(between + within + 1 / math.fsum(weights))
    return mean - half, mean + half


def pooled(found, kind, without=""):
    """The points of a kind by program, all but one; small models have those of medium ones beside their own, as their programs are few."""
    kinds = (kind, Evidence.MEDIUM) if kind is Evidence.SMALL else (kind,)
    programs = {}
    for each in kinds:
        for program, logs in found[each].items():
            if program != without:
                programs[program] = [*programs.get(program, []), *logs]
    return programs


def interval(found, kind, without=""):
    """The range of a kind, in logarithms: ``spread``, or where programs are few what their points are."""
    programs = pooled(found, kind, without)
    if len(found[kind]) >= MIN_PROGRAMS:
        return spread(list(programs.values()))
    logs = [x for each in programs.values() for x in each]
    return min(logs), max(logs)


def ranges(found):
    """Factors of a time, rounded outwards to whole percents, and the runs that they are after, by what is known."""
    kept = {}
    for kind in KINDS:
        (low, high), logs = interval(found, kind), [x for each in found[kind].values() for x in each]
        kept[kind] = {
            "low": _percent(math.floor, low), "high": _percent(math.ceil, high), "programs": len(found[kind]), "runs": len(logs),
            "shortest": _percent(round, min(logs)), "longest": _percent(round, max(logs)),
        }  # fmt: skip
    return kept


def _percent(rounded, log):
    return rounded(100 * math.exp(log)) / 100


def written(found):
    """The ranges, as they are kept."""
    return json.dumps(ranges(found), indent=1) + "\n"


@dataclasses.dataclass(frozen=True)
class Held:
    """How well an interval holds points: their share in it, by program and in all, and the mean interval score (Winkler, 1972)."""

    by_program: float
    of_points: float
    score: float


def held(found, kind, *, left_out):
    """How well the range of a kind holds its own points; ``left_out``: for each program, the range that the others give."""
    inside, scores = {}, []
    for program, logs in found[kind].items():
        low, high = interval(found, kind, program if left_out else "")
        inside[program] = [low <= x <= high for x in logs]
        scores += [high - low + 2 / ALPHA * (max(0.0, low - x) + max(0.0, x - high)) for x in logs]
    each = list(inside.values())
    return Held(
        statistics.mean(map(statistics.mean, each)),
        statistics.mean(x for one in each for x in one),
        statistics.mean(scores),
    )


def table(found):
    """The ranges and how well they hold, as Markdown."""
    lines = [
        "| runs | range | published runs | they took | in the range | by the others' range: of programs | of runs | interval score |",
        "|" + "---|" * 8,
    ]
    for kind, kept in ranges(found).items():
        cells = f"| {kind} | {_change(kept['low'])} to {_change(kept['high'])} | {kept['runs']} of {kept['programs']} programs"
        cells += f" | {_change(kept['shortest'])} to {_change(kept['longest'])}"
        if kept["programs"] < MIN_PROGRAMS:
            lines.append(f"{cells} | no promise | | | |")
            continue
        own, others = held(found, kind, left_out=False), held(found, kind, left_out=True)
        shares = f"{100 * own.by_program:.0f}% | {100 * others.by_program:.0f}% | {100 * others.of_points:.0f}%"
        lines.append(f"{cells} | {shares} | {others.score:.2f} |")
    return "\n".join(lines)


def _change(share):
    return f"{100 * (share - 1):+.0f}%"


def programs_table(found):
    """Every program of every kind, as Markdown."""
    lines = ["| runs | program | points | time, of predicted | from | to |", "|" + "---|" * 6]
    for kind in KINDS:
        for program, logs in sorted(found[kind].items()):
            mean, low, high = (math.exp(x) for x in (statistics.mean(logs), min(logs), max(logs)))
            lines.append(f"| {kind} | {program} | {len(logs)} | {mean:.2f} | {low:.2f} | {high:.2f} |")
    return "\n".join(lines)
