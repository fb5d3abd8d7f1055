"""What a rank does with its heads of the whole sequence, between the two exchanges."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
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
    attend: Callable[..., torch.Tensor],
    by_heads: Sequence[torch.Tensor],
    others: Iterable[torch.Tensor],
) -> torch.Tensor:
    """Runs `attend` on this rank's heads; a rank without any, on one head of zeros.

    The latter only takes part: so that what an attention refuses, or returns in another shape, is
    met by every rank, and none waits for others that have stopped.

    Args:
        attend: query, key, value -> output, each as below.
        by_heads: [b, s, h_r, d], [b, s_kv, k_r, d] and [b, s_kv, k_r, d_v]; or s before b.
        others: tensors that ask for gradients, which are zeros without heads.

    Returns:
        [b, s, h_r, d_v], of the query's type, which every rank expects; or s before b.

    Raises:
        ParallelConfigError: the output has another shape.
    """
    query, _, value = by_heads
    shape = [*query.shape[:3], value.size(3)]
    if query.size(2):
        out = attend(*by_heads)
        check_output(out, shape)
        return out.to(query.dtype)
    with torch.no_grad():
        zeros = (t.new_zeros(*t.shape[:2], 1, t.size(3)) for t in by_heads)
        check_output(attend(*zeros), [*shape[:2], 1, shape[3]])
    return query.new_empty(shape) + _tie((*by_heads, *others))


def _tie(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """A zero that depends on `tensors` as attention would: its gradients are zeros that can be
    differentiated again, and it saves tensors for backward, so that recomputation (and with it
    the exchanges) begins on this rank where it begins on the others."""
    nothing = [tensor.flatten()[:0] for tensor in tensors]
    return torch.stack([(tensor * tensor).sum() for tensor in nothing]).sum()


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
