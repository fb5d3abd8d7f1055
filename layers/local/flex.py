"""Local attention by PyTorch's FlexAttention: windows, documents, softcap in O(s) memory.

Compiled on a GPU. On a CPU PyTorch has the forward pass only, uncompiled and with all logits in
memory: good for comparing, not for training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex

from ...parallel_state.errors import ParallelConfigError
from .masks import normal_window
from .sdpa import host_list

Index = torch.Tensor  # a batch, head, query or key index, as FlexAttention hands it in
MaskMod = Callable[[Index, Index, Index, Index], torch.Tensor]
ScoreMod = Callable[[torch.Tensor, Index, Index, Index, Index], torch.Tensor]


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    cu_seqlens: Sequence[int] | torch.Tensor | None = None,
    cu_seqlens_kv: Sequence[int] | torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    attention_bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Softmax attention; as `sdpa_attention`, with `softcap` and without dropout.

    Blocks that a mask empties are skipped. The block mask of `causal`, `window` and documents is
    built once for all layers and steps that share them; one of an `attention_mask` on each call.

    Args:
        softcap: c; a logit x becomes c * tanh(x / c), before biases.
        The other arguments are those of `sdpa_attention`.

    Returns:
        [b, s, h, d_v]; a query that may see no key gives 0.
    """
    s, s_kv, device = query.size(1), key.size(1), query.device
    documents = kv_documents = None
    if cu_seqlens is not None:
        documents = tuple(host_list(cu_seqlens))
        kv_documents = documents if cu_seqlens_kv is None else tuple(host_list(cu_seqlens_kv))
    left, right = normal_window(causal, window)
    layout = (s, s_kv, left, right, documents, kv_documents, device)
    shape = (query.size(0), query.size(2), s, s_kv)
    if attention_mask is None:
        block_mask = _block_mask(*layout)
    else:
        block_mask = _block_mask_with(attention_mask.expand(shape), *layout)
    distance = _distance(s, s_kv, documents, kv_documents, device)
    out, lse = _attention(device)(
        *(tensor.transpose(1, 2) for tensor in (query, key, value)),  # [b, h, s, d]
        score_mod=_score_mod(softcap, attention_bias, alibi_slopes, distance, shape),
        block_mask=block_mask,
        scale=scale,
        enable_gqa=query.size(2) != key.size(2),
        **_ASK_LSE,
    )
    if sinks is not None:  # the sink takes e^sink of a total weight of e^lse + e^sink
        lse = lse if isinstance(lse, torch.Tensor) else lse.lse
        taken = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])  # [b, h, s]
        out = (out * taken[..., None]).to(query.dtype)
    return out.transpose(1, 2)  # type: ignore[no-any-return]


def _check_backward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Mapping[str, Any]
) -> None:
    """Refuses gradients on a CPU, as PyTorch itself does inside."""
    tensors = (query, key, value, *options.values())
    asked = any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)
    if query.device.type == "cpu" and asked and torch.is_grad_enabled():
        raise ParallelConfigError(
            "flex_attention with gradients on a CPU.",
            rule="PyTorch's FlexAttention has no backward pass there",
            nearest="local_attention=sdpa_attention, torch.no_grad(), or a GPU.",
        )


flex_attention.check_before_exchange = _check_backward  # type: ignore[attr-defined]


# Since PyTorch 2.9 the log of the sum of exponentials is asked for in another way.
_ASK_LSE: dict[str, Any] = (
    {"return_aux": flex.AuxRequest(lse=True)}
    if hasattr(flex, "AuxRequest")
    else {"return_lse": True}
)


def _attention(device: torch.device) -> Any:
    return flex.flex_attention if device.type == "cpu" else _compiled()


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex.flex_attention)


def _create_block_mask(device: torch.device) -> Callable[..., flex.BlockMask]:
    """Compiled where that works: uncompiled it makes the whole [s, s_kv] mask first."""
    return flex.create_block_mask if device.type == "cpu" else _compiled_create_block_mask()


@lru_cache(maxsize=1)
def _compiled_create_block_mask() -> Callable[..., flex.BlockMask]:
    return torch.compile(flex.create_block_mask)


def _score_mod(
    softcap: float | None,
    bias: torch.Tensor | None,
    slopes: torch.Tensor | None,
    distance: Callable[[Index, Index], torch.Tensor],
    shape: tuple[int, int, int, int],
) -> ScoreMod | None:
    if softcap is None and bias is None and slopes is None:
        return None
    bias = None if bias is None else bias.expand(shape)
    slopes = None if slopes is None else slopes.expand(shape[:2])

    def score_mod(score: torch.Tensor, b: Index, h: Index, i: Index, j: Index) -> torch.Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None:
            score = score + bias[b, h, i, j]
        if slopes is not None:
            score = score - slopes[b, h] * distance(i, j).abs()
        return score

    return score_mod


Documents = tuple[int, ...] | None


@lru_cache(maxsize=16)
def _block_mask(
    s: int,
    s_kv: int,
    left: int,
    right: int,
    documents: Documents,
    kv_documents: Documents,
    device: torch.device,
) -> flex.BlockMask | None:
    if left < 0 and right < 0 and documents is None:
        return None
    mask_mod = _mask_mod(s, s_kv, left, right, documents, kv_documents, device)
    with torch.inference_mode(False):
        return _create_block_mask(device)(mask_mod, None, None, s, s_kv, device=device)


def _block_mask_with(
    attention_mask: torch.Tensor, s: int, s_kv: int, *layout: Any
) -> flex.BlockMask:
    inner = _mask_mod(s, s_kv, *layout)

    def mask_mod(b: Index, h: Index, i: Index, j: Index) -> torch.Tensor:
        return inner(b, h, i, j) & attention_mask[b, h, i, j]

    batch, heads = attention_mask.shape[:2]
    device = attention_mask.device
    return _create_block_mask(device)(mask_mod, batch, heads, s, s_kv, device=device)


def _mask_mod(
    s: int,
    s_kv: int,
    left: int,
    right: int,
    documents: Documents,
    kv_documents: Documents,
    device: torch.device,
) -> MaskMod:
    distance = _distance(s, s_kv, documents, kv_documents, device)
    of_query, of_key = (_numbers(cu, n, device) for cu, n in ((documents, s), (kv_documents, s_kv)))

    def mask_mod(b: Index, h: Index, i: Index, j: Index) -> torch.Tensor:
        allowed = (i >= 0) & (j >= 0)
        if documents is not None:
            allowed = (of_query[i] == of_key[j]) & (of_query[i] >= 0)
        if left >= 0:
            allowed = allowed & (distance(i, j) >= -left)
        if right >= 0:
            allowed = allowed & (distance(i, j) <= right)
        return allowed

    return mask_mod


def _distance(
    s: int, s_kv: int, documents: Documents, kv_documents: Documents, device: torch.device
) -> Callable[[Index, Index], torch.Tensor]:
    """How far key j lies after query i; sequences, or documents, are aligned at their ends."""
    if documents is None or kv_documents is None or documents == kv_documents:
        return lambda i, j: j - i - (s_kv - s)
    # Between documents it does not matter.
    shifts = [c - a for a, c in zip(documents[1:], kv_documents[1:], strict=True)] or [0]
    numbers = _numbers(documents, s, device).clamp(min=0)
    shift = torch.tensor(shifts, device=device)[numbers]
    return lambda i, j: j - i - shift[i]


@lru_cache(maxsize=32)
def _numbers(documents: Documents, tokens: int, device: torch.device) -> torch.Tensor:
    """The number of each token's document, [tokens]; -1 after the last one."""
    numbers = torch.full((tokens,), -1, dtype=torch.int32)
    for number, (start, stop) in enumerate(pairwise(documents or ())):
        numbers[start:stop] = number
    with torch.inference_mode(False):
        return numbers.to(device).clone()
