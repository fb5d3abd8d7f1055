"""Pads the documents of a packed batch, for layouts that cut every document evenly."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch

from .batch import document_boundaries, stays_whole
from .parallel_state.errors import ParallelConfigError

PADDING = {"labels": -100}


def pad_documents(
    batch: Mapping[str, Any],
    multiple: int,
    *,
    dim: int = 1,
    values: Mapping[str, float] | None = None,
    whole: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Each document at the next multiple of tokens, before the batch is cut.

    Inside Megatron a document's length is a multiple of 2 x ulysses_parallel_size (with its
    `sequence_parallel`: of ulysses_parallel_size x lcm(2, tensor_model_parallel_size)).

    Args:
        batch: per-token tensors [b, t, ...] and `cu_seqlens`, the boundaries of all samples;
            labels shifted already (`shift_labels`). Other entries as in `shard_batch`.
        multiple: of the padded lengths.
        dim: the sequence dim.
        values: what is filled in, by name; else -100 for `labels` and 0, so that a `loss_mask`
            leaves padding out.
        whole: names of further tensors that are not per-token.

    Returns:
        A new dict with `cu_seqlens_padded` beside `cu_seqlens`, both int32. Without
        `position_ids`, which `shard_batch` makes.

    Raises:
        ParallelConfigError: a tensor that is not as long as the documents.
    """
    cu = document_boundaries(batch["cu_seqlens"], _length(batch, dim, whole))
    lengths = [b - a for a, b in pairwise(cu)]
    extras = [-n % multiple for n in lengths]
    padded = [0, *accumulate(n + extra for n, extra in zip(lengths, extras, strict=True))]
    fill = {**PADDING, **(values or {})}
    result = {name: value for name, value in batch.items() if name != "position_ids"}
    for name, tensor in result.items():
        if not _per_token(name, tensor, whole):
            continue
        if tensor.size(dim) != cu[-1]:
            raise ParallelConfigError(
                f"Batch entry {name!r} of shape {list(tensor.shape)} with {cu[-1]} tokens of "
                "documents.",
                rule=f"every per-token tensor holds all documents along dim {dim}",
                nearest=f"whole=({name!r},) if it is not per-token.",
            )
        pieces = []
        for piece, extra in zip(tensor.split(lengths, dim), extras, strict=True):
            shape = [*piece.shape]
            shape[dim] = extra
            pieces += [piece, piece.new_full(shape, fill.get(name, 0))]
        result[name] = torch.cat(pieces, dim)
    device = getattr(batch["cu_seqlens"], "device", None)
    result["cu_seqlens"] = torch.tensor(cu, dtype=torch.int32, device=device)
    result["cu_seqlens_padded"] = torch.tensor(padded, dtype=torch.int32, device=device)
    return result


def _per_token(name: str, value: Any, whole: tuple[str, ...]) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and not stays_whole(name, whole)


def _length(batch: Mapping[str, Any], dim: int, whole: tuple[str, ...]) -> int:
    for name, value in batch.items():
        if _per_token(name, value, whole):
            return int(value.size(dim))
    raise ParallelConfigError(
        f"A batch of {', '.join(batch)} without tokens.", rule="some tensor holds the documents"
    )
