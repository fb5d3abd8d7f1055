"""Row 7: a sequence that the Ulysses size does not divide, down to ranks without tokens."""

from __future__ import annotations

import pytest

from tests.support.sharded import check_against_oracle, draw_qkv
from ulysses_mc import SequenceLayout


@pytest.mark.parametrize("transport", ["p2p", "all_to_all"])
@pytest.mark.parametrize(("s", "lengths"), [(13, (4, 3, 3, 3)), (3, (1, 1, 1, 0))])
def test_exact_with_unequal_and_empty_shards(s, lengths, transport) -> None:
    layout = SequenceLayout.contiguous(s, 4)
    assert layout.lengths == lengths
    check_against_oracle(4, draw_qkv(2, s, 8, 4), layout, causal=True, transport=transport)


@pytest.mark.parametrize("lengths", [[7, 0, 1, 5], [0, 0, 0, 13]])
def test_exact_with_any_lengths(lengths) -> None:
    check_against_oracle(4, draw_qkv(1, 13, 6, 3), SequenceLayout.from_lengths(lengths))
