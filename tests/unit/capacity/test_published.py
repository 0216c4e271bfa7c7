"""The plan's predictions against published measurements; the coefficients come from the rows that may be fitted, and from no other."""

import csv
import statistics

import pytest

from fit_plan import BEGIN, DOCUMENT, END, fit, group, quantile, table, written
from llama405b.capacity.rates import COEFFICIENTS, Rates
from published import ROWS, read_rows


@pytest.fixture(scope="module")
def rows():
    return read_rows()


def test_the_coefficients_are_what_the_fitted_rows_give(rows):
    assert COEFFICIENTS.read_text() == written(fit(rows))


@pytest.mark.parametrize("subset", ["train", "held-out"])
def test_rows_that_are_not_fitted_change_no_coefficient(tmp_path, subset):
    cells = list(csv.DictReader(ROWS.read_text().splitlines()))
    with (tmp_path / "rows.csv").open("w") as file:
        out = csv.DictWriter(file, list(cells[0]))
        out.writeheader()
        out.writerows(row | {"value": 2 * float(row["value"])} if row["subset"] == subset else row for row in cells)
    assert (fit(read_rows(tmp_path / "rows.csv")) == Rates.read()) is (subset == "held-out")


def test_it_is_as_close_as_it_says(rows):
    rates = Rates.read()
    modelled = [row for row in rows if not row.not_modelled]
    assert len(modelled) >= 0.8 * len(rows)
    errors = {}
    for row in modelled:
        errors.setdefault(group(row, rows), []).append(abs(row.error(rates)))
    assert max(errors["memory, held out"]) < 0.05
    other = errors["time, held out, other software"]
    found = [*other, *errors["time, held out, software that was fitted"]]
    assert statistics.median(found) < 0.07
    assert statistics.median(other) < 0.10
    assert quantile(other, 0.9) < 0.15


def test_the_document_has_the_table(rows):
    _, _, rest = DOCUMENT.read_text().partition(BEGIN)
    assert rest.partition(END)[0].strip() == table(rows, Rates.read())
