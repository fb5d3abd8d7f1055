"""How an exchange goes over the wire: coalesced sends and receives, or one packed all-to-all.

Both move the lower bound of bytes: a rank receives only the tokens it lacks of the heads it
owns. Sends and receives of views leave nothing to unpack where the whole sequence arrives:
every piece lands in its place, in any token order. All tensors are [s, b, h, d] here, or all of
them [b, s, h, d] (`batch_first`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .memory import Cut
from .messages import gather_by_messages, scatter_by_messages
from .packed import gather_packed, scatter_packed

# Above this many messages to one peer, packing is cheaper than the messages' own cost.
MAX_MESSAGES_PER_PEER = 64


# Messages are not for the compiler, which meets them in backward if that is compiled too.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def gather_sequence(
    tensors: Sequence[torch.Tensor],
    cuts: Sequence[Cut],
    group: dist.ProcessGroup,
    batch_first: bool,
    transport: str,
) -> tuple[torch.Tensor, ...]:
    """[s_r, b, h, d] -> [s, b, h_r, d]."""
    if _choose(transport, tensors, cuts, group, batch_first) == "p2p":
        return gather_by_messages(tensors, cuts, group, batch_first)
    return gather_packed(tensors, cuts, group, batch_first)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def scatter_sequence(
    tensors: Sequence[torch.Tensor],
    cuts: Sequence[Cut],
    group: dist.ProcessGroup,
    batch_first: bool,
    transport: str,
) -> tuple[torch.Tensor, ...]:
    """[s, b, h_r, d] -> [s_r, b, h, d], a head held by several ranks summed over them."""
    if _choose(transport, tensors, cuts, group, batch_first) == "p2p":
        return scatter_by_messages(tensors, cuts, group, batch_first)
    return scatter_packed(tensors, cuts, group, batch_first)


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
