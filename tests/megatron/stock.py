"""Layers of Megatron's own with its own core attention, multi-latent attention included."""

from __future__ import annotations

import copy
from typing import Any

from tests.megatron.small_gpt import local_spec


def stock_spec(config: Any) -> Any:
    """Without Ulysses, at context_parallel_size 1."""
    if not config.multi_latent_attention:
        return local_spec(config)
    from ulysses_mc.layers import with_ulysses

    return with_ulysses(local_spec(config), latent_dot_product())  # which it builds, at size 1


def latent_dot_product() -> type:
    """Megatron's DotProductAttention, which multi-latent attention gives more than it takes."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class LatentDotProductAttention(DotProductAttention):
        def __init__(
            self,
            *,
            config: Any,
            k_channels: int | None = None,
            v_channels: int | None = None,
            **kwargs: Any,
        ) -> None:
            config = copy.copy(config)
            config.kv_channels = v_channels or config.kv_channels  # of its output; scale is given
            super().__init__(config=config, **kwargs)

    return LatentDotProductAttention
