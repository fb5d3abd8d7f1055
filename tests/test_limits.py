"""docs/limits.md names the test that holds each line: each of them is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "limits.md").read_text()


def test_every_named_test_exists() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXT))
    assert len(named) > 30
    for path, function in named:
        assert f"\ndef {function or 'test_'}" in (ROOT / path).read_text(), f"{path}::{function}"


def test_every_line_of_a_table_names_a_test() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| ")]
    cells = [row.strip("| ").split(" | ")[-1] for row in rows]
    assert [cell for cell in cells if cell != "test" and "tests/" not in cell] == []
