"""What the transports share: how tensors are cut, and how they lie in memory."""

from __future__ import annotations

import math
import threading
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


class Scratch:
    """Buffers that live no longer than one exchange.

    On the CPU they come from one arena per thread that is kept from exchange to exchange:
    the page faults of fresh memory cost as much as the copies into it. On other devices the
    caching allocator of PyTorch does the same.
    """

    _arenas = threading.local()

    def __init__(self, like: torch.Tensor, elements: int) -> None:
        self._like, self._used = like, 0
        self._arena: torch.Tensor | None = None
        if like.device.type == "cpu":
            size = elements * like.element_size()
            arena = getattr(self._arenas, "bytes", None)
            if arena is None or arena.numel() < size:
                arena = self._arenas.bytes = torch.empty(size, dtype=torch.uint8)
            self._arena = arena[:size].view(like.dtype)

    def empty(self, shape: Sequence[int], batch_first: bool) -> torch.Tensor:
        """Uninitialised [s, b, h, d] in the memory order asked for."""
        if self._arena is None:
            return empty(shape, self._like, batch_first)
        tokens, batch, *rest = shape
        start, self._used = self._used, self._used + math.prod(shape)
        flat = self._arena[start : self._used]
        if batch_first:
            return flat.view(batch, tokens, *rest).transpose(0, 1)
        return flat.view(shape)


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
