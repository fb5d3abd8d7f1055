"""Attention as the formula says it, in float64 and one process; imports nothing of the library.

Letters: b batch, s query tokens, u key tokens, h query heads, k key/value heads, d and e the
head dimensions of query/key and of value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Gradients:
    """The output and the gradient of each input that was given (None for the others)."""

    out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    allowed: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    cu_seqlens_kv: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """Softmax attention over whole sequences and all heads.

    With s != u, query i stands at key i + u - s (the last query sees the last key), as in
    flash-attn >= 2.1; within each document likewise.

    Args:
        query: [b, s, h, d], or packed [s, h, d].
        key: [b, u, k, d] with k dividing h: query head i reads key head i // (h / k).
        value: [b, u, k, e].
        window: keys further than `left` before or `right` after a query are not seen; -1 is
            no limit.
        allowed: boolean, broadcastable to [b, h, s, u], True where a query may see a key.
        bias: broadcastable to [b, h, s, u], added to the scores.
        alibi_slopes: [h] or [b, h]; adds -slope x |distance| to the scores.
        sinks: [h], a score that takes part in the softmax and has no value.
        softcap: c tanh(score / c), before bias and slopes.
        scale: of q k^T; d ** -0.5 if None.
        cu_seqlens: [documents + 1], first token of each document; none sees another. What
            lies after the last one is a document too.
        cu_seqlens_kv: the same for the keys, if they differ.

    Returns:
        [b, s, h, e] or [s, h, e], float64; a query that sees no key (and no sink) gives 0.
    """
    if query.dim() == 3:
        whole = (x.unsqueeze(0) for x in (query, key, value))
        return attention(
            *whole, causal=causal, window=window, allowed=allowed, bias=bias,
            alibi_slopes=alibi_slopes, sinks=sinks, softcap=softcap, scale=scale,
            cu_seqlens=cu_seqlens, cu_seqlens_kv=cu_seqlens_kv,
        ).squeeze(0)  # fmt: skip
    query, key, value = (x.double().transpose(1, 2) for x in (query, key, value))  # [b, h, s, d]
    repeats = query.size(1) // key.size(1)
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))  # [b, h, u, d]
    scores = query @ key.mT * (query.size(-1) ** -0.5 if scale is None else scale)  # [b, h, s, u]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.double()

    ahead, visible = _distances(scores.size(-2), scores.size(-1), cu_seqlens, cu_seqlens_kv)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[..., None, None] * ahead.abs()
    left, right = window or (-1, -1)
    right = 0 if causal else right
    if left >= 0:
        visible = visible & (ahead >= -left)
    if right >= 0:
        visible = visible & (ahead <= right)
    if allowed is not None:
        visible = visible & allowed

    weights = _softmax(scores, visible.expand_as(scores), sinks)
    return (weights @ value).transpose(1, 2)


def attention_gradients(
    query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, **options: Any
) -> Gradients:
    """`attention` and its gradients for `grad_out`, all float64, each of its input's shape."""
    inputs = {"query": query, "key": key, "value": value}
    for name in ("bias", "alibi_slopes", "sinks"):
        if options.get(name) is not None:
            inputs[name] = options.pop(name)
    leaves = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    out = attention(**leaves, **options)
    grads = torch.autograd.grad(out, list(leaves.values()), grad_out.double())
    return Gradients(out=out.detach(), **dict(zip(leaves, grads, strict=True)))


def _distances(
    queries: int,
    keys: int,
    cu_queries: Sequence[int] | Tensor | None,
    cu_keys: Sequence[int] | Tensor | None,
) -> tuple[Tensor, Tensor]:
    """How far key j lies after query i (negative: before), and whether they share a document."""
    if cu_queries is None:
        cu_queries = cu_keys = [0, 0]  # all of it lies after the last boundary: one document
    cu_keys = cu_queries if cu_keys is None else cu_keys
    document_q, to_end_q = _documents(queries, cu_queries)
    document_k, to_end_k = _documents(keys, cu_keys)
    ahead = to_end_q[:, None] - to_end_k[None, :]
    return ahead.double(), document_q[:, None] == document_k[None, :]


def _documents(tokens: int, cu: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
    """Each token's document, and its distance to that document's end."""
    ends = [*(int(x) for x in cu[1:]), tokens]
    document = torch.tensor([sum(i >= end for end in ends) for i in range(tokens)]).long()
    to_end = torch.tensor([next(e for e in ends if i < e) - i for i in range(tokens)]).long()
    return document, to_end


def _softmax(scores: Tensor, visible: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the visible keys and the sink; all zeros where there is neither."""
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    # softmax over nothing is NaN, and so is its gradient: such rows get scores of 0 first
    empty = ~visible.any(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
