"""Masks and biases over whole sequences, as tensors."""

from __future__ import annotations

import torch


def allowed_pairs(
    s: int, s_kv: int, causal: bool, window: tuple[int, int] | None, device: torch.device
) -> torch.Tensor | None:
    """Which keys each query may see, [s, s_kv] boolean; None if all.

    Lengths that differ are aligned at the end, as in flash-attn.
    """
    left, right = (-1, -1) if window is None else window
    if causal:
        right = 0 if right < 0 else min(right, 0)
    if left < 0 and right < 0:
        return None
    distance = key_minus_query(s, s_kv, device)
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        allowed &= distance >= -left
    if right >= 0:
        allowed &= distance <= right
    return allowed


def alibi_bias(slopes: torch.Tensor, s: int, s_kv: int) -> torch.Tensor:
    """-slope * |key - query| per head: [h] -> [1, h, s, s_kv]. Source: arXiv 2108.12409."""
    distance = key_minus_query(s, s_kv, slopes.device).abs()
    return -slopes.view(1, -1, 1, 1) * distance


def key_minus_query(s: int, s_kv: int, device: torch.device) -> torch.Tensor:
    queries = torch.arange(s, device=device) + (s_kv - s)
    return torch.arange(s_kv, device=device)[None, :] - queries[:, None]
