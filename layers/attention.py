"""Ulysses around any local attention, for plain PyTorch models (FSDP2, DeepSpeed, HF)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist

from ..exchange import Cut, heads_to_sequence, sequence_to_heads
from ..sequence_layout import SequenceLayout
from .by_heads import ONE_HEAD, attend_by_heads, expand_heads, head_layout
from .checks import (
    Shape,
    check_group,
    check_heads_given,
    check_qkv,
    check_transport,
    in_one_dtype,
)
from .group_member import GroupMember
from .joint import JointTokens
from .local import sdpa_attention
from .option_checks import MASKS, VECTORS, check_call, check_local_attention
from .random import rank_distinct_rng

_BY_HEAD = {name: -1 for name in VECTORS} | {name: -3 for name in MASKS}  # the heads' dim


class UlyssesAttention(GroupMember, torch.nn.Module):
    """Attention over the whole sequence, of which every rank of `group` holds a part.

    **Without a `sequence_layout` every rank must hold equally many tokens.** A rank knows its own
    length only, and asking the others would be one more exchange on every call, so this cannot
    be checked: over gloo, lengths that differ end the processes ("Received data size doesn't
    match expected size"); over NCCL they hang or give wrong values. Where lengths differ, or may
    (s % P != 0), give the layout: `SequenceLayout.contiguous(s, P)` or `.from_lengths([...])`.

    Args:
        group: the Ulysses group, e.g. `state.group("ulysses")`.
        sequence_layout: the tokens of each rank; equally many contiguous ones if None (see above).
        num_heads, num_kv_heads: heads of the tensors to come, if the head layout shall be
            checked when the module is built; other tensors are then refused.
        local_attention: what runs on whole sequences (see `ulysses_mc.layers.local`).
        kv_sequence_layout: the tokens of each rank in key and value, if they are others.
        uneven_heads: whether ranks may hold different numbers of heads.
        transport: see `ulysses_mc.exchange.sequence_to_heads`.

    Raises:
        ParallelConfigError: no group, a group beside ring attention (which there is not yet),
            a layout for another number of ranks, or heads that do not fit.
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
        check_group(group, sequence_layout, kv_sequence_layout)
        check_transport(transport)
        if local_attention is not None:
            check_local_attention(local_attention)
        self.group = group
        self.sequence_layout = sequence_layout
        self.kv_sequence_layout = kv_sequence_layout
        self.local_attention = local_attention or sdpa_attention
        self.uneven_heads = uneven_heads
        self.transport = transport
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        if num_heads is not None:
            self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
            head_layout(num_heads, self.num_kv_heads, group.size(), uneven_heads)

    # Messages and the book-keeping around them are not for the compiler; what runs before and
    # after them in a compiled model is compiled, once.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
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
        joint_query: torch.Tensor | None = None,
        joint_key: torch.Tensor | None = None,
        joint_value: torch.Tensor | None = None,
        joint_position: str = "front",
        sequence_layout: SequenceLayout | None = None,
        kv_sequence_layout: SequenceLayout | None = None,
        **options: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attends to the whole sequence.

        Args:
            query: [b, s_r, h, d], or packed [t_r, h, d].
            key, value: [b, s_r, k, d] and [b, s_r, k, d_v], or packed.
            causal: whether a token sees only itself and earlier ones.
            alibi_slopes, sinks: [h], cut with the heads.
            attention_mask, attention_bias: over the whole sequence, broadcastable to
                [b, h, s, s_kv]; a head dim of size h is cut with the heads.
            dropout_p: attention dropout; its masks differ between the ranks' heads.
            joint_query, joint_key, joint_value: [b, j, h or k, d or d_v], tokens that every rank
                holds whole; masks and `cu_seqlens` then speak of all j + s tokens.
            joint_position: 'front' or 'rear' of the split tokens.
            sequence_layout, kv_sequence_layout: of this call alone, as for an evaluation at
                another length; those of the module if None.
            options: further options of the local attention, given to it as they are:
                `scale`, `window`, `cu_seqlens` (global), `softcap`, ...; None is not given.

        Returns:
            [b, s_r, h, d_v], or packed [t_r, h, d_v]; with joint tokens also their output, whole
            on every rank. Gradients of what every rank holds (joint tokens, biases, slopes,
            sinks) are the rank's share: their sum over the group is the whole. Likewise a loss on
            the joint output is counted once over the group, not on every rank.

        Raises:
            ParallelConfigError: an option that the local attention does not take, or a shape
                that does not fit; before anything is sent.
        """
        joint = JointTokens.of(joint_query, joint_key, joint_value, joint_position)
        by_head = {
            "alibi_slopes": alibi_slopes,
            "sinks": sinks,
            "attention_mask": attention_mask,
            "attention_bias": attention_bias,
        }
        options |= {"dropout_p": dropout_p or None, **by_head}
        options = {name: option for name, option in options.items() if option is not None}
        options["causal"] = causal
        packed = query.dim() == 3
        if packed:  # a batch of one
            query, key, value = (tensor.unsqueeze(0) for tensor in (query, key, value))
        query_layout = sequence_layout or self.sequence_layout
        layouts = (query_layout, kv_sequence_layout or self.kv_sequence_layout or query_layout)
        out, joint_out = self._attend(query, key, value, layouts, joint, options)
        if packed:
            out = out.squeeze(0)
            joint_out = joint_out if joint_out is None else joint_out.squeeze(0)
        return out if joint_out is None else (out, joint_out)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layouts: tuple[SequenceLayout | None, SequenceLayout | None],
        joint: JointTokens | None,
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key, value = in_one_dtype(query, key, value)
        held = _held(
            (query.shape, key.shape, value.shape),
            (self.num_heads, self.num_kv_heads),
            layouts,
            self.group.rank(),
            self.group.size(),
            self.uneven_heads,
        )
        s, s_kv = held.lengths
        if joint is not None:
            joint = joint.beside(query, key, value)
            s, s_kv = s + joint.query.size(1), s_kv + joint.key.size(1)
        shape = (query.size(0), query.size(2), s, s_kv)
        check_call(self.local_attention, (query, key, value), shape, options)
        own = held.heads or ONE_HEAD
        cut = {name: _cut_heads(name, options[name], own) for name in _BY_HEAD if name in options}
        attend = partial(self.local_attention, **options | cut)

        by_heads = [
            *sequence_to_heads(
                (query, key, value),
                held.cuts,
                self.group,
                batch_first=True,
                transport=self.transport,
            )
        ]  # [b, s, h_r, d]
        if joint is not None:
            replicated = zip(
                (joint.query, joint.key, joint.value),
                (held.heads, held.kv_heads, held.kv_heads),
                strict=True,
            )
            by_heads = [
                joint.attach(tensor, *whole)
                for tensor, whole in zip(by_heads, replicated, strict=True)
            ]
        if held.expansion is not None:
            by_heads[1:] = [expand_heads(tensor, held.expansion) for tensor in by_heads[1:]]
        random = "dropout_p" in options
        with rank_distinct_rng(self.group.rank(), query.device) if random else nullcontext():
            out_by_heads = attend_by_heads(attend, by_heads)
        return self._back(out_by_heads, held.cuts[0], joint)

    def _back(
        self, out_by_heads: torch.Tensor, cut: Cut, joint: JointTokens | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[b, (j +) s, h_r, d_v] -> [b, s_r, h, d_v] (and [b, j, h, d_v])."""
        pieces = [(out_by_heads, cut)]
        if joint is not None:
            out_by_heads, joint_by_heads = joint.detach(out_by_heads)
            pieces = [(out_by_heads, cut), joint.for_every_rank(joint_by_heads, cut.heads)]
        out, *others = heads_to_sequence(
            [tensor for tensor, _ in pieces],
            [piece_cut for _, piece_cut in pieces],
            self.group,
            batch_first=True,
            transport=self.transport,
        )
        return out, (others[0] if others else None)


@dataclass(frozen=True)
class _Held:
    """What a rank holds inside attention, and how it comes to hold it.

    Args:
        heads, kv_heads: its own.
        cuts: of query, key and value.
        lengths: tokens of the whole sequence, of the query and of key and value.
        expansion: see `HeadLayout.kv_expansion`.
    """

    heads: range
    kv_heads: range
    cuts: tuple[Cut, Cut, Cut]
    lengths: tuple[int, int]
    expansion: list[int] | None


@lru_cache(maxsize=256)
def _held(
    shapes: tuple[Shape, Shape, Shape],
    heads_given: tuple[int | None, int | None],
    layouts: tuple[SequenceLayout | None, SequenceLayout | None],
    rank: int,
    size: int,
    uneven_heads: bool,
) -> _Held:
    """For query, key and value of these shapes, once they have been found to go together."""
    query, key, _ = shapes
    check_qkv(*shapes)
    check_heads_given(query, key, *heads_given)
    layout = head_layout(query[2], key[2], size, uneven_heads)
    of_query, of_kv = (
        given or equal_lengths(shape[1], size)
        for given, shape in zip(layouts, (query, key), strict=True)
    )
    kv_cut = Cut.of(of_kv, layout.kv_heads)
    return _Held(
        layout.query_heads[rank],
        layout.kv_heads[rank],
        (Cut.of(of_query, layout.query_heads), kv_cut, kv_cut),
        (of_query.sequence_length, of_kv.sequence_length),
        layout.kv_expansion(rank),
    )


@lru_cache(maxsize=256)
def equal_lengths(length: int, size: int) -> SequenceLayout:
    """Contiguous, `length` tokens on each of `size` ranks."""
    return SequenceLayout.from_lengths([length] * size)


def _cut_heads(name: str, tensor: torch.Tensor, heads: range) -> torch.Tensor:
    """The rank's heads of a tensor that has a number or matrix per head; others stay whole."""
    dim = _BY_HEAD[name]
    if tensor.dim() < -dim or (name in MASKS and tensor.size(dim) == 1):
        return tensor
    return tensor.narrow(dim, heads.start, len(heads))
