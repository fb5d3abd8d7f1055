"""Mutations of the library under which the comparison with the oracle must fail.

Each mutation leaves every shape right. The logits are sharpened by `scale`, so that a wrong key
changes the output by more than a tolerance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.oracle import Gradients, attention_gradients
from tests.support.pool import run_ranks
from tests.support.sharded import assert_close, attend_on_rank, draw, draw_qkv, whole
from ulysses_mc import HeadLayout, SequenceLayout, exchange, shard_batch
from ulysses_mc.layers import attention as ulysses_attention
from ulysses_mc.transport import memory, plan
from ulysses_mc.transport.memory import Cut

S, H, K, D, SCALE = 16, 8, 2, 4, 3.0
LAYOUT = SequenceLayout.zigzag(S, 4)


def rotated(tensor: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of [.., s, h, d] at [s] or [b, s] positions."""
    angle = positions[..., None, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)
    first, second = tensor.chunk(2, -1)
    return torch.cat(
        [first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()],
        -1,
    )


def restarting_positions(self: SequenceLayout, rank: int, cu_seqlens: Any = None) -> list[int]:
    return list(range(self.lengths[rank]))


@contextlib.contextmanager
def last_replica_only() -> Iterator[None]:
    """Of a replicated head the last rank's gradient alone."""

    def moves(result: Tensor, piece: Any, cut: Cut) -> Iterator[tuple[Tensor, Tensor, bool]]:
        rows = result.narrow(0, piece.start, piece.block.size(0))
        yield memory.narrow_heads(rows, cut.heads[piece.rank]), piece.block, False

    plan.plan_scatters.cache_clear()  # it keeps what is added where
    try:
        with patch.object(plan, "moves", moves):
            yield
    finally:
        plan.plan_scatters.cache_clear()


def tokens_as_they_lie(sequence: SequenceLayout, heads: tuple[range, ...]) -> Cut:
    return Cut(SequenceLayout.from_lengths(sequence.lengths), heads)


def tiled_kv_heads(self: HeadLayout) -> tuple[range, ...]:
    """Key/value heads 0, 1, 0, 1 over the ranks instead of 0, 0, 1, 1."""
    return tuple(range(rank % K, rank % K + 1) for rank in range(self.ulysses_parallel_size))


def gradients_of_own_tokens(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
    """Every rank's own output gradient alone, as where a backward collective is missing."""
    (cut,), rank = ctx.route.cuts, ctx.route.group.rank()
    batch, _, *rest = gradient.shape  # [b, s_r, h, d]
    whole_gradient = gradient.new_zeros(batch, cut.sequence.sequence_length, *rest)
    whole_gradient[:, cut.sequence.token_indices(rank)] = gradient
    heads = cut.heads[rank]
    return None, whole_gradient[:, :, heads.start : heads.stop].contiguous()


MUTATIONS: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "positions restart in every shard": lambda: patch.object(
        SequenceLayout, "positions", restarting_positions
    ),
    "gradients of replicated heads not summed": last_replica_only,
    "tokens in the order they lie": lambda: patch.object(
        Cut, "of", staticmethod(tokens_as_they_lie)
    ),
    "key/value heads tiled": lambda: patch.multiple(
        HeadLayout, kv_heads=property(tiled_kv_heads), kv_expansion=lambda self, rank: None
    ),
    "no exchange back of the gradients": lambda: patch.object(
        exchange._HeadsToSequence, "backward", gradients_of_own_tokens
    ),
    "the other group": contextlib.nullcontext,
}


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    kept = (ulysses_attention.head_layout, ulysses_attention._held)  # layouts with their heads
    for cache in kept:
        cache.cache_clear()
    try:
        with MUTATIONS[name]():
            yield
    finally:
        for cache in kept:
            cache.cache_clear()


def on_rank(name: str) -> dict[str, Tensor]:
    """All four ranks on one batch, then two pairs with a batch each: ranks 0, 1 and ranks 2, 3."""
    order = [0, 1, 2, 3] if name != "the other group" else [0, 2, 1, 3]
    pairs = [dist.new_group(order[:2]), dist.new_group(order[2:])]
    group = pairs[order.index(dist.get_rank()) // 2]
    with mutated(name):
        positions = shard_batch({"tokens": torch.zeros(1, S)}, LAYOUT, dist.get_rank())
        shard = {"layout": LAYOUT, "rank": dist.get_rank()}
        results = attend(positions["position_ids"][0].double(), **shard)
        half = SequenceLayout.zigzag(S, 2)
        in_pair = attend_on_rank(
            data(dist.get_rank() // 2), grad_out(), half, group=group, causal=True, scale=SCALE
        )
    return results | {f"pair {key}": value for key, value in in_pair.items()}


def data(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    return draw_qkv(2, S, H, K, d=D, seed=10 * seed)


def grad_out() -> Tensor:
    return draw(2, S, H, D, seed=99)


def attend(positions: Tensor, layout: SequenceLayout, rank: int) -> dict[str, Tensor]:
    """Queries and keys rotated by the positions that the rank was given."""
    query, key, value = (layout.shard(tensor, 1, rank) for tensor in data(0))
    tensors = [rotated(query, positions), rotated(key, positions), value]
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    module = ulysses_attention.UlyssesAttention(dist.group.WORLD, layout)
    out = module(*leaves, causal=True, scale=SCALE)
    grads = torch.autograd.grad(out, leaves, layout.shard(grad_out(), 1, rank))
    return {"out": out.detach()} | dict(zip(("query", "key", "value"), grads, strict=True))


def expected(seed: int, rotate: bool) -> Gradients:
    query, key, value = data(seed)
    if rotate:
        query, key = (rotated(tensor, torch.arange(S).double()) for tensor in (query, key))
    return attention_gradients(query, key, value, grad_out(), causal=True, scale=SCALE)


def compare(name: str) -> None:
    results = run_ranks(4, on_rank, name)
    four = [{key: r[key] for key in ("out", "query", "key", "value")} for r in results]
    assert_close(whole(four, LAYOUT), expected(0, rotate=True), torch.float64)
    pairs = [{k.removeprefix("pair "): r[k] for k in r if k.startswith("pair ")} for r in results]
    for number in range(2):
        pair = whole(pairs[2 * number : 2 * number + 2], SequenceLayout.zigzag(S, 2))
        assert_close(pair, expected(number, rotate=False), torch.float64)


def test_without_a_mutation_the_comparison_holds() -> None:
    compare("none")


@pytest.mark.parametrize("name", [name for name in MUTATIONS if name != "none"])
def test_a_mutation_turns_the_comparison_red(name) -> None:
    with pytest.raises(AssertionError, match="is off by"):
        compare(name)
