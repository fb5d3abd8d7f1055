"""Megatron's masks and biases, made whole for the attention inside."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..parallel_state.errors import ParallelConfigError
from ..sequence_layout import SequenceLayout


def whole_mask(
    mask: torch.Tensor | None,
    layout: SequenceLayout,
    query_heads: tuple[range, ...],
    group: dist.ProcessGroup,
) -> torch.Tensor | None:
    """Every query's row, this rank's heads: [b, h or 1, s_r or s or 1, s] -> [b, h_r or 1, .., s].

    Megatron cuts the rows with the tokens; those are gathered (bytes: the mask itself).

    Raises:
        ParallelConfigError: a mask whose rows or columns are neither.
    """
    if mask is None:
        return None
    rank, length = group.rank(), layout.sequence_length
    if mask.size(-2) not in (1, length) and mask.size(-2) != layout.lengths[rank]:
        raise _wrong_shape("attention_mask", mask, layout, rank)
    if mask.size(-1) == layout.lengths[rank] and mask.size(-2) == 1 and group.size() > 1:
        raise ParallelConfigError(
            f"An attention_mask of shape {list(mask.shape)} on rank {rank} of {group.size()}.",
            f"Its last dim is this rank's {layout.lengths[rank]} tokens, not all {length}.",
            "a mask says of every key of the whole sequence whether it may be seen",
            "the mask over the whole sequence, not cut along its last dim.",
        )
    if mask.size(-2) == layout.lengths[rank] and group.size() > 1 and mask.size(-2) != 1:
        rows = mask.to(torch.uint8).contiguous()
        shards = [torch.empty_like(rows) for _ in range(group.size())]
        dist.all_gather(shards, rows, group=group)
        mask = layout.unshard(shards, -2).bool()
    return _cut_heads(mask, query_heads[rank], sum(map(len, query_heads)))


def whole_bias(
    bias: torch.Tensor | None, layout: SequenceLayout, query_heads: tuple[range, ...], rank: int
) -> torch.Tensor | None:
    """This rank's heads of a bias over the whole sequence: [b, h or 1, s, s] -> [b, h_r or 1, ..].

    Raises:
        ParallelConfigError: its rows are not those of the whole sequence.
    """
    if bias is None:
        return None
    if bias.size(-2) not in (1, layout.sequence_length):
        raise _wrong_shape("attention_bias", bias, layout, rank)
    return _cut_heads(bias, query_heads[rank], sum(map(len, query_heads)))


def _cut_heads(tensor: torch.Tensor, heads: range, num_heads: int) -> torch.Tensor:
    if tensor.dim() < 4 or tensor.size(1) != num_heads or num_heads == 1:
        return tensor
    return tensor[:, heads.start : heads.stop]


def _wrong_shape(
    name: str, tensor: torch.Tensor, layout: SequenceLayout, rank: int
) -> ParallelConfigError:
    length = layout.sequence_length
    return ParallelConfigError(
        f"An {name} of shape {list(tensor.shape)} on rank {rank} of {layout.group_size}.",
        f"The sequence has {length} tokens, {layout.lengths[rank]} of them on this rank.",
        f"an {name} has a row for each query of the whole sequence",
        f"shape [b or 1, h or 1, {length}, {length}]; for plain causal attention none at all "
        "(create_attention_mask=False in the dataset's config).",
    )
