"""Local attention by `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .masks import alibi_bias, allowed_pairs


def sdpa_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    window: tuple[int, int] | None = None,
    cu_seqlens: Sequence[int] | torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    attention_bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention, exact for every option; fused where PyTorch has a fused kernel.

    Args:
        query: [b, s, h, d].
        key, value: [b, s_kv, k, d] and [b, s_kv, k, d_v]; k divides h.
        causal: query i sees keys up to i + s_kv - s (flash-attn's bottom-right alignment).
        scale: multiplies the logits; 1/sqrt(d) if None.
        dropout_p: probability of dropping an attention weight.
        window: (left, right) keys seen beside the query's own; -1 is unlimited.
        cu_seqlens: [documents + 1] boundaries; tokens after the last are padding, whose
            output is 0. Read on the host: give a list or a CPU tensor.
        attention_mask: boolean, [s, s_kv] or [b or 1, h or 1, s or 1, s_kv], True = attend.
        attention_bias: added to the logits, [b or 1, h or 1, s, s_kv].
        alibi_slopes: [h]; adds -slope * |distance|.
        sinks: [h]; one more logit per query whose value is 0 (learnable softmax offset).

    Returns:
        [b, s, h, d_v]; a query that may see no key gives 0.
    """
    masks = (attention_mask, attention_bias)
    if cu_seqlens is None:
        return _attend(
            query, key, value, causal, scale, dropout_p, window, *masks, alibi_slopes, sinks
        )
    bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, torch.Tensor) else list(cu_seqlens)
    outputs = [
        _attend(
            query[:, a:b],
            key[:, a:b],
            value[:, a:b],
            causal,
            scale,
            dropout_p,
            window,
            *(None if mask is None else _document(mask, a, b) for mask in masks),
            alibi_slopes,
            sinks,
        )
        for a, b in itertools.pairwise(bounds)
    ]
    padding = query.size(1) - bounds[-1]
    shape = (query.size(0), padding, query.size(2), value.size(3))
    return torch.cat([*outputs, query.new_zeros(shape)], 1)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    scale: float | None,
    dropout_p: float,
    window: tuple[int, int] | None,
    attention_mask: torch.Tensor | None,
    attention_bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    s, s_kv = query.size(1), key.size(1)
    scale = query.size(-1) ** -0.5 if scale is None else scale
    plain_causal = causal and window is None and attention_mask is None and s == s_kv
    plain_causal = plain_causal and attention_bias is None and alibi_slopes is None
    plain_causal = plain_causal and sinks is None
    mask = None
    if not plain_causal:
        mask = allowed_pairs(s, s_kv, causal, window, query.device)
        if attention_mask is not None:
            mask = attention_mask if mask is None else mask & attention_mask
        bias = attention_bias
        if alibi_slopes is not None:
            slopes = alibi_bias(alibi_slopes, s, s_kv).to(query.dtype)
            bias = slopes if bias is None else bias + slopes
        if bias is not None:
            mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        key, value, mask = _with_sink(query, key, value, mask, sinks)
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=None if mask is None else _broadcastable(mask, query),
        dropout_p=dropout_p,
        is_causal=plain_causal,
        scale=scale,
        enable_gqa=query.size(2) != key.size(2),
    )
    return out.transpose(1, 2)


def _with_sink(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sink as one more key whose product is 0, whose bias is the sink and whose value is 0."""
    s, s_kv = query.size(1), key.size(1)
    if mask is None:
        mask = query.new_zeros(1, 1, s, s_kv)
    elif mask.dtype == torch.bool:
        mask = query.new_zeros(mask.shape).masked_fill(~mask, -torch.inf)
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    shape = (mask.size(0), query.size(2), s)
    sink = sinks.to(query.dtype).view(1, -1, 1, 1).expand(*shape, 1)
    mask = torch.cat([mask.expand(*shape, s_kv), sink], -1)
    return F.pad(key, (0, 0, 0, 0, 0, 1)), F.pad(value, (0, 0, 0, 0, 0, 1)), mask


def _broadcastable(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype == torch.bool else mask.to(query.dtype)


def _document(mask: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    rows = mask if mask.size(-2) == 1 else mask[..., start:stop, :]
    return rows[..., start:stop]
