"""What the transports share: how tensors are cut, and how they lie in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

import torch

from ..sequence_layout import Chunk, SequenceLayout

# Plans kept: a layer needs 4 to 6 per layout. With packed documents each micro-batch may bring a
# layout of its own, of many views, so that an unbounded or large cache would grow for long.
PLANS_KEPT = 128


@dataclass(frozen=True)
class Cut:
    """How one tensor is cut before and after an exchange.

    Args:
        sequence: the tokens of each rank while split by sequence.
        heads: the heads of each rank while split by heads, ascending with the ranks and without a
            gap; ranges may overlap (replicas).
    """

    sequence: SequenceLayout
    heads: tuple[range, ...]

    @staticmethod
    @lru_cache(maxsize=256)
    def of(sequence: SequenceLayout, heads: tuple[range, ...]) -> Cut:
        """The same object for the same arguments: plans are found by it in every step."""
        return Cut(sequence, heads)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Not of the ranges: before Python 3.12 their hash is another one in every process.
        return hash((self.sequence, tuple(map(len, self.heads)), self.num_heads))

    @cached_property
    def num_heads(self) -> int:
        return max((run.stop for run in self.heads if run), default=0)

    @cached_property
    def most_chunks(self) -> int:
        """Of any rank: as many messages a peer may get."""
        return max(map(len, self.sequence.chunks))

    @cached_property
    def is_replicated(self) -> bool:
        """Whether any head is held by several ranks."""
        return sum(map(len, self.heads)) > self.num_heads


@dataclass(frozen=True)
class Piece:
    """Part of a rank's tokens as it arrived, before the heads are joined.

    Args:
        rank: whom it came from.
        start: the first of this rank's tokens that it holds.
        block: [tokens, b, heads of that rank, d].
    """

    rank: int
    start: int
    block: torch.Tensor


class View(NamedTuple):
    """A view of a tensor that begins its storage: what `as_strided` takes."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def like(cls, meta: torch.Tensor) -> View:
        return cls(meta.size(), meta.stride(), int(meta.storage_offset()))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of one that may begin anywhere."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


class NeedsScratch(Protocol):
    """A plan: hashed by identity, it says what it needs for the time of one exchange."""

    @property
    def scratch(self) -> int: ...  # elements

    @property
    def buffers(self) -> tuple[View, ...]: ...  # views of them


class _Arena(threading.local):
    """Memory of one thread that is kept from exchange to exchange, and the views of it in use."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.views: dict[tuple[object, ...], list[list[torch.Tensor]]] = {}


_arena = _Arena()


def scratch(like: torch.Tensor, plans: Sequence[NeedsScratch]) -> list[list[torch.Tensor]]:
    """The buffers of each plan, uninitialised, to be used in one exchange.

    On the CPU they come from one arena per thread that is kept from exchange to exchange:
    the page faults of fresh memory cost as much as the copies into it. On other devices the
    caching allocator of PyTorch does the same.
    """
    if not like.is_cpu:
        elements = [plan.scratch for plan in plans]
        return _placed(like.new_empty(sum(elements)), plans, elements)
    key = (like.dtype, *plans)
    views = _arena.views.get(key)
    if views is None:
        elements = [plan.scratch for plan in plans]
        size = sum(elements) * like.element_size()
        if size > _arena.bytes.numel() or len(_arena.views) == PLANS_KEPT:
            _arena.views.clear()
        with torch.inference_mode(False):  # training could not write to what that mode makes
            if size > _arena.bytes.numel():
                _arena.bytes = torch.empty(size, dtype=torch.uint8, device="cpu")
            views = _placed(_arena.bytes[:size].view(like.dtype), plans, elements)
        _arena.views[key] = views
    return views


def _placed(
    flat: torch.Tensor, plans: Sequence[NeedsScratch], elements: list[int]
) -> list[list[torch.Tensor]]:
    parts = torch.split_with_sizes(flat, elements)
    return [
        [view.of(part) for view in plan.buffers] for plan, part in zip(plans, parts, strict=True)
    ]


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


def sequence_first(tensor: torch.Tensor, batch_first: bool) -> torch.Tensor:
    """[b, s, h, d] if `batch_first` -> [s, b, h, d]; also the way back."""
    return tensor.transpose(0, 1) if batch_first else tensor


def narrow_heads(tensor: torch.Tensor, heads: range) -> torch.Tensor:
    return tensor.narrow(2, heads.start, len(heads))


def even_runs(heads: Sequence[range], skip: int) -> list[list[int]]:
    """Ranks other than `skip` that hold heads, those together whose equally many heads follow on.

    One permuted copy serves all ranks of a run.
    """
    runs: list[list[int]] = []
    for rank, own in enumerate(heads):
        if rank == skip or not own:
            continue
        before = heads[rank - 1] if runs and runs[-1][-1] == rank - 1 else range(0)
        if len(before) == len(own) and before.stop == own.start:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return runs


def run_heads(tensor: torch.Tensor, heads: Sequence[range], run: list[int]) -> torch.Tensor:
    """The heads of the ranks of a run: [s, b, h, d] -> [ranks, s, b, heads of each, d]."""
    first, each = heads[run[0]].start, len(heads[run[0]])
    heads_of_run: torch.Tensor = tensor.narrow(2, first, each * len(run))
    result: torch.Tensor = heads_of_run.unflatten(2, (len(run), each)).permute(2, 0, 1, 3, 4)
    return result


def bundles(cuts: Sequence[Cut]) -> list[list[int]]:
    """Indices of the tensors that share a sequence layout."""
    found: dict[SequenceLayout, list[int]] = {}
    for index, cut in enumerate(cuts):
        found.setdefault(cut.sequence, []).append(index)
    return list(found.values())


def columns(rows: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """The column ranges of rows [..., width] that hold tensors of (heads, d): [..., heads, d]."""
    parts = rows.split_with_sizes([heads * dim for heads, dim in shapes], -1)
    return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]


def local_chunks(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Where the chunks of a rank lie in that rank's own tensor."""
    local, start = [], 0
    for begin, end in chunks:
        local.append((start, start + end - begin))
        start += end - begin
    return local


def sum_dtype(cut: Cut, like: torch.Tensor) -> torch.dtype:
    """What heads are joined in: float32 at least where replicas are summed, for a key/value head
    of many replicas would lose bits in bfloat16."""
    return torch.promote_types(like.dtype, torch.float32) if cut.is_replicated else like.dtype


def moves(
    result: torch.Tensor, piece: Piece, cut: Cut
) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
    """What of a piece goes where in this rank's [s_r, b, h, d], and whether it is added.

    Sources are taken in rank order where heads are replicated, so that the sum does not depend
    on who computes it.
    """
    rows = result.narrow(0, piece.start, piece.block.size(0))
    heads = cut.heads[piece.rank]
    before = max((run.stop for run in cut.heads[: piece.rank]), default=0)
    written = max(min(before, heads.stop), heads.start)  # up to here by a replica
    again, new = range(heads.start, written), range(written, heads.stop)
    if again:
        yield narrow_heads(rows, again), piece.block[:, :, : len(again)], True
    if new:
        yield narrow_heads(rows, new), piece.block[:, :, len(again) :], False
