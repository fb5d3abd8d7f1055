"""Ulysses around any local attention, for plain PyTorch models (FSDP2, DeepSpeed, HF)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from ..exchange import Cut, heads_to_sequence, sequence_to_heads
from ..head_layout import HeadLayout
from ..parallel_state.errors import ParallelConfigError
from ..sequence_layout import SequenceLayout
from .local import sdpa_attention
from .random import rank_distinct_rng


class UlyssesAttention(torch.nn.Module):
    """Attention over the whole sequence, of which every rank of `group` holds a part.

    Args:
        group: the Ulysses group, e.g. `state.group("ulysses")`.
        sequence_layout: the tokens of each rank; equally many contiguous ones if None.
        num_heads, num_kv_heads: heads of the tensors to come, if the head layout shall be
            checked when the module is built.
        local_attention: what runs on whole sequences (see `ulysses_mc.layers.local`).
        kv_sequence_layout: the tokens of each rank in key and value, if they are others.
        uneven_heads: whether ranks may hold different numbers of heads.
        transport: see `ulysses_mc.exchange.sequence_to_heads`.

    Raises:
        ParallelConfigError: no group, or heads that do not fit.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        sequence_layout: SequenceLayout | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        local_attention: Callable[..., torch.Tensor] | None = None,
        *,
        kv_sequence_layout: SequenceLayout | None = None,
        uneven_heads: bool = True,
        transport: str = "auto",
    ) -> None:
        super().__init__()
        if not isinstance(group, dist.ProcessGroup):
            raise ParallelConfigError(
                f"UlyssesAttention with group={group!r}.",
                rule="attention over a split sequence needs its process group; without one every "
                "rank would attend to its own tokens only",
                nearest='state.group("ulysses") of an initialised ParallelState.',
            )
        self.group = group
        self.sequence_layout = sequence_layout
        self.kv_sequence_layout = kv_sequence_layout or sequence_layout
        self.local_attention = local_attention or sdpa_attention
        self.uneven_heads = uneven_heads
        self.transport = transport
        if num_heads is not None:
            head_layout(num_heads, num_kv_heads or num_heads, group.size(), uneven_heads)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        causal: bool = False,
        alibi_slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        attention_bias: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        **options: Any,
    ) -> torch.Tensor:
        """Attends to the whole sequence.

        Args:
            query: [b, s_r, h, d], or packed [t_r, h, d].
            key, value: [b, s_r, k, d] and [b, s_r, k, d_v], or packed.
            causal: whether a token sees only itself and earlier ones.
            alibi_slopes, sinks: [h], cut with the heads.
            attention_mask, attention_bias: over the whole sequence, [.., s, s_kv]; a head dim
                of size h is cut with the heads.
            dropout_p: attention dropout; its masks differ between the ranks' heads.
            options: further options of the local attention, given to it as they are:
                `scale`, `window`, `cu_seqlens` (global), `softcap`, ...

        Returns:
            [b, s_r, h, d_v], or packed [t_r, h, d_v].
        """
        if query.dim() == 3:  # packed: a batch of one
            unpacked = (tensor.unsqueeze(0) for tensor in (query, key, value))
            arguments = dict(options, causal=causal, dropout_p=dropout_p)
            arguments.update(alibi_slopes=alibi_slopes, sinks=sinks)
            arguments.update(attention_mask=attention_mask, attention_bias=attention_bias)
            return self.forward(*unpacked, **arguments).squeeze(0)

        rank, size = self.group.rank(), self.group.size()
        layout = head_layout(query.size(2), key.size(2), size, self.uneven_heads)
        heads = layout.query_heads[rank]
        by_head = {
            "alibi_slopes": _cut_heads(alibi_slopes, 0, heads, query.size(2)),
            "sinks": _cut_heads(sinks, 0, heads, query.size(2)),
            "attention_mask": _cut_heads(attention_mask, 1, heads, query.size(2)),
            "attention_bias": _cut_heads(attention_bias, 1, heads, query.size(2)),
        }
        options |= {name: tensor for name, tensor in by_head.items() if tensor is not None}
        if dropout_p:
            options["dropout_p"] = dropout_p

        query_cut = Cut(self._layout(self.sequence_layout, query), layout.query_heads)
        kv_cut = Cut(self._layout(self.kv_sequence_layout, key), layout.kv_heads)
        query_by_heads, key_by_heads, value_by_heads = (
            tensor.transpose(0, 1)  # [b, s, h_r, d]
            for tensor in sequence_to_heads(
                [tensor.transpose(0, 1) for tensor in (query, key, value)],
                [query_cut, kv_cut, kv_cut],
                self.group,
                by_sequence_batch_first=True,
                by_heads_batch_first=True,
                transport=self.transport,
            )
        )
        expansion = layout.kv_expansion(rank)
        if expansion is not None:
            key_by_heads = expand_heads(key_by_heads, expansion)
            value_by_heads = expand_heads(value_by_heads, expansion)
        tensors = (query_by_heads, key_by_heads, value_by_heads)
        with rank_distinct_rng(rank, query.device) if dropout_p else nullcontext():
            if heads:
                out_by_heads = self.local_attention(*tensors, causal=causal, **options)
            else:  # a rank beyond the heads still takes part in both exchanges, both ways
                cut = [tensor for tensor in by_head.values() if tensor is not None]
                out_by_heads = no_heads(*tensors, *cut)
        (out,) = heads_to_sequence(
            [out_by_heads.transpose(0, 1)],
            [query_cut],
            self.group,
            by_sequence_batch_first=True,
            by_heads_batch_first=True,
            transport=self.transport,
        )
        return out.transpose(0, 1)  # [b, s_r, h, d_v]

    def _layout(self, layout: SequenceLayout | None, tensor: torch.Tensor) -> SequenceLayout:
        size = self.group.size()
        return layout or equal_lengths(tensor.size(1), size)


@lru_cache(maxsize=256)
def equal_lengths(length: int, size: int) -> SequenceLayout:
    """Contiguous, `length` tokens on each of `size` ranks."""
    return SequenceLayout.from_lengths([length] * size)


@lru_cache(maxsize=256)
def head_layout(heads: int, kv_heads: int, size: int, uneven_heads: bool) -> HeadLayout:
    """The layout of a tensor-parallel rank's heads; says once if it is uneven."""
    layout = HeadLayout(heads, kv_heads, size, uneven_heads=uneven_heads)
    if layout.imbalance:
        warnings.warn(layout.describe() + "; " + layout.nearest_even(), stacklevel=3)
    return layout


def expand_heads(tensor: torch.Tensor, index: list[int]) -> torch.Tensor:
    """Repeats key/value heads so that each query head has its own: [.., k_r, d] -> [.., h_r, d].

    `index` is non-decreasing. Slices, not an index tensor, which would be copied to the device.
    """
    repeats = [(head, index.count(head)) for head in sorted(set(index))]
    return torch.cat(
        [
            tensor.narrow(-2, head, 1).expand(*tensor.shape[:-2], count, tensor.size(-1))
            for head, count in repeats
        ],
        -2,
    )


def no_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: torch.Tensor
) -> torch.Tensor:
    """The output of a rank without heads, [b, s, 0, d_v], tied to all inputs for backward."""
    tie = sum(tensor.sum() for tensor in (query, key, value, *others))
    return query.new_empty((*query.shape[:3], value.size(3))) + tie


def _cut_heads(
    tensor: torch.Tensor | None, dim: int, heads: range, num_heads: int
) -> torch.Tensor | None:
    """The rank's heads of a tensor that has them along `dim`; others are left whole."""
    if tensor is None or tensor.dim() <= dim or tensor.size(dim) != num_heads:
        return tensor
    return tensor.narrow(dim, heads.start, len(heads))
