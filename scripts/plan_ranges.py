"""The ranges of the plan's times, from published rates that were not fitted, and how many points they hold, by program."""

import json
import math
import statistics

from llama405b.predict.calibration import MIN_PROGRAMS, Evidence

T_95 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83)  # Student's t, one-sided, by degrees of freedom from 1
KINDS = (Evidence.LARGE, Evidence.SMALL, Evidence.MESH)


def points(rows, rates):
    """Logarithms of measured over predicted times, by what is known of such runs and by program."""
    found = {}
    for row in rows:
        if row.is_evidence:
            programs = found.setdefault(Evidence.from_setup(row.setting), {})
            programs.setdefault(row.program, []).append(row.slowness(rates))
    return found


def spread(programs):
    """Where the logarithm of a point of one more program lies with nine chances in ten; each program counts the same.

    Programs differ, and so do the points of one: both variances add up.
    """
    means = [statistics.mean(each) for each in programs]
    rest = [x - mean for each, mean in zip(programs, means, strict=True) for x in each]
    within = math.fsum(x * x for x in rest) / max(1, len(rest) - len(means))
    between = statistics.variance(means) * (1 + 1 / len(means))
    half = T_95[len(means) - 2] * math.sqrt(between + within)
    return statistics.mean(means) - half, statistics.mean(means) + half


def ranges(found):
    """Factors of a time, rounded outwards to whole percents, by what is known.

    Of programs that offload there are fewer than three: the range of the others, and as much longer as the slowest of them was.
    """
    kept = {}
    for kind in KINDS:
        low, high = spread(list(found[kind].values()))
        kept[kind] = _range(low, high, len(found[kind]))
    offload = found[Evidence.OFFLOAD]
    assert len(offload) < MIN_PROGRAMS, "there are enough for a range of their own"
    kept[Evidence.OFFLOAD] = _range(0.0, max(x for each in offload.values() for x in each), len(offload))
    return kept


def _range(low, high, programs):
    return {"low": _percent(math.floor, low), "high": _percent(math.ceil, high), "programs": programs}


def _percent(rounded, log):
    return rounded(100 * math.exp(log)) / 100


def written(found):
    """The ranges, as they are kept."""
    return json.dumps(ranges(found), indent=1) + "\n"


def share_inside(logs, low, high):
    """How many of these lie between two factors."""
    return sum(low <= math.exp(x) <= high for x in logs) / len(logs)


def coverage(found):
    """Yield by kind and program: its points, its mean, the share in the kind's range, and in that of the other programs alone."""
    kept = ranges(found)
    for kind in KINDS:
        for program, logs in sorted(found[kind].items()):
            others = [each for name, each in found[kind].items() if name != program]
            alone = [math.exp(x) for x in spread(others)]
            inside = share_inside(logs, kept[kind]["low"], kept[kind]["high"])
            yield kind, program, logs, inside, share_inside(logs, *alone)


def table(found):
    """How many points the ranges hold, as Markdown."""
    lines = [
        "| range | program | points | time, of predicted | in the range | in that of the others alone |",
        "|" + "---|" * 6,
    ]
    for kind, program, logs, inside, alone in coverage(found):
        mean = f"{math.exp(statistics.mean(logs)):.2f}"
        lines.append(f"| {kind} | {program} | {len(logs)} | {mean} | {100 * inside:.0f}% | {100 * alone:.0f}% |")
    lines.append("")
    lines += [f"- {kind}: {_words(kept)}" for kind, kept in ranges(found).items()]
    return "\n".join(lines)


def _words(kept):
    words = f"{100 * (kept['low'] - 1):+.0f}% to {100 * (kept['high'] - 1):+.0f}% of a time, after {kept['programs']} programs"
    if kept["programs"] >= MIN_PROGRAMS:
        return words
    return (
        f"beside that, up to {100 * (kept['high'] - 1):+.0f}%, after 1 program: fewer than {MIN_PROGRAMS} make no range"
    )
