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
    PLANS_KEPT,
    Cut,
    Piece,
    View,
    columns,
    empty,
    even_runs,
    local_chunks,
    moves,
    narrow_heads,
    run_heads,
    sequence_first,
)

# Heads are joined run by run of a rank's tokens up to so many runs (contiguous: 1, zigzag: 2),
# else piece by piece, for packed documents may come in hundreds of runs.
_RUNS_JOINED = 2

Message = tuple[int, View]  # the peer, and what is sent to it or received from it
Buffered = tuple[int, int]  # the peer, and the number of the buffer that is sent or received


@dataclass(frozen=True)
class Pack:
    """Copies that make what a peer (or several) shall have contiguous, and its messages.

    Args:
        copies: the number of a tensor, a view of it, the number of the buffer that is written.
        sends: of buffers.
    """

    copies: tuple[tuple[int, View, int], ...]
    sends: tuple[Buffered, ...]


@dataclass(frozen=True, eq=False)
class Gather:
    """[s_r, b, h, d] -> [s, b, h_r, d] for tensors that travel together, of one rank.

    Args:
        rows: elements of the memory of the results, [s, b, width] or [b, s, width].
        results: views of the rows.
        scratch, buffers: elements, and views of them.
        receives: views of the rows.
        own: what stays on this rank: the number of a tensor, a view of it, a view of the rows.
    """

    rows: int
    results: tuple[View, ...]
    scratch: int
    buffers: tuple[View, ...]
    receives: tuple[Message, ...]
    packs: tuple[Pack, ...]
    own: tuple[tuple[int, View, View], ...]


@dataclass(frozen=True)
class Part:
    """A view of the rank's own tensor, or else the buffer of that number."""

    own: View | None
    buffer: int = 0

    def of(self, tensor: torch.Tensor, buffers: Sequence[torch.Tensor]) -> torch.Tensor:
        return buffers[self.buffer] if self.own is None else self.own.of(tensor)


@dataclass(frozen=True)
class Arrival:
    """What is done with a piece of the result, or with all pieces, when they are here.

    Args:
        receives: what has to be here.
        moves: view of the result, what comes there, and whether it is added.
        joins: view of the result, and whose heads come there side by side.
    """

    receives: tuple[Buffered, ...]
    moves: tuple[tuple[View, Part, bool], ...] = ()
    joins: tuple[tuple[View, tuple[Part, ...]], ...] = ()


@dataclass(frozen=True, eq=False)
class Scatter:
    """[s, b, h_r, d] -> [s_r, b, h, d] for one tensor of one rank.

    Args:
        result: shape of the result, which is contiguous.
        scratch, buffers: elements, and views of them.
        sends: views of the tensor.
        arrivals: in the order in which they are to be used.
    """

    result: tuple[int, ...]
    scratch: int
    buffers: tuple[View, ...]
    sends: tuple[Message, ...]
    arrivals: tuple[Arrival, ...]


@lru_cache(maxsize=PLANS_KEPT)
def plan_gather(
    cuts: tuple[Cut, ...],
    rank: int,
    shapes: tuple[tuple[int, ...], ...],
    strides: tuple[tuple[int, ...], ...],
    batch_first: bool,
    joined: bool,
) -> Gather:
    """The tensors share a sequence layout and, where there are several, the batch size is 1.

    `joined`: messages wait for each other, so that one copy of the one tensor may serve several
    peers.
    """
    tensors = [
        sequence_first(torch.empty_strided(shape, stride, device="meta"), batch_first)
        for shape, stride in zip(shapes, strides, strict=True)
    ]
    layout, (tokens, batch, *_) = cuts[0].sequence, tensors[0].shape
    local, neighbours = local_chunks(layout.chunks[rank]), _neighbours(rank, layout.group_size)
    parts = [
        [(len(cut.heads[peer]), shape[3]) for cut, shape in zip(cuts, shapes, strict=True)]
        for peer in range(layout.group_size)
    ]
    widths = [sum(heads * dim for heads, dim in part) for part in parts]
    rows = empty((layout.sequence_length, batch, widths[rank]), tensors[0], batch_first)
    results = columns(rows, parts[rank])
    scratch = _Scratch(tokens * batch * sum(widths[peer] for peer in neighbours))
    packs = []
    for run in even_runs(cuts[0].heads, rank) if joined else [[peer] for peer in neighbours]:
        block = scratch.blocks(len(run), (tokens, batch, widths[run[0]]), batch_first)
        targets = columns(block, parts[run[0]])  # each [ranks, s_r, b, h_peer, d]
        sends = [
            (peer, scratch.number(view))
            for part, peer in zip(block.unbind(0), run, strict=True)
            for view in _messages(part, local, batch_first)
        ]
        copies = [
            (
                number,
                View.like(run_heads(tensor, cut.heads, run)),
                scratch.number(View.like(target)),
            )
            for number, (tensor, cut, target) in enumerate(zip(tensors, cuts, targets, strict=True))
            if target.numel()
        ]
        if sends:
            packs.append(Pack(tuple(copies), tuple(sends)))
    own = [
        (number, View.like(mine[begin:end]), View.like(result[start:stop]))
        for number, (tensor, cut, result) in enumerate(zip(tensors, cuts, results, strict=True))
        for mine in [narrow_heads(tensor, cut.heads[rank])]
        for (start, stop), (begin, end) in zip(layout.chunks[rank], local, strict=True)
        if result[start:stop].numel()
    ]
    receives = [
        (peer, view)
        for peer in neighbours
        for view in _messages(rows, layout.chunks[peer], batch_first)
    ]
    return Gather(
        rows=rows.numel(),
        results=tuple(View.like(sequence_first(result, batch_first)) for result in results),
        scratch=scratch.elements,
        buffers=scratch.buffers,
        receives=tuple(receives),
        packs=tuple(packs),
        own=tuple(own),
    )


@lru_cache(maxsize=PLANS_KEPT)
def plan_scatter(cut: Cut, rank: int, shape: tuple[int, ...], batch_first: bool) -> Scatter:
    """The tensor is contiguous."""
    tensor = sequence_first(torch.empty(shape, device="meta"), batch_first)
    layout, (_, batch, own_heads, dim) = cut.sequence, tensor.shape
    tokens, local = layout.lengths[rank], local_chunks(layout.chunks[rank])
    result = empty((tokens, batch, cut.num_heads, dim), tensor, batch_first)
    neighbours = _neighbours(rank, layout.group_size)
    scratch = _Scratch(tokens * batch * sum(len(cut.heads[peer]) for peer in neighbours) * dim)
    pieces = [
        Piece(rank, begin, tensor[start:stop])
        for (start, stop), (begin, _) in zip(layout.chunks[rank], local, strict=True)
        if own_heads
    ]
    receives: dict[int, tuple[Buffered, ...]] = {rank: ()}
    for peer in neighbours:
        block = scratch.blocks(1, (tokens, batch, len(cut.heads[peer]), dim), batch_first)[0]
        if block.numel():
            pieces.append(Piece(peer, 0, block))
        views = _messages(block, local, batch_first)
        receives[peer] = tuple((peer, scratch.number(view)) for view in views)
    sends = [
        (peer, view)
        for peer in neighbours
        for view in _messages(tensor, layout.chunks[peer], batch_first)
    ]

    def part(piece: Piece, block: torch.Tensor) -> Part:
        view = View.like(block)
        return Part(view) if piece.rank == rank else Part(None, scratch.number(view))

    if len(local) <= _RUNS_JOINED and not cut.is_replicated:
        pieces.sort(key=lambda piece: piece.rank)
        joins = [
            (View.like(result[begin:end]), tuple(part(*its) for its in _of_run(pieces, begin, end)))
            for begin, end in local
            if result[begin:end].numel()
        ]
        everything = tuple(message for messages in receives.values() for message in messages)
        arrivals = [Arrival(everything, joins=tuple(joins))]
    else:
        if cut.is_replicated:  # summed in rank order, whoever computes it
            pieces.sort(key=lambda piece: piece.rank)
        arrivals = [
            Arrival(
                receives[piece.rank],
                tuple(
                    (View.like(target), part(piece, source), add)
                    for target, source, add in moves(result, piece, cut)
                    if target.numel()
                ),
            )
            for piece in pieces
        ]
    return Scatter(
        result=tuple(sequence_first(result, batch_first).shape),
        scratch=scratch.elements,
        buffers=scratch.buffers,
        sends=tuple(sends),
        arrivals=tuple(arrivals),
    )


def _of_run(pieces: Sequence[Piece], begin: int, end: int) -> Iterator[tuple[Piece, torch.Tensor]]:
    """The tokens of a run of each piece that holds them: a rank's own pieces are cut by runs."""
    for piece in pieces:
        if piece.start <= begin < piece.start + piece.block.size(0):
            yield piece, piece.block[begin - piece.start : end - piece.start]


class _Scratch:
    """Hands out the memory and the buffers of an exchange."""

    def __init__(self, elements: int) -> None:
        self.elements = elements
        self._left = torch.empty(elements, device="meta")
        self._numbers: dict[View, int] = {}

    @property
    def buffers(self) -> tuple[View, ...]:
        return tuple(self._numbers)

    def blocks(self, count: int, shape: Sequence[int], batch_first: bool) -> torch.Tensor:
        """[count, s_r, b, ...], each block contiguous in the memory order asked."""
        tokens, batch, *rest = shape
        order = (count, batch, tokens, *rest) if batch_first else (count, tokens, batch, *rest)
        size = torch.Size(order).numel()
        flat, self._left = self._left[:size], self._left[size:]
        return flat.view(order).transpose(1, 2) if batch_first else flat.view(order)

    def number(self, view: View) -> int:
        return self._numbers.setdefault(view, len(self._numbers))


def _neighbours(rank: int, size: int) -> list[int]:
    """Each rank begins with its neighbour, so that no rank is everybody's first."""
    return [(rank + step) % size for step in range(1, size)]


def _messages(tensor: torch.Tensor, chunks: Sequence[Chunk], batch_first: bool) -> Iterator[View]:
    """The contiguous pieces of memory that hold `chunks`, in an order both ends agree on."""
    for start, stop in chunks:
        block = tensor[start:stop]
        for part in block.unbind(1) if batch_first and block.size(1) > 1 else (block,):
            if part.numel():
                yield View.like(part)
