"""Tests that run TransformerEngine's own code; without it they are skipped, and say so."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

MISSING = (
    "TransformerEngine is not installed (here: put its wheel for this Python into ../shared/wheels "
    "or name its folder in TE_WHEELS, and run .ci/run)"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("transformer_engine") is not None:
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=MISSING))
