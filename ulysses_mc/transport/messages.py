"""Sends and receives of views, all under way together: nothing to unpack where they gather.

A backend that joins messages into one kernel (NCCL) gets them as one coalesced batch. Any other
(gloo) works on a message from the moment it has it: each is sent while what was packed for it is
still in the processor's cache, and used when it has arrived, not when all have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

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
    is_replicated,
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
    messages = _Messages(group)
    rank = messages.rank
    results = []
    for tensor, cut in zip(tensors, cuts, strict=True):
        shape = (cut.sequence.sequence_length, tensor.size(1), len(cut.heads[rank]), tensor.size(3))
        result = empty(shape, tensor, batch_first)
        results.append(result)
        for peer in messages.peers if cut.heads[rank] else ():
            messages.receive(peer, _blocks(result, cut.sequence.chunks[peer], batch_first))
    scratch = _scratch(tensors, cuts, rank)
    for tensor, cut in zip(tensors, cuts, strict=True):
        local = local_chunks(cut.sequence.chunks[rank])
        tokens, batch, _, dim = tensor.shape
        for run in messages.runs(cut):
            shape = (tokens, batch, len(cut.heads[run[0]]), dim)
            buffer = scratch.blocks(len(run), shape, batch_first)  # [ranks, s_r, b, h_peer, d]
            buffer.copy_(run_heads(tensor, cut.heads, run).permute(2, 0, 1, 3, 4))
            for block, peer in zip(buffer.unbind(0), run, strict=True):
                messages.send(peer, _blocks(block, local, batch_first))
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
) -> Iterator[list[Piece]]:
    """For each tensor, the pieces of this rank's tokens, those of lower ranks first where heads
    are replicated. They may be on their way still; to be used up to the end."""
    messages = _Messages(group)
    rank = messages.rank
    scratch = _scratch(tensors, cuts, rank)
    arriving = []
    for tensor, cut in zip(tensors, cuts, strict=True):
        layout = cut.sequence
        local = local_chunks(layout.chunks[rank])
        tensor = in_memory_order(tensor, batch_first)
        pieces = [
            Piece([rank], begin, tensor[start:stop].unsqueeze(2))
            for (start, stop), (begin, _) in zip(layout.chunks[rank], local, strict=True)
            if cut.heads[rank]
        ]
        for run in messages.runs(cut):
            heads = len(cut.heads[run[0]])
            shape = (layout.lengths[rank], tensor.size(1), heads, tensor.size(3))
            buffer = scratch.blocks(len(run), shape, batch_first)  # [ranks, s_r, b, h_peer, d]
            for block, peer in zip(buffer.unbind(0), run, strict=True):
                wait = messages.receive(peer, _blocks(block, local, batch_first))
            pieces.append(Piece(run, 0, buffer.permute(1, 2, 0, 3, 4), wait))
        if is_replicated(cut.heads):
            pieces.sort(key=lambda piece: piece.ranks[0])
        arriving.append(pieces)
        for peer in messages.peers if cut.heads[rank] else ():
            messages.send(peer, _blocks(tensor, layout.chunks[peer], batch_first))
    messages.start()
    yield from arriving
    messages.wait()


def _scratch(tensors: Sequence[torch.Tensor], cuts: Sequence[Cut], rank: int) -> Scratch:
    """Room for this rank's tokens of all heads that other ranks hold."""
    elements = 0
    for tensor, cut in zip(tensors, cuts, strict=True):
        heads = sum(map(len, cut.heads)) - len(cut.heads[rank])
        elements += cut.sequence.lengths[rank] * tensor.size(1) * heads * tensor.size(3)
    return Scratch(tensors[0], elements)


class _Messages:
    """The messages of one exchange. A receive comes before the sends of its tensor."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank = group, group.rank()
        size = group.size()
        # Each rank begins with its neighbour, so that no rank is everybody's first.
        self.peers = [(self.rank + step) % size for step in range(1, size)]
        self._coalesce = dist.get_backend(group) != "gloo"
        self._batch: list[dist.P2POp] = []
        self._under_way: list[dist.Work] = []

    def runs(self, cut: Cut) -> list[list[int]]:
        """The peers that hold heads, those together that one copy serves: all that follow on
        where the messages wait for each other anyway, else every one by itself."""
        if self._coalesce:
            return even_runs(cut.heads, self.rank)
        return [[peer] for peer in self.peers if cut.heads[peer]]

    def send(self, peer: int, blocks: Iterator[torch.Tensor]) -> None:
        self._post(dist.isend, peer, blocks, "group_dst")

    def receive(self, peer: int, blocks: Iterator[torch.Tensor]) -> Callable[[], None]:
        """Returns what waits until the blocks can be used."""
        return partial(self.wait, self._post(dist.irecv, peer, blocks, "group_src"))

    def _post(
        self, verb: Callable[..., Any], peer: int, blocks: Iterator[torch.Tensor], end: str
    ) -> list[dist.Work] | None:
        blocks = (block for block in blocks if block.numel())
        if self._coalesce:
            self._batch += [
                dist.P2POp(verb, block, group=self.group, group_peer=peer) for block in blocks
            ]
            return None
        works = [verb(block, group=self.group, **{end: peer}) for block in blocks]
        self._under_way += works
        return works

    def start(self) -> None:
        if self._batch:  # a rank without tokens and without heads has nothing to say
            self._under_way = dist.batch_isend_irecv(self._batch)

    def wait(self, works: list[dist.Work] | None = None) -> None:
        """For `works`, or all that nobody has waited for: gloo lets no one wait twice."""
        for work in list(self._under_way) if works is None else works:
            self._under_way.remove(work)
            work.wait()


def _blocks(
    tensor: torch.Tensor, chunks: Sequence[Chunk], batch_first: bool
) -> Iterator[torch.Tensor]:
    """The contiguous pieces of memory that hold `chunks`, in an order both ends agree on."""
    for start, stop in chunks:
        block = tensor if stop - start == tensor.size(0) else tensor[start:stop]
        if batch_first and block.size(1) > 1:
            yield from block.unbind(1)
        else:
            yield block
