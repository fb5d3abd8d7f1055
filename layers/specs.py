"""Ready layer specs, for Megatron-LM's `--spec ulysses_mc.layers.specs gpt_layer_te`.

Megatron-LM imports the object and does not call it. Each is made when first asked for, so that
importing this module needs neither TransformerEngine nor a GPU:

    gpt_layer_te, gpt_layer_local            and with the endings _qk_norm (`qk_layernorm`),
                                             _moe (8 or any other number of experts), _mla
                                             (multi-latent attention), _mla_moe
    hybrid_stack_te, hybrid_stack_local      attention, MLP and MoE layers of HybridModel (0.19)
                                             and MambaModel (0.16)

The specs ending in _te need TransformerEngine. Those called _local use PyTorch's fused attention
and norms of ours, which take LayerNorm or RMSNorm from the config and work with
sequence_parallel; `gpt_block_local(config)` adds such a norm after the last layer, where
Megatron otherwise places its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from typing import Any

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from ..parallel_state.errors import ParallelConfigError
from .norm import Norm
from .spec_rewriting import with_norm, with_ulysses

_KINDS: dict[str, dict[str, Any]] = {
    "": {},
    "_qk_norm": {"qk_layernorm": True},
    "_moe": {"num_experts": 8},
    "_mla": {"multi_latent_attention": True},
    "_mla_moe": {"multi_latent_attention": True, "num_experts": 8},
}


def gpt_block_local(config: Any, vp_stage: int | None = None, core: Any = "sdpa") -> Any:
    """The layers of this pipeline stage and the norm after the last, for `GPTModel`.

    Args:
        config: TransformerConfig; decides between dense and MoE layers, kinds of attention and
            norms.
        vp_stage: the chunk of an interleaved pipeline.
        core: see `with_ulysses`.
    """
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=False,
        normalization=config.normalization,
        vp_stage=vp_stage,
    )
    return replace(with_norm(with_ulysses(block, core)), layer_norm=Norm)


def _gpt_layer_te(**kind: Any) -> ModuleSpec:
    if kind.get("num_experts"):
        kind["moe_grouped_gemm"] = True
    return with_ulysses(gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**kind))


def _gpt_layer_local(**kind: Any) -> ModuleSpec:
    return with_norm(with_ulysses(gpt_layer_specs.get_gpt_layer_local_spec(**kind), "sdpa"))


def _hybrid_stack_te() -> ModuleSpec:
    module, name = _hybrid("layer_specs"), "hybrid_stack_spec"
    return with_ulysses(getattr(module, name, None) or module.mamba_stack_spec)


def _hybrid_stack_local() -> ModuleSpec:
    """Without Mamba layers, which need kernels of their own and are refused under Ulysses."""
    block = _hybrid("block")
    stack = getattr(block, "HybridStack", None) or block.MambaStack
    submodules = getattr(block, "HybridStackSubmodules", None) or block.MambaStackSubmodules
    mlp_layer = import_module("megatron.core.ssm.mlp_layer").MLPLayer
    layer_module = import_module("megatron.core.transformer.transformer_layer")
    moe_layer = getattr(layer_module, "MoETransformerLayer", TransformerLayer)
    dense, moe = _gpt_layer_local().submodules, _gpt_layer_local(num_experts=8).submodules
    no_attention = dict(
        input_layernorm=IdentityOp, self_attention=IdentityOp, self_attn_bda=IdentityFuncOp
    )
    no_mlp = dict(pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp)
    return ModuleSpec(
        module=stack,
        submodules=submodules(
            attention_layer=ModuleSpec(TransformerLayer, submodules=replace(dense, **no_mlp)),
            mlp_layer=ModuleSpec(mlp_layer, submodules=replace(dense, **no_attention)),
            moe_layer=ModuleSpec(moe_layer, submodules=replace(moe, **no_attention)),
        ),
    )


def _hybrid(part: str) -> Any:
    """megatron-core 0.19 says hybrid where 0.16 says mamba."""
    try:
        return import_module(f"megatron.core.models.hybrid.hybrid_{part}")
    except ModuleNotFoundError:
        folder = "ssm" if part == "block" else "models.mamba"
        return import_module(f"megatron.core.{folder}.mamba_{part}")


_SPECS: dict[str, Callable[[], ModuleSpec]] = {
    f"gpt_layer_te{ending}": partial(_gpt_layer_te, **k) for ending, k in _KINDS.items()
}
_SPECS |= {
    f"gpt_layer_local{ending}": partial(_gpt_layer_local, **kind) for ending, kind in _KINDS.items()
}
_SPECS |= {"hybrid_stack_te": _hybrid_stack_te, "hybrid_stack_local": _hybrid_stack_local}


@cache
def _spec(name: str) -> ModuleSpec:
    if "_te" in name:
        require_transformer_engine(
            f"ulysses_mc.layers.specs {name}", f"{name.replace('_te', '_local')}."
        )
    return _SPECS[name]()


def require_transformer_engine(request: str, nearest: str) -> None:
    """Refuses layers of TransformerEngine where Megatron does not find it."""
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE:
        raise ParallelConfigError(
            f"{request} without TransformerEngine.",
            rule="layers of TransformerEngine need it: pip install 'ulysses-mc[te]'",
            nearest=nearest,
        )


# Megatron-LM asks by `__import__(module, fromlist=[name])` and then looks into `vars(module)`.
# Python resolves the names of a fromlist only in what has a path.
__path__: list[str] = []


def __getattr__(name: str) -> Any:
    if name not in _SPECS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, _spec(name))
