"""Masks and biases over whole sequences, as tensors."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode


def allowed_pairs(
    s: int,
    s_kv: int,
    causal: bool,
    window: tuple[int, int] | None,
    device: torch.device,
    sink: bool = False,
) -> torch.Tensor | None:
    """Which keys each query may see, [s, s_kv] boolean; None if all.

    Lengths that differ are aligned at the end, as in flash-attn. With `sink`, one more key that
    all may see comes first: [s, 1 + s_kv]. Layers with the same mask get the same tensor, which
    is all that they keep for backward; do not write to it.
    """
    left, right = normal_window(causal, window)
    if left < 0 and right < 0:
        return None
    if _get_current_dispatch_mode() is not None:  # tensors of a mode must not outlive it
        return _band.__wrapped__(s, s_kv, left, right, device, sink)
    return _band(s, s_kv, left, right, device, sink)


def normal_window(causal: bool, window: tuple[int, int] | None) -> tuple[int, int]:
    """(left, right) keys seen beside the query's own, -1 for all; causal means right = 0."""
    left, right = (-1, -1) if window is None else window
    return left, (0 if causal else right)


@lru_cache(maxsize=2)  # a model alternates between two masks at most; each is s x s_kv bytes
def _band(
    s: int, s_kv: int, left: int, right: int, device: torch.device, sink: bool
) -> torch.Tensor:
    with torch.inference_mode(False):  # else training could not use what evaluation left here
        keys = torch.arange(s_kv, device=device)
        queries = torch.arange(s, device=device)[:, None] + (s_kv - s)
        allowed = torch.ones(s, s_kv + sink, dtype=torch.bool, device=device)
        inner = allowed[:, int(sink) :]
        if left >= 0:
            inner &= keys >= queries - left
        if right >= 0:
            inner &= keys <= queries + right
        return allowed


def alibi_bias(slopes: torch.Tensor, s: int, s_kv: int) -> torch.Tensor:
    """-slope * |key - query| per head: [h] or [b, h] -> [.., h, s, s_kv], in float32 at least.

    Source: arXiv 2108.12409.
    """
    slopes = slopes.to(torch.promote_types(slopes.dtype, torch.float32))
    queries = torch.arange(s, device=slopes.device)[:, None] + (s_kv - s)
    distance = (torch.arange(s_kv, device=slopes.device) - queries).abs()
    return -slopes[..., None, None] * distance
