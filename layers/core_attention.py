"""Ulysses where a Megatron layer spec names `core_attention`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule

from ..exchange import Cut, heads_to_sequence, sequence_to_heads
from ..head_layout import HeadLayout
from ..sequence_layout import SequenceLayout
from .by_heads import ONE_HEAD, attend_by_heads, expand_heads, head_layout
from .checks import check_qkv, in_one_dtype
from .core_calls import call_inner, call_local, check_inner_takes, check_no_more
from .dropout import attention_dropout_rng
from .group_member import GroupMember
from .inner_core import (
    build_inner_core,
    check_config,
    ignores_mask,
    local_attention_options,
    resolve_core,
)
from .megatron_masks import check_masks, own_heads, whole_mask
from .option_checks import check_call
from .packed import (
    PackedDocuments,
    check_shard,
    documents_of,
    inside_exchange,
)
from .sinks import SoftmaxOffset
from .state_keys import keep_core_keys

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)


class UlyssesCoreAttention(GroupMember, MegatronModule):
    """Attention over the whole sequence, of which every context-parallel rank holds a part.

    Built by Megatron's attention layers with their usual keywords. The group is Megatron's
    context-parallel group, the order of the tokens Megatron's own (zigzag), the heads are those
    of the tensor-parallel rank. With a group of one rank and a core of the spec's own, building
    it gives that core itself, untouched.

    Args:
        core: what runs on whole sequences: None or 'sdpa' for PyTorch's fused attention, a
            function (see `ulysses_mc.layers.local`), or a core attention of Megatron's kind (a
            class or ModuleSpec), built with the config that is true inside the exchange.
        uneven_heads: whether ranks may hold different numbers of heads.
        others: as Megatron passes them.

    Raises:
        ParallelConfigError: heads that do not fit, or a setting that would not be exact.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        core = resolve_core(kwargs.get("core"))
        if core.is_megatron and _context_group(kwargs.get("pg_collection")).size() == 1:
            arguments = {name: kwargs[name] for name in kwargs if name not in _OWN_ARGUMENTS}
            return core.build(*args, **arguments)
        return super().__new__(cls)

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        *,
        core: Any = None,
        uneven_heads: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(config=config)
        self.group = _context_group(pg_collection)
        self.attn_mask_type, self.attention_type = attn_mask_type, attention_type
        self.uneven_heads = uneven_heads
        self.any_layout = False  # until `wire_rope`
        check_config(config, self.group)
        heads = config.num_attention_heads
        kv_heads = heads if config.multi_latent_attention else config.num_query_groups
        tensor_size = config.tensor_model_parallel_size
        self.head_layout = HeadLayout(
            heads, kv_heads, self.group.size(), tensor_size, uneven_heads=uneven_heads
        )
        chosen = resolve_core(core)
        # One slot per head of the tensor-parallel rank; None unless the config asks for it.
        self.softmax_offset = SoftmaxOffset.build(
            config, self.head_layout.local_heads, zeros=chosen.is_transformer_engine
        )
        self.local_attention: Callable[..., torch.Tensor] | None = chosen.function
        self.inner: torch.nn.Module | None = None
        if chosen.is_megatron:
            self.inner = build_inner_core(
                chosen,
                config,
                self.head_layout,
                self.group.rank(),
                k_channels=k_channels,
                v_channels=v_channels,
                layer_number=layer_number,
                attn_mask_type=attn_mask_type,
                attention_type=attention_type,
                softmax_scale=softmax_scale,
                pg_collection=pg_collection,
                **kwargs,
            )
        else:
            self.options = local_attention_options(config, layer_number, softmax_scale)
        keep_core_keys(self)

    @property
    def hidden_size_per_attention_head_v(self) -> int:
        """TransformerEngine's: Megatron's multi-latent attention sets it where it pads the values
        of packed documents. A core without it has none."""
        inner: Any = self.inner
        return int(inner.hidden_size_per_attention_head_v)

    @hidden_size_per_attention_head_v.setter
    def hidden_size_per_attention_head_v(self, size: int) -> None:
        inner: Any = self.inner
        inner.hidden_size_per_attention_head_v = size

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attends to the whole sequence.

        Args:
            query: [s_r, b, h, d], or packed [t_r, h, d].
            key, value: [s_r, b, k, d] and [s_r, b, k, d_v], or packed.
            attention_mask: [b or 1, h or 1, s_r or s or 1, s], True = masked out. Rows of the
                rank's own tokens (as Megatron cuts them) are gathered: one more collective.
                TransformerEngine's attention reads none with a causal or no-mask type.
            attn_mask_type: the one given when built if None.
            attention_bias: [b or 1, h or 1, s, s], added to the logits.
            packed_seq_params: what `packed_seq_params` makes, or Megatron's own with the
                boundaries in the whole batch.

        Returns:
            [s_r, b, h * d_v], or packed [t_r, h * d_v].

        Raises:
            ParallelConfigError: documents, masks or a bias that do not fit; before anything is
                sent.
        """
        thd = query.dim() == 3
        if thd:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        query, key, value = in_one_dtype(query, key, value)
        size, rank = self.group.size(), self.group.rank()
        documents = documents_of(packed_seq_params, size)
        if documents is not None:
            lengths = (query.size(0), key.size(0))
            mtp = bool(getattr(self.config, "mtp_num_layers", None))
            check_shard(documents, lengths, rank, any_layout=self.any_layout, mtp=mtp)
        layout = head_layout(query.size(2), key.size(2), size, self.uneven_heads)
        query_cut = Cut.of(_sequence_layout(query.size(0), size, documents), layout.query_heads)
        kv_cut = Cut.of(_sequence_layout(key.size(0), size, documents), layout.kv_heads)
        mask_type = attn_mask_type or self.attn_mask_type
        if self.inner is not None and ignores_mask(self.inner, mask_type):
            attention_mask = None
        call = self._checked_call(
            (query, key, value),
            (query_cut, kv_cut),
            mask_type,
            attention_mask,
            attention_bias,
            documents,
            kwargs,
        )
        own = layout.query_heads[rank] or ONE_HEAD
        mask = whole_mask(attention_mask, query_cut.sequence, own, query.size(2), self.group)
        bias = own_heads(attention_bias, own, query.size(2))
        offset = self.softmax_offset(own) if self.softmax_offset is not None else None

        by_heads = sequence_to_heads(
            [query, key, value], [query_cut, kv_cut, kv_cut], self.group
        )  # [s, b, h_r, d]
        expansion = layout.kv_expansion(rank)
        if expansion is not None:
            by_heads = (by_heads[0], *(expand_heads(t, expansion) for t in by_heads[1:]))
        attend = partial(call, mask=mask, bias=bias, offset=offset)
        with self._dropout_rng(query.device):
            out = attend_by_heads(attend, by_heads)
        (out,) = heads_to_sequence([out], [query_cut], self.group)
        out = out.flatten(2)  # [s_r, b, h * d_v]
        return out.squeeze(1) if thd else out

    def _checked_call(
        self,
        tensors: tuple[torch.Tensor, ...],
        cuts: tuple[Cut, Cut],
        mask_type: AttnMaskType,
        mask: torch.Tensor | None,
        bias: torch.Tensor | None,
        documents: PackedDocuments | None,
        kwargs: dict[str, Any],
    ) -> Callable[..., torch.Tensor]:
        """What runs between the exchanges, once all that it would refuse has been refused."""
        _, batch, heads, _ = tensors[0].shape
        s, s_kv = (cut.sequence.sequence_length for cut in cuts)
        shape = (batch, heads, s, s_kv)
        check_qkv(*(tensor.transpose(0, 1).shape for tensor in tensors))
        check_masks(mask, bias, shape, cuts[0].sequence, self.group.rank(), tensors[0].device)
        if self.inner is not None:
            inside = None if documents is None else inside_exchange(documents)
            check_inner_takes(self.inner, inside, bias, batch)
            return partial(
                call_inner, self.inner, mask_type=mask_type, documents=inside, kwargs=kwargs
            )
        assert self.local_attention is not None
        check_no_more(kwargs)
        options = dict(self.options, causal=mask_type in _CAUSAL)
        if not self.training:
            options.pop("dropout_p", None)
        if documents is not None:
            options["cu_seqlens"] = list(documents.attended)
        sinks = None if self.softmax_offset is None else self.softmax_offset.weight
        given = {"attention_bias": bias, "sinks": sinks}
        if mask is not None:
            given["attention_mask"] = mask.new_ones(1)  # its shape has been checked
        given = {name: tensor for name, tensor in given.items() if tensor is not None}
        check_call(self.local_attention, tensors, shape, options | given)
        return partial(call_local, self.local_attention, options=options)

    def _dropout_rng(self, device: torch.device) -> Any:
        if self.training and self.config.attention_dropout:
            return attention_dropout_rng(self.group, device, self.config.sequence_parallel)
        return nullcontext()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The keys that the core would have without Ulysses, so that checkpoints fit both ways."""
        from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
        from megatron.core.transformer.utils import sharded_state_dict_default

        state: dict[str, Any] = {}
        if self.softmax_offset is not None:
            key = f"{prefix}softmax_offset"
            name = f"{key}.weight"
            whole = self.softmax_offset.sharded_state_dict(f"{key}.", sharded_offsets, metadata)
            replace_prefix_for_sharding(whole, name, key)
            state[key] = whole[name]
        if self.inner is not None:
            name = f"{prefix}inner."
            inner = sharded_state_dict_default(self.inner, name, sharded_offsets, metadata)
            replace_prefix_for_sharding(inner, name, prefix)
            state |= {prefix + key.removeprefix(name): value for key, value in inner.items()}
        return state


_OWN_ARGUMENTS = ("core", "uneven_heads")


def _context_group(pg_collection: Any) -> dist.ProcessGroup:
    """The group of `pg_collection`, or Megatron's own if it names none."""
    group: dist.ProcessGroup | None = getattr(pg_collection, "cp", None)
    return group or parallel_state.get_context_parallel_group()


@lru_cache(maxsize=256)
def _zigzag(length: int, size: int) -> SequenceLayout:
    return SequenceLayout.zigzag(length, size)


def _sequence_layout(length: int, size: int, documents: PackedDocuments | None) -> SequenceLayout:
    """That of the documents, else Megatron's; this rank holds `length` tokens of it."""
    if documents is not None and documents.layout is not None:
        return documents.layout
    return _zigzag(length * size, size)
