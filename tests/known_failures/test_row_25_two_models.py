"""Row 25: two models in one process, where a count of heads is kept process-wide."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.support.oracle import attention_gradients
from tests.support.pool import run_ranks
from tests.support.sharded import assert_close, draw, draw_qkv, whole
from ulysses_mc import SequenceLayout
from ulysses_mc.layers import UlyssesAttention

HEADS = (12, 6, 12)


def three_models() -> list[dict[str, torch.Tensor]]:
    """Forward passes of all, then backward passes, last first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layout = SequenceLayout.contiguous(8, size)
    models = [UlyssesAttention(dist.group.WORLD, num_heads=heads) for heads in HEADS]
    leaves = [
        [layout.shard(t, 1, rank).clone().requires_grad_() for t in draw_qkv(1, 8, h, h, seed=h)]
        for h in HEADS
    ]
    outs = [model(*inputs, causal=True) for model, inputs in zip(models, leaves, strict=True)]
    results = []
    for heads, inputs, out in reversed([*zip(HEADS, leaves, outs, strict=True)]):
        grads = torch.autograd.grad(out, inputs, layout.shard(draw(1, 8, heads, 4), 1, rank))
        named = dict(zip(("query", "key", "value"), grads, strict=True))
        results.append({"out": out.detach(), **named})
    return results[::-1]


def test_12_heads_then_6_then_12_over_4_ranks() -> None:
    results = run_ranks(4, three_models)
    for number, heads in enumerate(HEADS):
        expected = attention_gradients(
            *draw_qkv(1, 8, heads, heads, seed=heads), draw(1, 8, heads, 4), causal=True
        )
        actual = whole([result[number] for result in results], SequenceLayout.contiguous(8, 4))
        assert_close(actual, expected, torch.float64)
