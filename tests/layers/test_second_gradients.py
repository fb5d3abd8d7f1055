"""Gradients of gradients, as a gradient penalty takes them, on ranks without heads too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support.oracle import attention
from tests.support.pool import run_ranks
from tests.support.sharded import draw_qkv
from ulysses_mc import SequenceLayout
from ulysses_mc.layers import UlyssesAttention

S = 7


def twice(attend, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    out = attend(*(tensor.sin() for tensor in inputs))
    first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
    return [*first, *second]


def compare(heads: int, kv: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    layout = SequenceLayout.contiguous(S, size)
    whole = [tensor.clone().requires_grad_() for tensor in draw_qkv(2, S, heads, kv)]
    expected = twice(lambda *qkv: attention(*qkv, causal=True), whole)
    local = [layout.shard(t.detach(), 1, rank).clone().requires_grad_() for t in whole]
    module = UlyssesAttention(dist.group.WORLD, layout)
    with sdpa_kernel(SDPBackend.MATH):  # the kernel that can be differentiated twice
        results = twice(lambda *qkv: module(*qkv, causal=True), local)
    for found, right in zip(results, expected, strict=True):
        torch.testing.assert_close(found, layout.shard(right, 1, rank), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("heads", "kv"), [(6, 3), (7, 7), (2, 1), (2, 2)])
def test_equal_those_of_one_process(heads, kv) -> None:
    run_ranks(3, compare, heads, kv, timeout=30)
