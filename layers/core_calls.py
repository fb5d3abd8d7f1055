"""What a core attention of Megatron's kind, or a local attention, is called with between exchanges.

Tensors here are [s, b, h_r, d], Megatron's order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..parallel_state.errors import ParallelConfigError
from .by_heads import check_output
from .packed import PackedDocuments


def call_inner(
    inner: torch.nn.Module,
    *by_heads: torch.Tensor,
    mask: torch.Tensor | None,
    mask_type: Any,
    bias: torch.Tensor | None,
    documents: PackedDocuments | None,
    offset: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Runs a core attention of Megatron's kind."""
    s, b, heads, _ = by_heads[0].shape
    shape = [s, b, heads * by_heads[2].size(3)]
    tensors = [tensor.contiguous() for tensor in by_heads]
    if documents is not None:
        tensors, shape = [tensor.squeeze(1) for tensor in tensors], [shape[0], shape[2]]
        kwargs = dict(kwargs, packed_seq_params=documents)
    if bias is not None:
        four = bias.view(*[1] * (4 - bias.dim()), *bias.shape)  # TransformerEngine asks for it
        kwargs = dict(kwargs, attention_bias=four)
    if offset is not None:
        vars(inner)["softmax_offset"] = offset
    out: torch.Tensor = inner(*tensors, mask, attn_mask_type=mask_type, **kwargs)
    if offset is not None:  # else the module would hold this call's graph until the next
        vars(inner)["softmax_offset"] = None
    check_output(out, shape)
    return out.view(s, b, heads, -1)


def check_inner_takes(
    inner: torch.nn.Module,
    documents: PackedDocuments | None,
    bias: torch.Tensor | None,
    batch: int,
) -> None:
    """Refuses what the core between the exchanges has no way of doing: keeping packed documents
    apart, adding a bias to the logits."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    if isinstance(inner, DotProductAttention) and (documents is not None or bias is not None):
        given = "An attention_bias" if documents is None else "Packed documents"
        raise ParallelConfigError(
            f"{given} with Megatron's DotProductAttention between the exchanges.",
            rule="it has no way of keeping documents apart, and takes no bias",
            nearest="with_ulysses(spec, core='sdpa'), or TransformerEngine's TEDotProductAttention "
            "on GPUs.",
        )
    if documents is not None and batch != 1:
        raise ParallelConfigError(
            f"Packed documents in a micro-batch of {batch} with {type(inner).__name__} between "
            "the exchanges.",
            rule="Megatron's packed format is one sequence of all tokens",
            nearest="micro_batch_size 1; or with_ulysses(spec, core='sdpa'), where the same "
            "boundaries hold for every sequence.",
        )


def call_local(
    local_attention: Callable[..., torch.Tensor],
    *by_heads: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    offset: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Runs a local attention, which has the batch first and masks the other way round."""
    given = {
        "attention_mask": None if mask is None else ~mask,
        "attention_bias": bias,
        "sinks": offset,
    }
    options = options | {name: value for name, value in given.items() if value is not None}
    tensors = [tensor.transpose(0, 1) for tensor in by_heads]
    out = local_attention(*tensors, **options)
    check_output(out, [*tensors[0].shape[:3], tensors[2].size(3)])
    return out.transpose(0, 1)


def check_no_more(kwargs: dict[str, Any]) -> None:
    """Refuses what Megatron hands to a core attention and a local attention does not know."""
    unknown = [name for name, value in kwargs.items() if value is not None]
    if unknown:
        raise ParallelConfigError(
            f"core_attention was called with {', '.join(unknown)}.",
            rule="a local attention takes query, key, value, masks, bias and packed sequences",
            nearest="with_ulysses(spec) keeps the core attention that the spec names.",
        )
