"""Row 24: the value's head dimension differs from the query's, as in MLA."""

from __future__ import annotations

import pytest

from tests.support.sharded import check_against_oracle, draw_qkv


@pytest.mark.parametrize("transport", ["p2p", "all_to_all"])
@pytest.mark.parametrize(("d", "dv"), [(6, 3), (3, 6)])
@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (5, 5), (4, 1)])
def test_output_has_the_values_dimension(heads, kv, d, dv, transport) -> None:
    tensors = draw_qkv(1, 8, heads, kv, d, dv)
    whole = check_against_oracle(2, tensors, causal=True, transport=transport)
    assert whole["out"].shape == (1, 8, heads, dv)
