"""How an exchange goes over the wire: coalesced sends and receives, or one packed all-to-all.

Both move the lower bound of bytes: a rank receives only the tokens it lacks of the heads it
owns. Sends and receives of views leave nothing to unpack where the whole sequence arrives:
every piece lands in its place, in any token order. All tensors are [s, b, h, d] here, whatever
their memory order; `batch_first` says that they lie in memory as [b, s, h, d].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from .memory import Cut, Piece, empty, is_replicated, run_heads
from .messages import gather_by_messages, scatter_by_messages
from .packed import gather_packed, scatter_packed

# Above this many messages to one peer, packing is cheaper than the messages' own cost.
MAX_MESSAGES_PER_PEER = 64


def gather_sequence(
    tensors: Sequence[torch.Tensor],
    cuts: Sequence[Cut],
    group: dist.ProcessGroup,
    batch_first: bool,
    transport: str,
) -> tuple[torch.Tensor, ...]:
    """[s_r, b, h, d] -> [s, b, h_r, d], in `batch_first` memory order or not."""
    if _choose(transport, tensors, cuts, group, batch_first) == "p2p":
        return gather_by_messages(tensors, cuts, group, batch_first)
    return gather_packed(tensors, cuts, group)


def scatter_sequence(
    tensors: Sequence[torch.Tensor],
    cuts: Sequence[Cut],
    group: dist.ProcessGroup,
    batch_first: bool,
    out_batch_first: bool,
    transport: str,
) -> tuple[torch.Tensor, ...]:
    """[s, b, h_r, d] -> [s_r, b, h, d], a head held by several ranks summed over them."""
    pieces: Iterable[list[Piece]]
    if _choose(transport, tensors, cuts, group, batch_first) == "p2p":
        pieces = scatter_by_messages(tensors, cuts, group, batch_first)
    else:
        pieces = scatter_packed(tensors, cuts, group)
    return tuple(  # a strict zip goes on to the end of `pieces`, where what was sent has left
        _join_heads(tensor_pieces, cut, tensor, group.rank(), out_batch_first)
        for tensor_pieces, cut, tensor in zip(pieces, cuts, tensors, strict=True)
    )


def _choose(
    transport: str,
    tensors: Sequence[torch.Tensor],
    cuts: Sequence[Cut],
    group: dist.ProcessGroup,
    batch_first: bool,
) -> str:
    """The transport, decided by what all ranks know alike."""
    if transport != "auto":
        return transport
    if tensors[0].is_cuda and dist.get_backend(group) == "gloo":
        return "all_to_all"  # gloo sends and receives CPU tensors only
    copies = tensors[0].size(1) if batch_first else 1
    messages = sum(max(map(len, cut.sequence.chunks)) for cut in cuts) * copies
    return "p2p" if messages <= MAX_MESSAGES_PER_PEER else "all_to_all"


def _join_heads(
    pieces: list[Piece], cut: Cut, like: torch.Tensor, rank: int, batch_first: bool
) -> torch.Tensor:
    """The pieces of this rank's tokens as [s_r, b, h, d], replicas summed.

    Sources are added in rank order, so that the sum does not depend on who computes it, and in
    float32 at least: a key/value head of many replicas would lose bits in bfloat16.
    """
    shape = (cut.sequence.lengths[rank], like.size(1), cut.num_heads, like.size(3))
    has_replicas = is_replicated(cut.heads)
    dtype = torch.promote_types(like.dtype, torch.float32) if has_replicas else None
    result = empty(shape, like, batch_first, dtype)
    for piece in pieces:
        piece.wait()
        rows = result.narrow(0, piece.start, piece.block.size(0))
        heads = cut.heads[piece.ranks[0]]
        again = 0  # heads that a replica wrote
        if has_replicas:
            before = max((run.stop for run in cut.heads[: piece.ranks[0]]), default=0)
            again = max(min(before, heads.stop) - heads.start, 0)
        if again:  # such a piece is of one rank
            block = piece.block.squeeze(2)
            rows[:, :, heads.start : heads.start + again] += block[:, :, :again]
            rows[:, :, heads.start + again : heads.stop].copy_(block[:, :, again:])
        else:
            run_heads(rows, cut.heads, piece.ranks).copy_(piece.block)
    return result.to(like.dtype)
