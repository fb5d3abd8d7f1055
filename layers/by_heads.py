"""What a rank does with its heads of the whole sequence, between the two exchanges."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from ..head_layout import HeadLayout
from ..parallel_state.errors import ParallelConfigError

ONE_HEAD = range(1)  # with which a rank without heads stands in


@lru_cache(maxsize=256)
def head_layout(heads: int, kv_heads: int, size: int, uneven_heads: bool) -> HeadLayout:
    """The layout of a tensor-parallel rank's heads; says once if it is uneven."""
    layout = HeadLayout(heads, kv_heads, size, uneven_heads=uneven_heads)
    if layout.imbalance:
        warnings.warn(layout.describe() + "; " + layout.nearest_even(), stacklevel=3)
    return layout


def expand_heads(tensor: torch.Tensor, index: list[int]) -> torch.Tensor:
    """Repeats key/value heads so that each query head has its own: [.., k_r, d] -> [.., h_r, d].

    `index` is non-decreasing. Slices, not an index tensor, which would be copied to the device.
    """
    repeats = [(head, index.count(head)) for head in sorted(set(index))]
    return torch.cat(
        [
            tensor.narrow(-2, head, 1).expand(*tensor.shape[:-2], count, tensor.size(-1))
            for head, count in repeats
        ],
        -2,
    )


def attend_by_heads(
    attend: Callable[..., torch.Tensor], by_heads: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Runs `attend` on this rank's heads; a rank without any, on one head of zeros.

    That head counts nothing: its output is cut away, so every gradient of it is zero. But all that
    depends on the ranks doing the same is the same: what an attention refuses, in forward or in
    backward, what is recomputed, which parameters get gradients, when their hooks run.

    Args:
        attend: query, key, value -> output, each as below.
        by_heads: [b, s, h_r, d], [b, s_kv, k_r, d] and [b, s_kv, k_r, d_v]; or s before b.

    Returns:
        [b, s, h_r, d_v], of the query's type, which every rank expects; or s before b.

    Raises:
        ParallelConfigError: the output has another shape.
    """
    query, _, value = by_heads
    nothing = query.size(2) == 0
    if nothing:
        by_heads = [_one_head_of_zeros(tensor) for tensor in by_heads]
    out = attend(*by_heads)
    check_output(out, [*by_heads[0].shape[:3], value.size(3)])
    return (out.narrow(2, 0, 0) if nothing else out).to(query.dtype)


def _one_head_of_zeros(none: torch.Tensor) -> torch.Tensor:
    """[b, s, 0, d] -> [b, s, 1, d], through which gradients flow on to the exchange."""
    return torch.cat([none, none.new_zeros(*none.shape[:2], 1, none.size(3))], 2)


def check_output(out: Any, shape: Sequence[int]) -> None:
    """Refuses what is not the output of attention: other ranks make room for that."""
    if isinstance(out, torch.Tensor) and list(out.shape) == list(shape):
        return
    given = f"{list(out.shape)}" if isinstance(out, torch.Tensor) else f"a {type(out).__name__}"
    raise ParallelConfigError(
        f"The attention between the exchanges returned {given} for heads of this rank that need "
        f"{list(shape)}.",
        rule="the output is one tensor with the query's batch, tokens and heads and the value's "
        "head dimension",
    )
