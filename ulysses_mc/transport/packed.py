"""One all_to_all_single over a packed buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..sequence_layout import SequenceLayout
from .memory import (
    Cut,
    Piece,
    bundles,
    columns,
    empty,
    local_chunks,
    moves,
    narrow_heads,
    sequence_first,
    sum_dtype,
)


def gather_packed(
    tensors: Sequence[torch.Tensor],
    cuts: Sequence[Cut],
    group: dist.ProcessGroup,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """Tensors with the same tokens travel side by side in one row per token, so that what
    arrives in token order is used in place."""
    tensors = [sequence_first(tensor, batch_first) for tensor in tensors]
    rank, ranks = group.rank(), range(group.size())
    bundled = bundles(cuts)

    def shapes_of(bundle: list[int], peer: int) -> list[tuple[int, int]]:
        return [(len(cuts[i].heads[peer]), tensors[i].size(3)) for i in bundle]

    def width(bundle: list[int], peer: int) -> int:  # elements of one row for `peer`
        return sum(heads * dim for heads, dim in shapes_of(bundle, peer))

    def rows(bundle: list[int], tokens_of: int, heads_of: int) -> tuple[int, int, int]:
        first = bundle[0]
        tokens = cuts[first].sequence.lengths[tokens_of]
        return tokens, tensors[first].size(1), width(bundle, heads_of)

    send_shapes = [[rows(bundle, rank, peer) for bundle in bundled] for peer in ranks]
    send, to_fill = _flat_buffer(send_shapes, tensors[0])
    for peer in ranks:
        for bundle, block in zip(bundled, to_fill[peer], strict=True):
            for i, part in zip(bundle, columns(block, shapes_of(bundle, peer)), strict=True):
                part.copy_(narrow_heads(tensors[i], cuts[i].heads[peer]))

    shapes = [[rows(bundle, peer, rank) for bundle in bundled] for peer in ranks]
    arrived = _all_to_all(send, [_elements(row) for row in send_shapes], shapes, group)
    results: dict[int, torch.Tensor] = {}
    for number, bundle in enumerate(bundled):
        sequence = cuts[bundle[0]].sequence
        whole = _in_token_order([blocks[number] for blocks in arrived], sequence)
        for i, part in zip(bundle, columns(whole, shapes_of(bundle, rank)), strict=True):
            # At b = 1 a column range of the rows is as good as contiguous to every kernel.
            results[i] = part if part.size(1) == 1 else part.contiguous()
    return tuple(sequence_first(results[i], batch_first) for i in range(len(tensors)))


def scatter_packed(
    tensors: Sequence[torch.Tensor],
    cuts: Sequence[Cut],
    group: dist.ProcessGroup,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """As `scatter_by_messages`; a single contiguous tensor is sent without packing."""
    rank, ranks = group.rank(), range(group.size())
    tensors = [sequence_first(tensor, batch_first).contiguous() for tensor in tensors]
    pieces = [
        [
            tensor[start:stop].reshape(-1)
            for tensor, cut in zip(tensors, cuts, strict=True)
            for start, stop in cut.sequence.chunks[peer]
        ]
        for peer in ranks
    ]
    shapes = [
        [
            (cut.sequence.lengths[rank], tensor.size(1), len(cut.heads[peer]), tensor.size(3))
            for tensor, cut in zip(tensors, cuts, strict=True)
        ]
        for peer in ranks
    ]
    send = _as_one([piece for row in pieces for piece in row], tensors[0])
    counts = [sum(piece.numel() for piece in row) for row in pieces]
    arrived = _all_to_all(send, counts, shapes, group)
    results = []
    for number, (tensor, cut) in enumerate(zip(tensors, cuts, strict=True)):
        shape = (cut.sequence.lengths[rank], tensor.size(1), cut.num_heads, tensor.size(3))
        result = empty(shape, tensor, batch_first, sum_dtype(cut, tensor))
        for peer in ranks:
            if cut.heads[peer]:
                piece = Piece(peer, 0, arrived[peer][number])
                for target, source, add in moves(result, piece, cut):
                    target.add_(source) if add else target.copy_(source)
        results.append(sequence_first(result, batch_first).to(tensor.dtype))
    return tuple(results)


def _all_to_all(
    send: torch.Tensor,
    send_counts: list[int],
    shapes: Sequence[Sequence[tuple[int, ...]]],
    group: dist.ProcessGroup,
) -> list[list[torch.Tensor]]:
    """Sends `send_counts[peer]` elements to each peer; receives blocks of `shapes[peer]`."""
    receive, blocks = _flat_buffer(shapes, send)
    receive_counts = [_elements(row) for row in shapes]
    dist.all_to_all_single(receive, send, receive_counts, send_counts, group=group)
    return blocks


def _flat_buffer(
    shapes: Sequence[Sequence[tuple[int, ...]]], like: torch.Tensor
) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """One flat buffer, and views of it with the shapes given, one after the other."""
    counts = [_elements([shape]) for row in shapes for shape in row]
    flat = like.new_empty(sum(counts))
    pieces = iter(flat.split(counts))
    return flat, [[next(pieces).view(shape) for shape in row] for row in shapes]


def _elements(shapes: Sequence[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _in_token_order(blocks: Sequence[torch.Tensor], sequence: SequenceLayout) -> torch.Tensor:
    """Every rank's rows [s_r, b, width] as the whole sequence [s, b, width]."""
    pieces = sorted(
        (
            (start, block[begin:end])
            for block, chunks in zip(blocks, sequence.chunks, strict=True)
            for (start, _), (begin, end) in zip(chunks, local_chunks(chunks), strict=True)
        ),
        key=lambda piece: piece[0],
    )
    flat = _as_one([piece.reshape(-1) for _, piece in pieces], blocks[0])
    return flat.view(sequence.sequence_length, *blocks[0].shape[1:])


def _as_one(pieces: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Flat `pieces` as one flat tensor, without a copy where they lie one after the other."""
    pieces = [piece for piece in pieces if piece.numel()]
    if not pieces:
        return like.new_empty(0)
    first, expected = pieces[0], pieces[0].storage_offset()
    for piece in pieces:
        same = piece.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or piece.storage_offset() != expected:
            return torch.cat(pieces)
        expected += piece.numel()
    return first.as_strided((expected - first.storage_offset(),), (1,))
