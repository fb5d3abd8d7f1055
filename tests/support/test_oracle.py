"""The oracle against torch's attention where torch can, and by hand where it cannot."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.support.oracle import attention, attention_gradients


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def torch_attention(q, k, v, **options):
    out = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True, **options
    )
    return out.transpose(1, 2)


@pytest.fixture
def qkv() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return draw(2, 7, 6, 4), draw(2, 7, 3, 4), draw(2, 7, 3, 5)


@pytest.mark.parametrize("causal", [False, True])
def test_grouped_query_attention_and_gradients_are_torchs(qkv, causal: bool) -> None:
    leaves = [x.clone().requires_grad_() for x in qkv]
    expected = torch_attention(*leaves, is_causal=causal, scale=0.3)
    grad = torch.randn_like(expected)
    result = attention_gradients(*qkv, grad, causal=causal, scale=0.3)
    torch.testing.assert_close(result.out, expected)
    grads = torch.autograd.grad(expected, leaves, grad)
    for ours, theirs in zip((result.query, result.key, result.value), grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_bias_mask_window_and_slopes_are_additive_masks(qkv) -> None:
    bias, allowed = draw(1, 6, 7, 7), torch.rand(2, 1, 7, 7) > 0.2
    allowed |= torch.eye(7, dtype=torch.bool)
    slopes = draw(6).abs()
    ahead = torch.arange(7)[None, :] - torch.arange(7)[:, None]
    added = bias - slopes[:, None, None] * ahead.abs()
    added = added.masked_fill(~(allowed & (ahead >= -2) & (ahead <= 1)), -math.inf)
    ours = attention(*qkv, bias=bias, allowed=allowed, alibi_slopes=slopes, window=(2, 1))
    torch.testing.assert_close(ours, torch_attention(*qkv, attn_mask=added))


def test_documents_are_attended_apart(qkv) -> None:
    q, k, v = (x[:1] for x in qkv)
    packed = attention(q[0], k[0], v[0], causal=True, cu_seqlens=[0, 3, 4, 7])
    for begin, end in ((0, 3), (3, 4), (4, 7)):
        alone = torch_attention(*(x[:, begin:end] for x in (q, k, v)), is_causal=True)
        torch.testing.assert_close(packed[begin:end], alone[0])


def test_cross_attention_ends_together(qkv) -> None:
    q, k, v = qkv
    whole = attention(q, k, v, causal=True)
    torch.testing.assert_close(attention(q[:, 4:], k, v, causal=True), whole[:, 4:])


def test_a_sink_is_a_key_without_value(qkv) -> None:
    q, k, v = qkv
    sinks = draw(6)
    k_more = torch.cat([k, torch.zeros(2, 1, 3, 4)], 1)
    v_more = torch.cat([v, torch.zeros(2, 1, 3, 5)], 1)
    bias = torch.zeros(1, 6, 7, 8, dtype=torch.float64)
    bias[..., 7] = sinks[:, None]
    torch.testing.assert_close(
        attention(q, k, v, sinks=sinks), torch_attention(q, k_more, v_more, attn_mask=bias)
    )


def test_softcap_bounds_the_scores(qkv) -> None:
    q, k, v = qkv
    scores = torch.einsum("bshd,bthd->bhst", q, k.repeat_interleave(2, 2)) / 2
    weights = (1.5 * torch.tanh(scores / 1.5)).softmax(-1)
    expected = torch.einsum("bhst,bthe->bshe", weights, v.repeat_interleave(2, 2))
    torch.testing.assert_close(attention(q, k, v, softcap=1.5), expected)


def test_a_query_that_sees_nothing_gives_zero_and_no_nan(qkv) -> None:
    allowed = torch.ones(7, 7, dtype=torch.bool)
    allowed[3] = False
    result = attention_gradients(*qkv, torch.ones(2, 7, 6, 5), allowed=allowed)
    assert torch.equal(result.out[:, 3], torch.zeros(2, 6, 5, dtype=torch.float64))
    assert torch.equal(result.query[:, 3], torch.zeros(2, 6, 4, dtype=torch.float64))
    assert all(x.isfinite().all() for x in (result.out, result.query, result.key, result.value))


def test_head_indexed_gradients_by_finite_differences(qkv) -> None:
    options = {"sinks": draw(6), "alibi_slopes": draw(6), "bias": draw(1, 6, 7, 7)}
    grad = draw(2, 7, 6, 5)
    result = attention_gradients(*qkv, grad, causal=True, **options)
    for name, x in options.items():
        step = torch.randn_like(x)
        plus, minus = (
            (attention(*qkv, causal=True, **{**options, name: x + e * step}) * grad).sum()
            for e in (1e-6, -1e-6)
        )
        slope = (getattr(result, name) * step).sum()
        torch.testing.assert_close(slope, (plus - minus) / 2e-6, rtol=1e-6, atol=1e-8)
