"""Row 6: ranks with unequal numbers of valid tokens; the mean of their means is wrong."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import run_ranks
from tests.support.wire import count_wire
from ulysses_mc import (
    SequenceLayout,
    megatron_token_loss,
    shard_batch,
    token_count,
    token_mean_loss,
)
from ulysses_mc.loss import masked_sum

LOSSES = torch.arange(1.0, 9.0)[None]
# weights -> (sum of weighted losses) / (sum of weights); the first looks right under zigzag too
CASES = [
    ([1, 1, 1, 0, 1, 0, 0, 0], 2.75),
    ([1, 1, 1, 1, 1, 0, 0, 0], 3.0),
    ([0.5, 0, 0, 0, 0, 0, 0, 1.5], 6.25),
    ([0, 0, 0, 0, 0, 0, 0, 1], 8.0),
]


def mean_and_gradient(
    layout: SequenceLayout, weights: list[float], divisor: float | None
) -> tuple[float, float, float, int]:
    """Losses are w x token; the gradient is taken as an engine that averages would."""
    batch = shard_batch({"x": LOSSES, "weights": torch.tensor([weights])}, layout, dist.get_rank())
    w = torch.ones((), requires_grad=True)
    with count_wire() as wire:
        loss = token_mean_loss(
            *masked_sum(w * batch["x"], batch["weights"]),
            dist.group.WORLD,
            gradient_divisor=divisor,
        )
        loss.backward()
    grad = w.grad.clone()
    dist.all_reduce(grad)
    grad /= dist.get_world_size() if divisor is None else divisor
    report = megatron_token_loss(batch["x"], batch["weights"], dist.group.WORLD)[2]["lm loss"]
    return float(loss.detach()), float(grad), float(report[0] / report[1]), wire.exchanges


@pytest.mark.parametrize("divisor", [None, 1.0, 2.0])
@pytest.mark.parametrize("ranks", [2, 4])  # 4: as data parallel 2 x ulysses 2, or ulysses 4
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_the_mean_is_over_tokens(kind: str, ranks: int, divisor: float | None) -> None:
    layout = getattr(SequenceLayout, kind)(8, ranks)
    for weights, right in CASES:
        results = run_ranks(ranks, mean_and_gradient, layout, weights, divisor)
        assert all(value == right for value, *_ in results)  # the logged value: on every rank
        assert [grad for _, grad, *_ in results] == pytest.approx([right] * ranks)
        assert [report for *_, report, _ in results] == pytest.approx([right] * ranks)
        assert all(exchanges == 1 for *_, exchanges in results)


def two_micro_batches() -> tuple[float, float]:
    """Dp 2 x ulysses 2; counts differ between ranks and between micro-batches."""
    rank = dist.get_rank()
    layout, w = SequenceLayout.contiguous(4, 2), torch.ones((), requires_grad=True)
    samples = torch.arange(1.0, 17.0).view(2, 2, 1, 4)  # [micro-batch, dp, b, s]
    masks = torch.tensor([[[1, 1, 1, 0], [1, 0, 0, 0]], [[0, 0, 0, 0], [0, 1, 1, 1]]])[:, :, None]
    micro = [
        shard_batch({"x": samples[i, rank // 2], "m": masks[i, rank // 2]}, layout, rank % 2)
        for i in range(2)
    ]
    total = token_count(sum(b["m"].sum() for b in micro), dist.group.WORLD)
    value = 0.0
    for batch in micro:
        sums = masked_sum(w * batch["x"], batch["m"])
        loss = token_mean_loss(*sums, dist.group.WORLD, total_count=total)
        loss.backward()
        value += float(loss.detach())
    grad = w.grad.clone()
    dist.all_reduce(grad, op=dist.ReduceOp.SUM)
    return value, float(grad) / 4


def test_micro_batches_are_weighted_by_their_tokens_too() -> None:
    right = (1 + 2 + 3 + 5 + 14 + 15 + 16) / 7
    for value, grad in run_ranks(4, two_micro_batches):
        assert value == pytest.approx(right) and grad == pytest.approx(right)
