"""What a Hugging Face model is told about the whole sequence, of which it sees a shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..batch import document_boundaries
from ..parallel_state.errors import ParallelConfigError
from ..sequence_layout import SequenceLayout
from .attention import equal_lengths

# Keyword under which `WholeSequence` travels through the model's layers to the attention: an
# argument, not an attribute, so that recomputation in the backward pass sees the same.
MARKER = "ulysses_sequence"
_REFUSED = {
    "labels": "labels are shifted before the sequence is cut (`shift_labels`), and the loss is a "
    "mean over all ranks' tokens (`cross_entropy`, `token_mean_loss`)",
    "past_key_values": "training and evaluation of whole sequences, without a cache",
    "cache": "training and evaluation of whole sequences, without a cache",
    "use_cache": "training and evaluation of whole sequences, without a cache",
    "output_attentions": "attention weights are never formed",
    "output_router_logits": "the router's balancing loss is over the tokens of a shard",
}


class WholeSequence:
    """The sequence that a forward call attends to.

    Not a dataclass: FSDP2 copies those when it casts inputs, and `layers` would count in a copy.

    Args:
        layout: the tokens of each rank.
        cu_seqlens: global document boundaries.

    Attributes:
        causal: whether the causal mask applies.
        mask: [b or 1, 1, s or 1, s], boolean (True = attend) or additive.
        layers: attention layers that have used it.
    """

    def __init__(self, layout: SequenceLayout, cu_seqlens: list[int] | None = None) -> None:
        self.layout, self.cu_seqlens = layout, cu_seqlens
        self.causal, self.layers = True, 0
        self.mask: torch.Tensor | None = None


def prepare_inputs(
    group: dist.ProcessGroup,
    sequence_layout: SequenceLayout | None,
    names: list[str],
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook: positions filled in or checked, masks and documents made global.

    Raises:
        ParallelConfigError: on every rank alike, see `use_ulysses`.
    """
    if MARKER in kwargs:  # an inner model: done by the outer one
        return None
    kwargs = {**kwargs, **dict(zip(names, args, strict=False))}
    _refuse(module, group, kwargs)
    tokens = kwargs.get("input_ids")
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    if tokens is None or tokens.dim() < 2:
        raise ParallelConfigError(
            f"{type(module).__name__} called without input_ids or inputs_embeds.",
            rule="input_ids [b, s_r], or inputs_embeds [b, s_r, d]",
        )
    layout = kwargs.pop("sequence_layout", None) or sequence_layout
    layout = layout or equal_lengths(tokens.size(1), group.size())
    _check_length(tokens, layout, group)
    whole = WholeSequence(layout, _documents(kwargs, layout))
    _read_mask(whole, kwargs, tokens)
    kwargs["position_ids"] = _positions(whole, kwargs, tokens, group)
    kwargs["use_cache"] = False
    kwargs[MARKER] = whole
    return (), kwargs


def _refuse(module: torch.nn.Module, group: dist.ProcessGroup, kwargs: dict[str, Any]) -> None:
    """`use_cache=True` in the config is transformers' default, and only wastes memory."""
    if group.size() == 1 and not kwargs.get("use_cache"):
        refused = []
    else:
        refused = [n for n in _REFUSED if kwargs.get(n) is not None and kwargs[n] is not False]
        config: Any = module.config
        for name in ("output_attentions", "output_router_logits"):
            if getattr(config, name, False) and name not in kwargs:
                refused.append(name)
    if refused:
        raise ParallelConfigError(
            f"{type(module).__name__} called with {', '.join(refused)} on a shard of a sequence.",
            rule="; ".join(dict.fromkeys(_REFUSED[name] for name in refused)),
        )


def _check_length(tokens: torch.Tensor, layout: SequenceLayout, group: dist.ProcessGroup) -> None:
    if min(layout.lengths) == 0:
        raise ParallelConfigError(
            f"A sequence of {layout.sequence_length} tokens over {group.size()} ranks, by a "
            f"layout of {list(layout.lengths)} tokens per rank.",
            rule="transformers' models cannot reshape a shard without tokens",
            nearest="every rank holds one token at least.",
        )
    if layout.group_size != group.size() or layout.lengths[group.rank()] != tokens.size(1):
        raise ParallelConfigError(
            f"{tokens.size(1)} tokens on rank {group.rank()} of {group.size()}, by a layout of "
            f"{list(layout.lengths)} tokens per rank.",
            rule="every rank holds the tokens that the sequence layout gives it",
            nearest="sequence_layout=SequenceLayout.from_lengths([...]) with the true lengths.",
        )


def _documents(kwargs: dict[str, Any], layout: SequenceLayout) -> list[int] | None:
    """The documents that the caller names, by transformers' name or by ours."""
    given = [kwargs.pop(name, None) for name in ("cu_seq_lens_q", "cu_seqlens")]
    kwargs.pop("cu_seq_lens_k", None)
    boundaries = [b for b in given if b is not None]
    return document_boundaries(boundaries[0], layout.sequence_length) if boundaries else None


def _read_mask(whole: WholeSequence, kwargs: dict[str, Any], tokens: torch.Tensor) -> None:
    mask, length = kwargs.pop("attention_mask", None), whole.layout.sequence_length
    if mask is None:
        return
    fits = mask.shape in {(tokens.size(0), length), (1, length)}
    if mask.dim() == 4:
        fits = mask.shape[1:] == (1, length, length) and mask.size(0) in (1, tokens.size(0))
    if not fits:
        raise ParallelConfigError(
            f"attention_mask of shape {list(mask.shape)} for {tokens.size(0)} sequences of "
            f"{length} tokens, {tokens.size(1)} of them on this rank.",
            rule="attention sees whole sequences, so the mask is whole on every rank: [b, s] or "
            "[b, 1, s, s]",
        )
    if mask.dim() == 4:
        whole.causal, whole.mask = False, mask
        return
    mask = mask.to(device=tokens.device, dtype=torch.bool)
    if bool(mask.all()):  # no padding: the attention may then use its causal kernel
        return
    if kwargs.get("position_ids") is None and bool((~mask[:, :-1] & mask[:, 1:]).any()):
        raise ParallelConfigError(
            "attention_mask with padding before tokens, and no position_ids.",
            rule="models differ in how they count padded positions",
            nearest="padding on the right; or position_ids, cut like the tokens.",
        )
    whole.mask = mask[:, None, None, :]


def _positions(
    whole: WholeSequence, kwargs: dict[str, Any], tokens: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """The rank's positions; where the caller gives them, documents are read off them."""
    given: torch.Tensor | None = kwargs.get("position_ids")
    if given is None:
        positions = whole.layout.positions(group.rank(), whole.cu_seqlens)
        return torch.tensor(positions, device=tokens.device)[None]
    if given.shape not in {tokens.shape[:2], (1, tokens.size(1))}:
        raise ParallelConfigError(
            f"position_ids of shape {list(given.shape)} for {list(tokens.shape[:2])} tokens.",
            rule="position_ids are cut like the tokens: [b, s_r] or [1, s_r]",
        )
    if whole.cu_seqlens is None:
        everywhere = _gather(given.expand(tokens.size(0), -1), whole.layout, group)
        _refuse_local_positions(everywhere, whole.layout)
        if whole.mask is None and whole.causal:  # as transformers: a mask excludes packing
            _read_packing(whole, everywhere)
    return given


def _gather(
    positions: torch.Tensor, layout: SequenceLayout, group: dist.ProcessGroup
) -> torch.Tensor:
    """[b, s_r] -> [b, s] by one all-gather, padded to the longest shard."""
    longest = max(layout.lengths)
    padded = torch.nn.functional.pad(positions, (0, longest - positions.size(1))).contiguous()
    pieces = [torch.empty_like(padded) for _ in layout.lengths]
    dist.all_gather(pieces, padded, group=group)
    shards = [piece[:, :n] for piece, n in zip(pieces, layout.lengths, strict=True)]
    everywhere: torch.Tensor = layout.unshard(shards, 1)
    return everywhere


def _refuse_local_positions(positions: torch.Tensor, layout: SequenceLayout) -> None:
    local: Sequence[torch.Tensor] = [
        layout.shard(positions, 1, rank)[0].cpu() for rank in range(layout.group_size)
    ]
    restarts = [shard.equal(torch.arange(len(shard))) for shard in local]
    if all(restarts) and sum(length > 0 for length in layout.lengths) > 1:
        raise ParallelConfigError(
            f"position_ids that count from 0 on each of {layout.group_size} ranks, "
            f"{list(layout.lengths)} tokens.",
            rule="position_ids are the positions of the rank's tokens in the whole sequence",
            nearest="no position_ids at all; or, if every rank does hold one document, cu_seqlens.",
        )


def _read_packing(whole: WholeSequence, positions: torch.Tensor) -> None:
    """Documents of [b, s] positions: a step other than +1 starts one (transformers' rule)."""
    starts = torch.diff(positions, dim=1) != 1
    if not bool(starts.any()):
        return
    if bool((starts == starts[0]).all()):
        inner = (starts[0].nonzero().flatten() + 1).tolist()
        whole.cu_seqlens = [0, *inner, positions.size(1)]
        return
    document = torch.nn.functional.pad(starts.cumsum(1), (1, 0))  # [b, s]
    whole.mask = document[:, None, :, None] == document[:, None, None, :]  # [b, 1, s, s]
