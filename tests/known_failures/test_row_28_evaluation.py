"""Row 28: evaluation with another batch size or an odd length, unlike training."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.support.pool import run_ranks
from ulysses_mc import (
    SequenceLayout,
    linear_cross_entropy,
    shard_batch,
    shift_labels,
    token_mean_loss,
)


def evaluate(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    layout = SequenceLayout.contiguous(ids.size(1), dist.get_world_size())
    batch = {"tokens": ids, "labels": shift_labels(ids)}
    local = shard_batch(batch, layout, dist.get_rank())
    with torch.no_grad():
        sums = linear_cross_entropy(table[local["tokens"]], table, local["labels"])
        return token_mean_loss(*sums, dist.group.WORLD)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("b", "s"), [(2, 16), (1, 13), (3, 7), (1, 3), (5, 2)])
def test_loss_is_the_single_process_one(ranks: int, b: int, s: int) -> None:
    torch.manual_seed(b * s)
    ids, table = torch.randint(0, 9, (b, s)), torch.randn(9, 4, dtype=torch.float64)
    logits = table[ids[:, :-1]] @ table.T
    right = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    for value in run_ranks(ranks, evaluate, ids, table):
        torch.testing.assert_close(value, right, rtol=1e-12, atol=0)
