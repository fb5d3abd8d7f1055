"""Cuts a batch into the tokens of one rank, every per-token tensor by one rule."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from .batch_checks import check_dim, check_holds, check_names, check_positions, nonnegative_dim
from .parallel_state.errors import ParallelConfigError
from .sequence_layout import SequenceLayout

# Attention sees whole sequences, so what describes whole sequences stays whole.
WHOLE = ("attention_mask", "attention_bias", "packed_seq_params")
WHOLE_PREFIXES = ("cu_seqlens", "max_seqlen")


def shard_batch(
    batch: Mapping[str, Any],
    layout: SequenceLayout,
    rank: int,
    *,
    dim: int = 1,
    dims: Mapping[str, int] | None = None,
    whole: Sequence[str] = (),
) -> dict[str, Any]:
    """This rank's tokens of every tensor of a batch: [b, s, ...] -> [b, s_r, ...].

    The one rule: a tensor is per-token, and is cut along its sequence dim, unless its name says
    that it is not. Labels must have been shifted globally before (`shift_labels`; Megatron's
    GPTDataset has done so).

    Stays as it is: None; what is no tensor, and tensors without dims; `attention_mask` (of any
    shape) and `attention_bias`, because attention sees whole sequences; `cu_seqlens*` and
    `max_seqlen*`, which are global by convention; what `whole` names (one number per sample, for
    instance); a tensor that has this rank's length already.

    Args:
        batch: names to tensors. [b, s, ...], or [t, ...] with `dim=0` for packed tokens.
        layout: the tokens of each rank of the Ulysses group (of the whole ring x Ulysses group
            with ring attention).
        rank: this rank in that group.
        dim: the sequence dim; a negative one counts from the end of each tensor.
        dims: sequence dim of single tensors that have it elsewhere, e.g. `{"embeddings": 0}`.
        whole: names of further tensors that are not per-token; a string is one name.

    Returns:
        A new dict, the same entries on every rank. `position_ids` [b, s_r] (or [t_r]) are made if
        the batch has none: positions in the document if it has `cu_seqlens` (or `cu_seqlens_q`;
        of both, the `_padded` one if there is one, which says where documents begin), which then
        holds for every sample; else in the sequence.

    Raises:
        ParallelConfigError: a per-token tensor's length is neither global nor local, named with
            all numbers; `rank` is outside the layout; `cu_seqlens` does not fit; `dims` or
            `whole` names what the batch does not have.
    """
    if not 0 <= rank < layout.group_size:
        raise ParallelConfigError(
            f"A batch cut for rank {rank} by a layout over {layout.group_size} ranks.",
            rule=f"the rank is its rank in the layout's group: 0 to {layout.group_size - 1}",
        )
    check_names("dims", dims or (), batch)
    check_names("whole", whole, batch)
    result: dict[str, Any] = {}
    model: torch.Tensor | None = None  # a tensor that tells the batch size and the device
    for name, value in batch.items():
        result[name] = value
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or stays_whole(name, whole):
            continue
        where = (dims or {}).get(name, dim)
        result[name] = _shard_one(name, value, layout, rank, where)
        usual = nonnegative_dim(value, where) == nonnegative_dim(value, dim)
        if usual and (model is None or name in ("tokens", "input_ids")):
            model = result[name]
    if model is not None and result.get("position_ids") is None:
        result["position_ids"] = _position_ids(batch, layout, rank, model, dim)
    return result


def document_boundaries(
    cu_seqlens: torch.Tensor | Sequence[int], sequence_length: int
) -> list[int]:
    """`cu_seqlens` as a list from 0 to the sequence length; what lies after its end is padding,
    and becomes a document of its own.

    Args:
        cu_seqlens: [documents + 1] or [1, documents + 1], not decreasing, from 0.

    Raises:
        ParallelConfigError: it does not start at 0, decreases, or ends behind the sequence; or it
            is no list of whole numbers (a generator is none, it could be read once only).
    """
    cu = given_boundaries(cu_seqlens, sequence_length)
    return cu if cu[-1] == sequence_length else [*cu, sequence_length]


def given_boundaries(cu_seqlens: torch.Tensor | Sequence[int], sequence_length: int) -> list[int]:
    """`cu_seqlens` as a list, by the rules of `document_boundaries`, without padding's own end."""
    check_whole_numbers(cu_seqlens)
    if isinstance(cu_seqlens, torch.Tensor):
        cu_seqlens = cu_seqlens.flatten().tolist()
    cu = [int(x) for x in cu_seqlens]
    if not cu or cu[0] != 0 or any(b < a for a, b in pairwise(cu)) or cu[-1] > sequence_length:
        shown = cu if len(cu) <= 12 else [*cu[:6], "...", *cu[-5:]]
        raise ParallelConfigError(
            f"cu_seqlens {shown} for a sequence of {sequence_length} tokens.",
            rule="cu_seqlens is global: it starts at 0, never decreases, and ends at the global "
            "sequence length or, if padding follows, before it",
        )
    return cu


def check_whole_numbers(cu_seqlens: Any) -> None:
    """Refuses boundaries that are not whole numbers in a row, without reading a tensor's values.

    Raises:
        ParallelConfigError: floats, several rows, a generator, no sequence at all, no values.
    """
    if isinstance(cu_seqlens, torch.Tensor):
        kind = f"a tensor of shape {list(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}"
        one_row = cu_seqlens.dim() == 1 or (cu_seqlens.dim() == 2 and cu_seqlens.size(0) == 1)
        fits = one_row and cu_seqlens.dtype in (torch.int32, torch.int64)
        if cu_seqlens.device.type == "meta":
            kind, fits = f"{kind} on the meta device, which holds no values", False
    else:
        kind = f"{cu_seqlens!r:.200}"
        try:  # a generator would be empty for the next reader
            fits = hasattr(cu_seqlens, "__getitem__") and len(cu_seqlens) >= 0
            fits = fits and all(operator.index(x) is not None for x in cu_seqlens)
        except TypeError:
            fits = False
    if not fits:
        raise ParallelConfigError(
            f"cu_seqlens is {kind}.",
            rule="document boundaries are whole numbers of tokens, [documents + 1] or "
            "[1, documents + 1], the same for every row of a batch",
            nearest="a list of ints, or a tensor of int32.",
        )


def cu_seqlens_from_position_ids(
    position_ids: torch.Tensor, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """Document boundaries of packed tokens whose positions restart in every document.

    A position that does not follow the one before it starts a document, so that documents of one
    token are found, and a document may start at any position. Call it on the whole sequence,
    before it is cut, and on the CPU where possible: the boundaries are read on the host.

    Args:
        position_ids: [s], or [b, s] with the same documents in every row.
        valid: [s] or [b, s], False or 0 for padding (a tokenizer's attention mask). Padding
            between documents is a document apart; padding at the end lies after the last one,
            where attention gives 0.

    Returns:
        [documents + 1], int32 on the CPU, for `shard_batch` and `UlyssesAttention`.

    Raises:
        ParallelConfigError: the rows hold different documents, the shapes differ, or there are no
            positions: another dtype than an integer one, no tokens, no values.
    """
    check_positions(position_ids)
    length = position_ids.size(-1)
    rows = position_ids.reshape(-1, length).long()  # unsigned, 255 would be followed by 0
    real = torch.ones_like(rows, dtype=torch.bool)
    if valid is not None:
        if valid.shape[-1:] != (length,) or valid.numel() not in (length, rows.numel()):
            raise ParallelConfigError(
                f"position_ids of shape {list(position_ids.shape)} with valid of shape "
                f"{list(valid.shape)}.",
                rule="both are over the whole sequence, [s] or [b, s]",
            )
        real = valid.reshape(-1, length).bool().expand_as(rows)
    starts = (rows.diff(dim=1) != 1) & (real[:, 1:] | real[:, :-1])
    starts |= real[:, 1:] != real[:, :-1]
    if not bool((starts == starts[:1]).all() & (real == real[:1]).all()):
        raise ParallelConfigError(
            f"position_ids of {len(rows)} rows with different documents.",
            rule="cu_seqlens holds for every row of a batch alike",
            nearest="the rows packed one after the other into one; or attention_mask=... "
            "[b, 1, s, s], True within a document.",
        )
    inner = (starts[:1].nonzero()[:, 1] + 1).tolist()
    end = [length] if length and bool(real[0, -1]) else []
    return torch.tensor([0, *inner, *end], dtype=torch.int32)


def shift_labels(
    tokens: torch.Tensor,
    *,
    dim: int = -1,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    ignore_index: float = -100,
) -> torch.Tensor:
    """Next-token labels of the *whole* sequence, before it is cut: label i is token i + 1.

    The last token of the sequence, and of each document, predicts nothing; nor does what lies
    after the last document, which is padding.

    Shift once: not after Megatron's GPTDataset, not before a Hugging Face model's own loss. A
    mask or weight per *predicted* token is shifted by the same call with `ignore_index=0`; for a
    Megatron `loss_mask` made from labels, write `labels != -100`.

    Args:
        tokens: [.., s, ..], token ids, or labels not yet shifted (ignored ones stay ignored).
        dim: the sequence dim.
        cu_seqlens: global document boundaries, for every sample alike.
        ignore_index: written at document ends and in padding.

    Returns:
        A new tensor like `tokens`.

    Raises:
        ParallelConfigError: `cu_seqlens` does not fit the sequence, as when it was cut already;
            the dtype of `tokens` does not hold `ignore_index`; `tokens` lacks the dim.
    """
    check_dim("shift_labels", tokens, dim)
    what = f"shift_labels of {tokens.dtype} with ignore_index={ignore_index}."
    check_holds(what, tokens.dtype, ignore_index, "ignore_index=0, if it is a mask")
    length = tokens.size(dim)
    cu = [0, length] if cu_seqlens is None else given_boundaries(cu_seqlens, length)
    ignored = torch.zeros(length, dtype=torch.bool)
    ignored[[end - 1 for end in cu if end > 0]] = True
    ignored[cu[-1] :] = True
    shape = [1] * tokens.dim()
    shape[dim] = length
    return torch.where(  # index_fill_ does not know every dtype
        ignored.view(shape).to(tokens.device),
        tokens.new_full((), ignore_index),
        tokens.roll(-1, dim),
    )


def stays_whole(name: str, whole: Sequence[str]) -> bool:
    """Whether a batch entry of this name is not per-token."""
    names = (whole,) if isinstance(whole, str) else whole  # else "loss" would be in "loss_mask"
    return name in WHOLE or name in names or name.startswith(WHOLE_PREFIXES)


def _shard_one(
    name: str, tensor: torch.Tensor, layout: SequenceLayout, rank: int, dim: int
) -> torch.Tensor:
    size = None if nonnegative_dim(tensor, dim) is None else tensor.size(dim)
    if size == layout.sequence_length:
        return layout.shard(tensor, dim, rank).contiguous()  # so that `.view(-1)` works
    if size == layout.lengths[rank]:
        return tensor
    what = "has no such dim" if size is None else f"has {size} tokens there"
    raise ParallelConfigError(
        f"Batch entry {name!r} of shape {list(tensor.shape)}, cut along dim {dim} for rank "
        f"{rank} of {layout.group_size}.",
        f"It {what}; the sequence has {layout.sequence_length}, this rank {layout.lengths[rank]}.",
        "every per-token tensor holds either the whole sequence or this rank's tokens along its "
        "sequence dim",
        f"dims={{{name!r}: ...}} if its sequence dim is another; whole=({name!r},) if it is not "
        "per-token.",
    )


def _position_ids(
    batch: Mapping[str, Any], layout: SequenceLayout, rank: int, model: torch.Tensor, dim: int
) -> torch.Tensor:
    """[b, s_r] where the sequence is dim 1, [s_r] where it is dim 0: of the whole, then cut."""
    names = ("cu_seqlens_padded", "cu_seqlens_q_padded", "cu_seqlens", "cu_seqlens_q")
    cu = next((batch[name] for name in names if batch.get(name) is not None), None)
    boundaries = None if cu is None else document_boundaries(cu, layout.sequence_length)
    positions = torch.tensor(
        layout.positions(rank, boundaries), dtype=torch.long, device=model.device
    )
    return positions if nonnegative_dim(model, dim) == 0 else positions.expand(model.size(0), -1)
