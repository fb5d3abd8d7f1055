"""What TransformerEngine's attention would refuse, or get wrong, in the first forward pass."""

from __future__ import annotations

import os
from typing import Any

import torch

from ..head_layout import HeadLayout
from ..parallel_state.errors import ParallelConfigError

_HALF = (torch.bfloat16, torch.float16)


def check_transformer_engine(config: Any, layout: HeadLayout) -> None:
    """Refuses, when the layer is built, what its core could not do when it runs.

    Raises:
        ParallelConfigError: on every rank alike.
    """
    _check_fp8(config, layout)
    _check_backends(config)


def _check_fp8(config: Any, layout: HeadLayout) -> None:
    if not getattr(config, "fp8", None):
        return
    size = layout.ulysses_parallel_size
    if getattr(config, "fp8_multi_head_attention", False):
        raise ParallelConfigError(
            f"fp8_multi_head_attention=True with ulysses_parallel_size={size}.",
            rule="it hands query, key and value to the attention as FP8 tensors, each rank with "
            "scales of its own; the exchange moves tensors of one scale",
            nearest="fp8_dot_product_attention=True (converted after the exchange), or "
            "ulysses_parallel_size 1.",
        )
    idle = sum(not heads for heads in layout.query_heads)
    if idle:
        raise ParallelConfigError(
            f"fp8={config.fp8!r} with ulysses_parallel_size={size}.",
            f"{layout.local_heads} query heads over {size} ranks leave {idle} without any.",
            "FP8 scales are reduced over all ranks, layer by layer: every rank has an attention",
            f"ulysses_parallel_size of at most {layout.local_heads}, or no fp8.",
        )


def _check_backends(config: Any) -> None:
    half = config.bf16 or config.fp16 or config.params_dtype in _HALF
    softmax_type = getattr(config, "softmax_type", "vanilla")
    not_half = "" if half else f"{config.params_dtype} is not a 16-bit type"
    sinks = "" if softmax_type == "vanilla" else f"softmax_type={softmax_type!r}"
    reasons = {
        "flash": _switched_off("NVTE_FLASH_ATTN") or not_half or sinks,
        "fused": _switched_off("NVTE_FUSED_ATTN") or not_half,
        "unfused": _switched_off("NVTE_UNFUSED_ATTN"),
    }
    if all(reasons.values()):
        raise ParallelConfigError(
            "TransformerEngine's attention without a backend.",
            "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) + ".",
            "one of its three backends can do what the config asks for",
            "attention_backend 'auto', with no NVTE_*_ATTN set; core='sdpa' in with_ulysses.",
        )


def _switched_off(variable: str) -> str:
    # Megatron sets these from config.attention_backend before it builds the layers.
    return f"{variable}=0" if os.environ.get(variable) == "0" else ""
