"""How an exchange goes over the wire: coalesced sends and receives, or one packed all-to-all.

Both move the lower bound of bytes: a rank receives only the tokens it lacks of the heads it
owns. Sends and receives of views leave nothing to unpack where the whole sequence arrives:
every piece lands in its place, in any token order. All tensors are [s, b, h, d] here, or all of
them [b, s, h, d] (`batch_first`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .memory import Cut
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
    """[s_r, b, h, d] -> [s, b, h_r, d]."""
    by_messages = _choose(transport, tensors, cuts, group, batch_first) == "p2p"
    gather = gather_by_messages if by_messages else gather_packed
    if torch.compiler.is_compiling():
        gathered: tuple[torch.Tensor, ...] = _uncompiled(gather, tensors, cuts, group, batch_first)
        return gathered
    return gather(tensors, cuts, group, batch_first)


def scatter_sequence(
    tensors: Sequence[torch.Tensor],
    cuts: Sequence[Cut],
    group: dist.ProcessGroup,
    batch_first: bool,
    transport: str,
) -> tuple[torch.Tensor, ...]:
    """[s, b, h_r, d] -> [s_r, b, h, d], a head held by several ranks summed over them."""
    by_messages = _choose(transport, tensors, cuts, group, batch_first) == "p2p"
    scatter = scatter_by_messages if by_messages else scatter_packed
    if torch.compiler.is_compiling():
        scattered: tuple[torch.Tensor, ...] = _uncompiled(
            scatter, tensors, cuts, group, batch_first
        )
        return scattered
    return scatter(tensors, cuts, group, batch_first)


# Messages are not for the compiler, which meets them in backward if that is compiled too. Called
# only by what is compiled: it costs as much as a small message.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _uncompiled(
    move: Callable[..., tuple[torch.Tensor, ...]], *arguments: Any
) -> tuple[torch.Tensor, ...]:
    return move(*arguments)


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
    copies = tensors[0].size(0) if batch_first else 1
    messages = sum(cut.most_chunks for cut in cuts) * copies
    return "p2p" if messages <= MAX_MESSAGES_PER_PEER else "all_to_all"
