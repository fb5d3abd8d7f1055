"""Row 18: the global rank is used as an index inside a group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.oracle import attention_gradients
from tests.support.pool import run_ranks
from tests.support.sharded import assert_close, attend_on_rank, draw, draw_qkv, whole
from ulysses_mc import SequenceLayout

LAYOUT = SequenceLayout.contiguous(5, 2)


def attend_in_own_group(members: list[list[int]], transport: str) -> dict[str, torch.Tensor]:
    groups = [dist.new_group(ranks) for ranks in members]
    number = next(i for i, ranks in enumerate(members) if dist.get_rank() in ranks)
    tensors = draw_qkv(2, 5, 3, 3, seed=10 * number)  # each group its own batch
    grad = draw(2, 5, 3, 4, seed=number)
    return attend_on_rank(
        tensors, grad, LAYOUT, group=groups[number], transport=transport, causal=True
    )


@pytest.mark.parametrize("transport", ["p2p", "all_to_all"])
@pytest.mark.parametrize("members", [[[0, 1], [2, 3]], [[0, 2], [1, 3]]])
def test_forward_and_backward_in_the_second_group(members, transport) -> None:
    results = run_ranks(4, attend_in_own_group, members, transport)
    for number, ranks in enumerate(members):
        expected = attention_gradients(
            *draw_qkv(2, 5, 3, 3, seed=10 * number), draw(2, 5, 3, 4, seed=number), causal=True
        )
        assert_close(whole([results[r] for r in ranks], LAYOUT), expected, torch.float64)
