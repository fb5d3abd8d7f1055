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
    columns,
    empty,
    even_runs,
    is_replicated,
    local_chunks,
    moves,
    narrow_heads,
    run_heads,
)

# Plans kept: a layer needs 4 to 6 per layout. With packed documents each micro-batch may bring a
# layout of its own, of many views, so that an unbounded or large cache would grow for long.
_KEPT = 128

# Heads are joined run by run of a rank's tokens up to so many runs (contiguous: 1, zigzag: 2),
# else piece by piece, for packed documents may come in hundreds of runs.
_RUNS_JOINED = 2


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
Copy = tuple[int, View, View]  # the number of a tensor; its view, and the view that is written


@dataclass(frozen=True)
class Pack:
    """Copies that make what a peer (or several) shall have contiguous, and its messages."""

    copies: tuple[Copy, ...]  # to the scratch buffer
    sends: tuple[Message, ...]  # of the scratch buffer


@dataclass(frozen=True)
class Gather:
    """[s_r, b, h, d] -> [s, b, h_r, d] for tensors that travel together, of one rank.

    Args:
        rows: [s, b, width]: the memory of the results, side by side.
        results: views of the rows.
        scratch: elements of the scratch buffer.
        receives: views of the rows.
        own: what stays on this rank, to the rows.
    """

    rows: tuple[int, ...]
    results: tuple[View, ...]
    scratch: int
    receives: tuple[Message, ...]
    packs: tuple[Pack, ...]
    own: tuple[Copy, ...]


@dataclass(frozen=True)
class Join:
    """Heads side by side, when all of them are here.

    Args:
        target: view of the result.
        parts: views of the tensor (True) or of the scratch buffer, in the order of heads.
    """

    target: View
    parts: tuple[tuple[bool, View], ...]


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
        joins: what is done when all have arrived; none where the arrivals have moves.
    """

    result: tuple[int, ...]
    scratch: int
    sends: tuple[Message, ...]
    arrivals: tuple[Arrival, ...]
    joins: tuple[Join, ...]


@lru_cache(maxsize=_KEPT)
def plan_gather(
    cuts: tuple[Cut, ...],
    rank: int,
    shapes: tuple[tuple[int, int, int, int], ...],
    strides: tuple[tuple[int, ...], ...],
    batch_first: bool,
    joined: bool,
) -> Gather:
    """The tensors share a sequence layout and, where there are several, the batch size is 1.

    `joined`: messages wait for each other, so that one copy of the one tensor may serve several
    peers.
    """
    tensors = [
        torch.empty_strided(shape, stride, device="meta")
        for shape, stride in zip(shapes, strides, strict=True)
    ]
    layout, (tokens, batch, *_) = cuts[0].sequence, shapes[0]
    local = local_chunks(layout.chunks[rank])

    def parts(peer: int) -> list[tuple[int, int]]:
        return [(len(cut.heads[peer]), shape[3]) for cut, shape in zip(cuts, shapes, strict=True)]

    widths = [sum(heads * dim for heads, dim in parts(peer)) for peer in range(layout.group_size)]
    rows_shape = (layout.sequence_length, batch, widths[rank])
    rows = empty(rows_shape, tensors[0], batch_first)
    neighbours = _neighbours(rank, layout.group_size)
    runs = [[peer] for peer in neighbours if widths[peer]]
    scratch = _Scratch(tokens * batch * sum(widths[peer] for peer in neighbours))
    packs = []
    for run in even_runs(cuts[0].heads, rank) if joined else runs:
        buffer = scratch.blocks(len(run), (tokens, batch, widths[run[0]]), batch_first)
        copies = tuple(
            (
                number,
                View.like(run_heads(tensor, cut.heads, run).permute(2, 0, 1, 3, 4)),
                View.like(block),  # [ranks, s_r, b, h_peer, d]
            )
            for number, (tensor, cut, block) in enumerate(
                zip(tensors, cuts, columns(buffer, parts(run[0])), strict=True)
            )
            if block.numel()
        )
        sends = tuple(
            message
            for part, peer in zip(buffer.unbind(0), run, strict=True)
            for message in _messages(peer, part, local, batch_first)
        )
        if sends:
            packs.append(Pack(copies, sends))
    results = columns(rows, parts(rank))
    return Gather(
        rows_shape,
        tuple(map(View.like, results)),
        scratch.elements,
        tuple(
            message
            for peer in neighbours
            if widths[rank]
            for message in _messages(peer, rows, layout.chunks[peer], batch_first)
        ),
        tuple(packs),
        tuple(
            (
                number,
                View.like(narrow_heads(tensor, cut.heads[rank])[begin:end]),
                View.like(result[start:stop]),
            )
            for number, (tensor, cut, result) in enumerate(zip(tensors, cuts, results, strict=True))
            for (start, stop), (begin, end) in zip(layout.chunks[rank], local, strict=True)
            if result[start:stop].numel()
        ),
    )


@lru_cache(maxsize=_KEPT)
def plan_scatter(
    cut: Cut,
    rank: int,
    shape: tuple[int, int, int, int],
    batch_first: bool,
    out_batch_first: bool,
) -> Scatter:
    """The tensor lies in `batch_first` memory order."""
    layout, (_, batch, own_heads, dim) = cut.sequence, shape
    tokens, local = layout.lengths[rank], local_chunks(layout.chunks[rank])
    tensor = empty(shape, torch.empty(0, device="meta"), batch_first)
    result_shape = (tokens, batch, cut.num_heads, dim)
    result = empty(result_shape, tensor, out_batch_first)
    neighbours = _neighbours(rank, layout.group_size)
    scratch = _Scratch(tokens * batch * sum(len(cut.heads[peer]) for peer in neighbours) * dim)
    own = [tensor[start:stop] for start, stop in layout.chunks[rank] if own_heads]
    blocks = {
        peer: scratch.blocks(1, (tokens, batch, len(cut.heads[peer]), dim), batch_first)[0]
        for peer in neighbours
        if cut.heads[peer]
    }
    receives = {
        peer: tuple(_messages(peer, block, local, batch_first)) for peer, block in blocks.items()
    }
    sends = tuple(
        message
        for peer in neighbours
        if own_heads
        for message in _messages(peer, tensor, layout.chunks[peer], batch_first)
    )
    if len(local) <= _RUNS_JOINED and not is_replicated(cut.heads):
        arrivals = tuple(Arrival(messages, ()) for messages in receives.values())
        joins = tuple(_joins(result, cut, rank, own, blocks, local))
        return Scatter(result_shape, scratch.elements, sends, arrivals, joins)
    pieces = [Piece(rank, begin, block) for (begin, _), block in zip(local, own, strict=False)]
    pieces += [Piece(peer, 0, block) for peer, block in blocks.items()]
    if is_replicated(cut.heads):  # summed in rank order, whoever computes it
        pieces.sort(key=lambda piece: piece.rank)
    arrivals = tuple(
        Arrival(receives.get(piece.rank), tuple(_moves(result, piece, cut))) for piece in pieces
    )
    return Scatter(result_shape, scratch.elements, sends, arrivals, ())


def _moves(result: torch.Tensor, piece: Piece, cut: Cut) -> Iterator[tuple[View, View, bool]]:
    for target, source, add in moves(result, piece, cut):
        if target.numel():
            yield View.like(target), View.like(source), add


def _joins(
    result: torch.Tensor,
    cut: Cut,
    rank: int,
    own: Sequence[torch.Tensor],
    blocks: dict[int, torch.Tensor],
    local: Sequence[Chunk],
) -> Iterator[Join]:
    """One for each run of this rank's tokens: `own` is cut by runs, a peer's block is not."""
    for number, (begin, end) in enumerate(local):
        parts = [(peer, View.like(block[begin:end])) for peer, block in blocks.items()]
        if own:
            parts.append((rank, View.like(own[number])))
        parts.sort(key=lambda part: cut.heads[part[0]].start)
        if result[begin:end].numel():
            target = View.like(result[begin:end])
            yield Join(target, tuple((peer == rank, view) for peer, view in parts))


class _Scratch:
    """Hands out the scratch buffer of tensors that travel together."""

    def __init__(self, elements: int) -> None:
        self.elements = elements
        self._left = torch.empty(elements, device="meta")

    def blocks(self, count: int, shape: Sequence[int], batch_first: bool) -> torch.Tensor:
        """[count, s_r, b, ...], each block contiguous in the memory order asked."""
        tokens, batch, *rest = shape
        order = (count, batch, tokens, *rest) if batch_first else (count, tokens, batch, *rest)
        size = torch.Size(order).numel()
        flat, self._left = self._left[:size], self._left[size:]
        return flat.view(order).transpose(1, 2) if batch_first else flat.view(order)


def _neighbours(rank: int, size: int) -> list[int]:
    """Each rank begins with its neighbour, so that no rank is everybody's first."""
    return [(rank + step) % size for step in range(1, size)]


def _messages(
    peer: int, tensor: torch.Tensor, chunks: Sequence[Chunk], batch_first: bool
) -> Iterator[Message]:
    """The contiguous pieces of memory that hold `chunks`, in an order both ends agree on."""
    for start, stop in chunks:
        block = tensor[start:stop]
        for part in block.unbind(1) if batch_first and block.size(1) > 1 else (block,):
            if part.numel():
                yield peer, View.like(part)
