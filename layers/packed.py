"""Packed documents inside Megatron: its PackedSeqParams, and which rank holds which token."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from ..batch import document_boundaries
from ..parallel_state.errors import ParallelConfigError
from ..sequence_layout import SequenceLayout


@dataclass
class PackedDocuments(PackedSeqParams):
    """What Megatron's class says, on the host, and the layout; see `packed_seq_params`.

    Megatron hands it on to its layers as it is.
    """

    layout: SequenceLayout | None = None
    bounds: tuple[int, ...] = ()
    """[documents + 1], the padding of each document included"""
    attended: tuple[int, ...] = ()
    """boundaries with the padding of each document as a document of its own"""

    @property
    def is_megatrons_order(self) -> bool:
        """Whether Megatron's own RoPE and multi-token prediction fit the layout."""
        return bool(self.qkv_format == "thd")


def packed_seq_params(
    cu_seqlens: torch.Tensor | Sequence[int],
    layout: SequenceLayout,
    *,
    cu_seqlens_padded: torch.Tensor | Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> PackedDocuments:
    """The `packed_seq_params` of a Megatron model for documents cut by `layout`.

    Give it on every rank, those of middle pipeline stages too. A layout other than Megatron's own
    (`SequenceLayout.zigzag_packed` of the boundaries) needs `wire_rope(model)`.

    Args:
        cu_seqlens: [documents + 1], global boundaries; tokens after the last are padding.
        layout: the tokens of each Ulysses rank.
        cu_seqlens_padded: [documents + 1], where each document begins in the batch, if each is
            padded (`pad_documents`); `cu_seqlens` then counts without padding.
        device: of the tensors for kernels; the current CUDA device, or the CPU without one.

    Raises:
        ParallelConfigError: boundaries that do not fit each other or the layout.
    """
    padded = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    length, size = layout.sequence_length, layout.group_size
    bounds = tuple(document_boundaries(padded, length))
    lengths = _host(cu_seqlens)
    if cu_seqlens_padded is None:
        lengths = bounds
    elif bounds[-2:] != tuple(_host(padded))[-2:]:  # the batch ends in padding of its own
        lengths = (*lengths, lengths[-1] + bounds[-1] - bounds[-2])
    attended = _padding_apart(lengths, bounds)
    in_order = size == 1 or layout == _zigzag_or_none(bounds, size)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    on_device = torch.tensor(lengths, dtype=torch.int32, device=device)
    longest = max((b - a for a, b in pairwise(bounds)), default=0)
    tensors = {"cu_seqlens_q": on_device, "cu_seqlens_kv": on_device}
    if lengths != bounds:
        on_device = torch.tensor(bounds, dtype=torch.int32, device=device)
        tensors |= {"cu_seqlens_q_padded": on_device, "cu_seqlens_kv_padded": on_device}
    return PackedDocuments(
        qkv_format="thd" if in_order else "sbhd",
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        layout=layout,
        bounds=bounds,
        attended=attended,
        **tensors,
    )


def documents_of(params: Any, size: int) -> PackedDocuments | None:
    """`params` of any kind as ours; Megatron's own are read from the device, at every layer.

    Raises:
        ParallelConfigError: documents that Megatron's order cannot cut, or whose keys are others,
            or of a format that does not say so.
    """
    if params is None or isinstance(params, PackedDocuments):
        return params
    if params.cu_seqlens_q is None:
        return None
    if params.qkv_format != "thd":
        raise ParallelConfigError(
            f"PackedSeqParams with cu_seqlens_q and qkv_format {params.qkv_format!r}.",
            rule="Megatron takes documents for packed with qkv_format 'thd' only, and would let "
            "them see each other",
            nearest="qkv_format='thd'; or ulysses_mc.layers.packed_seq_params(cu_seqlens, layout).",
        )
    query, key = (
        [getattr(params, f"cu_seqlens_{of}{padded}") for padded in ("", "_padded")]
        for of in ("q", "kv")
    )
    for ours, theirs in zip(query, key, strict=True):
        if theirs is not None and theirs is not ours and not torch.equal(theirs, ours):
            raise ParallelConfigError(
                "Packed documents whose keys have other lengths than their queries.",
                rule="cu_seqlens_q and cu_seqlens_kv are the same in self-attention",
            )
    lengths = _host(query[0])
    bounds = lengths if query[1] is None else _host(query[1])
    return PackedDocuments(
        **{field.name: getattr(params, field.name) for field in dataclasses.fields(params)},
        layout=_zigzag(bounds, size),
        bounds=bounds,
        attended=_padding_apart(lengths, bounds),
    )


def inside_exchange(documents: PackedDocuments) -> PackedDocuments | None:
    """What a core attention between the exchanges is told; None for one undivided sequence."""
    if len(documents.bounds) == 2 and documents.attended == documents.bounds:
        return None
    inside = copy.copy(documents)
    inside.qkv_format, inside.cp_group, inside.local_cp_size = "thd", None, None
    return inside


def check_shard(
    documents: PackedDocuments, lengths: Sequence[int], rank: int, *, any_layout: bool, mtp: bool
) -> None:
    """Refuses tokens that are not those of the layout, and layouts without their RoPE.

    Args:
        lengths: tokens of this rank's query and key.
        any_layout: whether `wire_rope` has been called.
        mtp: whether the model predicts several tokens.
    """
    layout = documents.layout
    assert layout is not None
    if mtp and layout.group_size > 1:
        raise ParallelConfigError(
            f"mtp_num_layers with documents packed over {layout.group_size} Ulysses ranks.",
            rule="multi-token prediction shifts tokens between ranks, which is not known to be "
            "exact for packed documents",
            nearest="mtp_num_layers unset, or ulysses_parallel_size 1.",
        )
    own, total = layout.lengths[rank], layout.sequence_length
    if any(length != own for length in lengths):
        shown = documents.bounds if len(documents.bounds) < 12 else (*documents.bounds[:11], "...")
        raise ParallelConfigError(
            f"Packed documents cu_seqlens {list(shown)} with {lengths[0]} query and {lengths[1]} "
            f"key tokens on Ulysses rank {rank} of {layout.group_size}.",
            f"Their layout gives {own} of {total} tokens to this rank.",
            "cu_seqlens is global, with every document of all Ulysses ranks in it, and the "
            "tokens are cut by the layout it was given with",
            "packed_seq_params(cu_seqlens, layout) with the layout of shard_batch.",
        )
    if not documents.is_megatrons_order and not any_layout:
        raise ParallelConfigError(
            "Packed documents in another token order than Megatron's, in a model whose rotary "
            "embedding knows Megatron's only.",
            rule="Megatron's order cuts every document into 2 x ulysses_parallel_size chunks; "
            "any other order needs a rotary embedding for it",
            nearest="wire_rope(model); or pad_documents and SequenceLayout.zigzag_packed.",
        )


def _host(cu_seqlens: torch.Tensor | Sequence[int]) -> tuple[int, ...]:
    if isinstance(cu_seqlens, torch.Tensor):
        cu_seqlens = cu_seqlens.flatten().tolist()
    return tuple(int(x) for x in cu_seqlens)


def _padding_apart(lengths: tuple[int, ...], bounds: tuple[int, ...]) -> tuple[int, ...]:
    """Boundaries of the documents and of the padding after each: [0, 3, 8] in [0, 4, 12] ->
    [0, 3, 4, 9, 12]."""
    if len(lengths) != len(bounds) or any(
        not 0 <= b - a <= q - p
        for (a, b), (p, q) in zip(pairwise(lengths), pairwise(bounds), strict=True)
    ):
        raise ParallelConfigError(
            f"cu_seqlens {list(lengths)} with cu_seqlens_padded {list(bounds)}.",
            rule="both count the same documents, each no longer than with its padding",
        )
    ends = (p + b - a for (a, b), p in zip(pairwise(lengths), bounds, strict=False))
    return tuple(sorted({*bounds, *ends}))


@lru_cache(maxsize=256)
def _zigzag(bounds: tuple[int, ...], size: int) -> SequenceLayout:
    return SequenceLayout.zigzag_packed(bounds, size)


def _zigzag_or_none(bounds: tuple[int, ...], size: int) -> SequenceLayout | None:
    if any((b - a) % (2 * size) for a, b in pairwise(bounds)):
        return None
    return _zigzag(bounds, size)
