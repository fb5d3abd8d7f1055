"""Row 2: query heads not divisible by the Ulysses size: hangs and reshape errors elsewhere."""

from __future__ import annotations

import pytest

from tests.support.sharded import check_against_oracle, draw_qkv
from ulysses_mc import HeadLayout


@pytest.mark.parametrize(
    ("heads", "kv", "ranks", "runs"),
    [
        (7, 7, 4, [2, 2, 2, 1]),
        (7, 1, 4, [2, 2, 2, 1]),
        (20, 20, 8, [3, 3, 3, 3, 2, 2, 2, 2]),
        (6, 6, 4, [2, 2, 1, 1]),
        (6, 3, 2, [3, 3]),
    ],
)
def test_every_head_is_held_once_and_values_are_right(heads, kv, ranks, runs) -> None:
    layout = HeadLayout(heads, kv, ranks)
    assert [len(run) for run in layout.query_heads] == runs
    assert [head for run in layout.query_heads for head in run] == [*range(heads)]
    check_against_oracle(ranks, draw_qkv(2, 2 * ranks, heads, kv), causal=True)
