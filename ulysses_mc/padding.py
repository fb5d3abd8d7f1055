"""Pads the documents of a packed batch, for layouts that cut every document evenly."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch

from .batch import document_boundaries, given_boundaries, stays_whole
from .batch_checks import check_count, check_holds, check_names, nonnegative_dim
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

    What lies after the last boundary is padding: it becomes a document of its own, whose values
    are those that are filled in.

    Args:
        batch: per-token tensors [b, t, ...] and `cu_seqlens`, the boundaries of all samples;
            labels shifted already (`shift_labels`). Other entries as in `shard_batch`.
        multiple: of the padded lengths.
        dim: the sequence dim; a negative one counts from the end of each tensor.
        values: what is filled in, by name; else -100 for `labels` and 0, so that a `loss_mask`
            leaves padding out.
        whole: names of further tensors that are not per-token.

    Returns:
        A new dict with `cu_seqlens_padded` beside `cu_seqlens`, both int32. Without
        `position_ids`, which `shard_batch` makes.

    Raises:
        ParallelConfigError: a tensor that is not as long as the documents, or whose dtype does not
            hold what is filled in; no `cu_seqlens`, or padded documents; a multiple below 1;
            `values` or `whole` of entries that the batch does not have.
    """
    check_count("multiple", multiple, "tokens")
    check_names("values", values or (), batch)
    check_names("whole", whole, batch)
    _check_documents(batch)
    length = _length(batch, dim, whole)
    given = given_boundaries(batch["cu_seqlens"], length)
    cu = document_boundaries(given, length)
    lengths = [b - a for a, b in pairwise(cu)]
    extras = [-n % multiple for n in lengths]
    padded = [0, *accumulate(n + extra for n, extra in zip(lengths, extras, strict=True))]
    fill = {**PADDING, **(values or {})}
    result = {name: value for name, value in batch.items() if name != "position_ids"}
    for name, tensor in result.items():
        if not _per_token(name, tensor, whole):
            continue
        if _tokens(name, tensor, dim) != cu[-1]:
            raise _length_error(name, tensor, f"with {cu[-1]} tokens of documents", dim)
        value = fill.get(name, 0)
        what = f"Batch entry {name!r} of {tensor.dtype}, padded with {value}."
        check_holds(what, tensor.dtype, value, f"values={{{name!r}: ...}} with one of these")
        pieces = []
        for start, piece, extra in zip(cu, tensor.split(lengths, dim), extras, strict=False):
            shape = [*piece.shape]
            shape[dim] = extra
            own = piece if start < given[-1] else torch.full_like(piece, value)
            pieces += [own, piece.new_full(shape, value)]
        result[name] = torch.cat(pieces, dim)
    device = getattr(batch["cu_seqlens"], "device", None)
    result["cu_seqlens"] = torch.tensor(cu, dtype=torch.int32, device=device)
    result["cu_seqlens_padded"] = torch.tensor(padded, dtype=torch.int32, device=device)
    return result


def _per_token(name: str, value: Any, whole: tuple[str, ...]) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and not stays_whole(name, whole)


def _check_documents(batch: Mapping[str, Any]) -> None:
    if batch.get("cu_seqlens_padded") is not None:
        raise ParallelConfigError(
            "pad_documents of a batch with cu_seqlens_padded.",
            "Its cu_seqlens are those of documents without padding, its tokens have padding.",
            "documents are padded once",
            "the batch as it was before.",
        )
    if batch.get("cu_seqlens") is None:
        known = ", ".join(map(repr, batch)) or "nothing"
        raise ParallelConfigError(
            "pad_documents of a batch without cu_seqlens.",
            f"It has {known}.",
            "cu_seqlens says where the documents begin, [documents + 1]",
            "batch['cu_seqlens'] = cu_seqlens_from_position_ids(position_ids); [0, t] for one "
            "document of t tokens.",
        )


def _length(batch: Mapping[str, Any], dim: int, whole: tuple[str, ...]) -> int:
    for name, value in batch.items():
        if _per_token(name, value, whole):
            return _tokens(name, value, dim)
    raise ParallelConfigError(
        f"A batch of {', '.join(batch)} without tokens.", rule="some tensor holds the documents"
    )


def _tokens(name: str, tensor: torch.Tensor, dim: int) -> int:
    if nonnegative_dim(tensor, dim) is None:
        raise _length_error(name, tensor, "which has no such dim", dim)
    return tensor.size(dim)


def _length_error(name: str, tensor: torch.Tensor, what: str, dim: int) -> ParallelConfigError:
    return ParallelConfigError(
        f"Batch entry {name!r} of shape {list(tensor.shape)}, padded along dim {dim}, {what}.",
        rule=f"every per-token tensor holds all documents along dim {dim}",
        nearest=f"whole=({name!r},) if it is not per-token.",
    )
