"""Row 5: Ulysses is on in the config, and every rank attends to its own tokens only."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import run_ranks
from tests.support.sharded import draw_qkv
from ulysses_mc import ParallelConfigError, SequenceLayout
from ulysses_mc.layers import UlyssesAttention


def test_no_group_is_refused() -> None:
    with pytest.raises(ParallelConfigError, match="group=None"):
        UlyssesAttention(None)  # type: ignore[arg-type]


def last_token_of_each_rank(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    layout = SequenceLayout.contiguous(8, dist.get_world_size())
    local = [layout.shard(tensor, 1, dist.get_rank()) for tensor in tensors]
    return UlyssesAttention(dist.group.WORLD)(*local, causal=True)[:, -1]


@pytest.mark.parametrize("ranks", [2, 4])
def test_token_0_reaches_the_last_rank(ranks) -> None:
    tensors = draw_qkv(1, 8, 4, 4)
    changed = tuple(tensor.clone() for tensor in tensors)
    for tensor in changed:
        tensor[:, 0] += 1
    before = run_ranks(ranks, last_token_of_each_rank, tensors)
    after = run_ranks(ranks, last_token_of_each_rank, changed)
    assert (before[-1] - after[-1]).abs().amax(-1).min() > 1e-6  # in every head
