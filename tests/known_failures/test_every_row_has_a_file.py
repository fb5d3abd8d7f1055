"""No row of the known failures is without a test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROWS = range(1, 31)


def test_every_row_has_a_file_with_tests() -> None:
    tested = set()
    for path in Path(__file__).parent.glob("test_row_*.py"):
        number = int(re.match(r"test_row_(\d\d)_", path.name)[1])  # type: ignore[index]
        module = ast.parse(path.read_text())
        docstring = ast.get_docstring(module) or ""
        assert docstring.startswith(f"Row {number}"), f"{path.name} says {docstring[:20]!r}"
        names = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
        assert any(name.startswith("test_") for name in names), path.name
        tested.add(number)
    assert tested == set(ROWS)
