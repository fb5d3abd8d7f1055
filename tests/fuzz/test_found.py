"""Draws that failed once, under the name of what was wrong."""

from __future__ import annotations

import pytest

from tests.fuzz.draws import Draw
from tests.fuzz.test_fuzz import check

FOUND = {
    "one rank whose layout has the tokens in another order": Draw(
        heads=1,
        kv_heads=1,
        tensor=1,
        ulysses=1,
        batch=1,
        head_dim=4,
        value_dim=8,
        layout=(((0, 5),),),
        kv_layout=(((1, 6), (6, 9), (0, 1)),),
        causal=True,
    ),
    "one rank whose layout has the queries in another order": Draw(
        heads=1,
        kv_heads=1,
        tensor=1,
        ulysses=1,
        batch=None,
        head_dim=4,
        value_dim=8,
        layout=(((3, 5), (0, 3)),),
        causal=True,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_equals_the_oracle(name: str) -> None:
    assert not check([FOUND[name]])
