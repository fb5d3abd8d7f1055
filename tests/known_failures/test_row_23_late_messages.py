"""Row 23: an overlapped path gives its result permuted, or reads it before it has come."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import run_ranks
from tests.support.sharded import draw, draw_qkv
from ulysses_mc import SequenceLayout
from ulysses_mc.layers import UlyssesAttention


def attend(transport: str, seed: int, late: int | None) -> list[torch.Tensor]:
    """Output and gradients of this rank's tokens; rank `late` comes late to every exchange."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layout = SequenceLayout.zigzag(8 * size, size)
    whole = draw_qkv(2, 8 * size, 8, 2, seed=seed)
    leaves = [layout.shard(t, 1, rank).clone().requires_grad_() for t in whole]

    def local(query: torch.Tensor, *others: torch.Tensor, causal: bool) -> torch.Tensor:
        from ulysses_mc.layers.local import sdpa_attention

        pause()  # before the exchange back
        return sdpa_attention(query, *others, causal=causal)

    def pause(_: torch.Tensor | None = None) -> None:
        if rank == late:
            time.sleep(0.05)

    attention = UlyssesAttention(
        dist.group.WORLD, layout, transport=transport, local_attention=local
    )
    pause()
    out = attention(*leaves, causal=True)
    out.register_hook(pause)  # before the exchange of backward
    out.backward(layout.shard(draw(2, 8 * size, 8, 4, seed=seed + 9), 1, rank))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def compare() -> None:
    """Buffers are used again: what another seed left in them must not be what is read."""
    right = attend("p2p", 1, None)
    for transport in ("p2p", "all_to_all"):
        for late in (0, 1, 3):
            attend(transport, 2, None)
            for found, expected in zip(attend(transport, 1, late), right, strict=True):
                assert torch.equal(found, expected)


def test_late_ranks_and_both_transports_are_bitwise_equal() -> None:
    run_ranks(4, compare)


@pytest.mark.megatron
@pytest.mark.skipif(torch.cuda.is_available(), reason="compares CPU ranks")
def test_megatrons_overlapped_reduction_is_bitwise_equal() -> None:
    """`overlap_grad_reduce` starts the sums over data x Ulysses ranks during backward."""
    pytest.importorskip("megatron.core")
    from tests.megatron.small_gpt import Setting
    from tests.megatron.test_parity import train

    setting = Setting(cp=2, distributed_optimizer=True, config={"num_attention_heads": 8})
    one = run_ranks(4, train, setting, "sdpa", timeout=120)
    other = run_ranks(4, train, replace(setting, overlap_grad_reduce=True), "sdpa", timeout=120)
    for steps, again in zip(one, other, strict=True):
        for (loss, norm, gradients), (loss2, norm2, gradients2) in zip(steps, again, strict=True):
            assert (loss, norm) == (loss2, norm2)
            assert all(torch.equal(gradients[name], gradients2[name]) for name in gradients)
