"""The layer specs: Megatron's, with Ulysses put around every core attention."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from ulysses_mc.layers import specs, with_ulysses

from .config import Config


def gpt_spec(config: Config, megatron: TransformerConfig, vp_stage: int | None) -> Any:
    """The layers of a pipeline stage, from Megatron's own parts or TransformerEngine's."""
    inside = config.model.local_attention
    if config.model.transformer_impl == "local":
        return specs.gpt_block_local(megatron, vp_stage, None if inside == "spec" else "sdpa")
    specs.require_transformer_engine(
        "model.transformer_impl transformer_engine", "model.transformer_impl local."
    )
    block = get_gpt_decoder_block_spec(megatron, use_transformer_engine=True, vp_stage=vp_stage)
    return with_ulysses(block, "sdpa" if inside == "sdpa" else None)


def hybrid_spec(config: Config) -> Any:
    """A HybridModel stack (megatron-core >= 0.19)."""
    if config.model.transformer_impl == "transformer_engine":
        return specs.hybrid_stack_te
    return specs.hybrid_stack_local
