"""Row 16: a shard without a valid token gives NaN, or poisons the others with its own."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.support.pool import run_ranks
from ulysses_mc import (
    SequenceLayout,
    cross_entropy,
    linear_cross_entropy,
    megatron_token_loss,
    shard_batch,
    token_mean_loss,
)

S, D, VOCABULARY = 8, 5, 7
LAYOUT = SequenceLayout.contiguous(S, 2)


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, S, D, generator=draw, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, D, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, VOCABULARY, (2, S), generator=draw)
    return hidden, weight, labels


def oracle(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss and gradients of hidden and weight, in one process, over the valid tokens."""
    hidden, weight, _ = data()
    hidden.requires_grad_()
    weight.requires_grad_()
    valid = labels != -100
    loss = F.cross_entropy(hidden[valid] @ weight.T, labels[valid])
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


def local_gradients(
    labels: torch.Tensor, poison: float, how: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With `poison` in every hidden state that has no valid label."""
    hidden, weight, _ = data()
    hidden[labels == -100] = poison
    batch = shard_batch({"hidden": hidden, "labels": labels}, LAYOUT, dist.get_rank())
    local, weight = batch["hidden"].requires_grad_(), weight.requires_grad_()
    if how == "logits":  # NaN logits of our own, as from a kernel; the output layer is not ours
        logits = (local.nan_to_num(0.0) @ weight.T).masked_fill(
            (batch["labels"] == -100)[..., None], poison
        )
        sums = cross_entropy(logits, batch["labels"])
    else:
        sums = linear_cross_entropy(local, weight, batch["labels"], chunk_size=3)
    loss = token_mean_loss(*sums, dist.group.WORLD, gradient_divisor=1)
    loss.backward()
    dist.all_reduce(weight.grad)
    return loss.detach(), local.grad, weight.grad


@pytest.mark.parametrize("how", ["hidden", "logits"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, 0.0])
def test_a_masked_shard_contributes_nothing(how: str, poison: float) -> None:
    labels = data()[2]
    labels[:, S // 2 :] = -100  # all of rank 1
    labels[0, 1] = -100
    results = run_ranks(2, local_gradients, labels, poison, how)
    loss, hidden, weight = oracle(labels)
    for result in results:
        torch.testing.assert_close(result[0], loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(result[2], weight, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([r[1] for r in results], 1), hidden)
    assert torch.equal(results[1][1], torch.zeros(2, S // 2, D, dtype=torch.float64))


@pytest.mark.parametrize("how", ["hidden", "logits"])
def test_everything_masked_gives_exactly_zero(how: str) -> None:
    labels = torch.full((2, S), -100)
    for loss, hidden, weight in run_ranks(2, local_gradients, labels, math.nan, how):
        assert loss == 0 and not hidden.any() and not weight.any()


def megatron(losses: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    layout = SequenceLayout.contiguous(4, 2)
    batch = shard_batch({"losses": losses, "mask": mask}, layout, dist.get_rank())
    local = batch["losses"].requires_grad_()
    total, count, report = megatron_token_loss(local, batch["mask"], dist.group.WORLD)
    total.backward()
    assert count.dtype == torch.int
    return total.detach(), count, report["lm loss"], local.grad


def test_megatrons_masked_losses_are_not_read() -> None:
    losses, mask = torch.tensor([[1.0, 2.0, math.nan, math.inf]]), torch.tensor([[1, 1, 0, 0]])
    first, second = run_ranks(2, megatron, losses, mask)
    assert [first[0], first[1], second[0], second[1]] == [3, 2, 0, 0]
    assert first[2].tolist() == second[2].tolist() == [3, 2]
    assert first[3].tolist() == [[1, 1]] and second[3].tolist() == [[0, 0]]
