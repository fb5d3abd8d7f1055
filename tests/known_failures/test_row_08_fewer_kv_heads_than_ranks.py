"""Row 8: fewer key/value heads than Ulysses ranks: repeat each head, sum over its replicas."""

from __future__ import annotations

import pytest

from tests.support.sharded import check_against_oracle, draw_qkv
from ulysses_mc import HeadLayout


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("kv", [8, 2, 1])
def test_keys_and_values_and_their_gradients(kv, ranks) -> None:
    layout = HeadLayout(8, kv, ranks)
    repeated = [head for run in layout.kv_heads for head in run]
    assert repeated == [head * kv // max(kv, ranks) for head in range(max(kv, ranks))]
    assert len(repeated) == max(kv, ranks)
    check_against_oracle(ranks, draw_qkv(2, 8, 8, kv), causal=True)
