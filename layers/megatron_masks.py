"""Megatron's masks and biases, made whole for the attention inside."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..parallel_state.errors import ParallelConfigError
from ..sequence_layout import SequenceLayout
from .option_checks import check_whole_sequence


def check_masks(
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    shape: tuple[int, int, int, int],
    layout: SequenceLayout,
    rank: int,
    device: torch.device,
) -> None:
    """Refuses a mask or bias that is not over the whole sequence; of a mask the rows may be cut.

    Args:
        shape: the whole [b, h, s, s_kv].
        layout: of the queries.

    Raises:
        ParallelConfigError: on every rank alike.
    """
    batch, heads, length, s_kv = shape
    own = layout.lengths[rank]
    for name, tensor in (("attention_mask", mask), ("attention_bias", bias)):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
            continue
        rows, columns = tensor.shape[-2:]
        if rows not in (1, length) and not (tensor is mask and _is_cut(tensor, layout, rank)):
            raise _wrong_shape(name, tensor, layout, rank)
        if columns == own != s_kv and rows == 1:
            raise ParallelConfigError(
                f"An {name} of shape {list(tensor.shape)} on rank {rank} of {layout.group_size}.",
                f"Its last dim is this rank's {own} tokens, not all {s_kv}.",
                "a mask says of every key of the whole sequence whether it may be seen",
                "the mask over the whole sequence, not cut along its last dim.",
            )
    rows = own if _is_cut(mask, layout, rank) else length
    check_whole_sequence((batch, heads, rows, s_kv), {"attention_mask": mask}, device)
    check_whole_sequence(shape, {"attention_bias": bias}, device)


def _is_cut(mask: torch.Tensor | None, layout: SequenceLayout, rank: int) -> bool:
    """Whether a mask's rows are those of this rank's tokens, on every rank alike."""
    equal = layout.group_size > 1 and len(set(layout.lengths)) == 1
    if not equal or not isinstance(mask, torch.Tensor) or mask.dim() < 2:
        return False
    return mask.size(-2) == layout.lengths[rank] != 1


def whole_mask(
    mask: torch.Tensor | None,
    layout: SequenceLayout,
    heads: range,
    num_heads: int,
    group: dist.ProcessGroup,
) -> torch.Tensor | None:
    """Every query's row, this rank's heads: [b, h or 1, s_r or s or 1, s] -> [b, h_r or 1, .., s].

    Megatron cuts the rows with the tokens; those are gathered (bytes: the mask itself).
    """
    if mask is None:
        return None
    if _is_cut(mask, layout, group.rank()):
        rows = mask.to(torch.uint8).contiguous()
        shards = [torch.empty_like(rows) for _ in range(group.size())]
        dist.all_gather(shards, rows, group=group)
        mask = layout.unshard(shards, -2).bool()
    return own_heads(mask, heads, num_heads)


def own_heads(tensor: torch.Tensor | None, heads: range, num_heads: int) -> torch.Tensor | None:
    """[b, h or 1, ...] -> [b, h_r or 1, ...]."""
    if tensor is None or tensor.dim() < 3 or tensor.size(-3) != num_heads or num_heads == 1:
        return tensor
    return tensor.narrow(-3, heads.start, len(heads))


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
