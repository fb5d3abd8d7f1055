"""The estimator against published numbers: formulas to 0.2%, measurements with their error."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from .published import Row, formula_rows, measured_rows


@pytest.mark.parametrize("row", list(formula_rows()), ids=str)
def test_formula(row: Row) -> None:
    assert abs(row.error()) < 0.002, f"{row}: {row.compute()} against {row.published} {row.unit}"


@pytest.mark.parametrize("row", list(measured_rows()), ids=str)
def test_measured(row: Row) -> None:
    print(f"{row}: {row.compute():,.4g} against {row.published:,} {row.unit}: {row.error():+.1%}")
    assert abs(row.error()) < row.limit


def test_median_of_the_measured_errors_is_below_a_tenth() -> None:
    rows = list(measured_rows())
    errors = [abs(row.error()) for row in rows]
    for row, error in zip(rows, errors, strict=True):
        print(f"{error:7.1%}  {row}")
    assert median(errors) < 0.10
    assert sum(error > 0.25 for error in errors) <= 4  # the four that docs/planning.md explains


@pytest.mark.parametrize("row", [*formula_rows(), *measured_rows()], ids=str)
def test_docs_give_the_error(row: Row) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/planning.md").read_text()
    lines = [line for line in page.splitlines() if f"| {row.source} | {row.what} |" in line]
    assert len(lines) == 1
    said = float(lines[0].split("|")[-2].strip(" %")) / 100
    assert said == pytest.approx(row.error(), abs=0.0006)
