"""What the transports share: how tensors are cut, and how they lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ..sequence_layout import Chunk, SequenceLayout


@dataclass(frozen=True)
class Cut:
    """How one tensor is cut before and after an exchange.

    Args:
        sequence: the tokens of each rank while split by sequence.
        heads: the heads of each rank while split by heads; ranges may overlap (replicas).
    """

    sequence: SequenceLayout
    heads: tuple[range, ...]

    @cached_property
    def num_heads(self) -> int:
        return max((run.stop for run in self.heads if run), default=0)


def empty(
    shape: Sequence[int],
    like: torch.Tensor,
    batch_first: bool,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Uninitialised [s, b, h, d] that lies in memory as [s, b, h, d] or [b, s, h, d]."""
    if not batch_first:
        return like.new_empty(shape, dtype=dtype)
    tokens, batch, *rest = shape
    return like.new_empty((batch, tokens, *rest), dtype=dtype).transpose(0, 1)


def in_memory_order(tensor: torch.Tensor, batch_first: bool) -> torch.Tensor:
    """The same tensor, copied only if it does not lie in memory as asked."""
    if batch_first:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    return tensor.contiguous()


def narrow_heads(tensor: torch.Tensor, heads: range) -> torch.Tensor:
    return tensor.narrow(2, heads.start, len(heads))


def local_chunks(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Where the chunks of a rank lie in that rank's own tensor."""
    local, start = [], 0
    for begin, end in chunks:
        local.append((start, start + end - begin))
        start += end - begin
    return local
