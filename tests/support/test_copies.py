"""Copies are counted once each, in the backward pass too, and not inside local attention."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.support.copies import Copies, count_copies

X = torch.arange(24.0).view(4, 6)
WHOLE = 24 * 4  # bytes of X
OUT = torch.empty(4, 6)


@pytest.mark.parametrize(
    ("make", "copied"),
    [
        (lambda: X.view(6, 4).transpose(0, 1)[1:].narrow(1, 0, 2).unsqueeze(0).expand(3, 3, 2), 0),
        (lambda: X.contiguous(), 0),
        (lambda: X.reshape(24), 0),
        (lambda: torch.empty(100).zero_(), 0),
        (lambda: X * 2, 0),
        (lambda: X.T.contiguous(), WHOLE),
        (lambda: X.T.reshape(24), WHOLE),
        (lambda: X.clone(), WHOLE),
        (lambda: OUT.copy_(X), WHOLE),
        (lambda: torch.cat([X, X]), 2 * WHOLE),
        (lambda: torch.stack([X, X]), 2 * WHOLE),
        (lambda: torch.cat([X[:2], X[2:]], out=torch.empty(4, 6)), WHOLE),
        (lambda: X.to(torch.float64), 2 * WHOLE),
        (lambda: X.index_select(0, torch.tensor([1, 2])), WHOLE // 2),
        (lambda: X[[0, 3]], WHOLE // 2),
        (lambda: X.repeat_interleave(2, 0), 2 * WHOLE),
        (lambda: X.flip(0), WHOLE),
        (lambda: X.roll(1, 0), WHOLE),
        (lambda: torch.nn.functional.pad(X, (0, 6)), 2 * WHOLE),
        (lambda: OUT.__setitem__(slice(0, 2), X[2:]), WHOLE // 2),
        (lambda: OUT.index_copy_(0, torch.tensor([2]), X[:1]), WHOLE // 4),
        (lambda: OUT.__setitem__(torch.tensor([2, 3]), X[:2]), WHOLE // 2),
    ],
)  # fmt: skip
def test_bytes_of(make: Callable[[], object], copied: int) -> None:
    with count_copies() as copies:
        make()
    if copied == 2 * WHOLE:  # some operators are made of two copies on some versions
        assert copied <= copies.bytes <= 2 * copied
    else:
        assert copies.bytes == copied, copies.by_op


class PackOnce(torch.autograd.Function):
    """One copy each way."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.T.contiguous()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad.T.contiguous()


def test_the_backward_pass_is_seen() -> None:
    x = X.clone().requires_grad_()
    with count_copies() as copies:
        y = PackOnce.apply(x)
        assert copies.bytes == WHOLE
        (y * y).sum().backward()
    assert copies.bytes == 2 * WHOLE, copies.by_op


def wasteful_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()


def run(copies: Copies, attention: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    leaf = torch.randn(8, 4, 2, 3).requires_grad_()  # [s, 3 h b, d]-like: packed by one copy
    packed = PackOnce.apply(leaf.view(8, 24)).view(3, 2, 4, 8).unbind(0)
    out = attention(*(x.unsqueeze(0) for x in packed))
    (grad,) = torch.autograd.grad(out.square().sum(), leaf)
    return out, grad


def test_local_attention_does_not_count_in_either_pass() -> None:
    with count_copies() as everything:
        expected = run(everything, wasteful_attention)
    with count_copies() as outside:
        result = run(outside, outside.uncounted(wasteful_attention))
    packing = 2 * 8 * 24 * 4
    stacking = 8 * 24 * 4  # the gradient of unbind
    assert outside.bytes == packing + stacking, outside.by_op
    assert everything.bytes >= outside.bytes + 4 * 8 * 8 * 4
    assert all(torch.equal(a, b) for a, b in zip(expected, result, strict=True))


def test_paused_is_for_a_block() -> None:
    with count_copies() as copies:
        with copies.paused():
            X.clone()
        X.clone()
    assert copies.bytes == WHOLE
