"""The layer specs: Megatron's, with Ulysses put around every core attention."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from .config import Config
from .errors import UserError


def gpt_spec(config: Config, megatron: TransformerConfig, vp_stage: int | None) -> Any:
    """The layers of a pipeline stage, from Megatron's own parts or TransformerEngine's."""
    return get_gpt_decoder_block_spec(
        megatron,
        use_transformer_engine=config.model.transformer_impl == "transformer_engine",
        normalization=config.model.normalization,
        vp_stage=vp_stage,
    )


def hybrid_spec(config: Config, megatron: TransformerConfig) -> Any:
    """A HybridModel stack (megatron-core >= 0.19)."""
    try:
        from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
    except ImportError:
        raise UserError("model.kind hybrid needs megatron-core >= 0.19 (Python >= 3.12)") from None
    if config.model.transformer_impl == "transformer_engine":
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

        return hybrid_stack_spec
    unsupported = set(config.model.hybrid_layer_pattern or "") - set("*-|")
    if unsupported:
        raise UserError(
            f"hybrid layers {''.join(sorted(unsupported))!r} need model.transformer_impl "
            "transformer_engine; without it the pattern may hold * (attention) and - (MLP)"
        )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    parts = get_gpt_layer_local_spec(
        normalization=config.model.normalization, qk_layernorm=megatron.qk_layernorm
    ).submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=parts.input_layernorm,
        self_attention=parts.self_attention,
        self_attn_bda=parts.self_attn_bda,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=parts.pre_mlp_layernorm, mlp=parts.mlp, mlp_bda=parts.mlp_bda
    )
    return ModuleSpec(
        module=_local_hybrid_stack(),
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
        ),
    )


def _local_hybrid_stack() -> type:
    """HybridStack with PyTorch's norm at its end: Megatron's ends in TransformerEngine's."""
    from megatron.core.models.hybrid.hybrid_block import HybridStack
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    class LocalHybridStack(HybridStack):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, post_layer_norm: bool = True, **kwargs: Any):
            super().__init__(config, *args, post_layer_norm=False, **kwargs)
            self.post_layer_norm = post_layer_norm
            if self.post_process and post_layer_norm:
                self.final_norm = WrappedTorchNorm(
                    config, config.hidden_size, config.layernorm_epsilon
                )

    return LocalHybridStack
