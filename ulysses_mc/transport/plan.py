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

# Bytes up to which a message of gradients that lie apart is packed into one with others: a copy
# then costs less than a message of its own.
_WORTH_A_COPY = 256 << 10

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
    """What is done with a piece of a result, or with all its pieces, when they are here.

    Args:
        tensor: of the bundle, whose result it is.
        receives: what has to be here, buffers, and is not yet waited for.
        moves: view of the result, what comes there, and whether it is added.
        joins: view of the result, and whose heads come there side by side.
    """

    tensor: int
    receives: tuple[Numbered, ...]
    moves: tuple[tuple[View, Part, bool], ...] = ()
    joins: tuple[tuple[View, tuple[Part, ...]], ...] = ()


@dataclass(frozen=True, eq=False)
class Scatter:
    """[s, b, h_r, d] -> [s_r, b, h, d] for alike tensors that travel together, of one rank.

    Args:
        bundle: which of the tensors of the exchange those are; below they count from 0.
        result: shape of each result, which is contiguous.
        scratch, buffers: elements, and views of them.
        own: views of each tensor. sends: of those, where there is one tensor.
        packs: where there are several: the peer, the buffer that it is sent, and the tensor and
            view of what comes there one after the other.
        arrivals: in the order in which they are to be used.
    """

    bundle: tuple[int, ...]
    result: tuple[int, ...]
    scratch: int
    buffers: tuple[View, ...]
    own: Views
    sends: tuple[Numbered, ...]
    packs: tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]
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
    cuts: tuple[Cut, ...],
    rank: int,
    shapes: tuple[tuple[int, ...], ...],
    itemsize: int,
    batch_first: bool,
    joined: bool,
) -> tuple[Scatter, ...]:
    """One plan for the tensors that travel together; all are contiguous."""
    # As every rank finds it: bytes of the largest message that any rank sends to any.
    bytes_of = [
        max(cut.sequence.lengths) * max(map(len, cut.heads)) * shape[not batch_first] * shape[3]
        * itemsize
        for cut, shape in zip(cuts, shapes, strict=True)
    ]  # fmt: skip
    alike: dict[tuple[Cut, tuple[int, ...]], list[int]] = {}
    for i, kind in enumerate(zip(cuts, shapes, strict=True)):
        alike.setdefault(kind, []).append(i)
    bundles_of: list[list[int]] = []
    for (_, shape), numbers in alike.items():
        message, in_one_piece = bytes_of[numbers[0]], not batch_first or shape[0] == 1
        # Not more than the largest tensor's: it is packed for this alone, and copies are counted.
        small = message <= _WORTH_A_COPY and len(numbers) * message <= max(bytes_of)
        together = small and in_one_piece and not joined
        bundles_of += [numbers] if together else [[number] for number in numbers]
    return tuple(plan_scatter(b, cuts[b[0]], rank, shapes[b[0]], batch_first) for b in bundles_of)


def plan_scatter(
    bundle: Sequence[int], cut: Cut, rank: int, shape: tuple[int, ...], batch_first: bool
) -> Scatter:
    """Those of a bundle have one cut and one shape."""
    given = torch.empty(shape, device="meta")
    tensor = sequence_first(given, batch_first)
    view = partial(_view, batch_first=batch_first)
    layout, (_, batch, own_heads, dim) = cut.sequence, tensor.shape
    tokens, local, several = layout.lengths[rank], local_chunks(layout.chunks[rank]), len(bundle)
    result = empty((tokens, batch, cut.num_heads, dim), tensor, batch_first)
    neighbours = _neighbours(rank, layout.group_size)
    elements = tokens * sum(len(cut.heads[peer]) for peer in neighbours)
    if several > 1:
        elements += sum(layout.lengths[peer] for peer in neighbours) * own_heads
    scratch = _Scratch(several * batch * dim * elements)
    pieces = [
        [
            Piece(rank, begin, tensor[start:stop])
            for (start, stop), (begin, _) in zip(layout.chunks[rank], local, strict=True)
            if own_heads
        ]
        for _ in bundle
    ]
    receives: dict[int, tuple[Numbered, ...]] = {rank: ()}
    for peer in _as_they_send(rank, layout.group_size):
        heads = len(cut.heads[peer])
        block = scratch.blocks(1, (several * tokens, batch, heads, dim), batch_first)[0]
        if block.numel():
            for mine, of_one in zip(pieces, block.split(tokens), strict=True):
                mine.append(Piece(peer, 0, of_one))
        runs = local if several == 1 else [(0, several * tokens)]
        messages = _messages(block, runs, batch_first)
        receives[peer] = tuple((peer, scratch.number(message)) for message in messages)
    sends: list[tuple[int, View]] = []
    packs: list[tuple[int, int, list[tuple[int, View]]]] = []
    for peer in neighbours:
        leaving = list(_messages(tensor, layout.chunks[peer], batch_first))
        if several == 1:
            sends += [(peer, message) for message in leaving]
        elif leaving:
            length = several * layout.lengths[peer]
            block = scratch.blocks(1, (length, batch, own_heads, dim), batch_first)[0]
            sources = [(i, message) for i in range(several) for message in leaving]
            packs.append((peer, scratch.number(view(block)), sources))
    # What is done on arrival; its parts get their numbers when all views are known.
    steps: list[tuple[int, tuple[Numbered, ...], list[_Move], list[_Join]]] = []
    for number, mine in enumerate(pieces):
        if len(local) <= _RUNS_JOINED and not cut.is_replicated:
            mine.sort(key=lambda piece: piece.rank)
            everything = tuple(message for messages in receives.values() for message in messages)
            joins = [
                (view(result[begin:end]), list(_of_run(mine, begin, end)))
                for begin, end in local
                if result[begin:end].numel()
            ]
            steps.append((number, everything, [], joins))
        else:
            if cut.is_replicated:  # summed in rank order, whoever computes it
                mine.sort(key=lambda piece: piece.rank)
            for piece in mine:
                moved = [
                    (view(target), replace(piece, block=source), add)
                    for target, source, add in moves(result, piece, cut)
                    if target.numel()
                ]
                steps.append((number, receives[piece.rank], moved, []))
        receives = dict.fromkeys(receives, ())  # here when the next tensor of the bundle is joined
    used = [piece for *_, moved, _ in steps for _, piece, _ in moved]
    used += [piece for *_, joins in steps for _, parts in joins for piece in parts]
    sent = [message for _, message in sends]
    sent += [message for _, _, sources in packs for _, message in sources]
    own = Views.made_of(given, sent + [view(p.block) for p in used if p.rank == rank])

    def part(piece: Piece) -> Part:
        block = view(piece.block)
        if piece.rank == rank:
            return Part(True, own.numbers[block])
        return Part(False, scratch.number(block))

    arrivals = [
        Arrival(
            number,
            needed,
            tuple((target, part(piece), add) for target, piece, add in moved),
            tuple((target, tuple(map(part, parts))) for target, parts in joins),
        )
        for number, needed, moved, joins in steps
    ]
    return Scatter(
        bundle=tuple(bundle),
        result=tuple(sequence_first(result, batch_first).shape),
        scratch=scratch.elements,
        buffers=scratch.buffers,
        own=own,
        sends=tuple((peer, own.numbers[message]) for peer, message in sends),
        packs=tuple(
            (peer, target, tuple((i, own.numbers[message]) for i, message in sources))
            for peer, target, sources in packs
        ),
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
