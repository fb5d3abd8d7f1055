"""Where every message of an exchange lies in memory: found once for a shape, then followed.

The slices are taken of tensors without memory (PyTorch's meta device), and only size, strides and
offset are kept: taking them anew at every step costs more than sending a small tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..sequence_layout import Chunk
from .memory import (
    Cut,
    Piece,
    empty,
    even_runs,
    is_replicated,
    joins,
    local_chunks,
    narrow_heads,
    run_heads,
)

# Plans kept: a layer needs 4 to 6 per layout. With packed documents each micro-batch may bring a
# layout of its own, of many views, so that an unbounded or large cache would grow for long.
_KEPT = 128


@dataclass(frozen=True)
class View:
    """A view of a tensor, relative to where that begins in its storage."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def like(cls, meta: torch.Tensor) -> View:
        return cls(meta.size(), meta.stride(), int(meta.storage_offset()))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


Message = tuple[int, View]  # the peer, and what is sent to it or received from it


@dataclass(frozen=True)
class Pack:
    """A copy that makes the heads of some peers contiguous, and the messages that take them."""

    source: View  # of the tensor
    target: View  # of the scratch buffer
    sends: tuple[Message, ...]  # of the scratch buffer


@dataclass(frozen=True)
class Gather:
    """[s_r, b, h, d] -> [s, b, h_r, d] for one tensor of one rank.

    Args:
        result: shape of the result.
        scratch: elements of the scratch buffer.
        receives: views of the result.
        own: what stays on this rank: views of the result, and of the tensor.
    """

    result: tuple[int, ...]
    scratch: int
    receives: tuple[Message, ...]
    packs: tuple[Pack, ...]
    own: tuple[tuple[View, View], ...]


@dataclass(frozen=True)
class Arrival:
    """A piece of the result.

    Args:
        receives: views of the scratch buffer; None for the rank's own part.
        moves: views of the result, and of the scratch buffer or the tensor; whether it is added.
    """

    receives: tuple[Message, ...] | None
    moves: tuple[tuple[View, View, bool], ...]


@dataclass(frozen=True)
class Scatter:
    """[s, b, h_r, d] -> [s_r, b, h, d] for one tensor of one rank.

    Args:
        result: shape of the result.
        scratch: elements of the scratch buffer.
        sends: views of the tensor.
        arrivals: in the order in which they are to be used.
    """

    result: tuple[int, ...]
    scratch: int
    sends: tuple[Message, ...]
    arrivals: tuple[Arrival, ...]


@lru_cache(maxsize=_KEPT)
def plan_gather(
    cut: Cut,
    rank: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    batch_first: bool,
    joined: bool,
) -> Gather:
    """`joined`: messages wait for each other, so that one copy may serve several peers."""
    tensor = torch.empty_strided(shape, stride, device="meta")
    layout, (tokens, batch, _, dim) = cut.sequence, shape
    result_shape = (layout.sequence_length, batch, len(cut.heads[rank]), dim)
    result = empty(result_shape, tensor, batch_first)
    scratch = _Scratch(cut, rank, tensor)
    local = local_chunks(layout.chunks[rank])
    packs = []
    for run in _runs(cut, rank, joined):
        block = (tokens, batch, len(cut.heads[run[0]]), dim)
        buffer = scratch.blocks(len(run), block, batch_first)  # [ranks, s_r, b, h_peer, d]
        source = run_heads(tensor, cut.heads, run).permute(2, 0, 1, 3, 4)
        sends = [
            message
            for part, peer in zip(buffer.unbind(0), run, strict=True)
            for message in _messages(peer, part, local, batch_first)
        ]
        if sends:
            packs.append(Pack(View.like(source), View.like(buffer), tuple(sends)))
    own = narrow_heads(tensor, cut.heads[rank])
    return Gather(
        result_shape,
        scratch.elements,
        tuple(
            message
            for peer in _others(cut, rank)
            for message in _messages(peer, result, layout.chunks[peer], batch_first)
        ),
        tuple(packs),
        tuple(
            (View.like(result[start:stop]), View.like(own[begin:end]))
            for (start, stop), (begin, end) in zip(layout.chunks[rank], local, strict=True)
        ),
    )


@lru_cache(maxsize=_KEPT)
def plan_scatter(
    cut: Cut,
    rank: int,
    shape: tuple[int, ...],
    batch_first: bool,
    out_batch_first: bool,
    joined: bool,
) -> Scatter:
    """The tensor lies in `batch_first` memory order; `joined` as in `plan_gather`."""
    layout, (_, batch, own_heads, dim) = cut.sequence, shape
    tensor = empty(shape, torch.empty(0, device="meta"), batch_first)
    result_shape = (layout.lengths[rank], batch, cut.num_heads, dim)
    result = empty(result_shape, tensor, out_batch_first)
    scratch = _Scratch(cut, rank, tensor)
    local = local_chunks(layout.chunks[rank])
    pieces: list[tuple[Piece, tuple[Message, ...] | None]] = [
        (Piece([rank], begin, tensor[start:stop].unsqueeze(2)), None)
        for (start, stop), (begin, _) in zip(layout.chunks[rank], local, strict=True)
        if own_heads
    ]
    for run in _runs(cut, rank, joined):
        block = (layout.lengths[rank], batch, len(cut.heads[run[0]]), dim)
        buffer = scratch.blocks(len(run), block, batch_first)
        receives = tuple(
            message
            for part, peer in zip(buffer.unbind(0), run, strict=True)
            for message in _messages(peer, part, local, batch_first)
        )
        pieces.append((Piece(run, 0, buffer.permute(1, 2, 0, 3, 4)), receives))
    if is_replicated(cut.heads):  # summed in rank order, whoever computes it
        pieces.sort(key=lambda piece: piece[0].ranks[0])
    return Scatter(
        result_shape,
        scratch.elements,
        tuple(
            message
            for peer in _others(cut, rank)
            for message in _messages(peer, tensor, layout.chunks[peer], batch_first)
        ),
        tuple(
            Arrival(
                receives,
                tuple(
                    (View.like(target), View.like(source), add)
                    for target, source, add in joins(result, piece, cut)
                    if target.numel()
                ),
            )
            for piece, receives in pieces
        ),
    )


class _Scratch:
    """Hands out the scratch buffer of one tensor: this rank's tokens of all heads of others."""

    def __init__(self, cut: Cut, rank: int, like: torch.Tensor) -> None:
        heads = sum(map(len, cut.heads)) - len(cut.heads[rank])
        self.elements = cut.sequence.lengths[rank] * like.size(1) * heads * like.size(3)
        self._left = like.new_empty(self.elements)

    def blocks(self, count: int, shape: Sequence[int], batch_first: bool) -> torch.Tensor:
        """[count, s_r, b, h, d], each block contiguous in the memory order asked."""
        tokens, batch, *rest = shape
        order = (count, batch, tokens, *rest) if batch_first else (count, tokens, batch, *rest)
        size = torch.Size(order).numel()
        flat, self._left = self._left[:size], self._left[size:]
        return flat.view(order).transpose(1, 2) if batch_first else flat.view(order)


def _runs(cut: Cut, rank: int, joined: bool) -> list[list[int]]:
    """The peers that hold heads, those together that one copy serves."""
    if joined:
        return even_runs(cut.heads, rank)
    return [[peer] for peer in _neighbours(cut, rank) if cut.heads[peer]]


def _neighbours(cut: Cut, rank: int) -> list[int]:
    """Each rank begins with its neighbour, so that no rank is everybody's first."""
    size = len(cut.heads)
    return [(rank + step) % size for step in range(1, size)]


def _others(cut: Cut, rank: int) -> list[int]:
    """The peers whose tokens this rank has or wants, if it holds any heads."""
    return _neighbours(cut, rank) if cut.heads[rank] else []


def _messages(
    peer: int, tensor: torch.Tensor, chunks: Sequence[Chunk], batch_first: bool
) -> Iterator[Message]:
    """The contiguous pieces of memory that hold `chunks`, in an order both ends agree on."""
    for start, stop in chunks:
        block = tensor[start:stop]
        for part in block.unbind(1) if batch_first and block.size(1) > 1 else (block,):
            if part.numel():
                yield peer, View.like(part)
