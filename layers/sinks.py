"""Learnable softmax offsets (attention sinks), of which each Ulysses rank uses its heads'."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes


class SoftmaxOffset(torch.nn.Module):
    """One logit per query head of a tensor-parallel rank, the same on all its Ulysses ranks.

    A rank's gradient is zero but for its own heads; Megatron's sum over data- and
    context-parallel ranks then puts each head's gradient where it belongs, once.

    Args:
        config: TransformerConfig.
        local_heads: query heads of this tensor-parallel rank.
        zeros: start from zeros, as TransformerEngine's own, not from `config.init_method`.
    """

    def __init__(self, config: Any, local_heads: int, *, zeros: bool = False) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        initial = torch.zeros(local_heads, device=device, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(initial)
        # Else the gradient norm would count the heads of the first tensor-parallel rank alone.
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)
        if config.perform_initialization and not zeros:
            config.init_method(self.weight)

    @classmethod
    def build(cls, config: Any, local_heads: int, *, zeros: bool = False) -> SoftmaxOffset | None:
        """None unless `softmax_type` is 'learnable' (a constant offset needs no parameter)."""
        softmax_type = getattr(config, "softmax_type", "vanilla")
        return cls(config, local_heads, zeros=zeros) if softmax_type == "learnable" else None

    def forward(self, heads: range) -> torch.Tensor:
        return self.weight[heads.start : heads.stop]

    def sharded_state_dict(
        self, prefix: str, sharded_offsets: Any, metadata: dict[str, Any] | None
    ) -> dict[str, Any]:
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        tensors: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=(metadata or {}).get("dp_cp_group")
            or parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
        return tensors
