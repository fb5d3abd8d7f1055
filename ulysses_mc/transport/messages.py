"""One coalesced batch of sends and receives of views: nothing to unpack on arrival."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from ..sequence_layout import Chunk
from .memory import Cut, Scratch, empty, in_memory_order, local_chunks, narrow_heads


def gather_by_messages(
    tensors: Sequence[torch.Tensor],
    cuts: Sequence[Cut],
    group: dist.ProcessGroup,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    rank = group.rank()
    messages = _Messages(group)
    scratch = Scratch(
        tensors[0], sum(_sent(t, cut, rank) for t, cut in zip(tensors, cuts, strict=True))
    )
    results = []
    for tensor, cut in zip(tensors, cuts, strict=True):
        layout = cut.sequence
        local = local_chunks(layout.chunks[rank])
        shape = (layout.sequence_length, tensor.size(1), len(cut.heads[rank]), tensor.size(3))
        result = empty(shape, tensor, batch_first)
        results.append(result)
        for peer in messages.peers:
            if len(cut.heads[peer]):
                packed = narrow_heads(tensor, cut.heads[peer])  # [s_r, b, h_peer, d]
                buffer = scratch.empty(packed.shape, batch_first).copy_(packed)
                messages.send(peer, _blocks(buffer, local, batch_first))
            if len(cut.heads[rank]):
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
) -> list[list[list[torch.Tensor]]]:
    """For each tensor and source rank, the pieces [chunk, b, h_source, d] of this rank's tokens."""
    rank = group.rank()
    messages = _Messages(group)
    scratch = Scratch(
        tensors[0], sum(_sent(t, cut, rank) for t, cut in zip(tensors, cuts, strict=True))
    )
    received = []
    for tensor, cut in zip(tensors, cuts, strict=True):
        layout = cut.sequence
        local = local_chunks(layout.chunks[rank])
        tensor = in_memory_order(tensor, batch_first)
        pieces: list[list[torch.Tensor]] = [[] for _ in cut.heads]
        pieces[rank] = [tensor[start:stop] for start, stop in layout.chunks[rank]]
        for peer in messages.peers:
            if len(cut.heads[rank]):
                messages.send(peer, _blocks(tensor, layout.chunks[peer], batch_first))
            if len(cut.heads[peer]):
                shape = (layout.lengths[rank], tensor.size(1), len(cut.heads[peer]), tensor.size(3))
                buffer = scratch.empty(shape, batch_first)
                messages.receive(peer, _blocks(buffer, local, batch_first))
                pieces[peer] = [buffer]
        received.append(pieces)
    messages.start()
    messages.wait()
    return received


def _sent(tensor: torch.Tensor, cut: Cut, rank: int) -> int:
    """Elements of this rank's tokens that other ranks hold by heads."""
    heads = sum(len(run) for peer, run in enumerate(cut.heads) if peer != rank)
    return cut.sequence.lengths[rank] * tensor.size(1) * heads * tensor.size(3)


class _Messages:
    """One grouped exchange, collected and then sent as a single coalesced batch."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        rank, size = group.rank(), group.size()
        self.peers = [(rank + step) % size for step in range(1, size)]
        self._operations: list[dist.P2POp] = []
        self._works: list[dist.Work] = []

    def send(self, peer: int, blocks: Iterator[torch.Tensor]) -> None:
        self._add(dist.isend, peer, blocks)

    def receive(self, peer: int, blocks: Iterator[torch.Tensor]) -> None:
        self._add(dist.irecv, peer, blocks)

    def _add(self, verb: Callable[..., object], peer: int, blocks: Iterator[torch.Tensor]) -> None:
        global_rank = dist.get_global_rank(self.group, peer)
        self._operations += [
            dist.P2POp(verb, block, global_rank, self.group) for block in blocks if block.numel()
        ]

    def start(self) -> None:
        if self._operations:  # a rank without tokens and without heads has nothing to say
            self._works = dist.batch_isend_irecv(self._operations)

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
