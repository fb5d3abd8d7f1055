"""One coalesced batch of sends and receives of views: nothing to unpack on arrival."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from ..sequence_layout import Chunk
from .memory import (
    Cut,
    Piece,
    Scratch,
    empty,
    even_runs,
    in_memory_order,
    local_chunks,
    narrow_heads,
    run_heads,
)


def gather_by_messages(
    tensors: Sequence[torch.Tensor],
    cuts: Sequence[Cut],
    group: dist.ProcessGroup,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    rank = group.rank()
    messages = _Messages(group)
    scratch = _scratch(tensors, cuts, rank)
    results = []
    for tensor, cut in zip(tensors, cuts, strict=True):
        layout = cut.sequence
        local = local_chunks(layout.chunks[rank])
        tokens, batch, _, dim = tensor.shape
        for run in even_runs(cut.heads, rank):
            shape = (tokens, batch, len(cut.heads[run[0]]), dim)
            buffer = scratch.blocks(len(run), shape, batch_first)  # [ranks, s_r, b, h_peer, d]
            buffer.copy_(run_heads(tensor, cut.heads, run).permute(2, 0, 1, 3, 4))
            for block, peer in zip(buffer, run, strict=True):
                messages.send(peer, _blocks(block, local, batch_first))
        shape = (layout.sequence_length, batch, len(cut.heads[rank]), dim)
        result = empty(shape, tensor, batch_first)
        results.append(result)
        for peer in messages.peers if cut.heads[rank] else ():
            messages.receive(peer, _blocks(result, layout.chunks[peer], batch_first))
    messages.start()
    for tensor, cut, result in zip(tensors, cuts, results, strict=True):  # while they travel
        chunks = cut.sequence.chunks[rank]
        own = narrow_heads(tensor, cut.heads[rank])
        for (start, stop), (begin, end) in zip(chunks, local_chunks(chunks), strict=True):
            result[start:stop].copy_(own[begin:end])
    messages.wait()
    return tuple(results)


def scatter_by_messages(
    tensors: Sequence[torch.Tensor],
    cuts: Sequence[Cut],
    group: dist.ProcessGroup,
    batch_first: bool,
) -> list[list[Piece]]:
    """For each tensor, what arrived of this rank's tokens, by source rank."""
    rank = group.rank()
    messages = _Messages(group)
    scratch = _scratch(tensors, cuts, rank)
    arrived = []
    for tensor, cut in zip(tensors, cuts, strict=True):
        layout = cut.sequence
        local = local_chunks(layout.chunks[rank])
        tensor = in_memory_order(tensor, batch_first)
        pieces = [
            Piece([rank], begin, tensor[start:stop].unsqueeze(2))
            for (start, stop), (begin, _) in zip(layout.chunks[rank], local, strict=True)
            if cut.heads[rank]
        ]
        for peer in messages.peers if cut.heads[rank] else ():
            messages.send(peer, _blocks(tensor, layout.chunks[peer], batch_first))
        for run in even_runs(cut.heads, rank):
            heads = len(cut.heads[run[0]])
            shape = (layout.lengths[rank], tensor.size(1), heads, tensor.size(3))
            buffer = scratch.blocks(len(run), shape, batch_first)  # [ranks, s_r, b, h_peer, d]
            for block, peer in zip(buffer, run, strict=True):
                messages.receive(peer, _blocks(block, local, batch_first))
            pieces.append(Piece(run, 0, buffer.permute(1, 2, 0, 3, 4)))
        arrived.append(sorted(pieces, key=lambda piece: piece.ranks[0]))
    messages.start()
    messages.wait()
    return arrived


def _scratch(tensors: Sequence[torch.Tensor], cuts: Sequence[Cut], rank: int) -> Scratch:
    """Room for this rank's tokens of all heads that other ranks hold."""
    elements = 0
    for tensor, cut in zip(tensors, cuts, strict=True):
        heads = sum(map(len, cut.heads)) - len(cut.heads[rank])
        elements += cut.sequence.lengths[rank] * tensor.size(1) * heads * tensor.size(3)
    return Scratch(tensors[0], elements)


class _Messages:
    """One grouped exchange, collected and then sent as a single coalesced batch."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        rank, size = group.rank(), group.size()
        # Each rank begins with its neighbour, so that no rank is everybody's first.
        self.peers = [(rank + step) % size for step in range(1, size)]
        self._operations: dict[int, list[dist.P2POp]] = {peer: [] for peer in self.peers}
        self._works: list[dist.Work] = []

    def send(self, peer: int, blocks: Iterator[torch.Tensor]) -> None:
        self._add(dist.isend, peer, blocks)

    def receive(self, peer: int, blocks: Iterator[torch.Tensor]) -> None:
        self._add(dist.irecv, peer, blocks)

    def _add(self, verb: Callable[..., object], peer: int, blocks: Iterator[torch.Tensor]) -> None:
        global_rank = dist.get_global_rank(self.group, peer)
        self._operations[peer] += [
            dist.P2POp(verb, block, global_rank, self.group) for block in blocks if block.numel()
        ]

    def start(self) -> None:
        operations = [operation for peer in self.peers for operation in self._operations[peer]]
        if operations:  # a rank without tokens and without heads has nothing to say
            self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _blocks(
    tensor: torch.Tensor, chunks: Sequence[Chunk], batch_first: bool
) -> Iterator[torch.Tensor]:
    """The contiguous pieces of memory that hold `chunks`, in an order both ends agree on."""
    for start, stop in chunks:
        block = tensor[start:stop]
        if batch_first:
            yield from block.unbind(1)
        else:
            yield block
