"""Local attention by `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

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
    cu_seqlens_kv: Sequence[int] | torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    attention_bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention, exact for every option; fused where PyTorch has a fused kernel.

    Memory: `window`, `sinks` with `causal`, and lengths that differ under `causal` need one
    boolean [s, s_kv] for all layers together (of the longest document, if packed);
    `attention_bias` and `alibi_slopes` need [h, s, s_kv] for every layer.

    Args:
        query: [b, s, h, d].
        key, value: [b, s_kv, k, d] and [b, s_kv, k, d_v]; k divides h.
        causal: query i sees keys up to i + s_kv - s (flash-attn's bottom-right alignment).
        scale: multiplies the logits; 1/sqrt(d) if None.
        dropout_p: probability of dropping an attention weight.
        window: (left, right) keys seen beside the query's own; -1 is unlimited.
        cu_seqlens: [documents + 1] boundaries; tokens after the last are padding, whose
            output is 0. Read on the host: give a list or a CPU tensor.
        cu_seqlens_kv: those of key and value, if they are others.
        attention_mask: boolean, broadcastable to [b, h, s, s_kv], True = attend; further
            restricts what the other options allow.
        attention_bias: added to the logits, broadcastable to [b, h, s, s_kv].
        alibi_slopes: [h] or [b, h]; adds -slope * |distance|.
        sinks: [h]; one more logit per query whose value is 0 (learnable softmax offset).

    Returns:
        [b, s, h, d_v]; a query that may see no key gives 0, and so does its gradient.
    """
    terms = _Terms(
        causal=causal,
        scale=query.size(-1) ** -0.5 if scale is None else scale,
        dropout_p=dropout_p,
        window=window,
        mask=None if attention_mask is None else torch.atleast_2d(attention_mask),
        bias=None if attention_bias is None else torch.atleast_2d(attention_bias),
        alibi_slopes=alibi_slopes,
        sinks=sinks,
    )
    if cu_seqlens is None:
        return _attend(query, key, value, terms)
    documents = list(pairwise(host_list(cu_seqlens)))
    kv_documents = documents if cu_seqlens_kv is None else list(pairwise(host_list(cu_seqlens_kv)))
    terms = replace(terms, longest=max((b - a for a, b in documents), default=0))
    outputs = [
        _attend(query[:, a:b], key[:, c:d], value[:, c:d], terms.between(a, b, c, d))
        for (a, b), (c, d) in zip(documents, kv_documents, strict=True)
        if a < b
    ]
    padding = query.size(1) - documents[-1][1] if documents else query.size(1)
    return torch.cat([*outputs, _zeros(query, key, value, padding, terms)], 1)


def host_list(cu_seqlens: Sequence[int] | torch.Tensor) -> list[int]:
    """Document boundaries as numbers: [documents + 1], or [1, documents + 1] as batches hold."""
    if isinstance(cu_seqlens, torch.Tensor):
        boundaries: list[int] = cu_seqlens.flatten().tolist()
        return boundaries
    return list(cu_seqlens)


@dataclass(frozen=True)
class _Terms:
    """What makes up the logits and the mask beside query and key."""

    causal: bool
    scale: float
    dropout_p: float
    window: tuple[int, int] | None
    mask: torch.Tensor | None
    bias: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    longest: int = 0  # document of the packed sequence

    def between(self, a: int, b: int, c: int, d: int) -> _Terms:
        """The terms of queries [a, b) and keys [c, d)."""
        mask, bias = (
            tensor if tensor is None else _narrow(_narrow(tensor, -2, a, b), -1, c, d)
            for tensor in (self.mask, self.bias)
        )
        return replace(self, mask=mask, bias=bias)

    def learnable(self) -> list[torch.Tensor]:
        """No elements of what may ask for gradients beside query, key and value."""
        tensors = (self.bias, self.alibi_slopes, self.sinks)
        return [tensor[..., :0] for tensor in tensors if tensor is not None]

    def allowed(self, s: int, s_kv: int, device: torch.device) -> torch.Tensor | None:
        """The boolean mask, with a first column for the sink if there are sinks."""
        sink = self.sinks is not None
        # A shorter document's mask is the corner of a longer one's.
        rows, columns = (s, s_kv) if s != s_kv else (max(s, self.longest),) * 2
        allowed = allowed_pairs(rows, columns, self.causal, self.window, device, sink)
        if allowed is not None:
            allowed = allowed[:s, : s_kv + sink]
        if self.mask is None:
            return allowed
        mask = F.pad(self.mask.expand(*self.mask.shape[:-1], s_kv), (int(sink), 0), value=True)
        return mask if allowed is None else allowed & mask

    def added(self, s: int, s_kv: int) -> torch.Tensor | None:
        """What is added to the logits, with a first column for the sink if there are sinks."""
        bias = self.bias
        if self.alibi_slopes is not None:
            slopes = alibi_bias(self.alibi_slopes, s, s_kv)
            bias = slopes if bias is None else bias + slopes
        if bias is None or self.sinks is None:
            return bias
        return F.pad(bias.expand(*bias.shape[:-1], s_kv), (1, 0))


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: _Terms
) -> torch.Tensor:
    s, s_kv = query.size(1), key.size(1)
    if s == 0 or s_kv == 0:
        return _zeros(query, key, value, s, terms)
    bias = terms.added(s, s_kv)
    is_causal = terms.causal and s == s_kv and bias is None
    is_causal = is_causal and terms.window is None and terms.mask is None and terms.sinks is None
    mask = None if is_causal else terms.allowed(s, s_kv, query.device)
    if bias is not None:
        bias = bias.to(query.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    if terms.sinks is not None:
        query, key, value = _with_sink(query, key, value, terms.sinks / terms.scale)
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        dropout_p=terms.dropout_p,
        is_causal=is_causal,
        scale=terms.scale,
        enable_gqa=query.size(2) != key.size(2),
    )
    return out.transpose(1, 2)


def _with_sink(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sink as a first key of value 0, whose product with every query is that head's sink.

    One more dim does it: the query's holds its head's sink, the sink key's holds 1, the other
    keys' 0. So no [h, s, s_kv] bias is needed, and key heads stay grouped.
    """
    dims = 8 - query.size(-1) % 8  # fused kernels want a multiple of 8
    column = sinks.to(query.dtype)[:, None].expand(*query.shape[:-1], 1)
    query = torch.cat([query, column, query.new_zeros(*query.shape[:-1], dims - 1)], -1)
    first = torch.zeros_like(key[:, :1])
    first = torch.cat([first, torch.ones_like(first[..., :1])], -1)
    first = F.pad(first, (0, dims - 1))
    key = torch.cat([first, F.pad(key, (0, dims))], 1)
    return query, key, F.pad(value, (0, 0, 0, 0, 1, 0))


def _zeros(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tokens: int, terms: _Terms
) -> torch.Tensor:
    """[b, tokens, h, d_v] of zeros, tied to the inputs so that backward finds its way."""
    inputs = (query[:, :0], key[:, :0], value[:, :0], *terms.learnable())
    tie = sum(tensor.sum() for tensor in inputs)
    return query.new_zeros((query.size(0), tokens, query.size(2), value.size(3))) + tie


def _narrow(tensor: torch.Tensor, dim: int, start: int, stop: int) -> torch.Tensor:
    if tensor.dim() < -dim or tensor.size(dim) == 1:  # broadcast along it
        return tensor
    return tensor.narrow(dim, start, stop - start)
