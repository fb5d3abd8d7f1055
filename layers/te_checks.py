"""What TransformerEngine's attention would refuse, or get wrong, in the first forward pass."""

from __future__ import annotations

from typing import Any

from ..head_layout import HeadLayout
from ..parallel_state.errors import ParallelConfigError
from .te_backends import Machine, attention_recipe, passed_over


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


def _check_backends(config: Any) -> None:
    machine, recipe = Machine.this(), attention_recipe(config)
    reasons = passed_over(config, machine, recipe)
    if not all(reasons.values()):
        return
    nearest = "attention_backend 'auto', with no NVTE_*_ATTN set; core='sdpa' in with_ulysses."
    in_fp8 = ""
    if recipe:
        in_fp8 = f" in FP8 by {recipe} ({machine})"
        others = {
            "fp8_dot_product_attention=False": "",
            "fp8_recipe='delayed' (or NVTE_DPA_FP8_RECIPE=DelayedScaling)": "DelayedScaling",
        }
        work = [name for name, other in others.items() if _is_possible(config, machine, other)]
        nearest = " or ".join([*work, "core='sdpa' in with_ulysses"]) + "."
    raise ParallelConfigError(
        f"TransformerEngine's attention{in_fp8} without a backend.",
        "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) + ".",
        "one of its three backends can do what the config asks for",
        nearest,
    )


def _is_possible(config: Any, machine: Machine, recipe: str) -> bool:
    return not all(passed_over(config, machine, recipe).values())
