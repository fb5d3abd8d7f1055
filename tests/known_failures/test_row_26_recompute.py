"""Row 26: with recomputation, saved and recomputed shapes differ."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tests.support.pool import run_ranks
from tests.support.sharded import draw, draw_qkv
from ulysses_mc import SequenceLayout
from ulysses_mc.layers import UlyssesAttention


def gradients(use_reentrant: bool | None, heads: int, kv: int, dropout_p: float):
    """Two layers, of which each is recomputed if `use_reentrant` is not None."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layout = SequenceLayout.contiguous(7, size)
    local = [layout.shard(t, 1, rank).clone() for t in draw_qkv(2, 7, heads, kv)]
    inputs = [tensor.requires_grad_() for tensor in local]
    attention = UlyssesAttention(dist.group.WORLD, layout)
    torch.manual_seed(3)

    def layer(query, key, value):
        return attention(query, key, value, causal=True, dropout_p=dropout_p)

    x, key, value = inputs
    for _ in range(2):
        if use_reentrant is None:
            x = layer(x, key, value)
        else:
            x = checkpoint(layer, x, key, value, use_reentrant=use_reentrant)
    x.backward(layout.shard(draw(2, 7, heads, 4), 1, rank))
    return [x.detach(), *(tensor.grad for tensor in inputs)]


def compare(use_reentrant: bool, heads: int, kv: int, dropout_p: float) -> None:
    expected = gradients(None, heads, kv, dropout_p)
    actual = gradients(use_reentrant, heads, kv, dropout_p)
    assert torch.equal(actual[0], expected[0])
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(("heads", "kv"), [(4, 2), (7, 7), (4, 1)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_gradients_as_without(use_reentrant, heads, kv, dropout_p) -> None:
    run_ranks(2, compare, use_reentrant, heads, kv, dropout_p)


def fewer_heads_than_ranks(use_reentrant: bool) -> None:
    """The rank without heads saves nothing of its own, and has to recompute all the same."""
    compare(use_reentrant, 2, 1, 0.0)
    compare(use_reentrant, 2, 2, 0.0)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_with_a_rank_without_heads(use_reentrant) -> None:
    run_ranks(3, fewer_heads_than_ranks, use_reentrant, timeout=30)
