"""Where every message of an exchange lies in memory: found once for a shape, then followed.

The slices are taken of tensors without memory (PyTorch's meta device), and only size, strides and
offset are kept: taking them anew at every step costs more than sending a small tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

import torch

from ..sequence_layout import Chunk
from .memory import (
    PLANS_KEPT,
    Cut,
    Piece,
    View,
    bundles,
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

_Move = tuple[View, Piece, bool]  # of the result; what comes there; whether it is added
_Join = tuple[View, list[Piece]]  # of the result; what comes there side by side
Numbered = tuple[int, int]  # the peer, and the number of what is sent to it or received from it


@dataclass(frozen=True)
class Views:
    """Views of one tensor, taken all at once.

    Args:
        views: in the order of their numbers.
        sizes, dim: where the views are the tensor's parts along a dimension, one after the other:
            one call makes them, in less than half the time.
    """

    views: tuple[View, ...]
    sizes: tuple[int, ...] = ()
    dim: int = 0

    @classmethod
    def made_of(
        cls, whole: torch.Tensor, wanted: Iterable[View], rest: Iterable[View] = ()
    ) -> Views:
        """Those `wanted`, and the `rest` too where the tensor can be cut into both."""
        views = dict.fromkeys(wanted)
        ordered = sorted(dict.fromkeys([*views, *rest]), key=lambda view: view.offset)
        for dim in range(whole.dim()):
            sizes = tuple(view.size[dim] for view in ordered if len(view.size) == whole.dim())
            fits = len(sizes) == len(ordered) and sum(sizes) == whole.size(dim)
            if fits and [*map(View.like, whole.split_with_sizes(sizes, dim))] == ordered:
                return cls(tuple(ordered), sizes, dim)
        return cls(tuple(views))

    @cached_property
    def numbers(self) -> dict[View, int]:
        return {view: number for number, view in enumerate(self.views)}

    def of(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        if self.sizes:
            return tensor.split_with_sizes(self.sizes, self.dim)
        start = tensor.storage_offset()
        return [
            tensor.as_strided(size, stride, start + offset) for size, stride, offset in self.views
        ]


@dataclass(frozen=True)
class Pack:
    """Copies that make what a peer (or several) shall have contiguous, and its messages.

    Args:
        copies: the number of a tensor, of a view of it, and of the buffer that is written.
        sends: of buffers.
    """

    copies: tuple[tuple[int, int, int], ...]
    sends: tuple[Numbered, ...]


@dataclass(frozen=True, eq=False)
class Gather:
    """[s_r, b, h, d] -> [s, b, h_r, d] for tensors that travel together, of one rank.

    Args:
        bundle: which of the tensors of the exchange those are; below they count from 0.
        rows: [s, b, width] or [b, s, width]: the memory of the results, side by side.
        arriving: views of the rows. receives: of those.
        results: views of the rows.
        scratch, buffers: elements, and views of them.
        sources: of each tensor. packs: to be sent.
        own: what stays on this rank: the number of a tensor, of a view of it, a view of the rows.
    """

    bundle: tuple[int, ...]
    rows: tuple[int, ...]
    arriving: Views
    receives: tuple[Numbered, ...]
    results: tuple[View, ...]
    scratch: int
    buffers: tuple[View, ...]
    sources: tuple[Views, ...]
    packs: tuple[Pack, ...]
    own: tuple[tuple[int, int, View], ...]


@dataclass(frozen=True)
class Part:
    """A view of the rank's own tensor, or a buffer, by its number."""

    is_own: bool
    number: int

    def of(self, own: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> torch.Tensor:
        return own[self.number] if self.is_own else buffers[self.number]


@dataclass(frozen=True)
class Arrival:
    """What is done with a piece of the result, or with all pieces, when they are here.

    Args:
        receives: what has to be here, buffers.
        moves: view of the result, what comes there, and whether it is added.
        joins: view of the result, and whose heads come there side by side.
    """

    receives: tuple[Numbered, ...]
    moves: tuple[tuple[View, Part, bool], ...] = ()
    joins: tuple[tuple[View, tuple[Part, ...]], ...] = ()


@dataclass(frozen=True, eq=False)
class Scatter:
    """[s, b, h_r, d] -> [s_r, b, h, d] for one tensor of one rank.

    Args:
        result: shape of the result, which is contiguous.
        scratch, buffers: elements, and views of them.
        own: views of the tensor. sends: of those.
        arrivals: in the order in which they are to be used.
    """

    result: tuple[int, ...]
    scratch: int
    buffers: tuple[View, ...]
    own: Views
    sends: tuple[Numbered, ...]
    arrivals: tuple[Arrival, ...]


@lru_cache(maxsize=PLANS_KEPT)
def plan_gathers(
    cuts: tuple[Cut, ...],
    rank: int,
    shapes: tuple[tuple[int, ...], ...],
    strides: tuple[tuple[int, ...], ...],
    batch_first: bool,
    joined: bool,
) -> tuple[Gather, ...]:
    """One plan for the tensors that travel together.

    `joined`: messages wait for each other, so that one copy of the one tensor may serve several
    peers.
    """
    # Tensors of the same tokens are one message to a peer, where a range of columns is as good as
    # contiguous to every kernel (b = 1). Messages that are joined anyway gain nothing by that.
    together = shapes[0][0 if batch_first else 1] == 1 and not joined
    found = bundles(cuts) if together else [[number] for number in range(len(cuts))]
    return tuple(_plan_gather(b, cuts, rank, shapes, strides, batch_first, joined) for b in found)


def _plan_gather(
    bundle: list[int],
    all_cuts: Sequence[Cut],
    rank: int,
    shapes: Sequence[tuple[int, ...]],
    strides: Sequence[tuple[int, ...]],
    batch_first: bool,
    joined: bool,
) -> Gather:
    """Those of a bundle share a sequence layout and, where there are several, b is 1."""
    cuts = [all_cuts[i] for i in bundle]
    given = [torch.empty_strided(shapes[i], strides[i], device="meta") for i in bundle]
    tensors = [sequence_first(tensor, batch_first) for tensor in given]
    view = partial(_view, batch_first=batch_first)
    layout, (tokens, batch, *_) = cuts[0].sequence, tensors[0].shape
    local, neighbours = local_chunks(layout.chunks[rank]), _neighbours(rank, layout.group_size)
    parts = [
        [(len(cut.heads[peer]), tensor.size(3)) for cut, tensor in zip(cuts, tensors, strict=True)]
        for peer in range(layout.group_size)
    ]
    widths = [sum(heads * dim for heads, dim in part) for part in parts]
    rows = empty((layout.sequence_length, batch, widths[rank]), tensors[0], batch_first)
    results = columns(rows, parts[rank])
    scratch = _Scratch(tokens * batch * sum(widths[peer] for peer in neighbours))
    copied: list[list[tuple[int, View, int]]] = []
    sent: list[list[Numbered]] = []
    for run in even_runs(cuts[0].heads, rank) if joined else [[peer] for peer in neighbours]:
        block = scratch.blocks(len(run), (tokens, batch, widths[run[0]]), batch_first)
        targets = columns(block, parts[run[0]])  # each [ranks, s_r, b, h_peer, d]
        sends = [
            (peer, scratch.number(message))
            for part, peer in zip(block.unbind(0), run, strict=True)
            for message in _messages(part, local, batch_first)
        ]
        if not sends:
            continue
        sent.append(sends)
        copied.append([])
        for number, (tensor, cut, target) in enumerate(zip(tensors, cuts, targets, strict=True)):
            if joined:
                source = View.like(run_heads(tensor, cut.heads, run))
                place = View.like(target)
            else:
                source = view(narrow_heads(tensor, cut.heads[run[0]]))
                place = view(target[0])
            if target.numel():
                copied[-1].append((number, source, scratch.number(place)))
    own = [
        (number, view(mine[begin:end]), view(result[start:stop]))
        for number, (tensor, cut, result) in enumerate(zip(tensors, cuts, results, strict=True))
        for mine in [narrow_heads(tensor, cut.heads[rank])]
        for (start, stop), (begin, end) in zip(layout.chunks[rank], local, strict=True)
        if result[start:stop].numel()
    ]
    sources = [
        Views.made_of(
            tensor,
            [
                source
                for which, source, _ in [*(copy for copies in copied for copy in copies), *own]
                if which == number
            ],
        )
        for number, tensor in enumerate(given)
    ]
    receives = [
        (peer, message)
        for peer in _as_they_send(rank, layout.group_size)
        for message in _messages(rows, layout.chunks[peer], batch_first)
    ]
    arriving = Views.made_of(
        sequence_first(rows, batch_first),
        [message for _, message in receives],
        [view(rows[start:stop]) for start, stop in layout.chunks[rank]],
    )
    return Gather(
        bundle=tuple(bundle),
        rows=tuple(sequence_first(rows, batch_first).shape),
        arriving=arriving,
        receives=tuple((peer, arriving.numbers[message]) for peer, message in receives),
        results=tuple(map(view, results)),
        scratch=scratch.elements,
        buffers=scratch.buffers,
        sources=tuple(sources),
        packs=tuple(
            Pack(tuple((n, sources[n].numbers[v], buffer) for n, v, buffer in copies), tuple(sends))
            for copies, sends in zip(copied, sent, strict=True)
        ),
        own=tuple((n, sources[n].numbers[source], place) for n, source, place in own),
    )


@lru_cache(maxsize=PLANS_KEPT)
def plan_scatters(
    cuts: tuple[Cut, ...], rank: int, shapes: tuple[tuple[int, ...], ...], batch_first: bool
) -> tuple[Scatter, ...]:
    """One plan for each tensor; all are contiguous."""
    return tuple(
        plan_scatter(cut, rank, shape, batch_first) for cut, shape in zip(cuts, shapes, strict=True)
    )


def plan_scatter(cut: Cut, rank: int, shape: tuple[int, ...], batch_first: bool) -> Scatter:
    """The tensor is contiguous."""
    given = torch.empty(shape, device="meta")
    tensor = sequence_first(given, batch_first)
    view = partial(_view, batch_first=batch_first)
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
    receives: dict[int, tuple[Numbered, ...]] = {rank: ()}
    for peer in _as_they_send(rank, layout.group_size):
        block = scratch.blocks(1, (tokens, batch, len(cut.heads[peer]), dim), batch_first)[0]
        if block.numel():
            pieces.append(Piece(peer, 0, block))
        messages = _messages(block, local, batch_first)
        receives[peer] = tuple((peer, scratch.number(message)) for message in messages)
    sends = [
        (peer, message)
        for peer in neighbours
        for message in _messages(tensor, layout.chunks[peer], batch_first)
    ]
    # What is done on arrival; its parts get their numbers when all views are known.
    steps: list[tuple[tuple[Numbered, ...], list[_Move], list[_Join]]]
    if len(local) <= _RUNS_JOINED and not cut.is_replicated:
        pieces.sort(key=lambda piece: piece.rank)
        everything = tuple(message for messages in receives.values() for message in messages)
        joins = [
            (view(result[begin:end]), list(_of_run(pieces, begin, end)))
            for begin, end in local
            if result[begin:end].numel()
        ]
        steps = [(everything, [], joins)]
    else:
        if cut.is_replicated:  # summed in rank order, whoever computes it
            pieces.sort(key=lambda piece: piece.rank)
        steps = [
            (
                receives[piece.rank],
                [
                    (view(target), replace(piece, block=source), add)
                    for target, source, add in moves(result, piece, cut)
                    if target.numel()
                ],
                [],
            )
            for piece in pieces
        ]
    used = [piece for _, moved, _ in steps for _, piece, _ in moved]
    used += [piece for _, _, joins in steps for _, parts in joins for piece in parts]
    own = Views.made_of(
        given,
        [message for _, message in sends] + [view(p.block) for p in used if p.rank == rank],
    )

    def part(piece: Piece) -> Part:
        block = view(piece.block)
        if piece.rank == rank:
            return Part(True, own.numbers[block])
        return Part(False, scratch.number(block))

    arrivals = [
        Arrival(
            needed,
            tuple((target, part(piece), add) for target, piece, add in moved),
            tuple((target, tuple(map(part, parts))) for target, parts in joins),
        )
        for needed, moved, joins in steps
    ]
    return Scatter(
        result=tuple(sequence_first(result, batch_first).shape),
        scratch=scratch.elements,
        buffers=scratch.buffers,
        own=own,
        sends=tuple((peer, own.numbers[message]) for peer, message in sends),
        arrivals=tuple(arrivals),
    )


def _view(tensor: torch.Tensor, batch_first: bool) -> View:
    """Of [s, b, ...], in the order that the tensors of the exchange have."""
    return View.like(sequence_first(tensor, batch_first))


def _of_run(pieces: Sequence[Piece], begin: int, end: int) -> Iterator[Piece]:
    """The tokens of a run of each piece that holds them: a rank's own pieces are cut by runs."""
    for piece in pieces:
        if piece.start <= begin < piece.start + piece.block.size(0):
            block = piece.block[begin - piece.start : end - piece.start]
            yield replace(piece, start=begin, block=block)


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


def _as_they_send(rank: int, size: int) -> list[int]:
    """Whose message is to come first, first. gloo tells a sender that it is waited for: told in
    time, it need not ask."""
    return _neighbours(rank, size)[::-1]


def _messages(tensor: torch.Tensor, chunks: Sequence[Chunk], batch_first: bool) -> Iterator[View]:
    """The contiguous pieces of memory that hold `chunks`, in an order both ends agree on."""
    for start, stop in chunks:
        block = tensor[start:stop]
        if batch_first and block.size(1) > 1:
            yield from (View.like(sample) for sample in block.unbind(1) if sample.numel())
        elif block.numel():
            yield _view(block, batch_first)
