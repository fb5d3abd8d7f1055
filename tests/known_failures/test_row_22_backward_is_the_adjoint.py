"""Row 22: backward of an exchange lacks a sum, breaks on strides, or is right for b = 1 only."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from tests.exchange.test_exchange import TRANSPORTS, draw, layouts
from tests.support.pool import run_ranks
from ulysses_mc import HeadLayout
from ulysses_mc.exchange import Cut, heads_to_sequence, sequence_to_heads


def check_adjoint() -> None:
    """<A x, y> = <x, A^T y> summed over ranks, also for gradients that are not contiguous."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    for layout, (heads, kv), batch, batch_first, transport in itertools.product(
        layouts(size), [(size, 1), (6, 3), (2 * size, size)], (1, 2, 3), (False, True), TRANSPORTS
    ):
        split = HeadLayout(heads, kv, size)
        cut = Cut(layout, split.kv_heads)
        options = {"batch_first": batch_first, "transport": transport}

        def ordered(*shape: int, first: bool = batch_first) -> tuple[int, ...]:
            return (shape[1], shape[0], *shape[2:]) if first else shape

        shape = ordered(layout.lengths[rank], batch, kv, 3)
        x = draw(*reversed(shape), seed=rank).permute(3, 2, 1, 0).requires_grad_()
        (out,) = sequence_to_heads([x], [cut], group, **options)
        y = draw(*reversed(out.shape), seed=9 + rank).permute(3, 2, 1, 0)
        (gradient,) = torch.autograd.grad(out, x, y)
        sides = torch.stack([(out * y).sum(), (x * gradient).sum()]).detach()
        dist.all_reduce(sides)
        torch.testing.assert_close(sides[0], sides[1])

        shape = ordered(layout.sequence_length, batch, len(cut.heads[rank]), 3)
        y = draw(*reversed(shape), seed=rank).permute(3, 2, 1, 0).requires_grad_()
        (out,) = heads_to_sequence([y], [cut], group, **options)
        x = draw(*reversed(out.shape), seed=9 + rank).permute(3, 2, 1, 0)
        (gradient,) = torch.autograd.grad(out, y, x)
        sides = torch.stack([(out * x).sum(), (y * gradient).sum()]).detach()
        dist.all_reduce(sides)
        torch.testing.assert_close(sides[0], sides[1])


@pytest.mark.parametrize("size", [2, 4])
def test_backward_is_the_adjoint(size: int) -> None:
    run_ranks(size, check_adjoint, timeout=90)
