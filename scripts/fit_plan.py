"""Write the plan's coefficients and ranges, and the tables of docs/plan-accuracy.md and docs/measurements/plan-unseen.md.

Coefficients are of the rows of tests/data/published.csv that are marked train; ranges of all that are not, there and in unseen.csv, and
of the steps in tests/data/bundles/*.json: what `llama405b bench --bundle` wrote on GPUs. Nothing else writes them. In a checkout, with
the project installed:

    PYTHONPATH=tests/rigs python scripts/fit_plan.py
"""

import dataclasses
import json
import math
import statistics
from pathlib import Path

import plan_ranges

from llama405b.predict.calibration import RANGES_FILE
from llama405b.predict.hardware import COEFFICIENTS_FILE, Rates
from published import BYTES, UNSEEN, read_bundles, read_rows

DOCS = Path(__file__).parent.parent / "docs"
DOCUMENT, UNSEEN_DOCUMENT = DOCS / "plan-accuracy.md", DOCS / "measurements/plan-unseen.md"
BEGIN, END = "<!-- the table: written by scripts/fit_plan.py -->", "<!-- end of the table -->"
PROGRAMS_BEGIN, PROGRAMS_END = "<!-- the programs: written by scripts/fit_plan.py -->", "<!-- end of the programs -->"
RANGES_BEGIN, RANGES_END = "<!-- the ranges: written by scripts/fit_plan.py -->", "<!-- end of the ranges -->"
PRIORS = {"h100-80": 0.40, "h100-96-500w": 0.40, "a100-80": 0.55, "a100-40": 0.55}  # attention, of a GPU's FLOPs
# Matrix products, of a GPU's FLOPs, where one program published times: the row of unseen.csv that is marked train.
FEW = {"b200-180": 0.43}
FIRST = {"interference": 0.2, "network": 0.9, "hop": 5.0, "triton": 0.7}
SPANS = {
    "matmul": (0.3, 0.95),
    "interference": (0.0, 0.4),
    "network": (0.3, 1.0),
    "hop": (0.0, 30.0),
    "triton": (0.2, 1.0),
}
ROUNDS, CUTS = 12, 24
GOLDEN = (math.sqrt(5) - 1) / 2


def fit(rows):
    """The rates that make the sum of squared logarithmic errors of the rows marked train least, one at a time, in turns."""
    rows = [row for row in rows if row.train]
    found = FIRST | {f"matmul {gpu}": 0.6 for gpu in sorted({row.setting.gpu.name for row in rows})}
    for _ in range(ROUNDS):
        for name in found:
            used = [row for row in rows if not name.startswith("matmul") or name == f"matmul {row.setting.gpu.name}"]
            found[name] = _least(lambda x, n=name, u=used: _error(u, _rates(found | {n: x})), *SPANS[name.split()[0]])
    return _rates(found)


def _rates(found):
    matmul = FEW | {name.split()[1]: round(value, 4) for name, value in found.items() if name.startswith("matmul")}
    interference, network, triton = (round(found[name], 4) for name in ("interference", "network", "triton"))
    return Rates(matmul, interference, network, round(found["hop"] * 1e-6, 8), triton, PRIORS)


def _error(rows, rates):
    return sum(math.log(row.predicted(rates) / row.value) ** 2 for row in rows)


def _least(of, low, high):
    """Where a function of one number is least (golden section)."""
    for _ in range(CUTS):
        span = GOLDEN * (high - low)
        if of(high - span) < of(low + span):
            high = low + span
        else:
            low = high - span
    return (low + high) / 2


def written(rates):
    """The coefficients, as they are kept."""
    return json.dumps(dataclasses.asdict(rates), indent=1) + "\n"


def rows_table(rows, rates):
    """Every row, as lines of Markdown."""
    lines = [
        "| source | model | GPUs | S | B × acc. | checkpointing | what | measured | predicted | error | |",
        "|" + "---|" * 11,
    ]
    for row in rows:
        c, use = row.cells, "fitted" if row.train else ""
        more = {"1": " compiled", "fused": " fused"}.get(c["compile"], "") + " FP8" * (c.get("fp8") == "1")
        more += " updates on hosts" * (c["offload"] not in ("", "none")) + " LoRA" * bool(c.get("adapter"))
        batch, cluster = f"{c['micro_batch']} × {c['grad_accum']}", f"{c['gpus']} × {c['gpu']}"
        cluster += "".join(f", {name} {c[name]}" for name in ("tp", "cp", "pp") if c.get(name, "") not in ("", "1"))
        shape = f"{row.source} | {row.model} | {cluster} | {c['seq_len']} | {batch} | {c['checkpointing']}{more} | {row.metric}"
        if row.not_modelled:
            lines.append(f"| {shape} | {row.value:,g} | not modelled | | {row.not_modelled} |")
        else:
            predicted = f"{row.predicted(rates):,.5g}"
            lines.append(f"| {shape} | {row.value:,g} | {predicted} | {100 * row.error(rates):+.1f}% | {use} |")
    return lines


def table(rows, rates):
    """Every row, as Markdown, and how large the errors are."""
    modelled = [row for row in rows if not row.not_modelled]
    lines = [
        *rows_table(rows, rates),
        "",
        f"{len(modelled)} of {len(rows)} rows are modelled ({100 * len(modelled) / len(rows):.0f}%).",
        "",
    ]
    for which in (
        "fitted",
        "time, held out, software that was fitted",
        "time, held out, other software",
        "memory, held out",
    ):
        errors = [abs(row.error(rates)) for row in modelled if group(row, rows) == which]
        mean, median, p90 = statistics.mean(errors), statistics.median(errors), quantile(errors, 0.9)
        numbers = f"mean {100 * mean:.1f}%, median {100 * median:.1f}%, p90 {100 * p90:.1f}%, largest {100 * max(errors):.1f}%"
        lines.append(f"- {which}, {len(errors)} rows: {numbers}")
    return "\n".join(lines)


def group(row, rows):
    """What a row tells."""
    if row.train:
        return "fitted"
    if row.metric in BYTES:
        return "memory, held out"
    fitted = any(other.train and other.source == row.source for other in rows)
    return f"time, held out, {'software that was fitted' if fitted else 'other software'}"


def quantile(values, share):
    """The value that so many are not above."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def between(text, begin, end, new):
    """Return a text with what is between two marks replaced."""
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n{new}\n{end}{rest.partition(end)[2]}"


def write(document, begin, end, new):
    """Write a table into a page."""
    document.write_text(between(document.read_text(), begin, end, new))


if __name__ == "__main__":
    all_rows, unseen = read_rows(), read_rows(UNSEEN)
    fitted = fit(all_rows)
    COEFFICIENTS_FILE.write_text(written(fitted))
    evidence = plan_ranges.points([*all_rows, *unseen, *read_bundles()], fitted)
    RANGES_FILE.write_text(plan_ranges.written(evidence))
    write(DOCUMENT, BEGIN, END, table(all_rows, fitted))
    write(DOCUMENT, RANGES_BEGIN, RANGES_END, plan_ranges.table(evidence))
    write(UNSEEN_DOCUMENT, PROGRAMS_BEGIN, PROGRAMS_END, plan_ranges.programs_table(evidence))
    write(UNSEEN_DOCUMENT, BEGIN, END, "\n".join(rows_table(unseen, fitted)))
    print(DOCUMENT.read_text()[-900:])
